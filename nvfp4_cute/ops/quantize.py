"""``quantize`` and ``grouped_quantize``: 16-bit floats, or silu(x) * up, to blocks of a format in one pass."""

from dataclasses import replace
from typing import Any, Literal, cast, overload

import torch

from nvfp4_cute import backends, private_api
from nvfp4_cute.backends.calls import call
from nvfp4_cute.backends.host_floats import ieee_floats
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_format import NVFP4, BlockFormat, as_format
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, NVFP4Tensor, ScaleLayout, check_is_tensor
from nvfp4_cute.formats.block_scales import Method, ScaleRounding, check_scale_rounding, with_method
from nvfp4_cute.formats.global_scale import PER_ROW, check_has_global_scale, is_per_row, resolve_global_scale
from nvfp4_cute.formats.silu import silu_mul
from nvfp4_cute.launch.simt import FindAndQuantizeTask, QuantizeScaledRowsTask, QuantizeTask
from nvfp4_cute.operands import quantization, rules
from nvfp4_cute.operands.group_sizes import remember_ends
from nvfp4_cute.operands.quantization import KERNEL_DTYPES, KERNEL_FORMATS
from nvfp4_cute.operands.results import block_scaled_tensor
from nvfp4_cute.ops.global_scale import check_times, find_global_scale, is_for_kernel, new_scalars
from nvfp4_cute.planning.arch.simt import AMAX_SMALL


@overload
def quantize(
    x: torch.Tensor,
    *,
    up: torch.Tensor | None = None,
    global_scale: float | torch.Tensor | Literal["auto", "per_batch", "per_row"] | None = None,
    global_scale_inv: float | torch.Tensor | None = None,
    scale_layout: ScaleLayout | None = None,
    method: Method = "amax",
    backend: str = "auto",
) -> NVFP4Tensor: ...


@overload
def quantize(
    x: torch.Tensor,
    *,
    format: BlockFormat | str,
    up: torch.Tensor | None = None,
    global_scale: float | torch.Tensor | Literal["auto", "per_batch", "per_row"] | None = None,
    global_scale_inv: float | torch.Tensor | None = None,
    scale_layout: ScaleLayout | None = None,
    scale_rounding: ScaleRounding = "up",
    method: Method = "amax",
    backend: str = "auto",
) -> BlockScaledTensor: ...


