"""Computes C = A @ B^T for both groups in float32, rounded once."""

from nvfp4_cute.problems.traces.nvfp4 import dequantize, random_scales, random_values


def run(a_0, a_1, b_0, b_1, a_scale_0, a_scale_1, b_scale_0, b_scale_1):
    """Returns C of both groups, float16 [M_g, N]."""
    return (
        (dequantize(a_0, a_scale_0) @ dequantize(b_0, b_scale_0).T).half(),
        (dequantize(a_1, a_scale_1) @ dequantize(b_1, b_scale_1).T).half(),
    )


def generate_inputs(axes_and_scalars, device):
    """Draws random operands."""
    n = axes_and_scalars
    inputs = {}
    for g in (0, 1):
        inputs[f"a_{g}"] = random_values(n[f"M_{g}"], n["K_bytes"], device=device)
        inputs[f"b_{g}"] = random_values(n["N"], n["K_bytes"], device=device)
        inputs[f"a_scale_{g}"] = random_scales(n[f"M_{g}_atoms"], n["K_atoms"], 32, 4, 4, device=device)
        inputs[f"b_scale_{g}"] = random_scales(n["N_atoms"], n["K_atoms"], 32, 4, 4, device=device)
    return inputs
