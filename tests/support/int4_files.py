"""Packs int4 weights as the public tools do, and writes whole checkpoints of them."""

import json
import shutil

import torch

from nvfp4_cute.models.checkpoints import Checkpoint
from nvfp4_cute.models.checkpoints.tensors import TensorWriter

GROUP = 32  # values along K that share a scale, in whole checkpoints
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def compressed_tensors(**weights):
    """A shortened ``quantization_config`` as compressed-tensors 0.20 writes it."""
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64} | weights
    group = {"targets": ["Linear"], "weights": args, "input_activations": None, "format": "pack-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }


def words(nibbles, dim):
    """Packs eight values 0 to 15 along a dimension into an int32, the first one in the lowest bits."""
    eight = nibbles.movedim(dim, -1).unflatten(-1, (-1, 8))
    packed = sum(eight[..., i].long() << 4 * i for i in range(8))
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
    return packed.movedim(-1, dim).contiguous()


def awq_words(columns):
    """[rows, N/8]: value i of a word is column (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight."""
    return words(columns.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 1)


def packed(tool, codes, scale, zero, order=None):
    """The tensors of a layer, by the last part of their names.

    Args:
        codes: 0 to 15, [N, K]. scale: [N, blocks]. zero: 0 to 15, [N, blocks]. order: the block of each K, or None.
    """
    if tool == "awq":
        return {"qweight": awq_words(codes.T), "qzeros": awq_words(zero.T), "scales": scale.T.contiguous()}
    if tool == "gptq":
        blocks = (
            torch.arange(codes.shape[1]) // (codes.shape[1] // scale.shape[1]) if order is None else order
        )
        return {
            "qweight": words(codes.T, 0), "qzeros": words(zero.T - 1 & 15, 1), "scales": scale.T.contiguous(),
            "g_idx": blocks.int(),
        }  # fmt: skip
    shape = {"weight_shape": torch.tensor(codes.shape)}
    return {
        "weight_packed": words(codes, 1),
        "weight_scale": scale,
        "weight_zero_point": words(zero, 0),
    } | shape


def rounded_to_int4(weight, order=None, dtype=torch.float16):
    """Quantizes weights [N, K] in blocks of GROUP, or in the blocks that ``order`` names.

    Returns codes, scales and zero points.
    """
    n, k = weight.shape
    sorted_k = torch.arange(k) if order is None else order.long().argsort(stable=True)
    blocks = weight.float()[:, sorted_k].unflatten(1, (-1, GROUP))
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=2**-14).to(dtype)
    zero = (-low / scale.float()).round().clamp(0, 15).long()
    codes = (blocks / scale.float().unsqueeze(-1)).round().long() + zero.unsqueeze(-1)
    back = torch.empty(n, k, dtype=torch.long)
    back[:, sorted_k] = codes.clamp(0, 15).flatten(1)
    return back, scale, zero


def write_int4(source, to, tool, orders=False):
    """Writes the checkpoint in ``source`` again, with its quantized layers in int4 with zero points.

    Args:
        orders: whether each layer outside experts has its own order of K (desc_act, only in GPTQ).
    """
    checkpoint, generator = Checkpoint(source), torch.Generator().manual_seed(0)
    tensors = {name: checkpoint.files[name] for name in checkpoint.plain}

    def add(prefix, weight, own=False):
        k = weight.shape[1]
        order = torch.randperm(k, generator=generator) // GROUP if own else None
        parts = packed(tool, *rounded_to_int4(weight, order), order)
        tensors.update({f"{prefix}.{name}": tensor for name, tensor in parts.items()})

    for stored in checkpoint.each_linear():
        add(stored.name, stored.dequantize(), orders)
    for prefix in checkpoint.experts:
        for name in checkpoint.tensors_of(prefix):
            if name.endswith("_proj.weight") or name.endswith("_proj.weight_packed"):
                one = name.rpartition(".")[0]
                add(one, checkpoint._read(one, checkpoint.experts[prefix]).dequantize())
    shutil.copytree(source, to, ignore=shutil.ignore_patterns("*.safetensors", "hf_quant_config.json"))
    with TensorWriter(to, [(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    config = json.loads((source / "config.json").read_text())
    own = {"gptq": GPTQ, "awq": AWQ}.get(tool) or compressed_tensors(symmetric=False, group_size=GROUP) | {
        "ignore": ["lm_head", "re:.*gate$"]
    }
    config["quantization_config"] = own
    (to / "config.json").write_text(json.dumps(config))
    return to
