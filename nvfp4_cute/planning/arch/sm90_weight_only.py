"""sm_90a weight-only: 16-bit activations times quantized weights, and FP8 rows times MXFP4 weights in 4 bits.

Cost of a KernelConfig, refusals, and choice.

``cta_tile_shape_mnk`` is (weight rows, tokens, K) with ``swap_ab``, as in :mod:`.sm90`; its K is what a pipeline stage holds,
128 or 256 values. With ``multicast_n=2``, two CTAs with neighbouring weights share loads of tokens. With ``split_k``, the CTAs
of a cluster share a tile's K tiles. With ``stream_k``, all clusters get equal work, to the K tile.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import numpy as np

from nvfp4_cute.formats.block_format import (
    BFLOAT16,
    INT4_FORMATS,
    INT8,
    MXFP4,
    MXFP4_FP8,
    MXFP8,
    NVFP4,
    BlockFormat,
    Formats,
    FP8_1xK,
    FP8_128x128,
)
from nvfp4_cute.planning.arch.base import (
    Mma,
    clusters_in_gpcs,
    live_sizes,
    multiple_reason,
    never_in_turns,
    no_estimates,
    weight_only_mmas,
)
from nvfp4_cute.planning.arch.sm90 import (
    FP16_BYTES,
    FP32_BYTES,
    GPC_SMS,
    LEAST_SHARE,
    MAX_TILE_TOKENS,
    PAIRED_TILE_TOKENS,
    SF_BLOCK_ROWS,
    TILE_K,
    TILE_WEIGHTS,
    TOKEN_BOXES,
    TOKEN_STEP,
    fixup_bytes,
    parts_of_k,
    resident_clusters,
    stream_work,
)
from nvfp4_cute.planning.arch.sm90 import interleave_reason as interleave_reason
from nvfp4_cute.planning.arch.sm90 import work_reason as stream_reason
from nvfp4_cute.planning.arch.sm90_ring import CTAS_OF_PAIR, RingSmem, filled, options_reason, ring_reason
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import INT32_MAX, Form, GroupedProblem

ARCHS = ("sm_90a",)
FOUR_BITS = (NVFP4, MXFP4, *INT4_FORMATS.values())
PAIR: Formats = (BFLOAT16, NVFP4)
FP8_PAIR: Formats = (FP8_1xK, MXFP4_FP8)
MMA = weight_only_mmas((*FOUR_BITS, *MXFP8, FP8_128x128, INT8)) | {FP8_PAIR: Mma("e4m3", 32)}
OUT_M_MAJOR, HAS_CHAINS, HAS_EARLY_WEIGHTS, TO_AND_FRO = False, False, False, True
KERNEL = "sm90.weight_only.grouped_gemm.WeightOnlyGemmSm90"
OPTIONS = ("multicast_n", "stream_k")
K_MULTIPLE = 16
prefetches_in_turns, estimates = never_in_turns, no_estimates
TILES_K = (TILE_K, 2 * TILE_K)
# Tokens per tile of the candidates.
TOKEN_CHOICES = (8, 16, 32, 64, 96, 128, 192, 256)
# Groups up to which stream-K is considered: many fill a GPU anyhow, and dividing their K tiles takes longer.
MOST_STREAM_GROUPS = 8
# Tokens per tile of the candidates with stream-K, and the fewest of those that two CTAs share.
STREAM_TOKENS, LEAST_PAIRED_TOKENS = (16, 32, 48, 64, 96, 128, 192, 256), 128
# Tokens of the largest tile whose accumulators fit the registers twice, in total and per K tile.
MAX_PROMOTED_TOKENS = 128
# Split-K -> tokens of the largest tile whose partial sums fit the first CTA's shared memory.
SPLITS = {1: MAX_TILE_TOKENS, 2: 128, 4: 64, 8: 16}
DEFAULT_CONFIG = KernelConfig((TILE_WEIGHTS, 64, TILE_K), num_acc_stage=1, swap_ab=True)
# Resident clusters by number of SMs and cluster size, fitted to an H100's times. From four CTAs on, each has an SM of its own.
MODELLED_CLUSTERS = {132: {4: 30, 8: 14}}
SM_PER_CTA_FROM = 4
# Relative deviations of the number of tiles over which the time of a ragged launch is averaged, because another routing may
# need one wave more.
ROUTINGS = (-0.05, 0.0, 0.05)


@dataclass(frozen=True)
class Times:
    """Model of a launch in us: a soft maximum of whole waves of equal tiles, memory time and L2 time.

    Source: H100 80GB HBM3, 700 W, driver 580.159, 2026-11-25, bf16, cold L2; fitted to 1170 times of 60 products
    (``tests/data/w4a16_h100.json``) with a mean error of 5.4 %.
    """

    launch: float = 8.102
    cluster: float = 2.239  # launch of clusters
    tile: float = 0.2258
    pair_tile: float = 0.2121  # per tile of two CTAs that share tokens
    # A K tile of 128 values in tiles of up to 32 tokens, with 128 or 256 values per stage.
    k_tile: tuple[tuple[int, float, float], ...] = (
        (8, 0.4904, 0.4377),
        (16, 0.4673, 0.4288),
        (32, 0.4926, 0.5074),
    )
    # A K tile in larger tiles, by multiplied tokens and by tokens that a tile has room for.
    large_k_tile: float = 0.3838
    k_tile_per_token: float = 0.002076
    k_tile_per_tile_token: float = 0.001409
    largest_k_tile: float = 0.1728  # extra if tiles have room for all 256 tokens
    long_stage: float = 1.0  # relative time in larger tiles with 256 values per stage
    pair_k_tile: float = 0.0327  # relative increase if two CTAs share tokens
    shared_sm: float = 1.972  # slowdown if two CTAs share an SM
    shared_sm_of_32: float = 1.838
    split: tuple[tuple[int, float], ...] = ((2, 0.2296), (4, 0), (8, 0.3685))
    split_per_token: float = 0.005825  # per CTA that sends its sums
    # With stream-K: in any launch, per token of a tile, and per token for each part of a tile after the first.
    # Source: ``bench/results/h200_weight_only.json``.
    stream: float = 4.14
    stream_per_token: float = 0.0114
    part_per_token: float = 0.0093
    stream_of_bytes: float = 1.5  # more, for weights of 8 bits
    memory_bytes: float = 3.4e6  # between an H100 and an H200
    l2_bytes: float = 6.226e6
    power: float = 4.021  # exponent of the soft maximum


TIMES = Times()
# FP8 tokens and MXFP4 weights: no extra for the largest tiles, which do not exist. Source: fitted to 639 times of 56 products on
# an H200 (``bench/notes/2026-11-29-h200-fp8-rows.md``) with a mean error of 3.4 %; the chosen candidate is 1.0 % slower than the
# fastest on average, 8.7 % at most.
FP8_TIMES = Times(
    launch=7.401,
    cluster=0.6698,
    tile=0.2133,
    pair_tile=0.588,
    k_tile=((8, 0.2351, 0.1988), (16, 0.2502, 0.2077), (32, 0.257, 0.2402)),
    large_k_tile=0.1734,
    k_tile_per_token=0.0009028,
    k_tile_per_tile_token=0.002253,
    largest_k_tile=0.0,
    long_stage=0.8546,
    pair_k_tile=0.001586,
    shared_sm=1.834,
    shared_sm_of_32=1.918,
    split=((2, 0.629), (4, 0.0053), (8, 0.6)),
    split_per_token=0.008431,
    stream=4.304,
    stream_per_token=0.002992,
    part_per_token=0.009047,
    memory_bytes=3.715e6,
    l2_bytes=11.22e6,
    power=3.431,
)
# Time of a K tile of other formats relative to NVFP4. Source: ``bench/results/h200_weight_only.json``.
K_TILE_FACTORS = {"int4": 0.85, "uint4": 0.85, MXFP4.name: 0.91, FP8_128x128.name: 0.88} | {
    mx.name: 0.86 for mx in MXFP8
}


@dataclass(frozen=True)
class WeightOnlySmem(RingSmem):
    """Bytes of one stage per operand, and number of stages.

    Attributes:
        b_stage_bytes, sfb_stage_bytes: bytes per stage of each weight operand and of its scales.
        a_stage_bytes: bytes per stage of the tokens.
        num_b: weight operands.
    """

    b_stage_bytes: int
    sfb_stage_bytes: int
    a_stage_bytes: int
    num_b: int

    @property
    def weight_bytes(self) -> int:
        """Bytes per stage that the weight-loading warp loads."""
        return self.num_b * (self.b_stage_bytes + self.sfb_stage_bytes)

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage."""
        return self.weight_bytes + self.a_stage_bytes


