"""Fp32 scales of FP8 operands: 1 x 128 of tokens, 128 x 128 of weights. How they are loaded, and how sums are promoted by them.

Each scale of a K tile has a row of its own in memory, so they come by small asynchronous copies, a lane each. Tensor cores sum up
128 values of K; then what they have is multiplied by both scales and added in fp32 (DeepSeek-V3 report, section 3.3.2).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm

from nvfp4_cute.formats.block_format import FP8_128x128

from . import ptx
from .group_table import WorkTile, ceil_div, select_slot
from .launch_args import OperandView
from .select import select
from .sides import TileSide
from .versions import inline_ptx
from .warp_schedule import WARP_SIZE

SCALE_BYTES = FP8_128x128.scale.bits // 8
# Products of a lane for eight tokens: two rows of weights by two neighbouring tokens.
STEP_VALUES = 4


@dataclass(frozen=True)
class Scales:
    """Fp32 scales of one operand in global memory, rows of as many as there are K tiles.

    Attributes:
        addresses: of the first one, an entry a slot, or one for all groups.
        batch_rows: rows from batch to batch.
    """

    addresses: list
    batch_rows: Int32

    @classmethod
    def of(cls, views: list[OperandView]) -> "Scales":
        """Of an operand as the launch table describes it."""
        return cls([view.scale for view in views], views[0].sf_batch_blocks)

    def row(self, slot: Int32, batch: Int32 | int, row: Int32, k_tiles: Int32) -> Int64:
        """Address of a row's first scale."""
        index = Int64(batch * self.batch_rows + row) * k_tiles
        return select_slot(self.addresses, slot) + index * SCALE_BYTES


@dataclass(frozen=True)
class ScalePair:
    """Of both operands of a product; of a dual GEMM also of the second product's weights, ``up``."""

    weights: Scales
    tokens: Scales
    up: Scales | None = None


@dataclass(frozen=True)
class TileScales:
    """Where a lane finds the scales of a tile that it copies.

    Attributes:
        tokens: address of the first scale of every 32nd token.
        weights: the same of a block of 128 weights, in as many lanes as there are: of one product, then of the other one.
        num_tokens, num_blocks: of the tile; blocks of all products.
    """

    tokens: list
    weights: Int64
    num_tokens: int
    num_blocks: int

    def copy(
        self, k_tile: Int32, to_tokens: Int32, to_weights: Int32, source_bytes: Int32 | None = None
    ) -> None:
        """Copy those of a K tile to shared memory, where scales follow each other. A whole warp calls this.

        source_bytes: 0 for zeros instead, without a look at memory; else a scale's.
        """
        lane_bytes, offset = cute.arch.lane_idx() * SCALE_BYTES, k_tile * SCALE_BYTES
        for i, source in enumerate(self.tokens):
            place = to_tokens + lane_bytes + i * (WARP_SIZE * SCALE_BYTES)
            _copy(place, source + offset, self.num_tokens - i * WARP_SIZE, source_bytes)
        _copy(to_weights + lane_bytes, self.weights + offset, self.num_blocks, source_bytes)


def scales_of_tile(
    scales: ScalePair, tile: WorkTile, weights: TileSide, tokens: TileSide, num_tokens: int, num_blocks: int
) -> TileScales:
    """Of a tile with so many tokens, and blocks of 128 weights of each product.

    Tokens behind the group's last one, and weights behind theirs, have the last one's scales: nobody uses their sums.
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
    """A scale of each of so many lanes, asynchronously (PTX ISA 9.7.9.25.3)."""
    size = [] if source_bytes is None else [source_bytes]
    inline_ptx(
        f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {SCALE_BYTES}{', {$r2}' * len(size)};",
        read_only_args=[target, source, *size],
        # The compiler knows what it can be, and PTX takes no constant.
        predicate=cute.arch.lane_idx() < num_lanes if num_lanes < WARP_SIZE else None,
    )


def promote(sums: cute.Tensor, products: list, words: list) -> None:
    """Add products times both scales, the product of which is rounded first, each with one more rounding.

    Args:
        sums, products: value 4i + 2h + e: of row h * 8 of the weights below a lane's first, and token 8i + e after its first.
        words: the scale of the weights, then those of the tokens, two of every eight.
    """
    weight, *tokens = [ptx.float_of(word) for word in words]
    for i, product in enumerate(products):
        token = i // STEP_VALUES * 2 + i % 2
        if i % STEP_VALUES < 2:
            tokens[token] = tokens[token] * weight
        sums[i] = fma(product, tokens[token], sums[i])


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded once."""
    return Float32(llvm.intr_fma(*(x.ir_value() for x in (a, b, c))))
