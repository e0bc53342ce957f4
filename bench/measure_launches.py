"""Measure captured launches: `python -m nvfp4_cute.bench.measure_launches CAPTURES OUT.json` on their GPU.

Times are those between CUDA events around one launch, with L2 full of other, clean data: the median of many.
"""

import ctypes
import json
import sys
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from nvfp4_cute.bench.capture import Capture
from nvfp4_cute.emulator.ptx import parse

ALIGN = 512

REPEATS = 31
FLUSH_BYTES = 256 << 20
MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


@cache
def driver() -> ctypes.CDLL:
    """The CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *args: Any) -> None:
    """A driver call that must succeed."""
    status = getattr(driver(), name)(*args)
    if status:
        raise RuntimeError(f"{name}: error {status}")


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("smem", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


class Launch:
    """A captured launch with tensors of its own; large ones hold normal fp16 numbers."""

    def __init__(self, captured: Capture):
        """Load the code, allocate, fill, and move the addresses."""
        self.cubin, self.module, self.function = captured.cubin, ctypes.c_void_p(), ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(self.module), self.cubin)
        call("cuModuleGetFunction", ctypes.byref(self.function), self.module, captured.kernel.encode())
        call("cuFuncSetAttribute", self.function, MAX_DYNAMIC_SMEM, captured.smem_bytes)
        self.tensors = [
            torch.empty(nbytes // 2 + 512, dtype=torch.float16, device="cuda").normal_()
            for _, nbytes in captured.ranges
        ]
        bases = [-(-tensor.data_ptr() // ALIGN) * ALIGN for tensor in self.tensors]
        for number, data in captured.contents.items():
            tensor = self.tensors[number].view(torch.uint8)
            first = bases[number] - tensor.data_ptr()
            tensor[first : first + len(data)] = torch.from_numpy(captured.moved(data, bases))
        raw = np.zeros(len(captured.params) + ALIGN, np.uint8)
        first = -raw.ctypes.data % ALIGN
        self.params = raw[first : first + len(captured.params)]
        self.params[:] = captured.moved(captured.params, bases)
        entry = parse(captured.ptx).entries[captured.kernel]
        addresses = [self.params.ctypes.data + param.offset for param in entry.params]
        self.arguments = (ctypes.c_void_p * len(addresses))(*addresses)
        self.attribute = Attribute(CLUSTER_DIMENSION, 0, (ctypes.c_uint32 * 16)(*captured.cluster))
        self.config = Config(
            (ctypes.c_uint * 3)(*captured.grid), (ctypes.c_uint * 3)(*captured.block), captured.smem_bytes, None,
            ctypes.pointer(self.attribute), 1,
        )  # fmt: skip

    def run(self) -> None:
        """Launch on the current stream."""
        self.config.stream = torch.cuda.current_stream().cuda_stream
        call("cuLaunchKernelEx", ctypes.byref(self.config), self.function, self.arguments, None)


def microseconds(launch: Launch, flush: torch.Tensor) -> list[float]:
    """Times of cold launches."""
    times = []
    for _ in range(REPEATS):
        flush.sum()
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        launch.run()
        after.record()
        after.synchronize()
        times.append(1000 * before.elapsed_time(after))
    return times


def main(folder: str, out: str) -> None:
    """Measure every capture of a folder."""
    torch.zeros(1, device="cuda")
    flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    us, spread = {}, {}
    for path in sorted(Path(folder).glob("*.npz")):
        try:
            launch = Launch(Capture.load(path))
            times = microseconds(launch, flush)
        except RuntimeError as error:
            print(f"{path.name}: {error}", flush=True)
            continue
        us[path.stem] = median(times)
        spread[path.stem] = [min(times), max(times)]
        print(
            f"{path.stem}: {us[path.stem]:.2f} us ({min(times):.2f} to {max(times):.2f})",
            flush=True,
        )
    device = torch.cuda.get_device_properties(0)
    facts = {
        "device": device.name,
        "us": us,
        "least_and_most_us": spread,
        "repeats": REPEATS,
        "l2": "cold, clean",
    }
    Path(out).write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
