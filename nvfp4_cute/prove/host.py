"""Host time, allocations and copies of calls; and a soak test over forms, threads, streams and graphs."""

import threading
import time
from collections.abc import Callable

import torch

from nvfp4_cute.bench import cases, measured, ours
from nvfp4_cute.bench.operands import make_operands
from nvfp4_cute.ops import parts
from nvfp4_cute.prove.outcome import NOT_HERE, PASSED, WRONG, Job, Outcome
from nvfp4_cute.tuning import stopwatch

SIZES = tuple((m, 128, 512) for m in (80, 176, 128, 72, 64, 248, 96, 160))
CALLS, REPEATS = 300, 5
THREADS = 4


def run(job: Job) -> Outcome:
    """Runs the measurement of a job: "costs" or "soak"."""
    if job.backend != "cuda":
        return Outcome(job.kind, job.name, NOT_HERE, "calls on an emulator cost what the emulator costs")
    if job.arguments["measure"] == "costs":
        return Outcome(job.kind, job.name, PASSED, numbers=costs())
    numbers = soak(job.arguments["seconds"])
    verdict = WRONG if numbers["calls with a wrong bit"] or numbers["bytes leaked"] else PASSED
    detail = f"{THREADS} threads with a stream each, list and ragged form, eager and graphs"
    return Outcome(job.kind, job.name, verdict, detail, numbers=numbers)


def costs() -> dict[str, float]:
    """Returns host time per call in us, and allocations and copies of repeated calls, for eight groups with little work."""
    case = cases.Case("host", "host", "eight groups", "grouped_gemm", SIZES)
    operands = make_operands(case, torch.device("cuda"), 0)
    a = parts.Parts(list(operands.a), list(operands.a_scale))
    b, out = parts.Parts(list(operands.b), list(operands.b_scale)), list(operands.out)
    small = torch.zeros(1024, device="cuda")
    ragged_case = cases.Case("host", "host", "eight groups", "grouped_gemm", SIZES, form="ragged")
    ragged = ours.prepare(ragged_case, operands, "cuda").run

    def call(given: list[torch.Tensor] | None) -> Callable[[], object]:
        return lambda: parts.grouped_gemm(a, b, out=given, out_dtype=torch.float16)

    calls = {
        "list form, out given": call(out),
        "list form, out allocated": call(None),
        "ragged form, out given": ragged,
        "torch.add": lambda: torch.add(small, small),
    }
    numbers = {f"host us of {name}": _host_us(function) for name, function in calls.items()}
    for name in ("list form, out given", "ragged form, out given"):
        allocated, moved = _side_effects(calls[name])
        numbers |= {f"allocations of {CALLS} calls, {name}": allocated, f"copies or fills, {name}": moved}
    return numbers


def _side_effects(function: Callable[[], object]) -> tuple[float, float]:
    """Returns GPU allocations, and copies and fills seen by the profiler, of repeated calls."""
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
    return float(allocated), float(moved)


def _host_us(function: Callable[[], object]) -> float:
    """Returns the least mean of several runs of calls. The GPU is idle before each run."""
    best = float("inf")
    for _ in range(1 + REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        best = min(best, (time.perf_counter() - start) / CALLS)
    torch.cuda.synchronize()
    return 1e6 * best


def soak(seconds: float) -> dict[str, float]:
    """Runs threads with a stream each that repeat calls of both forms, eagerly and as graphs, and compare every bit.

    The first result of every call, from before the threads start, is the expected one.
    """
    counts, wrong = [0] * THREADS, [0] * THREADS
    # Captures one after the other, because threads may not use the allocator during a capture.
    jobs = [_soak_jobs(thread) for thread in range(THREADS)]
    torch.cuda.synchronize()
    memory, deadline = torch.cuda.memory_allocated(), time.monotonic() + seconds

    def work(thread: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while time.monotonic() < deadline:
                for call, outs, right in jobs[thread]:
                    for out in outs:
                        out.fill_(float("nan"))
                    call()
                    equal = [torch.equal(out, expected) for out, expected in zip(outs, right, strict=True)]
                    counts[thread] += 1
                    wrong[thread] += not all(equal)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
    for worker in threads:
        worker.start()
    for worker in threads:
        worker.join()
    torch.cuda.synchronize()
    return {
        "seconds": seconds,
        "calls": float(sum(counts)),
        "calls with a wrong bit": float(sum(wrong)),
        "bytes leaked": float(torch.cuda.memory_allocated() - memory),
    }


def _soak_jobs(
    thread: int,
) -> list[tuple[Callable[[], object], list[torch.Tensor], list[torch.Tensor]]]:
    """Returns calls, their outputs, and the expected outputs."""
    sizes = [((40, 256, 512), (0, 256, 512), (130, 256, 512)), ((8, 384, 2048),), ((1, 4096, 4096),)]
    found = []
    for number, groups in enumerate(sizes):
        for form in ("list", "ragged"):
            case = cases.Case("soak", "soak", f"{form} {number}", "grouped_gemm", groups, form=form)
            prepared = ours.prepare(case, make_operands(case, torch.device("cuda"), thread), "cuda")
            prepared.run()
            right = [out.clone() for out in prepared.out]
            replay = stopwatch.captured(measured.in_turn([prepared.run]), 0)
            found += [(call, list(prepared.out), right) for call in (prepared.run, replay)]
    return found
