"""The modelled time of a grouped GEMM on a GPU that need not be there: the kernel's launch, recorded and replayed."""

from nvfp4_cute.backends import emulator
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.emulator.timing import Timing
from nvfp4_cute.problem import GroupedOperands, GroupedProblem
from nvfp4_cute.targets import B200, Target


def modelled_time(
    problem: GroupedProblem,
    operands: GroupedOperands,
    config: KernelConfig | None = None,
    target: Target = B200,
) -> Timing:
    """Model the time of the kernel that :func:`~nvfp4_cute.ops.grouped_gemm` launches.

    Args:
        problem, operands: as the operation checked them; on the CPU. The result is not computed: ``out`` holds zeros
            and rubbish afterwards.
        config: how; None takes the default.
        target: the GPU.

    Raises:
        ValueError: CUDA operands. EmulatorError: the kernel broke a rule of the machine.
    """
    with emulator.observe(timing=True) as observer:
        emulator.run(problem, operands, config, target)
    return observer.timings[-1]
