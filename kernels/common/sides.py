"""Maps a work tile to the M and N side of the MMA; ``swap_ab`` puts the rows of ``b`` on the M side."""

from dataclasses import dataclass

from cutlass import Int32

from nvfp4_cute.planning.config import KernelConfig

from .group_table import WorkTile


@dataclass(frozen=True)
class SideOrigin:
    """Start of the group in an operand: row, 128-row scale block, batch."""

    row: Int32 | int
    sf_block: Int32 | int
    batch: Int32 | int


@dataclass(frozen=True)
class TileSide:
    """One side of a tile.

    Attributes:
        first_row: the tile's first row of the operand, counted in the group.
        extent: rows of the group.
    """

    first_row: Int32
    extent: Int32
    origin: SideOrigin


def mma_sides(config: KernelConfig, tile: WorkTile) -> tuple[TileSide, TileSide]:
    """Returns the tile's M side and N side."""
    tile_m, tile_n, _ = config.work_tile_mnk
    a = TileSide(tile.tile_m_idx * tile_m, tile.m, SideOrigin(tile.a_row, tile.a_sf_block, tile.a_batch))
    b = TileSide(tile.tile_n_idx * tile_n, tile.n, SideOrigin(0, 0, tile.b_batch))
    return (b, a) if config.swap_ab else (a, b)
