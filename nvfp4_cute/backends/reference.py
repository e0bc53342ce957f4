"""The float64 reference as a backend: right everywhere, fast nowhere."""

from nvfp4_cute.config import KernelConfig
from nvfp4_cute.problem import GroupedOperands, GroupedProblem
from nvfp4_cute.reference import grouped_dual_gemm_reference, grouped_gemm_reference
from nvfp4_cute.task import Task


def run(problem: GroupedProblem, operands: GroupedOperands, config: KernelConfig | None) -> None:
    """Compute every group in float64 and write it to ``operands.out``. ``config`` has no meaning here."""
    second = operands.second
    if problem.activation is not None and second is not None:
        results = grouped_dual_gemm_reference(
            operands.a,
            operands.b,
            second.b,
            operands.a_scale,
            operands.b_scale,
            second.b_scale,
            operands.alpha,
            second.alpha,
            activation=problem.activation,
            out_dtype=problem.out_dtype,
        )
    else:
        results = grouped_gemm_reference(
            operands.a,
            operands.b,
            operands.a_scale,
            operands.b_scale,
            operands.alpha,
            out_dtype=problem.out_dtype,
        )
    for out, result in zip(operands.out, results, strict=True):
        out.copy_(result)


def run_task(task: Task) -> None:
    """Have the task compute itself."""
    task.reference()
