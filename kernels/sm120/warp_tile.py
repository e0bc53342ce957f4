"""Rows and columns of a CTA tile per MMA warp: plain integers, fixed at compile time.

The 128x4 layout stores the scales of rows r, r + 32, r + 64 and r + 96 next to each other. So a warp takes *strips* of 8 rows,
one in each *band* of 32 rows: lane 4g + t loads the scale word of row g of the strip in band t, all 32 lanes from different
banks, and the MMA selects the lanes of a quad by its thread selectors.

M side (128 rows in 4 bands, or 64 rows of each of two operands): an MMA takes the strips of two neighbouring bands as its rows
0-7 and 8-15. N side (8 to 128 columns in 1 to 4 bands): an MMA takes one strip as its 8 columns.

A dual GEMM has two operands on one side: a warp takes equal rows of both.
"""

from dataclasses import dataclass
from itertools import product

STRIP = 8
BAND = 32
STRIPS_PER_BAND = BAND // STRIP
BANDS_M = 4


@dataclass(frozen=True)
class WarpTile:
    """Division of a CTA tile of tile_m x tile_n among the MMA warps.

    Attributes:
        tile_n: columns of the tile.
        num_team: 1: all warps work on one tile. 2: two teams of four warps alternate tile by tile.
        num_m, num_n: operands on the M side and on the N side.
        runs_along_m: whether results along the M side, rather than the N side, are contiguous in memory.
        tile_m: rows of the tile of each operand on the M side.
    """

    tile_n: int
    num_team: int
    num_m: int = 1
    num_n: int = 1
    runs_along_m: bool = False
    tile_m: int = BANDS_M * BAND

    @property
    def bands_m(self) -> int:
        """Bands of rows per operand on the M side."""
        return self.tile_m // BAND

    @property
    def bands_n(self) -> int:
        """Bands that contain the columns."""
        return max(self.tile_n // BAND, 1)

    @property
    def warps_n(self) -> int:
        """Warps of a team along N: as many as leave each warp two strips that are contiguous in memory.

        These 16 results are a sector of 16-bit results, or a block of NVFP4.
        """
        return min(4 if self.runs_along_m and self.num_team == 1 else 2, self.tile_n // STRIP)

    @property
    def warps_m(self) -> int:
        """Warps of a team along M."""
        return min(8 // self.num_team // self.warps_n, STRIPS_PER_BAND)

    @property
    def team_warps(self) -> int:
        """Warps that work on one tile."""
        return self.warps_m * self.warps_n

    @property
    def num_warps(self) -> int:
        """MMA warps of a CTA."""
        return self.num_team * self.team_warps

    @property
    def strips_m(self) -> int:
        """Consecutive strips of every band that a warp takes along M."""
        return STRIPS_PER_BAND // self.warps_m

    @property
    def strips_n(self) -> int:
        """Consecutive strips of every band that a warp takes along N."""
        return min(self.tile_n, BAND) // STRIP // self.warps_n

    @property
    def mma_m(self) -> tuple[tuple[int, int, int], ...]:
        """(operand, strip, pair of bands) of each MMA of a warp along M."""
        return tuple(product(range(self.num_m), range(self.strips_m), range(self.bands_m // 2)))

    @property
    def mma_n(self) -> tuple[tuple[int, int, int], ...]:
        """(operand, strip, band) of each MMA of a warp along N."""
        return tuple(product(range(self.num_n), range(self.strips_n), range(self.bands_n)))
