"""Bits of the activations that a layer multiplies: what ``activations="auto"`` stands for."""

import warnings
from functools import cache
from typing import Literal

import torch

from nvfp4_cute import backends
from nvfp4_cute.planning.arch import has_fp4_mma, is_weight_only

Activations = Literal["nvfp4", "16bit", "auto"]
Mode = Literal["nvfp4", "16bit"]
CHOICES = ("nvfp4", "16bit", "auto")


def check_activations(activations: str) -> None:
    """Raise ValueError for an unknown choice."""
    if activations not in CHOICES:
        raise ValueError(f'activations={activations!r} is unknown; use "nvfp4", "16bit" or "auto"')


def mode_of(activations: Activations, backend: str, device: torch.device) -> Mode:
    """What a layer on ``device`` does with its activations.

    Where no kernel multiplies quantized activations (sm_80 to sm_89) "nvfp4" is "16bit", too, and a warning says so.

    "auto" is "16bit" on a GPU whose tensor cores do not multiply FP4: there weights are decoded in any case, activations of 16
    bits are exact, and nothing has to quantize them. Elsewhere, on the CPU too, it is "nvfp4".

    Args:
        activations: as the layer was asked. backend: of the layer, as of ``gemm``. device: of its weights.
    """
    if activations == "16bit":
        return "16bit"
    if device.type == "meta" or backends.resolve(backend, device) == "reference":
        return "nvfp4"
    if activations == "nvfp4":
        return "16bit" if must_keep_16_bits(backend, device) else "nvfp4"
    return "nvfp4" if has_fp4_mma(backends.gpu_of(backend, device).arch) else "16bit"


def must_keep_16_bits(backend: str, device: torch.device) -> bool:
    """Whether no kernel there multiplies quantized activations (sm_80 to sm_89); a warning says so, once."""
    if device.type == "meta" or backends.resolve(backend, device) == "reference":
        return False
    arch = backends.gpu_of(backend, device).arch
    if is_weight_only(arch):
        _warn(arch)
    return is_weight_only(arch)


@cache
def _warn(arch: str) -> None:
    warnings.warn(
        f"{arch} multiplies no quantized activations: layers that ask for them are weight-only here, with activations of 16 "
        'bits; pass activations="16bit" to ask for that',
        stacklevel=4,
    )
