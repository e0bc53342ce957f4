"""Computes a layer of experts in float32. Rows are rounded to NVFP4 before each product, and to bfloat16 after the second."""

import torch

from nvfp4_cute.problems.traces.nvfp4 import dequantize, random_scales, random_values, through_nvfp4


def run(x, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale):
    """Returns y, bfloat16 [T, H]."""
    rows = through_nvfp4(x)
    w13, w2 = w13.view(torch.uint8), w2.view(torch.uint8)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in topk_ids.unique().tolist():
        tokens, choice = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = (rows[tokens] @ dequantize(w13[expert], w13_scale[expert]).T).chunk(2, dim=1)
        hidden = through_nvfp4(gate * torch.sigmoid(gate) * up)
        out = (hidden @ dequantize(w2[expert], w2_scale[expert]).T).bfloat16().float()
        y.index_add_(0, tokens, out * topk_weights[tokens, choice, None])
    return y.bfloat16()


def generate_inputs(axes_and_scalars, device):
    """Draws random rows and weights. Every row has random experts, with weights that add up to 1."""
    n = axes_and_scalars
    logits = torch.randn(n["T"], n["E"], device=device)
    top, ids = logits.topk(n["TOPK"], dim=1)
    small = {
        "w13_scale": random_scales(n["E"], n["I2_rows"], n["H_atoms"], 32, 4, 4, device=device),
        "w2_scale": random_scales(n["E"], n["H_rows"], n["I_atoms"], 32, 4, 4, device=device),
    }
    return {
        "x": torch.randn(n["T"], n["H"], dtype=torch.bfloat16, device=device),
        "topk_ids": ids.int(),
        "topk_weights": top.softmax(dim=1),
        "w13": random_values(n["E"], n["I2"], n["H_bytes"], device=device),
        "w2": random_values(n["E"], n["H"], n["I_bytes"], device=device),
        **{name: (scale.float() / 16).to(torch.float8_e4m3fn) for name, scale in small.items()},
    }
