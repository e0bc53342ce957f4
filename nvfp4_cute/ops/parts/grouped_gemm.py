"""grouped_gemm: C_g = alpha_g * A_g @ B_g^T over block-scaled operands, many groups in one launch."""

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
    """Multiply every group's block-scaled operands.

    Three forms, told apart by the arguments. *List*: sequences with a tensor a group, whose M, N and K may all differ.
    *Ragged*: ``offs`` says where each group ends in the rows of one ``a``. *Masked*: ``masked_m`` says how many rows of
    each group's part of ``a`` count. Ragged and masked read the sizes on the device when the kernel runs: nothing waits
    for them, and a captured graph follows them when they change.

    ``grouped_gemm(a, b)`` and ``grouped_gemm(a, b, offs=offs)`` take BlockScaledTensors whole, their scales left out: lists
    with one a group, or one [G, N, K] for ``b``, and [rows, K] or [G, M_max, K] for ``a``. Their global scales are factors of the
    results, beside ``alpha``, and multiplied on the device. A whole ragged ``a`` is for groups that end at multiples of 128
    rows, as its scales have no padding between groups; else pass data and scale of ``grouped_quantize``.

    Operands are NVFP4, or of the formats that whole tensors have, or ``a_format`` and ``b_format`` say, one of all groups:
    below, K/2 and K/16 are then K elements' bytes and blocks, and dtypes those of the format. README says which pairs have
    kernels on which GPU.

    Weight-only (W4A16): where ``a`` has float16 or bfloat16 values, [M_g, K_g], [rows, K] or [G, M_max, K], and ``a_scale``
    is None, ``a`` is multiplied as it is, by weights that become its type: on sm_90a. That is
    exact, but MXFP8 values become multiples of 2^-133. Float32 scales, of FP8_128x128 and INT8, multiply sums. Results have 16 or
    32 bits, in rows.

    Args:
        a: uint8 or float4_e2m1fn_x2, K-major, two e2m1 values a byte, the low nibble first; K a multiple of 16 and rows a
            multiple of 16 bytes apart. List: one [M_g, K_g/2] (or [M_g, K_g/2, 1]) a group. Ragged: [rows, K/2], groups
            one after the other. Masked: [G, M_max, K/2].
        b: the same of the weights. List: one [N_g, K_g/2] a group. Ragged, masked: [G, N, K/2].
        a_scale: e4m3 scales of blocks of 16 along K (float8_e4m3fn or uint8), in the 128x4 blocked layout. List: flat,
            [rm, rk, 32, 4, 4] or the (32, 4, rm, 4, rk, 1) view a group, zero-copy, or [M_g, K_g/16] with
            ``scale_layout="rowmajor"`` (converted, which allocates). Ragged: any contiguous shape, every group's rows
            padded to 128; a GPU's ``offs`` are not read back, and its rows whose scales are missing give zeros. Masked: any
            contiguous shape of G times [rm, rk, 32, 4, 4].
        b_scale: the same of the weights; ragged, masked: G times [rn, rk, 32, 4, 4].
        offs: ragged form: int32 [G] on the operands' device, ascending, the row where each group ends.
        alpha: one factor a group, float32 [G] on the operands' device (``global_scale_a * global_scale_b``), or numbers.
        masked_m: masked form: int32 [G] on the operands' device, rows of each group, at most M_max.
        a_format, b_format: what the parts of ``a`` and ``b`` stand for, such as ``nvfp4_cute.MXFP4``.
        out: written in place, rows contiguous or, in all of them, columns. List: one [M_g, N_g] (or [M_g, N_g, 1]) a
            group. Ragged: [rows, N]. Masked: [G, M_max, N]. Rows of no group are left as they are. None allocates,
            a list's in one piece where a call is repeated: memory is free when the last of them goes. Quantized:
            a BlockScaledTensor a group, whose data and scale are written, or (data, scale) as it would be returned.
        out_dtype: float16, bfloat16, float32, or the name of a format: results quantized for the next layer. "nvfp4": N is a
            multiple of 16; "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2": of 32, and scales are rounded up, as ``quantize`` does. Of
            FP8_1x128 and FP8_128x128, but not on the sm_120 family, "fp8_1x128": N is a multiple of 128, and scales have
            rows as ``a_scale`` has. Of INT8 also int32: the sums of products of integers, exact; no scale is read, and both may
            be left out.
        out_global_scale: with "nvfp4", one factor a group as of ``quantize``, float32 [G] on the operands' device, or
            numbers.
        scale_layout: "blocked" or, in list form, "rowmajor". Float32 scales always have rows, and none of padding: ``a_scale``
            [rows, K/128] of FP8_1x128 (a group's, all groups' of the ragged form, [G, M_max, K/128] of the masked one),
            ``b_scale`` [(G, )ceil(N/128), K/128] of FP8_128x128; of INT8 [rows, 1] and [(G, )N, 1]. Scales whose
            rows are not contiguous are copied.
        early_weights: promises that the launch right before on the stream, such as the one that computed ``a``, wrote none of
            ``offs``, ``masked_m``, ``b`` and ``b_scale``. Where that one is a product of a list, or ``gemm``, without this
            promise, the launch before it wrote none of them either, and so on: such products do not hold back what follows
            them. Kernels for sm_100a, sm_103a and sm_110a with scales of a byte then load weights while that launch ends;
            others ignore it, as a traced graph does.
        backend: "auto" (the GPU of the tensors; the float64 reference for CPU tensors), "cuda", "emulator" (the PTX of
            the sm_100a kernel, executed on the CPU) or "reference". ``NVFP4_CUTE_BACKEND`` replaces "auto".
        config: tile shape and pipeline depths; None takes what ``tune`` found for the problem, else chooses by estimate.

    Returns:
        The outputs, as described for ``out``: a list in list form, else one tensor. fp32 accumulation; alpha multiplies
        in fp32; one rounding to ``out_dtype``, to nearest even. Quantized, what ``formats.quantize`` makes of the
        fp32 results: in list form a list of NVFP4Tensor, or of BlockScaledTensor of another format; else (data, scale), the
        next call's ``a`` and ``a_scale``, of "nvfp4": ragged uint8 [rows, N/2] and float8_e4m3fn [rows // 128 + G, rn, 32, 4, 4],
        masked [G, M_max, N/2] and [G, rm, rn, 32, 4, 4]; others as the format has data and scales.
        Padding rows of the scales are not written; nothing reads them.

    Example:
        >>> a, b = ([quantize(torch.randn(rows, 512)) for rows in group] for group in ((40, 7), (256, 256)))
        >>> out = grouped_gemm([x.data for x in a], [w.data for w in b], [x.scale for x in a], [w.scale for w in b])
        >>> [tuple(c.shape) for c in out]
        [(40, 256), (7, 256)]

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule; the message names rule, value and fix.
        UnsupportedProblem, too: no kernel for the pair of formats. UnsupportedTarget: no kernel for the GPU.
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
        """The task, and what it writes."""
        weights, result = (
            [Weights("b", b, b_scale, "alpha", alpha, b_format)],
            Result(out, out_dtype, out_global_scale),
        )
        how = (scale_layout, None, config, backend, early_weights)
        return grouped_task(a, a_scale, a_format, weights, (offs, masked_m), result, *how)

    outs = call(backend, settings, inputs, group_outputs(out, is_list, out_format), check)
    return outs if out_format is None and is_list else as_results(outs, is_list, out_format, out_global_scale)


def flat_inputs(sides: Sequence[Any], offs: Any, masked_m: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """What tells the form and the number of groups, and the tensors: of lists, all of each."""
    if offs is not None:
        return ("ragged", masked_m is None), [*sides, offs]
    if masked_m is not None:
        return ("masked",), [*sides, masked_m]
    try:
        counts = tuple(map(len, sides))
        return counts, [*chain.from_iterable(sides)]
    except TypeError:  # the checks will say what is wrong
        return (), [None]


def group_outputs(out: Any, is_list: bool, format: BlockFormat | None) -> list[Any]:
    """The tensors of a caller's ``out``, of quantized results both parts; what is of another kind is for the checks to judge."""
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
    """The checked task of a grouped operation of any form, and what it writes."""
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
    """The tensors of operands, ``a`` without scales where it has 16 bits: of lists, all of each."""
    there = [side for side in operands if side is not None]
    return [tensor for side in there for tensor in side] if is_list else there


def _traced(operands, sizes, alpha, out, out_dtype, global_scale, config, settings) -> Any:
    """The call as the custom op (``ops.library``) that a traced graph keeps; the graph allocates the results."""
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
