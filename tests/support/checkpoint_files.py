"""Writes small checkpoints of every convention with random weights."""

import json

import torch

from nvfp4_cute.models.checkpoints.tensors import TensorWriter

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


def write(folder, tensors, quantization, **config):
    """A folder of config.json and one safetensors file."""
    with TensorWriter(folder, [(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    config = {"model_type": "llama"} | config
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def nvfp4(prefix, n=16, k=64, seed=0):
    """A ModelOpt layer: random codes, scales near one."""
    g = torch.Generator().manual_seed(seed)
    return {
        f"{prefix}.weight": torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g),
        f"{prefix}.weight_scale": (torch.rand(n, k // 16, generator=g) + 0.5).to(torch.float8_e4m3fn),
        f"{prefix}.weight_scale_2": torch.tensor(0.01 + 0.001 * seed),
        f"{prefix}.input_scale": torch.tensor(0.002 + 0.001 * seed),
    }


def experts(prefix, count=3, width=16, features=32):
    """ModelOpt experts; gate and up of one expert have different global scales."""
    tensors, seed = {}, 0
    for e in range(count):
        for name, n, k in (
            ("gate_proj", width, features),
            ("up_proj", width, features),
            ("down_proj", features, width),
        ):
            tensors |= nvfp4(f"{prefix}.{e}.{name}", n, k, seed := seed + 1)
    return tensors
