"""Operands of list-form problems, a sequence entry a group: checked as a whole before anything is written.

A check never reads tensor data, so it never waits for the GPU.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from nvfp4_cute.formats.block_scaled import SCALE_LAYOUTS, NVFP4Tensor, ScaleLayout
from nvfp4_cute.operands.overlap import check_overlap, regions_of
from nvfp4_cute.operands.tensor_checks import (
    alpha_tensor,
    check_alpha,
    check_out_dtype,
    check_quantized_columns,
    check_tensor,
    checked_scale,
    flat_blocked,
    fp4_rows,
    is_m_major,
    out_data,
    out_view,
)
from nvfp4_cute.problem import (
    NVFP4,
    Activation,
    DualWeights,
    Gate,
    GroupedOperands,
    GroupedProblem,
    OutDtype,
    OutScales,
    SecondOperand,
    concatenated_rows,
    new_quantized_data,
    new_quantized_scale,
)


def check_list_operands(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    a_scale: Sequence[torch.Tensor],
    b_scale: Sequence[torch.Tensor],
    alpha: torch.Tensor | Sequence[float] | None = None,
    out: Sequence[torch.Tensor] | Sequence[NVFP4Tensor] | None = None,
    *,
    out_dtype: OutDtype = torch.bfloat16,
    out_global_scale: torch.Tensor | None = None,
    scale_layout: ScaleLayout = "blocked",
) -> tuple[GroupedProblem, GroupedOperands]:
    """Check and normalise the operands of C_g = alpha_g * A_g @ B_g^T, one sequence entry a group.

    Args:
        a: uint8 or float4_e2m1fn_x2, [M, K/2] or [M, K/2, 1], unit stride in K; rows may lie further apart
            than K/2 bytes. M, N and K may differ from group to group; M or N may be 0.
        b: the same with N rows.
        a_scale: float8_e4m3fn or uint8. Blocked: flat, [rm, rk, 32, 4, 4], or the (32, 4, rm, 4, rk, 1) view,
            taken without a copy. Row-major: [M, K/16] or [M, K/16, 1], converted into new memory.
        b_scale: the same with N rows.
        alpha: float32 [G] on the operands' device, or G numbers (copied to the device), or None for 1.
        out: [M, N] or [M, N, 1] a group, unit stride in N or, all of them, in M; dtype ``out_dtype``; None allocates
            with unit stride in N. Never written here. With "nvfp4": NVFP4Tensors of these shapes.
        out_dtype: float16, bfloat16, float32 or "nvfp4".
        out_global_scale: with "nvfp4": float32 [G] on the operands' device, or None.
        scale_layout: layout of both scales, "blocked" or "rowmajor".

    Returns:
        The problem, and operands that satisfy :class:`GroupedOperands`. Nothing is allocated before the last
        check.

    Raises:
        TypeError: an argument or an entry is of the wrong kind or dtype.
        ValueError: a shape, stride, alignment, count or device is wrong, or ``out`` overlaps something.
        UnsupportedProblem: well formed, but no kernel computes it (gradients, K = 0, sizes beyond 32 bits).
    """
    weights = [_Weights("b", b, b_scale, "alpha", alpha)]
    result = _Result(out, out_dtype, out_global_scale)
    return _check_lists(a, a_scale, weights, result, scale_layout, None)


def check_dual_operands(
    a: Sequence[torch.Tensor],
    b1: Sequence[torch.Tensor],
    b2: Sequence[torch.Tensor] | None,
    a_scale: Sequence[torch.Tensor],
    b1_scale: Sequence[torch.Tensor],
    b2_scale: Sequence[torch.Tensor] | None,
    alpha1: torch.Tensor | Sequence[float] | None = None,
    alpha2: torch.Tensor | Sequence[float] | None = None,
    out: Sequence[torch.Tensor] | Sequence[NVFP4Tensor] | None = None,
    *,
    activation: Activation = "silu",
    limit: float | None = None,
    weight_layout: DualWeights = "separate",
    out_dtype: OutDtype = torch.bfloat16,
    out_global_scale: torch.Tensor | None = None,
    scale_layout: ScaleLayout = "blocked",
) -> tuple[GroupedProblem, GroupedOperands]:
    """Check and normalise the operands of C_g = activation(alpha1_g * A_g @ B1_g^T) * (alpha2_g * A_g @ B2_g^T).

    As :func:`check_list_operands`, with a ``b`` of one shape twice, or in ``b1`` both as ``weight_layout`` says; then ``b2``
    and ``b2_scale`` are None. Where one alpha is given, the other is 1.
    """
    gate = Gate.checked(activation, limit, weight_layout, (b2, b2_scale))
    alphas = [alpha1, alpha2]
    if alpha1 is not None or alpha2 is not None:
        alphas = [[1.0] * len(a) if alpha is None else alpha for alpha in alphas]
    if weight_layout == "concatenated":
        (b1, b2), (b1_scale, b2_scale) = _split_concatenated(b1, b1_scale, scale_layout)
        gate = replace(gate, weight_layout="separate")
    weights = [
        _Weights("b1", b1, b1_scale, "alpha1", alphas[0]),
        _Weights("b2", b2, b2_scale, "alpha2", alphas[1]),
    ]
    result = _Result(out, out_dtype, out_global_scale)
    return _check_lists(a, a_scale, weights, result, scale_layout, gate)


def _split_concatenated(b: Any, scale: Any, scale_layout: ScaleLayout) -> tuple[Any, Any]:
    """Views of the upper and the lower halves of every group's weights and of their scales."""
    _check_sequences({"a": b, "b1": b, "b1_scale": scale})
    halves: list[Any] = [[], [], [], []]
    for g, (rows, s) in enumerate(zip(b, scale, strict=True)):
        label = f"group {g}: b1"
        operand = fp4_rows(label, "2 N", rows)
        n, k = concatenated_rows(label, len(operand)), 2 * operand.shape[1]
        flat = checked_scale(f"{label}_scale", "2 N", s, 2 * n, k, scale_layout)
        half = len(flat) // 2
        for part, x in zip(halves, (operand[:n], operand[n:], flat[:half], flat[half:]), strict=True):
            part.append(x)
    return halves[:2], halves[2:]


