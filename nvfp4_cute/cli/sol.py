"""`nvfp4-cute sol`: the least time of the competition's problems, or of a shape, on a GPU; the memory of weights.

Everything printed is computed from sizes and from the figures in ``targets.py``. Nothing is measured.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4_cute.formats.block_format import BFLOAT16, NVFP4_PAIR, Formats
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.operands.rules import check_formats, check_quantized_columns, check_result_of_pair
from nvfp4_cute.planning.arch import mmas_of
from nvfp4_cute.planning.arch.base import check_pair
from nvfp4_cute.planning.arch.simt import W4A16_PAIRS
from nvfp4_cute.problem import RESULT_FORMATS
from nvfp4_cute.problems.nvfp4_dual_gemm import spec as dual_gemm_spec
from nvfp4_cute.problems.nvfp4_gemm import spec as gemm_spec
from nvfp4_cute.problems.nvfp4_gemv import spec as gemv_spec
from nvfp4_cute.problems.nvfp4_group_gemm import spec as group_gemm_spec
from nvfp4_cute.roofline import footprint
from nvfp4_cute.roofline import speed_of_light as light
from nvfp4_cute.roofline.plot import roofline
from nvfp4_cute.terminal import text_table

PROBLEMS: dict[str, Sequence[Any]] = {
    "nvfp4_gemv": gemv_spec.BENCHMARKS,
    "nvfp4_gemm": gemm_spec.BENCHMARKS,
    "nvfp4_dual_gemm": dual_gemm_spec.BENCHMARKS,
    "nvfp4_group_gemm": group_gemm_spec.BENCHMARKS,
}
"""Benchmark cases of every competition problem."""

OPERATIONS: dict[str, dict[str, Any]] = {"gemm": {}, "dual": {"num_b": 2}, "w4a16": {"a": "fp16"}}
LABEL = "Computed floors, not measurements."
COMPETITION_NOTE = (
    "published, ours: the competition's speed of light, max(bytes / "
    f"{light.COMPETITION_HBM_BYTES_PER_S / 1e12:.2f} TB/s, FLOP / "
    f"{light.COMPETITION_FP4_FLOPS_PER_S / 1e15:.2f} PFLOP/s), whatever the target."
)


def run(args: argparse.Namespace) -> int:
    """Prints the requested tables and returns 0. Raises ValueError for options that do not go together."""
    if args.memory:
        return print_memory(args.target, matrices=_matrices(args), as_json=args.json)
    shape = None
    if args.m and args.n and args.k and not args.problem:
        groups = args.groups or len(args.m)
        formats = args.formats or NVFP4_PAIR
        shape = Shape(args.m, args.n, args.k, groups, args.op or "gemm", args.out or "fp16", formats)
    elif args.m or args.n or args.k or args.groups or args.op or args.out or args.formats:
        raise ValueError("a shape takes --m, --n, and --k together, and no --problem")
    return print_floors(args.target, problem=args.problem, shape=shape, as_json=args.json, plot=args.plot)


def _matrices(args: argparse.Namespace) -> tuple[int, int, int] | None:
    """Returns (count, n, k) of --memory, or None for the catalogue.

    Raises ValueError for options that do not concern weights.
    """
    if args.problem or args.m or args.op or args.out or args.plot or args.formats:
        raise ValueError("--memory is about weights: it takes --n, --k, --groups, --target, and --json")
    if args.n and args.k:
        return args.groups or 1, args.n, args.k
    if args.n or args.k or args.groups:
        raise ValueError("--memory takes --n and --k together, and --groups with them")
    return None


@dataclass(frozen=True)
class Shape:
    """A problem from the command line. ``m`` has one entry, or one per group; n and k are those of every group.

    Raises: ValueError if sizes contradict each other or are not multiples of NVFP4 blocks.
    """

    m: tuple[int, ...]
    n: int
    k: int
    groups: int
    operation: str = "gemm"
    out: str = "fp16"
    formats: Formats = NVFP4_PAIR

    def __post_init__(self) -> None:
        if len(self.m) not in (1, self.groups):
            raise ValueError(
                f"m has {len(self.m)} entries for {self.groups} groups; give one for all groups, or one per group"
            )
        if sum(self.m) < 1 or self.n < 1:
            raise ValueError(
                f"m={self.m}, n={self.n}: nothing to compute; give at least one row and one column"
            )
        for format in self.formats:
            format.num_k_blocks(self.k)
        if self.out in RESULT_FORMATS:
            check_quantized_columns("N", self.n, RESULT_FORMATS[self.out])

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """(m, n, k) of every group."""
        extents = self.m * self.groups if len(self.m) == 1 else self.m
        return [(m, self.n, self.k) for m in extents]

    @property
    def name(self) -> str:
        """Readable name such as ``g8_m16_n4096_k7168``."""
        return f"g{self.groups}_m{'-'.join(map(str, self.m))}_n{self.n}_k{self.k}"

    def work(self) -> light.Work:
        """Bytes and operations of the problem."""
        stored = {"a": self.formats[0].name, "b": self.formats[1].name} | OPERATIONS[self.operation]
        return light.grouped_gemm(self.sizes, out=self.out, **stored)


@dataclass(frozen=True)
class Row:
    """One case with its floors. ``published_us`` is None for a shape without a published time."""

    problem: str
    case: str
    work: light.Work
    floor: light.Floor
    published_us: float | None = None

    @property
    def competition_us(self) -> float | None:
        """Result of the competition's formula in us; None for work that it does not cover."""
        return light.competition_us(self.work) if self.work.math == "nvfp4" else None

    @property
    def difference(self) -> float | None:
        """Our time divided by the published one, minus 1."""
        ours = self.competition_us
        return None if ours is None or self.published_us is None else ours / self.published_us - 1

    def record(self) -> dict[str, Any]:
        """Returns everything about the row as plain data; times in us."""
        return {
            "problem": self.problem,
            "case": self.case,
            "bytes": self.work.bytes,
            "flops": self.work.flops,
            "math": self.work.math,
            "operands": [
                {"name": o.name, "bytes": o.bytes, "written": o.written} for o in self.work.operands
            ],
            "products": [{"name": p.name, "flops": p.flops} for p in self.work.products],
            "published_us": self.published_us,
            "competition_us": self.competition_us,
            "physical_us": self.floor.us,
            "bound": self.floor.bound,
            "sustained_us": self.floor.sustained_us,
            "terms": [{"name": t.name, "us": t.us, "basis": t.basis} for t in self.floor.terms],
        }


