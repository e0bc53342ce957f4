"""The float64 reference as a backend: right everywhere, fast nowhere."""

import torch

from nvfp4_cute.formats import block_scaled
from nvfp4_cute.launch.task import Task
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import NVFP4, GroupedOperands, GroupedProblem
from nvfp4_cute.reference import grouped_dual_gemm_reference, grouped_gemm_reference


def run(problem: GroupedProblem, operands: GroupedOperands, config: KernelConfig | None) -> None:
    """Compute every group in float64 and write it to ``operands.out``. ``config`` has no meaning here.

    NVFP4 is quantized from float32 results.
    """
    second = operands.second
    out_dtype = torch.float32 if problem.out_dtype == NVFP4 else problem.out_dtype
    if problem.activation is not None and second is not None:
        results = grouped_dual_gemm_reference(
            operands.a,
            operands.b,
            second.b or None,
            operands.a_scale,
            operands.b_scale,
            second.b_scale or None,
            operands.alpha,
            second.alpha,
            activation=problem.activation,
            limit=problem.limit,
            weight_layout=problem.weight_layout,
            out_dtype=out_dtype,
        )
    else:
        results = grouped_gemm_reference(
            operands.a,
            operands.b,
            operands.a_scale,
            operands.b_scale,
            operands.alpha,
            out_dtype=out_dtype,
        )
    for group, (out, result) in enumerate(zip(operands.out, results, strict=True)):
        if operands.out_scales is None:
            out.copy_(result)
        else:
            factors = operands.out_scales.global_scale
            quantized = block_scaled.quantize(
                result, global_scale=None if factors is None else factors[group]
            )
            out.copy_(quantized.data)
            operands.out_scales.scale[group].copy_(quantized.scale.view(torch.uint8).view(-1))


def run_task(task: Task) -> None:
    """Have the task compute itself."""
    task.reference()
