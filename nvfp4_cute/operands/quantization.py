"""Operands of quantization: float rows, as one matrix or in groups, and the memory of their elements and scales."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from nvfp4_cute import private_api
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import (
    FOUR_OVER_SIX,
    INT8,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    TMA_ALIGN_BYTES,
    BlockFormat,
    FP8_1x128,
    FP8_1xK,
    ScaleLayout,
    torch_dtypes,
)
from nvfp4_cute.formats.block_scaled import check_is_tensor
from nvfp4_cute.formats.block_scales import ScaleRounding, check_scale_rounding
from nvfp4_cute.formats.codecs import FLOAT32_MIN_NORMAL
from nvfp4_cute.formats.global_scale import check_has_global_scale, resolve_global_scale
from nvfp4_cute.formats.silu import silu_mul
from nvfp4_cute.operands import rules
from nvfp4_cute.operands.group_sizes import check_group_sizes, check_offs
from nvfp4_cute.operands.numbers_on_device import numbers_on
from nvfp4_cute.problem import INT32_MAX

# Dtypes and formats with kernels.
KERNEL_DTYPES = (torch.float16, torch.bfloat16)
GROUPED_FORMATS = (NVFP4, FOUR_OVER_SIX, MXFP4, MXFP8_E4M3, MXFP8_E5M2)
KERNEL_FORMATS = frozenset((*GROUPED_FORMATS, FP8_1x128, FP8_1xK, INT8))
# Rows of atoms are along y of the grid, batches along z.
MAX_GRID = 65535
FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class Quantization:
    """Checked operands of a quantization.

    Attributes:
        x, up: [B, M, K] with unit stride in K; ``up`` may be None.
        global_scale: float32 with one element, or [G] for groups, or None.
        offs: int32 [G], the groups' ends (B is then 1), or None.
        data, scale: results in dtypes of the format, contiguous, in the caller's shapes.
        scale_layout: layout of ``scale``.
        atom_rows: rows of scale atoms per batch.
        format: format of the results.
        scale_rounding: rounding of scales that are powers of two.
    """

    x: torch.Tensor
    up: torch.Tensor | None
    global_scale: torch.Tensor | None
    offs: torch.Tensor | None
    data: torch.Tensor
    scale: torch.Tensor
    scale_layout: ScaleLayout
    atom_rows: int
    format: BlockFormat
    scale_rounding: ScaleRounding


def global_scale_of(
    x: torch.Tensor, up: torch.Tensor | None, given: Any, inverse: Any, format: BlockFormat = NVFP4
) -> torch.Tensor | None:
    """Returns the global scale of ``quantize`` as float32 on the device of ``x``, without dimensions or one per batch, or None.

    Raises ValueError for the reasons of ``formats.quantize``.
    """
    if inverse is None and given is None:
        return None
    if inverse is None and isinstance(given, torch.Tensor):
        is_ready = (
            given.is_cuda and given.device == x.device and given.dtype == torch.float32 and not given.ndim
        )
        if is_ready and not given.requires_grad:
            return given
    if inverse is None and type(given) is float and FLOAT32_MIN_NORMAL <= given <= FLOAT32_MAX and x.is_cuda:
        return numbers_on(x.device, [given]).view(())
    if (
        inverse is None
        and isinstance(given, list | tuple)
        and x.is_cuda
        and x.shape[:-2] == (len(given),) != (1,)
    ):
        given = numbers_on(x.device, given).clone()  # the result's own copy, which callers may write to
    if not private_api.is_traced():
        rules.check_memory(x=x, up=up, global_scale=given, global_scale_inv=inverse)
    values = silu_mul(x.detach(), up.detach()) if isinstance(given, str) and up is not None else x.detach()
    return resolve_global_scale(values, given, inverse, format)


def check_up(x: torch.Tensor, up: torch.Tensor | None) -> None:
    """Raises unless ``up`` has the dtype and shape of ``x``."""
    if up is None:
        return
    check_is_tensor("up", up)
    rules.check_choice("dtype of x with up", x.dtype, (*KERNEL_DTYPES, torch.float32))
    if up.dtype != x.dtype or up.shape != x.shape or up.device != x.device:
        raise ValueError(
            f"up is {up.dtype} {list(up.shape)} on {up.device} and x {x.dtype} {list(x.shape)} on {x.device}; silu(x) * up "
            "takes two of one dtype, shape and device"
        )


def check_quantize(
    x: torch.Tensor,
    up: torch.Tensor | None,
    factor: torch.Tensor | None,
    scale_layout: ScaleLayout,
    format: BlockFormat = NVFP4,
    scale_rounding: ScaleRounding = "up",
) -> Quantization:
    """Checks the operands of ``quantize`` for a kernel.

    ``factor`` comes from :func:`global_scale_of`, ``up`` passed :func:`check_up`, and ``format`` is one of ``KERNEL_FORMATS``.

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule.
    """
    rules.check_memory(x=x, up=up, global_scale=factor)
    rules.check_choice("dtype of x", x.dtype, KERNEL_DTYPES)
    rules.check_scale_layout(scale_layout)
    if x.ndim == 0:
        raise ValueError(
            f"x has no dimensions, hence no K; reshape it to [..., K], K a multiple of {format.k_multiple}"
        )
    k = x.shape[-1]
    format.num_k_blocks(k)
    check_scale_rounding(scale_rounding, format)
    *batches, rows = x.shape[:-1] if x.ndim > 1 else (1,)
    matrix = format.scale_shape(rows, k, scale_layout)
    shape = matrix[1:] if x.ndim == 1 and scale_layout == "rowmajor" else (*batches, *matrix)
    result = Result(shape, scale_layout, format, scale_rounding)
    return _quantization(x, up, factor, None, rows, prod(batches), result)


def check_grouped_quantize(
    x: torch.Tensor,
    offs: torch.Tensor,
    up: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    format: BlockFormat = NVFP4,
    scale_rounding: ScaleRounding = "up",
) -> Quantization:
    """Checks the operands of ``grouped_quantize``. Raises as :func:`check_quantize` does."""
    rules.check_tensors({"x": x, "offs": offs} | rules.given(up=up, global_scale=global_scale))
    rules.check_choice("dtype of x", x.dtype, KERNEL_DTYPES)
    if x.ndim != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected [sum M, K]")
    check_up(x, up)
    rows, k = x.shape
    if isinstance(format, BlockFormat) and format.scale_layout != "blocked":
        raise UnsupportedProblem(
            f"format={format.title}: its scales are rows, without padding between groups: call quantize(x, format="
            f"{format.record}) for all rows at once"
        )
    rules.check_choice("format", format, GROUPED_FORMATS)
    format.num_k_blocks(k)
    check_scale_rounding(scale_rounding, format)
    check_has_global_scale(format, global_scale)
    check_group_sizes("offs", offs)
    check_offs(offs, rows)
    factors = rules.global_scales("global_scale", global_scale, len(offs), x.device, allows_list=False)
    shape = format.ragged_scale_shape(rows, k, len(offs))
    return _quantization(x, up, factors, offs, rows, 1, Result(shape, "blocked", format, scale_rounding))


@dataclass(frozen=True)
class Result:
    """The requested result: shape and layout of the scales, format, and rounding of scales."""

    scale_shape: tuple[int, ...]
    scale_layout: ScaleLayout
    format: BlockFormat
    scale_rounding: ScaleRounding


def _quantization(x, up, factor, offs, rows, batches, result: Result) -> Quantization:
    format = result.format
    rules.check_extent("batches", batches, MAX_GRID)
    if format.scale_layout == "blocked":
        rules.check_extent("M", rows, MAX_GRID * format.scale_atom[0])
    else:
        rules.check_extent("blocks of x", batches * rows * format.num_k_blocks(x.shape[-1]), INT32_MAX)
    atom_rows = format.scale_atoms(rows, 1)[0] if offs is None else result.scale_shape[0]
    data_dtype, scale_dtype = torch_dtypes((format.element.quantized_dtype, format.scale.quantized_dtype))
    return Quantization(
        _rows(x.detach(), batches, rows),
        None if up is None else _rows(up.detach(), batches, rows),
        factor,
        offs,
        torch.empty((*x.shape[:-1], format.row_bytes(x.shape[-1])), dtype=data_dtype, device=x.device),
        torch.empty(result.scale_shape, dtype=scale_dtype, device=x.device),
        result.scale_layout,
        atom_rows,
        format,
        result.scale_rounding,
    )


def _rows(x: torch.Tensor, batches: int, rows: int) -> torch.Tensor:
    """Returns [B, M, K] in rows that 16-byte vectors can read, copied if those of ``x`` are not."""
    view = x.reshape(batches, rows, x.shape[-1])
    addresses = [view.data_ptr()]
    addresses += [
        view.element_size() * s for s, n in zip(view.stride()[:2], view.shape[:2], strict=True) if n > 1
    ]
    is_aligned = all(address % TMA_ALIGN_BYTES == 0 for address in addresses)
    return view if view.stride(2) == 1 and is_aligned else view.clone(memory_format=torch.contiguous_format)
