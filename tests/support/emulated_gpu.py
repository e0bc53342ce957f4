"""Runs the code path of CUDA tensors with CPU tensors: calls are prepared, and repeated launches run on an emulated GPU."""

import contextlib

import torch

from nvfp4_cute import backends
from nvfp4_cute.backends.emulator import on_emulator
from nvfp4_cute.gpus import targets
from nvfp4_cute.launch import prepared


@contextlib.contextmanager
def emulated_gpu(monkeypatch, target=targets.B200):
    """Emulates ``target``. No call is prepared yet; the reference computes the first call of each kind."""
    from nvfp4_cute.backends import cuda

    monkeypatch.setattr(prepared._local, "calls", {})
    monkeypatch.setattr(prepared._local, "recent", {})
    torch.manual_seed(11)  # the same operands in every run
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(backends, "resolve", lambda name, device: "cuda")
    for name in ("gpu_of", "gpu_of_kernels"):
        monkeypatch.setattr(backends, name, lambda name, device: target.gpu)
    with on_emulator(target=target) as emulator:

        def planned(task):
            launch = task.launch(target.gpu, for_emulator=True)
            emulator.register(launch.kernel.ptx)
            return launch

        def run(task):
            task.reference()
            return planned(task)

        monkeypatch.setattr(cuda, "run", run)
        monkeypatch.setattr(cuda, "planned", planned)
        yield emulator
