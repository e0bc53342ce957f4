"""Writes a gpt-oss model as its authors released it: experts in MXFP4 with alternating rows of gate and up, the rest in 16 bits."""

import json

import torch
from checkpoint_files import write

from nvfp4_cute.models.checkpoints.tensors import TensorFiles
from nvfp4_cute.models.quantizing.weights import quantized

SIZES = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def write_gpt_oss(folder, out, model=None):
    """Converts a saved model. ``model`` gets the rounded weights."""
    files, tensors = TensorFiles(folder), {}
    for name in files:
        if not (name.endswith(("gate_up_proj", "down_proj")) and files[name].ndim == 3):
            tensors[name] = files[name]
            continue
        stored = [quantized(w, "mxfp4") for w in files[name].transpose(1, 2).contiguous()]  # [N, K] each
        data = torch.stack([s.data for s in stored])
        tensors[f"{name}_blocks"] = data.view(*data.shape[:2], -1, 16)
        tensors[f"{name}_scales"] = torch.stack([s.scale for s in stored])
        if model is not None:
            own = dict(model.named_parameters())[name]
            own.data.copy_(torch.stack([s.dequantize() for s in stored]).transpose(1, 2))
    config = json.loads((folder / "config.json").read_text())
    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    return write(out, tensors, quantization, **config)
