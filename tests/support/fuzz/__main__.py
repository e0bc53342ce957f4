"""Draw calls, run them on every backend, keep what disagrees. Resumable: finished seeds are in the report."""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from os import sched_getaffinity
from pathlib import Path

import torch
from tqdm import tqdm

from fuzz.calls import SMALLER, draw
from fuzz.compare import failure_of

ARCHS = ("sm_100a", "sm_120a", "sm_90a")
CHUNK = 20


def check(seed: int, hostile: bool, backends: tuple[str, ...]) -> dict[str, str | int] | None:
    """What is wrong with the call of a seed, for the report; None where nothing is."""
    call = draw(seed, hostile=hostile)
    found = failure_of(call, backends)
    if found is None:
        return None
    for limits in SMALLER:
        smaller = draw(seed, hostile=hostile, limits=limits)
        if smaller.operation == call.operation and (still := failure_of(smaller, backends)):
            call, found = smaller, still
            break
    return {"seed": seed, "failure": found, "call": str(call)}


def check_chunk(start: int, stop: int, hostile: bool, backends: tuple[str, ...]) -> tuple[int, list]:
    """The calls of seeds start to stop: how many, and the failures."""
    torch.set_num_threads(1)
    found = []
    for seed in range(start, stop):
        try:
            found.append(check(seed, hostile, backends))
        except Exception as error:  # the others go on
            found.append({"seed": seed, "failure": f"not drawn or compared: {error!r}", "call": ""})
    return stop - start, [failure for failure in found if failure]


def chunks(first: int, count: int) -> Iterator[tuple[int, int]]:
    """Seeds in pieces."""
    for start in range(first, first + count, CHUNK):
        yield start, min(start + CHUNK, first + count)


def main() -> int:
    """Run; return 1 where something disagreed."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--hostile", action="store_true", help="with one or two arguments made wrong")
    parser.add_argument(
        "--arch", action="append", help=f"of the emulator; default: seed by seed one of {', '.join(ARCHS)}"
    )
    parser.add_argument("--cuda", action="store_true", help="on the GPU instead of the emulator")
    parser.add_argument("--jobs", type=int, default=len(sched_getaffinity(0)))
    parser.add_argument("--report", type=Path, help="JSON lines; seeds that it has are not run again")
    args = parser.parse_args()
    done: set[int] = set()
    failures = 0
    if args.report and args.report.exists():
        lines = [json.loads(line) for line in args.report.read_text().splitlines()]
        done = {line["done"] for line in lines if "done" in line}
        failures = sum("failure" in line for line in lines)
    todo = [chunk for chunk in chunks(args.seed, args.count) if chunk[0] not in done]
    archs = tuple(args.arch or ARCHS)
    backends = ("cuda",) if args.cuda else tuple(f"emulator:{arch}" for arch in archs)
    with ProcessPoolExecutor(args.jobs) as pool, tqdm(total=args.count, unit="call", file=sys.stderr) as bar:
        bar.update(args.count - sum(stop - start for start, stop in todo))
        jobs = []
        for i, (start, stop) in enumerate(todo):
            chosen = backends if args.arch or args.cuda else (backends[i % len(backends)],)
            jobs.append((start, pool.submit(check_chunk, start, stop, args.hostile, chosen)))
        for start, job in jobs:
            count, found = job.result()
            bar.update(count)
            failures += len(found)
            for failure in found:
                tqdm.write(f"seed {failure['seed']}: {failure['failure']}\n    {failure['call']}")
            if args.report:
                with args.report.open("a") as file:
                    for failure in found:
                        file.write(json.dumps(failure) + "\n")
                    file.write(json.dumps({"done": start}) + "\n")
    print(f"{args.count} calls, {failures} that disagree")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
