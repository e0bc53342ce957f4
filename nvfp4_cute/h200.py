"""`python -m nvfp4_cute.h200`: the sm_90a kernel on the Hopper GPU of this machine, checked and measured in one run.

Writes ``bench/results/h200.md``: random problems compared with the reference bit by bit; a soak over forms, threads,
streams and graphs; competition cases, decode layers and a large GEMM beside torch on the same values (cold L2, rotating
inputs, CUDA graphs; median and deciles), decode layers with clean data in L2, too, and what that is of a copy's bandwidth; what
a call costs the host, allocates, and copies.
"""

import argparse
import datetime
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import nvfp4_cute
from nvfp4_cute import check, stopwatch, targets
from nvfp4_cute.bench import cases, measured, memory_bound, ours, report
from nvfp4_cute.bench.command import RESULTS
from nvfp4_cute.bench.operands import make_operands

SELECTED = (
    "nvfp4_group_gemm",
    "nvfp4_gemm",
    "gemm 4096^3",
    "gemm 8192^3",
    "x 14336 1 rows",
    "x 14336 8 rows",
    "x 14336 32 rows",
    "linear 4096 x 4096 ",
    "x 8192 ",
)
LIMITS = check.Limits(groups=4, max_m=300, max_n=400, max_k=2048)
HOST_SIZES = tuple((m, 128, 512) for m in (80, 176, 128, 72, 64, 248, 96, 160))
CALLS, REPEATS = 300, 5
SOAK_THREADS = 4


def main() -> None:
    """Check, measure, write the page, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--problems", type=int, default=20, help="random problems to check (default %(default)s)"
    )
    parser.add_argument(
        "--soak",
        type=float,
        default=20.0,
        help="seconds of the soak; 600 before a release (default %(default)s)",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the page (default %(default)s)")
    arguments = parser.parse_args()
    target = targets.detect()
    if target is None or target.arch != "sm_90a":
        raise SystemExit("this needs an sm_90a GPU that the table of targets knows")
    wrong = [
        f"seed {seed}: {reason}"
        for seed in tqdm(range(arguments.problems), desc="checking")
        if (reason := check.failure_of(check.draw(seed, LIMITS), "cuda"))
    ]
    checked = f"{arguments.problems - len(wrong)} of {arguments.problems} random problems bit-equal to the reference"
    chosen = [
        case
        for case in cases.select(("competition", "dense", "linear"))
        if case.operation in ("grouped_gemm", "gemm") and any(name in str(case) for name in SELECTED)
    ]
    rows = report.make_rows(chosen, target, measured.time_case)
    heading = (
        f"{torch.cuda.get_device_name()}, {datetime.date.today()}, driver {_driver()}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}: measured, median (CUDA events, graph replay, cold L2, rotating inputs)."
    )
    spread = [f"{row.case}: {row.time.low:.1f} to {row.time.high:.1f} us" for row in rows if row.time]
    notes = [
        checked,
        *wrong,
        soak(arguments.soak),
        *_host_costs(),
        "first to ninth decile: " + "; ".join(spread),
        "torch in bf16 in the same run, us: "
        + "; ".join(f"{row.case} {us:.2f}" for row in rows if (us := _bf16_us(row))),
        _with_clean_l2([case for case in chosen if case.suite == "linear"], target),
    ]
    arguments.out.mkdir(exist_ok=True)
    path = report.save(report.Report(target, rows, heading, notes), arguments.out)
    print(path.read_text())


def _bf16_us(row: report.Row) -> float | None:
    """What the fastest of torch's ways with 16-bit operands takes for a case."""
    return min((time.us for name, time in row.peers.items() if "bf16" in name), default=None)


def _with_clean_l2(chosen: list[cases.Case], target: targets.Target) -> str:
    """Times where no data that were written before go to memory meanwhile, and their share of a copy's bandwidth."""
    copied = memory_bound.COPY_BYTES / memory_bound.time_copy()["copy"].median
    found = []
    for row in report.make_rows(chosen, target, partial(measured.time_case, clean=True)):
        if row.time:
            share = row.case.work.bytes / row.time.us / copied
            found.append(f"{row.case} {row.time.us:.2f} us, {share:.0%}, bf16 {_bf16_us(row):.2f} us")
    return f"with L2 full of clean data, and of the bandwidth of a copy, {copied / 1e6:.2f} TB/s: {'; '.join(found)}"


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]


