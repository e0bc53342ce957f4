"""sm_90a: cost of a KernelConfig in shared memory and registers, reasons for refusals, and the choice of a config.

``cta_tile_shape_mnk`` is (weight rows, tokens, K): weights are on MMA-M, tokens on MMA-N (``swap_ab``). Limits: CUDA C++
programming guide, technical specifications (227 KiB of shared memory a CTA); PTX ISA 9.7.15 (wgmma: N a multiple of 8).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from statistics import NormalDist

import numpy as np

from nvfp4_cute.formats.block_format import (
    MIXED_PAIRS,
    MXFP4,
    MXFP8_PAIRS,
    NVFP4,
    NVFP4_PAIR,
    BlockFormat,
    Formats,
)
from nvfp4_cute.planning.arch.base import (
    Mma,
    allowed,
    clusters_in_gpcs,
    foreign_option_reason,
    never_in_turns,
    no_estimates,
)
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import INT32_MAX, Form, GroupedProblem

ARCHS = ("sm_90a",)
KERNEL = "sm90.grouped_gemm.GroupedGemmSm90"
OPTIONS = ("decode_first", "stream_k")
DEFAULT_CONFIG = KernelConfig((128, 128, 128), num_acc_stage=1, swap_ab=True)
OUT_M_MAJOR, HAS_CHAINS, HAS_EARLY_WEIGHTS, TO_AND_FRO = False, False, False, True
prefetches_in_turns, estimates = never_in_turns, no_estimates
SMEM_CAPACITY_BYTES = 227 * 1024
SMEM_PER_SM_BYTES = 228 * 1024
SMEM_PER_CTA_BYTES = 1024  # reserved by the system per CTA
# Up to this many tokens, two CTAs fit an SM, and their warps fill each other's stalls. Tokens that arrive dequantized cause few
# stalls. With one CTA per SM, an H200 holds 30 clusters of four.
PAIRED_TILE_TOKENS = 32
# Barriers, gaps from aligning the buffers to 1024 bytes, and 32 x 64 results per MATH warpgroup.
SMEM_RESERVED_BYTES = 4096 + 2 * 4096
# Both operands are dequantized, scales included.
MMA = {
    (NVFP4, NVFP4): Mma("f16", 16),
    **{pair: Mma("bf16", 16) for pair in ((MXFP4, MXFP4), *MXFP8_PAIRS, *MIXED_PAIRS)},
}
TILE_WEIGHTS = 128
TILE_K = 128
# Accumulators of more tokens do not fit a thread's registers.
MAX_TILE_TOKENS = 256
# Tokens per tile of the candidates.
TOKEN_CHOICES = (8, 16, 32, 64, 80, 96, 112, 128, 160, 192, 256)
# Split-K -> tokens of the largest tile whose partial sums fit the first CTA's shared memory.
SPLITS = {1: MAX_TILE_TOKENS, 2: 128, 4: 64}
# Larger tiles have MMAs for this number of tokens and for multiples of the step above it.
LEAST_TOKENS, TOKEN_STEP = 32, 32
# Step of tokens in pairs of CTAs: half of it is a whole number of swizzle atoms.
PAIR_TOKEN_STEP = 16
# Tokens per TMA box: whole swizzle atoms.
TOKEN_BOXES = (8, 16, 32)
# Tokens per tile of the ``decode_first`` candidates, by ``stream_k``.
DECODE_FIRST_TOKENS = {False: (16, 32, 48, 64, 96, 128, 256), True: (16, 32, 48, 64, 96, 128, 192, 256)}
# Candidates of single products and of dual GEMMs with interleaved weights.
CANDIDATES = tuple(
    replace(DEFAULT_CONFIG, cta_tile_shape_mnk=(TILE_WEIGHTS, tokens, TILE_K), split_k=split)
    for tokens in TOKEN_CHOICES
    for split, most in SPLITS.items()
    if tokens <= most
) + tuple(
    replace(
        DEFAULT_CONFIG,
        cta_tile_shape_mnk=(TILE_WEIGHTS, tokens, TILE_K),
        decode_first=True,
        stream_k=stream_k,
    )
    for stream_k, choices in DECODE_FIRST_TOKENS.items()
    for tokens in choices
)
# Candidates of dual GEMMs with separate weights: half a tile belongs to each operand.
DUAL_CANDIDATES = tuple(
    replace(config, cta_tile_shape_mnk=(TILE_WEIGHTS // 2, *config.cta_tile_shape_mnk[1:]))
    for config in CANDIDATES
)
# Stream-K. Work of a K tile, in units of about 0.04 us on an H200: the larger of its instructions (dequantizing weights, and
# multiplying each step of tokens) and its MMAs. Storing a tile counts as STORING_K_TILES of its K tiles. A share has the work
# of at least LEAST_SHARE K tiles, and LEAST_PART K tiles of a tile are not divided. Waves of whole tiles come first and leave
# every share the work of at least 1 / LEAST_REST of a tile.
DECODING_WORK, STEP_WORK, STEP_MMA_WORK = 11, 2, 4
STORING_K_TILES = 2
LEAST_SHARE = LEAST_PART = 4
LEAST_REST = 4
MATH_WARPS = 8  # two warpgroups per CTA
WARP_SIZE = 32
# SMs per GPC, and resident clusters by number of SMs and cluster size, from times of clusters of 4 on an H200.
GPC_SMS = 16
MEASURED_CLUSTERS = {132: {4: 30}}
# Fixup memory per CTA: a sector of flags, an int32 for each MATH warp, and the sums of a tile.
FIXUP_FLAG_BYTES = 32
# Orders groups whose sizes only the device knows, so that large and small ones mix.
GOLDEN_RATIO = 0.618034
# Scales come in blocks of 128 rows.
SF_BLOCK_ROWS = 128
# K tiles of dequantized activations: one is multiplied while another is written. More than the maximum gain nothing.
MIN_DECODED_K_TILES, MAX_DECODED_K_TILES = 2, 3
# Parts of a K tile in which activations are dequantized and multiplied. In large tiles, of which few stages fit, each is a
# stage of its own and is released earlier.
SLABS = 2
MAX_TOKENS_OF_WHOLE_STAGES = 128
MAX_TOKENS_OF_LONG_STAGES = 96
# Packed stages to reach before dequantized stages are added: enough bytes in flight for the memory latency.
WANTED_AB_STAGE = 5
MAX_AB_STAGE = 12
# Fewer would leave nothing in flight while MATH reads.
MIN_AB_STAGE = 2
FP16_BYTES, FP32_BYTES = 2, 4


@dataclass(frozen=True)
class Times:
    """Model of a CTA's time in us. "Tokens" are those multiplied, "tile tokens" those a tile has room for.

    Source: fitted to times on an H200 (``bench.choices`` measures such). Kernels that dequantize tokens themselves: 8 to 4096
    tokens, K of 2048 to 16384. With ``decode_first``: 6,900 times of 609 problems, with a mean error of 4 to 5 %
    (``bench/notes/2026-11-24-h200.md``). Tiles of few tokens of many groups: ``bench/notes/2026-11-29-h200-small-experts.md``.
    """

    launch: float = 5.1
    tile: float = 1.5
    k_tile: float = 0.34
    k_tile_per_token: float = 0.0051
    # Tiles small enough for two CTAs per SM. Where there are two, K tiles are slower, and epilogues are partly hidden.
    small_k_tile: float = 0.29
    small_k_tile_per_token: float = 0.0035
    pair_factor: float = 2.45
    paired_tile: float = 0.8
    split_tile: float = 1.7  # reduction over several CTAs
    # With ``decode_first``: both launches, the search of their warps through 32 groups, a tile, and a K tile, which takes the
    # time of its instructions or of its MMAs.
    decoding: float = 8.5
    search: float = 0.3
    decoded_tile: float = 0.77
    decoded_k_tile: float = 0.207
    decoded_k_tile_per_token: float = 0.0029
    decoded_k_tile_per_tile_token: float = 0.00046
    mmas_per_token: float = 0.00485
    # Tiles of 4-bit weights that all SMs load from memory at once.
    loaded_tile: float = 0.25
    loaded_k_tile: float = 0.371
    loaded_k_tile_per_tile_token: float = 0.0012
    # Stream-K: fixup of a tile, the same per further cluster that has a part of it, and the factor on K tiles if clusters read
    # tokens of several groups.
    stream: float = 4.0
    stream_per_tile_token: float = 0.019
    stream_groups_factor: float = 1.04
    part: float = 0.23
    part_per_tile_token: float = 0.0017


TIMES = Times()


@dataclass(frozen=True)
class SmemPlan:
    """Shared memory per stage and operand, and in total: plain integers, printable.

    Attributes:
        a_stage_bytes, b_stage_bytes: packed elements of tokens (0 if they arrive dequantized) and of each weight operand.
        sfa_stage_bytes, sfb_stage_bytes: their scales, in whole blocks of 128 rows.
        decoded_stage_bytes: tokens in fp16 or bf16, of a stage's K tiles or of half a K tile.
        num_ab_stage, num_decoded_stage: stages of packed operands and of dequantized tokens.
        partial_bytes: partial sums that the first CTA of a cluster receives.
        num_b: weight operands.
    """

    a_stage_bytes: int
    b_stage_bytes: int
    sfa_stage_bytes: int
    sfb_stage_bytes: int
    decoded_stage_bytes: int
    num_ab_stage: int
    num_decoded_stage: int
    partial_bytes: int
    num_b: int = 1

    @property
    def stage_bytes(self) -> int:
        """Bytes that TMA writes per stage: the transaction count of its barrier."""
        tokens = self.a_stage_bytes + self.sfa_stage_bytes
        return tokens + self.num_b * (self.b_stage_bytes + self.sfb_stage_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all stages and of everything else in shared memory."""
        return (
            self.stage_bytes * self.num_ab_stage
            + self.decoded_stage_bytes * self.num_decoded_stage
            + self.partial_bytes
            + SMEM_RESERVED_BYTES
        )


