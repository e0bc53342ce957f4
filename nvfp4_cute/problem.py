"""What is computed: sizes and operands of a grouped problem, checked before anything is written.

A check never reads tensor data, so it never waits for the GPU.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats import DATA_DTYPES, SCALE_LAYOUTS, NVFP4Tensor, ScaleLayout, check_is_tensor
from nvfp4_cute.scale_layout import (
    ATOM_SHAPE,
    SCALE_DTYPES,
    SF_VEC_SIZE,
    as_blocked,
    atom_counts,
    to_blocked,
)

TMA_ALIGN_BYTES = 16  # base address and row pitch of a tensor map (PTX ISA, cp.async.bulk.tensor)
INT32_MAX = 2**31 - 1
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NVFP4: Literal["nvfp4"] = "nvfp4"
OutDtype = torch.dtype | Literal["nvfp4"]
Form = Literal["list", "ragged", "masked", "batched"]
Activation = Literal["silu", "gelu_tanh", "relu2"]
# How a kernel finds a dual GEMM's weights: two operands, or one that has rows of both in turn.
WeightLayout = Literal["separate", "interleaved_64_up_first", "interleaved_32_gate_first"]
# How a caller may pass them: halves of one operand are two for a kernel.
DualWeights = Literal["separate", "concatenated", "interleaved_64_up_first", "interleaved_32_gate_first"]
# Rows after which an interleaved layout repeats itself.
PERIODS = {"interleaved_64_up_first": 128, "interleaved_32_gate_first": 64}


def gemm_bytes(m: int, n: int, k: int, out_itemsize: int, *, num_b: int = 1) -> int:
    """Bytes of one NVFP4 GEMM in memory: A, ``num_b`` B operands and their scales once, C (M, N) once."""
    return (m + num_b * n) * (k // 2 + k // SF_VEC_SIZE) + m * n * out_itemsize


def out_bytes(m: int, n: int, dtype: OutDtype) -> int:
    """Bytes of C (M, N): of NVFP4, two values a byte and a scale for 16."""
    return m * n // 2 + m * n // SF_VEC_SIZE if dtype == NVFP4 else m * n * dtype.itemsize


@dataclass(frozen=True)
class GroupedProblem:
    """Sizes and types of a grouped GEMM; holds no data and says nothing about tiles.

    Attributes:
        sizes: (m, n, k) of every group, in elements; m or n may be 0.
        form: how the operands arrive: a list with an entry a group, ragged with offsets, masked, or batched: all groups
            of one size, at equal distances in memory.
        out_dtype: dtype of C; "nvfp4" for quantized results with their scales.
        has_alpha: whether group g's result is multiplied by ``alpha[g]``.
        out_m_major: whether columns of C are contiguous, not rows.
        activation: of a dual GEMM: C = activation(A @ B1^T) * (A @ B2^T); None where there is one product.
        weight_layout: of a dual GEMM. Where interleaved, n counts the rows of both, and C has n / 2 columns.
        limit: of a dual GEMM: A @ B1^T is cut to at most that, A @ B2^T to that on both sides; None leaves them.
        is_chain: whether every group's A is the result of the group before: layers, all of one size.
    """

    sizes: tuple[tuple[int, int, int], ...]
    form: Form = "list"
    out_dtype: OutDtype = torch.bfloat16
    has_alpha: bool = False
    out_m_major: bool = False
    activation: Activation | None = None
    weight_layout: WeightLayout = "separate"
    limit: float | None = None
    is_chain: bool = False

    @property
    def num_b(self) -> int:
        """Operands ``b`` that every group's ``a`` is multiplied by."""
        return 1 if self.activation is None or self.weight_layout != "separate" else 2

    def out_columns(self, n: int) -> int:
        """Columns of C of a group whose ``b`` has ``n`` rows."""
        return n if self.weight_layout == "separate" else n // 2

    @property
    def num_groups(self) -> int:
        """Groups, empty ones included."""
        return len(self.sizes)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the real rows: 2*M*N*K over all groups and operands ``b``."""
        return sum(2 * m * n * k * self.num_b for m, n, k in self.sizes)

    @property
    def bytes(self) -> int:
        """Least traffic in bytes: A, B and both scales read once, C written once; no padding is counted."""
        read = sum(gemm_bytes(m, n, k, 0, num_b=self.num_b) for m, n, k in self.sizes)
        return read + sum(out_bytes(m, self.out_columns(n), self.out_dtype) for m, n, _ in self.sizes)

    def __str__(self) -> str:
        """One line: form, sizes, output dtype, operations, bytes."""
        shapes = " ".join(f"{m}x{n}x{k}" for m, n, k in self.sizes)
        alpha = ", alpha" if self.has_alpha else ""
        dual = "" if self.activation is None else f"dual ({self.activation}), "
        return (
            f"{dual}{self.form} of {self.num_groups} groups (MxNxK {shapes}) -> {_dtype_name(self.out_dtype)}{alpha}"
            f": {self.flops / 1e9:.3g} GFLOP, {self.bytes / 1e6:.3g} MB"
        )


@dataclass(frozen=True)
class SecondOperand:
    """What a dual GEMM multiplies ``a`` by besides: the same shapes as ``b``, ``b_scale`` and ``alpha``.

    ``b`` and ``b_scale`` are empty where the first ``b`` has the rows of both.
    """

    b: tuple[torch.Tensor, ...]
    b_scale: tuple[torch.Tensor, ...]
    alpha: torch.Tensor | None


@dataclass(frozen=True)
class OutScales:
    """What NVFP4 results have besides data.

    Attributes:
        scale: uint8, 1-D, contiguous, a group: e4m3 in the 128x4 blocked layout. Padding columns become zeros; padding
            rows are not written.
        global_scale: float32 [G] on the operands' device, or None for 1.
    """

    scale: tuple[torch.Tensor, ...]
    global_scale: torch.Tensor | None


@dataclass(frozen=True)
class GroupedOperands:
    """Operands of a list-form problem in the one shape that launches and references take.

    Attributes:
        a: uint8 [M, K/2] a group, two e2m1 a byte, unit stride in K, row pitch a multiple of 16 bytes.
        b: uint8 [N, K/2] a group, the same.
        a_scale, b_scale: uint8, 1-D, contiguous: e4m3 in the 128x4 blocked layout. Padding rows may hold
            anything. Padding columns, which exist where K % 64 != 0, meet zero operands in the MMA and must be
            finite, as the zeros that ``to_blocked`` writes are: 0 * NaN would reach the result.
        alpha: float32 [G] on the operands' device, or None.
        out: [M, N] a group, unit stride in N, or in M where the problem says ``out_m_major``; of NVFP4 results, data:
            uint8 [M, N/2], unit stride in N, base and pitch multiples of 16 bytes.
        second: of a dual GEMM; None where there is one product.
        out_scales: of NVFP4 results; None otherwise.
        chain: of a chain, int32 [G], zeros; None otherwise.

    All are views of the caller's memory, but for converted row-major scales, an allocated ``out``, and an
    ``alpha`` given as numbers.
    """

    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]
    a_scale: tuple[torch.Tensor, ...]
    b_scale: tuple[torch.Tensor, ...]
    alpha: torch.Tensor | None
    out: tuple[torch.Tensor, ...]
    second: SecondOperand | None = None
    out_scales: OutScales | None = None
    chain: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device that every operand is on."""
        return self.a[0].device


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


