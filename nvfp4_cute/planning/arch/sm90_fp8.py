"""sm_90a FP8 and INT8 with float32 scales: cost of a KernelConfig, refusals, and choice.

``cta_tile_shape_mnk`` is (weight rows, tokens, K) with ``swap_ab``, as in :mod:`.sm90`; a K tile is 128 values, one block of
FP8 scales. With ``multicast_n=2``, two CTAs with neighbouring weights share loads of tokens. With ``split_k``, the CTAs of a
cluster share a tile's K tiles.

Without ``swap_ab`` (FP8 with many tokens) it is (tokens, weight rows, K), and the CTAs of a pair have neighbouring tokens.

A tile of an FP8 dual GEMM has 128 rows of each weight operand, so it has the sums of 256 rows of one product.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from nvfp4_cute.formats.block_format import INT8_PAIR, BlockFormat, Formats
from nvfp4_cute.planning.arch import fp8, sm90
from nvfp4_cute.planning.arch.base import (
    Mma,
    allowed,
    never_in_turns,
    no_estimates,
    no_work_reason,
    no_workspace_bytes,
)
from nvfp4_cute.planning.arch.sm90 import (
    FP32_BYTES,
    PAIRED_TILE_TOKENS,
    TILE_K,
    TILE_WEIGHTS,
    parts_of_k,
)
from nvfp4_cute.planning.arch.sm90_ring import CTAS_OF_PAIR, RingSmem, filled, options_reason, ring_reason
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import Form, GroupedProblem

ARCHS = ("sm_90a",)
KERNEL = "sm90.fp8.grouped_gemm.Fp8GemmSm90"
OPTIONS = ("multicast_n",)
PAIR, promotes = fp8.PAIR, fp8.promotes
MMA = {PAIR: Mma("e4m3", 32, element_bits=8), INT8_PAIR: Mma("s8", 32, element_bits=8)}
OUT_M_MAJOR, HAS_CHAINS, HAS_EARLY_WEIGHTS, TO_AND_FRO = False, False, False, True
prefetches_in_turns, estimates = never_in_turns, no_estimates
work_reason, workspace_bytes = no_work_reason, no_workspace_bytes
interleave_reason, quantized_reason = fp8.no_dual_reason, fp8.other_format_reason
resident_clusters = sm90.resident_clusters
# Blocks of 128 rows of weights per tile, over all products -> largest number of tokens: sums of all blocks and products of one
# block are in registers.
MAX_TOKENS = {1: 192, 2: 128}
TOKEN_CHOICES = (8, 16, 32, 64, 96, 128, 160, 192)
# Split-K -> tokens of the largest tile whose partial sums fit the first CTA's shared memory.
SPLITS = {1: max(MAX_TOKENS.values()), 2: 128, 4: 64, 8: 16}
TOKEN_STEP = 8
# Tokens and weights of a tile with tokens on MMA-M: sums and two sets of products are in registers.
TOKEN_ROWS = 128
ROW_WEIGHTS = (128, 256)
# Largest number of tokens per group for the smaller of these tiles. With more, tokens exceed L2 and are read repeatedly.
MOST_ROWS = 2048
# Launches above this time use pairs of the larger tiles, which load less: on an H100, two launches of 1.1 and 1.9 ms take 7 %
# less, while launches of up to 0.5 ms would take up to 8 % longer.
LONG_US = 700
# Above this many tokens, integer wgmma takes steps of 16 instead of 8 (PTX ISA 9.7.15.2).
FINE_INTEGER_TOKENS = 32
DEFAULT_CONFIG = KernelConfig((TILE_WEIGHTS, 128, TILE_K), num_acc_stage=1, swap_ab=True)


@dataclass(frozen=True)
class Times:
    """Model of a launch in us.

    Source: fitted to 273 times of 17 FP8 products on an H100 80GB HBM3 in two runs (2026-11-25 and 2026-11-26,
    ``bench/notes``), with an error of 8.4 % (root mean square). The chosen candidate is 1.2 % slower than the fastest on
    average, 6.3 % at most. INT8 was not fitted. ``rows_k_tile`` and ``dual_ring``: fitted to 950 times of 30 products, 8 of
    them dual, in a third run of 2026-11-26; the chosen candidate there is 0.8 % slower than the fastest on average, 6.2 % at
    most.

    Attributes:
        k_tile, k_tile_per_token: K tile of 128 rows of weights, if bound by memory and latency.
        mmas, mmas_per_token: K tile if bound by tensor cores; the second per block of 128 rows.
        rows_k_tile: K tile with tokens on MMA-M, for one and for two blocks of 128 weights.
        dual_ring: time from a stage's load to its next load, in a dual GEMM with weights on MMA-M.
        shared: slowdown if two CTAs share an SM.
        split, split_per_token: reduction over CTAs, and per further CTA.
    """

    launch: float = 2.243
    cluster: float = 2.165
    tile: float = 1.115
    k_tile: float = 0.1694
    k_tile_per_token: float = 0.002097
    mmas: float = 0.03886
    mmas_per_token: float = 0.004145
    rows_k_tile: tuple[float, float] = (0.376, 0.85)
    dual_ring: float = 1.4
    shared: float = 1.351
    split: tuple[tuple[int, float], ...] = ((2, 0.3712), (4, 0.1019), (8, 7.24))
    split_per_token: float = 0.03192
    memory_bytes: float = 2.748e6
    l2_bytes: float = 18.86e6
    power: float = 3.745  # exponent of the soft maximum


TIMES = Times()


@dataclass(frozen=True)
class Fp8Smem(RingSmem):
    """Bytes of one stage per operand, and number of stages.

    Attributes:
        b_stage_bytes, a_stage_bytes: weights and tokens.
        scale_stage_bytes: float32 scales of the tokens and one per block of weights; 0 for INT8.
    """

    b_stage_bytes: int
    a_stage_bytes: int
    scale_stage_bytes: int

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage."""
        return self.b_stage_bytes + self.a_stage_bytes + self.scale_stage_bytes


