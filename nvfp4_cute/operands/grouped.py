"""Checks the operands of grouped problems of every form before anything is written, and returns records for launches.

Lists have one entry per group. In the other forms and in batches, one entry holds all groups. Checks never read tensor data, so
nothing waits for the GPU, and a captured graph follows sizes that change.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import ATOM_ROWS, BlockFormat, ScaleLayout, format_of_values
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.formats.block_scaled import is_tensor_of, tensors_of
from nvfp4_cute.operands import rules
from nvfp4_cute.operands.group_sizes import check_group_sizes, check_masked_m, check_offs, ends_of
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.operands.overlap import check_overlap
from nvfp4_cute.problem import (
    INT32_MAX,
    RESULT_FORMATS,
    Gate,
    GroupedProblem,
    OutDtype,
    new_quantized_data,
    new_quantized_scale,
    result_format,
    result_scale_dtype,
)

DeviceForm = Literal["ragged", "masked"]
# Shape of ``a`` by form, for messages.
A_SHAPES: dict[DeviceForm, str] = {"ragged": "[sum of M, K/2]", "masked": "[G, M_max, K/2]"}


@dataclass(frozen=True, eq=False)
class GroupedOperands:
    """Checked operands of a grouped problem: one entry per group of a list; in other forms, one entry for all groups.

    Attributes:
        a: rows of M. Ragged: one batch, in which every group's scales begin a row of atoms.
        b: rows of N; in other forms than a list, one batch per group.
        out: [M, N], or [batches, M, N], with unit stride in N, or in M if the problem has ``out_m_major``. Quantized results:
            uint8 data.
        alpha: float32 [G] on the operands' device, or None.
        b2: for a dual GEMM with separate weights: like ``b``.
        alpha2: for a dual GEMM: like ``alpha``.
        out_scale: for quantized results, one entry per entry of ``out``: uint8, blocked. Padding columns become zeros; padding
            rows are not written.
        out_global_scale: float32 [G], or None for 1.
        sizes: int32 [G]. Ragged: inclusive ends of the groups in the rows of ``a``. Masked: numbers of their rows. Routed:
            int32 or int64 [G], the ids of their weights. None otherwise.
        chain: for a chain, int32 [G], zeros; None otherwise.
        bias: float16, bfloat16 or float32 [N] for every group; in a dual GEMM [G, 2 N], one number per row of both weights; or
            None.
        owners: for a list whose groups were divided (``launch.bands``): the caller's group of each entry; empty otherwise.
        first_expert: for routed groups: id of the first expert in ``b``.

    All are views of the caller's memory, except converted row-major scales, new results, and factors given as numbers.
    """

    a: tuple[Operand, ...]
    b: tuple[Operand, ...]
    out: tuple[torch.Tensor, ...]
    alpha: torch.Tensor | None = None
    b2: tuple[Operand, ...] = ()
    alpha2: torch.Tensor | None = None
    out_scale: tuple[torch.Tensor, ...] = ()
    out_global_scale: torch.Tensor | None = None
    sizes: torch.Tensor | None = None
    chain: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    owners: tuple[int, ...] = ()
    first_expert: int = 0

    @property
    def device(self) -> torch.device:
        """Device of all operands."""
        return self.b[0].data.device


class Weights(NamedTuple):
    """One ``b`` as the caller gave it, with the caller's names for it; None if another one holds the rows of both."""

    name: str
    data: Any
    scale: Any
    alpha_name: str
    alpha: Any
    format: BlockFormat = NVFP4_FORMAT


class Result(NamedTuple):
    """The requested result, and the caller's memory for it."""

    out: Any
    dtype: OutDtype
    global_scale: Any

    @property
    def format(self) -> BlockFormat | None:
        """Format of the result if it is quantized; None otherwise."""
        return result_format(self.dtype)


def given_weights(weights: list[Weights]) -> list[Weights]:
    """Returns the first weights, which are required, and the second ones if they are given."""
    return weights[:1] + [w for w in weights[1:] if w.data is not None]


def dual_weights(first: Weights, second: Weights, one: Any) -> list[Weights]:
    """Returns the weights of a dual GEMM. If only one alpha is given, the other becomes ``one``."""
    if first.alpha is None and second.alpha is None:
        return [first, second]
    return [w._replace(alpha=one if w.alpha is None else w.alpha) for w in (first, second)]


