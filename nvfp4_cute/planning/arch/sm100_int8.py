"""sm_100a, sm_110a, INT8 with fp32 scales of rows: cost of a KernelConfig, refusals, and choice.

Fields are those of :mod:`.sm100`. The architecture sm_103a has no MMAs of integers (PTX ISA 9.7.16.10, kind i8).
"""

from collections.abc import Iterator
from dataclasses import replace

from nvfp4_cute.formats.block_format import INT8_PAIR, Formats
from nvfp4_cute.planning.arch import fp8
from nvfp4_cute.planning.arch.base import (
    Mma,
    foreign_option_reason,
    no_estimates,
    no_work_reason,
    no_workspace_bytes,
    one_cta_per_sm,
)
from nvfp4_cute.planning.arch.sm100 import dense, limits
from nvfp4_cute.planning.arch.sm100.choosing import COSTS
from nvfp4_cute.planning.arch.sm100.limits import (
    EPI_TILE_N,
    K_TILE_BYTES,
    MMA_COLUMNS_PER_CYCLE,
    MMA_CTA_M,
    MMAS_PER_K_TILE,
    RING_CYCLES,
    SPLITS,
    TILES_N,
    TMEM_COLS,
    SmemPlan,
    copy_cycles,
    launch_reason,
    tile_reason,
)
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem

ARCHS = ("sm_100a", "sm_110a")
KERNEL = "sm100.int8.grouped_gemm.Int8GemmSm100"
OPTIONS = limits.OPTIONS
PAIR = INT8_PAIR
MMA = {PAIR: Mma("i8", 32, element_bits=8)}
# Fields of instruction descriptors (PTX ISA 9.7.16.4.2): int32 accumulators, signed integers on both sides.
MMA_TYPES = 2 << 4 | 1 << 7 | 1 << 10
OUT_M_MAJOR, HAS_CHAINS, HAS_EARLY_WEIGHTS, TO_AND_FRO = True, False, False, False
estimates, work_reason, workspace_bytes = no_estimates, no_work_reason, no_workspace_bytes
interleave_reason, quantized_reason = fp8.no_dual_reason, fp8.no_quantized_reason
ctas_per_sm, resident_clusters = one_cta_per_sm, limits.resident_clusters
tmem_map = dense.tmem_map
TILE_K = MMA[PAIR].elements(K_TILE_BYTES)
DEFAULT_CONFIG = KernelConfig((MMA_CTA_M, 128, TILE_K), num_acc_stage=4)


