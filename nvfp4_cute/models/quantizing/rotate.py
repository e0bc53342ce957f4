"""Rotates the residual stream and the attention heads of a 16-bit model. The model computes the same function.

Rotated weights and activations have no outlying channels, because each rotated value is a sum over a block of values with random
signs. Nothing remains to be computed at run time:

- RMSNorm commutes with an orthogonal R once its factors are in the layers that read it: rms(x R) = rms(x). With x' = x R, layers
  that read x' multiply by W diag(g) R, and layers that add to it by R^T W. (Ashkboos et al., "SliceGPT", arXiv 2401.15024,
  section 3; "QuaRot", arXiv 2404.00456, section 4.)
- Attention is linear in its values, so v_proj may rotate each head's values if o_proj rotates them back.

R has one Hadamard matrix per block of channels, after random signs. The input of down_proj follows a nonlinear function and
is not rotated.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models.checkpoints.names import EMBEDDINGS, OUTPUT
from nvfp4_cute.models.checkpoints.tensors import INDEX, TensorFiles, TensorWriter
from nvfp4_cute.models.quantizing.checkpoint import config_of_16_bits, copy_other_files

# Models whose blocks are x + attention(norm(x)) and x + mlp(norm(x)), with RMSNorm and nothing else between.
MODELS = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
NORMS = ("input_layernorm", "post_attention_layernorm", "norm")
# Linear layers that read the first norm of a block, and those that read the second one.
READ_BY_ATTENTION = ("q_proj", "k_proj", "v_proj")
READ_BY_MLP = ("gate_proj", "up_proj", "w1", "w3", "gate", "shared_expert_gate")
WRITERS = ("o_proj", "down_proj", "w2")
UNCHANGED = ("q_norm", "k_norm", "rotary_emb")
BLOCK_OF = re.compile(r"^(.*\blayers\.\d+)\.")


@dataclass(frozen=True, eq=False)
class Rotation:
    """Random signs, then a Hadamard matrix on every block of channels.

    Attributes:
        signs: float32 [size], 1 or -1.
        matrix: float32 [block, block], orthogonal and symmetric.
    """

    signs: torch.Tensor
    matrix: torch.Tensor

    @classmethod
    def of(cls, size: int, block: int, generator: torch.Generator) -> "Rotation":
        """Makes a rotation of ``size`` channels by blocks of ``block``, or of the largest power of two that divides ``size``."""
        block = min(block, size & -size)
        matrix = torch.ones(1, 1)
        while len(matrix) < block:  # Sylvester's construction
            matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
        signs = 2.0 * torch.randint(0, 2, (size,), generator=generator) - 1
        return cls(signs, matrix / block**0.5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x R``, float32 [..., size]."""
        return ((x * self.signs).unflatten(-1, (-1, len(self.matrix))) @ self.matrix).flatten(-2)


class _Rotated:
    """Tensors of a checkpoint after the rotation."""

    def __init__(self, files: TensorFiles, config: dict[str, Any], block: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        heads = config["num_attention_heads"]
        self.files = files
        self.head_dim = config.get("head_dim") or config["hidden_size"] // heads
        self.residual = Rotation.of(config["hidden_size"], block, generator)
        self.head = Rotation.of(self.head_dim, block, generator)

    def __call__(self, name: str) -> torch.Tensor:
        """Returns a tensor of the rotated model, in the dtype of the file."""
        given = self.files[name]
        module, _, kind = name.rpartition(".")
        layer = module.rpartition(".")[2]
        if layer in UNCHANGED or (kind == "bias" and layer in ("q_proj", "k_proj", *READ_BY_MLP)):
            return given
        if layer in NORMS and kind == "weight":
            return torch.ones_like(given)
        if layer not in (*READ_BY_ATTENTION, *READ_BY_MLP, *WRITERS, *EMBEDDINGS, *OUTPUT):
            raise CheckpointError(
                f"{name} is a tensor that rotations do not support; quantize without --rotate"
            )
        return self._rotated(given.float(), module, layer).to(given.dtype)

    def _rotated(self, value: torch.Tensor, module: str, layer: str) -> torch.Tensor:
        """Rotates a weight [N, K] or a bias [N] of the layer."""
        if layer in EMBEDDINGS:
            return self.residual(value)
        if value.ndim == 2 and layer not in WRITERS:
            value = self.residual(value * self.files[f"{_norm_of(module, layer)}.weight"].float())
        if layer == "v_proj":
            value = self._heads(value.T).T if value.ndim == 2 else self._heads(value)
        if layer == "o_proj" and value.ndim == 2:
            value = self._heads(value)
        if layer in WRITERS:
            value = self.residual(value.T).T if value.ndim == 2 else self.residual(value)
        return value

    def _heads(self, value: torch.Tensor) -> torch.Tensor:
        """Rotates each head's part of the last dimension."""
        return self.head(value.unflatten(-1, (-1, self.head_dim))).flatten(-2)


def _norm_of(module: str, layer: str) -> str:
    """Returns the name of the norm whose output a layer reads."""
    if layer in OUTPUT:
        return f"{module.removesuffix(layer)}model.norm"
    block = BLOCK_OF.match(module)
    assert block is not None
    return f"{block[1]}.{NORMS[layer not in READ_BY_ATTENTION]}"


def rotate_checkpoint(folder: str | Path, out: str | Path, *, block: int = 128, seed: int = 0) -> None:
    """Writes a model with rotated weights, which computes the same function, in the dtypes of the 16-bit model.

    Embedding and output layer are no longer tied, because only the output layer has the factors of the last norm.

    Args:
        folder: folder of a 16-bit model of one of MODELS, one tensor per expert.
        out: a folder without tensors; created if necessary.
        block: channels that a Hadamard matrix mixes, a power of two. Where it does not divide the hidden size or the size of a
            head, the largest power of two that does is used: 64 for 576 channels.
        seed: seed of the random signs.

    Raises:
        CheckpointError: the model is quantized, of another type, or has a tensor that rotations do not support.
        ValueError: ``block`` is not a power of two, or is 1.
    """
    if block < 2 or block & (block - 1):
        raise ValueError(f"block={block} is not a power of two from 2; take 16 or 128")
    source, target = Path(folder), Path(out)
    config = config_of_16_bits(source)
    if config.get("model_type") not in MODELS:
        raise CheckpointError(
            f"{source} is a model of type {config.get('model_type')!r}; rotations support {', '.join(MODELS)}: "
            "quantize without --rotate"
        )
    files = TensorFiles(source)
    tied = {f"{OUTPUT[0]}.weight": "model.embed_tokens.weight"} if config.get("tie_word_embeddings") else {}
    for output, table in tied.items():
        files.entries.setdefault(output, files.entries[table])
    rotated = _Rotated(files, config, block, seed)
    shapes = [(name, files[name].dtype, entry.shape) for name, entry in files.entries.items()]
    with TensorWriter(target, shapes) as writer:
        for name in files:
            writer.write(name, rotated(name))
    copy_other_files(source, target, ("config.json", INDEX))
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2) + "\n")
