"""Adds up the partial sums of a tile that several warps or several CTAs compute, in ascending order of K.

A CTA with a part of a tile stores its partial sums to device memory and increments a counter. The last CTA to do so adds up the
partial sums of all CTAs and resets the counter to 0. No CTA waits for another, so CTAs need not run at the same time.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from nvfp4_cute.planning.arch.warp_mma import WARP_SIZE, Warps

from ..common import ptx
from ..common.global_access import global_scalar, store_words
from ..common.select import select
from ..common.versions import inline_ptx
from .operands import VECTOR_BYTES, VECTOR_WORDS, Lane, load_or_zeros
from .places import Place, Shares

# MMAs of a warp along its weight rows, of 16 rows each.
MMA_M = 2
# CTAs whose partial sums are loaded at once.
ADDED_AT_ONCE = 4


@dataclass(frozen=True)
class Sums:
    """Memory for partial sums.

    Attributes:
        counters: address of an int32 per CTA and per warp along weight rows.
        workspace: address of the partial sums of CTAs.
        shared: shared memory for sums of warps after the first along K: (VALUE, LANE, VECTOR, ROW_WARP, K_WARP - 1), or None.
        vectors: number of MMAs of a lane, with four sums each.
    """

    counters: Int64
    workspace: Int64
    shared: Any
    warps: Warps
    vectors: int

    @cute.jit
    def add_warps(self, acc: Any, lane: Lane):
        """Adds the sums of all warps with the same rows to those of the first one along K. All warps of the CTA must call it."""
        shared, vectors = self.shared, self.vectors
        if lane.k_warp > 0:
            for v in cutlass.range_constexpr(vectors):
                for r in cutlass.range_constexpr(4):
                    shared[r, lane.lane, v, lane.row_warp, lane.k_warp - 1] = acc[r, v % MMA_M, v // MMA_M]
        cute.arch.sync_threads()
        if lane.k_warp == 0:
            for other in cutlass.range_constexpr(self.warps.k - 1):
                for v in cutlass.range_constexpr(vectors):
                    for r in cutlass.range_constexpr(4):
                        more = shared[r, lane.lane, v, lane.row_warp, other]
                        acc[r, v % MMA_M, v // MMA_M] = acc[r, v % MMA_M, v // MMA_M] + more
        cute.arch.sync_threads()

    @cute.jit
    def add_ctas(self, acc: Any, shares: Shares, place: Place, begin: Int32, lane: Lane) -> Boolean:
        """Stores partial sums of a tile, from step ``begin`` on.

        Returns whether this CTA is the last one. Then ``acc`` has the sums of the whole tile.
        """
        first, last = shares.owner(place.first), shares.owner(place.first + place.steps - 1)
        cta = cute.arch.block_idx()[0]
        own = self._sums_of(cta, begin == 0, lane)
        for v in cutlass.range_constexpr(self.vectors):
            words = [ptx.bits_of(acc[r, v % MMA_M, v // MMA_M]) for r in range(4)]
            store_words(own + v * (WARP_SIZE * VECTOR_BYTES), words)
        # Each tile has one first CTA, and a CTA is the first of at most one tile that others continue, so counters are distinct.
        counter = self.counters + (first * self.warps.rows + lane.row_warp) * 4
        cute.arch.sync_warp()
        before = Int32(0)
        if lane.lane == 0:
            before = inline_ptx(
                "atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], 1;",
                write_only_types=[Int32],
                read_only_args=[counter],
            )
        cute.arch.sync_warp()
        is_last = cute.arch.shuffle_sync(before, 0) == last - first
        if is_last:
            if lane.lane == 0:
                global_scalar(Int32, counter)[0] = Int32(0)
            acc.fill(0.0)
            for other in cutlass.range(first, last + 1, ADDED_AT_ONCE, unroll=1):
                self._add_some(acc, other, first, last, lane)
        return is_last

    @cute.jit
    def _add_some(self, acc: Any, cta: Int32, first: Int32, last: Int32, lane: Lane):
        """Adds the partial sums of a few CTAs. Issues all loads before the first addition."""
        loaded = []
        for i in cutlass.range_constexpr(ADDED_AT_ONCE):
            address, is_there = self._sums_of(cta + i, cta + i == first, lane), cta + i <= last
            loaded.append(
                [
                    load_or_zeros(address + v * (WARP_SIZE * VECTOR_BYTES), is_there, "ld.global")
                    for v in range(self.vectors)
                ]
            )
        for i in cutlass.range_constexpr(ADDED_AT_ONCE):
            for v in cutlass.range_constexpr(self.vectors):
                for r in cutlass.range_constexpr(VECTOR_WORDS):
                    more = Float32(ptx.float_of(loaded[i][v][r]))
                    acc[r, v % MMA_M, v // MMA_M] = acc[r, v % MMA_M, v // MMA_M] + more

    def _sums_of(self, cta: Int32, is_beginning: Boolean, lane: Lane) -> Int64:
        """Returns the address of a CTA's partial sums of the tile that it begins, or of the one that it continues."""
        part = 2 * cta + select(is_beginning, Int32(1), Int32(0))
        vector = (part * self.warps.rows + lane.row_warp) * self.vectors * WARP_SIZE + lane.lane
        return self.workspace + Int64(vector) * VECTOR_BYTES
