"""Loads float32 scales of FP8 operands (1 x 128 of tokens, 128 x 128 of weights) and promotes sums by them.

Every scale of a K tile is in another row of memory, so each lane copies one with a small cp.async. Tensor cores accumulate 128
values of K; their sums are multiplied by both scales and added in float32 (DeepSeek-V3 report, section 3.3.2).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm

from nvfp4_cute.formats.block_format import FP8_128x128

from . import ptx
from .group_table import WorkTile, ceil_div
from .row_scales import SCALE_BYTES, Scales
from .select import select
from .sides import TileSide
from .versions import inline_ptx
from .warp_schedule import WARP_SIZE

# Products per lane and eight tokens: two rows of weights times two neighbouring tokens.
STEP_VALUES = 4


@dataclass(frozen=True)
class ScalePair:
    """Scales of both operands; in a dual GEMM also ``up``, those of the second product's weights."""

    weights: Scales
    tokens: Scales
    up: Scales | None = None


@dataclass(frozen=True)
class TileScales:
    """Global addresses of the scales of a tile that a lane copies.

    Attributes:
        tokens: address of the first scale of every 32nd token.
        weights: address of the first scale of one block of 128 weights. The first lanes have one block each: those of the first
            product, then those of the second.
        num_tokens: tokens of the tile.
        num_blocks: blocks of weights of all products.
    """

    tokens: list
    weights: Int64
    num_tokens: int
    num_blocks: int

    def copy(
        self, k_tile: Int32, to_tokens: Int32, to_weights: Int32, source_bytes: Int32 | None = None
    ) -> None:
        """Copies the scales of a K tile to consecutive shared memory. All lanes of a warp must call it.

        source_bytes: 0 writes zeros without reading memory; otherwise the bytes of a scale.
        """
        lane_bytes, offset = cute.arch.lane_idx() * SCALE_BYTES, k_tile * SCALE_BYTES
        for i, source in enumerate(self.tokens):
            place = to_tokens + lane_bytes + i * (WARP_SIZE * SCALE_BYTES)
            _copy(place, source + offset, self.num_tokens - i * WARP_SIZE, source_bytes)
        _copy(to_weights + lane_bytes, self.weights + offset, self.num_blocks, source_bytes)


def scales_of_tile(
    scales: ScalePair, tile: WorkTile, weights: TileSide, tokens: TileSide, num_tokens: int, num_blocks: int
) -> TileScales:
    """Returns the scales of a tile with ``num_tokens`` tokens and ``num_blocks`` blocks of 128 weights per product.

    Tokens and weights after the group's last one use the last one's scale; nobody uses their sums.
    """
    lane = cute.arch.lane_idx()
    sources = []
    for first in range(0, num_tokens, WARP_SIZE):
        row = cutlass.min(tokens.first_row + first + lane, tile.m - 1) + tokens.origin.row
        sources.append(scales.tokens.row(tile.slot, tokens.origin.batch, row, tile.k_tile_cnt))
    rows = FP8_128x128.block_rows
    own = lane if scales.up is None else lane % num_blocks
    block = cutlass.min(weights.first_row // rows + own, ceil_div(tile.n, rows) - 1)
    place = tile.slot, weights.origin.batch, block, tile.k_tile_cnt
    of_weights = scales.weights.row(*place)
    if scales.up is None:
        return TileScales(sources, of_weights, num_tokens, num_blocks)
    of_weights = select(lane < num_blocks, of_weights, scales.up.row(*place))
    return TileScales(sources, of_weights, num_tokens, 2 * num_blocks)


def _copy(target: Int32, source: Int64, num_lanes: int, source_bytes: Int32 | None) -> None:
    """Copies one scale for each of the first ``num_lanes`` lanes with cp.async (PTX ISA 9.7.9.25.3)."""
    size = [] if source_bytes is None else [source_bytes]
    inline_ptx(
        f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {SCALE_BYTES}{', {$r2}' * len(size)};",
        read_only_args=[target, source, *size],
        # With 32 lanes the compiler folds the predicate into a constant, which PTX does not accept here.
        predicate=cute.arch.lane_idx() < num_lanes if num_lanes < WARP_SIZE else None,
    )


def promote(sums: cute.Tensor, products: list, words: list) -> None:
    """Adds products times the rounded product of both scales to sums, with one rounding per sum (FMA).

    Args:
        sums, products: value 4i + 2h + e belongs to weight row (lane's first + 8h) and token (lane's first + 8i + e).
        words: the scale of the weights, then those of the lane's tokens, two of every eight.
    """
    weight, *tokens = [ptx.float_of(word) for word in words]
    for i, product in enumerate(products):
        token = i // STEP_VALUES * 2 + i % 2
        if i % STEP_VALUES < 2:
            tokens[token] = tokens[token] * weight
        sums[i] = fma(product, tokens[token], sums[i])


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """Returns a * b + c, rounded once."""
    return Float32(llvm.intr_fma(*(x.ir_value() for x in (a, b, c))))
