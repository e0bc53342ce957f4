"""Fake tensors on the virtual GPU: code generators that trace with them (Helion) see the devices of a GPU build.

A fake CUDA tensor is a marked fake CPU tensor, like real tensors, because torch without CUDA cannot index others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from nvfp4_cute.emulator.fronts.torch_memory import DeviceMemory, is_gpu
from nvfp4_cute.emulator.fronts.virtual_gpu import replaced

CPU = torch.device("cpu")
DEVICES = ("device", "fake_device", "_fake_device")
"""Arguments of FakeTensor that name its device; the first is also its third positional argument."""


@contextmanager
def marked_fakes(memory: DeviceMemory, gpu: torch.device) -> Iterator[None]:
    """Context manager that marks fake CUDA tensors in `memory` and makes them report the device `gpu`."""
    make, attribute = FakeTensor.__new__, vars(FakeTensor)["device"]

    def new(cls: Any, *args: Any, **options: Any) -> Any:
        devices = (*args[2:3], *(options.get(name) for name in DEVICES))
        if not any(map(is_gpu, devices)):
            return make(cls, *args, **options)
        args = tuple(CPU if place == 2 else value for place, value in enumerate(args))
        options |= {name: CPU for name in DEVICES if options.get(name) is not None}
        return memory.mark_fake(make(cls, *args, **options))

    def device_of(fake: Any) -> torch.device:
        found = attribute.fget(fake)
        return gpu if found.type == "cpu" and memory.is_device(fake) else found

    with replaced(FakeTensor, __new__=new, device=property(device_of, attribute.fset)):
        yield