def _may_have_rows_of_scales(b_format: BlockFormat, result: Result, gate: Gate | None) -> bool:
    """Returns whether scales may be row-major: not those of interleaved weights, whose blocks would span both products."""
    is_interleaved = gate is not None and gate.is_interleaved and b_format.scale_layout == "rowmajor"
    return rules.may_be_of_rows(result.format) and not is_interleaved


# ---- lists -----------------------------------------------------------------------------------------------------


def check_lists(
    a: Any,
    a_scale: Any,
    weights: list[Weights],
    result: Result,
    scale_layout: ScaleLayout,
    gate: Gate | None = None,
    a_format: BlockFormat = NVFP4_FORMAT,
) -> tuple[GroupedProblem, GroupedOperands]:
    """Checks and normalizes the operands of a list: C_g = alpha_g * A_g @ B_g^T, or of a dual GEMM.

    Args:
        a: uint8 or float4_e2m1fn_x2, [M, K/2] or [M, K/2, 1] per group, unit stride in K; rows may be further apart than K/2
            bytes. M, N and K may differ from group to group; M or N may be 0.
        a_scale: float8_e4m3fn or uint8. Blocked: flat, [rm, rk, 32, 4, 4], or the (32, 4, rm, 4, rk, 1) view, not copied.
            Row-major: [M, K/16] or [M, K/16, 1], converted into new memory. None: ``a`` has 16-bit values, [M, K] or [M, K, 1].
        weights: N rows in the same layouts; alpha is float32 [G] on the operands' device, G numbers, or None for 1.
        result: [M, N] or [M, N, 1] per group, all with unit stride in N or all with unit stride in M; None allocates. Never
            written here. With a format's name: tensors of that format and, for NVFP4, a global scale, float32 [G] on the
            operands' device, or None.
        scale_layout: layout of all scales, "blocked" or "rowmajor".
        gate: activation and weight layout of a dual GEMM.
        a_format: format of ``a``, which decides dtypes and extents; ignored for 16-bit values.

    Raises:
        TypeError: an argument or an entry has the wrong type or dtype.
        ValueError: a shape, stride, alignment, count or device is wrong, or an output overlaps another tensor.
        UnsupportedProblem: the arguments are well formed, but no kernel computes them (gradients, K = 0, sizes beyond 32 bits).
    """
    pair, is_dual = (a_format, weights[0].format), gate is not None
    rules.check_result(result.dtype, result.global_scale, pair, a_scale is not None, is_dual=is_dual)
    rules.check_no_factor(result.dtype, weights[0].alpha)
    rules.check_scale_layout(scale_layout)
    takes_rows = _may_have_rows_of_scales(weights[0].format, result, gate)
    rules.check_formats(a_format=a_format, b_format=weights[0].format, takes_rows=takes_rows)
    alphas = {w.alpha_name: w.alpha for w in weights}
    alpha_names = [w.alpha_name for w in weights]
    weights = given_weights(weights)
    outs = _listed_outputs(result)
    lists: dict[str, Any] = {"a": a} | {w.name: w.data for w in weights} | rules.given(a_scale=a_scale)
    lists |= {f"{w.name}_scale": w.scale for w in weights}
    device = _check_lists(lists | outs)
    num_groups = len(a)

    formats: dict[str, BlockFormat | None] = {"a": None if a_scale is None else a_format}
    formats |= {w.name: w.format for w in weights}
    names = list(formats)
    rows = [
        [_matrix(f"group {g}: {name}", name, x, fmt) for g, x in enumerate(lists[name])]
        for name, fmt in formats.items()
    ]
    for g, group in enumerate(zip(*rows, strict=True)):
        _check_same_k(f"group {g}: ", names[1], (formats["a"], weights[0].format), *group)
        if gate is not None:
            gate.check_rows(f"group {g}: {names[1]}", len(group[1]))
    if a_scale is None:
        _check_one_dtype(rows[0])
        a_format = format_of_values(rows[0][0].dtype)
    listed_a, first, *others = (
        [
            _operand(f"group {g}: {name}_scale", name, data, scale, scale_layout, fmt)
            for g, (data, scale) in enumerate(zip(side, lists[f"{name}_scale"], strict=True))
        ]
        if fmt is not None
        else [*map(Operand.of_values, side)]
        for (name, fmt), side in zip(formats.items(), rows, strict=True)
    )
    given = rules.tensors_in(alphas | {"out_global_scale": result.global_scale})
    rules.check_tensors({"group 0: a": a[0]} | given)
    gate, first, others = _split(gate, first, others)
    sizes = tuple((len(x), y.rows, y.k) for x, y in zip(rows[0], first, strict=True))
    problem = _problem("list", sizes, result.dtype, alphas, gate, (a_format, weights[0].format))
    shapes = [(m, problem.out_columns(n)) for m, n, _ in sizes]
    factors = {name: rules.factors(name, x, num_groups, device) for name, x in alphas.items()}
    global_scale = rules.global_scales("out_global_scale", result.global_scale, num_groups, device)
    if result.format is not None:
        for g, (_, n) in enumerate(shapes):
            rules.check_quantized_columns(f"group {g}: N", n, result.format)
    results, scales, m_major = _list_results(outs, shapes, result, device)
    checked = GroupedOperands(
        tuple(listed_a),
        tuple(first),
        results,
        factors[alpha_names[0]],
        tuple(others[0]) if others else (),
        factors.get("alpha2"),
        scales,
        global_scale,
    )
    if outs:
        named = {"a": listed_a, weights[0].name: first} | ({"b2": others[0]} if others else {})
        inputs = {f"{name}[{g}]": x.data for name, side in named.items() for g, x in enumerate(side)}
        inputs |= {f"{name}_scale[{g}]": x.scale for name, side in named.items() for g, x in enumerate(side)}
        written = {f"out[{g}]": t for g, t in enumerate(results)}
        written |= {f"scale of out[{g}]": t for g, t in enumerate(scales)}
        check_overlap(written, inputs | rules.tensors_in(factors | {"out_global_scale": global_scale}))
    return replace(problem, out_m_major=m_major), checked