def has_fp8_tokens(b_format: BlockFormat) -> bool:
    """Returns whether weights were prepared for FP8 tokens (``formats.fp8_order``)."""
    return b_format == MXFP4_FP8


def token_bytes(b_format: BlockFormat) -> int:
    """Returns the bytes of a token's value."""
    return FP8_1xK.row_bytes(1) if has_fp8_tokens(b_format) else FP16_BYTES


def slab_k(config: KernelConfig, b_format: BlockFormat) -> int:
    """Returns the values of K whose MMAs are one group: with FP8 tokens, half of a stage; otherwise half of a K tile."""
    return (config.work_tile_mnk[2] if has_fp8_tokens(b_format) else TILE_K) // 2


def has_scales_of_sums(b_format: BlockFormat) -> bool:
    """Returns whether weight scales multiply sums: float32 scales in rows, which are not copied to shared memory."""
    return b_format.scale_layout == "rowmajor"


def promotes(b_format: BlockFormat) -> bool:
    """Returns whether sums of part of K are accumulated in other registers.

    This is the case if scales cover 128 x 128 values, and for FP8 tokens, because tensor cores accumulate FP8 products with few
    bits.
    """
    return has_fp8_tokens(b_format) or (has_scales_of_sums(b_format) and b_format.block_k == TILE_K)


