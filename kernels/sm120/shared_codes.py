"""Scales of blocks of results whose halves two warps have: each finds the code of its own, and the larger one is the block's.

Scales are powers of two, whose codes rise with magnitudes; that of NaN is the largest (``quantize_block.power_code``). Two warps
that have neighbouring elements of the same lines meet at a named barrier of their own, and pass each other a byte a lane.
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
# Barriers 1 and 2 are those of the teams' turns (``mma``).
FIRST_PAIR_BARRIER_ID = 3


@dataclass(frozen=True)
class SharedCodes:
    """What a lane passes to, and gets from, the same lane of the warp with the other half of its blocks.

    Attributes:
        own, other: shared addresses of its byte, and of the other one's.
        barrier_id: of the two warps.
    """

    own: Int32
    other: Int32
    barrier_id: Int32

    @classmethod
    def of(cls, address: Int32, tile: ResultTile) -> "SharedCodes":
        """Of this thread. ``address``: of CODES_BYTES of shared memory."""
        # How far apart the two warps are: neighbours along the side that elements lie along.
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
        """Until both warps are here."""
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=2 * WARP_SIZE)

    def scale_of_blocks(self, values: cute.Tensor, encode: Encoding) -> BlockScale:
        """The scale of the block whose half are ``values``. Both warps call this."""
        code = power_code(largest([ptx.abs_f32(values[i]) for i in range(cute.size(values))]), encode)
        store_shared_byte(self.own, code)
        self._meet()
        other = load_shared_byte(self.other)
        self._meet()
        code = select(other > code, other, code)
        return BlockScale(None, code, inverse_power(code))