class _Weights(NamedTuple):
    """One ``b`` as the caller gave it, and what the caller calls it."""

    name: str
    b: Any
    scale: Any
    alpha_name: str
    alpha: Any


class _Result(NamedTuple):
    """What the caller wants, and where."""

    out: Any
    dtype: OutDtype
    global_scale: torch.Tensor | None


def _check_lists(
    a: Sequence[torch.Tensor],
    a_scale: Sequence[torch.Tensor],
    weights: list[_Weights],
    result: _Result,
    scale_layout: ScaleLayout,
    gate: Gate | None,
) -> tuple[GroupedProblem, GroupedOperands]:
    _check_options(result, scale_layout)
    alphas = {w.alpha_name: w.alpha for w in weights}
    # Interleaved weights are one operand.
    weights = [w for w in weights if w.b is not None]
    given: dict[str, Any] = {"a": a} | {w.name: w.b for w in weights}
    given |= {"a_scale": a_scale} | {f"{w.name}_scale": w.scale for w in weights}
    out, out_scale = result.out, list[Any]()
    if out is not None and result.dtype == NVFP4:
        out, out_scale = _parts(out)
        given |= {"scale of out": out_scale}
    _check_sequences(given | ({} if out is None else {"out": out}))
    flat_a = tuple(fp4_rows(f"group {g}: a", "M", t) for g, t in enumerate(a))
    flat_b = [tuple(fp4_rows(f"group {g}: {w.name}", "N", t) for g, t in enumerate(w.b)) for w in weights]
    first, *others = zip(weights, flat_b, strict=True)
    sizes = _group_sizes(flat_a, first[0].name, first[1])
    for other, operand in others:
        _check_same_rows(first[0].name, first[1], other.name, operand)
    out_m_major = out is not None and result.dtype != NVFP4 and is_m_major(out)
    has_alpha = any(alpha is not None for alpha in alphas.values())
    problem = GroupedProblem(sizes, "list", result.dtype, has_alpha, out_m_major)
    if gate is not None:
        for g, (_, n, _) in enumerate(sizes):
            gate.check_rows(f"group {g}: {first[0].name}", n)
        problem = replace(problem, **vars(gate))
    out_sizes = [(m, problem.out_columns(n)) for m, n, _ in sizes]
    scales_a = [
        checked_scale(f"group {g}: a_scale", "M", a_scale[g], m, k, scale_layout)
        for g, (m, _, k) in enumerate(sizes)
    ]
    scales_b = [
        [
            checked_scale(f"group {g}: {w.name}_scale", "N", w.scale[g], n, k, scale_layout)
            for g, (_, n, k) in enumerate(sizes)
        ]
        for w in weights
    ]
    device = a[0].device
    for name, alpha in alphas.items():
        check_alpha(name, alpha, problem.num_groups, device)
    if result.dtype == NVFP4:
        check_alpha("out_global_scale", result.global_scale, problem.num_groups, device)
        for g, (_, n) in enumerate(out_sizes):
            check_quantized_columns(f"group {g}: N", n)
    outs: tuple[torch.Tensor, ...] | None = None
    out_scales: tuple[torch.Tensor, ...] = ()
    if out is not None:
        if isinstance(result.dtype, torch.dtype):
            outs = tuple(
                out_view(f"group {g}: out", out[g], m, n, result.dtype, out_m_major)
                for g, (m, n) in enumerate(out_sizes)
            )
        else:
            outs = tuple(
                out_data(f"group {g}: data of out", out[g], m, n) for g, (m, n) in enumerate(out_sizes)
            )
            out_scales = tuple(
                checked_scale(f"group {g}: scale of out", "M", out_scale[g], m, n, "blocked")
                for g, (m, n) in enumerate(out_sizes)
            )
        named: dict[str, Iterable[torch.Tensor]] = {"a": flat_a, "a_scale": scales_a, "out": outs}
        for w, operand, scales in zip(weights, flat_b, scales_b, strict=True):
            named |= {w.name: operand, f"{w.name}_scale": scales}
        factors = alphas | {"out_global_scale": result.global_scale}
        check_overlap(regions_of(named | {"out scale": out_scales}, factors))

    # Every check has passed: from here on memory may be allocated.
    if scale_layout == "rowmajor":
        scales_a = [flat_blocked(s) for s in scales_a]
        scales_b = [[flat_blocked(s) for s in scales] for scales in scales_b]
    if outs is None:
        if result.dtype == NVFP4:
            outs = tuple(new_quantized_data((m, n), device) for m, n in out_sizes)
            out_scales = tuple(new_quantized_scale((m,), n, device).view(-1) for m, n in out_sizes)
        else:
            outs = tuple(torch.empty((m, n), dtype=result.dtype, device=device) for m, n in out_sizes)
    factor, *second_factor = (alpha_tensor(alpha, device) for alpha in alphas.values())
    second_b = (flat_b[1], tuple(scales_b[1])) if len(weights) > 1 else ((), ())
    operands = GroupedOperands(
        flat_a,
        flat_b[0],
        tuple(scales_a),
        tuple(scales_b[0]),
        factor,
        outs,
        SecondOperand(*second_b, second_factor[0]) if second_factor else None,
        OutScales(out_scales, result.global_scale) if result.dtype == NVFP4 else None,
    )
    return problem, operands


