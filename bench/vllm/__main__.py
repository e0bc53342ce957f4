"""Measures whole models in vLLM on this machine's GPU, or remakes the page: ``python -m nvfp4_cute.bench.vllm``."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nvfp4_cute.bench.vllm import page
from nvfp4_cute.bench.vllm.plan import WAVES, selected
from nvfp4_cute.bench.vllm.serve import serve
from nvfp4_cute.bench.vllm.waves import run_wave

EPILOG = """examples:
  python -m nvfp4_cute.bench.vllm --save h200 --out bench/results    all of it: three waves of engines, about 10 minutes
  python -m nvfp4_cute.bench.vllm dense --save h200 --seconds 300    one wave, merged with what h200_vllm.json has
  python -m nvfp4_cute.bench.vllm --only 'plugin$' --save h200       engines whose names match, as one wave
  python -m nvfp4_cute.bench.vllm --read a.json b.json --save h200 --out bench/results    the page of several runs
"""


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges runs: engines of later runs replace those of the same name."""
    found: dict[str, Any] = {}
    for run in runs:
        found = {**found, **run, "engines": found.get("engines", {}) | run["engines"]}
    return found


def write_page(found: dict[str, Any], file: Path) -> None:
    """Writes the page and its picture next to the JSON file; only the page if matplotlib is not installed."""
    picture = file.with_suffix(".png")
    try:
        page.picture(found, picture)
    except ValueError as error:
        print(f"no picture: {error}", file=sys.stderr)
        picture = Path()
    file.with_suffix(".md").write_text(page.page(found, picture.name))


def main() -> int:
    """Runs the requested parts. Returns 0, or 1 if an engine failed."""
    parser = argparse.ArgumentParser(
        prog="python -m nvfp4_cute.bench.vllm", description=__doc__, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    names = [wave.name for wave in WAVES]
    parser.add_argument("waves", nargs="*", help=f"any of {', '.join(names)}, serve; default: all")
    parser.add_argument("--only", metavar="REGEX", help="measure the engines whose names match, as one wave")
    parser.add_argument("--save", default="gpu", metavar="STEM", help="write STEM_vllm.json and STEM_vllm.md")
    parser.add_argument("--out", type=Path, default=Path(), help="folder to write to")
    parser.add_argument(
        "--seconds", type=float, default=900, help="after which no wave begins and running ones end"
    )
    parser.add_argument(
        "--read",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="merge these files, make their page, measure nothing",
    )
    args = parser.parse_args()
    if unknown := set(args.waves) - {*names, "serve"}:
        parser.error(f"{', '.join(unknown)}: none of {', '.join(names)}, serve")
    waves = tuple(wave for wave in WAVES if not args.waves or wave.name in args.waves)
    if args.only is not None:
        if args.waves:
            parser.error(f"--only chooses engines of all waves; leave out {' '.join(args.waves)}")
        waves = selected(args.only)
        if not waves:
            engines = ", ".join(job.name for wave in WAVES for job in wave.jobs)
            parser.error(f"--only {args.only} matches no engine; there are {engines}")
    file = args.out / f"{args.save}_vllm.json"
    if args.read:
        found = merged([json.loads(one.read_text()) for one in args.read])
        file.write_text(json.dumps(found, indent=1))
        write_page(found, file)
        return 0
    found = json.loads(file.read_text()) if file.exists() else {"machine": page.machine(), "engines": {}}
    args.out.mkdir(parents=True, exist_ok=True)
    end, serves = time.monotonic() + args.seconds, "serve" in args.waves or not (args.waves or args.only)
    with tempfile.TemporaryDirectory(prefix="nvfp4_cute_vllm_") as folder:
        for wave in waves:
            left = end - time.monotonic()
            if left > 60:
                for record in run_wave(wave, Path(folder), min(wave.seconds, left), args.out):
                    found["engines"][record["name"]] = record
                    print(page.line(record), flush=True)
                file.write_text(json.dumps(found, indent=1))
        if serves and end - time.monotonic() > 60:
            found["serve"] = serve(Path(folder), end - time.monotonic(), args.out)
            print(json.dumps(found["serve"]), flush=True)
            file.write_text(json.dumps(found, indent=1))
    write_page(found, file)
    failed = [name for name, record in found["engines"].items() if "error" in record]
    for name in failed:
        print(f"{name}: {found['engines'][name]['error']}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
