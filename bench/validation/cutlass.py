"""CUTLASS's CuTe DSL kernels for Hopper, launched by its example scripts: the launch is captured, modelled, and measured.

Needs a checkout of CUTLASS, named by the environment variable NVFP4_CUTE_CUTLASS. A call's name is a script with its
arguments. The scripts run unmodified.

    python -m nvfp4_cute.bench.validation.cutlass NAME FILE      captures the launch of one call

Device addresses in parameters and in small tensors are 64-bit words. The loader of a launch states the new place of
each tensor, and the words are moved accordingly. Large tensors have no contents, because their data does not affect
control flow.
"""

import ctypes
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nvfp4_cute import env
from nvfp4_cute.emulator.compiled import compiled
from nvfp4_cute.emulator.cubin import read_machine_code
from nvfp4_cute.emulator.fronts.driver import param_buffer
from nvfp4_cute.emulator.fronts.script import run_script
from nvfp4_cute.emulator.fronts.virtual_gpu import VirtualGpu, aligned_bytes
from nvfp4_cute.emulator.machine import Machine
from nvfp4_cute.emulator.memory import host_view
from nvfp4_cute.emulator.ptx import parse
from nvfp4_cute.emulator.record.events import LaunchTrace
from nvfp4_cute.emulator.record.recorder import Recorder
from nvfp4_cute.emulator.state import Launch
from nvfp4_cute.gpus.targets import H200, Target

PREFIX = "CUTLASS's "
FOLDER = Path("examples/python/CuTeDSL/cute/hopper/kernel")
SCRIPTS = {
    path.stem: path
    for path in map(
        Path,
        ("dense_gemm/dense_gemm.py", "dense_gemm/dense_gemm_persistent.py", "grouped_gemm/grouped_gemm.py"),
    )
}
QUICK = ("--skip_ref_check", "--iterations", "1", "--warmup_iterations", "0")
CARRIED_BYTES = 1 << 16
"""Tensors up to this size hold sizes and addresses rather than data: a capture keeps their contents."""
ALIGN = 512
MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class CaptureError(RuntimeError):
    """Raised when a script of CUTLASS did not launch."""


