"""Memory of kernels with 8-bit operands whose scales no MMA reads: shared memory of operands, tensor memory of accumulators."""

from dataclasses import replace
from typing import Any, TypeVar

from nvfp4_cute.planning.arch.base import Mma, operands_on_sides
from nvfp4_cute.planning.arch.sm100.limits import (
    EPI_TILE_N,
    EPI_WARPS,
    SMEM_CAPACITY_BYTES,
    UNIT_SUMS_BYTES,
    SmemPlan,
    TmemMap,
)
from nvfp4_cute.planning.config import KernelConfig

Plan = TypeVar("Plan", bound=SmemPlan)


def smem_plan(plan_type: type[Plan], config: KernelConfig, mma: Mma, num_b: int = 1, **more: Any) -> Plan:
    """Returns the shared memory of ``config``. ``num_ab_stage=None`` becomes the largest number of stages that fits.

    Args:
        plan_type: type of the result.
        more: fields of the result that SmemPlan lacks.
    """
    m, n, k = config.cta_tile_shape_mnk
    units = -(-EPI_WARPS * n // EPI_TILE_N // config.split_k)
    num_m, num_n = operands_on_sides(config, num_b)
    plan = plan_type(
        a_stage_bytes=m * mma.row_bytes(k),
        b_stage_bytes=n // config.num_mma_cta * mma.row_bytes(k),
        sfa_stage_bytes=0,
        sfb_stage_bytes=0,
        num_ab_stage=config.num_ab_stage or 0,
        num_m=num_m,
        num_n=num_n,
        exchange_bytes=units * (config.split_k - 1) * num_b * UNIT_SUMS_BYTES,
        **more,
    )
    if config.num_ab_stage is not None:
        return plan
    return replace(plan, num_ab_stage=(SMEM_CAPACITY_BYTES - plan.total_bytes) // plan.stage_bytes)


def tmem_map(config: KernelConfig, num_b: int = 1) -> TmemMap:
    """Returns the tensor memory of ``config``: accumulators next to each other, each with both products in a dual GEMM."""
    n, stages = num_b * config.cta_tile_shape_mnk[1], config.num_acc_stage
    return TmemMap(n, n, stages, sfa_col=n * stages, sfb_col=n * stages, used_cols=n * stages)