def quantize(
    x: torch.Tensor,
    *,
    format: BlockFormat | str = NVFP4,
    up: torch.Tensor | None = None,
    global_scale: float | torch.Tensor | Literal["auto", "per_batch", "per_row"] | None = None,
    global_scale_inv: float | torch.Tensor | None = None,
    scale_layout: ScaleLayout | None = None,
    scale_rounding: ScaleRounding = "up",
    method: Method = "amax",
    backend: str = "auto",
) -> BlockScaledTensor:
    """Quantize along the last dimension to NVFP4 or another format, exactly as ``formats.quantize`` specifies.

        >>> quantize(torch.randn(40, 512).bfloat16(), global_scale="auto").data.shape
        torch.Size([40, 256])
        >>> gate, up = torch.randn(2, 40, 512).bfloat16()
        >>> quantize(gate, up=up).shape  # silu(gate) * up
        (40, 512)
        >>> quantize(torch.randn(8, 200, 512), global_scale="per_batch").global_scale.shape  # weights of 8 experts
        torch.Size([8])

    float16 and bfloat16 on a GPU (or on the emulator) take one kernel launch, which reads ``x`` once and writes data and scales
    with their padding; a CUDA graph can capture it. ``formats.quantize`` computes everything else with torch operations,
    whatever the backend: float32 and float64, CPU tensors, and FP8_128x128. Both give the same bits.

    Args:
        x: float16, bfloat16, float32 or float64 [..., K], with K a multiple of the format's block (NVFP4 16, MX formats 32);
            copied if rows are not contiguous or not 16-byte aligned. Infinities saturate; a NaN makes its block NaN.
        format: a record, such as ``nvfp4_cute.MXFP4``, or its name, "mxfp4".
        up: of the dtype and shape of ``x``; quantizes ``silu(x) * up``, the middle of a gated layer, computed in float32 by the
            operations that ``nvfp4_cute.formats.silu`` lists, so the bits are the same everywhere. ``x`` and ``up`` may be the
            halves ``h[:, :I]`` and ``h[:, I:]`` of one tensor.
        global_scale: the factor by which dequantizing multiplies, amax / 2688; only NVFP4 has one. A number, a tensor with one
            element, None, or "auto" (computed: for a small 16-bit matrix in the same launch, otherwise in launches before it).
            For [batches..., M, K], such as the weights of all experts, also one per batch: a tensor or list [batches...], or
            "per_batch" (computed). "per_row": that of every row, [..., M], found in the launch that quantizes; rows are then
            independent of each other, and nothing needs calibration. Products multiply their results by it.
        global_scale_inv: the inverse, for callers with that convention.
        scale_layout: "blocked" ([batches..., rm, rk, 32, 4, 4]) or "rowmajor" ([..., K / block]); None for the format's own.
        scale_rounding: rounds scales that are powers of two "up" or "down" (``formats.block_scales.scale_codes``).
        method: "amax", or, for NVFP4, "four_over_six": scales each block so that its largest value becomes 6 or 4, whichever has
            the smaller squared error (``formats.four_over_six``); "auto" is then amax / 1536. The squared error of normally
            distributed values is 16 % smaller.
        backend: "auto", "cuda", "emulator", "emulator:ARCH", or "reference".

    Returns:
        An NVFP4Tensor with uint8 data and float8_e4m3fn scales, contiguous, on the device of ``x``; for another format, a
        BlockScaledTensor.

    Raises:
        TypeError, ValueError: an argument breaks a rule of ``formats.quantize``.
        UnsupportedTarget: the GPU has no kernel.
        UnsupportedProblem: there are more rows or batches than fit in a grid.
    """
    format = with_method(as_format("format", format), method)
    check_scale_rounding(scale_rounding, format)
    layout = scale_layout or format.scale_layout
    if private_api.is_traced():  # the custom op (ops.library) that a traced graph keeps
        return _traced(x, format, up, global_scale, global_scale_inv, layout, scale_rounding, backend)
    check_is_tensor("x", x)
    name = backends.resolve(backend, x.device)
    quantization.check_up(x, up)
    if scale_layout:
        rules.check_scale_layout(layout)
        block_scaled.check_scale_layout(layout, format)
    check_has_global_scale(format, global_scale, global_scale_inv)
    if name == "reference" or x.dtype not in KERNEL_DTYPES or format not in KERNEL_FORMATS:
        rules.check_memory(x=x, up=up, global_scale=global_scale)
        with ieee_floats():
            return block_scaled.quantize(
                x if up is None else silu_mul(x.detach(), up.detach()),
                format=format,
                global_scale=global_scale,
                global_scale_inv=global_scale_inv,
                scale_layout=layout,
                scale_rounding=scale_rounding,
            )
    if global_scale_inv is None and is_per_row(global_scale) and x.ndim > 1:
        of_rows = ("quantize_rows", up is None, layout, format)
        inputs = [x] if up is None else [x, up]
        data, scale, found = call(backend, of_rows, inputs, [], _check_rows, x, up, layout, format)
        return block_scaled_tensor(data, scale, found, tuple(x.shape), layout, format)
    if up is None and global_scale_inv is None and _is_one_for_all(x, global_scale):
        return find_and_quantize(x, scale_layout=layout, format=format, backend=backend)[0]
    factor = quantization.global_scale_of(x, up, global_scale, global_scale_inv, format)
    if factor is not None and factor.ndim and x.numel():
        return _quantize_each(x, up, factor, layout, format, backend)
    made = (layout, format, scale_rounding)
    settings = ("quantize", up is None, factor is None, *made)
    inputs = [x] if up is None else [x, up]
    if factor is not None:
        inputs.append(factor)
    data, scale = call(backend, settings, inputs, [], _check, x, up, factor, *made)
    return block_scaled_tensor(data, scale, factor, tuple(x.shape), layout, format)


def find_and_quantize(
    x: torch.Tensor,
    *times: torch.Tensor,
    scale_layout: ScaleLayout = "blocked",
    format: BlockFormat = NVFP4,
    backend: str = "auto",
) -> tuple[NVFP4Tensor, list[torch.Tensor]]:
    """Quantizes ``x`` to NVFP4 with its global scale "auto", and multiplies each of ``times`` by that scale.

    A float16 or bfloat16 matrix without gaps of up to 65,536 values, on a GPU or on the emulator, takes one launch; others take
    those of ``find_global_scale`` and ``quantize``. Both give the same bits. On an H100, one launch took 0.8 to 0.9 of the time
    of two for up to 16,384 values, and 0.97 to 1.03 of it from 57,344 values on (measured).

    Args:
        x: [..., K].
        times: see ``find_global_scale``.
        scale_layout, backend: see :func:`quantize`.
        format: NVFP4 or FOUR_OVER_SIX.

    Raises what ``find_global_scale`` and :func:`quantize` raise.
    """
    check_times(times)
    if x.ndim != 2 or x.numel() > AMAX_SMALL or not x.is_contiguous() or not is_for_kernel(x, backend):
        factor, *products = find_global_scale(x, *times, format=format, backend=backend)
        made: BlockScaledTensor = quantize(
            x, format=format, global_scale=factor, scale_layout=scale_layout, backend=backend
        )
    else:
        settings = ("find_and_quantize", len(times), scale_layout, format)
        outs = call(backend, settings, [x, *times], [], _check_found, x, times, scale_layout, format)
        data, scale, factor, *products = outs
        made = block_scaled_tensor(data, scale, factor, tuple(x.shape), scale_layout)
    return cast(NVFP4Tensor, made), products


