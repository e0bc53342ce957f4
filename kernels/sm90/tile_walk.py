"""The order in which a persistent CTA takes its tiles: every role walks it by itself.

Tiles are dealt to and fro: the CTA that gets the first tile of one wave, the longest, gets the last one of the next. With
stream-K, K tiles are dealt (``even_shares``).
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.config import KernelConfig

from ..common.group_table import WorkTile
from ..common.split_k import k_tiles_of_cta
from .even_shares import EvenWalk, Placed, place_at


@dataclass(frozen=True)
class TileWalk:
    """The way to the next tile.

    Attributes:
        step: tiles to the CTA's tile in the next wave.
        next_step: from there to the one after.
    """

    step: Int32
    next_step: Int32

    def has_tile(self, groups: object, cursor: tuple):
        """Whether there is a tile at the cursor."""
        return groups.has_tile(cursor)

    def turned(self) -> "TileWalk":
        """The way from there on."""
        return TileWalk(self.next_step, self.step)


@dataclass(frozen=True)
class TilePart:
    """What a CTA computes of a tile.

    Attributes:
        tile: the tile, of a pair's this CTA's part, which may lie beyond the group's weights.
        first, count: its K tiles.
        placed: with stream-K the tile's place among all work.
    """

    tile: WorkTile
    first: Int32
    count: Int32
    placed: Placed | None


@cute.jit
def start_walk(groups: object, config: cutlass.Constexpr[KernelConfig]) -> tuple:
    """Cursor of the first tile of the CTA, or of the CTAs that share its tiles, and the way on."""
    if cutlass.const_expr(config.deal_k):
        return EvenWalk.start(groups, config)
    size = config.cluster_size
    cta, num_cta = cute.arch.block_idx()[0] // size, cute.arch.grid_dim()[0] // size
    return groups.first_cursor(cta, config.work_tile_mnk), TileWalk(2 * (num_cta - 1 - cta) + 1, 2 * cta + 1)


@cute.jit
def part_of_cta(
    groups: object, cursor: tuple, walk: object, config: cutlass.Constexpr[KernelConfig]
) -> tuple:
    """What this CTA computes of the tile at the cursor, and the way to the next tile."""
    if cutlass.const_expr(config.deal_k):
        placed = place_at(groups, cursor, config)
        tile, first = placed.tile, placed.k_tile(cursor[0])
        count = placed.k_tile(walk.end) - first
        walk = walk.behind(placed, cursor, groups, config.work_tile_mnk)
    else:
        placed, tile = None, groups.tile(cursor, config.work_tile_mnk)
        first, count = k_tiles_of_cta(tile.k_tile_cnt, config.split_k)
    if cutlass.const_expr(config.num_m_cta > 1):
        tile_n_idx = tile.tile_n_idx * config.num_m_cta + cute.arch.block_idx_in_cluster()
        tile = replace(tile, tile_n_idx=tile_n_idx)
    return TilePart(tile, first, count, placed), walk
