"""Grouped GEMM on parts: C_g = alpha_g * A_g @ B_g^T, with block-scaled or 16-bit A, many groups in one launch."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from nvfp4_cute import backends, private_api
from nvfp4_cute.backends.calls import call
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.formats.block_scaled import ScaleLayout
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.launch.task import Task
from nvfp4_cute.launch.weight_only import WeightOnlyTask
from nvfp4_cute.operands import grouped
from nvfp4_cute.operands.grouped import Result, Weights
from nvfp4_cute.operands.numbers_on_device import numbers_of
from nvfp4_cute.operands.results import as_results, flat_outputs, new_outputs
from nvfp4_cute.operands.whole import check_rows_format, early_weights_beside, parts, scale_or_room, times
from nvfp4_cute.ops.traced import (
    format_name,
    new_group_results,
    refuse_config,
    refuse_gradients,
    torch_dtype,
)
from nvfp4_cute.planning.config import KernelConfig, check_config
from nvfp4_cute.problem import Gate, OutDtype, check_early_weights, result_format


def grouped_gemm(
    a: Any,
    b: Any,
    a_scale: Any = None,
    b_scale: Any = None,
    offs: torch.Tensor | None = None,
    alpha: Any = None,
    *,
    masked_m: torch.Tensor | None = None,
    a_format: BlockFormat = NVFP4_FORMAT,
    b_format: BlockFormat = NVFP4_FORMAT,
    out: Any = None,
    out_dtype: OutDtype = torch.bfloat16,
    out_global_scale: Any = None,
    scale_layout: ScaleLayout = "blocked",
    early_weights: bool = False,
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> Any:
    """Multiplies the rows of every group by the group's weights: ``C_g = alpha_g * A_g @ B_g^T``.

    The arguments select one of three forms. *List*: sequences with one tensor per group, whose M, N and K may all differ.
    *Ragged*: ``offs`` says where each group ends in the rows of one ``a``. *Masked*: ``masked_m`` says how many rows of each
    group's part of ``a`` count. In the ragged and masked forms the kernel reads the sizes on the device, so the host never
    waits for them and a captured graph follows changes.

    ``grouped_gemm(a, b)`` and ``grouped_gemm(a, b, offs=offs)`` without scales take whole BlockScaledTensors: lists with one
    per group, or one [G, N, K] for ``b`` and [rows, K] or [G, M_max, K] for ``a``. Their global scales multiply the results, in
    addition to ``alpha``, on the device. The scales of a whole ragged ``a`` have no padding between groups, so its groups must
    end at multiples of 128 rows; otherwise pass data and scale of ``grouped_quantize``.

    Operands are NVFP4 unless ``a_format`` and ``b_format``, or whole tensors, say otherwise; all groups have the same formats.
    For other formats, read K/2 below as the bytes of K elements, K/16 as the blocks of K elements, and the dtypes as those of
    the format. README says which pairs have kernels on which GPU.

    Weight-only (W4A16), on sm_90a: with float16 or bfloat16 ``a`` ([M_g, K_g], [rows, K] or [G, M_max, K]) and
    ``a_scale=None``, the kernel converts the weights to the type of ``a``. The conversion is exact except that MXFP8 values
    become multiples of 2^-133. Float32 scales (FP8_128x128, INT8) multiply the sums. Results have 16 or 32 bits and contiguous
    rows.

    Args:
        a: uint8 or float4_e2m1fn_x2, K-major, two e2m1 values per byte, the low nibble first; K a multiple of 16 and rows a
            multiple of 16 bytes apart. List: one [M_g, K_g/2] (or [M_g, K_g/2, 1]) per group. Ragged: [rows, K/2], groups one
            after the other. Masked: [G, M_max, K/2].
        b: weights in the same layout. List: one [N_g, K_g/2] per group. Ragged, masked: [G, N, K/2].
        a_scale: e4m3 scales of blocks of 16 along K (float8_e4m3fn or uint8), in the 128x4 blocked layout. List: per group
            flat, [rm, rk, 32, 4, 4] or the (32, 4, rm, 4, rk, 1) view, not copied; or [M_g, K_g/16] with
            ``scale_layout="rowmajor"`` (converted, which allocates). Ragged: any contiguous shape, every group's rows padded to
            128; ``offs`` on a GPU are not read back, and rows without scales give zeros. Masked: any contiguous shape of G
            times [rm, rk, 32, 4, 4].
        b_scale: scales of the weights in the same layouts; ragged, masked: G times [rn, rk, 32, 4, 4].
        offs: ragged form: int32 [G] on the operands' device, ascending, the row where each group ends.
        alpha: one factor per group (``global_scale_a * global_scale_b``): float32 [G] on the operands' device, or numbers.
        masked_m: masked form: int32 [G] on the operands' device, rows of each group, at most M_max.
        a_format, b_format: formats of ``a`` and ``b``, such as ``nvfp4_cute.MXFP4``.
        out: written in place, all with contiguous rows or all with contiguous columns. List: one [M_g, N_g] (or [M_g, N_g, 1])
            per group. Ragged: [rows, N]. Masked: [G, M_max, N]. Rows of no group keep their values. None allocates; a repeated
            call allocates the results of a list as one block, which is freed with the last of them. Quantized: one
            BlockScaledTensor per group, whose data and scale are written, or (data, scale) in the shapes of the result.
        out_dtype: float16, bfloat16, float32, or the name of a format for results quantized for the next layer. "nvfp4": N is a
            multiple of 16. "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2": N is a multiple of 32, and scales are rounded up, as in
            ``quantize``. "fp8_1x128": operands are FP8_1x128 and FP8_128x128, N is a multiple of 128, scales have rows like
            ``a_scale``, and the GPU is not of the sm_120 family. INT8 operands also allow int32, the exact sums of products; no
            scale is read, and both may be left out.
        out_global_scale: global scales of "nvfp4" results, one per group as in ``quantize``: float32 [G] on the operands'
            device, or numbers.
        scale_layout: "blocked" or, in list form, "rowmajor". Float32 scales always have rows, without padding. FP8_1x128:
            ``a_scale`` [M_g, K/128] in list form, [rows, K/128] ragged, [G, M_max, K/128] masked. FP8_128x128: ``b_scale`` [(G,
            )ceil(N/128), K/128]. INT8: [rows, 1] and [(G, )N, 1]. Scales whose rows are not contiguous are copied.
        early_weights: promises that the previous launch on the stream, such as the one that computed ``a``, wrote none of
            ``offs``, ``masked_m``, ``b`` and ``b_scale``. If the previous launch is a product of a list or a ``gemm`` without
            this promise, the promise must also hold for the launch before it, and so on, because such products do not hold back
            what follows them. Kernels for sm_100a, sm_103a and sm_110a with 8-bit scales then load weights while the previous
            launch ends; other kernels and traced graphs ignore the promise.
        backend: "auto" (the GPU of the tensors; the float64 reference for CPU tensors), "cuda", "emulator" (the PTX of the
            sm_100a kernel, executed on the CPU) or "reference". ``NVFP4_CUTE_BACKEND`` replaces "auto".
        config: tile shape and pipeline depths. None uses what ``tune`` found for the problem, else an estimate.

    Returns:
        The outputs as described for ``out``: a list in list form, otherwise one tensor. Accumulation is fp32, alpha multiplies
            in fp32, and C is rounded once, to ``out_dtype``, to nearest even. Quantized results have the bits of
            ``formats.quantize`` of the fp32 results. List form: a list of NVFP4Tensors, or of BlockScaledTensors of another
            format. Otherwise: (data, scale), the next call's ``a`` and ``a_scale``. With "nvfp4" these are ragged uint8 [rows,
            N/2] and float8_e4m3fn [rows // 128 + G, rn, 32, 4, 4], masked [G, M_max, N/2] and [G, rm, rn, 32, 4, 4]; with other
            formats, data and scales of that format. Padding rows of the scales are not written; nothing reads them.

    Example:
        >>> a, b = ([quantize(torch.randn(rows, 512)) for rows in group] for group in ((40, 7), (256, 256)))
        >>> out = grouped_gemm([x.data for x in a], [w.data for w in b], [x.scale for x in a], [w.scale for w in b])
        >>> [tuple(c.shape) for c in out]
        [(40, 256), (7, 256)]

    Raises:
        TypeError, ValueError: an operand breaks a rule; the message names rule, value and fix.
        UnsupportedProblem: an operand breaks a rule, or the pair of formats has no kernel.
        UnsupportedTarget: the GPU has no kernel.
        ConfigError: ``config`` cannot be built.

    Nothing is written to ``out`` when a check fails.
    """
    is_list, out_format = offs is None and masked_m is None, result_format(out_dtype)
    if a_scale is None or b_scale is None:
        early_weights = early_weights_beside(early_weights, scale_layout, b)
        a, a_scale, factor_a, a_format = parts(a, a_scale, scale_layout, a_format)
        check_rows_format("a", a, a_scale, a_format)
        b, b_scale, factor_b, b_format = parts(b, b_scale, scale_layout, b_format)
        alpha = times(alpha, factor_a, factor_b)
        a_scale = scale_or_room(a_scale, a, out_dtype, a_format, -1)
        b_scale = scale_or_room(b_scale, b, out_dtype, b_format, -1)
    if private_api.is_traced():
        check_early_weights(early_weights)
        return _traced((a, b, a_scale, b_scale), (offs, masked_m), alpha, out, out_dtype, out_global_scale, config,
                       (scale_layout, backend, a_format.name, b_format.name))  # fmt: skip
    sides = (a, b, b_scale) if a_scale is None else (a, b, a_scale, b_scale)
    counts, inputs = flat_inputs(sides, offs, masked_m)
    if alpha is not None:
        alpha = numbers_of(alpha, a, offs, masked_m)
        inputs.append(alpha)
    if out_global_scale is not None:
        out_global_scale = numbers_of(out_global_scale, a, offs, masked_m, is_in_result=True)
        inputs.append(out_global_scale)

    formats = a_format, b_format
    absent = tuple(x is None for x in (a_scale, alpha, out_global_scale))
    settings = ("grouped_gemm", counts, absent, out_dtype, scale_layout, config, formats, early_weights)

    def check() -> tuple[Task, list[torch.Tensor]]:
        weights, result = (
            [Weights("b", b, b_scale, "alpha", alpha, b_format)],
            Result(out, out_dtype, out_global_scale),
        )
        how = (scale_layout, None, config, backend, early_weights)
        return grouped_task(a, a_scale, a_format, weights, (offs, masked_m), result, *how)

    outs = call(backend, settings, inputs, group_outputs(out, is_list, out_format), check)
    return outs if out_format is None and is_list else as_results(outs, is_list, out_format, out_global_scale)


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
    a: Any,
    a_scale: Any,
    a_format: BlockFormat,
    weights: list[Weights],
    sizes: tuple[Any, Any],
    result: Result,
    scale_layout: ScaleLayout,
    gate: Gate | None,
    config: KernelConfig | None,
    backend: str,
    early_weights: bool = False,
) -> tuple[Task, list[torch.Tensor]]:
    """Returns the checked task of a grouped operation of any form, and the tensors that it writes."""
    check_config(config)
    check_early_weights(early_weights)
    if all(x is None for x in sizes):
        problem, operands = grouped.check_lists(a, a_scale, weights, result, scale_layout, gate, a_format)
        is_own = result.out is not None
        outs = group_outputs(result.out, True, result.format) if is_own else new_outputs(problem, operands)
    else:
        problem, operands, outs = grouped.check_device_groups(
            a, a_scale, weights, sizes, result, scale_layout, gate, a_format
        )
    if operands.activations:
        gpu = backends.gpu_of(backend, operands.device)
        return WeightOnlyTask.of(problem, operands, config, gpu), outs
    return GroupedTask.of(problem, operands, config, early_weights, scale_layout), outs


def flat_operands(operands: Sequence[Any], is_list: bool) -> list[torch.Tensor]:
    """Flattens the operands' tensors; leaves out the missing scale of 16-bit ``a``."""
    there = [side for side in operands if side is not None]
    return [tensor for side in there for tensor in side] if is_list else there


def _traced(operands, sizes, alpha, out, out_dtype, global_scale, config, settings) -> Any:
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
    flat = flat_operands(operands, is_list)
    refuse_gradients(*flat, alpha, factors)
    torch.ops.nvfp4_cute.grouped_gemm_out(
        flat, len(a) if is_list else None, *sizes, alpha, outs, torch_dtype(out_dtype), factors, *settings,
        out_format=format_name(out_dtype),
    )  # fmt: skip
    return as_results(outs, is_list, out_format, factors)
