"""grouped_gemm: C_g = alpha_g * A_g @ B_g^T over NVFP4 operands, many groups in one launch."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from nvfp4_cute import backends
from nvfp4_cute.formats.block_scaled import NVFP4Tensor, ScaleLayout
from nvfp4_cute.launch import prepared
from nvfp4_cute.operands.list_form import check_list_operands
from nvfp4_cute.ops.device_checks import check_device_groups
from nvfp4_cute.ops.repeated import keep_list, keep_task
from nvfp4_cute.ops.results import as_results, flat_outputs, global_scales, new_outputs
from nvfp4_cute.ops.traced import as_factors, new_group_results, refuse_config, refuse_gradients
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import NVFP4, OutDtype


@overload
def grouped_gemm(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    a_scale: Sequence[torch.Tensor],
    b_scale: Sequence[torch.Tensor],
    offs: None = None,
    alpha: torch.Tensor | Sequence[float] | None = None,
    *,
    masked_m: None = None,
    out: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> list[torch.Tensor]: ...


@overload
def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offs: torch.Tensor | None = None,
    alpha: torch.Tensor | Sequence[float] | None = None,
    *,
    masked_m: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> torch.Tensor: ...


@overload
def grouped_gemm(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    a_scale: Sequence[torch.Tensor],
    b_scale: Sequence[torch.Tensor],
    offs: None = None,
    alpha: torch.Tensor | Sequence[float] | None = None,
    *,
    masked_m: None = None,
    out: Sequence[NVFP4Tensor] | None = None,
    out_dtype: Literal["nvfp4"],
    out_global_scale: torch.Tensor | Sequence[float] | None = None,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> list[NVFP4Tensor]: ...


@overload
def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offs: torch.Tensor | None = None,
    alpha: torch.Tensor | Sequence[float] | None = None,
    *,
    masked_m: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    out_dtype: Literal["nvfp4"],
    out_global_scale: torch.Tensor | Sequence[float] | None = None,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def grouped_gemm(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    offs: torch.Tensor | None = None,
    alpha: torch.Tensor | Sequence[float] | None = None,
    *,
    masked_m: torch.Tensor | None = None,
    out: Any = None,
    out_dtype: OutDtype = torch.bfloat16,
    out_global_scale: torch.Tensor | Sequence[float] | None = None,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> Any:
    """Multiply every group's NVFP4 operands.

    Three forms, told apart by the arguments. *List*: sequences with a tensor a group, whose M, N and K may all differ.
    *Ragged*: ``offs`` says where each group ends in the rows of one ``a``. *Masked*: ``masked_m`` says how many rows of
    each group's part of ``a`` count. Ragged and masked read the sizes on the device when the kernel runs: nothing waits
    for them, and a captured graph follows them when they change.

    Args:
        a: uint8 or float4_e2m1fn_x2, K-major, two e2m1 values a byte, the low nibble first; K a multiple of 16 and rows a
            multiple of 16 bytes apart. List: one [M_g, K_g/2] (or [M_g, K_g/2, 1]) a group. Ragged: [rows, K/2], groups
            one after the other. Masked: [G, M_max, K/2].
        b: the same of the weights. List: one [N_g, K_g/2] a group. Ragged, masked: [G, N, K/2].
        a_scale: e4m3 scales of blocks of 16 along K (float8_e4m3fn or uint8), in the 128x4 blocked layout. List: flat,
            [rm, rk, 32, 4, 4] or the (32, 4, rm, 4, rk, 1) view a group, zero-copy, or [M_g, K_g/16] with
            ``scale_layout="rowmajor"`` (converted, which allocates). Ragged: any contiguous shape, every group's rows
            padded to 128. Masked: any contiguous shape of G times [rm, rk, 32, 4, 4].
        b_scale: the same of the weights; ragged, masked: G times [rn, rk, 32, 4, 4].
        offs: ragged form: int32 [G] on the operands' device, ascending, the row where each group ends.
        alpha: one factor a group, float32 [G] on the operands' device (``global_scale_a * global_scale_b``), or numbers.
        masked_m: masked form: int32 [G] on the operands' device, rows of each group, at most M_max.
        out: written in place, rows contiguous or, in all of them, columns. List: one [M_g, N_g] (or [M_g, N_g, 1]) a
            group. Ragged: [rows, N]. Masked: [G, M_max, N]. Rows of no group are left as they are. None allocates,
            a list's in one piece where a call is repeated: memory is free when the last of them goes. With "nvfp4": an
            NVFP4Tensor a group, whose data and scale are written, or (data, scale) as it would be returned.
        out_dtype: float16, bfloat16, float32, or "nvfp4": results quantized for the next layer, N a multiple of 16.
        out_global_scale: with "nvfp4", one factor a group as of ``quantize``, float32 [G] on the operands' device, or
            numbers.
        scale_layout: "blocked" or, in list form, "rowmajor".
        backend: "auto" (the GPU of the tensors; the float64 reference for CPU tensors), "cuda", "emulator" (the PTX of
            the sm_100a kernel, executed on the CPU) or "reference". ``NVFP4_CUTE_BACKEND`` replaces "auto".
        config: tile shape and pipeline depths; None takes what ``tune`` found for the problem, else chooses by estimate.

    Returns:
        The outputs, as described for ``out``: a list in list form, else one tensor. fp32 accumulation; alpha multiplies
        in fp32; one rounding to ``out_dtype``, to nearest even. With "nvfp4", what ``formats.quantize`` makes of the fp32
        results: a list of NVFP4Tensor in list form, else (data, scale), the next call's ``a`` and ``a_scale``: ragged
        uint8 [rows, N/2] and float8_e4m3fn [rows // 128 + G, rn, 32, 4, 4], masked [G, M_max, N/2] and
        [G, rm, rn, 32, 4, 4]. Padding rows of the scales are not written; nothing reads them.

    Example:
        >>> a, b = ([quantize(torch.randn(rows, 512)) for rows in group] for group in ((40, 7), (256, 256)))
        >>> out = grouped_gemm([x.data for x in a], [w.data for w in b], [x.scale for x in a], [w.scale for w in b])
        >>> [tuple(c.shape) for c in out]
        [(40, 256), (7, 256)]

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule; the message names rule, value and fix.
        UnsupportedTarget: no kernel for the GPU. ConfigError: ``config`` cannot be built.
        Nothing is written to ``out`` when a check fails.
    """
    is_list = offs is None and masked_m is None
    if torch.compiler.is_compiling():
        return _traced((a, b, a_scale, b_scale), (offs, masked_m), alpha, out, out_dtype, out_global_scale, config,
                       (scale_layout, backend))  # fmt: skip
    is_quantized = out_dtype == NVFP4
    sizes = masked_m if offs is None else offs
    counts: tuple[int, ...] = ()
    try:
        inputs = [*a, *b, *a_scale, *b_scale] if is_list else [a, b, a_scale, b_scale, sizes]
        counts = (len(a), len(b), len(a_scale), len(b_scale)) if is_list else (offs is None, masked_m is None)
        outs = [] if out is None else flat_outputs(out, is_list, is_quantized)
    except (TypeError, AttributeError):  # the checks will say what is wrong
        inputs, outs = [None], []
    factors = global_scales(out_global_scale, a if is_list else sizes)
    inputs += [factor for factor in (alpha, factors) if factor is not None]
    key, call = prepared.lookup(
        inputs + outs,
        counts,
        alpha is None,
        factors is None,
        len(outs),
        out_dtype,
        scale_layout,
        backend,
        config,
    )
    launched = None if call is None else call.try_launch(inputs, outs)
    if launched is not None:
        return as_results(launched, is_list, is_quantized, factors)
    if is_list:
        problem, operands = check_list_operands(
            a,
            b,
            a_scale,
            b_scale,
            alpha,
            out,
            out_dtype=out_dtype,
            out_global_scale=factors,
            scale_layout=scale_layout,
        )
        backends.run_problem(backend, problem, operands, config)
        outs = outs or new_outputs(problem, operands)
        keep_list(key, backend, problem, operands, config, inputs, outs)
    else:
        task, outs = check_device_groups(
            a,
            b,
            a_scale,
            b_scale,
            offs,
            masked_m,
            alpha,
            out,
            out_dtype,
            scale_layout,
            backend,
            config,
            out_global_scale=factors,
        )
        backends.run_task(backend, task)
        keep_task(key, backend, task, inputs, outs)
    return as_results(outs, is_list, is_quantized, factors)


def _traced(operands, sizes, alpha, out, out_dtype, global_scale, config, settings) -> Any:
    """The call as the custom op (``ops.library``) that a traced graph keeps; the graph allocates the results."""
    refuse_config(config)
    is_list, is_quantized = all(x is None for x in sizes), out_dtype == NVFP4
    a, b = operands[:2]
    groups: Any = a if is_list else next(x for x in sizes if x is not None)
    alpha, factors = as_factors(alpha, groups), as_factors(global_scale, groups)
    if out is not None:
        outs = flat_outputs(out, is_list, is_quantized)
    else:
        outs = new_group_results(a, b, None if is_list else len(groups), 1, sizes[0] is not None, out_dtype)
    flat = [tensor for group in operands for tensor in group] if is_list else list(operands)
    refuse_gradients(*flat, alpha, factors)
    torch.ops.nvfp4_cute.grouped_gemm_out(
        flat, len(a) if is_list else None, *sizes, alpha, outs, None if is_quantized else out_dtype, factors, *settings
    )  # fmt: skip
    return as_results(outs, is_list, is_quantized, factors)
