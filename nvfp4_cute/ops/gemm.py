"""gemm: C = alpha * A @ B^T over NVFP4 operands, or 16-bit A and NVFP4 B; dense, a batch in one launch."""

from dataclasses import replace
from typing import Any, Literal, overload

import torch

from nvfp4_cute import backends
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_scaled import SCALE_LAYOUTS, NVFP4Tensor, ScaleLayout
from nvfp4_cute.launch import prepared
from nvfp4_cute.operands.list_form import check_list_operands
from nvfp4_cute.ops import vector_checks as checks
from nvfp4_cute.ops.batches import (
    as_alphas,
    as_factor,
    check_batched_shapes,
    one_factor,
    quantized_result,
    split_batches,
    split_quantized,
)
from nvfp4_cute.ops.few_rows import FewRowsTask, few_rows_task
from nvfp4_cute.ops.gemv import GemvTask
from nvfp4_cute.ops.one_row import one_row_task
from nvfp4_cute.ops.repeated import keep_list, keep_task
from nvfp4_cute.ops.results import as_results
from nvfp4_cute.ops.traced import refuse_config, refuse_gradients
from nvfp4_cute.ops.w4a16 import ACTIVATION_DTYPES, weight_only
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import (
    NVFP4,
    GroupedOperands,
    GroupedProblem,
    OutDtype,
    new_quantized_data,
    new_quantized_scale,
)


@overload
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | float | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out_global_scale: None = None,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> torch.Tensor: ...


