"""The order in which a persistent CTA takes its tiles: every role walks it by itself.

Tiles are dealt to and fro: the CTA that gets the first tile of one wave, the longest, gets the last one of the next.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


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
def start_walk(groups: object, work_tile_mnk: tuple, split: cutlass.Constexpr) -> tuple:
    """Cursor of the first tile of the CTA, or of the ``split`` CTAs that share its tiles, and the way on."""
    cta, num_cta = cute.arch.block_idx()[0] // split, cute.arch.grid_dim()[0] // split
    return groups.first_cursor(cta, work_tile_mnk), TileWalk(2 * (num_cta - 1 - cta) + 1, 2 * cta + 1)