@dataclass(frozen=True)
class Gate:
    """What makes a GEMM dual: as the attributes of :class:`GroupedProblem` of these names."""

    activation: Activation
    limit: float | None
    weight_layout: Any

    @classmethod
    def checked(cls, activation: Any, limit: Any, weight_layout: Any, second: tuple[Any, Any]) -> "Gate":
        """Raises ValueError or TypeError where an argument is none of its values, or the weights do not fit the layout.

        Args:
            second: ``b2`` and ``b2_scale``, each None where it was not given.
        """
        for name, value, choices in (
            ("activation", activation, get_args(Activation)),
            ("weight_layout", weight_layout, get_args(DualWeights)),
        ):
            if value not in choices:
                names = ", ".join(f'"{choice}"' for choice in choices)
                raise ValueError(f"{name}={value!r} is unknown; use one of {names}")
        if limit is not None and (not isinstance(limit, int | float) or not limit > 0):
            raise ValueError(f"limit={limit!r} is not a positive number; pass None for no limit")
        is_separate = weight_layout == "separate"
        if any((part is not None) != is_separate for part in second):
            fix = "pass b2 and b2_scale" if is_separate else "b1 holds both; pass None for b2 and b2_scale"
            raise TypeError(f"weight_layout={weight_layout!r}: {fix}")
        return cls(activation, limit, weight_layout)

    def check_rows(self, label: str, n: int) -> None:
        """Raises ValueError where ``n`` rows of weights are not whole periods of the layout."""
        if self.weight_layout == "concatenated":
            concatenated_rows(label, n)
        period = PERIODS.get(self.weight_layout, 1)
        if n % period:
            raise ValueError(
                f"{label} has {n} rows; weight_layout={self.weight_layout!r} has whole periods of {period}: pad both "
                "products' rows"
            )


