"""Bits of the activations that a layer multiplies: what ``activations="auto"`` stands for."""

from typing import Literal

import torch

from nvfp4_cute import backends
from nvfp4_cute.planning.arch import has_fp4_mma

Activations = Literal["nvfp4", "16bit", "auto"]
Mode = Literal["nvfp4", "16bit"]
CHOICES = ("nvfp4", "16bit", "auto")


def check_activations(activations: str) -> None:
    """Raise ValueError for an unknown choice."""
    if activations not in CHOICES:
        raise ValueError(f'activations={activations!r} is unknown; use "nvfp4", "16bit" or "auto"')


def mode_of(activations: Activations, backend: str, device: torch.device) -> Mode:
    """What a layer on ``device`` does with its activations.

    "auto" is "16bit" on a GPU whose tensor cores do not multiply FP4: there weights are decoded in any case, activations of 16
    bits are exact, and nothing has to quantize them. Elsewhere, on the CPU too, it is "nvfp4".

    Args:
        activations: as the layer was asked. backend: of the layer, as of ``gemm``. device: of its weights.
    """
    if activations != "auto":
        return activations
    if device.type == "meta" or backends.resolve(backend, device) == "reference":
        return "nvfp4"
    return "nvfp4" if has_fp4_mma(backends.gpu_of(backend, device).arch) else "16bit"