def competition_rows(target: Target, problem: str | None = None) -> list[Row]:
    """Returns the benchmark cases of one competition problem or of all four."""
    return [
        Row(name, case.name, case.work, light.physical_floor(case.work, target), case.sol_us)
        for name, cases in PROBLEMS.items()
        if problem in (None, name)
        for case in cases
    ]


def shape_row(target: Target, shape: Shape) -> Row:
    """Returns the row of a shape. Raises what a call with such formats and any sizes raises on the target."""
    if "a" in OPERATIONS[shape.operation]:
        _check_weight_only(target.arch, shape)
    else:
        from nvfp4_cute.cli import tune  # imported here, because help must not load other verbs

        tune.check_call(target, shape.operation, shape.out, shape.formats)
    work = shape.work()
    return Row(shape.operation, shape.name, work, light.physical_floor(work, target))


def _check_weight_only(arch: str, shape: Shape) -> None:
    """Raises what a product of bfloat16 rows and quantized weights raises on an architecture."""
    a_format, b_format = shape.formats
    if a_format != b_format:
        raise ValueError(
            f"--op {shape.operation} has 16-bit a: name the format of b alone, --formats {b_format}"
        )
    check_result_of_pair(shape.out, None)
    check_formats(b_format=b_format, takes_rows=True)
    pairs = mmas_of(arch, BFLOAT16)
    check_pair(arch, (BFLOAT16, b_format), W4A16_PAIRS if shape.groups == 1 else pairs)


def choose_target(name: str | None) -> tuple[Target, str]:
    """Returns the target, and why: it was requested, detected, or is the default, B200.

    Raises:
        UnsupportedTarget: the name is not in the table.
    """
    if name is not None:
        return targets.lookup(name), "as asked"
    found = targets.detect()
    return (found, "the GPU in this machine") if found else (targets.B200, "default")


def print_floors(
    target_name: str | None,
    *,
    problem: str | None = None,
    shape: Shape | None = None,
    as_json: bool = False,
    plot: Path | None = None,
) -> int:
    """Prints the floors of a shape, or of the competition's benchmark cases; draws a picture if requested. Returns 0.

    Raises:
        UnsupportedTarget: the target is unknown.
        UnsupportedProblem: the target does not multiply or write the formats.
        ValueError: ``plot`` needs matplotlib.
    """
    target, why = choose_target(target_name)
    rows = [shape_row(target, shape)] if shape else competition_rows(target, problem)
    if plot:
        points = [(row.problem, row.work.intensity, row.work.flops / row.floor.us * 1e6) for row in rows]
        roofline(plot, target, points)
    if as_json:
        print(
            json.dumps({"label": LABEL, "target": _target_record(target), "rows": [r.record() for r in rows]})
        )
    elif shape:
        print(f"{_heading(target, why)}\n\n{_breakdown(rows[0])}")
    else:
        print(f"{_heading(target, why)}\n\n{_competition_table(rows)}\n\n{_notes(rows)}")
    return 0


