"""Keeps vLLM from running a stored graph of other layers.

vLLM stores compiled graphs by its own configs, and runs a stored graph without guards. These configs say nothing about
NVFP4_CUTE_ACTIVATIONS, or about a checkpoint that was written again into the same folder, but a graph holds the layers' modes
and expects exactly their tensors.
"""

import hashlib
from importlib.metadata import version
from typing import Any

import torch

from nvfp4_cute.models.vllm.taken import NAME


def kind_of(layer: torch.nn.Module) -> tuple[Any, ...]:
    """Returns a layer's modes, and the names, extents and dtypes of its tensors."""
    tensors = (*layer.named_buffers(), *layer.named_parameters())
    return (repr(layer), *((name, tuple(t.shape), t.stride(), t.dtype) for name, t in tensors))


def add_to_key(config: Any, name: str, layer: torch.nn.Module) -> None:
    """Adds a layer to the key of the model's graphs: to ``additional_config``, from which vLLM computes it.

    Args:
        config: vLLM's config of the model.
        name: name of the layer.
        layer: the module that computes it.
    """
    entries = config.additional_config
    if isinstance(entries, dict):  # a platform of another plug-in may have its own class
        before = entries.get(NAME) or version("nvfp4-cute")
        entries[NAME] = hashlib.sha256(repr((before, name, kind_of(layer))).encode()).hexdigest()