def _listed_outputs(result: Result) -> dict[str, Any]:
    """Returns the caller's outputs by name; data and scales of quantized ones."""
    out, format = result.out, result.format
    if out is None or format is None:
        return rules.given(out=out)
    if not isinstance(out, list | tuple) or not all(is_tensor_of(t, format) for t in out):
        raise TypeError(
            f'out_dtype="{format.name}" takes out as a list of {tensors_of(format)}, one per group'
        )
    for g, t in enumerate(out):
        if t.scale_layout != format.scale_layout:
            raise ValueError(
                f"group {g}: out has {t.scale_layout} scales; the kernel writes {format.scale_layout} ones"
            )
    return {"data of out": [t.data for t in out], "scale of out": [t.scale for t in out]}


def _check_lists(lists: dict[str, Any]) -> torch.device:
    """Checks for sequences of tensors of one length, on one device, without gradients; returns the device."""
    if isinstance(lists["a"], list | tuple) and not lists["a"]:
        raise ValueError("a is an empty list; pass at least one group (a group may have no rows)")
    rules.check_quantized(lists)
    for name, tensors in lists.items():
        if isinstance(tensors, torch.Tensor):
            raise TypeError(
                f"{name} is a single tensor; without offs or masked_m pass a list with one tensor per group: [{name}]"
            )
        if not isinstance(tensors, list | tuple):
            raise TypeError(
                f"{name} is a {type(tensors).__name__}; pass a list or tuple with one tensor per group"
            )
    num_groups = len(lists["a"])
    for name, tensors in lists.items():
        if len(tensors) != num_groups:
            raise ValueError(
                f"{name} has {len(tensors)} entries and a has {num_groups}; every list needs one per group"
            )
    tensors = {f"group {g}: {name}": t for name, side in lists.items() for g, t in enumerate(side)}
    return rules.check_tensors(tensors)


def _matrix(label: str, name: str, data: torch.Tensor, fmt: BlockFormat | None) -> torch.Tensor:
    """Returns one group's rows [rows, K/2] or [rows, K/2, 1]; without a format, 16-bit values [rows, K(, 1)]."""
    letter, length = "M" if name == "a" else "N", _length(fmt)
    if fmt is not None:
        rules.as_bytes(label, data, fmt)
    matrix = rules.without_batch(label, data, f"[{letter}, {length}] or [{letter}, {length}, 1]")
    if fmt is None:
        return rules.activation_rows(label, letter, matrix)
    return rules.packed_rows(label, letter, matrix, fmt)