def _parts(out: Any) -> tuple[list[Any], list[Any]]:
    """Data and scales of NVFP4Tensors."""
    if not isinstance(out, list | tuple) or not all(isinstance(t, NVFP4Tensor) for t in out):
        raise TypeError('out_dtype="nvfp4" takes out as a list of NVFP4Tensor, one a group')
    for g, t in enumerate(out):
        if t.scale_layout != "blocked":
            raise ValueError(f"group {g}: out has {t.scale_layout} scales; the kernel writes blocked ones")
    return [t.data for t in out], [t.scale for t in out]


def _check_options(result: _Result, scale_layout: str) -> None:
    check_out_dtype(result.dtype, result.global_scale)
    if scale_layout not in SCALE_LAYOUTS:
        raise ValueError(f'scale_layout={scale_layout!r} is unknown; use "blocked" or "rowmajor"')


def _check_sequences(named: dict[str, Any]) -> None:
    """Sequences of tensors, of one length, on one device, without gradients."""
    for name, tensors in named.items():
        if isinstance(tensors, torch.Tensor):
            raise TypeError(
                f"{name} is a single tensor; without offs or masked_m pass a list with one tensor a group: [{name}]"
            )
        if not isinstance(tensors, list | tuple):
            raise TypeError(
                f"{name} is a {type(tensors).__name__}; pass a list or tuple with one tensor a group"
            )
    num_groups = len(named["a"])
    if num_groups == 0:
        raise ValueError(
            "a is an empty list; a grouped problem needs at least one group (a group may have M = 0)"
        )
    for name, tensors in named.items():
        if len(tensors) != num_groups:
            raise ValueError(
                f"{name} has {len(tensors)} entries and a has {num_groups}; every list needs one a group"
            )
        for g, tensor in enumerate(tensors):
            check_tensor(f"group {g}: {name}", tensor, named["a"][0])


def _group_sizes(
    a: Sequence[torch.Tensor], name: str, b: Sequence[torch.Tensor]
) -> tuple[tuple[int, int, int], ...]:
    """(m, n, k) of every group."""
    for g, (x, y) in enumerate(zip(a, b, strict=True)):
        (m, k_bytes), (n, b_bytes) = x.shape, y.shape
        if k_bytes != b_bytes:
            raise ValueError(
                f"group {g}: a has K={2 * k_bytes} and {name} has K={2 * b_bytes}; both must have the same K "
                f"(a is [M, K/2] = {[m, k_bytes]}, {name} is [N, K/2] = {[n, b_bytes]})"
            )
    return tuple((len(x), len(y), 2 * x.shape[1]) for x, y in zip(a, b, strict=True))


def _check_same_rows(
    first_name: str, first: Sequence[torch.Tensor], name: str, other: Sequence[torch.Tensor]
) -> None:
    for g, (x, y) in enumerate(zip(first, other, strict=True)):
        if x.shape != y.shape:
            raise ValueError(
                f"group {g}: {name} is [N, K/2] = {list(y.shape)} and {first_name} {list(x.shape)}; "
                "a dual GEMM takes two of one shape"
            )
