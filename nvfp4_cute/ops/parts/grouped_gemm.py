"""Grouped GEMM on parts: C_g = alpha_g * A_g @ B_g^T, with block-scaled or 16-bit A, many groups in one launch."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from nvfp4_cute import private_api
from nvfp4_cute.backends.calls import call
from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.formats.block_scaled import ScaleLayout
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.launch.task import Task
from nvfp4_cute.operands import grouped
from nvfp4_cute.operands.grouped import Result, Weights
from nvfp4_cute.operands.numbers_on_device import numbers_of
from nvfp4_cute.operands.results import as_results, as_stored, flat_outputs, new_outputs
from nvfp4_cute.operands.row_scales import with_row_scales
from nvfp4_cute.operands.whole import Parts, is_converted, operands_of, times
from nvfp4_cute.ops.options import DEFAULT, Options
from nvfp4_cute.ops.parts import dequantized
from nvfp4_cute.ops.parts.gemm import gemm
from nvfp4_cute.ops.traced import (
    format_name,
    new_group_results,
    refuse_config,
    refuse_gradients,
    torch_dtype,
)
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import RESULT_FORMATS, Gate, OutDtype, result_format


def grouped_gemm(
    a: Any,
    b: Any,
    offs: torch.Tensor | None = None,
    alpha: Any = None,
    *,
    masked_m: torch.Tensor | None = None,
    out: Any = None,
    out_dtype: OutDtype = torch.bfloat16,
    out_global_scale: Any = None,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
    options: Options = DEFAULT,
) -> Any:
    """Computes :func:`nvfp4_cute.grouped_gemm` of whole tensors, or of ``Parts``: data with scales.

    The shapes are those of packed data: where the public operation says K, rows hold the bytes of K elements.

    Args:
        a: K-major rows, a multiple of 16 bytes apart, or 16-bit values without scales (weight-only). List: one [M_g, K/2]
            (or [M_g, K/2, 1]) per group. Ragged (``offs``): [rows, K/2]. Masked (``masked_m``): [G, M_max, K/2].
            Blocked scales are not copied. List: per group flat, [rm, rk, 32, 4, 4] or the (32, 4, rm, 4, rk, 1)
            view, or [M_g, K/16] with ``scale_layout="rowmajor"`` (converted, which allocates). Ragged: any contiguous shape,
            every group's rows padded to 128; rows without scales give zeros. Masked: contiguous [G, ...] of G times
            [rm, rk, 32, 4, 4]. Float32 scales have rows: FP8_1x128 [rows, K/128], FP8_128x128 [(G, )ceil(N/128), K/128], INT8
            [rows, 1]; scales whose rows are not contiguous are copied.
            Global scales per row of ``a``: list: one float32 [M_g] per group; ragged: [rows]; masked: [G, M_max].
        b: weights. List: one [N_g, K/2] per group. Ragged, masked: [G, N, K/2].
        out: as in the public operation. Quantized results with sizes on the device: (data, scale) in the shapes of the result.
        options: ``config`` and ``prefetch_weights``; the public operations apply the others. The promise of ``prefetch_weights``
            must also hold for earlier launches up to one that made it, because products of lists and ``gemm`` without it do not
            hold back what follows them.

    Returns:
        The results of the public operation. Quantized results with sizes on the device are (data, scale); padding rows of the
        scales are not written, and nothing reads them.

    Raises what the public operation raises. Nothing is written to ``out`` when a check fails.
    """
    is_list, out_format = offs is None and masked_m is None, RESULT_FORMATS.get(out_dtype)
    early_weights, config = options.prefetch_weights and not is_converted(scale_layout, b), options.config
    first, second, _ = operands_of(scale_layout, out_dtype, a, b)
    a, a_scale, a_format, row_scale, factor_a = first
    b, b_scale, b_format, _, factor_b = second
    if factor_a is not None or factor_b is not None:
        alpha = times(alpha, factor_a, factor_b)
    if private_api.is_traced():
        return _traced((a, b, a_scale, b_scale), (offs, masked_m), alpha, row_scale, out, out_dtype, out_global_scale, config,
                       (scale_layout, backend, a_format.name, b_format.name))  # fmt: skip
    sides: tuple[Any, ...] = (a, b, b_scale) if a_scale is None else (a, b, a_scale, b_scale)
    sides = sides if row_scale is None else (*sides, row_scale)
    counts, inputs = flat_inputs(sides, offs, masked_m)
    if alpha is not None:
        alpha = numbers_of(alpha, a, offs, masked_m)
        inputs.append(alpha)
    if a_scale is None and config is None and masked_m is None:
        how: dict[str, Any] = {"out_dtype": out_dtype, "scale_layout": scale_layout, "backend": backend}
        if counts == (1, 1, 1) and dequantized.is_for_gemm(a[0], b[0], b_format, out_dtype, backend):
            (one,) = out or [None]
            weight = Parts(b[0], b_scale[0], b_format)
            return [gemm(a[0], weight, alpha, out=one, options=Options(None, early_weights), **how)]
        if offs is not None and dequantized.is_for_groups(a, b, b_format, alpha, out_dtype, backend):
            return _dequantized(a, b, b_scale, alpha, offs, out, b_format=b_format, **how)
    if out_global_scale is not None:
        out_global_scale = numbers_of(out_global_scale, a, offs, masked_m, is_in_result=True)
        inputs.append(out_global_scale)

    formats = a_format.name, b_format.name
    absent = a_scale is None, row_scale is None, alpha is None, out_global_scale is None
    settings = ("grouped_gemm", counts, absent, out_dtype, scale_layout, config, formats, early_weights)

    def check() -> tuple[Task, list[torch.Tensor]]:
        weights = [Weights("b", b, b_scale, "alpha", alpha, b_format)]
        result, how = Result(out, out_dtype, out_global_scale), (scale_layout, None, config, early_weights)
        return grouped_task(first, weights, (offs, masked_m), result, *how)

    outs = call(backend, settings, inputs, group_outputs(out, is_list, out_format), check)
    return outs if out_format is None and is_list else as_results(outs, is_list, out_format, out_global_scale)


def _dequantized(
    a, b, b_scale, alpha, offs, out, *, b_format, out_dtype, scale_layout, backend
) -> torch.Tensor:
    """Computes a ragged product with dequantized weights. Rows of no group keep their values in the caller's ``out``."""
    weights = [Weights("b", b, b_scale, "alpha", alpha, b_format)]
    _, operands, outs = grouped.check_device_groups(
        a, None, weights, (offs, None), Result(out, out_dtype, None), scale_layout
    )
    (weight,), (rows,) = operands.b, operands.a
    result = dequantized.multiply_groups(rows.data.view(a.shape), weight, operands.alpha, offs, backend)
    if out is None:
        return result
    row = torch.arange(len(a), device=a.device)
    return outs[0].copy_(torch.where((row < offs[-1])[:, None], result, outs[0]))