@overload
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | float | None = None,
    *,
    out: NVFP4Tensor | None = None,
    out_dtype: Literal["nvfp4"],
    out_global_scale: torch.Tensor | float | None = None,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> NVFP4Tensor: ...


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | float | None = None,
    *,
    out: Any = None,
    out_dtype: OutDtype = torch.bfloat16,
    out_global_scale: torch.Tensor | float | None = None,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> torch.Tensor | NVFP4Tensor:
    """Multiply NVFP4 matrices: ``C[:, :, l] = alpha[l] * A[:, :, l] @ B[:, :, l]^T``.

    The grouped kernel of the GPU with one group, or with a group a batch; a batch of any size has one set of tensor maps.
    Unless ``config`` is given, one row of ``a`` goes to the kernel of ``gemv`` where that is faster (sm_90a), and two to eight
    go to one of their own (``kernels/simt/few_rows.py``) where its CTAs, one for 32 rows of a batch's ``b``, have an SM each:
    N up to 4224 on an H200. In both the order of summation is documented and depends on K alone, not on M, N, L or the GPU.

    Weight-only (W4A16): where ``a`` is float16 or bfloat16 [M, K] or [M, K, L] and ``a_scale`` None, another kernel
    multiplies by ``b`` without quantizing ``a``, on every GPU from sm_90a on. It is made for few rows: every 32 of them
    read the weights anew, and on an H200 it is no faster than bf16 weights from there on. For many rows
    quantize ``a``, or decode the weights once (``LinearNVFP4(pre_decode=True)``). Here K is a multiple of 32, ``out`` may
    have any strides, and there is no ``config``. The order of summation is documented (``kernels/simt/w4a16.py``) and
    depends on K alone.

    Args:
        a: [M, K/2] or [M, K/2, L], uint8 or float4_e2m1fn_x2, K-major (stride 1 in K), two e2m1 values a byte, the low
            nibble first. K a multiple of 16; rows and batches a multiple of 16 bytes apart.
        b: [N, K/2] or [N, K/2, L], the same.
        a_scale: e4m3 scales of blocks of 16 along K (float8_e4m3fn or uint8): 128x4 blocked ([L, rm, rk, 32, 4, 4], the
            (32, 4, rm, 4, rk, L) view, and for one batch also [rm, rk, 32, 4, 4] or flat; zero-copy, batches one after the
            other), or [M, K/16(, L)] with ``scale_layout="rowmajor"`` (converted, which allocates). Padding rows may hold
            anything.
        b_scale: the same of b.
        alpha: a number, or float32 on the operands' device: [L], or one element (copied L times where L > 1).
        out: [M, N] or [M, N, L], rows or columns contiguous, written in place, or with "nvfp4" an NVFP4Tensor as it would
            be returned, its scales contiguous; None allocates.
        out_dtype: float16, bfloat16, float32, or "nvfp4": the result quantized for the next layer, as ``grouped_gemm``
            does it; N a multiple of 16.
        out_global_scale: with "nvfp4": a number, or float32 of one element on the operands' device, for all batches.
        scale_layout: "blocked" or "rowmajor".
        backend, config: as of ``grouped_gemm``.

    Returns:
        C, [M, N], or [M, N, L] where ``a`` has batches (batch after batch in memory). fp32 accumulation; alpha multiplies
        in fp32; one rounding to ``out_dtype``, to nearest even. With "nvfp4" an NVFP4Tensor of [M, N], or of [L, M, N]: the
        next call's ``a`` is its ``data.permute(1, 2, 0)`` then, and ``a_scale`` its ``scale``.

    Example:
        >>> x, w = quantize(torch.randn(40, 512)), quantize(torch.randn(256, 512))
        >>> gemm(x.data, w.data, x.scale, w.scale).shape
        torch.Size([40, 256])
        >>> hidden = gemm(x.data, w.data, x.scale, w.scale, out_dtype="nvfp4")  # for the next layer
        >>> gemm(torch.randn(40, 512).half(), w.data, None, w.scale, out_dtype=torch.float16).shape  # weight-only
        torch.Size([40, 256])

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule; the message names rule, value and fix.
        UnsupportedTarget: no kernel for the GPU. ConfigError: ``config`` cannot be built.
        Nothing is written to ``out`` when a check fails.
    """
    is_quantized = out_dtype == NVFP4
    if is_quantized and a_scale is None:
        raise UnsupportedProblem('out_dtype="nvfp4" with 16-bit a: call quantize on the result')
    if out_global_scale is not None and not is_quantized:
        raise ValueError(
            f"out_global_scale is given and out_dtype={out_dtype}; it goes with out_dtype={NVFP4!r}"
        )
    if config is not None and a_scale is None:
        raise UnsupportedProblem("config with 16-bit a: that kernel has nothing to configure; leave it out")
    if torch.compiler.is_compiling():  # the custom op (ops.library) that a traced graph keeps
        return _traced((a, b, a_scale, b_scale), alpha, out, out_dtype, out_global_scale, config,
                       (scale_layout, backend))  # fmt: skip
    if a_scale is None or (isinstance(a, torch.Tensor) and a.dtype in ACTIVATION_DTYPES):
        if a_scale is not None:
            raise ValueError(
                f"a is {a.dtype} and has an a_scale; 16-bit a has none: pass a_scale=None, or quantize(a)"
            )
        return weight_only(a, b, b_scale, alpha, out, ("a", "b", "b_scale"), out_dtype, scale_layout, backend)
    factors = None
    if out_global_scale is not None:
        factors = one_factor("out_global_scale", out_global_scale, a.shape[2] if a.ndim == 3 else 1, a.device)
    inputs: list[Any] = [a, b, a_scale, b_scale, *(x for x in (alpha, factors) if x is not None)]
    outs: list[Any] = []
    if out is not None:
        outs = [out.data, getattr(out, "scale", None)] if is_quantized else [out]
    key, call = prepared.lookup(
        inputs + outs,
        "gemm",
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
        return _result(launched, factors)
    problem, operands, scales, outs = _check(
        a, b, a_scale, b_scale, alpha, out, out_dtype, factors, scale_layout
    )
    task: GemvTask | FewRowsTask | None = None
    if config is None and not is_quantized:
        taken = (a, b, *scales, operands.alpha, outs[0], backend)
        task = one_row_task(*taken) or few_rows_task(*taken)
    if task is not None:
        backends.run_task(backend, task)
        keep_task(key, backend, task, inputs, outs)
    else:
        backends.run_problem(backend, problem, operands, config)
        keep_list(key, backend, problem, operands, config, inputs, outs)
    return _result(outs, factors)


def _result(outs: list[torch.Tensor], factors: torch.Tensor | None) -> Any:
    """What the caller gets for one tensor, or for data and scales; all batches have one factor."""
    is_quantized = len(outs) == 2
    return as_results(outs, True, is_quantized, None if factors is None else factors[:1])[0]


def _check(
    a, b, a_scale, b_scale, alpha, out, out_dtype, factors, scale_layout
) -> tuple[GroupedProblem, GroupedOperands, tuple[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
    """The problem, its operands, a view a batch, both scales, uint8 [L, bytes], and the tensors that are written."""
    checks.check_choice("scale_layout", scale_layout, SCALE_LAYOUTS)
    checks.check_choice("out_dtype", out_dtype, (*checks.OUT_DTYPES, NVFP4))
    is_quantized = out_dtype == NVFP4
    factor = alpha if isinstance(alpha, torch.Tensor) else None
    plain_out = None if is_quantized else out
    named = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
    device = checks.check_tensors(named, {"alpha": factor, "out": plain_out})
    check_batched_shapes({"a": a, "b": b, "out": plain_out}, "a [M, K/2], b [N, K/2] and out [M, N]")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a has K={2 * a.shape[1]} and b has K={2 * b.shape[1]}; both must have the same K")
    batches = a.shape[2] if a.ndim == 3 else 1
    if batches == 0:
        raise ValueError("a has L=0 batches; pass at least one")
    sfa = _batched_scales("a_scale", a_scale, a, scale_layout)
    sfb = _batched_scales("b_scale", b_scale, b, scale_layout)
    results: list[Any]
    if is_quantized:
        quantized = quantized_result(out, (*a.shape[2:], len(a)), len(b), device)
        results, outs = split_quantized(quantized), [quantized.data, quantized.scale]
    else:
        result = out
        if result is None:
            result = torch.empty((*a.shape[2:], len(a), len(b)), dtype=out_dtype, device=device)
            result = result.permute(1, 2, 0) if a.ndim == 3 else result
        results, outs = split_batches(result), [result]
    problem, operands = check_list_operands(
        split_batches(a),
        split_batches(b),
        list(sfa),
        list(sfb),
        as_alphas("alpha", alpha, batches),
        results,
        out_dtype=out_dtype,
        out_global_scale=factors,
    )
    return replace(problem, form="batched"), operands, (sfa, sfb), outs


def _batched_scales(
    name: str, scale: torch.Tensor, operand: torch.Tensor, layout: ScaleLayout
) -> torch.Tensor:
    """uint8 [L, bytes], batches one after the other."""
    rows, row_bytes = operand.shape[:2]
    batches = operand.shape[2] if operand.ndim == 3 else 1
    blocked = checks.batched_scales(name, scale, rows, checks.check_k(2 * row_bytes), batches, layout)
    if not blocked.is_contiguous():
        raise ValueError(
            f"{name} has strides {scale.stride()}: batches {blocked.stride(0)} bytes apart, each {blocked.shape[1]} long; "
            "they have to follow each other: .contiguous() as [L, rm, rk, 32, 4, 4]"
        )
    return blocked


def _traced(operands, alpha, out, out_dtype, global_scale, config, settings) -> Any:
    """The call as the custom op (``ops.library``) that a traced graph keeps; the graph allocates the result."""
    refuse_config(config)
    a, b = operands[:2]
    is_quantized, lead = out_dtype == NVFP4, (*a.shape[2:], a.shape[0])
    alpha, factor = (as_factor(x, a.device) for x in (alpha, global_scale))
    if out is not None:
        outs = [out.data, out.scale] if is_quantized else [out]
    elif is_quantized:
        outs = [
            new_quantized_data((*lead, b.shape[0]), a.device),
            new_quantized_scale(lead, b.shape[0], a.device),
        ]
    else:
        result = a.new_empty((*lead, b.shape[0]), dtype=out_dtype)
        outs = [result if a.ndim == 2 else result.permute(1, 2, 0)]
    refuse_gradients(*operands, alpha, factor)
    torch.ops.nvfp4_cute.gemm_out(
        *operands, alpha, outs, None if is_quantized else out_dtype, factor, *settings
    )
    return _result(outs, None if factor is None else factor.reshape(1))