def _host_costs() -> list[str]:
    """What the host spends on a call of eight groups that computes little."""
    case = cases.Case("host", "host", "eight groups", "grouped_gemm", HOST_SIZES)
    operands = make_operands(case, torch.device("cuda"), 0)
    a, b, a_scale, b_scale, out = (
        list(tensors)
        for tensors in (operands.a, operands.b, operands.a_scale, operands.b_scale, operands.out)
    )
    small = torch.zeros(1024, device="cuda")
    ragged = _ragged_call()

    def call(given: list[torch.Tensor] | None) -> Callable[[], object]:
        return lambda: nvfp4_cute.grouped_gemm(a, b, a_scale, b_scale, out=given, out_dtype=torch.float16)

    return [
        f"host time of {name}: {_host_us(function):.1f} us"
        for name, function in (
            ("grouped_gemm, list form, 8 groups, out given", call(out)),
            ("grouped_gemm, list form, 8 groups, out allocated", call(None)),
            ("grouped_gemm, ragged form, 8 groups, out given", ragged),
            ("torch.add", lambda: torch.add(small, small)),
        )
    ] + [
        f"{CALLS} calls of the {form} form with out given: {_side_effects(function)}"
        for form, function in (("list", call(out)), ("ragged", ragged))
    ]


def _ragged_call() -> Callable[[], object]:
    """A ragged call of the same groups, into one output."""
    case = cases.Case("host", "host", "eight groups", "grouped_gemm", HOST_SIZES, form="ragged")
    return ours.prepare(case, make_operands(case, torch.device("cuda"), 0), "cuda").run


def _side_effects(function: Callable[[], object]) -> str:
    """Allocations on the GPU, and copies and fills that the profiler saw, of repeated calls."""
    function()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(CALLS):
            function()
        torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    moved = sum(
        event.count
        for event in profile.key_averages()
        if any(word in event.key.lower() for word in ("memcpy", "memset"))
    )
    return f"{allocated} allocations, {moved} copies or fills"


def soak(seconds: float) -> str:
    """Threads with a stream each repeat calls of both forms, eagerly and as graphs, and compare every bit.

    Every call's first result, before the threads start, is what later ones have to be.
    """
    deadline, counts, wrong = time.monotonic() + seconds, [0] * SOAK_THREADS, [0] * SOAK_THREADS
    device = torch.device("cuda")
    sizes = [((40, 256, 512), (0, 256, 512), (130, 256, 512)), ((8, 384, 2048),), ((1, 4096, 4096),)]
    # Captured one after the other: threads may not call the allocator while one captures.
    jobs: list[list[tuple[Callable[[], object], list[torch.Tensor], list[torch.Tensor]]]] = []
    for thread in range(SOAK_THREADS):
        mine = []
        for number, groups in enumerate(sizes):
            for form in ("list", "ragged"):
                case = cases.Case("soak", "soak", f"{form} {number}", "grouped_gemm", groups, form=form)
                prepared = ours.prepare(case, make_operands(case, device, thread), "cuda")
                prepared.run()
                right = [out.clone() for out in prepared.out]
                replay = stopwatch.captured(measured.in_turn([prepared.run]), 0)
                mine += [(run, list(prepared.out), right) for run in (prepared.run, replay)]
        jobs.append(mine)
    torch.cuda.synchronize()
    memory = torch.cuda.memory_allocated()

    def work(thread: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while time.monotonic() < deadline:
                for run, outs, right in jobs[thread]:
                    for out in outs:
                        out.fill_(float("nan"))
                    run()
                    equal = [torch.equal(out, expected) for out, expected in zip(outs, right, strict=True)]
                    counts[thread] += 1
                    wrong[thread] += not all(equal)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(SOAK_THREADS)]
    for worker in threads:
        worker.start()
    for worker in threads:
        worker.join()
    torch.cuda.synchronize()
    leaked = torch.cuda.memory_allocated() - memory
    return (
        f"soak of {seconds:.0f} s, {SOAK_THREADS} threads with a stream each, list and ragged form, eager and graphs: "
        f"{sum(counts)} calls, {sum(wrong)} with a wrong bit, {leaked} bytes leaked"
    )


def _host_us(function: Callable[[], object]) -> float:
    """Least mean of several runs of calls; the GPU is idle before each run."""
    best = float("inf")
    for _ in range(1 + REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        best = min(best, (time.perf_counter() - start) / CALLS)
    torch.cuda.synchronize()
    return 1e6 * best


if __name__ == "__main__":
    main()