def sf_blocks(tile_rows: int) -> int:
    """Returns the largest number of 128-row scale blocks that a tile of ``tile_rows`` rows overlaps at any position."""
    starts = (tile * tile_rows % SF_BLOCK_ROWS for tile in range(SF_BLOCK_ROWS))
    return max(-(-(start + tile_rows) // SF_BLOCK_ROWS) for start in starts)


def token_counts(tile_m: int) -> list[int]:
    """Returns the token counts for which MMAs are generated. Fewer tokens make a group's last tile faster."""
    return [*range(LEAST_TOKENS, tile_m, TOKEN_STEP), tile_m]


def least_step(tile_m: int) -> int:
    """Returns the step of tokens in tiles of ``tile_m`` tokens."""
    return math.gcd(TOKEN_STEP, tile_m)


def token_box(config: KernelConfig) -> int:
    """Returns the dequantized tokens per TMA box. Boxes without tokens are skipped; the CTAs of a pair alternate."""
    return max(rows for rows in TOKEN_BOXES if config.work_tile_mnk[0] % (config.num_m_cta * rows) == 0)


def leaves_tokens_out(config: KernelConfig) -> bool:
    """Returns whether MMAs may read tokens that no copy has loaded: stale ones of another tile, or uninitialized ones."""
    return config.decode_first and token_box(config) < TOKEN_STEP


def stages_of_k_tile(config: KernelConfig) -> int:
    """Returns the stages of dequantized activations per K tile."""
    return 1 if config.work_tile_mnk[0] <= MAX_TOKENS_OF_WHOLE_STAGES else SLABS


def shares_stages(config: KernelConfig) -> bool:
    """Returns whether a K tile's weights and dequantized tokens share a stage, which halves waits and releases."""
    return config.decode_first and stages_of_k_tile(config) == 1


def k_tiles_of_stage(config: KernelConfig) -> int:
    """Returns the K tiles per stage of weights and dequantized tokens: two if enough such stages fit, which halves waits.

    After an odd number of K tiles, one more is loaded, filled with zeros.
    """
    return 2 if shares_stages(config) and config.work_tile_mnk[0] <= MAX_TOKENS_OF_LONG_STAGES else 1


def ctas_per_sm(config: KernelConfig) -> int:
    """Returns the number of CTAs per SM."""
    return 2 if config.work_tile_mnk[0] <= PAIRED_TILE_TOKENS and not config.decode_first else 1


def smem_capacity_bytes(num_ctas: int) -> int:
    """Returns the shared memory available to each of ``num_ctas`` CTAs that share an SM."""
    return min(SMEM_PER_SM_BYTES // num_ctas - SMEM_PER_CTA_BYTES, SMEM_CAPACITY_BYTES)


def smem_plan(config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> SmemPlan:
    """Returns the shared memory of ``config``. ``num_ab_stage=None`` becomes the largest number of stages that fits."""
    n, m, k = config.cta_tile_shape_mnk
    k *= k_tiles_of_stage(config)
    a_format, b_format = formats
    capacity = smem_capacity_bytes(ctas_per_sm(config))
    plan = SmemPlan(
        a_stage_bytes=m * a_format.row_bytes(k),
        b_stage_bytes=n * b_format.row_bytes(k),
        sfa_stage_bytes=sf_blocks(m) * a_format.atom_row_bytes(k),
        sfb_stage_bytes=sf_blocks(n) * b_format.atom_row_bytes(k),
        decoded_stage_bytes=m * k // stages_of_k_tile(config) * FP16_BYTES,
        num_ab_stage=config.num_ab_stage or WANTED_AB_STAGE,
        num_decoded_stage=MIN_DECODED_K_TILES * stages_of_k_tile(config),
        partial_bytes=(config.split_k - 1) * m * TILE_WEIGHTS * FP32_BYTES,
        num_b=num_b,
    )
    most, step = MAX_DECODED_K_TILES * stages_of_k_tile(config), stages_of_k_tile(config)
    if config.decode_first:  # No tokens are packed; load ahead with all stages that fit.
        plan, most, step = replace(plan, a_stage_bytes=0, sfa_stage_bytes=0), MAX_AB_STAGE, 1
    if shares_stages(config):
        both_bytes = plan.stage_bytes + plan.decoded_stage_bytes
        free_bytes = capacity - replace(plan, num_ab_stage=0, num_decoded_stage=0).total_bytes
        num_stage = config.num_ab_stage or min(free_bytes // both_bytes, MAX_AB_STAGE)
        return replace(plan, num_ab_stage=num_stage, num_decoded_stage=num_stage)
    for num_decoded_stage in range(plan.num_decoded_stage + step, most + 1, step):
        wider = replace(plan, num_decoded_stage=num_decoded_stage)
        if wider.total_bytes <= capacity:
            plan = wider
    if config.num_ab_stage is None:
        free_bytes = capacity - replace(plan, num_ab_stage=0).total_bytes
        plan = replace(plan, num_ab_stage=min(free_bytes // plan.stage_bytes, MAX_AB_STAGE))
    return plan


def fixup_bytes(config: KernelConfig, num_cta):
    """Returns the bytes of stream-K flags and of the sums after them. num_cta: CTAs of the launch, a host or device integer."""
    if not config.stream_k:
        return 0, 0
    sums = config.work_tile_mnk[0] * TILE_WEIGHTS * FP32_BYTES
    return num_cta * FIXUP_FLAG_BYTES, num_cta * sums


def workspace_bytes(config: KernelConfig, rows: np.ndarray, k: np.ndarray, num_cta: int) -> int:
    """Returns the workspace of a launch in bytes: ``a`` in 16 bits with rows of whole K tiles, and stream-K fixup memory.

    Args:
        rows, k: extents of every group's ``a`` in elements; for batches, the total rows.
        num_cta: persistent CTAs of the launch.
    """
    if not config.decode_first:
        return 0
    return int((rows * (-(-k // TILE_K) * TILE_K)).sum()) * FP16_BYTES + sum(fixup_bytes(config, num_cta))


def resolve(config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> KernelConfig:
    """Returns ``config`` with an explicit stage count."""
    return replace(config, num_ab_stage=smem_plan(config, num_b, formats).num_ab_stage)


def candidates(
    num_b: int = 1,
    weight_layout: str = "separate",
    out_format: BlockFormat | None = None,
    form: Form = "list",
    formats: Formats = NVFP4_PAIR,
) -> tuple[KernelConfig, ...]:
    """Returns the candidates of ``choose``.

    Args:
        num_b: weight operands: 2 for a dual GEMM whose weights are not interleaved.
        weight_layout, out_format, form: ignored.
        formats: formats of ``a`` and ``b``. With 8 bits, only configs of which two stages fit.
    """
    tried = _with_stages(num_b, formats)
    return tuple(
        config for config in tried if out_format is None or quantized_reason(config, out_format) is None
    )


@lru_cache(maxsize=64)
def _with_stages(num_b: int, formats: Formats) -> tuple[KernelConfig, ...]:
    tried = CANDIDATES if num_b == 1 else DUAL_CANDIDATES
    return tuple(c for c in tried if smem_plan(c, num_b, formats).num_ab_stage >= MIN_AB_STAGE)


def k_tile_work(token_steps) -> tuple:
    """Returns the work of a K tile's instructions and of its MMAs, for ``token_steps`` steps of tokens. The larger one counts."""
    return DECODING_WORK + STEP_WORK * token_steps, STEP_MMA_WORK * token_steps


def stream_work(sizes: Iterable[tuple[int, int, int]], config: KernelConfig) -> int:
    """Returns an upper bound of the work of a stream-K launch, in the kernel's unit. sizes: (m, n, k) of every group."""
    tile_tokens, tile_weights, tile_k = config.work_tile_mnk
    most = max(k_tile_work(-(-tile_tokens // TOKEN_STEP)))
    return sum(
        most * -(-m // tile_tokens) * -(-n // tile_weights) * (-(-k // tile_k) + STORING_K_TILES)
        for m, n, k in sizes
    )


def work_reason(what: str, sizes: Iterable[tuple[int, int, int]], config: KernelConfig) -> str | None:
    """Returns why the work exceeds the 32 bits in which stream-K counts it; None if it does not, or without stream-K.

    Args:
        what: name of the work, for the message.
        sizes: (m, n, k) of every group, or of fewer groups with equally many tiles.
    """
    work = stream_work(sizes, config) if config.stream_k else 0
    if work <= INT32_MAX:
        return None
    return f"{what}: K tiles are up to {work} units of work, and stream_k counts to {INT32_MAX}; use stream_k=False"


def choose(problem: GroupedProblem, num_sms: int) -> KernelConfig:
    """Returns the candidate with the smallest modelled time.

    The model weighs padding and idle SMs against repeated dequantizing and reductions.

    Args:
        problem: its sizes, operands and results matter. Ragged groups have these rows on average; the device knows the actual
            rows and
            takes groups in the caller's order.
        num_sms: SMs of the device.
    """
    orders = _orders(problem)
    most = max((m for sizes in orders for m, _, _ in sizes), default=0)
    formats = problem.a_format, problem.b_format
    tried = allowed(
        candidates(problem.num_b, problem.weight_layout, problem.out_format, formats=formats),
        problem,
        parts_of_k(problem, num_sms),
    )
    # No tile needs to be wider than the smallest of its kind that holds all tokens of a group.
    widest = dict[tuple, int]()
    for config in tried:
        kind, tokens = _kind(config), config.work_tile_mnk[0]
        if tokens >= most:
            widest[kind] = min(widest.get(kind, tokens), tokens)

    def is_fitting(config: KernelConfig) -> bool:
        if config.work_tile_mnk[0] > widest.get(_kind(config), MAX_TILE_TOKENS):
            return False
        # Groups of mean size have at least half the tiles of any other division of the rows.
        return not config.stream_k or 2 * max(stream_work(sizes, config) for sizes in orders) <= INT32_MAX

    def us(config: KernelConfig, is_dealt: bool) -> float:
        searching_us = _search_us(problem, config)
        return sum(_modelled_us(sizes, config, num_sms, is_dealt) + searching_us for sizes in orders)

    # Simulating many small tiles takes long, so skip candidates that the even share of work rules out. The first of equals wins.
    best_us, best = math.inf, DEFAULT_CONFIG
    fitting = filter(is_fitting, tried)
    for least_us, config in sorted(((us(config, False), config) for config in fitting), key=itemgetter(0)):
        if least_us > best_us:
            break
        config_us = us(config, True)
        if config_us < best_us:
            best_us, best = config_us, config
    return best


def estimate_us(problem: GroupedProblem, num_sms: int) -> float:
    """Returns the modelled time of a launch with the chosen config in us, without the launch that quantizes rows."""
    config, orders = choose(problem, num_sms), _orders(problem)
    us = sum(_modelled_us(sizes, config, num_sms, True) for sizes in orders) / len(orders)
    return us + _search_us(problem, config)


def _orders(problem: GroupedProblem) -> list[list[tuple[int, int, int]]]:
    """Returns sizes of groups with work, in the order in which the kernel takes them; for ragged groups of two routings."""
    # With sizes known to the host, the kernel takes the largest groups first.
    means = sorted(problem.sizes, key=lambda size: -size[0])
    orders = [means]
    if problem.form == "ragged" and len(means) > 1:
        orders = [_spread(means, size_at) for size_at in (_even_choice, _uneven_choice)]
    return [[size for size in sizes if min(size) > 0] for sizes in orders]


def _search_us(problem: GroupedProblem, config: KernelConfig) -> float:
    """Returns the time in which warps of the launch that dequantizes tokens search groups, 32 at a time, empty ones too."""
    if problem.form == "list" or not config.decode_first:
        return 0.0
    return -(-len(problem.sizes) // WARP_SIZE) * TIMES.search


def parts_of_k(problem: GroupedProblem, num_sms: int) -> int:
    """Returns the parts of K that sums of a batch-invariant problem are made of; 0 for other problems.

    Two for a dense product whose weights fill at most half of the SMs, so that both parts run at once. On an H200, one part then
    takes up to 1.4 times as long at few rows. With more weights, one part takes 0.62 to 1.02 of the time of two
    (``bench/notes/2026-11-29-h200-batch-invariance.md``).
    """
    if not problem.batch_invariant:
        return 0
    n = max((n for _, n, _ in problem.sizes), default=0)
    return 2 if problem.is_dense and 2 * -(-n // TILE_WEIGHTS) <= num_sms else 1


def _kind(config: KernelConfig) -> tuple:
    """Returns the fields of a config other than the tokens per tile."""
    return config.decode_first, config.stream_k, config.split_k


def _even_choice(mean: float, quantile: float) -> float:
    """Returns a quantile of group sizes when rows are routed uniformly at random: Poisson, approximated from 1 on."""
    if mean >= 1:
        return max(mean + math.sqrt(mean) * NormalDist().inv_cdf(quantile), 0.0)
    rows, probability = 0, math.exp(-mean)
    below = probability
    while below < quantile:
        rows += 1
        probability *= mean / rows
        below += probability
    return rows


def _uneven_choice(mean: float, quantile: float) -> float:
    """Returns a quantile of group sizes when few groups are chosen often: exponential distribution, geometric below 1."""
    if mean >= 1:
        return -mean * math.log(1 - quantile)
    return math.floor(math.log(1 - quantile) / math.log(mean / (1 + mean)))


def _spread(
    groups: list[tuple[int, int, int]], size_at: Callable[[float, float], float]
) -> list[tuple[int, int, int]]:
    """Returns groups with all their rows spread over the quantiles ``size_at(mean, quantile)``, in mixed order."""
    total, count = sum(m for m, _, _ in groups), len(groups)
    if not total:
        return groups
    mixed = sorted(range(count), key=lambda group: group * GOLDEN_RATIO % 1)
    rows = [size_at(total / count, (group + 0.5) / count) for group in mixed]
    factor = total / max(sum(rows), 1.0)
    return [(round(m * factor), n, k) for m, (_, n, k) in zip(rows, groups, strict=True)]


def _modelled_us(
    live: list[tuple[int, int, int]], config: KernelConfig, num_sms: int, is_dealt: bool
) -> float:
    """Returns the modelled time of the busiest CTA; with stream-K, of any CTA.

    Args:
        is_dealt: whether to simulate the assignment of tiles. Otherwise assumes an even share, which gives a lower bound.
    """
    (tile_tokens, tile_weights, _), split = config.work_tile_mnk, config.split_k
    tile_us = TIMES.decoded_tile if config.decode_first else TIMES.tile
    tile_us += TIMES.split_tile if split > 1 else 0.0
    m, n, k = np.array(live or [(0, 0, 0)]).T
    # Per group: tiles along M and N, K tiles, time of a full tile, and time of the last one or two along M.
    strips, columns, k_tiles = -(-m // tile_tokens), -(-n // tile_weights), -(-k // (TILE_K * split))
    num_tiles = int(columns @ strips)
    if ctas_per_sm(config) == 2 and num_tiles * split > num_sms:
        tile_us, k_tiles = tile_us - TIMES.tile + TIMES.paired_tile, k_tiles * TIMES.pair_factor
    num_full, last, behind = last_tiles(m, tile_tokens, config.stream_k)
    counts = np.array(token_counts(tile_tokens))
    full_us, last_us, behind_us = (
        (tokens > 0) * (tile_us + k_tiles * _k_tile_us(config, counts[np.searchsorted(counts, tokens)]))
        for tokens in (np.full_like(m, tile_tokens), last, behind)
    )
    all_us = float(columns @ (num_full * full_us + last_us + behind_us))
    workers = resident_clusters(num_sms, config.cluster_size) * ctas_per_sm(config)
    memory_us = 0.0
    # A strip's first tile reads weights from memory, and the others from L2 meanwhile. In fewer waves, not all SMs load.
    if config.decode_first and num_tiles >= 2 * workers:
        k_tile_us = TIMES.loaded_k_tile + TIMES.loaded_k_tile_per_tile_token * tile_tokens
        memory_us = float(columns @ ((m > 0) * (TIMES.loaded_tile + k_tiles * k_tile_us))) / workers
    if config.stream_k:
        factor = 1.0 if len(live) == 1 else TIMES.stream_groups_factor
        stream_us = TIMES.stream + TIMES.stream_per_tile_token * tile_tokens
        more_parts = max(workers / max(num_tiles, 1) - 1, 0.0)
        stream_us += more_parts * (TIMES.part + TIMES.part_per_tile_token * tile_tokens)
        return TIMES.decoding + stream_us + max(factor * all_us / workers, memory_us)
    most_us = all_us / workers
    if is_dealt:
        # Waves alternate in direction, as in ``kernels.sm90.tile_walk``.
        strip_us = [
            [full] * (strip - 1) + [last] for full, strip, last in zip(full_us, strips, last_us, strict=True)
        ]
        tiles = np.concatenate([np.tile(us, times) for us, times in zip(strip_us, columns, strict=True)])
        waves = np.concatenate([tiles, np.zeros(-num_tiles % workers)]).reshape(-1, workers)
        waves[1::2] = waves[1::2, ::-1]
        most_us = float(waves.sum(0).max())
    return (TIMES.decoding if config.decode_first else TIMES.launch) + max(most_us, memory_us)


def last_tiles(m: np.ndarray, tile_tokens: int, is_dealt: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the number of full tiles and the tokens of the one or two tiles after them, as ``kernels.sm90.token_tiles``."""
    count, step = -(-m // tile_tokens), least_step(tile_tokens)
    if not is_dealt:
        return count - 1, m - (count - 1) * tile_tokens, np.zeros_like(m)
    num_full = np.maximum(count - 2, 0)
    rest = m - num_full * tile_tokens
    first = np.where(count > 1, -(-rest // (2 * step)) * step, rest)
    return num_full, first, rest - first


def _k_tile_us(config: KernelConfig, tokens: np.ndarray) -> np.ndarray:
    """Returns the time of K tiles with ``tokens`` multiplied tokens."""
    tile_tokens = config.work_tile_mnk[0]
    if config.decode_first:
        decoding_us = TIMES.decoded_k_tile + TIMES.decoded_k_tile_per_tile_token * tile_tokens
        return np.maximum(
            decoding_us + TIMES.decoded_k_tile_per_token * tokens, TIMES.mmas_per_token * tokens
        )
    if tile_tokens <= PAIRED_TILE_TOKENS:
        return TIMES.small_k_tile + TIMES.small_k_tile_per_token * tokens
    return TIMES.k_tile + TIMES.k_tile_per_token * tokens


def unsupported_reason(config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> str | None:
    """Returns why this family cannot build ``config``, with the nearest legal value; None if it can."""
    foreign = foreign_option_reason(config, OPTIONS)
    if foreign is not None:
        return foreign
    if not config.swap_ab:
        return f"swap_ab={config.swap_ab}: weights are on MMA-M; use swap_ab=True"
    m, n, k = config.cta_tile_shape_mnk
    if m * num_b != TILE_WEIGHTS:
        return (
            f"cta_tile_shape_mnk={config.cta_tile_shape_mnk}: two warpgroups have 64 rows of weights each, of {num_b} "
            f"operand{'s' * (num_b > 1)}; use M tile {TILE_WEIGHTS // num_b}"
        )
    step = 8 if n <= MAX_TOKENS_OF_WHOLE_STAGES else 16
    if not 8 <= n <= MAX_TILE_TOKENS or n % step:
        nearest = min(max(-(-n // step) * step, 8), MAX_TILE_TOKENS)
        return (
            f"cta_tile_shape_mnk={config.cta_tile_shape_mnk}: tokens are on MMA-N, a multiple of 8 from 8 to "
            f"{MAX_TOKENS_OF_WHOLE_STAGES}, of 16 up to {MAX_TILE_TOKENS}; use N tile {nearest}"
        )
    if config.decode_first and n % PAIR_TOKEN_STEP:
        nearest = -(-n // PAIR_TOKEN_STEP) * PAIR_TOKEN_STEP
        return (
            f"decode_first with N tile {n}: the CTAs of a pair take turns in loading whole swizzle atoms of 8 tokens; "
            f"use N tile {nearest}"
        )
    if config.stream_k and not config.decode_first:
        return "stream_k without decode_first: sums go through memory that a launch before prepares; use stream_k=False"
    if config.decode_first and config.split_k > 1:
        return (
            f"decode_first with split_k={config.split_k}: clusters are pairs that share tokens; use split_k=1"
        )
    if k != TILE_K:
        return (
            f"cta_tile_shape_mnk={config.cta_tile_shape_mnk}: a K tile is two 128-byte rows of fp16; "
            f"use K tile {TILE_K}"
        )
    if n > SPLITS.get(config.split_k, 0):
        allowed = [split for split, most in SPLITS.items() if n <= most]
        return (
            f"split_k={config.split_k} with N tile {n}: 2 CTAs share K tiles where a tile has at most {SPLITS[2]} tokens, 4 "
            f"where it has {SPLITS[4]}; use split_k={max(allowed)}"
        )
    if config.num_acc_stage != 1:
        return f"num_acc_stage={config.num_acc_stage}: accumulators are in registers, there is one; use 1"
    smem, capacity = smem_plan(config, num_b, formats), smem_capacity_bytes(ctas_per_sm(config))
    least = 2 if shares_stages(config) else 1
    if least == 2 and config.num_ab_stage == 1:
        return "num_ab_stage=1 with decode_first: a stage is read while the one before is multiplied; use 2 or more"
    if smem.num_ab_stage < least or smem.total_bytes > capacity:
        return (
            f"num_ab_stage={config.num_ab_stage}: {smem.total_bytes} bytes of shared memory, {capacity} "
            f"exist; use {least} to {smem_plan(replace(config, num_ab_stage=None), num_b, formats).num_ab_stage}"
        )
    return launch_reason(config)


def launch_reason(config: KernelConfig) -> str | None:
    """Returns why too few CTAs are launched; None if there are enough for a tile."""
    if config.num_cta is not None and config.num_cta < config.cluster_size:
        return f"num_cta={config.num_cta}: {config.cluster_size} CTAs work on a tile, launch at least as many"
    return None


def interleave_reason(config: KernelConfig, weight_layout: str) -> str | None:
    """Returns why interleaved weights cannot be computed with ``config``: never, because a tile of 128 rows has whole periods."""
    return None


def resident_clusters(num_sms: int, cluster_size: int) -> int:
    """Returns the number of clusters resident at once if every CTA fills an SM."""
    return clusters_in_gpcs(num_sms, cluster_size, GPC_SMS, MEASURED_CLUSTERS)


def quantized_reason(config: KernelConfig, format: BlockFormat) -> str | None:
    """Returns why results of a format cannot be computed with ``config``: None, they always can."""
    return None
