"""Launches h100_gather_probe.cu, and times kernels for few rows over rows, N and K after a flush of L2.

    nvcc -cubin -arch=sm_90a -O3 bench/probes/h100_gather_probe.cu
    python bench/probes/h100_gather_probe.py h100_gather_probe.cubin

Lists of a gather: first, fifth and ninth decile, and the longest, in cycles. A step has about 150 cycles of its own.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

from nvfp4_cute.bench.layers import INTERVAL_US
from nvfp4_cute.bench.validation import calls
from nvfp4_cute.tuning import stopwatch

STEPS, PITCH = 6, 4096
OCCUPANCIES = ((1, 1), (1, 8), (132, 1), (132, 4), (132, 8), (64, 8))
PATTERNS = ("8 rows, 16 of each 64 B", "2 rows of 256 B", "8 rows of 64 B")


class Driver:
    """Kernels of a cubin, in torch's context."""

    def __init__(self, cubin: bytes):
        """Loads the cubin."""
        self._cuda, self._module = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        self._done(self._cuda.cuModuleLoadData(ctypes.byref(self._module), cubin))

    def launch(self, name: str, ctas: int, threads: int, *args: int | torch.Tensor, smem: int = 0) -> None:
        """Launches a kernel and waits for it. Arguments are 64 bits each; an int is in the lower half."""
        function = ctypes.c_void_p()
        self._done(self._cuda.cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()))
        kept = [
            ctypes.c_longlong(x.data_ptr()) if isinstance(x, torch.Tensor) else ctypes.c_longlong(x)
            for x in args
        ]
        pointers = (ctypes.c_void_p * len(kept))(*(ctypes.addressof(x) for x in kept))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._done(
            self._cuda.cuLaunchKernel(function, ctas, 1, 1, threads, 1, 1, smem, stream, pointers, None)
        )
        torch.cuda.synchronize()

    def _done(self, code: int) -> None:
        if code:
            raise RuntimeError(f"driver: {code}")


def deciles(values: list[int]) -> list[int]:
    """Returns the first, fifth and ninth decile, and the largest value."""
    ordered = sorted(values)
    return [ordered[len(ordered) * part // 10] for part in (1, 5, 9)] + ordered[-1:]


def gathers(driver: Driver, flush: Callable[[], None], big: torch.Tensor, result: torch.Tensor) -> None:
    """Times four dependent loads of each warp, in separate rows."""
    for asynchronous in (0, 1):
        for width in (64, 128, 512):
            for ctas, warps in OCCUPANCIES:
                shown = []
                for state in ("cold", "warm"):
                    firsts, laters = [], []
                    for _ in range(5):
                        if state == "cold":
                            flush()
                        arguments = (big, PITCH, STEPS, width, asynchronous, result)
                        driver.launch("gather", ctas, 32 * warps, *arguments, smem=64 * 32 * warps)
                        got = result[: ctas * warps * STEPS].view(-1, STEPS).cpu()
                        firsts += got[:, 0].tolist()
                        laters += got[:, 2:].flatten().tolist()
                    shown.append(f"{state} first {deciles(firsts)} {state} later {deciles(laters)}")
                how = "cp.async" if asynchronous else "ldg"
                print(f"gather {how} rows of {width} B, {ctas} CTAs x {warps} warps", *shown, flush=True)


def tokens(driver: Driver, flush: Callable[[], None], big: torch.Tensor, result: torch.Tensor) -> None:
    """Times rows of activations in L2, or in L1 if they repeat."""
    steps, pitch = 8, 8192
    for pattern, what in enumerate(PATTERNS):
        for again in (0, 1):
            for ctas, warps in ((1, 1), (1, 8), (132, 8)):
                for blocks in (1, 4):
                    flush()
                    big[: 64 * pitch].fill_(1)
                    driver.launch(
                        "tokens", ctas, 32 * warps, big, pitch, steps, blocks, again, pattern, result
                    )
                    got = result[: ctas * warps * steps * 2].view(-1, steps, 2).cpu()
                    warp, cta = ([median(got[:, s, i].tolist()) for s in range(steps)] for i in (0, 1))
                    which = "the same again" if again else "others"
                    print(
                        f"tokens {what}, {blocks} x 4 loads, {which}, {ctas} CTAs x {warps} warps warp {warp} CTA {cta}"
                    )


def kernels() -> None:
    """Prints us of products of few rows after a flush of L2."""
    shapes = [
        (m, n, k) for m in (1, 8, 16, 32) for n in (32, 1056, 4224, 8448) for k in (1024, 2048, 4096, 8192)
    ]
    cases = [calls.Case("gemm, 16-bit rows", shape) for shape in shapes]
    cases += [calls.Case("gemm", (m, n, k)) for m, n, k in shapes if m == 8 and n < 8448]
    for case in cases:
        call = case.call("cuda")
        found = stopwatch.measure({"": partial(_on_the_gpu, call)}, 1, rounds=15, clean=True)
        print(
            f"{case.name}: {found[''].median - found[stopwatch.EMPTY].median + INTERVAL_US:.2f}", flush=True
        )


def _on_the_gpu(call: calls.Call, _: int) -> object:
    return call("cuda")


def main() -> None:
    """Runs all measurements."""
    other, read = (
        torch.zeros(256 << 20, dtype=torch.uint8, device="cuda"),
        torch.zeros(16 << 20, device="cuda"),
    )
    big, result = (
        torch.zeros(512 << 20, dtype=torch.uint8, device="cuda"),
        torch.zeros(1 << 21, dtype=torch.int64, device="cuda"),
    )

    def flush() -> None:
        other.zero_()
        read.sum()

    driver = Driver(Path(sys.argv[1]).read_bytes())
    gathers(driver, flush, big, result)
    tokens(driver, flush, big, result)
    kernels()


if __name__ == "__main__":
    main()
