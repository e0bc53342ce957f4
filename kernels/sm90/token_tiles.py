"""How a group's tokens are divided among its tiles along M.

Tiles are full but for the last one. With stream-K the last two share what is left evenly, to a step: two K tiles of 128 tokens
take less time than one of 192 and one of 64, and work that is dealt to the K tile need not come in tiles of one size.
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
    """Tiles of a group that have the same weights, of stream-K.

    Attributes:
        tile_tokens: of a full tile.
        count: of all tiles.
        num_full: tiles before the last two.
        first: tokens of the one behind these.
        second: of the last one behind that, 0 where there is none.
    """

    tile_tokens: int
    count: Int32
    num_full: Int32
    first: Int32
    second: Int32

    @classmethod
    def of(cls, m: Int32, tile_tokens: int) -> "TokenTiles":
        """Of so many tokens, at least one."""
        count, step = ceil_div(m, tile_tokens), least_step(tile_tokens)
        num_full = cutlass.max(count - 2, 0)
        rest = m - num_full * tile_tokens
        first = select(count > 1, ceil_div(rest, 2 * step) * step, rest)
        return cls(tile_tokens, count, num_full, first, rest - first)

    def before(self, index: Int32, full: Int32 | int, first: Int32) -> Int32:
        """What the tiles before one have in all, of which a full one has ``full`` and the one behind these ``first``."""
        return cutlass.min(index, self.num_full) * full + select(index > self.num_full, first, Int32(0))

    def first_token(self, index: Int32) -> Int32:
        """Of a tile, counted in the group."""
        return self.before(index, self.tile_tokens, self.first)

    def tokens(self, index: Int32) -> Int32:
        """How many a tile has."""
        last = select(index == self.num_full, self.first, self.second)
        return select(index < self.num_full, Int32(self.tile_tokens), last)


def first_token(tile: WorkTile, config: KernelConfig) -> Int32:
    """The tile's first token, counted in its group."""
    if config.stream_k:
        return TokenTiles.of(tile.m, config.work_tile_mnk[0]).first_token(tile.tile_m_idx)
    return tile.tile_m_idx * config.work_tile_mnk[0]


@cute.jit
def tokens_of_tile(tile: WorkTile, config: cutlass.Constexpr[KernelConfig]) -> Int32:
    """Tokens that the tile has."""
    tile_m = config.work_tile_mnk[0]
    if cutlass.const_expr(config.stream_k):
        return TokenTiles.of(tile.m, tile_m).tokens(tile.tile_m_idx)
    remaining = tile.m - tile.tile_m_idx * tile_m
    return remaining if remaining < tile_m else Int32(tile_m)
