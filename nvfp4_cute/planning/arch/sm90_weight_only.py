"""sm_90a, weight-only: what a KernelConfig of 16-bit activations times quantized weights costs, and why one is refused.

``cta_tile_shape_mnk`` is (weight rows, tokens, K) with ``swap_ab``, as of :mod:`.sm90`; here its K is what a pipeline stage
holds, 128 or 256 values. ``multicast_n=2``: two CTAs with neighbouring weights share what they load of the tokens.
``split_k``: the CTAs of a cluster share a tile's K tiles.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import NormalDist

from nvfp4_cute.formats.block_format import INT4_FORMATS, INT8, MXFP4, MXFP8, NVFP4, BlockFormat, FP8_128x128
from nvfp4_cute.planning.arch.base import clusters_in_gpcs
from nvfp4_cute.planning.arch.sm90 import (
    FP16_BYTES,
    FP32_BYTES,
    GPC_SMS,
    MAX_TILE_TOKENS,
    MEASURED_CLUSTERS,
    PAIRED_TILE_TOKENS,
    SF_BLOCK_ROWS,
    TILE_K,
    TILE_WEIGHTS,
    TOKEN_BOXES,
    TOKEN_STEP,
)
from nvfp4_cute.planning.arch.sm90_ring import CTAS_OF_PAIR, RingSmem, filled, options_reason, ring_reason
from nvfp4_cute.planning.config import KernelConfig

ARCHS = ("sm_90a",)
PAIRS = tuple(
    (None, b_format) for b_format in (NVFP4, MXFP4, *MXFP8, FP8_128x128, INT8, *INT4_FORMATS.values())
)
KERNEL = "sm90.weight_only.grouped_gemm.WeightOnlyGemmSm90"
OPTIONS = ("multicast_n",)
TILES_K = (TILE_K, 2 * TILE_K)
# Tokens of the tiles that are tried where the caller chooses no config.
TOKEN_CHOICES = (8, 16, 32, 64, 96, 128, 192, 256)
# Tokens of the largest tile whose sums and those of a K tile a lane has registers for.
MAX_PROMOTED_TOKENS = 128
# CTAs that may share K tiles, and tokens of the largest tile of which the others' sums fit the first one's shared memory.
SPLITS = {1: MAX_TILE_TOKENS, 2: 128, 4: 64, 8: 16}
DEFAULT_CONFIG = KernelConfig((TILE_WEIGHTS, 64, TILE_K), num_acc_stage=1, swap_ab=True)
# Clusters that run at once, by number of SMs and their size, as an H100's times fit: from four CTAs on each has an SM of its own.
MODELLED_CLUSTERS = {132: {4: 30, 8: 14}}
SM_PER_CTA_FROM = 4
# Means of a Poisson distribution up to which its quantiles are added up.
MOST_EXACT_MEAN = 300
# Shares of tiles beyond the mean routing's: the time of a ragged launch is averaged, since another routing may have a wave more.
ROUTINGS = (-0.05, 0.0, 0.05)


@dataclass(frozen=True)
class Times:
    """Model of a launch in us: whole waves of equal tiles, or what the memory and L2 deliver, with a soft maximum of the three.

    Source: measured on an H100 80GB HBM3, 700 W, driver 580.159, 2026-11-25, bf16, a cold L2; fitted to 1170 times of 60 products
    (``tests/data/w4a16_h100.json``), which the model meets to 5.4 % on the average.
    """

    launch: float = 8.102
    cluster: float = 2.239  # to launch clusters
    tile: float = 0.2258
    pair_tile: float = 0.2121  # of two CTAs that share tokens
    # A K tile of 128 values in tiles of up to 32 tokens, where a stage holds 128 or 256 values.
    k_tile: tuple[tuple[int, float, float], ...] = (
        (8, 0.4904, 0.4377),
        (16, 0.4673, 0.4288),
        (32, 0.4926, 0.5074),
    )
    # The same of larger ones, by tokens that are multiplied and tokens that have room.
    large_k_tile: float = 0.3838
    k_tile_per_token: float = 0.002076
    k_tile_per_tile_token: float = 0.001409
    largest_k_tile: float = 0.1728  # besides, where tiles have room for all 256
    pair_k_tile: float = 0.0327  # a share more where two CTAs share tokens
    shared_sm: float = 1.972  # times longer where two CTAs share an SM
    shared_sm_of_32: float = 1.838
    split: tuple[tuple[int, float], ...] = ((2, 0.2296), (4, 0), (8, 0.3685))
    split_per_token: float = 0.005825  # of each CTA that sends its sums
    memory_bytes: float = 2.824e6
    l2_bytes: float = 6.226e6
    power: float = 4.021  # of the soft maximum


@dataclass(frozen=True)
class FewRowsTimes:
    """Model of the other kernel for 16-bit activations (``kernels/simt/w4a16.py``): passes over the weights, each for some rows.

    Source: as of :class:`Times`, 12 times of four matrices at 16, 32 and 64 rows, from which it differs by 4 % on the average.
    """

    launch: float = 7.5
    half_pass_bytes: float = 1.85e6  # of weights, in a us, where a pass has up to 16 rows
    pass_bytes: float = 1.23e6
    pass_rows: int = 32
    least_rows: int = 16  # that were measured


TIMES, FEW_ROWS_TIMES = Times(), FewRowsTimes()


@dataclass(frozen=True)
class WeightOnlySmem(RingSmem):
    """Bytes of one stage, by operand, and the number of stages.

    Attributes:
        b_stage_bytes, sfb_stage_bytes: of each operand with weights, and of its scales.
        a_stage_bytes: tokens of 16 bits.
        num_b: operands with weights.
    """

    b_stage_bytes: int
    sfb_stage_bytes: int
    a_stage_bytes: int
    num_b: int

    @property
    def weight_bytes(self) -> int:
        """Of a stage: what the warp that loads weights brings in."""
        return self.num_b * (self.b_stage_bytes + self.sfb_stage_bytes)

    @property
    def stage_bytes(self) -> int:
        """Of one stage."""
        return self.weight_bytes + self.a_stage_bytes


def has_scales_of_sums(b_format: BlockFormat) -> bool:
    """Whether scales of weights multiply sums: fp32 ones in rows, which no copy brings to shared memory."""
    return b_format.scale_layout == "rowmajor"


def promotes(b_format: BlockFormat) -> bool:
    """Whether those are of 128 x 128 values: sums of a K tile are multiplied, and added to fp32 ones."""
    return has_scales_of_sums(b_format) and b_format.block_k == TILE_K


def ctas_per_sm(config: KernelConfig) -> int:
    """CTAs that share an SM: those of few tokens, whose warps fill each other's waits."""
    return 2 if config.work_tile_mnk[0] <= PAIRED_TILE_TOKENS else 1


