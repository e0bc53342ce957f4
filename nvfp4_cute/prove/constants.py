"""Microbenchmarks of the timing model's constants, in the model's own units if it has the figure.

Each is an entry of ``CONSTANTS``: names, where it can be measured, and how. Cycles are those of the SM clock.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from nvfp4_cute import private_api
from nvfp4_cute.gpus import targets
from nvfp4_cute.planning.arch import ARCHS
from nvfp4_cute.prove.outcome import NOT_HERE, PASSED, Job, Outcome
from nvfp4_cute.prove.probe_keys import ProbeTask
from nvfp4_cute.prove.probes import HOPPER, TENSOR_MEMORY, Machine

DESKTOP = ("sm_120a", "sm_121a")
CHUNK = 16384
"""Bytes per copy of ``bulk_reads``."""
MIB = 1 << 20
HEAD_START_CYCLES = 2_000_000
"""Cycles that the GPU waits, about a millisecond, while the host enqueues the timed work."""
UNITS = {
    "launch_us": "us between two events around an empty kernel",
    "launch_in_graph_us": "us an empty kernel in a CUDA graph",
    "clock_hz": "Hz of the SM clock, few SMs busy",
    "load_clock_hz": "Hz of the SM clock, all tensor cores busy",
    "hbm_read": "bytes/s, bulk reads of all SMs",
    "copy": "bytes/s read and written by a device-to-device copy",
    "l2_read": "bytes/s, bulk reads of 16 MiB that L2 holds, all SMs",
    "l2_bandwidth": "bytes a cycle of the clock measured at the same time",
    "sm_bandwidth": "bytes a cycle, bulk reads that L2 holds, one SM",
    "l2_latency": "cycles, pointer chase",
    "hbm_latency": "cycles, pointer chase",
    "arrive_remote": "cycles, pointer chase in another CTA's shared memory",
    "barrier_base": "cycles of bar.sync without its warps",
    "barrier_per_warp": "cycles a warp of bar.sync",
    "cluster_barrier": "cycles of a barrier of two CTAs, its loop included",
    "cta_start": "cycles from one CTA to the next on an SM",
    "wgmma_interval": "cycles of wgmma m64n128k16",
    "wgmma_latency": "cycles from the last wgmma's turn to the end of its wait",
    "scaled_interval": "cycles of a block-scaled tcgen05.mma 128x256x64",
    "commit_latency": "cycles from the last one's turn to the end of the wait for its commit",
    "scaled_sync_flops": "FLOP a cycle and SM of block-scaled mma.sync",
    "bf16_flops": "FLOP/s of torch's product 8192^3 of random bf16",
}
"""Unit of each figure."""


@dataclass(frozen=True)
class Constant:
    """One measurement of one or several figures.

    Attributes:
        archs: architectures on which it can be made.
        measure: returns the figures by name.
    """

    archs: tuple[str, ...]
    measure: Callable[[Machine], dict[str, float]]


def run(job: Job) -> Outcome:
    """Runs the measurement of a job."""
    name = job.arguments["constant"]
    machine = Machine.of(job.backend)
    if machine.arch not in CONSTANTS[name].archs or not machine.is_gpu:
        return Outcome(job.kind, job.name, NOT_HERE, "no such unit, or an emulator, whose time is no GPU's")
    return Outcome(job.kind, job.name, PASSED, numbers=CONSTANTS[name].measure(machine))


# ---- measurements ----------------------------------------------------------------------------------------------
def _us(call: Callable[[], object], repeats: int = 15) -> float:
    """Median time of a call between two events, in us. The host has enqueued all calls before the GPU begins."""
    call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        private_api.spin(HEAD_START_CYCLES)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return median(times)


def _words(count: int = 2) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device="cuda")


def _cycles(name: str, arg0: int, data: torch.Tensor | None = None, ctas: int = 1, arg1: int = 0) -> int:
    """Fewest cycles of five launches, after a warm-up launch."""
    out, found = _words(), []
    for _ in range(6):
        ProbeTask(name, out, out if data is None else data, ctas, arg0, arg1).run("cuda")
        torch.cuda.synchronize()
        found.append(int(out.cpu()[0]) & 0xFFFFFFFF)
    return min(found[1:])


def _slope(name: str, few: int, many: int, **given: int) -> tuple[float, float]:
    """(cycles per repetition, cycles of zero repetitions), from launches with few and with many repetitions."""
    low, high = _cycles(name, few, **given), _cycles(name, many, **given)  # type: ignore[arg-type]
    step = (high - low) / (many - few)
    return step, low - few * step


def _launch(machine: Machine) -> dict[str, float]:
    out = _words()
    task = ProbeTask("empty", out, out, machine.num_sms)
    once = _us(lambda: task.run("cuda"), 50)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(500):
            task.run("cuda")
    return {"launch_us": once, "launch_in_graph_us": _us(graph.replay) / 500}


def _clock(machine: Machine) -> dict[str, float]:
    """Cycles over time of two runs, as the difference of a longer and a shorter run."""

    def rate(name: str, few: int, many: int, ctas: int) -> float:
        out = _words()
        us, cycles = [], []
        for count in (few, many):
            task = ProbeTask(name, out, out, ctas, count)
            us.append(_us(partial(task.run, "cuda"), 5))
            torch.cuda.synchronize()
            cycles.append(int(out.cpu()[0]) & 0xFFFFFFFF)
        return (cycles[1] - cycles[0]) / (us[1] - us[0]) * 1e6

    found = {"clock_hz": rate("barriers_128", 100_000, 1_000_000, 1)}
    busy = {"sm_90a": "wgmma_run"} | dict.fromkeys(DESKTOP, "scaled_sync_run")
    if machine.arch in busy:
        found["load_clock_hz"] = rate(busy[machine.arch], 500_000, 2_000_000, machine.num_sms)
    return found


def _reads(machine: Machine) -> dict[str, float]:
    free, _ = torch.cuda.mem_get_info()
    region = min(8 << 30, free // 4) // CHUNK * CHUNK
    data = torch.empty(region, dtype=torch.uint8, device="cuda")
    data.zero_()
    out = _words()
    each = region // CHUNK // machine.num_sms
    task = ProbeTask("bulk_reads", out, data, machine.num_sms, each, region // CHUNK)
    read = each * machine.num_sms * CHUNK / _us(lambda: task.run("cuda"), 7) * 1e6
    half = region // 2
    copied = 2 * half / _us(lambda: data[:half].copy_(data[half : 2 * half]), 7) * 1e6
    return {"hbm_read": read, "copy": copied}


def _l2(machine: Machine) -> dict[str, float]:
    held = 16 * MIB
    data, out = torch.zeros(held, dtype=torch.uint8, device="cuda"), _words()
    each = 2000
    task = ProbeTask("bulk_reads", out, data, machine.num_sms, each, held // CHUNK)
    us = _us(lambda: task.run("cuda"), 7)
    moved = each * machine.num_sms * CHUNK
    small = 128 * 1024 // CHUNK
    step, _ = _slope("bulk_reads", 64, 1024, data=data, arg1=small)  # type: ignore[arg-type]
    clock = _clock(machine)["clock_hz"]
    return {
        "l2_read": moved / us * 1e6,
        "l2_bandwidth": moved / us * 1e6 / clock,
        "sm_bandwidth": CHUNK / step,
    }


def _ring(nbytes: int, stride: int) -> torch.Tensor:
    """Returns places ``stride`` apart, each with the distance to the next place of a random cycle."""
    count = nbytes // stride
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    following = torch.empty(count, dtype=torch.int64)
    following[order] = order.roll(-1)
    ring = torch.zeros((count, stride // 4), dtype=torch.int32, device="cuda")
    ring[:, 0] = (following * stride).to(torch.int32).cuda()
    return ring


def _latencies(machine: Machine) -> dict[str, float]:
    near = _slope("chase", 1024, 8192, data=_ring(MIB, 256))[0]  # type: ignore[arg-type]
    far, other = _ring(1 << 30, 1 << 17), torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    out, found = _words(), []
    for _ in range(4):
        other.zero_()
        ProbeTask("chase", out, far, 1, 4096).run("cuda")
        torch.cuda.synchronize()
        found.append((int(out.cpu()[0]) & 0xFFFFFFFF) / 4096)
    return {"l2_latency": near, "hbm_latency": min(found)}


def _barriers(machine: Machine) -> dict[str, float]:
    four, twelve = (_slope(f"barriers_{threads}", 1000, 10_000)[0] for threads in (128, 384))
    return {"barrier_per_warp": (twelve - four) / 8, "barrier_base": four - (twelve - four) / 2}


def _cta_start(machine: Machine) -> dict[str, float]:
    out = _words()
    waves = [
        _us(partial(ProbeTask("empty_filling", out, out, n * machine.num_sms).run, "cuda"), 30)
        for n in (1, 17)
    ]
    return {"cta_start": (waves[1] - waves[0]) / 16 * 1e-6 * _clock(machine)["clock_hz"]}


def _wgmma(machine: Machine) -> dict[str, float]:
    interval, latency = _slope("wgmma_run", 4, 64)
    return {"wgmma_interval": interval, "wgmma_latency": latency}


def _scaled(machine: Machine) -> dict[str, float]:
    few, many = (_cycles(f"scaled_run_{n}", 0) for n in (4, 20))
    interval = (many - few) / 16
    return {"scaled_interval": interval, "commit_latency": few - 4 * interval}


def _scaled_sync(machine: Machine) -> dict[str, float]:
    step, _ = _slope("scaled_sync_run", 100, 1100)
    return {"scaled_sync_flops": 4 * 4 * 2 * 16 * 8 * 64 / step}


def _product(machine: Machine) -> dict[str, float]:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return {"bf16_flops": 2 * 8192**3 / _us(lambda: a @ b, 9) * 1e6}


CONSTANTS: dict[str, Constant] = {
    "launch": Constant(ARCHS, _launch),
    "clock": Constant(ARCHS, _clock),
    "memory": Constant(ARCHS, _reads),
    "L2": Constant(ARCHS, _l2),
    "latencies": Constant(ARCHS, _latencies),
    "remote access": Constant(
        ARCHS, lambda machine: {"arrive_remote": _slope("remote_chase", 100, 10_000, ctas=2)[0]}
    ),
    "barriers": Constant(ARCHS, _barriers),
    "cluster barrier": Constant(
        ARCHS, lambda machine: {"cluster_barrier": _slope("cluster_barriers", 100, 2000, ctas=2)[0]}
    ),
    "CTA start": Constant(ARCHS, _cta_start),
    "wgmma": Constant(HOPPER, _wgmma),
    "tcgen05": Constant(TENSOR_MEMORY, _scaled),
    "block-scaled mma.sync": Constant(DESKTOP, _scaled_sync),
    "torch product": Constant(ARCHS, _product),
}


def model_has(target: targets.Target) -> dict[str, tuple[float, str]]:
    """Returns the timing model's figures of a GPU and their sources, by the names of ``UNITS``."""
    from nvfp4_cute.gpus.timing_figures import constants_of

    constants = constants_of(target)
    found = {
        name: (float(getattr(constants, name)), constants.sources[name])
        for name in UNITS
        if name in constants.sources and name != "clock_hz"
    }
    found["launch_us"] = 1e6 * constants.launch / constants.clock_hz, constants.sources.get("launch", "")
    found["load_clock_hz"] = constants.clock_hz, constants.sources.get("clock_hz", "")
    read = target.floor_bandwidth_bytes_per_s
    found["hbm_read"] = read, target.sources.get("reached_bandwidth_bytes_per_s", "theoretical")
    return found