def smem_plan(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> SmemPlan:
    """Returns the shared memory of ``config``. ``num_ab_stage=None`` becomes the largest number of stages that fits."""
    return dense.smem_plan(SmemPlan, config, MMA[PAIR])


def resolve(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> KernelConfig:
    """Returns ``config`` with an explicit stage count."""
    return replace(config, num_ab_stage=smem_plan(config, num_b, formats).num_ab_stage)


def unsupported_reason(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> str | None:
    """Returns why this kernel cannot be built with ``config``, with the nearest legal value; None if it can."""
    reason = foreign_option_reason(config, OPTIONS) or tile_reason(config, TILES_N, TILE_K)
    if reason is not None:
        return reason
    most = TMEM_COLS // config.cta_tile_shape_mnk[1]
    if not 1 <= config.num_acc_stage <= most:
        return (
            f"num_acc_stage={config.num_acc_stage}: {TMEM_COLS} columns of tensor memory hold 1 to {most} accumulators; "
            f"use num_acc_stage={most}"
        )
    return launch_reason(
        config, smem_plan(config), smem_plan(replace(config, num_ab_stage=None)).num_ab_stage
    )


def prefetches_in_turns(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> bool:
    """Whether clusters take turns in prefetching operands that several of them load."""
    return limits.fetches_ahead(config, smem_plan(config))


def _candidates() -> Iterator[KernelConfig]:
    for n in TILES_N:
        rows = KernelConfig((MMA_CTA_M, n, TILE_K), num_acc_stage=min(TMEM_COLS // n, 4))
        for config in (rows, replace(rows, swap_ab=True)):
            yield config
            yield replace(config, use_2cta_instrs=True)
    # Few tiles of a long K: CTAs that would be idle compute a part of it.
    narrow = KernelConfig((MMA_CTA_M, TILES_N[0], TILE_K), num_acc_stage=4, swap_ab=True)
    yield from (replace(narrow, split_k=split) for split in SPLITS[1:])


CANDIDATES = tuple(config for config in _candidates() if unsupported_reason(config) is None)
DUAL_CANDIDATES: tuple[KernelConfig, ...] = ()
candidates = fp8.candidates_of_products(CANDIDATES)


def choose(problem: GroupedProblem, num_sms: int) -> KernelConfig:
    """Returns the candidate with the smallest modelled time.

    Args:
        problem: its sizes matter. Ragged groups have these rows only on average.
        num_sms: SMs of the device.
    """
    live = [size for size in problem.sizes if min(size) > 0]
    # Batch-invariant problems may also split K: sums of int32 are exact in any order.
    return min(CANDIDATES, key=lambda c: (_modelled_cycles(live, c, num_sms), c.swap_ab == c.use_2cta_instrs))


def _modelled_cycles(live: list[tuple[int, int, int]], config: KernelConfig, num_sms: int) -> float:
    """Returns the cycles of a launch: waves of tiles, or data delivery if that is longer; constants of ``sm100.choosing``."""
    tile_m, tile_n, _ = config.work_tile_mnk
    columns, split = config.cta_tile_shape_mnk[1], config.split_k
    tiles, busy, read, loaded = 0, 0.0, 0, 0.0
    for m, n, k in live:
        strips, count, k_tiles = -(-m // tile_m), -(-n // tile_n), -(-k // TILE_K)
        used = min(columns, -(-(m if config.swap_ab else n) // EPI_TILE_N) * EPI_TILE_N)
        tiles += strips * count
        busy += strips * count * _tile_cycles(config, used, -(-k_tiles // split))
        read += (m + n) * k
        loaded += strips * count * k * (MMA_CTA_M * config.num_m_cta + used)
    waves = -(-tiles // resident_clusters(num_sms, config.cluster_size)) * busy / max(tiles, 1)
    stream = max(waves, read / COSTS.hbm_bytes_per_cycle, loaded / COSTS.l2_bytes_per_cycle)
    start = COSTS.start + COSTS.pair_start * config.use_2cta_instrs + COSTS.memory_latency
    return start + stream + _last_epilogue(config)


def _tile_cycles(config: KernelConfig, columns: int, k_tiles: int) -> float:
    """Returns the cycles of ``k_tiles`` K tiles with ``columns``: the slowest of the roles."""
    mma = MMAS_PER_K_TILE * columns / MMA_COLUMNS_PER_CYCLE
    a_bytes, b_bytes = MMA_CTA_M * TILE_K, columns // config.num_mma_cta * TILE_K
    copies = copy_cycles(a_bytes) + copy_cycles(b_bytes) / config.multicast_n
    ring = RING_CYCLES / smem_plan(replace(config, num_ab_stage=None)).num_ab_stage
    return max(k_tiles * max(mma, copies, ring), -(-columns // EPI_TILE_N) * COSTS.row_slice)


def _last_epilogue(config: KernelConfig) -> float:
    """Returns the cycles from the last MMA to the last store."""
    slices = config.cta_tile_shape_mnk[1] // EPI_TILE_N
    if config.split_k == 1:
        return COSTS.row_slice * slices
    sent = MMA_CTA_M * config.cta_tile_shape_mnk[1] * 4 * (config.split_k - 1) / config.split_k
    own = COSTS.row_slice * -(-slices // config.split_k)
    return COSTS.exchange + sent / COSTS.exchange_bytes_per_cycle + own
