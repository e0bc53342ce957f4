"""Times of all cases on GPUs that are not at hand, for their pages: one list of work for all cores, what takes longest last.

    python -m nvfp4_cute.bench.modelled_pages pages.json --jobs 28 [--target "RTX 5090" --target GB10]
    nvfp4-cute bench --target "RTX 5090" --results pages.json --save

The first command may be stopped at any time: the file keeps every time as soon as it is there, and another run goes on from it.
"""

import argparse
from pathlib import Path

from nvfp4_cute.bench import cases, modelled
from nvfp4_cute.gpus import targets

TARGETS = ("RTX 5090", "RTX PRO 6000", "GB10", "Thor", "B200", "B300")


def main() -> None:
    """Model what the file does not have, and say how much of it there is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="JSON file")
    parser.add_argument("--jobs", type=int, default=1, help="processes; default 1")
    parser.add_argument("--target", action="append", metavar="GPU", help=f"default: {', '.join(TARGETS)}")
    parser.add_argument("--containing", default="", help="only cases whose name contains this")
    arguments = parser.parse_args()
    chosen = [targets.lookup(name) for name in arguments.target or TARGETS]
    pieces = [(case, target) for target in chosen for case in cases.select((), arguments.containing)]
    known = modelled.records(
        pieces, jobs=arguments.jobs, results=arguments.results, label="pages", longest_first=False
    )
    timed = sum(found["time"] is not None for found in known.values())
    print(f"{len(known)} cases, {timed} of them with a time: {arguments.results}")


if __name__ == "__main__":
    main()
