"""sm_100a, sm_110a: the members of ``base.Family``. ``arch.sm103`` adds MMAs of 96 elements of K.

``limits``: cost of a config in shared and tensor memory, and reasons for refusals. ``choosing``: choice of a config.
"""

from nvfp4_cute.planning.arch.base import no_work_reason, no_workspace_bytes, one_cta_per_sm
from nvfp4_cute.planning.arch.sm100.choosing import candidates, choose, estimates
from nvfp4_cute.planning.arch.sm100.limits import (
    CANDIDATES,
    DEFAULT_CONFIG,
    DUAL_CANDIDATES,
    MMA,
    OPTIONS,
    interleave_reason,
    prefetches_in_turns,
    quantized_reason,
    resident_clusters,
    resolve,
    smem_plan,
    unsupported_reason,
)

ARCHS = ("sm_100a", "sm_110a")
KERNEL = "sm100.grouped_gemm.GroupedGemmSm100"
OUT_M_MAJOR, HAS_CHAINS, HAS_EARLY_WEIGHTS, TO_AND_FRO = True, True, True, False
work_reason, workspace_bytes, ctas_per_sm = no_work_reason, no_workspace_bytes, one_cta_per_sm
