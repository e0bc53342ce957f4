"""The order in which a persistent CTA takes its tiles: every role walks it by itself.

Tiles are dealt to and fro: the CTA that gets the first tile of one wave, the longest, gets the last one of the next.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.config import KernelConfig

from ..common.group_table import WorkTile


@dataclass(frozen=True)
class TileWalk:
    """The way to the next tile.

    Attributes:
        step: tiles to the CTA's tile in the next wave.
        next_step: from there to the one after.
    """

    step: Int32
    next_step: Int32

    def turned(self) -> "TileWalk":
        """The way from there on."""
        return TileWalk(self.next_step, self.step)


@cute.jit
def start_walk(groups: object, config: cutlass.Constexpr[KernelConfig]) -> tuple:
    """Cursor of the first tile of the CTA, or of the CTAs that share its tiles, and the way on."""
    size = config.cluster_size
    cta, num_cta = cute.arch.block_idx()[0] // size, cute.arch.grid_dim()[0] // size
    return groups.first_cursor(cta, config.work_tile_mnk), TileWalk(2 * (num_cta - 1 - cta) + 1, 2 * cta + 1)


@cute.jit
def tile_of_cta(groups: object, cursor: tuple, config: cutlass.Constexpr[KernelConfig]) -> WorkTile:
    """The tile at the cursor; of a pair's, the part of this CTA, which may lie beyond the group's weights."""
    tile = groups.tile(cursor, config.work_tile_mnk)
    if cutlass.const_expr(config.num_m_cta > 1):
        tile_n_idx = tile.tile_n_idx * config.num_m_cta + cute.arch.block_idx_in_cluster()
        tile = replace(tile, tile_n_idx=tile_n_idx)
    return tile
