"""Draws calls, runs them on every backend and reports disagreements. Resumable: the report names finished seeds."""

import argparse
import json
import sys
from os import sched_getaffinity
from pathlib import Path

from tqdm import tqdm

from fuzz.calls import ARCHS, MEMBERS
from fuzz.rounds import Plan, Round, pieces, rounds, table
from nvfp4_cute.backends.installed import gpus


def main() -> int:
    """Runs the command line. Returns 1 if a call disagreed."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument(
        "--count", type=int, default=1000, help=f"of calls; {MEMBERS} in a row share their kernels"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument(
        "--only", choices=("right", "hostile"), help="default: one call of four has wrong arguments"
    )
    parser.add_argument(
        "--arch", action="append", help=f"of the emulator; default: each of {', '.join(ARCHS)}"
    )
    parser.add_argument("--cuda", action="store_true", help="on the GPU instead of the emulator")
    parser.add_argument("--jobs", type=int, default=len(sched_getaffinity(0)))
    parser.add_argument(
        "--seconds", type=float, help="to end after; what is not done then is left for another run"
    )
    parser.add_argument("--report", type=Path, help="JSON lines; seeds that it has are not run again")
    args = parser.parse_args()
    found = Round(args.seed)
    done: set[int] = set()
    if args.report and args.report.exists():
        for line in map(json.loads, args.report.read_text().splitlines()):
            if "done" in line:
                done.add(line["done"])
                add(found, Round.from_json(line))
            else:
                found.failures.append(line)
    archs = tuple(args.arch or ARCHS)
    if args.cuda:
        archs = (gpus()[0].arch,)
    plan = Plan({None: None, "right": False, "hostile": True}[args.only], archs, args.cuda)
    todo = [piece for piece in pieces(args.seed, args.count) if piece[0] not in done]
    with tqdm(total=args.count, unit="call", file=sys.stderr) as bar:
        bar.update(args.count - sum(stop - start for start, stop in todo))
        for one in rounds(plan, todo, args.jobs, args.seconds):
            bar.update(sum(one.counts.values()))
            add(found, one)
            for failure in one.failures:
                tqdm.write(f"seed {failure['seed']}: {failure['failure']}\n    {failure['call']}")
            if args.report:
                with args.report.open("a") as file:
                    for line in (*one.failures, one.to_json()):
                        file.write(json.dumps(line) + "\n")
    print(table(found.counts))
    print("made wrong: " + ", ".join(f"{name} {count}" for name, count in sorted(found.mutations.items())))
    print(
        f"{sum(found.counts.values())} calls, {len(found.failures)} that disagree; {found.seconds:.0f} s of one core"
    )
    return 1 if found.failures else 0


def add(total: Round, one: Round) -> None:
    """Adds the counts of another round to ``total``."""
    total.counts += one.counts
    total.mutations += one.mutations
    total.failures += one.failures
    total.seconds += one.seconds


if __name__ == "__main__":
    sys.exit(main())
