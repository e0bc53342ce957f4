"""Modules of torch.nn with block-scaled weights, for inference."""

from importlib import import_module
from typing import Any

# Public name -> its module, which is imported when the name is first used.
_MODULES = {
    "QuantizedLinear": "linear",
    "MoE": "moe",
    "PersistentMLP": "persistent_mlp",
    "QuantizedEmbedding": "embedding",
    "fuse": "fused",
    "replace_linears": "replace",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
