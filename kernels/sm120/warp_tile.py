"""Which rows and columns of a CTA tile each MMA warp computes: plain integers, fixed at compile time.

The 128x4 layout keeps the scales of rows r, r + 32, r + 64 and r + 96 side by side. So a warp takes *strips* of 8 rows
that lie 32 rows apart: lane 4g + t loads the scale word of row g of strip t, all 32 lanes from 32 different banks, and
the MMA picks the lanes of a quad by its thread selectors.

M side (128 rows): warp_m w has strips 8w + 32i, i = 0..3; strips 2p and 2p + 1 are rows 0-7 and 8-15 of MMA p.
N side (8 to 128 columns): strips 8q + 32j are the columns of one MMA each; two warps share the q, where there are two.
"""

from dataclasses import dataclass

STRIP = 8
STRIP_PITCH = 32
WARPS_M = STRIP_PITCH // STRIP
NUM_MMA_M = 2


@dataclass(frozen=True)
class WarpTile:
    """Tile of one MMA warp in a CTA tile of 128 x tile_n."""

    tile_n: int

    @property
    def strips_per_group(self) -> int:
        """Values of q: strips in 32 consecutive columns."""
        return min(self.tile_n, STRIP_PITCH) // STRIP

    @property
    def num_group(self) -> int:
        """Values of j: groups of 32 columns."""
        return max(self.tile_n // STRIP_PITCH, 1)

    @property
    def warps_n(self) -> int:
        """Warps that share the columns."""
        return min(2, self.strips_per_group)

    @property
    def strips_per_warp(self) -> int:
        """Values of q of one warp, consecutive."""
        return self.strips_per_group // self.warps_n

    @property
    def num_mma_n(self) -> int:
        """MMAs of one warp along N: index ``q_idx * num_group + j``."""
        return self.strips_per_warp * self.num_group

    @property
    def num_warps(self) -> int:
        """MMA warps of a CTA."""
        return WARPS_M * self.warps_n

    @property
    def n_offsets(self) -> tuple[int, ...]:
        """First column of each MMA along N, from the warp's first column ``8 * strips_per_warp * warp_n``."""
        return tuple(
            STRIP * q + STRIP_PITCH * j for q in range(self.strips_per_warp) for j in range(self.num_group)
        )
