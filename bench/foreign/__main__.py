"""Models our grouped products and layers of experts next to foreign CuTe DSL kernels on a GPU that need not be present.

    python -m nvfp4_cute.bench.foreign --at ~/lightmoe --at ~/cutlass/examples/python/CuTeDSL --results foreign.json
    python -m nvfp4_cute.bench.foreign --results foreign.json --save

Every kernel gets equal operands and runs on the same emulator, and the same timing model models it. Each tile size of a
foreign kernel is modelled separately. The emulator executes only a few of the clusters with equal work, and their
results are compared with exact sums. Each record is stored as soon as it is complete. Stored records are not computed again.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nvfp4_cute import env
from nvfp4_cute.bench import provenance
from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.foreign import layers, ours, page
from nvfp4_cute.bench.foreign.cells import FLASHINFER, cells
from nvfp4_cute.bench.foreign.kernels import FOREIGN
from nvfp4_cute.bench.processes import write_json
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.terminal import Progress

MAKER = "python -m nvfp4_cute.bench.foreign --results"
PUBLISHED_BY = (ours.NAME, "FlashInfer masked")
"""Kernels that run on the cells that FlashInfer published, with only their first tile, FlashInfer's default."""
Key = tuple[str, str, str]
"""Kernel, cell, tile."""

MODEL = (
    *(
        f"{folder}/*.py"
        for folder in ("emulator", "emulator/fronts", "emulator/isa", "emulator/record", "timing", "gpus")
    ),
    *("roofline/modelled.py", "roofline/tile_work.py", "planning/schedule.py"),
    *(f"bench/foreign/{name}.py" for name in ("compare", "kernels", "operands", "run", "schedule")),
)
"""Sources of times of foreign kernels: the emulator without its checkers, the timing model, and the calls."""
LAYERS = ("roofline/row_work.py", "bench/foreign/layers.py", "bench/foreign/lightmoe_layer.py")
"""Other sources of times of foreign layers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Models the cells that the results lack, and writes the page on request. Returns 0."""
    args = _parser().parse_args(argv)
    sys.path[:0] = [str(folder.expanduser().resolve()) for folder in args.at]
    if args.list:
        print("\n".join(f"{kernel.name}: {kernel.missing() or 'found'}" for kernel in FOREIGN.values()))
        return 0
    target = targets.lookup(args.target)
    known: dict[str, dict[str, Any]] = {}
    if args.results.exists():
        known = provenance.read_object(args.results, (), MAKER)
    chosen = [case for case in (*cells(), *layers.layers()) if re.search(args.only, str(case))]
    names = args.kernels or [ours.NAME, *FOREIGN]
    end = time.monotonic() + args.deadline
    for name in names:
        kernel = FOREIGN.get(name)
        missing = kernel.missing() if kernel else None
        if missing:
            print(f"{name}: not run: {missing}", file=sys.stderr)
            continue
        wanted = [key for key in pieces(name, chosen) if "us" not in known.get(text_of(key), {})]
        with Progress(total=len(wanted), desc=name, unit="cell") as bar:
            for found in records(name, wanted, target, end - time.monotonic()):
                cell = found.pop("cell")
                key = text_of((name, cell, found.pop("tile")))
                version = kernel.version if kernel else ""
                known[key] = {**found, "version": version, "sources": sources(name, cell)}
                write_json(args.results, known)
                bar.update()
    if args.save:
        page.save(known, target)
    return 0


def _parser() -> argparse.ArgumentParser:
    sources = "\n".join(f"  {kernel.name}: {kernel.source}" for kernel in FOREIGN.values())
    parser = argparse.ArgumentParser(
        prog="python -m nvfp4_cute.bench.foreign",
        description=__doc__,
        epilog=f"foreign kernels, and how to get them:\n{sources}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--at",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="import foreign packages from FOLDER",
    )
    parser.add_argument(
        "--results", type=Path, required=True, metavar="FILE", help="JSON of all records; continued"
    )
    parser.add_argument("--target", default="B200", metavar="GPU", help="default: %(default)s")
    parser.add_argument("--kernels", nargs="+", choices=[ours.NAME, *FOREIGN], help="default: all")
    parser.add_argument("--only", default="", metavar="REGEX", help="only cells whose name contains a match")
    parser.add_argument(
        "--deadline", type=float, default=1e9, metavar="S", help="stop after S seconds; the results stay"
    )
    parser.add_argument(
        "--list", action="store_true", help="print which foreign kernels can be imported, and stop"
    )
    parser.add_argument("--save", action="store_true", help="write the page and its picture from the results")
    return parser


def sources(kernel: str, cell: str) -> str:
    """Returns the digest of the sources that a time depends on, without our kernels for a foreign one."""
    if kernel == ours.NAME:
        return provenance.digest()
    layer = cell in {str(layer) for layer in layers.layers()}
    return provenance.digest_of(
        (*MODEL, f"bench/foreign/{FOREIGN[kernel].adapter}.py", *(LAYERS if layer else ()))
    )


def text_of(key: Key) -> str:
    """Returns the key of a record in a file of results."""
    return " | ".join(key)


def pieces(name: str, chosen: Sequence[Case | layers.Layer]) -> Iterator[Key]:
    """Yields the key of every tile of every cell; one without a tile for our kernel and for layers, which come last."""
    adapter = FOREIGN[name].load() if name in FOREIGN else None
    for case in chosen:
        if isinstance(case, layers.Layer):
            yield from [(name, str(case), "")] if name in (ours.NAME, layers.LIGHTMOE) else []
            continue
        tiles = [""] if adapter is None or adapter.refuses(case) else list(map(str, adapter.tiles(case)))
        if case.problem == FLASHINFER:
            tiles = tiles[:1] if name in PUBLISHED_BY else []
        yield from ((name, str(case), tile) for tile in tiles)


def records(name: str, wanted: Sequence[Key], target: Target, seconds: float) -> Iterator[dict[str, Any]]:
    """Yields records as a child process makes them. A kernel that ends the process loses its own record only."""
    left, end = list(wanted), time.monotonic() + seconds
    products = sum(cell not in {str(layer) for layer in layers.layers()} for _, cell, _ in left)
    while left and time.monotonic() < end:
        # Objects that QuACK compiled in another process have no PTX here, so it gets an empty cache.
        folder = tempfile.TemporaryDirectory()
        paths = os.pathsep.join(filter(None, sys.path))
        environment = env.with_variables({"PYTHONPATH": paths, "QUACK_CACHE_DIR": folder.name})
        child = subprocess.Popen(
            [sys.executable, "-m", "nvfp4_cute.bench.foreign.run", name, target.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        timer = threading.Timer(end - time.monotonic(), child.kill)
        timer.daemon = True
        timer.start()
        assert child.stdin is not None and child.stdout is not None
        # A layer has a process of its own: compiled kernels belong to a process's first GPU.
        given = left[: max(products - len(wanted) + len(left), 1)]
        child.stdin.write("".join(f"{cell}\t{tile}\n" for _, cell, tile in given))
        child.stdin.close()
        for line in child.stdout:
            if not line.startswith("{"):
                continue
            yield json.loads(line)
            left.pop(0)
        child.wait()
        timer.cancel()
        folder.cleanup()
        if left and child.returncode and time.monotonic() < end:
            _, cell, tile = left.pop(0)
            yield {
                "cell": cell,
                "tile": tile,
                "reason": f"the process ended with exit code {child.returncode}",
            }


if __name__ == "__main__":
    raise SystemExit(main())