def concatenated_rows(label: str, rows: int) -> int:
    """Rows of each half of concatenated weights. Raises ValueError where the halves' scales share a block."""
    if rows % 256:
        raise ValueError(
            f'{label} has {rows} rows; weight_layout="concatenated" takes two halves whose scale blocks of 128 rows are '
            "their own: a multiple of 256 rows; pad both products' rows"
        )
    return rows // 2


def _split_concatenated(b: Any, scale: Any, scale_layout: ScaleLayout) -> tuple[Any, Any]:
    """Views of the upper and the lower halves of every group's weights and of their scales."""
    _check_sequences({"a": b, "b1": b, "b1_scale": scale})
    halves: list[Any] = [[], [], [], []]
    for g, (rows, s) in enumerate(zip(b, scale, strict=True)):
        label = f"group {g}: b1"
        operand = _fp4_rows(label, "2 N", rows)
        n, k = concatenated_rows(label, len(operand)), 2 * operand.shape[1]
        flat = _scale(f"{label}_scale", "2 N", s, 2 * n, k, scale_layout)
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
    flat_a = tuple(_fp4_rows(f"group {g}: a", "M", t) for g, t in enumerate(a))
    flat_b = [tuple(_fp4_rows(f"group {g}: {w.name}", "N", t) for g, t in enumerate(w.b)) for w in weights]
    first, *others = zip(weights, flat_b, strict=True)
    sizes = _group_sizes(flat_a, first[0].name, first[1])
    for other, operand in others:
        _check_same_rows(first[0].name, first[1], other.name, operand)
    out_m_major = out is not None and result.dtype != NVFP4 and _is_m_major(out)
    has_alpha = any(alpha is not None for alpha in alphas.values())
    problem = GroupedProblem(sizes, "list", result.dtype, has_alpha, out_m_major)
    if gate is not None:
        for g, (_, n, _) in enumerate(sizes):
            gate.check_rows(f"group {g}: {first[0].name}", n)
        problem = replace(problem, **vars(gate))
    out_sizes = [(m, problem.out_columns(n)) for m, n, _ in sizes]
    scales_a = [
        _scale(f"group {g}: a_scale", "M", a_scale[g], m, k, scale_layout)
        for g, (m, _, k) in enumerate(sizes)
    ]
    scales_b = [
        [
            _scale(f"group {g}: {w.name}_scale", "N", w.scale[g], n, k, scale_layout)
            for g, (_, n, k) in enumerate(sizes)
        ]
        for w in weights
    ]
    device = a[0].device
    for name, alpha in alphas.items():
        _check_alpha(name, alpha, problem.num_groups, device)
    if result.dtype == NVFP4:
        _check_alpha("out_global_scale", result.global_scale, problem.num_groups, device)
        for g, (_, n) in enumerate(out_sizes):
            check_quantized_columns(f"group {g}: N", n)
    outs: tuple[torch.Tensor, ...] | None = None
    out_scales: tuple[torch.Tensor, ...] = ()
    if out is not None:
        if isinstance(result.dtype, torch.dtype):
            outs = tuple(
                _out_view(f"group {g}: out", out[g], m, n, result.dtype, out_m_major)
                for g, (m, n) in enumerate(out_sizes)
            )
        else:
            outs = tuple(
                _out_data(f"group {g}: data of out", out[g], m, n) for g, (m, n) in enumerate(out_sizes)
            )
            out_scales = tuple(
                _scale(f"group {g}: scale of out", "M", out_scale[g], m, n, "blocked")
                for g, (m, n) in enumerate(out_sizes)
            )
        named: dict[str, Iterable[torch.Tensor]] = {"a": flat_a, "a_scale": scales_a, "out": outs}
        for w, operand, scales in zip(weights, flat_b, scales_b, strict=True):
            named |= {w.name: operand, f"{w.name}_scale": scales}
        factors = alphas | {"out_global_scale": result.global_scale}
        _check_overlap(_regions(named | {"out scale": out_scales}, factors))

    # Every check has passed: from here on memory may be allocated.
    if scale_layout == "rowmajor":
        scales_a = [_to_blocked(s) for s in scales_a]
        scales_b = [[_to_blocked(s) for s in scales] for scales in scales_b]
    if outs is None:
        if result.dtype == NVFP4:
            outs = tuple(new_quantized_data((m, n), device) for m, n in out_sizes)
            out_scales = tuple(new_quantized_scale((m,), n, device).view(-1) for m, n in out_sizes)
        else:
            outs = tuple(torch.empty((m, n), dtype=result.dtype, device=device) for m, n in out_sizes)
    factor, *second_factor = (_alpha_tensor(alpha, device) for alpha in alphas.values())
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


