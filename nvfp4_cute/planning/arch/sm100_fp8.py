"""sm_100a, sm_103a, sm_110a, FP8 with fp32 scales: cost of a KernelConfig, refusals, and choice.

Fields are those of :mod:`.sm100`, except ``num_acc_stage``: an accumulator has one K tile, which is one block of
scales, 128 values. Two warpgroups promote it to sums in registers, half of the columns each. A dual GEMM's accumulator
has both products, 64 columns each, so it has the sums of 128 columns of one product.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nvfp4_cute.formats.block_format import BlockFormat, Formats, FP8_1x128, FP8_128x128
from nvfp4_cute.planning.arch import fp8
from nvfp4_cute.planning.arch.base import (
    Mma,
    allowed,
    foreign_option_reason,
    no_estimates,
    no_work_reason,
    no_workspace_bytes,
    one_cta_per_sm,
    operands_on_sides,
)
from nvfp4_cute.planning.arch.sm100 import dense, limits
from nvfp4_cute.planning.arch.sm100.limits import (
    EPI_TILE_N,
    EPI_WARPS,
    MMA_COLUMNS_PER_CYCLE,
    MMA_CTA_M,
    MMAS_PER_K_TILE,
    SPLITS,
    STAGING_BYTES,
    SmemPlan,
    copy_cycles,
    launch_reason,
    tile_reason,
)
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem

ARCHS = limits.ARCHS
KERNEL = "sm100.fp8.grouped_gemm.Fp8GemmSm100"
OPTIONS = limits.OPTIONS
PAIR = fp8.PAIR
MMA = {PAIR: Mma("f8f6f4", 32, element_bits=8)}
# Fields of instruction descriptors (PTX ISA 9.7.16.4.2): fp32 accumulators, e4m3 on both sides.
MMA_TYPES = 1 << 4
OUT_M_MAJOR, HAS_CHAINS, HAS_EARLY_WEIGHTS, TO_AND_FRO = True, False, False, False
estimates, work_reason, workspace_bytes = no_estimates, no_work_reason, no_workspace_bytes
interleave_reason = fp8.no_dual_reason
ctas_per_sm, resident_clusters = one_cta_per_sm, limits.resident_clusters
tmem_map = dense.tmem_map
TILE_K = FP8_1x128.block_k
# Warpgroups that promote, half of the columns each.
PROMOTING_GROUPS = 2
PROMOTING_WARPS = PROMOTING_GROUPS * EPI_WARPS
# The sums of more columns, over all products, exceed the registers of a thread.
TILES_N = (64, 128)
MAX_COLUMNS = TILES_N[-1]
# Accumulators: four of 128 columns fill tensor memory; those of a dual GEMM are equally large.
ACC_STAGES = (2, 4)
# K tiles whose scales are in shared memory: enough to cover the latency of device memory.
SCALE_STAGES, SCALE_ALIGN_BYTES = 16, fp8.SCALE_ALIGN_BYTES
DEFAULT_CONFIG = KernelConfig((MMA_CTA_M, 128, TILE_K), num_acc_stage=ACC_STAGES[-1])


@dataclass(frozen=True)
class Costs:
    """Model of a launch, in SM cycles and bytes per cycle, for comparing configs.

    Source: read off modelled launches on a B200 (``modelled.modelled_times``).

    Attributes:
        start: time until the first data arrive.
        promotion, promotion_slice: waits per K tile, and time per 32 columns of both warpgroups' warps on an SM's
            quarter.
        swapped_slice: extra time for scales of columns.
        store_slice: time per 32 columns of results.
        exchange, exchange_bytes_per_cycle: split-K, see ``sm100.choosing.Costs``.
        memory, l2: bytes per cycle for all SMs.
        ring_cycles: time from a load from device memory to the next load of its stage.
    """

    start: float = 2500
    promotion: float = 540
    promotion_slice: float = 30
    swapped_slice: float = 35
    store_slice: float = 190
    exchange: float = 900
    exchange_bytes_per_cycle: float = 16
    memory: float = 3700
    l2: float = 14000
    ring_cycles: float = 3000


COSTS = Costs()


@dataclass(frozen=True)
class Fp8SmemPlan(SmemPlan):
    """Shared memory of one CTA with more warps that transpose results.

    Attributes:
        scale_stage_bytes: bytes of scales per K tile.
    """

    scale_stage_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all stages, of their scales, and of the reserved part."""
        staging, scales = PROMOTING_GROUPS * STAGING_BYTES, SCALE_STAGES * self.scale_stage_bytes
        return super().total_bytes - STAGING_BYTES + staging + scales


