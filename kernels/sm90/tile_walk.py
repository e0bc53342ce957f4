"""The order in which a persistent CTA takes its tiles. Without stream-K every role walks it by itself.

Tiles are dealt to and fro: the CTA that gets the first tile of one wave, the longest, gets the last one of the next. With
stream-K, K tiles are dealt (``even_shares``), and a role of its own walks for all others (``scheduler``).
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
    """What a CTA computes of a tile.

    Attributes:
        tile: the tile, of a pair's this CTA's part, which may lie beyond the group's weights.
        first, count: its K tiles.
        num_others: with stream-K, of the first K tile's: clusters that have the tile's other K tiles, those before this one.
    """

    tile: WorkTile
    first: Int32
    count: Int32
    num_others: Int32 | None = None


@dataclass(frozen=True)
class TileWalk:
    """The way to the next tile.

    Attributes:
        step: tiles to the CTA's tile in the next wave.
        next_step: from there to the one after.
    """

    step: Int32
    next_step: Int32


@dataclass(frozen=True)
class WalkedTiles:
    """A CTA's tiles, for a role that walks by itself. Its place is a cursor of ``groups`` and the way on.

    Attributes:
        groups: ``GroupTable`` or ``DeviceGroups``.
        config: of the kernel, without stream-K.
    """

    groups: object
    config: KernelConfig

    @cute.jit
    def first(self) -> tuple:
        """The place of the first tile of the CTA, or of the CTAs that share its tiles."""
        size = self.config.cluster_size
        cta, num_cta = cute.arch.block_idx()[0] // size, cute.arch.grid_dim()[0] // size
        cursor = self.groups.first_cursor(cta, self.config.work_tile_mnk)
        return cursor, TileWalk(2 * (num_cta - 1 - cta) + 1, 2 * cta + 1)

    def has_tile(self, place: tuple):
        """Whether there is a tile at the place."""
        return self.groups.has_tile(place[0])

    @cute.jit
    def part(self, place: tuple) -> TilePart:
        """What this CTA computes of the tile at the place."""
        tile = self.groups.tile(place[0], self.config.work_tile_mnk)
        return TilePart(tile_of_cta(self.config, tile), *k_tiles_of_cta(tile.k_tile_cnt, self.config.split_k))

    @cute.jit
    def next(self, place: tuple) -> tuple:
        """The place of the tile after."""
        cursor, walk = place
        cursor = self.groups.next_cursor(cursor, walk.step, self.config.work_tile_mnk)
        return cursor, TileWalk(walk.next_step, walk.step)


def sides_of_cta(config: KernelConfig, tile: WorkTile) -> tuple[TileSide, TileSide]:
    """Of one CTA's tile, which its cluster's is divided into: the part with weights and the one with tokens."""
    return mma_sides(replace(config, decode_first=False, multicast_n=1), tile)


def tile_of_cta(config: KernelConfig, tile: WorkTile) -> WorkTile:
    """This CTA's part of a cluster's tile: the CTAs of a pair have neighbouring weights, or tokens where those are on MMA-M."""
    if config.num_m_cta == 1:
        return tile
    if config.swap_ab:
        return replace(tile, tile_n_idx=tile.tile_n_idx * config.num_m_cta + cute.arch.block_idx_in_cluster())
    return replace(tile, tile_m_idx=tile.tile_m_idx * config.num_m_cta + cute.arch.block_idx_in_cluster())
