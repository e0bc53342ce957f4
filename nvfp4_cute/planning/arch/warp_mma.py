"""Every architecture from sm_80 on, weight-only: ``kernels/warp_mma``, whose warps multiply a few rows a group with ``mma.sync``.

``cta_tile_shape_mnk`` is (weight rows, tokens, K) with ``swap_ab``: rows of all weights of the CTA's warps side by side, 32 a warp,
tokens of a tile, and K of a step of all warps, 64 bytes of a row of weights a warp. ``stream_k``: steps of all tiles are dealt
evenly to persistent CTAs, which add up in device memory what they have of one tile.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from nvfp4_cute.formats.block_format import INT4_FORMATS, INT8, MXFP4, MXFP8, NVFP4, BlockFormat, FP8_128x128
from nvfp4_cute.planning.arch import sm80
from nvfp4_cute.planning.arch.base import foreign_option_reason
from nvfp4_cute.planning.config import KernelConfig

ARCHS = (*sm80.ARCHS, "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
KERNEL = "warp_mma.grouped_gemm.WarpMmaGemm"
OPTIONS = ("stream_k",)
PAIRS = tuple(
    (None, b_format) for b_format in (NVFP4, MXFP4, *MXFP8, FP8_128x128, INT8, *INT4_FORMATS.values())
)
WARP_SIZE = 32
# A warp's weight rows, and bytes of each of them in a step.
WARP_ROWS, STEP_BYTES = 32, 64
# Steps that a CTA takes at a time, while those of the next turn are on their way to registers.
STEPS_OF_TURN = 2
TOKEN_STEP = 8
TOKEN_CHOICES = (8, 16, 32)
# Warps along weight rows and along K that are tried, by tokens of a tile: 16 an SM, or 8 where sums take half of the registers.
WARPS = {8: ((8, 1), (4, 2), (2, 4)), 16: ((8, 2), (4, 2)), 32: ((8, 2), (4, 2))}
MOST_WARPS, WARPS_PER_SM, WARPS_PER_SM_OF_32 = 16, 16, 8
# Groups whose sizes a CTA's shared memory has room for.
MOST_GROUPS = 1024
# Of K, where weights lie in pieces of 16 bytes.
K_MULTIPLE = 32
FP32_BYTES = 4
# In front of sums that are handed over: counters, 0 before and after a launch.
COUNTER_BYTES = 64 * 1024


def step_k(b_format: BlockFormat) -> int:
    """K of a step of one warp."""
    return b_format.elements(STEP_BYTES)


@dataclass(frozen=True)
class Warps:
    """Of a CTA.

    Attributes:
        rows, k: side by side along weight rows, and along K.
    """

    rows: int
    k: int

    @property
    def count(self) -> int:
        """All of them."""
        return self.rows * self.k

    @property
    def threads(self) -> int:
        """All of them."""
        return self.count * WARP_SIZE


def warps_of(config: KernelConfig, num_b: int, b_format: BlockFormat) -> Warps:
    """How warps of a CTA are arranged."""
    rows, _, k = config.cta_tile_shape_mnk
    return Warps(rows * num_b // WARP_ROWS, k // step_k(b_format))


def ctas_per_sm(config: KernelConfig, num_b: int = 1, b_format: BlockFormat = NVFP4) -> int:
    """CTAs that share an SM."""
    warps = WARPS_PER_SM if config.cta_tile_shape_mnk[1] <= 16 else WARPS_PER_SM_OF_32
    return max(warps // warps_of(config, num_b, b_format).count, 1)


def partial_bytes(config: KernelConfig, num_b: int, num_cta: int) -> int:
    """Sums that CTAs hand over: of the end of one tile and of the beginning of another."""
    rows, tokens, _ = config.cta_tile_shape_mnk
    return 2 * num_cta * rows * num_b * tokens * FP32_BYTES


def make_config(tokens: int, rows: int, k: int, num_b: int, b_format: BlockFormat) -> KernelConfig:
    """Of so many tokens a tile, and warps along rows and along K."""
    shape = (rows * WARP_ROWS // num_b, tokens, k * step_k(b_format))
    return KernelConfig(shape, num_ab_stage=STEPS_OF_TURN, num_acc_stage=1, swap_ab=True, stream_k=True)


def resolve(config: KernelConfig, num_b: int = 1, b_format: BlockFormat = NVFP4) -> KernelConfig:
    """``config`` with its stage count made explicit."""
    return replace(config, num_ab_stage=STEPS_OF_TURN)


def unsupported_reason(config: KernelConfig, num_b: int = 1, b_format: BlockFormat = NVFP4) -> str | None:
    """Why this family cannot build ``config``, with the nearest legal value; None where it can."""
    foreign = foreign_option_reason(config, OPTIONS)
    if foreign is not None:
        return foreign
    shape = rows, tokens, k = config.cta_tile_shape_mnk
    if not (config.swap_ab and config.stream_k) or config.num_acc_stage != 1 or config.split_k != 1:
        return (
            "weights are on the M side, and K steps are dealt evenly: use swap_ab=True, stream_k=True, num_acc_stage=1, "
            "split_k=1"
        )
    if config.num_ab_stage not in (None, STEPS_OF_TURN):
        return f"num_ab_stage={config.num_ab_stage}: registers hold {STEPS_OF_TURN} steps; use {STEPS_OF_TURN}"
    if tokens not in TOKEN_CHOICES:
        nearest = next((t for t in TOKEN_CHOICES if t >= tokens), TOKEN_CHOICES[-1])
        return f"cta_tile_shape_mnk={shape}: a tile has 8, 16 or 32 tokens; use N tile {nearest}"
    step = step_k(b_format)
    warps = warps_of(config, num_b, b_format)
    legal = warps.rows * WARP_ROWS == rows * num_b and warps.k * step == k
    counts = (1, 2, 4, 8, 16)
    if not legal or warps.rows not in counts or warps.k not in counts or warps.count > MOST_WARPS:
        return (
            f"cta_tile_shape_mnk={shape}: a warp has {WARP_ROWS // num_b} rows of each operand and {step} of K, and there are 1, 2, 4, "
            f"8 or 16 warps; use M tile {4 * WARP_ROWS // num_b}, K tile {2 * step}"
        )
    if warps.rows * 8 < tokens:
        return f"cta_tile_shape_mnk={shape}: warps bring in 8 tokens each; use N tile {warps.rows * 8}"
    return None


def candidates(num_b: int = 1, b_format: BlockFormat = NVFP4) -> tuple[KernelConfig, ...]:
    """What ``choose`` chooses from."""
    return tuple(
        make_config(tokens, rows, k, num_b, b_format)
        for tokens in TOKEN_CHOICES
        for rows, k in WARPS[tokens]
    )


def clusters_at_once(config: KernelConfig, num_sms: int) -> int:
    """CTAs that a GPU runs at once."""
    return num_sms * ctas_per_sm(config)


def most_tiles(sizes: Sequence[tuple[int, int, int]], config: KernelConfig, is_ragged: bool) -> int:
    """Steps that a launch has at most, of the fewest weight rows a tile."""
    tokens, rows, k = config.work_tile_mnk
    if is_ragged:
        (_, n, depth), total = sizes[0], sum(m for m, _, _ in sizes)
        return (min(len(sizes), total) + total // tokens) * -(-n // rows) * -(-depth // k)
    return sum(-(-m // tokens) * -(-n // rows) * -(-depth // k) for m, n, depth in sizes)
