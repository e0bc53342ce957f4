"""Divides a group's tokens into tiles along M.

All tiles but the last are full. With stream-K the last two tiles share the remaining tokens evenly, rounded to a step: two K
tiles of 128 tokens take less time than one of 192 and one of 64, and stream-K does not need tiles of equal size.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.planning.arch.sm90 import least_step
from nvfp4_cute.planning.config import KernelConfig

from ..common.group_table import WorkTile, ceil_div
from ..common.select import select


@dataclass(frozen=True)
class TokenTiles:
    """Token counts of the tiles that share one tile of weights (stream-K).

    Attributes:
        tile_tokens: tokens of a full tile.
        count: number of tiles.
        num_full: number of tiles before the last two.
        first: tokens of the tile after the full ones.
        second: tokens of the last tile; 0 if ``first`` is the last.
    """

    tile_tokens: int
    count: Int32
    num_full: Int32
    first: Int32
    second: Int32

    @classmethod
    def of(cls, m: Int32, tile_tokens: int) -> "TokenTiles":
        """Divides ``m`` tokens; m is at least 1."""
        count, step = ceil_div(m, tile_tokens), least_step(tile_tokens)
        num_full = cutlass.max(count - 2, 0)
        rest = m - num_full * tile_tokens
        first = select(count > 1, ceil_div(rest, 2 * step) * step, rest)
        return cls(tile_tokens, count, num_full, first, rest - first)

    def before(self, index: Int32, full: Int32 | int, first: Int32) -> Int32:
        """Sums a quantity over the tiles before ``index``: ``full`` per full tile, ``first`` for the tile after them."""
        return cutlass.min(index, self.num_full) * full + select(index > self.num_full, first, Int32(0))

    def first_token(self, index: Int32) -> Int32:
        """Returns the first token of a tile, counted in the group."""
        return self.before(index, self.tile_tokens, self.first)

    def tokens(self, index: Int32) -> Int32:
        """Returns the number of tokens of a tile."""
        last = select(index == self.num_full, self.first, self.second)
        return select(index < self.num_full, Int32(self.tile_tokens), last)


def first_token(tile: WorkTile, config: KernelConfig) -> Int32:
    """Returns the tile's first token, counted in its group."""
    if config.stream_k:
        return TokenTiles.of(tile.m, config.work_tile_mnk[0]).first_token(tile.tile_m_idx)
    return tile.tile_m_idx * config.work_tile_mnk[0]


@cute.jit
def tokens_of_tile(tile: WorkTile, config: cutlass.Constexpr[KernelConfig]) -> Int32:
    """Returns the number of tokens of the tile."""
    tile_m = config.work_tile_mnk[0]
    if cutlass.const_expr(config.stream_k):
        return TokenTiles.of(tile.m, tile_m).tokens(tile.tile_m_idx)
    remaining = tile.m - tile.tile_m_idx * tile_m
    return remaining if remaining < tile_m else Int32(tile_m)
