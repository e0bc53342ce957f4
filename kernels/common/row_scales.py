"""Fp32 scales of rows, such as of a token or of an output channel: sums of products of integers, exact over all of K, are
multiplied by them last.

Roundings, in this order: a sum to fp32, times the scale of ``b``, times the scale of ``a`` (``reference``).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import ptx
from .fp32_scales import SCALE_BYTES, Scales
from .global_access import KEEP, load_words
from .group_table import WorkTile
from .sides import TileSide

# Sums of an MMA that a lane has one after the other: two columns, then the same of a row eight further on.
ROW_SUMS = 2


def load_row_scales(scales: Scales, tile: WorkTile, side: TileSide, rows: list) -> list:
    """Words of the scales of a lane's rows of an operand, counted from the tile's first. They are asked for here.

    Rows behind the group's last one have the scale of that: nobody uses their sums.
    """
    first = scales.row(tile.slot, side.origin.batch, Int32(side.origin.row), Int32(1))
    last = side.extent - 1
    places = [Int64(cutlass.min(side.first_row + row, last)) for row in rows]
    return [load_words(first + place * SCALE_BYTES, 1, KEEP)[0] for place in places]


@dataclass(frozen=True)
class RowScales:
    """Words of a lane's scales.

    Attributes:
        of_m: of its rows of ``b``, or of ``a``, on MMA-M: two of every MMA, eight rows apart.
        of_n: of its columns on MMA-N: two of every MMA.
        b_on_m: whether the rows are of ``b``.
    """

    of_m: list
    of_n: list
    b_on_m: bool

    def scaled(self, total: Int32, row: int, column: int) -> Float32:
        """A sum times both scales. row, column: of ``of_m`` and ``of_n``."""
        factors = [ptx.float_of(self.of_m[row]), ptx.float_of(self.of_n[column])]
        of_b, of_a = factors if self.b_on_m else factors[::-1]
        return total.to(Float32) * of_b * of_a

    def results(self, sums: cute.Tensor, first_row: int, first_column: int = 0) -> cute.Tensor:
        """Fp32 results of sums: value 4i + 2h + e is of row ``first_row + h``, column ``first_column + 2i + e``."""
        results = cute.make_rmem_tensor(cute.size(sums), Float32)
        for index in range(cute.size(sums)):
            block, within = divmod(index, 2 * ROW_SUMS)
            row, column = divmod(within, ROW_SUMS)
            results[index] = self.scaled(
                sums[index], first_row + row, first_column + ROW_SUMS * block + column
            )
        return results
