"""Computes C of every group in float32, rounded once."""

import torch

from nvfp4_cute.problems.traces.nvfp4 import dequantize, random_scales, random_values


def run(a, b, a_scale, b_scale, offs):
    """Returns C, bfloat16 [M, N]."""
    c = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
    begin, atoms = 0, 0
    rows, weights = a.view(torch.uint8), b.view(torch.uint8)
    for group, end in enumerate(offs.tolist()):
        if end > begin:
            a_group = dequantize(rows[begin:end], a_scale[atoms:])
            c[begin:end] = (a_group @ dequantize(weights[group], b_scale[group]).T).bfloat16()
        atoms += -(-(end - begin) // 128)
        begin = end
    return c


def generate_inputs(axes_and_scalars, device):
    """Draws random operands, and random groups of rows, some of which are empty."""
    n = axes_and_scalars
    ends = torch.randint(0, n["M"] + 1, (n["G"],), device=device).sort().values
    ends[-1] = n["M"]
    return {
        "a": random_values(n["M"], n["K_bytes"], device=device),
        "b": random_values(n["G"], n["N"], n["K_bytes"], device=device),
        "a_scale": random_scales(n["A_atoms"], n["K_atoms"], 32, 4, 4, device=device),
        "b_scale": random_scales(n["G"], n["N_atoms"], n["K_atoms"], 32, 4, 4, device=device),
        "offs": ends.int(),
    }
