"""Restores pickled block-scaled tensors. Registered with torch, so that ``torch.load`` accepts them with ``weights_only``."""

from importlib import import_module
from typing import Any

import torch

from nvfp4_cute.formats.block_format import format_named


def restored(state: dict[str, Any]) -> Any:
    """Returns the BlockScaledTensor of a pickled ``state``, which names its format. Raises ValueError for an unknown name."""
    block_scaled = import_module(
        "nvfp4_cute.formats.block_scaled"
    )  # imported late, because it imports this module
    fields = dict(state)
    for name in ("data", "scale"):
        dtype = fields.pop(f"{name}_dtype", None)
        if dtype is not None:
            fields[name] = fields[name].view(dtype)
    format = fields.pop("format")
    return block_scaled.quantized_tensor(
        **fields, format=format_named(format) if isinstance(format, str) else format
    )


torch.serialization.add_safe_globals([restored])
