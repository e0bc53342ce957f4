"""sm_90a FP8 rows times MXFP4 weights in 4 bits: the weight-only kernel as a family of block-scaled products.

Configs, limits and the model of a launch are those of :mod:`.sm90_weight_only` for weights in MXFP4_FP8.
"""

import numpy as np

from nvfp4_cute.formats.block_format import MXFP4_FP8, BlockFormat, Formats, FP8_1xK
from nvfp4_cute.planning.arch import fp8, sm90, sm90_weight_only
from nvfp4_cute.planning.arch.base import (
    Mma,
    allowed,
    never_in_turns,
    no_estimates,
)
from nvfp4_cute.planning.arch.sm90_weight_only import KERNEL as KERNEL
from nvfp4_cute.planning.arch.sm90_weight_only import WeightOnlySmem
from nvfp4_cute.planning.arch.sm90_weight_only import ctas_per_sm as ctas_per_sm
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import INT32_MAX, Form, GroupedProblem

ARCHS = ("sm_90a",)
OPTIONS = ("multicast_n", "stream_k")
PAIR: Formats = (FP8_1xK, MXFP4_FP8)
MMA = {PAIR: Mma("e4m3", 32)}
OUT_M_MAJOR, HAS_CHAINS, HAS_EARLY_WEIGHTS, TO_AND_FRO = False, False, False, True
DEFAULT_CONFIG = sm90_weight_only.DEFAULT_CONFIG
CANDIDATES, DUAL_CANDIDATES = (
    sm90_weight_only.candidates(num_b, MXFP4_FP8) + sm90_weight_only.stream_candidates(num_b, MXFP4_FP8)
    for num_b in (1, 2)
)
prefetches_in_turns, estimates = never_in_turns, no_estimates
work_reason = sm90.work_reason
interleave_reason, resident_clusters = sm90.interleave_reason, sm90.resident_clusters
quantized_reason = fp8.no_quantized_reason


def workspace_bytes(config: KernelConfig, rows: np.ndarray, k: np.ndarray, num_cta: int) -> int:
    """Returns the bytes of stream-K's partial sums; 0 without stream-K. Its flags are in the counters."""
    return sm90_weight_only.workspace_bytes(config, num_cta)


def smem_plan(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> WeightOnlySmem:
    """Returns the shared memory of ``config``. ``num_ab_stage=None`` becomes the largest number of stages that fits."""
    return sm90_weight_only.smem_plan(config, num_b, formats[1])


def resolve(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> KernelConfig:
    """Returns ``config`` with an explicit stage count."""
    return sm90_weight_only.resolve(config, num_b, formats[1])


def unsupported_reason(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> str | None:
    """Returns why the kernel cannot be built with ``config``, with the nearest legal value; None if it can."""
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
    has_few = len(problem.sizes) <= sm90_weight_only.MOST_STREAM_GROUPS
    tried = tuple(
        c
        for c in tried
        if not c.stream_k or (has_few and sm90.stream_work(problem.sizes, c) <= INT32_MAX // 2)
    )
    how = num_sms, problem.num_b, problem.form == "ragged", MXFP4_FP8
    return min(tried, key=lambda config: sm90_weight_only.estimate_us(problem.sizes, config, *how))
