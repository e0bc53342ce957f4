"""Scales of result blocks that two warps share: each warp finds the code of its half, and the larger code is the block's.

Scales are powers of two, whose codes grow with magnitude; NaN has the largest code (``quantize_block.power_code``). Two warps
with neighbouring elements of the same lines synchronize on a named barrier of their own and exchange one byte per lane.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from ..common import ptx
from ..common.encode import Encoding
from ..common.quantize_block import BlockScale, inverse_power, largest, power_code
from ..common.select import select
from ..common.shared_access import load_shared_byte, store_shared_byte
from ..common.warp_schedule import WARP_SIZE
from .result_tile import ResultTile

MAX_WARPS = 8
CODES_BYTES = MAX_WARPS * WARP_SIZE
# Named barriers 1 and 2 belong to the teams (``mma``).
FIRST_PAIR_BARRIER_ID = 3


@dataclass(frozen=True)
class SharedCodes:
    """Exchange of a lane with the same lane of the warp that has the other half of its blocks.

    Attributes:
        own, other: shared addresses of the lane's byte and of the other lane's byte.
        barrier_id: named barrier of the two warps.
    """

    own: Int32
    other: Int32
    barrier_id: Int32

    @classmethod
    def of(cls, address: Int32, tile: ResultTile) -> "SharedCodes":
        """Returns the exchange of this thread. address: shared address of CODES_BYTES."""
        # Distance between the two warps, which are neighbours along the side of the elements.
        step = 1 if tile.lines_along_n else tile.warp_tile.warps_m
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        pair = warp // (2 * step) * step + warp % step
        other = warp + step - warp // step % 2 * (2 * step)
        return cls(
            address + warp * WARP_SIZE + lane,
            address + other * WARP_SIZE + lane,
            FIRST_PAIR_BARRIER_ID + pair,
        )

    def _meet(self) -> None:
        """Synchronizes both warps."""
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=2 * WARP_SIZE)

    def scale_of_blocks(self, values: cute.Tensor, encode: Encoding) -> BlockScale:
        """Returns the scale of the block whose half is ``values``. Both warps must call it."""
        code = power_code(largest([ptx.abs_f32(values[i]) for i in range(cute.size(values))]), encode)
        store_shared_byte(self.own, code)
        self._meet()
        other = load_shared_byte(self.other)
        self._meet()
        code = select(other > code, other, code)
        return BlockScale(None, code, inverse_power(code))