def flat_inputs(sides: Sequence[Any], offs: Any, masked_m: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """Returns the form with its number of groups, and all tensors; lists are flattened."""
    if offs is not None:
        return ("ragged", masked_m is None), [*sides, offs]
    if masked_m is not None:
        return ("masked",), [*sides, masked_m]
    try:
        counts = tuple(map(len, sides))
        return counts, [*chain.from_iterable(sides)]
    except TypeError:  # the checks will name the fault
        return (), [None]


def group_outputs(out: Any, is_list: bool, format: BlockFormat | None) -> list[Any]:
    """Flattens a caller's ``out`` into tensors, data and scale of quantized results. Later checks judge wrong types."""
    if out is None:
        return []
    if isinstance(out, list | tuple):
        return flat_outputs(out, format is not None) if is_list else [*out]
    return [out]


def grouped_task(
    a: Parts,
    weights: list[Weights],
    sizes: tuple[Any, Any],
    result: Result,
    scale_layout: ScaleLayout,
    gate: Gate | None,
    config: KernelConfig | None,
    early_weights: bool,
    bias: torch.Tensor | None = None,
) -> tuple[Task, list[torch.Tensor]]:
    """Returns the checked task of a grouped operation of any form, and the tensors that it writes.

    bias: of a dual GEMM; see ``grouped_dual_gemm``.
    """
    if all(x is None for x in sizes):
        problem, operands = grouped.check_lists(
            a.data, a.scale, weights, result, scale_layout, gate, a.format
        )
        is_own = result.out is not None
        outs = group_outputs(result.out, True, result.format) if is_own else new_outputs(problem, operands)
    else:
        problem, operands, outs = grouped.check_device_groups(
            a.data, a.scale, weights, sizes, result, scale_layout, gate, a.format
        )
        outs = outs if result.out is not None else as_stored(outs, result.format)
    if bias is not None:
        problem, operands = grouped.with_bias(problem, operands, bias)
    if a.row_scale is not None:
        problem, operands = with_row_scales(problem, operands, a.row_scale)
    return GroupedTask.of(problem, operands, config, early_weights, scale_layout), outs


def flat_operands(operands: Sequence[Any], is_list: bool) -> list[torch.Tensor]:
    """Flattens the operands' tensors; leaves out the missing scale of 16-bit ``a``."""
    there = [side for side in operands if side is not None]
    return [tensor for side in there for tensor in side] if is_list else there


def flat_rows(row_scale: Any) -> list[torch.Tensor]:
    """Returns the global scales per row, one tensor for all groups or one per group, as a list; none for None."""
    if row_scale is None:
        return []
    return [*row_scale] if isinstance(row_scale, list | tuple) else [row_scale]


def _traced(operands, sizes, alpha, row_scale, out, out_dtype, global_scale, config, settings) -> Any:
    """Calls the custom op of a traced graph, which also allocates the results."""
    refuse_config(config)
    is_list, out_format = all(x is None for x in sizes), result_format(out_dtype)
    a, b = operands[:2]
    groups: Any = a if is_list else next(x for x in sizes if x is not None)
    alpha, factors = numbers_of(alpha, groups), numbers_of(global_scale, groups)
    if out is not None:
        outs = group_outputs(out, is_list, out_format)
    else:
        outs = new_group_results(a, b, None if is_list else len(groups), 1, out_dtype)
    flat, rows = flat_operands(operands, is_list), flat_rows(row_scale)
    refuse_gradients(*flat, *rows, alpha, factors)
    torch.ops.nvfp4_cute.grouped_gemm_out(
        flat, len(a) if is_list else None, *sizes, alpha, rows, outs, torch_dtype(out_dtype), factors, *settings,
        out_format=format_name(out_dtype),
    )  # fmt: skip
    return as_results(outs, is_list, out_format, factors)
