"""How layers treat their activations: the meaning of each value of a layer's ``activations``."""

import warnings
from functools import cache
from typing import Any, Literal, get_args

import torch

from nvfp4_cute import backends
from nvfp4_cute.experts.checks import PerRowActivations, has_row_scales, per_row_name
from nvfp4_cute.formats.block_format import (
    INT8,
    MXFP4,
    MXFP4_FP8,
    MXFP8_E4M3,
    NVFP4,
    BlockFormat,
    FP8_1x128,
    FP8_1xK,
    FP8_128x128,
)
from nvfp4_cute.operands.rules import check_choice
from nvfp4_cute.planning.arch import has_fp4_mma, is_weight_only

Activations = Literal["nvfp4", "nvfp4_four_over_six", PerRowActivations, "16bit", "auto"]
Mode = Literal["nvfp4", "nvfp4_four_over_six", PerRowActivations, "16bit"]
LayerMode = Literal[
    "nvfp4", "nvfp4_four_over_six", PerRowActivations, "mxfp4", "mxfp8_e4m3", "fp8", "int8", "16bit"
]
CHOICES = get_args(Activations)
# Format of the weights -> format to which activations are quantized, and the name of that choice.
ROWS: dict[BlockFormat, tuple[BlockFormat, LayerMode]] = {
    NVFP4: (NVFP4, "nvfp4"),
    MXFP4: (MXFP4, "mxfp4"),
    MXFP8_E4M3: (MXFP8_E4M3, "mxfp8_e4m3"),
    FP8_128x128: (FP8_1x128, "fp8"),
    MXFP4_FP8: (FP8_1xK, "fp8"),
    INT8: (INT8, "int8"),
}


def check_activations(activations: str | None, format: BlockFormat = NVFP4) -> Any:
    """Returns the choice for weights of ``format``. None means quantized activations, or 16 bits for int4.

    Weights that were prepared for FP8 rows go with no others.

    Raises:
        ValueError: the choice is unknown, or no layer has weights of this format.
    """
    if format == NVFP4:
        if activations not in (None, *CHOICES):
            raise ValueError(f"activations={activations!r} is unknown; use one of {', '.join(CHOICES)}")
        return activations or "nvfp4"
    if format not in ROWS and not format.is_int4:
        known = ", ".join(one.title for one in ROWS)
        raise ValueError(f"format={format} is not one of weights of a layer; use {known} or an int4_format")
    choices: tuple[str, ...] = ("16bit",) if format.is_int4 else (ROWS[format][1], "16bit")
    if format == MXFP4_FP8:
        choices = choices[:1]
    check_choice("activations", activations or choices[0], choices)
    return activations or choices[0]


def rows_format(format: BlockFormat) -> BlockFormat:
    """Returns the format to which activations are quantized for weights of ``format``."""
    return ROWS[format][0]


def layer_mode(
    activations: Any, backend: str, device: torch.device, finds_row_scales: bool = False
) -> LayerMode:
    """Resolves a choice that :func:`check_activations` returned for a layer on ``device``.

    finds_row_scales: whether quantized activations have a global scale per row, as if ``activations`` said so.
    """
    if activations in CHOICES:
        mode = mode_of(activations, backend, device)
        adds = finds_row_scales and mode != "16bit" and not has_row_scales(mode)
        return per_row_name(mode) if adds else mode
    return "16bit" if must_keep_16_bits(backend, device) else activations


def mode_of(activations: Activations, backend: str, device: torch.device) -> Mode:
    """Resolves a choice for NVFP4 weights to the mode of a layer on ``device``.

    Where no kernel multiplies quantized activations (sm_80 to sm_89), "nvfp4" also resolves to "16bit", with a warning.

    "auto" is "16bit" on a GPU whose tensor cores do not multiply FP4. Such a GPU dequantizes the weights anyway, 16-bit
    activations are exact, and no launch has to quantize them. On other GPUs and on the CPU, "auto" is "nvfp4".

    Args:
        activations: the layer's choice.
        backend: the layer's backend; see ``gemm``.
        device: device of its weights.
    """
    if activations == "16bit":
        return "16bit"
    if device.type == "meta" or backends.resolve(backend, device) == "reference":
        return "nvfp4" if activations == "auto" else activations
    if activations != "auto":
        return "16bit" if must_keep_16_bits(backend, device) else activations
    return "nvfp4" if multiplies_fp4(backend, device) else "16bit"


def multiplies_fp4(backend: str, device: torch.device) -> bool:
    """Returns whether a GPU runs the backend's kernels whose tensor cores multiply FP4."""
    if device.type == "meta" or backends.resolve(backend, device) == "reference":
        return False
    return has_fp4_mma(backends.gpu_of(backend, device).arch)


def must_keep_16_bits(backend: str, device: torch.device) -> bool:
    """Returns whether the device lacks kernels for quantized activations (sm_80 to sm_89), and warns once if so."""
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
