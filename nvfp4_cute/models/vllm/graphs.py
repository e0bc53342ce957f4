"""Adds the layers to the key of vLLM's stored graphs, so that vLLM never runs the graph of other layers.

vLLM stores compiled graphs by a hash of its configs, and runs a stored graph without guards. A graph contains the modes of the
layers and expects exactly their tensors. Both change with NVFP4_CUTE_ACTIVATIONS, and when a checkpoint is written again into the
same folder, but vLLM's configs do not.
"""

import hashlib
from importlib.metadata import version
from typing import Any

import torch

from nvfp4_cute.models.vllm.taken import NAME


def kind_of(layer: torch.nn.Module) -> tuple[Any, ...]:
    """Returns a layer's modes, and the names, shapes, strides and dtypes of its tensors."""
    tensors = (*layer.named_buffers(), *layer.named_parameters())
    return (repr(layer), *((name, tuple(t.shape), t.stride(), t.dtype) for name, t in tensors))


def add_to_key(config: Any, name: str, layer: torch.nn.Module) -> None:
    """Adds a layer to ``additional_config``, which vLLM hashes into the key of the model's graphs.

    Args:
        config: vLLM's config of the model.
        name: name of the layer.
        layer: the module that computes it.
    """
    entries = config.additional_config
    if isinstance(entries, dict):  # a platform of another plug-in may have its own class
        before = entries.get(NAME) or version("nvfp4-cute")
        entries[NAME] = hashlib.sha256(repr((before, name, kind_of(layer))).encode()).hexdigest()
