"""Which tensors of a 16-bit checkpoint are weights of layers, which are left as they are, and which share a global scale."""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nvfp4_cute.models.checkpoints.tensors import Entry

# What loses most and costs least: the output layer, embeddings, routers; and what is no product of a matrix.
LEFT_OUT = (
    "lm_head",
    "*embed*",
    "*.gate",
    "*.router",
    "*norm*",
    "*conv1d*",
    "*.shared_expert_gate",
    "*rotary*",
)
# Layers that read the same input: engines compute them as one, with one global scale of weights and one of activations.
TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Layer:
    """A layer to quantize.

    Attributes:
        name: its prefix; its weight is ``name + ".weight"``. shape: [N, K]. group: what shares its global scales.
    """

    name: str
    shape: tuple[int, int]
    group: str


def layers_to_quantize(
    entries: dict[str, Entry], block_k: int, keep: Sequence[str] = ()
) -> tuple[list[Layer], dict[str, str]]:
    """Layers to quantize, in the order of the files, and why others are left out.

    Args:
        entries: of all tensors. block_k: values along K that share a scale. keep: patterns of fnmatch beside LEFT_OUT.

    Returns:
        The layers; and name -> reason of every other matrix.
    """
    chosen, left = [], {}
    for tensor, entry in entries.items():
        name, _, suffix = tensor.rpartition(".")
        if suffix != "weight" or entry.dtype not in FLOATS or len(entry.shape) != 2:
            if len(entry.shape) == 3 and entry.dtype in FLOATS and "experts" in tensor:
                left[tensor] = "experts in one tensor; save the model with one tensor an expert"
            continue
        n, k = entry.shape
        pattern = next((p for p in (*keep, *LEFT_OUT) if fnmatch.fnmatchcase(name, p)), None)
        if pattern is not None:
            left[name] = f"by the rule {pattern}"
        elif k % block_k:
            left[name] = f"K={k} is no multiple of {block_k}"
        else:
            chosen.append(Layer(name, (n, k), group_of(name)))
    return chosen, left


def group_of(name: str) -> str:
    """What layers that share global scales have in common; a layer's own name where there are no others."""
    parent, _, child = name.rpartition(".")
    for group in TOGETHER:
        if child in group:
            return f"{parent}.{'+'.join(group)}"
    return name


def groups(layers: Iterable[Layer]) -> dict[str, list[Layer]]:
    """Group -> its layers."""
    found: dict[str, list[Layer]] = {}
    for layer in layers:
        found.setdefault(layer.group, []).append(layer)
    return found