def token_box(config: KernelConfig) -> int:
    """Tokens of one copy: whole swizzle atoms. The CTAs of a pair take turns."""
    return max(rows for rows in TOKEN_BOXES if config.work_tile_mnk[0] % (config.multicast_n * rows) == 0)


def leaves_tokens_out(config: KernelConfig) -> bool:
    """Whether tokens may be multiplied that no copy brought."""
    return token_box(config) < min(TOKEN_STEP, config.work_tile_mnk[0])


def smem_plan(config: KernelConfig, num_b: int = 1, b_format: BlockFormat = NVFP4) -> WeightOnlySmem:
    """Shared memory of ``config``. ``num_ab_stage=None`` is resolved to as many stages as fit."""
    weights, tokens, k = config.cta_tile_shape_mnk
    scale_bytes = 0 if has_scales_of_sums(b_format) else b_format.scale_bytes(SF_BLOCK_ROWS, TILE_K)
    plan = WeightOnlySmem(
        b_stage_bytes=weights * b_format.row_bytes(k),
        sfb_stage_bytes=k // TILE_K * scale_bytes,
        a_stage_bytes=tokens * k * FP16_BYTES,
        num_ab_stage=config.num_ab_stage or 0,
        partial_bytes=(config.split_k - 1) * tokens * TILE_WEIGHTS * FP32_BYTES,
        num_b=num_b,
    )
    return filled(plan, ctas_per_sm(config)) if config.num_ab_stage is None else plan