def grouped_quantize(
    x: torch.Tensor,
    offs: torch.Tensor,
    *,
    format: BlockFormat | str = NVFP4,
    up: torch.Tensor | None = None,
    global_scale: torch.Tensor | Literal["per_row"] | None = None,
    scale_rounding: ScaleRounding = "up",
    method: Method = "amax",
    backend: str = "auto",
) -> BlockScaledTensor:
    """Quantize groups of rows to NVFP4, or to an MX format, in one launch: the ``a`` of ``grouped_gemm`` with ``offs``.

        >>> rows, offs = torch.randn(47, 512).bfloat16(), torch.tensor([40, 47], dtype=torch.int32)
        >>> grouped_quantize(rows, offs).shape
        (47, 512)

    Args:
        x: float16 or bfloat16 [rows, K], rows contiguous and a multiple of 16 bytes apart.
        offs: int32 [G] on the device of ``x``, the row where each group ends, ascending, at most the number of rows, without a
            leading 0: ``rows_per_group.cumsum(0, dtype=torch.int32)``. The device reads it. Other values raise on the CPU; on a
            GPU they are undefined behavior, which :class:`nvfp4_cute.debug` checks for.
        format: NVFP4, MXFP4, MXFP8_E4M3 or MXFP8_E5M2, as a record or by name, such as "mxfp4".
        up: of the dtype and shape of ``x``; quantizes ``silu(x) * up``, as in :func:`quantize`.
        global_scale: float32 [G] on the device, one per group; "per_row" (found, [rows, 1]); or None.
        scale_rounding, method, backend: see :func:`quantize`.

    Returns:
        A BlockScaledTensor [rows, K] with ``scale_layout="ragged"``. Its scales are [rows // 128 + G, ceil(blocks of K / 4),
        32, 4, 4]; every group begins a new row of atoms and has ceil(M_g / 128) of them. Padding is zero, and so are the scales
        after the last group. Rows after the last group are not written.

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule.
        UnsupportedTarget: the GPU has no kernel.
    """
    format = with_method(as_format("format", format), method)
    if isinstance(global_scale, str):
        return _with_scaled_rows(x, offs, format, up, global_scale, backend)
    data, scale = grouped_quantize_parts(
        x,
        offs,
        format=format,
        up=up,
        global_scale=global_scale,
        scale_rounding=scale_rounding,
        backend=backend,
    )
    return block_scaled_tensor(data, scale, global_scale, tuple(x.shape), "ragged", format)


def _with_scaled_rows(x, offs, format: BlockFormat, up, word: str, backend: str) -> BlockScaledTensor:
    """Quantizes groups of rows with a global scale per row."""
    rules.check_choice("global_scale", word, (PER_ROW,))
    check_has_global_scale(format, word)
    if private_api.is_traced():
        made = torch.ops.nvfp4_cute.quantize_scaled_rows(x, up, offs, "blocked", format.name, backend)
        data, scale, found = made
    else:
        inputs = [t for t in (x, up, offs) if t is not None]
        settings = ("grouped_quantize_rows", up is None, format)
        data, scale, found = call(backend, settings, inputs, [], _check_groups_of_rows, x, offs, up, format)
        remember_ends(scale, offs)
    return block_scaled_tensor(data, scale, found, tuple(x.shape), "ragged", format)


