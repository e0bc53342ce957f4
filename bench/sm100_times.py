"""Modelled times of the grouped competition cases on a B200, beside the published ones, and what they consist of.

``python -m nvfp4_cute.bench.sm100_times`` replays them (minutes, no GPU) and prints the table of results/sm100_configs.md.
"""

from collections.abc import Iterator, Sequence
from statistics import geometric_mean, mean

from tqdm import tqdm

from nvfp4_cute.bench import ours
from nvfp4_cute.bench.cases import Case, select
from nvfp4_cute.bench.operands import empty_operands
from nvfp4_cute.gpus.targets import B200
from nvfp4_cute.planning.choose import choose_config
from nvfp4_cute.planning.schedule import make_schedule
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.roofline.modelled import modelled_times
from nvfp4_cute.timing.result import Timing

FP16_BYTES = 2
HEADER = (
    "| case | config | modelled us | best public us | bytes of device memory / least | busiest CTA / mean | critical path, us |",
    "|---|---|---|---|---|---|---|",
)


def row(number: int, case: Case, timing: Timing) -> str:
    """The table's line of a case."""
    config = choose_config(GroupedProblem(case.sizes), B200.arch, B200.num_sms)
    schedule = make_schedule(case.sizes, config.work_tile_mnk, config.num_cta // config.cluster_size)
    least = schedule.hbm_bytes + sum(m * n * FP16_BYTES for m, n, _ in case.sizes)
    moved = timing.hbm_bytes + timing.stored_bytes
    parts = sorted(timing.critical.items(), key=lambda part: -part[1])
    path = ", ".join(
        f"{cause} {timing.constants.us(cycles):.2f}"
        for cause, cycles in parts
        if timing.constants.us(cycles) >= 0.1
    )
    return (
        f"| {number} | {config.to_name()} | {mean(timing.us_by_layout):.2f} | {case.best_us} | {moved / least:.3f} | "
        f"{schedule.imbalance:.3f} | {path} |"
    )


def rows(cases: Sequence[Case]) -> Iterator[str]:
    """Every case's line, and the geometric mean of their times: means over the layouts of memory, and of each layout."""
    times = []
    for number, case in enumerate(tqdm(cases, disable=None)):
        operands = empty_operands(case)
        run = lambda backend, case=case, operands=operands: ours.prepare(case, operands, backend).run()
        timing = modelled_times(run, B200, all_layouts=True)[-1]
        times.append(timing.us_by_layout)
        yield row(number, case, timing)
    layouts = [geometric_mean(layout) for layout in zip(*times, strict=True)]
    yield (
        f"\nGeometric mean: {geometric_mean(map(mean, times)):.2f} us modelled; "
        f"{min(layouts):.2f} to {max(layouts):.2f} by layout of memory."
    )


def main() -> None:
    """Print the table."""
    print("\n".join([*HEADER, *rows(select(("competition",), "nvfp4_group_gemm"))]))


if __name__ == "__main__":
    main()
