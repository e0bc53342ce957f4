"""`nvfp4-cute demo`: runs the sm_100a kernel on the emulator with a competition's inputs, and compares every output bit."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tqdm import tqdm

from nvfp4_cute.backends import emulator
from nvfp4_cute.emulator.fronts.launch_shim import shim_path
from nvfp4_cute.emulator.state import Stats
from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import B200, Target
from nvfp4_cute.launch.plan import Plan
from nvfp4_cute.planning.arch import family_of
from nvfp4_cute.planning.choose import choose_config
from nvfp4_cute.planning.schedule import make_schedule
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.problems.nvfp4_group_gemm import adapter, inputs, reference, spec
from nvfp4_cute.prove import exact
from nvfp4_cute.roofline.speed_of_light import (
    COMPETITION_FP4_FLOPS_PER_S,
    COMPETITION_HBM_BYTES_PER_S,
    grouped_gemm_us,
)
from nvfp4_cute.terminal import bar

INTRODUCTION = """\
Compiling the grouped GEMM kernel for {arch}, the code that {name} runs, and executing its PTX on the emulator.
Inputs are those of GPU MODE's nvfp4_group_gemm; each output bit is compared with a float64 reference rounded to fp16.
"""
SOL_NOTE = (
    "SOL us: speed of light, the least time a B200 could take: max(bytes / "
    f"{COMPETITION_HBM_BYTES_PER_S / 1e12:.2f} TB/s, flops / {COMPETITION_FP4_FLOPS_PER_S / 1e15:.2f} PFLOP/s). "
    "Computed, not measured.\nhost s: what the emulation took here; it says nothing about the time on a GPU."
)
# The smallest benchmark shape. It is a tenth of the work of all four, and still most of a short demo's time.
QUICK_BENCHMARK = 3


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns 0 if every output bit is right."""
    target = targets.lookup(args.arch) if args.arch else targets.B200
    return run_cases(cases(all_benchmarks=args.all), target)


@dataclass(frozen=True)
class Result:
    """One case after its run. `fault` describes what was wrong; None if every bit was right.

    `plan` and `stats` are those of the launch; None if it did not finish.
    """

    name: str
    case: spec.GroupCase
    num_tiles: int
    plan: Plan | None
    stats: Stats | None
    fault: str | None


def cases(*, all_benchmarks: bool) -> dict[str, spec.GroupCase]:
    """Returns the cases by name: the ten test shapes, and one or all four benchmark shapes."""
    tests = {f"test {i}": case for i, case in enumerate(spec.TESTS)}
    benchmarks = {f"benchmark {i}": case for i, case in enumerate(spec.BENCHMARKS)}
    if not all_benchmarks:
        name = f"benchmark {QUICK_BENCHMARK}"
        benchmarks = {name: benchmarks[name]}
    return tests | benchmarks


def run_cases(selected: dict[str, spec.GroupCase], target: Target = B200) -> int:
    """Runs the cases, shows progress, prints the tables. Returns 0 if every output bit of every case is right, else 1.

    Raises: EmulatorError if the launch shim is missing.
    """
    shim_path()
    print(INTRODUCTION.format(arch=target.arch, name=target.name), flush=True)
    results: list[Result] = []
    total = sum(_num_tiles(case, target) for case in selected.values())
    # Without a visible bar, each case prints a line instead.
    with bar(total=total, unit="tile") as shown:
        for name, case in selected.items():
            shown.set_description(name)
            before = sum(result.num_tiles for result in results)
            results.append(run_case(name, case, partial(_advance_to, shown, before), target))
            _advance_to(shown, before, results[-1].num_tiles)
            if shown.disable or results[-1].fault:
                tqdm.write(_line(results[-1]))
    print(f"\n{_report(results)}")
    return 1 if any(result.fault for result in results) else 0


def _advance_to(bar: tqdm, before: int, tiles: int) -> None:
    bar.update(before + tiles - bar.n)


def _line(result: Result) -> str:
    seconds = f" ({result.stats.seconds:.1f} s)" if result.stats else ""
    return f"{result.name}: {result.fault or 'bit-equal'}{seconds}"


def run_case(
    name: str, case: spec.GroupCase, on_tiles: Callable[[int], None], target: Target = B200
) -> Result:
    """Runs one case on the emulator and compares it. `on_tiles` is called with the number of tiles done so far."""
    num_tiles = _num_tiles(case, target)
    data = inputs.make_inputs(case)
    with emulator.observe(lambda done, ctas: on_tiles(num_tiles * done // ctas)) as observer:
        try:
            outputs = adapter.custom_kernel(data, backend=f"emulator:{target.name}")
        except EmulatorError as error:
            return Result(name, case, num_tiles, None, None, f"stopped: {error}")
    expected = reference.reference(data)
    fault = exact.difference([t.squeeze(-1) for t in outputs], [t.squeeze(-1) for t in expected])
    return Result(name, case, num_tiles, observer.plans[-1], observer.stats[-1], fault)


def _num_tiles(case: spec.GroupCase, target: Target) -> int:
    config = choose_config(GroupedProblem(case.sizes), target.arch, target.num_sms)
    return make_schedule(case.sizes, config.work_tile_mnk, target.num_sms).num_tiles


def _report(results: Sequence[Result]) -> str:
    right = [result for result in results if result.fault is None]
    ran = [result.stats for result in results if result.stats]
    instructions, seconds = sum(s.instructions for s in ran), sum(s.seconds for s in ran)
    parts = [
        _table(
            ("case", "groups", "M x N x K", "tiles", "warp instr.", "host s", "SOL us", "result"),
            [_row(result) for result in results],
        ),
        SOL_NOTE,
        _table(
            ("kernel for", "target", "config", "registers", "stack bytes", "smem bytes", "code bytes"),
            _kernel_rows(results),
        ),
        f"{len(right)} of {len(results)} cases bit-equal; {instructions:,} warp instructions in {seconds:.1f} s",
    ]
    return "\n\n".join(part for part in parts if part)


def _row(result: Result) -> tuple[str, ...]:
    case, stats = result.case, result.stats
    shape = " x ".join(_extents(extents) for extents in (case.m, case.n, case.k))
    measured = (f"{stats.instructions:,}", f"{stats.seconds:.1f}") if stats else ("-", "-")
    verdict = "bit-equal" if result.fault is None else "WRONG" if stats else "STOPPED"
    sol_us = f"{grouped_gemm_us(case.sizes):.3f}"
    return (result.name, str(case.num_groups), shape, str(result.num_tiles), *measured, sol_us, verdict)


def _extents(extents: tuple[int, ...]) -> str:
    """Writes equal extents once."""
    return ",".join(map(str, extents if len(set(extents)) > 1 else extents[:1]))


def _kernel_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    kernels = {result.plan.kernel.key: result.plan.kernel for result in results if result.plan}
    rows = []
    for key, kernel in sorted(kernels.items(), key=lambda item: item[0].num_groups):
        used, smem = kernel.resources, family_of(key.arch).smem_plan(key.config)
        facts = (used.registers, used.stack_bytes, smem.total_bytes, used.code_bytes)
        rows.append((f"{key.num_groups} groups", key.arch, key.config.to_name(), *map(str, facts)))
    return rows


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Aligns columns to the left, two spaces apart; the empty string without rows."""
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (header, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)