def print_memory(
    target_name: str | None, *, matrices: tuple[int, int, int] | None = None, as_json: bool = False
) -> int:
    """Prints the memory of weights: ``matrices`` (count, n, k), or common layers and models. Returns 0.

    Raises:
        UnsupportedTarget: the target is unknown.
        ValueError: K is not a multiple of 16.
    """
    target, why = choose_target(target_name)
    weights = footprint.catalogue()
    if matrices:
        weights = [footprint.Weights("{} x linear {} x {}".format(*matrices), (matrices,))]
    rows = footprint.records(weights, target)
    if as_json:
        print(json.dumps({"label": LABEL, "target": _target_record(target), "rows": rows}))
    else:
        print(f"{_heading(target, why)}\n\n{_memory_table(rows)}\n\n{_memory_notes(rows, target)}")
    return 0


# ---- text ------------------------------------------------------------------------------------------------------


def _heading(target: Target, why: str) -> str:
    return (
        f"target {target.name} ({why}): {target.arch}, {target.num_sms} SMs at {target.clock_hz / 1e9:.3f} GHz, "
        f"{target.floor_bandwidth_bytes_per_s / 1e12:.4g} TB/s. {LABEL}"
    )


def _competition_table(rows: Sequence[Row]) -> str:
    header = ("problem", "case", "MB", "GFLOP", "published us", "ours us", "diff %", "physical us", "bound")
    cells = [
        (
            row.problem,
            _short(row.case),
            f"{row.work.bytes / 1e6:.2f}",
            f"{row.work.flops / 1e9:.2f}",
            _number(row.published_us),
            _number(row.competition_us),
            "-" if row.difference is None else f"{100 * row.difference:+.2f}",
            _number(row.floor.us),
            row.floor.bound,
        )
        for row in rows
    ]
    return text_table(header, cells, left=2)


def _short(case: str, width: int = 38) -> str:
    """Shortens a case name to its column by cutting extents in the middle."""
    return case if len(case) <= width else f"{case[: width - 18]}..{case[-16:]}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _notes(rows: Sequence[Row]) -> str:
    terms = "\n".join(f"  {t.name}: {t.basis}" for t in rows[0].floor.terms)
    return f"{COMPETITION_NOTE}\nphysical: the longest of these terms, here for the first row:\n{terms}"


def _breakdown(row: Row) -> str:
    total = row.work.bytes or 1
    operands = [
        (o.name, "written" if o.written else "read", f"{o.bytes:,}", f"{100 * o.bytes / total:.1f}")
        for o in row.work.operands
    ]
    terms = [(t.name, _number(t.us), t.basis) for t in row.floor.terms]
    products = "".join(f"\n{p.name}: {p.flops:,} FLOP" for p in row.work.products)
    ours = row.competition_us
    return "\n".join(
        [
            f"{row.problem} {row.case}",
            "",
            text_table(("operand", "", "bytes", "%"), operands, left=2),
            f"total: {row.work.bytes:,} bytes, {row.work.flops:,} FLOP, {row.work.intensity:.1f} FLOP per byte"
            + products,
            "",
            "\n".join(f"{name:<7}{us:>10} us   {basis}" for name, us, basis in terms),
            f"physical speed of light: {row.floor.us:.3f} us, bound by {row.floor.bound}",
            *_sustained(row),
            *([] if ours is None else [f"the competition's formula (a B200): {ours:.3f} us"]),
        ]
    )


def _sustained(row: Row) -> list[str]:
    """Returns a line on the power limit if it is known and binds."""
    us = row.floor.sustained_us
    if us is None or us <= row.floor.us:
        return []
    return [
        f"repeated for seconds on random data: {us:.3f} us, by the power limit (nvfp4_cute/gpus/power.py)"
    ]


def _memory_table(rows: Sequence[dict]) -> str:
    header = (
        "weights",
        "parameters",
        "fp16 MB",
        "fp8 MB",
        "NVFP4 MB",
        "fp16/NVFP4",
        "read fp16 us",
        "read NVFP4 us",
    )
    cells = [
        (
            row["name"],
            f"{row['parameters'] / 1e6:,.1f} M",
            *(f"{row['bytes'][storage] / 1e6:,.1f}" for storage in footprint.FORMATS),
            f"{row['fp16_over_nvfp4']:.2f}",
            f"{row['read_us']['fp16']:,.1f}",
            f"{row['read_us']['nvfp4']:,.1f}",
        )
        for row in rows
    ]
    return text_table(header, cells)


def _memory_notes(rows: Sequence[dict], target: Target) -> str:
    too_large = [
        f"{row['name']} in {', '.join(storage for storage, fits in row['fits'].items() if not fits)}"
        for row in rows
        if not all(row["fits"].values())
    ]
    lines = [
        "NVFP4 as stored: 4.5 bits per value, scales padded to 128x4 blocks. read: all weights once, the least time."
    ]
    if too_large:
        lines.append(
            f"More than the {target.memory_bytes / 1e9:.0f} GB of {target.name}: {'; '.join(too_large)}."
        )
    return "\n".join(lines)


def _target_record(target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "arch": target.arch,
        "figures": {
            name: {"value": value, "source": source or None} for name, value, source in target.figures()
        },
    }