@dataclass(frozen=True)
class Capture:
    """A captured launch.

    Attributes:
        kernel: entry name.
        ptx, cubin: its module.
        params: parameter buffer.
        smem_bytes: dynamic shared memory.
        grid, block, cluster: launch shape.
        ranges: (address, bytes) of every tensor at the time of the capture.
        contents: contents of the small tensors, by number.
    """

    kernel: str
    ptx: str
    cubin: bytes
    params: np.ndarray
    smem_bytes: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    ranges: tuple[tuple[int, int], ...]
    contents: dict[int, np.ndarray]

    def moved(self, data: np.ndarray, bases: Sequence[int]) -> np.ndarray:
        """Returns bytes in which every aligned 64-bit word that is an address in tensor i points into `bases[i]`."""
        moved = data.copy()
        old = data[: len(data) // 8 * 8].view(np.uint64)
        new = moved[: len(data) // 8 * 8].view(np.uint64)
        for (start, nbytes), base in zip(self.ranges, bases, strict=True):
            inside = (old >= start) & (old < start + nbytes)
            new[inside] = old[inside] - np.uint64(start) + np.uint64(base)
        return moved


class CapturingGpu(VirtualGpu):
    """A virtual H200 that stores its first launch, and runs none."""

    def __init__(self) -> None:
        """Starts without a launch."""
        super().__init__(H200.arch, H200.num_sms)
        self.captured: Capture | None = None
        self._texts: dict[str, tuple[str, bytes]] = {}

    def register(self, ptx: str, cubin: bytes | None = None) -> tuple[str, ...]:
        """Registers kernels, and stores their code."""
        names = super().register(ptx, cubin)
        self._texts.update(dict.fromkeys(names, (ptx, cubin or b"")))
        return names

    def run(self, launch: Launch) -> None:
        """Stores a launch."""
        if self.captured is not None:
            return
        name = launch.code.entry.name
        ranges = tuple((address, nbytes) for _, address, nbytes in self.live_memory())
        contents = {
            i: host_view(address, nbytes).copy()
            for i, (address, nbytes) in enumerate(ranges)
            if nbytes <= CARRIED_BYTES
        }
        self.captured = Capture(
            name, *self._texts[name], launch.params.copy(), launch.smem_bytes, launch.grid, launch.block, launch.cluster,
            ranges, contents,
        )  # fmt: skip


@cache
def driver() -> ctypes.CDLL:
    """Returns the CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")


def cuda(name: str, *args: Any) -> None:
    """Makes a driver call that must succeed."""
    status = getattr(driver(), name)(*args)
    if status:
        raise RuntimeError(f"{name}: error {status}")


class Attribute(ctypes.Structure):
    """Struct CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class Config(ctypes.Structure):
    """Struct CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("smem", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


class GpuLaunch:
    """A captured launch with its own tensors; large ones hold normal fp16 numbers."""

    def __init__(self, captured: Capture):
        """Loads the code, allocates and fills tensors, and moves the addresses."""
        self.cubin, self.module, self.function = captured.cubin, ctypes.c_void_p(), ctypes.c_void_p()
        cuda("cuModuleLoadData", ctypes.byref(self.module), self.cubin)
        cuda("cuModuleGetFunction", ctypes.byref(self.function), self.module, captured.kernel.encode())
        cuda("cuFuncSetAttribute", self.function, MAX_DYNAMIC_SMEM, captured.smem_bytes)
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
        """Launches on the current stream."""
        self.config.stream = torch.cuda.current_stream().cuda_stream
        cuda("cuLaunchKernelEx", ctypes.byref(self.config), self.function, self.arguments, None)


def is_there() -> bool:
    """Whether there is a checkout."""
    return bool(env.CUTLASS.read())


def captured(name: str) -> Capture:
    """Returns the launch of a call. The script runs in a separate process, because it changes modules.

    Raises:
        CaptureError: the script failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "launch.pickle")
        command = [sys.executable, "-m", "nvfp4_cute.bench.validation.cutlass", name, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CaptureError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
        return pickle.loads(path.read_bytes())  # written by the process above, in a folder of its own


def recorded(name: str, target: Target) -> LaunchTrace:
    """Returns the trace of the kernel's launch."""
    launched = captured(name)
    tensors = [aligned_bytes(nbytes) for _, nbytes in launched.ranges]
    bases = [int(tensor.ctypes.data) for tensor in tensors]
    for number, data in launched.contents.items():
        tensors[number][:] = launched.moved(data, bases)
    machine = Machine(target.num_sms, jobs=1)
    recorder = machine.recorder = Recorder()
    for i, tensor in enumerate(tensors):
        machine.memory.add_range(f"tensor {i}", bases[i], tensor.size)
    program = parse(launched.ptx)
    code = compiled(program, program.entries[launched.kernel], timed=True)
    params = param_buffer(len(launched.params))
    params[: len(launched.params)] = launched.moved(launched.params, bases)
    launch = Launch(
        code,
        launched.grid,
        launched.block,
        launched.cluster,
        launched.smem_bytes,
        params,
        machine_code=read_machine_code(launched.cubin)[launched.kernel],
    )
    machine.run(launch)
    return recorder.take(launch)


def call(name: str) -> Callable[[], object]:
    """Returns a call of this launch on this machine's GPU, with its own tensors."""
    return GpuLaunch(captured(name)).run


def main(name: str, file: str) -> None:
    """Runs the script of a call and writes its launch to a file."""
    script, *arguments = name.removeprefix(PREFIX).split()
    gpu = CapturingGpu()
    outcome = run_script(Path(env.CUTLASS.read()) / FOLDER / SCRIPTS[script], [*QUICK, *arguments], gpu)
    if gpu.captured is None:
        raise outcome.error or RuntimeError(f"{name} launched nothing")
    Path(file).write_bytes(pickle.dumps(gpu.captured))


if __name__ == "__main__":
    main(*sys.argv[1:])