def scale_counts(config: KernelConfig) -> tuple[int, int]:
    """Returns the scales of a CTA's K tile: of its tokens, and of its blocks of 128 rows of one product's weights."""
    m, n, _ = config.cta_tile_shape_mnk
    tokens, weights = (n, m) if config.swap_ab else (m, n)
    return tokens, -(-weights // FP8_128x128.block_rows)


def scale_stage_bytes(config: KernelConfig, num_b: int = 1) -> int:
    """Returns the bytes of the fp32 scales of a K tile."""
    tokens, blocks = scale_counts(config)
    return fp8.aligned_scale_bytes((tokens + num_b * blocks) * FP8_128x128.scale.bits // 8)


def smem_plan(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> Fp8SmemPlan:
    """Returns the shared memory of ``config``. ``num_ab_stage=None`` becomes the largest number of stages that fits."""
    stage_bytes = scale_stage_bytes(config, num_b)
    return dense.smem_plan(Fp8SmemPlan, config, MMA[PAIR], num_b, scale_stage_bytes=stage_bytes)


def resolve(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> KernelConfig:
    """Returns ``config`` with an explicit stage count."""
    return replace(config, num_ab_stage=smem_plan(config, num_b, formats).num_ab_stage)


def unsupported_reason(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> str | None:
    """Returns why this kernel cannot be built with ``config``, with the nearest legal value; None if it can."""
    reason = foreign_option_reason(config, OPTIONS) or tile_reason(config, TILES_N, TILE_K)
    if reason is not None:
        return reason
    if num_b * config.cta_tile_shape_mnk[1] > MAX_COLUMNS:
        sums = num_b * config.cta_tile_shape_mnk[1] // PROMOTING_GROUPS
        return (
            f"cta_tile_shape_mnk={config.cta_tile_shape_mnk}: {num_b} products need {sums} sums per thread, whose registers hold "
            f"{MAX_COLUMNS // PROMOTING_GROUPS} with the promoted ones; use N tile {MAX_COLUMNS // num_b}"
        )
    if config.num_acc_stage not in ACC_STAGES:
        return (
            f"num_acc_stage={config.num_acc_stage}: tensor cores fill one of 2 or 4 accumulators while another one is promoted; "
            f"use num_acc_stage={ACC_STAGES[-1]}"
        )
    most_stages = smem_plan(replace(config, num_ab_stage=None), num_b).num_ab_stage
    return launch_reason(config, smem_plan(config, num_b), most_stages)


def quantized_reason(config: KernelConfig, format: BlockFormat) -> str | None:
    """Returns why results of a format cannot be computed with ``config``: a CTA's tile must have full blocks of 128 columns."""
    reason = fp8.other_format_reason(config, format)
    if reason is not None:
        return reason
    n = config.cta_tile_shape_mnk[1]
    if not config.swap_ab and n < format.block_k:
        return f"N tile {n} with {format.title} results: CTAs would share blocks of {format.block_k} columns; use swap_ab=True"
    if config.split_k > 1:
        return f"split_k={config.split_k} with {format.title} results: CTAs would share blocks of columns; use split_k=1"
    return None


def prefetches_in_turns(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> bool:
    """Whether clusters take turns in prefetching operands that several of them load."""
    return limits.fetches_ahead(config, smem_plan(config, num_b))


def _candidates() -> Iterator[KernelConfig]:
    for n in TILES_N:
        rows = KernelConfig((MMA_CTA_M, n, TILE_K), num_acc_stage=ACC_STAGES[-1])
        columns = replace(rows, swap_ab=True)
        for config in (rows, columns):
            yield config
            yield replace(config, use_2cta_instrs=True)
        # Few tiles of a long K: CTAs that would be idle compute a part of it. With more tokens, float32 results would
        # spill.
        if n == TILES_N[0]:
            yield from (replace(columns, split_k=split) for split in SPLITS[1:])


CANDIDATES = tuple(config for config in _candidates() if unsupported_reason(config) is None)
DUAL_CANDIDATES = tuple(config for config in CANDIDATES if unsupported_reason(config, 2) is None)
candidates = fp8.candidates_of_products(CANDIDATES, DUAL_CANDIDATES, quantized_reason)


def choose(problem: GroupedProblem, num_sms: int) -> KernelConfig:
    """Returns the candidate with the smallest modelled time.

    Args:
        problem: its sizes matter. Ragged groups have these rows only on average.
        num_sms: SMs of the device.
    """
    live = [size for size in problem.sizes if min(size) > 0]
    num_b = problem.num_b
    # Among equals, pairs win if tokens are rows and numerous, because they load less.
    return min(
        allowed(candidates(num_b, out_format=problem.out_format), problem),
        key=lambda c: (_modelled_cycles(live, c, num_sms, num_b), c.swap_ab == c.use_2cta_instrs),
    )


def _modelled_cycles(
    live: list[tuple[int, int, int]], config: KernelConfig, num_sms: int, num_b: int
) -> float:
    """Returns the cycles of a launch: waves of tiles, or the time in which memory or L2 delivers the data if that is longer."""
    tile_m, tile_n, _ = config.work_tile_mnk
    columns, split = config.cta_tile_shape_mnk[1], config.split_k
    tiles, busy, read, loaded, longest = 0, 0.0, 0, 0.0, 0.0
    for m, n, k in live:
        strips, count, k_tiles = -(-m // tile_m), -(-n // tile_n), -(-k // TILE_K)
        used = min(columns, -(-(m if config.swap_ab else n) // EPI_TILE_N) * EPI_TILE_N)
        tile = _tile_cycles(config, used, -(-k_tiles // split), num_b)
        tiles += strips * count
        busy += strips * count * tile
        longest = max(longest, tile)
        read += (m + num_b * n) * k
        num_m, num_n = operands_on_sides(config, num_b)
        loaded += strips * count * k * (num_m * MMA_CTA_M * config.num_m_cta + num_n * used)
    resident = resident_clusters(num_sms, config.cluster_size)
    waves = -(-tiles // resident) * busy / max(tiles, 1)
    stream = max(waves, longest, read / COSTS.memory, loaded / COSTS.l2)
    return COSTS.start + stream + _last_store(config, num_b)


def _tile_cycles(config: KernelConfig, columns: int, k_tiles: int, num_b: int) -> float:
    """Returns the cycles of ``k_tiles`` K tiles with ``columns``: the slowest role, or the data delivery to one CTA."""
    slices = num_b * -(-columns // EPI_TILE_N)
    mma = num_b * MMAS_PER_K_TILE * columns / MMA_COLUMNS_PER_CYCLE
    a_bytes, b_bytes = MMA_CTA_M * TILE_K, columns // config.num_mma_cta * TILE_K
    num_m, num_n = operands_on_sides(config, num_b)
    copies = num_m * copy_cycles(a_bytes) + num_n * copy_cycles(b_bytes) / config.multicast_n
    promotion = COSTS.promotion + (COSTS.promotion_slice + COSTS.swapped_slice * config.swap_ab) * slices
    ring = COSTS.ring_cycles / smem_plan(replace(config, num_ab_stage=None), num_b).num_ab_stage
    return k_tiles * max(mma, copies, promotion, ring)


def _last_store(config: KernelConfig, num_b: int) -> float:
    """Returns the cycles from the last K tile to the last store that other tiles do not overlap."""
    slices = config.cta_tile_shape_mnk[1] // (PROMOTING_GROUPS * EPI_TILE_N)
    if config.split_k == 1:
        return COSTS.store_slice * slices
    sent = num_b * MMA_CTA_M * config.cta_tile_shape_mnk[1] * 4 * (config.split_k - 1) / config.split_k
    return COSTS.exchange + sent / COSTS.exchange_bytes_per_cycle + COSTS.store_slice