def extents(config: KernelConfig) -> tuple[int, int]:
    """Returns the rows of weights and the tokens of a CTA's tile."""
    m, n, _ = config.cta_tile_shape_mnk
    return (m, n) if config.swap_ab else (n, m)


def blocks_of(config: KernelConfig, num_b: int = 1) -> int:
    """Returns the blocks of 128 rows of weights per CTA tile, over all operands."""
    return extents(config)[0] // TILE_WEIGHTS * num_b


def ctas_per_sm(config: KernelConfig) -> int:
    """Returns the CTAs per SM: two with few tokens, whose warps fill each other's stalls."""
    return 2 if blocks_of(config) == 1 and extents(config)[1] <= PAIRED_TILE_TOKENS else 1


def smem_plan(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> Fp8Smem:
    """Returns the shared memory of ``config``. ``num_ab_stage=None`` becomes the largest number of stages that fits."""
    weights, tokens = extents(config)
    k = config.cta_tile_shape_mnk[2]
    scales = (tokens + blocks_of(config, num_b)) * FP32_BYTES if fp8.promotes(formats) else 0
    plan = Fp8Smem(
        b_stage_bytes=formats[1].row_bytes(k) * weights * num_b,
        a_stage_bytes=formats[0].row_bytes(k) * tokens,
        scale_stage_bytes=fp8.aligned_scale_bytes(scales),
        num_ab_stage=config.num_ab_stage or 0,
        partial_bytes=(config.split_k - 1) * tokens * TILE_WEIGHTS * num_b * FP32_BYTES,
    )
    return filled(plan, ctas_per_sm(config)) if config.num_ab_stage is None else plan


def resolve(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> KernelConfig:
    """Returns ``config`` with an explicit stage count."""
    return replace(config, num_ab_stage=smem_plan(config, num_b, formats).num_ab_stage)


def unsupported_reason(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> str | None:
    """Returns why this kernel cannot be built with ``config``, with the nearest legal value; None if it can."""
    weights, tokens, k = shape = config.cta_tile_shape_mnk
    if not config.swap_ab and fp8.promotes(formats):
        return _rows_reason(config, num_b)
    options = options_reason(config, OPTIONS, "of FP8: weights are on MMA-M, and sums are in registers")
    if options is not None:
        return options
    most = MAX_TOKENS.get(blocks_of(config, num_b))
    if weights % TILE_WEIGHTS or most is None:
        return (
            f"cta_tile_shape_mnk={shape}: a tile has one or two blocks of 128 rows of weights, of all products; use M tile "
            f"{TILE_WEIGHTS}"
        )
    step = TOKEN_STEP * config.multicast_n
    if formats == INT8_PAIR and tokens > FINE_INTEGER_TOKENS:
        step = max(step, 2 * TOKEN_STEP)
    if not step <= tokens <= most or tokens % step:
        nearest = min(max(-(-tokens // step) * step, step), most)
        return (
            f"cta_tile_shape_mnk={shape}: tokens are on MMA-N, a multiple of {step} up to {most} with as many weights; "
            f"use N tile {nearest}"
        )
    if k != TILE_K:
        return f"cta_tile_shape_mnk={shape}: a stage has one block of scales along K; use K tile {TILE_K}"
    if config.split_k > 1 and weights > TILE_WEIGHTS:
        return f"split_k={config.split_k} with M tile {weights}: sums of one block are exchanged; use M tile {TILE_WEIGHTS}"
    plan = partial(smem_plan, num_b=num_b, formats=formats)
    return ring_reason(config, _splits(num_b), plan, ctas_per_sm(config))


def _splits(num_b: int) -> dict[int, int]:
    """Returns ``SPLITS`` for ``num_b`` products."""
    return {split: most // num_b if split > 1 else most for split, most in SPLITS.items()}


def _rows_reason(config: KernelConfig, num_b: int) -> str | None:
    """Returns why FP8 with tokens on MMA-M cannot be built; None if it can."""
    tokens, weights, k = shape = config.cta_tile_shape_mnk
    options = options_reason(replace(config, swap_ab=True), OPTIONS, "of FP8: sums are in registers")
    if options is not None:
        return options
    allowed = [extent for extent in ROW_WEIGHTS if num_b * extent <= ROW_WEIGHTS[-1]]
    if tokens != TOKEN_ROWS or weights not in allowed:
        nearest = min(allowed, key=lambda extent: abs(extent - weights))
        return (
            f"cta_tile_shape_mnk={shape} with swap_ab=False: two warpgroups have {TOKEN_ROWS} tokens on MMA-M, and 128 or 256 "
            f"weights of all products together; use M tile {TOKEN_ROWS}, N tile {nearest}"
        )
    if k != TILE_K:
        return f"cta_tile_shape_mnk={shape}: a stage has one block of scales along K; use K tile {TILE_K}"
    return ring_reason(config, {1: max(ROW_WEIGHTS)}, partial(smem_plan, num_b=num_b), 1)


def _candidates() -> Iterator[KernelConfig]:
    for blocks in MAX_TOKENS:
        for tokens in TOKEN_CHOICES:
            for multicast, split in ((1, 1), (CTAS_OF_PAIR, 1), (1, 2), (1, 4), (1, 8)):
                shape = (blocks * TILE_WEIGHTS, tokens, TILE_K)
                config = replace(
                    DEFAULT_CONFIG, cta_tile_shape_mnk=shape, multicast_n=multicast, split_k=split
                )
                # Tiles of few tokens are bound by memory and do not gain from more weights.
                if (blocks == 1 or tokens >= 64) and unsupported_reason(config) is None:
                    yield config
    for weights in ROW_WEIGHTS:
        for multicast in (1, CTAS_OF_PAIR):
            shape = (TOKEN_ROWS, weights, TILE_K)
            yield replace(DEFAULT_CONFIG, cta_tile_shape_mnk=shape, swap_ab=False, multicast_n=multicast)


CANDIDATES = tuple(_candidates())
DUAL_CANDIDATES = tuple(config for config in CANDIDATES if unsupported_reason(config, 2) is None)
_candidates_of_pair = fp8.candidates_of_products(CANDIDATES, DUAL_CANDIDATES, quantized_reason)


def candidates(
    num_b: int = 1,
    weight_layout: str = "separate",
    out_format: BlockFormat | None = None,
    form: Form = "list",
    formats: Formats = PAIR,
) -> tuple[KernelConfig, ...]:
    """Returns the candidates for these operands. INT8 has no dual kernels and no quantized results."""
    if (num_b > 1 or out_format is not None) and not fp8.promotes(formats):
        return ()
    found = _candidates_of_pair(num_b, weight_layout, out_format, form, formats)
    return tuple(config for config in found if unsupported_reason(config, num_b, formats) is None)


def choose(problem: GroupedProblem, num_sms: int) -> KernelConfig:
    """Returns the candidate with the smallest modelled time.

    Args:
        problem: its sizes matter. Ragged groups have these rows on average.
        num_sms: SMs of the device.
    """
    live, formats = [size for size in problem.sizes if min(size) > 0], (problem.a_format, problem.b_format)
    # Ragged groups may have twice the mean. No tile needs to be wider than the smallest that holds all tokens of a group.
    largest = max((m for m, _, _ in live), default=0)
    most = largest * (2 if problem.form == "ragged" else 1)
    widest = next((tokens for tokens in TOKEN_CHOICES if tokens >= most), TOKEN_CHOICES[-1])
    fitting = [
        config
        for config in allowed(
            candidates(problem.num_b, out_format=problem.out_format, formats=formats),
            problem,
            parts_of_k(problem, num_sms),
        )
        if config.work_tile_mnk[0] <= widest
        and (config.swap_ab or blocks_of(config, problem.num_b) == 2 or largest <= MOST_ROWS)
    ]
    times = {config: _modelled_us(live, config, num_sms, problem.num_b) for config in fitting}
    chosen = min(fitting, key=times.__getitem__)
    if not chosen.swap_ab and blocks_of(chosen, problem.num_b) == 2 and times[chosen] > LONG_US:
        return replace(chosen, multicast_n=CTAS_OF_PAIR)
    return chosen


def _modelled_us(
    live: list[tuple[int, int, int]], config: KernelConfig, num_sms: int, num_b: int = 1
) -> float:
    """Returns the time of a launch: a soft maximum of waves of tiles, memory time and L2 time."""
    tile_tokens, tile_weights, _ = config.work_tile_mnk
    blocks, split, times = blocks_of(config, num_b), config.split_k, TIMES
    per_k = max(
        times.k_tile + times.k_tile_per_token * tile_tokens,
        times.mmas + blocks * times.mmas_per_token * tile_tokens,
    )
    if not config.swap_ab:
        per_k = times.rows_k_tile[blocks - 1]
    elif num_b > 1:
        per_k = max(per_k, times.dual_ring / smem_plan(config, num_b).num_ab_stage)
    busy = read = moved = tiles = 0.0
    for m, n, k in live:
        strips, columns, k_tiles = -(-m // tile_tokens), -(-n // tile_weights), -(-k // TILE_K)
        tiles += strips * columns
        busy += strips * columns * (times.tile + -(-k_tiles // split) * per_k)
        read += m * k + num_b * n * k
        shared = (1, config.multicast_n) if config.swap_ab else (config.multicast_n, 1)
        moved += strips * num_b * n * k / shared[0] + columns * m * k / shared[1]
    waves = _waves(config, tiles, num_sms) * busy / max(tiles, 1)
    waves += dict(times.split).get(split, 0.0) + times.split_per_token * num_b * tile_tokens * (split - 1)
    parts = (waves, read / times.memory_bytes, moved / times.l2_bytes)
    longest = sum(part**times.power for part in parts) ** (1 / times.power)
    return times.launch + times.cluster * (config.cluster_size > 1) + longest


def _waves(config: KernelConfig, tiles: float, num_sms: int) -> float:
    """Returns the time of all tiles in units of one tile that is alone on its SMs."""
    alone = resident_clusters(num_sms, config.cluster_size)
    if tiles <= alone or ctas_per_sm(config) == 1:
        return math.ceil(tiles / alone)
    return math.ceil(tiles / (2 * alone)) * TIMES.shared
