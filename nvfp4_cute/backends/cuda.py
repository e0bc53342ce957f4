"""The backend that runs on this machine's GPU."""

import torch

from nvfp4_cute.gpus import targets
from nvfp4_cute.launch.task import Launch, Task
from nvfp4_cute.operands import tensor_map_fault

gpu_of = targets.gpu_at


def planned(task: Task) -> Launch:
    """Plans and compiles a launch on the task's device. Raises what :func:`run` raises."""
    device = task.device
    if device.type != "cuda":
        raise ValueError(
            f'backend="cuda" takes CUDA tensors; operands are on {device}: move them with .cuda()'
        )
    tensor_map_fault.check(dict(task.mapped()), device)
    return task.launch(gpu_of(device))


def run(task: Task) -> Launch:
    """Launches on the current stream of the task's device, without waiting.

    Raises:
        ValueError: CPU operands.
        UnsupportedTarget: a GPU without a kernel.
        UnsupportedProblem: see ``tensor_map_fault``.
    """
    device, launch = task.device, planned(task)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        _held = launch.attach(device, stream)
        launch.enqueue(stream)
    return launch