def _check_one_dtype(activations: list[torch.Tensor]) -> None:
    """Raises TypeError for activations of different dtypes."""
    dtypes = {x.dtype for x in activations}
    if len(dtypes) > 1:
        raise TypeError(
            f"a has groups of {' and of '.join(sorted(map(rules.dtype_name, dtypes)))}; convert them to one dtype"
        )


def _operand(
    label: str, name: str, rows: torch.Tensor, scale: torch.Tensor, layout: ScaleLayout, fmt: BlockFormat
) -> Operand:
    """Makes one group's operand. ``label`` is the name of its scales in messages."""
    k, letter = fmt.elements(rows.shape[1]), "M" if name == "a" else "N"
    blocked = rules.blocked_scales(label, letter, scale, len(rows), k, layout, fmt=fmt)
    rules.check_padding_columns(label, blocked, len(rows), k, fmt)
    return Operand(rows, blocked, fmt, len(rows), k)


def _list_results(
    outs: dict[str, Any], shapes: list[tuple[int, int]], result: Result, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], bool]:
    """Returns the results and their scales if quantized, the caller's or new ones, and whether columns are contiguous."""
    data, scales = list[torch.Tensor](), list[torch.Tensor]()
    dtype, format = result.dtype, result.format
    if not isinstance(dtype, torch.dtype):
        assert format is not None
        if not outs:
            data = [new_quantized_data(shape, device, format) for shape in shapes]
            new = [new_quantized_scale((m,), n, device, format) for m, n in shapes]
            return tuple(data), tuple(scale.view(torch.uint8).view(-1) for scale in new), False
        for g, ((m, n), t, scale) in enumerate(
            zip(shapes, outs["data of out"], outs["scale of out"], strict=True)
        ):
            label, shape = f"group {g}: data of out", (m, format.row_bytes(n))
            letters = f"[M, {format.length.replace('K', 'N')}] = {list(shape)}"
            rows = rules.without_batch(label, t, letters)
            data.append(rules.quantized_rows(label, rows, shape, format))
            label = f"group {g}: scale of out"
            rules.check_written_scales(label, scale, format)
            scales.append(rules.blocked_scales(label, "M", scale, m, n, "blocked", fmt=format))
        return tuple(data), tuple(scales), False
    if not outs:
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes), (), False
    matrices = []
    for g, ((m, n), t) in enumerate(zip(shapes, outs["out"], strict=True)):
        label, letters = f"group {g}: out", f"[M, N] = {[m, n]} or {[m, n, 1]}"
        rules.check_out(label, t, (m, n) if t.ndim != 3 else (m, n, 1), dtype, letters)
        matrices.append(rules.without_batch(label, t, letters))
    m_major = rules.is_m_major(matrices)
    return tuple(rules.out_lines(f"group {g}: out", t, m_major) for g, t in enumerate(matrices)), (), m_major


# ---- groups whose sizes are on the device ----------------------------------------------------------------------


