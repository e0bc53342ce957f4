"""Weight-only on every architecture from sm_80 on.

``kernels/warp_mma``: warps multiply few rows per group with ``mma.sync``.
``cta_tile_shape_mnk`` is (weight rows, tokens, K) with ``swap_ab``: the rows of all warps along M, 32 per warp, over
both operands of a dual GEMM; the tokens of a tile; and the K of all warps along K, 128 per warp (64 for 8-bit weights).
``stream_k``: the K steps of all tiles are divided evenly between persistent CTAs, which add their partial sums of one
tile in device memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from nvfp4_cute.formats.block_format import (
    BFLOAT16,
    INT4_FORMATS,
    INT8,
    MXFP4,
    MXFP8,
    NVFP4,
    BlockFormat,
    Formats,
    FP8_128x128,
)
from nvfp4_cute.planning.arch import sm80, sm90_weight_only
from nvfp4_cute.planning.arch.base import (
    SmemUse,
    foreign_option_reason,
    live_sizes,
    multiple_reason,
    never_in_turns,
    no_estimates,
    paced_us,
    weight_only_mmas,
)
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import Form, GroupedProblem

ARCHS = (*sm80.ARCHS, "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
KERNEL = "warp_mma.grouped_gemm.WarpMmaGemm"
OPTIONS = ("stream_k", "use_warp_mma")
PAIR: Formats = (BFLOAT16, NVFP4)
MMA = weight_only_mmas((NVFP4, MXFP4, *MXFP8, FP8_128x128, INT8, *INT4_FORMATS.values()))
OUT_M_MAJOR, HAS_CHAINS, HAS_EARLY_WEIGHTS, TO_AND_FRO = False, False, False, False
prefetches_in_turns, estimates = never_in_turns, no_estimates
interleave_reason, quantized_reason = sm90_weight_only.interleave_reason, sm90_weight_only.quantized_reason
WARP_SIZE = 32
# Weight rows per warp; for each row, bytes per step and 4-bit values per step.
WARP_ROWS, STEP_BYTES, STEP_K = 32, 64, 128
# Steps that a CTA computes at a time, while those of the next iteration are loaded to registers.
STEPS_OF_TURN = 2
TOKEN_STEP = 8
TOKEN_CHOICES = (8, 16, 24, 32)
MOST_WARPS, WARPS_PER_SM, WARPS_PER_SM_OF_24 = 16, 16, 8
# Number of groups whose sizes fit a CTA's shared memory.
MOST_GROUPS = 1024
# Values of K in 16 bytes of weights.
K_MULTIPLE = 32
FP32_BYTES = 4
# Bytes of counters, which are 0 before and after a launch: one for each warp along weight rows of every CTA.
COUNTER_BYTES = 16 * 1024


@dataclass(frozen=True)
class Times:
    """Model of a launch of a config in us.

    Attributes:
        launch: of a launch without work.
        narrow, wide: us for each tile of tokens and MB of its weights, of 4 bits and of 8 bits.
    """

    launch: float
    narrow: float
    wide: float


# By tokens of a tile, and warps along weight rows and along K. Fitted to what is the fastest in
# ``bench/results/h200_weight_only.json``.
TIMES = {
    (8, 8, 1): Times(11.9, 0.307, 0.279),
    (8, 4, 1): Times(12.1, 0.294, 0.274),
    (16, 8, 1): Times(16.4, 0.338, 0.343),
    (16, 4, 1): Times(11.4, 0.396, 0.344),
    (24, 8, 1): Times(11.1, 0.56, 0.42),
    (32, 8, 1): Times(12.5, 0.554, 0.395),
    (32, 4, 2): Times(12.5, 0.54, 0.434),
}


@dataclass(frozen=True)
class Warps:
    """Warps of a CTA.

    Attributes:
        rows, k: number of warps along weight rows, and along K.
    """

    rows: int
    k: int

    @property
    def count(self) -> int:
        """Number of warps."""
        return self.rows * self.k

    @property
    def threads(self) -> int:
        """Number of threads."""
        return self.count * WARP_SIZE


def warps_of(config: KernelConfig) -> Warps:
    """Returns the arrangement of a CTA's warps."""
    rows, _, k = config.cta_tile_shape_mnk
    return Warps(rows // WARP_ROWS, k // STEP_K)


def ctas_per_sm(config: KernelConfig) -> int:
    """Returns the CTAs per SM."""
    warps = warps_of(config).count
    if config.cta_tile_shape_mnk[1] > 16:
        return max(WARPS_PER_SM_OF_24 // warps, 1)
    return max(WARPS_PER_SM // warps - (warps <= 4), 1)


def make_config(tokens: int, rows: int, k: int, stream_k: bool = True) -> KernelConfig:
    """Returns the config with ``tokens`` per tile, and ``rows`` x ``k`` warps."""
    shape = (rows * WARP_ROWS, tokens, k * STEP_K)
    return KernelConfig(
        shape, num_ab_stage=STEPS_OF_TURN, num_acc_stage=1, swap_ab=True, stream_k=stream_k, use_warp_mma=True
    )


def resolve(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> KernelConfig:
    """Returns ``config`` with an explicit stage count."""
    return replace(config, num_ab_stage=STEPS_OF_TURN)


def unsupported_reason(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> str | None:
    """Returns why this family cannot build ``config``, with the nearest legal value; None if it can."""
    foreign = foreign_option_reason(config, OPTIONS)
    if foreign is not None:
        return foreign
    shape = rows, tokens, k = config.cta_tile_shape_mnk
    if not (config.swap_ab and config.use_warp_mma) or config.num_acc_stage != 1 or config.split_k != 1:
        return (
            "weights are on the M side, and a CTA has one tile's sums: use swap_ab=True, use_warp_mma=True, num_acc_stage=1, "
            "split_k=1"
        )
    if config.num_ab_stage not in (None, STEPS_OF_TURN):
        return (
            f"num_ab_stage={config.num_ab_stage}: registers hold {STEPS_OF_TURN} steps; use {STEPS_OF_TURN}"
        )
    if tokens not in TOKEN_CHOICES:
        nearest = next((t for t in TOKEN_CHOICES if t >= tokens), TOKEN_CHOICES[-1])
        return f"cta_tile_shape_mnk={shape}: a tile has 8, 16, 24 or 32 tokens; use N tile {nearest}"
    warps, counts = warps_of(config), (1, 2, 4, 8, 16)
    is_whole = (warps.rows * WARP_ROWS, warps.k * STEP_K) == (rows, k)
    if not is_whole or warps.rows not in counts or warps.k not in counts or warps.count > MOST_WARPS:
        return (
            f"cta_tile_shape_mnk={shape}: a warp has {WARP_ROWS} rows and K of {STEP_K}, and there are 1, 2, 4, 8 or 16 warps; "
            f"use M tile {4 * WARP_ROWS}, K tile {2 * STEP_K}"
        )
    if warps.rows * 8 < tokens:
        return f"cta_tile_shape_mnk={shape}: warps bring in 8 tokens each; use N tile {warps.rows * 8}"
    return None


CANDIDATES = DUAL_CANDIDATES = tuple(make_config(*key) for key in TIMES)
BATCH_INVARIANT = tuple(replace(config, stream_k=False) for config in CANDIDATES if warps_of(config).k == 1)
"""Candidates of batch-invariant products, whatever their sizes: one warp along K, and whole tiles."""
DEFAULT_CONFIG = CANDIDATES[0]


def candidates(
    num_b: int = 1,
    weight_layout: str = "separate",
    out_format: BlockFormat | None = None,
    form: Form = "list",
    formats: Formats = PAIR,
) -> tuple[KernelConfig, ...]:
    """Returns the candidates of ``choose``. Results are not quantized."""
    return CANDIDATES if out_format is None else ()


def work_reason(what: str, sizes: Iterable[tuple[int, int, int]], config: KernelConfig) -> str | None:
    """Returns why there is no kernel for a K; None if there is one."""
    return multiple_reason((k for _, _, k in sizes), K_MULTIPLE)


def smem_plan(config: KernelConfig, num_b: int = 1, formats: Formats = PAIR) -> SmemUse:
    """Raises NotImplementedError, because weights are in registers and the kernel allocates what tokens need."""
    raise NotImplementedError("warp_mma has no stages in shared memory")


def resident_clusters(num_sms: int, cluster_size: int) -> int:
    """Returns the number of SMs: there are no clusters."""
    return num_sms


def clusters_at_once(config: KernelConfig, num_sms: int) -> int:
    """Returns the CTAs that a GPU runs at once."""
    return num_sms * ctas_per_sm(config)


def most_clusters(sizes: Sequence[tuple[int, int, int]], config: KernelConfig, is_ragged: bool) -> int:
    """Returns the largest number of steps of a launch.

    Assumes a dual GEMM, whose operands have half of the rows each, and 8-bit weights.
    """
    tokens, rows, k = config.work_tile_mnk
    rows, halves = rows // 2, 2
    if is_ragged:
        (_, n, depth), total = sizes[0], sum(m for m, _, _ in sizes)
        return (min(len(sizes), total) + total // tokens) * -(-n // rows) * -(-halves * depth // k)
    return sum(-(-m // tokens) * -(-n // rows) * -(-halves * depth // k) for m, n, depth in sizes)


def workspace_bytes(config: KernelConfig, rows: np.ndarray, k: np.ndarray, num_cta: int) -> int:
    """Returns the bytes of the sums that CTAs exchange: of the end of one tile and the beginning of another."""
    tile_rows, tokens, _ = config.cta_tile_shape_mnk
    return 2 * num_cta * tile_rows * tokens * FP32_BYTES


def choose(problem: GroupedProblem, num_sms: int) -> KernelConfig:
    """Returns the candidate with the smallest modelled time. See :func:`.sm90_weight_only.choose`."""
    is_ragged = problem.form == "ragged"
    return _choose(
        problem.sizes, num_sms, problem.num_b, is_ragged, problem.b_format, problem.batch_invariant
    )


@lru_cache(maxsize=4096)
def _choose(
    sizes: tuple[tuple[int, int, int], ...],
    num_sms: int,
    num_b: int,
    is_ragged: bool,
    b_format: BlockFormat,
    is_batch_invariant: bool,
) -> KernelConfig:
    tried = BATCH_INVARIANT if is_batch_invariant else CANDIDATES
    if not any(min(size) > 0 for size in sizes):
        return tried[0]
    return min(tried, key=lambda config: estimate_us(sizes, config, num_sms, num_b, is_ragged, b_format))


def estimate_us(
    sizes: tuple[tuple[int, int, int], ...],
    config: KernelConfig,
    num_sms: int,
    num_b: int = 1,
    is_ragged: bool = False,
    b_format: BlockFormat = NVFP4,
    arch: str = "sm_90a",
) -> float:
    """Returns the modelled time of a launch in us: a tile of tokens takes as long as it has weights.

    At least one group must have work. See :func:`choose` for the arguments.
    """
    tokens = config.cta_tile_shape_mnk[1]
    warps = warps_of(config)
    times = TIMES[tokens, warps.rows, warps.k]
    tiles_bytes = read = 0.0
    for (m, n, k), count in live_sizes(sizes, is_ragged).items():
        weights = count * num_b * b_format.nbytes(n, k)
        tiles_bytes += -(-m // tokens) * weights
        read += weights
    per_mb = times.wide if b_format.element.bits == 8 else times.narrow
    return times.launch + paced_us(arch, num_sms, tiles_bytes / 1e6 * per_mb, read)
