"""A folder of a tiny 16-bit model with experts, and what a calibration of it may have seen."""

import torch
from checkpoint_files import write

from nvfp4_cute.models.quantizing.calibrate import Seen

H, I, E = 64, 96, 3


def source(folder, **changes):
    """A tiny 16-bit model: attention, experts, router, embeddings."""
    g = torch.Generator().manual_seed(0)
    rand = lambda *shape: (torch.randn(shape, generator=g) / 8).bfloat16()
    tensors = {
        "model.embed_tokens.weight": rand(32, H),
        "lm_head.weight": rand(32, H),
        "model.norm.weight": rand(H),
    }
    for name, n in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32), ("o_proj", 64)):
        tensors[f"model.layers.0.self_attn.{name}.weight"] = rand(n, H) * (3 if name == "k_proj" else 1)
    tensors["model.layers.0.self_attn.q_proj.bias"] = rand(64)
    tensors["model.layers.0.mlp.gate.weight"] = rand(E, H)
    for e in range(E):
        for name, n, k in (("gate_proj", I, H), ("up_proj", I, H), ("down_proj", H, I)):
            tensors[f"model.layers.0.mlp.experts.{e}.{name}.weight"] = rand(n, k) * (1 + e)
    tensors |= changes
    return write(folder, tensors, None, model_type="qwen3_moe"), tensors


def seen():
    attention = {f"model.layers.0.self_attn.{n}_proj": 4.0 if n == "v" else 2.0 for n in "qkvo"}
    return Seen(attention, {"model.layers.0.mlp.experts": torch.tensor([[3.0, 0.0, 5.0], [7.0, 0.0, 1.0]])})
