"""Compares chosen configs with all other candidates, measured on this machine's GPU.

    python -m nvfp4_cute.bench.choices [--mean 1 8 64] [--json TIMES.json]

measures every candidate for weight matrices with these row counts of activations, and for ragged groups with these mean
row counts, spread in four ways. It prints how much longer the chosen config takes than the fastest. The constants of
``arch/sm90.py`` are fitted to such times. The first run on a machine compiles the candidates.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

import torch
from tqdm import tqdm

from nvfp4_cute.bench import ours
from nvfp4_cute.bench.cases import Case, routed_rows
from nvfp4_cute.bench.operands import make_operands
from nvfp4_cute.gpus.targets import Gpu, gpu_of
from nvfp4_cute.launch.tuned import Request
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.terminal import text_table
from nvfp4_cute.tuning import autotune

MEAN_ROWS = (1, 3, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAX_ROWS = 4096
# (N, K) of weight matrices; (groups, N, K) of experts.
WEIGHTS = (
    *((1024, 4096), (2048, 4096), (4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (5120, 5120)),
    *((7168, 2048), (2048, 7168), (8192, 1024), (1280, 8192), (8192, 8192), (7168, 8192), (8192, 3584)),
)
EXPERTS = (
    *((8, 28672, 4096), (8, 4096, 14336), (32, 4096, 7168), (32, 7168, 2048), (16, 3072, 4096)),
    *((128, 3072, 4096), (128, 4096, 1536), (32, 5760, 2944), (16, 8192, 5120), (4, 8192, 8192)),
)
SPREADS = ("equal", "by chance", "exponential", "zipf")


def group_rows(spread: str, groups: int, mean_rows: int) -> list[int]:
    """Returns the rows of every group, equal in every run.

    Groups have one size, or each row is assigned to a group at random: with equal probability, or with probabilities
    drawn from an exponential distribution, or proportional to their rank to the power of -0.8.
    """
    if spread == "equal":
        return [mean_rows] * groups
    if spread == "by chance":
        return list(routed_rows(mean_rows * groups, groups, 1))
    rng = random.Random(f"{spread} {groups} {mean_rows}")
    weights = {
        "exponential": [rng.expovariate(1) + 0.1 for _ in range(groups)],
        "zipf": rng.sample([(rank + 1) ** -0.8 for rank in range(groups)], groups),
    }[spread]
    counts = Counter(rng.choices(range(groups), weights, k=mean_rows * groups))
    return [counts[group] for group in range(groups)]


def problems(means: Sequence[int]) -> Iterator[Case]:
    """Yields lists of one group, and ragged groups."""
    for n, k in WEIGHTS:
        for rows in means:
            yield Case("choices", "one group", f"{rows} x {n} x {k}", "grouped_gemm", ((rows, n, k),))
    for groups, n, k in EXPERTS:
        for rows in (rows for rows in means if rows * groups <= MAX_ROWS):
            for spread in SPREADS:
                sizes = tuple((m, n, k) for m in group_rows(spread, groups, rows))
                name = f"{groups} groups, {rows} x {n} x {k} on the average, {spread}"
                yield Case("choices", f"ragged, {spread}", name, "grouped_gemm", sizes, form="ragged")


def request_of(case: Case, gpu: Gpu) -> Request:
    """Returns the request of a call; for ragged groups only the mean is known."""
    sizes = case.sizes
    if case.form == "ragged":
        rows = -(-sum(m for m, _, _ in sizes) // len(sizes))
        sizes = tuple((rows, n, k) for _, n, k in sizes)
    return Request(GroupedProblem(sizes, case.form, torch.float16), gpu)


def measured_us(case: Case, tried: Sequence[KernelConfig]) -> dict[KernelConfig, float]:
    """Returns the median times of a case on the current GPU."""
    prepared = ours.prepare(case, make_operands(case, torch.device("cuda"), 0), "cuda")
    return autotune.measured_us(prepared.run, tried)


def main() -> None:
    """Measures, prints the losses, and stores the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mean", type=int, nargs="+", default=MEAN_ROWS, help="rows (default %(default)s)")
    parser.add_argument("--json", type=Path, help="where to keep all times, in us by config")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures on a GPU, and there is none")
    gpu = gpu_of(torch.device("cuda"))
    losses: dict[str, list[float]] = {}
    kept = []
    for case in tqdm([*problems(arguments.mean)], unit="problem"):
        tried = autotune.candidates(request_of(case, gpu))
        choice, times = tried[0], measured_us(case, tried)
        losses.setdefault(case.problem, []).append(times[choice] / min(times.values()) - 1)
        named = {config.to_name(): us for config, us in times.items()}
        kept.append({"case": str(case), "sizes": case.sizes, "chosen": choice.to_name(), "us": named})
        if arguments.json:
            arguments.json.write_text(json.dumps(kept))
    print(report(losses))


def report(losses: dict[str, list[float]]) -> str:
    """Returns one line per kind of problem. losses: relative extra times of the chosen configs over the fastest."""
    rows = [
        [kind, str(len(some)), f"{100 * mean(some):.1f}", f"{100 * max(some):.0f}"]
        for kind, some in losses.items()
    ]
    return text_table(["problems", "number", "slower than the fastest, %", "at most, %"], rows)


if __name__ == "__main__":
    main()
