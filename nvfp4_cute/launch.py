"""Plan: a grouped GEMM ready to launch. It holds the compiled kernel and the schedule, never data."""

from dataclasses import dataclass
from typing import Any

import torch

from nvfp4_cute.arch import sm100
from nvfp4_cute.cache import get_kernel
from nvfp4_cute.compile import CompiledKernel, KernelKey, cutlass_dtype
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.problem import GroupedOperands, GroupedProblem
from nvfp4_cute.schedule import TileSchedule, make_schedule


@dataclass(frozen=True)
class Plan:
    """How one problem is launched: reusable for any operands of the same sizes.

    Attributes:
        problem: sizes and types.
        schedule: tiles of all groups; its slot order is the order of every list in the launch.
        kernel: the compiled code, shared by all problems with as many groups.
    """

    problem: GroupedProblem
    schedule: TileSchedule
    kernel: CompiledKernel

    def launch(self, operands: GroupedOperands, queue: int = 0) -> None:
        """Enqueue the kernel. Copies nothing, allocates nothing, waits for nothing; a problem without tiles is a no-op.

        Args:
            operands: checked operands of this plan's problem.
            queue: handle of the CUDA queue (``torch.cuda.current_stream().cuda_stream``).
        """
        if self.schedule.num_tiles:
            self.kernel.function(*self._arguments(operands, queue))

    def _arguments(self, operands: GroupedOperands, queue: int) -> tuple[Any, ...]:
        """Arguments of ``GroupedGemmSm100.__call__``, its lists in slot order."""
        import cuda.bindings.driver as cuda
        import cutlass
        import cutlass.cute as cute
        from cutlass import Int32, Int64

        def pointer(dtype, tensor: torch.Tensor, align: int):
            return cute.runtime.make_ptr(
                dtype, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=align
            )

        fp4, e4m3, out_dtype = (
            cutlass.Float4E2M1FN,
            cutlass.Float8E4M3FN,
            cutlass_dtype(self.problem.out_dtype),
        )
        pointers, sizes, pitches = [], [], []
        for group in self.schedule.order:
            a, b, out = operands.a[group], operands.b[group], operands.out[group]
            pointers.append(
                (
                    pointer(fp4, a, 16),
                    pointer(fp4, b, 16),
                    pointer(e4m3, operands.a_scale[group], 16),
                    pointer(e4m3, operands.b_scale[group], 16),
                    pointer(out_dtype, out, out.element_size()),
                )
            )
            # A group without rows has no tile; an extent of 1 keeps its unused tensor map well formed.
            sizes.append(tuple(Int32(max(extent, 1)) for extent in self.problem.sizes[group]))
            pitches.append((Int64(2 * a.stride(0)), Int64(2 * b.stride(0)), Int64(out.stride(0))))
        return (
            pointers,
            sizes,
            pitches,
            [Int32(offset) for offset in self.schedule.tile_offsets[:-1]],
            [Int32(group) for group in self.schedule.order],
            None if operands.alpha is None else pointer(cutlass.Float32, operands.alpha, 4),
            Int32(self.schedule.num_tiles),
            Int32(self.schedule.num_cta),
            cuda.CUstream(queue),
        )


def make_plan(
    problem: GroupedProblem,
    arch: str,
    sm_count: int,
    config: KernelConfig | None = None,
    *,
    for_emulator: bool = False,
) -> Plan:
    """Choose, compile (or find) and schedule.

    Args:
        problem: list-form problem.
        arch: target such as ``sm_100a``.
        sm_count: SMs of the device: the number of persistent CTAs unless ``config`` says otherwise.
        config: tile shape and pipeline depths; None takes the default.
        for_emulator: whether the launch goes to the emulator.

    Raises:
        UnsupportedTarget: no kernel for ``arch``. ConfigError: ``config`` cannot be built.
        UnsupportedProblem: more groups than kernel parameters hold.
    """
    if problem.num_groups > sm100.MAX_LIST_GROUPS:
        raise UnsupportedProblem(
            f"{problem.num_groups} groups: the list form passes {sm100.PARAM_BYTES_PER_GROUP} bytes a group as kernel "
            f"parameters, {sm100.KERNEL_PARAM_BYTES} bytes hold {sm100.MAX_LIST_GROUPS} groups; split the lists into "
            f"calls of at most {sm100.MAX_LIST_GROUPS}"
        )
    config = config or KernelConfig()
    key = KernelKey.make(arch, config, problem.num_groups, problem.out_dtype, problem.has_alpha)
    schedule = make_schedule(problem.sizes, config.cta_tile_shape_mnk, config.num_cta or sm_count)
    return Plan(problem, schedule, get_kernel(key, for_emulator=for_emulator))
