"""Order in which a persistent CTA takes its tiles. Without stream-K every role walks the tiles itself.

Waves alternate in direction: the CTA that gets the first tile of one wave, the longest, gets the last tile of the next. Stream-K
partitions K tiles instead (``stream_k``), and the SCHEDULER role walks for all others (``scheduler``).
"""

from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.planning.config import KernelConfig

from ..common.group_table import WorkTile
from ..common.sides import TileSide, mma_sides
from ..common.split_k import k_tiles_of_cta


@dataclass(frozen=True)
class TilePart:
    """Part of a tile that a CTA computes.

    Attributes:
        tile: the tile; in a pair of CTAs, this CTA's half, which may lie beyond the group's weights.
        first, count: first K tile and number of K tiles.
        num_others: with stream-K, in the owner of the first K tile: the preceding clusters that have the other K tiles.
    """

    tile: WorkTile
    first: Int32
    count: Int32
    num_others: Int32 | None = None


@dataclass(frozen=True)
class TileWalk:
    """Distances to the CTA's next tiles.

    Attributes:
        step: tiles from the current one to the CTA's tile in the next wave.
        next_step: tiles from there to the one in the wave after.
    """

    step: Int32
    next_step: Int32


@dataclass(frozen=True)
class WalkedTiles:
    """Tiles of a CTA, for roles that walk by themselves. A place is a cursor of ``groups`` and a ``TileWalk``.

    Attributes:
        groups: ``GroupTable`` or ``DeviceGroups``.
        config: config of the kernel, without stream-K.
        begins_with_more: see ``k_tiles_of_cta``.
    """

    groups: object
    config: KernelConfig
    begins_with_more: bool = False

    @cute.jit
    def first(self) -> tuple:
        """Returns the place of the first tile of the CTA, or of the cluster where its CTAs share tiles."""
        size = self.config.cluster_size
        cta, num_cta = cute.arch.block_idx()[0] // size, cute.arch.grid_dim()[0] // size
        cursor = self.groups.first_cursor(cta, self.config.work_tile_mnk)
        return cursor, TileWalk(2 * (num_cta - 1 - cta) + 1, 2 * cta + 1)

    def has_tile(self, place: tuple):
        """Returns whether there is a tile at a place."""
        return self.groups.has_tile(place[0])

    @cute.jit
    def part(self, place: tuple) -> TilePart:
        """Returns this CTA's part of the tile at a place."""
        tile = self.groups.tile(place[0], self.config.work_tile_mnk)
        share = k_tiles_of_cta(tile.k_tile_cnt, self.config.split_k, self.begins_with_more)
        return TilePart(tile_of_cta(self.config, tile), *share)

    @cute.jit
    def next(self, place: tuple) -> tuple:
        """Returns the place of the next tile."""
        cursor, walk = place
        cursor = self.groups.next_cursor(cursor, walk.step, self.config.work_tile_mnk)
        return cursor, TileWalk(walk.next_step, walk.step)


def sides_of_cta(config: KernelConfig, tile: WorkTile) -> tuple[TileSide, TileSide]:
    """Returns the weight side and the token side of one CTA's tile."""
    return mma_sides(replace(config, decode_first=False, multicast_n=1), tile)


def tile_of_cta(config: KernelConfig, tile: WorkTile) -> WorkTile:
    """Returns this CTA's part of a cluster's tile: neighbouring weights, or neighbouring tokens where tokens are on MMA-M."""
    if config.num_m_cta == 1:
        return tile
    if config.swap_ab:
        return replace(tile, tile_n_idx=tile.tile_n_idx * config.num_m_cta + cute.arch.block_idx_in_cluster())
    return replace(tile, tile_m_idx=tile.tile_m_idx * config.num_m_cta + cute.arch.block_idx_in_cluster())
