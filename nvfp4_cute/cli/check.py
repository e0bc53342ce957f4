"""`nvfp4-cute check`: compares random problems on a backend with the reference, bit by bit."""

import argparse
import shlex
import time

import torch

from nvfp4_cute.backends import gpu_of, installed
from nvfp4_cute.emulator.fronts.launch_shim import shim_path
from nvfp4_cute.errors import UnsupportedTarget
from nvfp4_cute.formats.block_format import NVFP4_PAIR
from nvfp4_cute.planning.arch import is_weight_only
from nvfp4_cute.prove.exact import Limits, draw, failure_of


def run(args: argparse.Namespace) -> int:
    """Checks the requested number of problems; returns 0 if all are bit-equal to the reference."""
    limits = Limits(args.groups, args.max_m, args.max_n, args.max_k, args.formats, args.out)
    backend = args.backend
    if args.arch:
        if backend == "cuda":
            raise ValueError("--arch chooses the GPU to emulate: leave it out with --backend cuda")
        backend = f"emulator:{args.arch}"
    return run_problems(backend, limits, seed=args.seed, count=args.count)


def run_problems(backend: str | None, limits: Limits, *, seed: int, count: int) -> int:
    """Checks the problems of seeds `seed`, `seed` + 1, ... on `backend`; prints one line each. Returns 0 if all are equal.

    `backend`: see `grouped_gemm`. None selects the GPU if there is a kernel for it, and the emulator otherwise.

    Raises: EmulatorError if the emulator's launch shim is missing, UnsupportedTarget without a GPU.
    """
    backend = backend or ("cuda" if installed.native_gpus() else "emulator")
    if backend.startswith("emulator"):
        shim_path()
    if backend == "cuda" and not installed.gpus():
        raise UnsupportedTarget("--backend cuda: no GPU that torch can use; take --backend emulator")
    weight_only = is_weight_only(gpu_of(backend, torch.device("cuda" if backend == "cuda" else "cpu")).arch)
    failures = 0
    for case in (draw(s, limits) for s in range(seed, seed + count)):
        start = time.perf_counter()
        problem = failure_of(case, backend, weight_only)
        seconds = time.perf_counter() - start
        print(f"seed {case.seed}: {case.problem}: {problem or 'bit-equal'} ({seconds:.1f} s)", flush=True)
        if problem:
            failures += 1
            print(f"  repeat: {repeat_command(backend, limits, case.seed)}", flush=True)
    print(f"{backend}: {count - failures} of {count} problems bit-equal to the reference")
    return 1 if failures else 0


def repeat_command(backend: str, limits: Limits, seed: int) -> str:
    """Returns the command line that checks only the problem of `seed`."""
    name, _, arch = backend.partition(":")
    words = [
        "nvfp4-cute",
        "check",
        "--backend",
        name,
        *(["--arch", arch] if arch else []),
        "--seed",
        seed,
        "--count",
        1,
        "--groups",
        limits.groups,
    ]
    words += ["--max-m", limits.max_m, "--max-n", limits.max_n, "--max-k", limits.max_k]
    if limits.formats != NVFP4_PAIR:
        words += ["--formats", ",".join(format.name for format in limits.formats)]
    if limits.out is not None:
        words += ["--out", limits.out]
    return shlex.join(map(str, words))
