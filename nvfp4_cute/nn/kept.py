"""Models whose layers keep dequantized weights next to their 4-bit ones, while memory lasts."""

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.nn.linear import QuantizedLinear
from nvfp4_cute.nn.options import check_patterns
from nvfp4_cute.terminal import bar

# Fraction of a GPU's memory that stays free for activations and KV caches.
RESERVED_PART = 0.25
# Output layers multiply only the last row of each prompt.
LEAVE = ("lm_head",)


@dataclass
class Kept:
    """Result of ``keep_decoded``.

    Attributes:
        layers: names of layers whose dequantized weights are kept.
        left: name -> reason why the layer's weights are not kept.
        nbytes: bytes of all kept weights, including those of earlier calls.
    """

    layers: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0


def keep_decoded(
    model: torch.nn.Module, *, leave: Sequence[str] = LEAVE, reserved_bytes: int | None = None
) -> Kept:
    """Have the QuantizedLinear layers of ``model`` keep dequantized weights next to their 4-bit ones, while memory lasts.

        >>> from nvfp4_cute import QuantizedLinear
        >>> model = torch.nn.ModuleDict({"up": QuantizedLinear(64, 128, activations="16bit")})
        >>> keep_decoded(model).layers
        ['up']

    From ``decoded.KEPT_ROWS`` rows on, torch multiplies such a layer's kept weights: prefill then has the speed of a 16-bit
    model and takes the memory of both. The kernels for 4-bit weights still multiply fewer rows. Layers with 4-bit activations
    are left alone. Weights are dequantized here, and again after they change, so state dicts may be loaded and tensors swapped
    (``torch.func.functional_call``). Another call, such as one after ``fuse``, decides anew for all layers: kept weights are
    reused, and those of layers to be left are freed.

    Args:
        leave: fnmatch patterns for names of layers to leave alone.
        reserved_bytes: bytes that stay free on each GPU; None for a quarter of its memory.

    Raises:
        TypeError: ``model`` is not a module, or ``leave`` is a string.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; pass a torch.nn.Module, whose QuantizedLinear layers keep weights"
        )
    check_patterns("leave", leave)
    done = Kept()
    for names, layer, members in bar([*_products(model)], desc="decoded weights"):
        reason = next(
            (f"by the pattern {p}" for p in leave for n in names if fnmatch.fnmatchcase(n, p)), None
        )
        if layer.mode != "16bit" or layer.pre_decode:
            reason = "its products do not take 16-bit activations and 4-bit weights"
        nbytes = layer.out_features * layer.in_features * layer.kept_dtype.itemsize
        for member in members:  # frees what they kept before they became one product
            member.forget_kept()
        more = nbytes - layer.kept_nbytes
        if reason is None and more > 0 and more > _room(layer.packed_weight.device, reserved_bytes):
            reason = f"{more} more bytes do not fit outside the reserve"
        for one in (layer, *members):
            one.keep_decoded = reason is None
        if reason is not None:
            layer.forget_kept()
            done.left.update(dict.fromkeys(names, reason))
            continue
        layer.kept()
        done.layers += names
        done.nbytes += nbytes
    return done


def _products(model: torch.nn.Module) -> Iterator[tuple[list[str], QuantizedLinear, list[QuantizedLinear]]]:
    """Iterates over products: names of the layers, the layer that multiplies, and the layers that it consists of."""
    names = {
        m: name for name, m in model.named_modules() if isinstance(m, QuantizedLinear) and m.format == NVFP4
    }
    seen: set[int] = set()
    for layer, name in names.items():
        together = None if layer.shared is None else layer.shared[0]
        if together is None or together.whole is None:
            yield [name], layer, []
        elif id(together) not in seen:
            seen.add(id(together))
            whole, members = together.whole, list(together.layers)
            yield [names[one] for one in members if one in names], whole, members


def _room(device: torch.device, reserved_bytes: int | None) -> float:
    """Returns the bytes available on a device."""
    if device.type != "cuda":
        return float("inf")
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + held - (RESERVED_PART * total if reserved_bytes is None else reserved_bytes)
