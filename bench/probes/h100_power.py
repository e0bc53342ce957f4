"""Clock and power of matrix products repeated for seconds, on zeros, small integers and random data; and of copies.

    python bench/probes/h100_power.py > bench/probes/h100_power.txt

Needs torch and nvidia-smi. ``gpus.power`` takes its figures of Hopper from this output.
"""

import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch

SECONDS, WARM_SECONDS, PAUSE_SECONDS = 1.6, 0.8, 0.03
LAUNCHES = 20
QUERY = "--query-gpu=clocks.sm,power.draw.instant,temperature.gpu"


@dataclass
class Sampler:
    """Samples clock in MHz, power in W and temperature of GPU 0 every 50 ms, each with its time."""

    samples: list[tuple[float, ...]] = field(default_factory=list)

    def start(self) -> subprocess.Popen[str]:
        """Reads in the background until the process is killed."""
        command = ["nvidia-smi", "-i", "0", QUERY, "--format=csv,noheader,nounits", "-lms", "50"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.samples.append((time.monotonic(), *map(float, line.split(","))))

    def medians(self, begin: float, end: float) -> tuple[float, ...]:
        """Returns the medians of the samples between two times."""
        found = [values for at, *values in self.samples if begin < at < end]
        return tuple(median(column) for column in zip(*found, strict=True))


def time_us(run: Callable[[], object], launches: int = 1) -> float:
    """Returns the time of one launch, from two events around ``launches``."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(launches):
        run()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / launches


def report(
    sampler: Sampler, name: str, run: Callable[[], object], flops: float = 0, nbytes: float = 0
) -> None:
    """Prints a line: one launch after a pause, then many."""
    run()
    single = []
    for _ in range(5):
        time.sleep(PAUSE_SECONDS)
        single.append(time_us(run))
    began, times = time.monotonic(), []
    while time.monotonic() - began < SECONDS:
        times.append((time.monotonic(), time_us(run, LAUNCHES)))
    us = median(us for at, us in times if at > began + WARM_SECONDS)
    mhz, watts, celsius = sampler.medians(began + WARM_SECONDS, time.monotonic())
    rate = f"{flops / us / 1e6:.0f} TFLOP/s" if flops else f"{nbytes / us / 1e3:.0f} GB/s"
    print(
        f"{name}: single {median(single):.1f} us, sustained {us:.1f} us at {mhz:.0f} MHz, {watts:.1f} W, {rate}, {celsius:.0f} C",
        flush=True,
    )


def make(kind: str, rows: int, columns: int) -> torch.Tensor:
    """Returns zeros, integers from -2 to 2, or normal random numbers."""
    if kind == "zeros":
        return torch.zeros(rows, columns, device="cuda")
    if kind == "ints":
        return torch.randint(-2, 3, (rows, columns), device="cuda").float()
    return torch.randn(rows, columns, device="cuda")


def main() -> None:
    """Prints all lines."""
    sampler = Sampler()
    process = sampler.start()
    time.sleep(1.5)
    _, mhz, watts, _ = sampler.samples[-1]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"idle: {watts} W at {mhz:.0f} MHz\n")
    one = torch.ones((), device="cuda")
    for kind in ("zeros", "ints", "random"):
        for n in (8192, 4096, 2048):
            a, b = (make(kind, n, n).bfloat16() for _ in range(2))
            report(sampler, f"bf16 {n} {kind}", partial(torch.mm, a, b.T), 2 * n**3)
        n = 8192
        a, b = (make(kind, n, n).to(torch.float8_e4m3fn) for _ in range(2))
        fp8 = partial(torch._scaled_mm, a, b.T, one, one, out_dtype=torch.bfloat16)
        report(sampler, f"fp8 {n} {kind}", fp8, 2 * n**3)
        x = make(kind, 16384, 16384)
        y = torch.empty_like(x)
        report(sampler, f"copy {kind}", partial(y.copy_, x), 0, 2 * x.nbytes)
    process.kill()


if __name__ == "__main__":
    main()
