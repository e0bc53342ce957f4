"""Computes y = A @ x for every batch in float32, rounded once."""

import torch

from nvfp4_cute.problems.traces.nvfp4 import dequantize, random_scales, random_values


def run(a, x, a_scale, x_scale):
    """Returns y, float16 [L, M]."""
    products = [
        dequantize(matrix, matrix_scale) @ dequantize(vector, vector_scale)[0]
        for matrix, vector, matrix_scale, vector_scale in zip(
            a.view(torch.uint8), x.view(torch.uint8)[:, None], a_scale, x_scale, strict=True
        )
    ]
    return torch.stack(products).half()


def generate_inputs(axes_and_scalars, device):
    """Draws random operands."""
    n = axes_and_scalars
    return {
        "a": random_values(n["L"], n["M"], n["K_bytes"], device=device),
        "x": random_values(n["L"], n["K_bytes"], device=device),
        "a_scale": random_scales(n["L"], n["M_atoms"], n["K_atoms"], 32, 4, 4, device=device),
        "x_scale": random_scales(n["L"], 1, n["K_atoms"], 32, 4, 4, device=device),
    }