def check_device_groups(
    a: Any,
    a_scale: Any,
    weights: list[Weights],
    sizes: tuple[Any, Any],
    result: Result,
    scale_layout: ScaleLayout = "blocked",
    gate: Gate | None = None,
    a_format: BlockFormat = NVFP4_FORMAT,
) -> tuple[GroupedProblem, GroupedOperands, list[torch.Tensor]]:
    """Checks and normalizes the operands of the ragged or the masked form of ``grouped_gemm``.

    Args:
        a, weights, result, scale_layout: see ``grouped_gemm``.
        a_scale: None if ``a`` has 16-bit values.
        sizes: ``offs`` and ``masked_m``, of which one is given.
        gate: activation and weight layout of a dual GEMM.
        a_format: format of packed ``a``; weights have their own.

    Returns:
        The problem, whose groups all have the mean size (ragged) or the largest (masked); the operands; and the tensors to
        return: the result, or data and scale of a quantized one.

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule; the message names rule, value and fix.
    """
    pair, is_dual = (a_format, weights[0].format), gate is not None
    rules.check_result(result.dtype, result.global_scale, pair, a_scale is not None, is_dual=is_dual)
    rules.check_no_factor(result.dtype, weights[0].alpha)
    takes_rows = _may_have_rows_of_scales(weights[0].format, result, gate)
    rules.check_formats(a_format=a_format, b_format=weights[0].format, takes_rows=takes_rows)
    form, sizes_name, lengths = _form(*sizes, scale_layout, a_format)
    alphas = {w.alpha_name: w.alpha for w in weights}
    alpha_names = list(alphas)
    weights = given_weights(weights)
    outs = _device_outputs(result)
    if isinstance(a, list | tuple):
        raise TypeError(f"a is a {type(a).__name__}; with {sizes_name} it is one tensor, {A_SHAPES[form]}")
    named: dict[str, Any] = {"a": a} | {w.name: w.data for w in weights} | rules.given(a_scale=a_scale)
    named |= {f"{w.name}_scale": w.scale for w in weights} | {sizes_name: lengths}
    named |= rules.tensors_in(alphas | {"out_global_scale": result.global_scale})
    device = rules.check_tensors(named | outs)
    check_group_sizes(sizes_name, lengths)
    num_groups = len(lengths)
    fmt, batches = None if a_scale is None else a_format, None if form == "ragged" else num_groups
    rows = _tokens(a, form, sizes_name, num_groups, fmt)
    num_rows, k = rows.shape[1], _k(fmt, rows)
    if form == "ragged":
        check_offs(lengths, num_rows)
    else:
        check_masked_m(lengths, num_rows)
    if fmt is None:
        tokens = Operand.of_values(rows)
    else:
        scale = rules.scales_of_groups("a_scale", a_scale, num_rows, k, batches, fmt, is_read=False)
        tokens = Operand(rows, scale, fmt, num_rows, k, len(rows))
        if form == "ragged":
            _check_ragged_scales(tokens, lengths)
            _check_same_groups(tokens, ends_of(a_scale), lengths)
        _check_padding_columns(tokens, lengths, form)
    sides = [_weights(w, num_groups, k, sizes_name) for w in weights]
    _check_same_k("", weights[0].name, (fmt, weights[0].format), rows, *(side.data for side in sides))
    if gate is not None:
        gate.check_rows(weights[0].name, sides[0].rows)
    check_overlap(outs, named)
    gate, (first,), others = _split(gate, sides[:1], [[side] for side in sides[1:]])
    columns = first.rows // (2 if gate is not None and gate.weight_layout != "separate" else 1)
    factors = {
        name: rules.one_each(rules.factors(name, x, num_groups, device, allows_one=True), num_groups)
        for name, x in alphas.items()
    }
    scales = rules.global_scales("out_global_scale", result.global_scale, num_groups, device)
    shape = (num_rows, columns) if form == "ragged" else (num_groups, num_rows, columns)
    results = _device_results(outs, shape, num_groups, result, device)
    view = results[0] if form == "masked" else results[0].unsqueeze(0)
    out_scale: tuple[torch.Tensor, ...] = ()
    m_major = result.format is None and rules.is_m_major([view])
    if result.format is not None:
        view, out_scale = (
            rules.k_major_rows("data of out", "data of out", view.view(torch.uint8)),
            (results[1].view(torch.uint8).view(-1),),
        )
    else:
        view = rules.out_lines("out", view, m_major)
    mean = -(-num_rows // num_groups) if form == "ragged" else num_rows
    pair = tokens.format, weights[0].format
    problem = _problem(form, ((mean, columns, k),) * num_groups, result.dtype, alphas, gate, pair)
    operands = GroupedOperands(
        (tokens,),
        (first,),
        (view,),
        factors[alpha_names[0]],
        tuple(others[0]) if others else (),
        factors.get("alpha2"),
        out_scale,
        scales,
        lengths,
    )
    return replace(problem, out_m_major=m_major), operands, results


def with_bias(
    problem: GroupedProblem, operands: GroupedOperands, bias: torch.Tensor
) -> tuple[GroupedProblem, GroupedOperands]:
    """Adds a bias to both products of a checked dual GEMM whose groups have weights of one size.

    Raises TypeError or ValueError unless the bias has a number for each row of both weights of every group.
    """
    (b,) = operands.b
    rules.check_tensors({"b": b.data, "bias": bias})
    rules.check_bias(bias, b.rows * (2 if operands.b2 else 1), problem.num_groups)
    return replace(problem, bias_dtype=bias.dtype), replace(operands, bias=bias)


def ragged_places(
    ends: Sequence[int], rows: int, atom_rows: int = ATOM_ROWS
) -> Iterator[tuple[int, int, int]]:
    """Iterates over groups that end at ``ends``: first row, end, and first row of scale atoms, clipped to the existing rows.

    Args:
        ends: inclusive ends of the groups.
        rows: number of rows.
        atom_rows: rows per scale atom; with 1, scales are arranged like rows.
    """
    start = block = 0
    for end in ends:
        stop = max(min(end, rows), start)
        yield start, stop, start if atom_rows == 1 else block
        start, block = max(end, 0), block + -(-(stop - start) // atom_rows)


def _check_ragged_scales(a: Operand, ends: torch.Tensor) -> None:
    """Checks that every group has scales. Does not read ends on a GPU, where rows without scales give zeros.

    Raises:
        ValueError: a group's rows do not begin a row of atoms of their own, or ``a_scale`` is too short.
    """
    if ends.device.type != "cpu" or a.format.atom_rows == 1:
        return
    there = a.scale.numel() // a.atom_row_bytes
    for g, (start, stop, block) in enumerate(ragged_places(ends.tolist(), a.rows)):
        end = block + -(-(stop - start) // ATOM_ROWS)
        if end > there:
            raise ValueError(
                f"a_scale has {there} blocks of {ATOM_ROWS} rows, and group {g} ends in block {end}; quantize rows with "
                f"grouped_quantize(x, offs), which pads the scales of every group to {ATOM_ROWS} rows"
            )


def _check_same_groups(a: Operand, known: tuple[int, ...] | None, ends: torch.Tensor) -> None:
    """Checks that rows lie in the scale blocks in which ``grouped_quantize`` put them, if it says where groups ended.

    Raises:
        ValueError: another grouping, whose scales would be those of other rows.
    """
    if known is None or ends.device.type != "cpu":
        return
    given = ends.tolist()
    if known == tuple(given):
        return

    def blocks(ends: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Maps a block of scales to its first row and its end."""
        return {
            block + i: (row, min(row + ATOM_ROWS, stop))
            for start, stop, block in ragged_places(ends, a.rows)
            for i, row in enumerate(range(start, stop, ATOM_ROWS))
        }

    there = blocks(known)
    for block, (row, end) in blocks(given).items():
        first, stop = there.get(block, (-1, -1))
        if first != row or end > stop:
            raise ValueError(
                f"a was quantized in groups that end at {list(known)}, and offs is {given}: its scales are those of other rows; "
                "pass the offs that grouped_quantize got, or quantize again"
            )


def _check_padding_columns(a: Operand, sizes: torch.Tensor, form: DeviceForm) -> None:
    """Refuse NaN in the padding columns of scales of rows that count; what other rows hold is not read."""
    if sizes.device.type != "cpu":
        return
    values, row_bytes = sizes.tolist(), a.format.atom_row_bytes(a.k)
    if form == "ragged":
        places = [
            (stop - start, a.scale[block * row_bytes :])
            for start, stop, block in ragged_places(values, a.rows, a.format.atom_rows)
        ]
    else:
        places = list(zip(values, a.scale, strict=True))
    for rows, scale in places:
        atoms = a.format.scale_atoms(rows, a.k)[0]
        rules.check_padding_columns("a_scale", scale[: atoms * row_bytes], rows, a.k, a.format)


def _form(
    offs: Any, masked_m: Any, scale_layout: str, a_format: BlockFormat
) -> tuple[DeviceForm, str, torch.Tensor]:
    """Returns form, sizes and the caller's name for them. Raises UnsupportedProblem for layouts that lose padding."""
    if offs is not None and masked_m is not None:
        raise ValueError(
            "offs and masked_m are both given; offs is of the ragged form, masked_m of the masked one"
        )
    if offs is not None and a_format.scale_layout == "rowmajor" and a_format.block_rows > 1:
        raise UnsupportedProblem(
            f"a is {a_format.title} with offs: a scale of {a_format.block_rows} rows would be of several groups; quantize a to a "
            "format with a scale for each row"
        )
    if scale_layout != "blocked" and a_format.scale_layout == "blocked":
        raise UnsupportedProblem(
            f"scale_layout={scale_layout!r} with offs or masked_m: only the device knows where padding goes; quantize "
            "to blocked scales, every group's rows padded to 128"
        )
    return ("masked", "masked_m", masked_m) if offs is None else ("ragged", "offs", offs)


def _tokens(
    a: torch.Tensor, form: DeviceForm, sizes_name: str, num_groups: int, fmt: BlockFormat | None
) -> torch.Tensor:
    """Returns ``a`` as [batches, M, K/2], or [batches, M, K] without a format; the groups of the masked form are batches."""
    is_ragged, shape = form == "ragged", A_SHAPES[form]
    if fmt is None:
        shape = shape.replace("K/2", "K")
    else:
        rules.as_bytes("a", a, fmt)
    if a.ndim != (2 if is_ragged else 3):
        hint = "; sizes of the groups of a 3-D tensor go to masked_m=" if is_ragged and a.ndim == 3 else ""
        raise ValueError(f"a has shape {list(a.shape)}; with {sizes_name} it is {shape}{hint}")
    matrix = a.unsqueeze(0) if is_ragged else a
    if not is_ragged and len(matrix) != num_groups:
        raise ValueError(
            f"a has {len(matrix)} groups and {sizes_name} {num_groups}; pass one entry per group"
        )
    if fmt is None:
        rows = rules.activation_rows("a", "M", matrix)
        rules.check_k(rows.shape[-1])
        return rows
    rows = rules.packed_rows("a", "M", matrix, fmt)
    rules.check_k(fmt.elements(rows.shape[-1]), fmt)
    return rows


def _weights(w: Weights, num_groups: int, k: int, sizes_name: str) -> Operand:
    """Checks and returns ``b`` as [G, N, K/2]."""
    row_bytes = w.format.row_bytes(k)
    data = rules.as_bytes(w.name, w.data, w.format)
    if data.ndim != 3 or data.shape[0] != num_groups or data.shape[2] != row_bytes:
        raise ValueError(
            f"{w.name} has shape {list(data.shape)}; expected [G, N, {w.format.length}] = [{num_groups}, N, {row_bytes}] "
            f"({num_groups} entries in {sizes_name}, K={k} in a){_leading_zero(data, num_groups, sizes_name)}"
        )
    rows = rules.packed_rows(w.name, "N", data, w.format)
    n = rules.check_extent(f"rows of {w.name}", rows.shape[1], INT32_MAX)
    scale = rules.scales_of_groups(f"{w.name}_scale", w.scale, n, k, num_groups, w.format)
    return Operand(rows, scale, w.format, n, k, num_groups)


def _leading_zero(data: torch.Tensor, num_groups: int, sizes_name: str) -> str:
    """Returns a hint at the most common mistake, ends that begin with a 0 like start offsets; otherwise an empty string."""
    is_one_more = sizes_name == "offs" and data.ndim == 3 and len(data) == num_groups - 1
    return "; offs has no leading 0: pass offs[1:]" if is_one_more else ""


def _device_outputs(result: Result) -> dict[str, Any]:
    """Returns the caller's output by name; data and scale if quantized."""
    out, format = result.out, result.format
    if out is None or format is None:
        return rules.given(out=out)
    if not isinstance(out, list | tuple) or len(out) != 2:
        raise TypeError(
            f'out_dtype="{format.name}" with offs or masked_m takes out as (data, scale), as the call returns them'
        )
    return {"data of out": out[0], "scale of out": out[1]}


def _device_results(
    outs: dict[str, torch.Tensor],
    shape: tuple[int, ...],
    num_groups: int,
    result: Result,
    device: torch.device,
) -> list[torch.Tensor]:
    """Returns the call's results, the caller's after a check or new ones; data and scale as bytes if quantized."""
    *_, rows, n = shape
    dtype, format = result.dtype, result.format
    if format is not None:
        rules.check_quantized_columns("N", n, format)
    if not outs:
        return new_device_results(shape, num_groups, dtype, device)
    if isinstance(dtype, torch.dtype):
        rules.check_out("out", outs["out"], shape, dtype)
        return [outs["out"]]
    assert format is not None
    is_ragged = len(shape) == 2
    data_shape = (*shape[:-1], format.row_bytes(n))
    data = rules.as_bytes("data of out", outs["data of out"], format)
    if tuple(data.shape) != data_shape:
        raise ValueError(f"data of out has shape {list(data.shape)}; expected uint8 {list(data_shape)}")
    rules.check_apart("data of out", data)
    scale = outs["scale of out"]
    rules.check_written_scales("scale of out", scale, format)
    flat = rules.scales_of_groups(
        "scale of out", scale, rows, n, None if is_ragged else num_groups, format, is_read=False
    )
    least = new_device_scale_shape(shape, num_groups, format)
    if is_ragged and flat.numel() < least[0] * format.atom_row_bytes(n):
        raise ValueError(
            f"scale of out has {flat.numel()} bytes; expected {least[0] * format.atom_row_bytes(n)}, whatever the "
            f"sizes of the {num_groups} groups are: {list(least)}"
        )
    return [data, scale]


def new_device_scale_shape(shape: tuple[int, ...], num_groups: int, format: BlockFormat) -> tuple[int, ...]:
    """Returns the shape of the scales of results [rows, N] or [G, M_max, N]; ragged blocked ones have atoms for any sizes."""
    *lead, rows, n = shape
    if lead or format.scale_layout == "rowmajor":
        return (*lead, *format.scale_shape(rows, n))
    return format.ragged_scale_shape(rows, n, num_groups)


def new_device_results(
    shape: tuple[int, ...], num_groups: int, dtype: OutDtype, device: torch.device
) -> list[torch.Tensor]:
    """Allocates results [rows, N] or [G, M_max, N]; for quantized ones, uint8 data and scales.

    The scales are like those of ``problem.new_quantized_scale``.
    """
    if isinstance(dtype, torch.dtype):
        return [torch.empty(shape, dtype=dtype, device=device)]
    format = RESULT_FORMATS[dtype]
    scale = torch.empty(
        new_device_scale_shape(shape, num_groups, format), dtype=result_scale_dtype(format), device=device
    )
    return [new_quantized_data(shape, device, format), scale]


# ---- shared helpers --------------------------------------------------------------------------------------------


def _length(fmt: BlockFormat | None) -> str:
    """Returns the length of a row for messages; without a format, that of 16-bit values."""
    return "K" if fmt is None else fmt.length


def _k(fmt: BlockFormat | None, rows: torch.Tensor) -> int:
    """Returns the number of values per row."""
    return rows.shape[-1] if fmt is None else fmt.elements(rows.shape[-1])


def _check_same_k(
    label: str,
    name: str,
    formats: tuple[BlockFormat | None, BlockFormat],
    a: torch.Tensor,
    b: torch.Tensor,
    *others: torch.Tensor,
) -> None:
    k_a, k_b = (_k(fmt, x) for fmt, x in zip(formats, (a, b), strict=True))
    length_a, length_b = map(_length, formats)
    if k_a != k_b:
        raise ValueError(
            f"{label}a has K={k_a} and {name} has K={k_b}; both must have the same K "
            f"(a is [M, {length_a}] = {list(a.shape)}, {name} is [N, {length_b}] = {list(b.shape)})"
        )
    for other in others:
        if other.shape != b.shape:
            raise ValueError(
                f"{label}b2 is [N, {length_b}] = {list(other.shape)} and {name} {list(b.shape)}; "
                "a dual GEMM takes two of one shape"
            )


def _split(
    gate: Gate | None, first: list[Operand], others: list[list[Operand]]
) -> tuple[Gate | None, list[Operand], list[list[Operand]]]:
    """Splits concatenated weights, which are two operands to a kernel."""
    if gate is None or gate.weight_layout != "concatenated":
        return gate, first, others
    upper, lower = zip(*map(rules.halves, first), strict=True)
    return replace(gate, weight_layout="separate"), list(upper), [list(lower)]


def _problem(
    form: Any,
    sizes: tuple[tuple[int, int, int], ...],
    dtype: OutDtype,
    alphas: dict[str, Any],
    gate: Gate | None,
    formats: tuple[BlockFormat, BlockFormat],
) -> GroupedProblem:
    has_alpha = any(x is not None for x in alphas.values())
    dual = {} if gate is None else vars(gate)
    return GroupedProblem(sizes, form, dtype, has_alpha, a_format=formats[0], b_format=formats[1], **dual)
