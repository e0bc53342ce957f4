"""CUTLASS's CuTe DSL kernels for Hopper, as its example scripts launch them: the launch kept, modelled, and measured.

Needs a checkout of CUTLASS, which the environment variable NVFP4_CUTE_CUTLASS names.

    python -m nvfp4_cute.bench.cutlass_matmul NAME CAPTURE.npz      keeps the launch of one call
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from nvfp4_cute import env
from nvfp4_cute.bench.capture import Capture
from nvfp4_cute.bench.timing_model import DENSE, PERSISTENT, grouped, products, recorded_capture
from nvfp4_cute.emulator.record.events import LaunchTrace
from nvfp4_cute.gpus.targets import Target

CASES = {
    "fourth": (
        *products(
            DENSE,
            ("1024,2048,1024", "128,128", "1,1"),
            ("512,4096,1536", "128,64", "2,1"),
            ("2048,1024,1536", "128,256", "1,1"),
        ),
        *products(
            PERSISTENT,
            ("1536,2048,1024", "128,128", "2,1"),
            ("256,4096,3072", "128,128", "1,1"),
            ("1024,3072,2048", "128,256", "1,1"),
        ),
        grouped(("512,1024,2048", "1024,1024,1024"), "128,128", "1,1"),
        grouped(("256,1536,2048",) * 4, "128,256", "1,1"),
    ),
    "fifth": (
        *products(
            DENSE,
            ("768,2048,1536", "128,128", "1,1"),
            ("512,3072,2048", "128,64", "1,1"),
            ("1024,2048,2048", "128,256", "2,1"),
        ),
        *products(
            PERSISTENT,
            ("2048,2048,1024", "128,128", "1,2"),
            ("384,3072,2048", "128,128", "1,1"),
            ("1536,2048,1536", "128,256", "1,1"),
        ),
        grouped(("768,1024,1536", "512,1536,1024"), "128,128", "1,1"),
        grouped(("384,1024,2048",) * 3, "128,256", "1,1"),
    ),
    "sixth": (
        *products(
            DENSE,
            ("896,2048,1024", "128,128", "1,1"),
            ("640,2048,2048", "128,64", "2,1"),
            ("1024,1536,2560", "128,256", "1,1"),
        ),
        *products(
            PERSISTENT,
            ("1280,2048,1536", "128,128", "2,1"),
            ("512,3072,1536", "128,128", "1,1"),
            ("1024,2560,2048", "128,256", "2,1"),
        ),
        grouped(("640,1024,1024", "1024,1536,1024"), "128,128", "1,1"),
        grouped(("256,1024,3072",) * 4, "128,256", "1,1"),
    ),
}
"""By set of `blind_calls.SETS`."""
NAMES = {f"CUTLASS's {case}": case for cases in CASES.values() for case in cases}


class CaptureError(RuntimeError):
    """A script of CUTLASS did not launch."""


def names_of(calls: str) -> list[str]:
    """Of a set; none where there is no checkout."""
    wanted = CASES.get(calls, ()) if env.CUTLASS.read() else ()
    return [name for name, case in NAMES.items() if case in wanted]


def captured(name: str) -> Capture:
    """The launch of a call. The script runs in a process of its own, since it changes modules.

    Raises:
        CaptureError: the script failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "launch.npz")
        command = [sys.executable, "-m", "nvfp4_cute.bench.cutlass_matmul", name, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CaptureError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
        return Capture.load(path)


def recorded(name: str, target: Target) -> LaunchTrace:
    """What the kernel does that takes time."""
    return recorded_capture(captured(name), target.num_sms)


def call(name: str) -> Callable[[], object]:
    """The same launch on the GPU of this machine, with tensors of its own."""
    from nvfp4_cute.bench.measure_launches import Launch

    return Launch(captured(name)).run


if __name__ == "__main__":
    NAMES[sys.argv[1]].capture(Path(env.CUTLASS.read())).save(Path(sys.argv[2]))
