"""Maps a warp's sums to results and results to the output: integers, fixed at compile time.

A *line* of the output is a row, or a column where columns are contiguous. Lines are counted along one side of the MMA, their
elements along the other. Interleaved weights hold the rows of both products in one operand, alternating by whole bands, so that
a lane has both sums of a result.
"""

from dataclasses import dataclass
from itertools import product

from nvfp4_cute.launch_table import INTERLEAVE

from .warp_tile import BAND, WarpTile


@dataclass(frozen=True)
class Pair:
    """Two neighbouring columns of a lane in an MMA's upper or lower half: ``acc[register + 0 or 1, i, j]``."""

    register: int
    i: int
    j: int


@dataclass(frozen=True)
class ResultTile:
    """Results of a warp.

    Attributes:
        warp_tile: layout of the warp's sums.
        weights_along_m: whether ``b`` is on the M side.
        weight_layout: layout of a dual GEMM's weights: "separate", or one of ``launch_table.INTERLEAVE``.
    """

    warp_tile: WarpTile
    weights_along_m: bool
    weight_layout: str

    @property
    def lines_along_n(self) -> bool:
        """Whether lines are counted along the MMA's N side, so that elements of a line are along its M side."""
        return self.warp_tile.runs_along_m

    @property
    def bands(self) -> tuple[int, int]:
        """Bands of results along M and along N."""
        m, n = self.warp_tile.bands_m, self.warp_tile.bands_n
        if self.weight_layout in INTERLEAVE:
            m, n = (m // 2, n) if self.weights_along_m else (m, n // 2)
        return m, n

    @property
    def lines(self) -> tuple[tuple[int, int], ...]:
        """(strip, band) of every group of eight lines."""
        strips = self.warp_tile.strips_n if self.lines_along_n else self.warp_tile.strips_m
        return tuple(product(range(strips), range(self.bands[self.lines_along_n])))

    @property
    def line_strips(self) -> int:
        """Neighbouring strips of eight elements per line."""
        return self.warp_tile.strips_m if self.lines_along_n else self.warp_tile.strips_n

    @property
    def line_bands(self) -> int:
        """Bands of elements per line."""
        return self.bands[not self.lines_along_n]

    def pair(self, which: int, line: tuple[int, int], element: tuple[int, int]) -> Pair:
        """Returns the sums of product ``which`` for a (strip, band) of lines and one of elements."""
        (strip_m, band_m), (strip_n, band_n) = (element, line) if self.lines_along_n else (line, element)
        tile, operand_m, operand_n = self.warp_tile, 0, 0
        if self.weight_layout in INTERLEAVE:
            if self.weights_along_m:
                band_m = self._interleaved(which, band_m)
            else:
                band_n = self._interleaved(which, band_n)
        else:
            operand_m, operand_n = which % tile.num_m, which % tile.num_n
        return Pair(
            2 * (band_m % 2),
            tile.mma_m.index((operand_m, strip_m, band_m // 2)),
            tile.mma_n.index((operand_n, strip_n, band_n)),
        )

    def _interleaved(self, which: int, band: int) -> int:
        """Returns the band of the operand that holds product ``which`` of a band of results."""
        width = INTERLEAVE[self.weight_layout] // BAND
        place = which if self.weight_layout == "interleaved_32_gate_first" else 1 - which
        return (2 * (band // width) + place) * width + band % width