def resolve(config: KernelConfig, num_b: int = 1, b_format: BlockFormat = NVFP4) -> KernelConfig:
    """``config`` with its stage count made explicit."""
    return replace(config, num_ab_stage=smem_plan(config, num_b, b_format).num_ab_stage)


def unsupported_reason(config: KernelConfig, num_b: int = 1, b_format: BlockFormat = NVFP4) -> str | None:
    """Why the weight-only kernel cannot be built with ``config``, with the nearest legal value; None where it can."""
    weights, tokens, k = shape = config.cta_tile_shape_mnk
    options = options_reason(config, OPTIONS, "with 16-bit a: weights are on MMA-M and decoded in registers")
    if options is not None:
        return options
    if weights * num_b != TILE_WEIGHTS:
        return (
            f"cta_tile_shape_mnk={shape}: two warpgroups have 64 rows of weights each, of {num_b} "
            f"operand{'s' * (num_b > 1)}; use M tile {TILE_WEIGHTS // num_b}"
        )
    step = 8 if config.multicast_n == 1 and tokens <= MAX_TILE_TOKENS // 2 else 16
    if not step <= tokens <= MAX_TILE_TOKENS or tokens % step:
        nearest = min(max(-(-tokens // step) * step, step), MAX_TILE_TOKENS)
        return (
            f"cta_tile_shape_mnk={shape}: tokens are on MMA-N, a multiple of 8 up to {MAX_TILE_TOKENS // 2} and of 16 up to "
            f"{MAX_TILE_TOKENS} or where two CTAs share them; use N tile {nearest}"
        )
    if k not in TILES_K:
        return f"cta_tile_shape_mnk={shape}: a stage has 128 or 256 values of K; use K tile {TILE_K}"
    if has_scales_of_sums(b_format) and num_b > 1:
        return f"weights are {b_format.title}, whose kernel computes one product; multiply by one of them after the other"
    if promotes(b_format) and (tokens > MAX_PROMOTED_TOKENS or k > TILE_K):
        return (
            f"cta_tile_shape_mnk={shape}: of {b_format.title} weights a lane has sums of a K tile, too, and a stage has one; use "
            f"N tile {min(tokens, MAX_PROMOTED_TOKENS)}, K tile {TILE_K}"
        )
    plan = partial(smem_plan, num_b=num_b, b_format=b_format)
    return ring_reason(config, SPLITS, plan, ctas_per_sm(config))


def candidates(num_b: int = 1, b_format: BlockFormat = NVFP4) -> tuple[KernelConfig, ...]:
    """What ``choose`` chooses from. num_b: 2 for a dual GEMM whose weights are not interleaved. b_format: of the weights."""
    return tuple(_candidates(num_b, b_format))


def _candidates(num_b: int, b_format: BlockFormat) -> Iterator[KernelConfig]:
    for tokens in TOKEN_CHOICES:
        for k in TILES_K:
            for multicast, split in ((1, 1), (CTAS_OF_PAIR, 1), (1, 2), (1, 4), (1, 8)):
                shape = (TILE_WEIGHTS // num_b, tokens, k)
                config = replace(
                    DEFAULT_CONFIG, cta_tile_shape_mnk=shape, multicast_n=multicast, split_k=split
                )
                if unsupported_reason(config, num_b, b_format) is None:
                    yield config


def clusters_at_once(config: KernelConfig, num_sms: int) -> int:
    """Clusters that a GPU runs at once."""
    return clusters_in_gpcs(num_sms, config.cluster_size, GPC_SMS, MEASURED_CLUSTERS) * ctas_per_sm(config)


def most_tiles(sizes: Sequence[tuple[int, int, int]], config: KernelConfig, is_ragged: bool) -> int:
    """Tiles that a launch has at most. Ragged: of all rows, however they are dealt to groups, none of them empty if it can be."""
    tile_tokens, tile_weights, _ = config.work_tile_mnk
    if not is_ragged:
        return sum(-(-m // tile_tokens) * -(-n // tile_weights) for m, n, _ in sizes)
    rows, n = sum(m for m, _, _ in sizes), sizes[0][1]
    groups = min(len(sizes), rows)
    return (groups + (rows - groups) // tile_tokens) * -(-n // tile_weights)


@lru_cache(maxsize=4096)
def choose(
    sizes: tuple[tuple[int, int, int], ...],
    num_sms: int,
    num_b: int = 1,
    is_ragged: bool = False,
    b_format: BlockFormat = NVFP4,
) -> KernelConfig:
    """The candidate with the least modelled time.

    Args:
        sizes: (m, n, k) of every group. Ragged: about their mean, as only the device knows them.
        num_sms: SMs of the device.
        num_b, b_format: as of :func:`candidates`.
    """
    tried = candidates(num_b, b_format)
    if not any(min(size) > 0 for size in sizes):
        return tried[0]
    return min(tried, key=lambda config: estimate_us(sizes, config, num_sms, is_ragged, b_format))


def estimate_us(
    sizes: tuple[tuple[int, int, int], ...],
    config: KernelConfig,
    num_sms: int,
    is_ragged: bool = False,
    b_format: BlockFormat = NVFP4,
) -> float:
    """Modelled time of a launch; arguments as of :func:`choose`. Some size has no extent of 0."""
    launched, live = most_tiles(sizes, config, is_ragged), _live(sizes, is_ragged)
    routings = ROUTINGS if is_ragged else (0.0,)
    times = [_modelled_us(live, config, num_sms, launched, b_format, more) for more in routings]
    return sum(times) / len(times)


@lru_cache(maxsize=64)
def _live(sizes: tuple[tuple[int, int, int], ...], is_ragged: bool) -> Mapping[tuple[int, int, int], int]:
    """How many groups have each size that has work."""
    counted = Counter(spread(sizes) if is_ragged else sizes)
    return {size: count for size, count in counted.items() if min(size) > 0}


def spread(sizes: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Groups of as many rows in all, of which each is in a group by chance: the quantiles of a Poisson distribution."""
    (_, n, k), mean = sizes[0], sum(m for m, _, _ in sizes) / len(sizes)
    if mean > MOST_EXACT_MEAN:
        normal = NormalDist(mean, math.sqrt(mean))
        return [(round(normal.inv_cdf((g + 0.5) / len(sizes))), n, k) for g in range(len(sizes))]
    found = list[tuple[int, int, int]]()
    rows, part = 0, math.exp(-mean)
    below = part
    for g in range(len(sizes)):
        while below < (g + 0.5) / len(sizes):
            rows += 1
            part *= mean / rows
            below += part
        found.append((rows, n, k))
    return found


def _modelled_us(
    live: Mapping[tuple[int, int, int], int],
    config: KernelConfig,
    num_sms: int,
    launched: int,
    b_format: BlockFormat,
    more: float,
) -> float:
    """Time of a launch. Decoding is taken to cost what it costs of NVFP4.

    Args:
        live: how many groups have the size (m, n, k).
        launched: tiles that the launch is made for.
        more: share of tiles that there are besides.
    """
    tile_tokens, tile_weights, tile_k = config.work_tile_mnk
    split, times = config.split_k, TIMES
    tiles = multiplied = k_tiles = 0
    read = moved = 0.0
    for (m, n, k), count in live.items():
        strips, columns = -(-m // tile_tokens), -(-n // tile_weights)
        last = min(-(-(m - (strips - 1) * tile_tokens) // TOKEN_STEP) * TOKEN_STEP, tile_tokens)
        tiles += count * strips * columns
        multiplied += count * columns * ((strips - 1) * tile_tokens + last)
        stages = -(-k // tile_k)
        k_tiles += count * strips * columns * -(-stages // split) * (tile_k // TILE_K)
        weights = b_format.nbytes(n * (TILE_WEIGHTS // config.cta_tile_shape_mnk[0]), k)
        tokens = m * k * FP16_BYTES
        read += count * (weights + tokens)
        moved += count * (strips * weights + columns * tokens / config.multicast_n)
    per_k = _k_tile_us(config, multiplied / tiles)
    is_split = dict(times.split).get(split, 0.0)
    tile_us = times.tile + times.pair_tile * (config.multicast_n > 1) + k_tiles / tiles * per_k
    tile_us += is_split + times.split_per_token * tile_tokens * (split - 1)
    run = max(round(tiles * (1 + more)), 1)
    busy = _waves(config, run, max(launched, run), num_sms) * tile_us
    parts = (busy, read / times.memory_bytes, moved / times.l2_bytes)
    longest = sum(part**times.power for part in parts) ** (1 / times.power)
    return times.launch + times.cluster * (config.cluster_size > 1) + longest


def _k_tile_us(config: KernelConfig, multiplied: float) -> float:
    """A K tile of 128 values with so many tokens, by one CTA that has an SM."""
    times, tokens, k = TIMES, config.work_tile_mnk[0], config.work_tile_mnk[2]
    small = next((entry[1:] for entry in times.k_tile if tokens <= entry[0]), None)
    if small is None:
        us = times.large_k_tile + times.k_tile_per_token * multiplied + times.k_tile_per_tile_token * tokens
        us += times.largest_k_tile * (tokens == MAX_TILE_TOKENS)
    else:
        us = small[TILES_K.index(k)]
    return us * (1 + times.pair_k_tile * (config.multicast_n > 1))


def _waves(config: KernelConfig, tiles: int, launched: int, num_sms: int) -> float:
    """How many times as long as one tile, alone on its SMs, all of them take."""
    size, shares = config.cluster_size, ctas_per_sm(config) == 2
    at_once = clusters_at_once(config, num_sms)
    ctas = min(at_once, launched) * size
    if size >= SM_PER_CTA_FROM:
        at_once, shares = clusters_in_gpcs(num_sms, size, GPC_SMS, MODELLED_CLUSTERS), False
    full, rest = divmod(tiles, at_once)
    if not shares:
        return full + (rest > 0)
    longer = TIMES.shared_sm_of_32 if config.work_tile_mnk[0] == PAIRED_TILE_TOKENS else TIMES.shared_sm
    # The first CTAs of a launch that fills all SMs twice come in pairs from here on.
    alone = num_sms // 2 if size == 1 and ctas > num_sms else num_sms
    return full * longer + (rest > 0) * (longer if rest * size > alone else 1.0)


def is_faster_than_few_rows(
    m: int, n: int, k: int, batches: int, num_sms: int, b_format: BlockFormat = NVFP4
) -> bool:
    """Whether a product [m, k] x [n, k] of every batch takes this kernel less time than that for few rows.

    Not of weights with scales of sums: of those no time was measured with this kernel.
    """
    times, sizes = FEW_ROWS_TIMES, ((m, n, k),) * batches
    if m < times.least_rows or has_scales_of_sums(b_format):
        return False
    passes, rest = divmod(m, times.pass_rows)
    weights = batches * b_format.nbytes(n, k)
    other = times.launch + passes * weights / times.pass_bytes
    if rest:
        other += weights / (times.half_pass_bytes if 2 * rest <= times.pass_rows else times.pass_bytes)
    chosen = choose(sizes, num_sms, b_format=b_format)
    return estimate_us(sizes, chosen, num_sms, b_format=b_format) < other