def check_quantized_columns(label: str, n: int) -> None:
    """Raises ValueError where rows of ``n`` results are not whole NVFP4 blocks."""
    if n == 0 or n % SF_VEC_SIZE:
        raise ValueError(
            f'{label}={n} is not a positive multiple of {SF_VEC_SIZE} (NVFP4 block size), and out_dtype="nvfp4" stores '
            f"rows of blocks; pad b to {max(-(-n // SF_VEC_SIZE), 1) * SF_VEC_SIZE} rows"
        )


def new_quantized_data(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Uninitialised uint8 data of NVFP4 results ``[..., N]``, rows a multiple of 16 bytes apart as operands have them."""
    *rows, n = shape
    pitch = -(-n // (2 * TMA_ALIGN_BYTES)) * TMA_ALIGN_BYTES
    return torch.empty((*rows, pitch), dtype=torch.uint8, device=device)[..., : n // 2]


def new_quantized_scale(lead: Sequence[int], n: int, device: torch.device) -> torch.Tensor:
    """Uninitialised uint8 scales of NVFP4 results ``[..., M, N]``, ``lead`` without N: [..., rm, rn, 32, 4, 4]."""
    *batches, rows = lead
    atoms = atom_counts(rows, n // SF_VEC_SIZE)
    return torch.empty((*batches, *atoms, *ATOM_SHAPE), dtype=torch.uint8, device=device)


def _parts(out: Any) -> tuple[list[Any], list[Any]]:
    """Data and scales of NVFP4Tensors."""
    if not isinstance(out, list | tuple) or not all(isinstance(t, NVFP4Tensor) for t in out):
        raise TypeError('out_dtype="nvfp4" takes out as a list of NVFP4Tensor, one a group')
    for g, t in enumerate(out):
        if t.scale_layout != "blocked":
            raise ValueError(f"group {g}: out has {t.scale_layout} scales; the kernel writes blocked ones")
    return [t.data for t in out], [t.scale for t in out]


def _out_data(label: str, tensor: torch.Tensor, m: int, n: int) -> torch.Tensor:
    """The uint8 [M, N/2] view of a caller's NVFP4 output, aligned like an operand, as which the next layer reads it."""
    rows = _fp4_rows(label, "M", tensor)
    if rows.shape != (m, n // 2):
        raise ValueError(f"{label} has shape {list(tensor.shape)}; expected [M, N/2] = {[m, n // 2]}")
    return rows


def _alpha_tensor(alpha: Any, device: torch.device) -> torch.Tensor | None:
    if alpha is None or isinstance(alpha, torch.Tensor):
        return alpha
    return torch.tensor(alpha, dtype=torch.float32, device=device)


def _dtype_name(dtype: OutDtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return " or ".join(_dtype_name(d) for d in dtypes)


def check_out_dtype(out_dtype: OutDtype, out_global_scale: Any) -> None:
    """Raises TypeError for a dtype that no kernel writes, ValueError for a global scale that nothing uses."""
    if out_dtype != NVFP4 and out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype={out_dtype!r} is not supported; use {_names(OUT_DTYPES)} or {NVFP4!r}")
    if out_global_scale is not None and out_dtype != NVFP4:
        raise ValueError(
            f"out_global_scale is given and out_dtype={out_dtype}; it goes with out_dtype={NVFP4!r}"
        )


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
            _check_tensor(f"group {g}: {name}", tensor, named["a"][0])


def _check_tensor(label: str, tensor: Any, first: Any) -> None:
    check_is_tensor(label, tensor)
    if tensor.device != first.device:
        raise ValueError(
            f"{label} is on {tensor.device} and group 0: a on {first.device}; move all operands to one device"
        )
    _check_no_grad(label, tensor)


def _check_no_grad(label: str, tensor: torch.Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UnsupportedProblem(
            f"{label} has requires_grad=True; there is no backward pass: pass .detach() or use torch.no_grad()"
        )


def _check_align(label: str, tensor: torch.Tensor, align_bytes: int, why: str) -> None:
    if tensor.numel() and tensor.data_ptr() % align_bytes:
        raise ValueError(
            f"{label} starts at address 0x{tensor.data_ptr():x}, not a multiple of {align_bytes} bytes ({why}); "
            f"use a view that starts on such a boundary, or .clone()"
        )


def _drop_batch(label: str, tensor: torch.Tensor, shape: str) -> torch.Tensor:
    """[X, Y] or [X, Y, 1] -> [X, Y]."""
    if tensor.ndim == 3 and tensor.shape[2] == 1:
        return tensor.squeeze(2)
    if tensor.ndim != 2:
        raise ValueError(f"{label} has shape {list(tensor.shape)}; expected {shape}")
    return tensor


def _with_pitch(tensor: torch.Tensor, pitch: int) -> torch.Tensor:
    """The same elements with canonical strides, for shapes in which one of the strides is never used."""
    return tensor.as_strided(tensor.shape, (pitch, 1))


def _fp4_rows(label: str, letter: str, tensor: torch.Tensor) -> torch.Tensor:
    """The uint8 [rows, K/2] view of an operand, or the reason why it is none."""
    if tensor.dtype not in DATA_DTYPES:
        raise TypeError(
            f"{label} has dtype {_dtype_name(tensor.dtype)}; expected {_names(DATA_DTYPES)} (two e2m1 a byte)"
        )
    rows = _drop_batch(label, tensor.view(torch.uint8), f"[{letter}, K/2] or [{letter}, K/2, 1]")
    num_rows, row_bytes = rows.shape
    k = 2 * row_bytes
    if k == 0:
        raise UnsupportedProblem(
            f"{label} has shape {list(tensor.shape)}: K=0; K must be at least {SF_VEC_SIZE}"
        )
    if k % SF_VEC_SIZE:
        padded = -(-k // SF_VEC_SIZE) * SF_VEC_SIZE
        raise ValueError(
            f"{label}: K={k} is not a multiple of {SF_VEC_SIZE} (NVFP4 block size); pad K to {padded}"
        )
    if max(num_rows, k) > INT32_MAX:
        raise UnsupportedProblem(
            f"{label}: {letter}={num_rows}, K={k} exceeds the 32-bit limit {INT32_MAX}; split the problem"
        )
    if num_rows > 0 and rows.stride(1) != 1:
        raise ValueError(
            f"{label} has stride {rows.stride(1)} in K (strides {tuple(tensor.stride())}), not 1 (K-major); "
            f"copy with .contiguous() after bringing it to [{letter}, K/2]"
        )
    _check_align(label, rows, TMA_ALIGN_BYTES, "TMA base address")
    aligned = -(-row_bytes // TMA_ALIGN_BYTES) * TMA_ALIGN_BYTES
    if num_rows <= 1:
        return _with_pitch(rows, aligned)
    _check_pitch(label, rows, aligned)
    return rows


def _check_pitch(label: str, rows: torch.Tensor, aligned: int) -> None:
    row_bytes, pitch = rows.shape[1], rows.stride(0)
    if pitch < row_bytes:
        raise ValueError(
            f"{label} has a row pitch of {pitch} bytes for rows of {row_bytes}: rows overlap; "
            f"copy with .contiguous()"
        )
    if pitch % TMA_ALIGN_BYTES:
        raise ValueError(
            f"{label} (K={2 * row_bytes}) has a row pitch of {pitch} bytes, not a multiple of {TMA_ALIGN_BYTES} "
            f"(TMA row pitch); keep the rows {aligned} bytes apart: buffer of {aligned} bytes a row, "
            f"pass buffer[:, :{row_bytes}]"
        )


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


def _scale(
    label: str, letter: str, scale: torch.Tensor, rows: int, k: int, layout: ScaleLayout
) -> torch.Tensor:
    """Blocked: the 1-D uint8 view. Row-major: the checked [rows, K/16] matrix, still to be converted."""
    if layout == "rowmajor":
        return _rowmajor_scale(label, letter, scale, rows, k)
    try:
        blocked = as_blocked(scale, rows, k)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{label}: {error}") from error
    _check_align(label, blocked, TMA_ALIGN_BYTES, "TMA base address")
    return blocked


def _rowmajor_scale(label: str, letter: str, scale: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    if scale.dtype not in SCALE_DTYPES:
        raise TypeError(
            f"{label} has dtype {_dtype_name(scale.dtype)}; expected {_names(SCALE_DTYPES)} (e4m3 codes)"
        )
    expected = [rows, k // SF_VEC_SIZE]
    matrix = _drop_batch(label, scale, f"[{letter}, K/16] = {expected} (row-major)")
    if list(matrix.shape) != expected:
        raise ValueError(
            f"{label} has shape {list(scale.shape)}; expected {expected} (row-major, {letter}={rows}, K={k}); "
            f"for scales in the 128x4 layout pass scale_layout='blocked'"
        )
    return matrix


def _to_blocked(scale: torch.Tensor) -> torch.Tensor:
    return to_blocked(scale).view(torch.uint8).view(-1)


def _check_alpha(name: str, alpha: Any, num_groups: int, device: torch.device) -> None:
    if alpha is None:
        return
    if not isinstance(alpha, torch.Tensor):
        if not isinstance(alpha, list | tuple) or not all(isinstance(x, Real) for x in alpha):
            raise TypeError(
                f"{name}={alpha!r} is neither a float32 tensor nor a list of numbers, one a group"
            )
        if len(alpha) != num_groups:
            raise ValueError(
                f"{name} has {len(alpha)} entries for {num_groups} groups; pass one number a group"
            )
        return
    if alpha.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {_dtype_name(alpha.dtype)}; expected float32: {name}.float()")
    if tuple(alpha.shape) != (num_groups,) or not alpha.is_contiguous():
        raise ValueError(
            f"{name} has shape {list(alpha.shape)}, strides {tuple(alpha.stride())}; expected contiguous "
            f"[{num_groups}], one factor a group: {name}.reshape({num_groups}).contiguous()"
        )
    if alpha.device != device:
        raise ValueError(
            f"{name} is on {alpha.device} and group 0: a on {device}; move all operands to one device"
        )
    _check_no_grad(name, alpha)


def _is_m_major(out: Iterable[torch.Tensor]) -> bool:
    """Whether columns are contiguous. One group with several rows and columns decides for all."""
    return any(
        t.ndim >= 2 and min(t.shape[:2]) > 1 and t.stride(0) == 1 and t.stride(1) != 1
        for t in out
        if isinstance(t, torch.Tensor)
    )


def _out_view(
    label: str, tensor: torch.Tensor, m: int, n: int, dtype: torch.dtype, m_major: bool
) -> torch.Tensor:
    """The [M, N] view of a caller's output, with canonical strides."""
    if tensor.dtype != dtype:
        raise TypeError(
            f"{label} has dtype {_dtype_name(tensor.dtype)} and out_dtype is {_dtype_name(dtype)}; "
            f"pass out_dtype={tensor.dtype} or an out of dtype {_dtype_name(dtype)}"
        )
    expected = f"[M, N] = {[m, n]} or {[m, n, 1]}"
    matrix = _drop_batch(label, tensor, expected)
    if matrix.shape != (m, n):
        raise ValueError(f"{label} has shape {list(tensor.shape)}; expected {expected}")
    _check_align(label, matrix, dtype.itemsize, "natural alignment")
    if m_major:
        return _runs(label, matrix.T, "M", "column", f"torch.empty({n}, {m}).T").T
    return _runs(label, matrix, "N", "row", f"torch.empty({m}, {n})")


def _runs(label: str, matrix: torch.Tensor, letter: str, line: str, fix: str) -> torch.Tensor:
    """``matrix`` [lines, length] with unit stride along its lines, which must not overlap."""
    lines, length = matrix.shape
    if matrix.numel() == 0:
        return _with_pitch(matrix, max(length, 1))
    if length > 1 and matrix.stride(1) != 1:
        raise ValueError(
            f"{label} has stride {matrix.stride(1)} in {letter}, not 1 ({line}-major); allocate it as {fix}"
        )
    if lines == 1:
        return _with_pitch(matrix, length)
    pitch = matrix.stride(0)
    if not length <= pitch <= INT32_MAX:
        raise ValueError(
            f"{label} has a {line} pitch of {pitch} elements, expected {length} ({letter}) to {INT32_MAX}; "
            f"allocate it as {fix}"
        )
    return _with_pitch(matrix, pitch)


class _Region(NamedTuple):
    """Bytes of a tensor: ``num_rows`` intervals of ``row_bytes``, ``pitch`` bytes apart."""

    start: int
    stop: int
    row_bytes: int
    pitch: int
    name: str


def _regions(named: Mapping[str, Iterable[torch.Tensor]], alphas: Mapping[str, Any]) -> list[_Region]:
    found = [
        _region(f"{name}[{g}]", tensor) for name, tensors in named.items() for g, tensor in enumerate(tensors)
    ]
    found += [_region(name, alpha) for name, alpha in alphas.items() if isinstance(alpha, torch.Tensor)]
    return sorted(region for region in found if region is not None)


def _region(name: str, tensor: torch.Tensor) -> _Region | None:
    """Of a matrix, or of a contiguous vector as one row."""
    if tensor.numel() == 0:
        return None
    if tensor.ndim == 2 and tensor.stride(0) < tensor.stride(1):
        tensor = tensor.T
    (rows, cols), (pitch, step) = (
        (tensor.shape, tensor.stride()) if tensor.ndim == 2 else ((1, tensor.shape[0]), (0, 1))
    )
    size, start = tensor.element_size(), tensor.data_ptr()
    row_bytes = ((cols - 1) * step + 1) * size
    return _Region(
        start, start + (rows - 1) * pitch * size + row_bytes, row_bytes, max(pitch * size, 1), name
    )


def _check_overlap(regions: list[_Region]) -> None:
    """No output shares a byte with an input or another output; ``regions`` are sorted by address."""
    live: list[_Region] = []
    for region in regions:
        live = [other for other in live if other.stop > region.start]
        for other in live:
            # `region` starts at or after `other`: they are sorted.
            if (region.name.startswith("out") or other.name.startswith("out")) and _share_bytes(
                region, other
            ):
                first, second = sorted((region.name, other.name), key=lambda name: not name.startswith("out"))
                raise ValueError(
                    f"{first} overlaps {second} in memory (from address 0x{region.start:x}); "
                    f"give every group an output of its own that no operand lies in"
                )
        live.append(region)


def _share_bytes(x: _Region, y: _Region) -> bool:
    """Whether rows of x and y meet, x starting at or after y: column slices of one buffer interleave and do not."""
    for start in range(x.start, x.stop, x.pitch):
        # The last row of y that starts at or before this row of x, and the one after it.
        below = start - (start - y.start) % y.pitch
        for row in (below, below + y.pitch):
            if row < y.stop and row < start + x.row_bytes and start < row + y.row_bytes:
                return True
    return False
