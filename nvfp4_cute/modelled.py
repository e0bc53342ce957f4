"""Modelled times of kernels on a GPU that need not be there: their launches, recorded on the emulator and replayed."""

from collections.abc import Callable

from nvfp4_cute.backends import emulator
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.emulator.timing import Timing
from nvfp4_cute.problem import GroupedOperands, GroupedProblem
from nvfp4_cute.targets import B200, Target


def modelled_times(
    call: Callable[[str], object],
    target: Target = B200,
    *,
    progress: Callable[[int, int], None] | None = None,
    timeline: bool = False,
) -> list[Timing]:
    """Model the times of the launches that a call of public operations makes. Their results are not computed.

    Args:
        call: gets the name of a backend to pass on, and uses CPU tensors.
        target: the GPU.
        progress: called with (CTAs finished, CTAs launched) as a launch is recorded.
        timeline: keep what every warp did when, for ``emulator.trace``.

    Raises:
        EmulatorError: the kernel broke a rule of the machine. UnsupportedTarget: there is no kernel for the GPU.
    """
    with emulator.observe(progress, timing=True, timeline=timeline) as observer:
        call(f"emulator:{target.name}")
    return observer.timings


def modelled_time(
    problem: GroupedProblem,
    operands: GroupedOperands,
    config: KernelConfig | None = None,
    target: Target = B200,
) -> Timing:
    """Model the time of a grouped GEMM with a configuration of one's own.

    Args:
        problem, operands: as the operation checked them; on the CPU. The result is not computed: ``out`` holds zeros
            and rubbish afterwards.
        config: how; None takes the default.
        target: the GPU.

    Raises:
        ValueError: CUDA operands. EmulatorError: the kernel broke a rule of the machine.
    """
    return modelled_times(lambda _: emulator.run(problem, operands, config, target), target)[-1]
