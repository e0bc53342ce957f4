"""Computes C = silu(A @ B1^T) * (A @ B2^T) in float32, rounded once."""

import torch

from nvfp4_cute.problems.traces.nvfp4 import dequantize, random_scales, random_values


def run(a, b1, b2, a_scale, b1_scale, b2_scale):
    """Returns C, float16 [M, N]."""
    rows = dequantize(a, a_scale)
    gate, up = rows @ dequantize(b1, b1_scale).T, rows @ dequantize(b2, b2_scale).T
    return (gate * torch.sigmoid(gate) * up).half()


def generate_inputs(axes_and_scalars, device):
    """Draws random operands. Scales of A are small, so that the product of two sums over K stays in float16's range."""
    n = axes_and_scalars
    weights = {name: random_values(n["N"], n["K_bytes"], device=device) for name in ("b1", "b2")}
    weight_scales = {
        f"{name}_scale": random_scales(n["N_atoms"], n["K_atoms"], 32, 4, 4, device=device)
        for name in weights
    }
    small = random_scales(n["M_atoms"], n["K_atoms"], 32, 4, 4, device=device).float() / 16
    return {
        "a": random_values(n["M"], n["K_bytes"], device=device),
        "a_scale": small.to(torch.float8_e4m3fn),
        **weights,
        **weight_scales,
    }