def grouped_quantize_parts(
    x: torch.Tensor,
    offs: torch.Tensor,
    *,
    format: BlockFormat | str = NVFP4,
    up: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    scale_rounding: ScaleRounding = "up",
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns data and scale of :func:`grouped_quantize`."""
    format = as_format("format", format)
    if private_api.is_traced():  # the custom op (ops.library) that a traced graph keeps
        made_of = (format.name, up, global_scale, scale_rounding)
        return torch.ops.nvfp4_cute.grouped_quantize(x, offs, *made_of, backend)
    made = (format, scale_rounding)
    settings = ("grouped_quantize", up is None, global_scale is None, *made)
    inputs = [t for t in (x, up, global_scale, offs) if t is not None]
    data, scale = call(backend, settings, inputs, [], _check_groups, x, offs, up, global_scale, *made)
    remember_ends(scale, offs)
    return data, scale


def _is_one_for_all(x: torch.Tensor, global_scale: Any) -> bool:
    """Returns whether one global scale has to be computed for all of ``x``."""
    return isinstance(global_scale, str) and (
        global_scale == "auto"
        or (global_scale == "per_batch" and x.ndim < 3)
        or (is_per_row(global_scale) and x.ndim < 2)
    )


def _quantize_each(x, up, factors, scale_layout, format, backend) -> BlockScaledTensor:
    """Quantizes [batches..., M, K] to NVFP4 with one global scale per batch, in one launch, as groups of M rows."""
    *batches, rows, k = x.shape
    count = factors.numel()
    ends = torch.arange(rows, count * rows + 1, rows, dtype=torch.int32, device=x.device)
    x_rows, up_rows = x.reshape(-1, k), None if up is None else up.reshape(-1, k)
    data, scale = grouped_quantize_parts(
        x_rows, ends, format=format, up=up_rows, global_scale=factors.reshape(-1), backend=backend
    )
    shape = NVFP4.scale_shape(rows, k)
    scale = scale[: count * shape[0]].view(*batches, *shape)
    data = data.view(*batches, rows, NVFP4.row_bytes(k))
    result = block_scaled_tensor(data, scale, factors, tuple(x.shape), "blocked")
    return result.with_scale_layout(scale_layout)


def _check(x, up, factor, scale_layout, format, scale_rounding) -> tuple[QuantizeTask, list[torch.Tensor]]:
    """Returns the task of ``quantize`` and the tensors that it writes."""
    operands = quantization.check_quantize(x, up, factor, scale_layout, format, scale_rounding)
    return QuantizeTask(operands), [operands.data, operands.scale]


def _check_rows(x, up, scale_layout, format) -> tuple[QuantizeTask, list[torch.Tensor]]:
    """Returns the task of ``quantize`` with a global scale per row, and the tensors that it writes."""
    found = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    operands = quantization.check_quantize(x, up, found, scale_layout, format)
    return QuantizeScaledRowsTask(operands), [operands.data, operands.scale, found]


def _check_found(x, times, scale_layout, format) -> tuple[FindAndQuantizeTask, list[torch.Tensor]]:
    """Returns the task of ``find_and_quantize`` and the tensors that it writes."""
    rules.check_memory(**{f"times[{i}]": factor for i, factor in enumerate(times)})
    factor, *products = new_scalars(1 + len(times), x.device)
    operands = quantization.check_quantize(x, None, factor, scale_layout, format)
    task = FindAndQuantizeTask(operands, tuple(times), tuple(products))
    return task, [operands.data, operands.scale, factor, *products]


def _check_groups(
    x, offs, up, global_scale, format, scale_rounding
) -> tuple[QuantizeTask, list[torch.Tensor]]:
    """Returns the task of ``grouped_quantize`` and the tensors that it writes."""
    operands = quantization.check_grouped_quantize(x, offs, up, global_scale, format, scale_rounding)
    return QuantizeTask(operands), [operands.data, operands.scale]


def _check_groups_of_rows(x, offs, up, format) -> tuple[QuantizeTask, list[torch.Tensor]]:
    """Returns the task of ``grouped_quantize`` with a global scale per row, and the tensors that it writes."""
    q = quantization.check_grouped_quantize(x, offs, up, None, format)
    found = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    return QuantizeScaledRowsTask(replace(q, global_scale=found)), [q.data, q.scale, found]


def _traced(
    x, format, up, global_scale, global_scale_inv, scale_layout, scale_rounding, backend
) -> BlockScaledTensor:
    check_has_global_scale(format, global_scale, global_scale_inv)
    if is_per_row(global_scale) and global_scale_inv is None and x.ndim > 1:
        of_rows = torch.ops.nvfp4_cute.quantize_scaled_rows(x, up, None, scale_layout, format.name, backend)
        data, scale, found = of_rows
        return block_scaled.quantized_tensor(data, scale, found, tuple(x.shape), format, scale_layout)
    is_auto = isinstance(global_scale, str)
    values = silu_mul(x, up) if is_auto and up is not None else x
    factor = resolve_global_scale(values, global_scale, global_scale_inv, format)
    made = (scale_layout, format.name, scale_rounding)
    data, scale = torch.ops.nvfp4_cute.quantize(x, up, factor, *made, backend)
    if format.stored == NVFP4:
        return NVFP4Tensor(data, scale, factor, tuple(x.shape), scale_layout)
    return BlockScaledTensor(data, scale, factor, tuple(x.shape), scale_layout, format=format)
