"""The GPU in the machine."""

import torch

from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.compiler import CompiledKernel, table_pointer
from nvfp4_cute.errors import UnsupportedTarget
from nvfp4_cute.gpus.targets import arch_of_capability, gpu_of
from nvfp4_cute.launch import tuned
from nvfp4_cute.launch.plan import Plan, make_plan
from nvfp4_cute.launch.task import Task
from nvfp4_cute.launch.workspace import attach
from nvfp4_cute.operands import tensor_map_fault
from nvfp4_cute.planning.arch import ARCHS
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedOperands, GroupedProblem


def arch_of_device(device: torch.device) -> str:
    """Architecture name of a CUDA device. Raises UnsupportedTarget where no kernel exists for it."""
    arch = arch_of_capability(torch.cuda.get_device_capability(device))
    if arch not in ARCHS:
        raise UnsupportedTarget(
            f"{torch.cuda.get_device_name(device)} is {arch}; kernels exist for {', '.join(ARCHS)}. "
            'Pass backend="reference", or CPU tensors with backend="emulator" to run the sm_100a kernel'
        )
    return arch


def run(problem: GroupedProblem, operands: GroupedOperands, config: KernelConfig | None) -> None:
    """Launch on the current queue of the operands' device; does not wait.

    Raises:
        ValueError: CPU operands. UnsupportedTarget: a GPU without a kernel. UnsupportedProblem: ``tensor_map_fault``.
    """
    device = _check_device(operands.device)
    tensor_map_fault.check(dict(operands.mapped()), device)
    plan = plan_for(problem, device, config)
    with torch.cuda.device(device):
        plan.launch(operands, torch.cuda.current_stream(device).cuda_stream)


def plan_for(problem: GroupedProblem, device: torch.device, config: KernelConfig | None) -> Plan:
    """The plan of a problem on a CUDA device; without a config, with what tuning found.

    Raises UnsupportedTarget where no kernel exists for the device.
    """
    gpu = gpu_of(device)
    return make_plan(problem, arch_of_device(device), gpu.num_sms, config or tuned.find(problem, gpu))


def run_task(task: Task) -> None:
    """Launch on the current queue of the task's device; does not wait.

    Raises:
        ValueError: CPU operands. UnsupportedTarget: a GPU without a kernel. UnsupportedProblem: ``tensor_map_fault``.
    """
    import cuda.bindings.driver as cuda

    device = _check_device(task.device)
    tensor_map_fault.check(dict(task.mapped()), device)
    kernel = kernel_for(task)
    table = task.table()
    with torch.cuda.device(device):
        queue = torch.cuda.current_stream(device).cuda_stream
        _held = attach(kernel, table, device, queue)
        kernel.function(table_pointer(table.ctypes.data), cuda.CUstream(queue))


def kernel_for(task: Task) -> CompiledKernel:
    """The kernel of a task on its CUDA device. Raises UnsupportedTarget where none exists for it."""
    return get_kernel(task.key(arch_of_capability(torch.cuda.get_device_capability(task.device))))


def _check_device(device: torch.device) -> torch.device:
    if device.type != "cuda":
        raise ValueError(
            f'backend="cuda" takes CUDA tensors; operands are on {device}: move them with .cuda()'
        )
    return device