def ctas_per_sm(config: KernelConfig) -> int:
    """Returns the CTAs per SM: two with few tokens, whose warps fill each other's stalls."""
    return 2 if config.work_tile_mnk[0] <= PAIRED_TILE_TOKENS else 1


def token_box(config: KernelConfig) -> int:
    """Returns the tokens per TMA box, whole swizzle atoms. The CTAs of a pair alternate."""
    return max(rows for rows in TOKEN_BOXES if config.work_tile_mnk[0] % (config.multicast_n * rows) == 0)


def leaves_tokens_out(config: KernelConfig) -> bool:
    """Returns whether MMAs may read tokens that no copy has loaded."""
    return token_box(config) < min(TOKEN_STEP, config.work_tile_mnk[0])


def smem_plan(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> WeightOnlySmem:
    """Returns the shared memory of ``config``. ``num_ab_stage=None`` becomes the largest number of stages that fits."""
    (weights, tokens, k), b_format = config.cta_tile_shape_mnk, formats[1]
    scale_bytes = 0 if has_scales_of_sums(b_format) else b_format.scale_bytes(SF_BLOCK_ROWS, TILE_K)
    plan = WeightOnlySmem(
        b_stage_bytes=weights * b_format.row_bytes(k),
        sfb_stage_bytes=k // TILE_K * scale_bytes,
        a_stage_bytes=tokens * k * token_bytes(b_format),
        num_ab_stage=config.num_ab_stage or 0,
        partial_bytes=(config.split_k - 1) * tokens * TILE_WEIGHTS * FP32_BYTES,
        num_b=num_b,
    )
    return filled(plan, ctas_per_sm(config)) if config.num_ab_stage is None else plan


def resolve(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> KernelConfig:
    """Returns ``config`` with an explicit stage count."""
    return replace(config, num_ab_stage=smem_plan(config, num_b, formats).num_ab_stage)


def unsupported_reason(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> str | None:
    """Returns why the weight-only kernel cannot be built with ``config``, with the nearest legal value; None if it can."""
    weights, tokens, k = shape = config.cta_tile_shape_mnk
    b_format = formats[1]
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
    most_k = TILE_K if has_scales_of_sums(b_format) else max(TILES_K)
    if promotes(b_format) and (tokens > MAX_PROMOTED_TOKENS or k > most_k):
        return (
            f"cta_tile_shape_mnk={shape}: with {b_format.title} weights a lane also holds sums of a stage, at most {most_k} "
            f"values of K; use N tile {min(tokens, MAX_PROMOTED_TOKENS)}, K tile {min(k, most_k)}"
        )
    if config.stream_k and config.split_k > 1:
        return f"stream_k with split_k={config.split_k}: both divide K tiles; use split_k=1"
    plan = partial(smem_plan, num_b=num_b, formats=formats)
    return ring_reason(config, SPLITS, plan, ctas_per_sm(config))


def quantized_reason(config: KernelConfig, format: BlockFormat) -> str | None:
    """Returns why quantized results cannot be computed."""
    return (
        f"weight-only kernels write no {format.title} results; use out_dtype=torch.bfloat16 and quantize them"
    )


def work_reason(what: str, sizes: Iterable[tuple[int, int, int]], config: KernelConfig) -> str | None:
    """Returns why there is no kernel for a K, or for this much work (:func:`.sm90.work_reason`); None if there is one."""
    sizes = tuple(sizes)
    return multiple_reason((k for _, _, k in sizes), K_MULTIPLE) or stream_reason(what, sizes, config)


@cache
def candidates(
    num_b: int = 1,
    weight_layout: str = "separate",
    out_format: BlockFormat | None = None,
    form: Form = "list",
    formats: Formats = PAIR,
) -> tuple[KernelConfig, ...]:
    """Returns the candidates, those with stream-K last. Results are not quantized."""
    if out_format is not None:
        return ()
    return (*_candidates(num_b, formats), *_stream_candidates(num_b, formats))


def _candidates(num_b: int, formats: Formats) -> Iterator[KernelConfig]:
    for tokens in TOKEN_CHOICES:
        for k in TILES_K:
            for multicast, split in ((1, 1), (CTAS_OF_PAIR, 1), (1, 2), (1, 4), (1, 8)):
                shape = (TILE_WEIGHTS // num_b, tokens, k)
                config = replace(
                    DEFAULT_CONFIG, cta_tile_shape_mnk=shape, multicast_n=multicast, split_k=split
                )
                # Two CTAs an SM have room for too few stages of 256 values of 8 bits.
                is_shallow = formats[1].element.bits == 8 and k > TILE_K and ctas_per_sm(config) == 2
                if not is_shallow and unsupported_reason(config, num_b, formats) is None:
                    yield config


def _stream_candidates(num_b: int, formats: Formats) -> Iterator[KernelConfig]:
    b_format = formats[1]
    found = (
        replace(
            DEFAULT_CONFIG,
            cta_tile_shape_mnk=(TILE_WEIGHTS // num_b, tokens, k),
            multicast_n=multicast,
            stream_k=True,
        )
        for tokens in STREAM_TOKENS
        # With two CTAs per SM, a lane would spill 16 bytes.
        if not (has_fp8_tokens(b_format) and tokens <= PAIRED_TILE_TOKENS)
        for k in (TILES_K if has_fp8_tokens(b_format) else (TILE_K,))
        for multicast in ((1, CTAS_OF_PAIR) if tokens >= LEAST_PAIRED_TOKENS else (1,))
    )
    return (config for config in found if unsupported_reason(config, num_b, formats) is None)


CANDIDATES, DUAL_CANDIDATES = candidates(), candidates(2)


def workspace_bytes(config: KernelConfig, rows: np.ndarray, k: np.ndarray, num_cta: int) -> int:
    """Returns the bytes of the sums that stream-K hands over; 0 without stream-K. Its flags are counters."""
    return fixup_bytes(config, num_cta)[1]


def clusters_at_once(config: KernelConfig, num_sms: int) -> int:
    """Returns the number of clusters resident at once."""
    return resident_clusters(num_sms, config.cluster_size) * ctas_per_sm(config)


def most_clusters(sizes: Sequence[tuple[int, int, int]], config: KernelConfig, is_ragged: bool) -> int:
    """Returns the largest number of tiles of a launch, or of shares of them with stream-K.

    Ragged groups may divide the total rows in any way.
    """
    tile_tokens, tile_weights, tile_k = config.work_tile_mnk
    if config.stream_k:
        shares = max(max(-(-k // tile_k) for _, _, k in sizes) // LEAST_SHARE, 1)
        return shares * most_clusters(sizes, replace(config, stream_k=False), is_ragged)
    if not is_ragged:
        return sum(-(-m // tile_tokens) * -(-n // tile_weights) for m, n, _ in sizes)
    rows, n = sum(m for m, _, _ in sizes), sizes[0][1]
    groups = min(len(sizes), rows)
    return (groups + (rows - groups) // tile_tokens) * -(-n // tile_weights)


def choose(problem: GroupedProblem, num_sms: int) -> KernelConfig:
    """Returns the candidate with the smallest modelled time.

    Args:
        problem: its sizes, for ragged groups about their mean, because only the device knows them; operands and their order.
        num_sms: SMs of the device.
    """
    formats, is_ragged = (problem.a_format, problem.b_format), problem.form == "ragged"
    return _choose(problem.sizes, num_sms, problem.num_b, is_ragged, formats, parts_of_k(problem, num_sms))


@lru_cache(maxsize=4096)
def _choose(
    sizes: tuple[tuple[int, int, int], ...],
    num_sms: int,
    num_b: int,
    is_ragged: bool,
    formats: Formats,
    parts: int,
) -> KernelConfig:
    """Returns the candidate, for ``parts`` parts of K (``KernelConfig.adds_parts``); 0 leaves that open."""
    tried = candidates(num_b, formats=formats)
    if not any(min(size) > 0 for size in sizes):
        return next(config for config in tried if not parts or config.adds_parts(parts))
    has_few = len(sizes) <= MOST_STREAM_GROUPS
    most_work = INT32_MAX // 2 if formats == FP8_PAIR else INT32_MAX
    allowed = (
        c
        for c in tried
        if (
            c.adds_parts(parts)
            if parts
            else not c.stream_k or (has_few and stream_work(sizes, c) <= most_work)
        )
    )
    return min(allowed, key=lambda config: estimate_us(sizes, config, num_sms, num_b, is_ragged, formats[1]))


def estimate_us(
    sizes: tuple[tuple[int, int, int], ...],
    config: KernelConfig,
    num_sms: int,
    num_b: int = 1,
    is_ragged: bool = False,
    b_format: BlockFormat = NVFP4,
    arch: str = "sm_90a",
) -> float:
    """Returns the modelled time of a launch in us. At least one group must have work. See :func:`choose` for the arguments."""
    launched, live = most_clusters(sizes, config, is_ragged), live_sizes(sizes, is_ragged)
    routings = ROUTINGS if is_ragged else (0.0,)
    times = [_modelled_us(live, config, num_sms, launched, b_format, more) for more in routings]
    return sum(times) / len(times)


def _modelled_us(
    live: Mapping[tuple[int, int, int], int],
    config: KernelConfig,
    num_sms: int,
    launched: int,
    b_format: BlockFormat,
    more: float,
) -> float:
    """Returns the time of a launch.

    Args:
        live: number of groups per size (m, n, k).
        launched: tiles that the launch is sized for.
        more: relative number of additional tiles.
    """
    tile_tokens, tile_weights, tile_k = config.work_tile_mnk
    split, times = config.split_k, times_of(b_format)
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
        tokens = m * k * token_bytes(b_format)
        read += count * (weights + tokens)
        moved += count * (strips * weights + columns * tokens / config.multicast_n)
    per_k = _k_tile_us(config, multiplied / tiles, times) * k_tile_factor(b_format)
    is_split = dict(times.split).get(split, 0.0)
    tile_us = times.tile + times.pair_tile * (config.multicast_n > 1) + k_tiles / tiles * per_k
    tile_us += is_split + times.split_per_token * tile_tokens * (split - 1)
    run = max(round(tiles * (1 + more)), 1)
    if config.stream_k:
        busy = _stream_us(config, run, tile_us, num_sms, times) + times.stream_of_bytes * (
            b_format.element.bits == 8
        )
    else:
        busy = _waves(config, run, max(launched, run), num_sms, times) * tile_us
    parts = (busy, read / times.memory_bytes, moved / times.l2_bytes)
    longest = sum(part**times.power for part in parts) ** (1 / times.power)
    return times.launch + times.cluster * (config.cluster_size > 1) + longest


def _stream_us(config: KernelConfig, tiles: int, tile_us: float, num_sms: int, times: Times) -> float:
    """Returns the time of all tiles whose K tiles are divided evenly, and of the sums that are exchanged."""
    tokens = config.work_tile_mnk[0]
    workers = clusters_at_once(config, num_sms)
    shared = times.shared_sm_of_32 if tokens == PAIRED_TILE_TOKENS else times.shared_sm
    even = tiles / workers * tile_us * (shared if ctas_per_sm(config) == 2 else 1.0)
    more_parts = max(workers / tiles - 1, 0.0)
    return even + times.stream + tokens * (times.stream_per_token + more_parts * times.part_per_token)


def times_of(b_format: BlockFormat) -> Times:
    """Returns the model for weights of a format."""
    return FP8_TIMES if has_fp8_tokens(b_format) else TIMES


def k_tile_factor(b_format: BlockFormat) -> float:
    """Returns the time of a K tile of a format relative to NVFP4."""
    name = b_format.element.name if b_format.is_int4 else b_format.name
    return K_TILE_FACTORS.get(name, 1.0)


def _k_tile_us(config: KernelConfig, multiplied: float, times: Times) -> float:
    """Returns the time of a K tile of 128 values with ``multiplied`` tokens, with one CTA per SM."""
    tokens, k = config.work_tile_mnk[0], config.work_tile_mnk[2]
    small = next((entry[1:] for entry in times.k_tile if tokens <= entry[0]), None)
    if small is None:
        us = times.large_k_tile + times.k_tile_per_token * multiplied + times.k_tile_per_tile_token * tokens
        us += times.largest_k_tile * (tokens == MAX_TILE_TOKENS)
        us *= times.long_stage if k > TILE_K else 1.0
    else:
        us = small[TILES_K.index(k)]
    return us * (1 + times.pair_k_tile * (config.multicast_n > 1))


def _waves(config: KernelConfig, tiles: int, launched: int, num_sms: int, times: Times) -> float:
    """Returns the time of all tiles in units of one tile that is alone on its SMs."""
    size, shares = config.cluster_size, ctas_per_sm(config) == 2
    at_once = clusters_at_once(config, num_sms)
    ctas = min(at_once, launched) * size
    if size >= SM_PER_CTA_FROM:
        at_once, shares = clusters_in_gpcs(num_sms, size, GPC_SMS, MODELLED_CLUSTERS), False
    full, rest = divmod(tiles, at_once)
    if not shares:
        return full + (rest > 0)
    longer = times.shared_sm_of_32 if config.work_tile_mnk[0] == PAIRED_TILE_TOKENS else times.shared_sm
    # Beyond this many CTAs, a launch that fills all SMs twice puts pairs of CTAs on an SM.
    alone = num_sms // 2 if size == 1 and ctas > num_sms else num_sms
    return full * longer + (rest > 0) * (longer if rest * size > alone else 1.0)
