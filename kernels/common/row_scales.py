"""Float32 scales per row that multiply sums over all of K: those of INT8 operands, and global scales per row of NVFP4 ``a``.

Float32 roundings, in this order. INT8: the sum, times the scale of ``b``, times the scale of ``a``, times alpha. NVFP4: the
sum, times alpha, times the scale of ``a`` (see ``reference``).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import ptx
from .global_access import KEEP, load_words
from .group_table import WorkTile, select_slot
from .sides import SideOrigin, TileSide

SCALE_BYTES = 4

# Neighbouring accumulators of a row: two columns. The next two belong to the row eight rows further.
ROW_SUMS = 2


@dataclass(frozen=True)
class Scales:
    """Float32 scales of one operand in global memory, one row of scales per row or block, one scale per K tile or one per row.

    Attributes:
        addresses: address of the first scale, one per slot or one for all groups.
        batch_rows: rows of scales per batch.
    """

    addresses: list
    batch_rows: Int32

    @classmethod
    def of(cls, views: list) -> "Scales":
        """Reads the scales of an operand from the views of the launch table (``launch_args.OperandView``)."""
        return cls([view.scale for view in views], views[0].sf_batch_blocks)

    def row(self, slot: Int32, batch: Int32 | int, row: Int32, k_tiles: Int32) -> Int64:
        """Returns the address of a row's first scale."""
        index = Int64(batch * self.batch_rows + row) * k_tiles
        return select_slot(self.addresses, slot) + index * SCALE_BYTES


def rows_side(tile: WorkTile, first_row: Int32) -> TileSide:
    """Returns the side of ``a`` of a tile whose first row of the group is ``first_row``."""
    return TileSide(first_row, tile.m, SideOrigin(tile.a_row, tile.a_sf_block, tile.a_batch))


def load_row_scales(scales: Scales, tile: WorkTile, side: TileSide, rows: list) -> list:
    """Issues the loads of the scales of a lane's rows, counted from the tile's first; returns their words.

    Rows after the group's last one read the last row's scale; nobody uses their sums.
    """
    first = scales.row(tile.slot, side.origin.batch, Int32(side.origin.row), Int32(1))
    last = side.extent - 1
    places = [Int64(cutlass.min(side.first_row + row, last)) for row in rows]
    return [load_words(first + place * SCALE_BYTES, 1, KEEP)[0] for place in places]


@dataclass(frozen=True)
class RowScales:
    """Scales of a lane, as words.

    Attributes:
        of_m: scales of its rows on MMA-M: two per MMA, eight rows apart.
        of_n: scales of its columns on MMA-N: two per MMA.
        b_on_m: whether ``b`` is on MMA-M.
    """

    of_m: list
    of_n: list
    b_on_m: bool

    def scaled(self, total: Int32, row: int, column: int) -> Float32:
        """Returns a sum times both scales. row, column: indices into ``of_m`` and ``of_n``."""
        factors = [ptx.float_of(self.of_m[row]), ptx.float_of(self.of_n[column])]
        of_b, of_a = factors if self.b_on_m else factors[::-1]
        return total.to(Float32) * of_b * of_a

    def results(self, sums: cute.Tensor, first_row: int, first_column: int = 0) -> cute.Tensor:
        """Returns float32 results. Sum 4i + 2h + e belongs to row ``first_row + h`` and column ``first_column + 2i + e``."""
        results = cute.make_rmem_tensor(cute.size(sums), Float32)
        for index in range(cute.size(sums)):
            block, within = divmod(index, 2 * ROW_SUMS)
            row, column = divmod(within, ROW_SUMS)
            results[index] = self.scaled(
                sums[index], first_row + row, first_column + ROW_SUMS * block + column
            )
        return results
