"""sm_90a FP8 rows times MXFP4 weights in 4 bits: the weight-only kernel as a family of block-scaled products.

Configs, limits and the model of a launch are those of :mod:`.sm90_weight_only` for weights in MXFP4_FP8.
"""

from nvfp4_cute.formats.block_format import MXFP4_FP8, BlockFormat, Formats, FP8_1xK
from nvfp4_cute.planning.arch import fp8, sm90, sm90_weight_only
from nvfp4_cute.planning.arch.base import (
    Mma,
    allowed,
    foreign_option_reason,
    never_in_turns,
    no_estimates,
    no_work_reason,
    no_workspace_bytes,
)
from nvfp4_cute.planning.arch.sm90_weight_only import KERNEL, WeightOnlySmem, ctas_per_sm
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import Form, GroupedProblem

__all__ = ["KERNEL", "ctas_per_sm"]

ARCHS = ("sm_90a",)
OPTIONS = ("multicast_n",)
PAIR: Formats = (FP8_1xK, MXFP4_FP8)
MMA = {PAIR: Mma("e4m3", 32)}
OUT_M_MAJOR, HAS_CHAINS, HAS_EARLY_WEIGHTS, TO_AND_FRO = False, False, False, True
DEFAULT_CONFIG = sm90_weight_only.DEFAULT_CONFIG
CANDIDATES = sm90_weight_only.candidates(1, MXFP4_FP8)
DUAL_CANDIDATES = sm90_weight_only.candidates(2, MXFP4_FP8)
prefetches_in_turns, estimates = never_in_turns, no_estimates
work_reason, workspace_bytes = no_work_reason, no_workspace_bytes
interleave_reason, resident_clusters = sm90.interleave_reason, sm90.resident_clusters
quantized_reason = fp8.no_quantized_reason


def smem_plan(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> WeightOnlySmem:
    """Returns the shared memory of ``config``. ``num_ab_stage=None`` becomes the largest number of stages that fits."""
    return sm90_weight_only.smem_plan(config, num_b, formats[1])


def resolve(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> KernelConfig:
    """Returns ``config`` with an explicit stage count."""
    return sm90_weight_only.resolve(config, num_b, formats[1])


def unsupported_reason(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> str | None:
    """Returns why the kernel cannot be built with ``config``, with the nearest legal value; None if it can."""
    options = foreign_option_reason(config, OPTIONS)
    if options is not None:
        return options
    return sm90_weight_only.unsupported_reason(config, num_b, formats[1])


def candidates(
    num_b: int = 1,
    weight_layout: str = "separate",
    out_format: BlockFormat | None = None,
    form: Form = "list",
    formats: Formats = PAIR,
) -> tuple[KernelConfig, ...]:
    """Returns the candidates. Results are not quantized."""
    if out_format is not None:
        return ()
    return CANDIDATES if num_b == 1 else DUAL_CANDIDATES


def choose(problem: GroupedProblem, num_sms: int) -> KernelConfig:
    """Returns the candidate with the smallest modelled time. See :func:`.sm90_weight_only.choose`."""
    tried = allowed(
        candidates(problem.num_b, problem.weight_layout), problem, sm90.parts_of_k(problem, num_sms)
    )
    if not any(min(size) > 0 for size in problem.sizes):
        return tried[0]
    how = num_sms, problem.num_b, problem.form == "ragged", MXFP4_FP8
    return min(tried, key=lambda config: sm90_weight_only.estimate_us(problem.sizes, config, *how))
