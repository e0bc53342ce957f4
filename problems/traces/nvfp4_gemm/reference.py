"""Computes C = A @ B^T in float32, rounded once."""

from nvfp4_cute.problems.traces.nvfp4 import dequantize, random_scales, random_values


def run(a, b, a_scale, b_scale):
    """Returns C, float16 [M, N]."""
    return (dequantize(a, a_scale) @ dequantize(b, b_scale).T).half()


def generate_inputs(axes_and_scalars, device):
    """Draws random operands."""
    n = axes_and_scalars
    return {
        "a": random_values(n["M"], n["K_bytes"], device=device),
        "b": random_values(n["N"], n["K_bytes"], device=device),
        "a_scale": random_scales(n["M_atoms"], n["K_atoms"], 32, 4, 4, device=device),
        "b_scale": random_scales(n["N_atoms"], n["K_atoms"], 32, 4, 4, device=device),
    }
