"""SCHEDULER role of stream-K: one warp finds the parts of tiles that its CTA computes; the other roles read them.

Finding a part takes divisions and, where sizes are on the device, reads of those sizes. A warp that does nothing else has the
part ready before it is needed. It passes parts on through a ring of records in shared memory:
  SCHEDULER -> MATH, LOAD   NUM_RECORDS   full: 1   empty: one per MATH warp
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from nvfp4_cute.planning.config import KernelConfig

from ..common.device_groups import DeviceGroups
from ..common.group_table import WorkTile
from ..common.ring import PRODUCER_PHASE, Ring, arrive_warp
from ..common.select import select
from ..common.shared_access import load_shared, store_shared
from .stream_k import DeviceWork, ListWork, Placed, Shares, place_at
from .tile_walk import TilePart, tile_of_cta

# Parts that may be found ahead of their use.
RECORD_BITS = 3
NUM_RECORDS = 1 << RECORD_BITS
VECTOR_WORDS = 4
RECORD_VECTORS = 3
RECORD_BYTES = RECORD_VECTORS * VECTOR_WORDS * 4
# Word of a record that holds the number of K tiles, and its value after the last part.
COUNT_WORD, NO_PART = 7, -1


@dataclass(frozen=True)
class ScheduledTiles:
    """Parts of tiles of a CTA, read from the records that SCHEDULER writes. A place is the number of parts before it.

    Attributes:
        records: shared address of (RECORD, ``RECORD_BYTES``).
        ring: barriers of the records.
        groups: the partitioned work.
    """

    records: Int32
    ring: Ring
    groups: ListWork | DeviceWork

    def first(self) -> Int32:
        """Returns the place of the first part."""
        return Int32(0)

    @cute.jit
    def has_tile(self, place: Int32):
        """Waits for the record of a place and returns whether it holds a part."""
        cute.arch.mbarrier_wait(self.ring.full(_record(place)), place >> RECORD_BITS & 1)
        return Int32(load_shared(self.address(place) + COUNT_WORD * 4, 1)[0]) != NO_PART

    @cute.jit
    def part(self, place: Int32) -> TilePart:
        """Reads the part at a place."""
        address, words = self.address(place), []
        for vector in cutlass.range_constexpr(RECORD_VECTORS):
            words += map(Int32, load_shared(address + vector * (VECTOR_WORDS * 4), VECTOR_WORDS))
        slot, tile_m_idx, tile_n_idx, m, n, k_tile_cnt, first, count, num_others, a_row, a_sf_block, _ = words
        tile = WorkTile(slot, tile_m_idx, tile_n_idx, k_tile_cnt, m, n)
        if cutlass.const_expr(isinstance(self.groups, DeviceGroups)):
            tile = self.groups.tile_of_group(slot, tile_m_idx, tile_n_idx, k_tile_cnt, m, a_row, a_sf_block)
        return TilePart(tile, first, count, num_others)

    def next(self, place: Int32) -> Int32:
        """Returns the place of the next part."""
        return place + 1

    @cute.jit
    def release(self, place: Int32):
        """Releases the record of a place; called by each MATH warp when the part is done.

        LOAD has read it before MATH could start.
        """
        arrive_warp(self.ring.empty(_record(place)))

    def address(self, place: Int32) -> Int32:
        """Returns the shared address of a place's record."""
        return self.records + _record(place) * RECORD_BYTES


def _record(place: Int32) -> Int32:
    return place & (NUM_RECORDS - 1)


@cute.jit
def run_scheduler(tiles: ScheduledTiles, config: cutlass.Constexpr[KernelConfig]) -> Boolean:
    """Finds each part and writes its record as soon as all roles have read the previous record in that slot.

    Returns whether the CTA sends partial sums.
    """
    groups, tile_shape, place, sends = tiles.groups, config.work_tile_mnk, Int32(0), Boolean(False)
    shares = Shares.of(groups, config)
    share = shares.num_shares - 1 - cute.arch.block_idx()[0] // config.cluster_size
    for number in cutlass.range(select(share >= 0, shares.waves + 1, Int32(0)), unroll=1):
        span = shares.span(share, number, groups, tile_shape)
        position = span.begin
        while position < span.end:
            placed = place_at(groups, position, config)
            first, count = span.k_tiles(placed, position)
            if count > 0:
                num_others = Int32(0)
                if first == 0 and count < placed.tile.k_tile_cnt:
                    num_others = _count_others(shares, share, placed, groups, tile_shape)
                tile = tile_of_cta(config, placed.tile)
                words = [tile.slot, tile.tile_m_idx, tile.tile_n_idx, tile.m, tile.n, tile.k_tile_cnt]
                _write(tiles, place, [*words, first, count, num_others, tile.a_row, tile.a_sf_block, 0])
                place, sends = place + 1, sends | (first > 0)
            position = placed.end
    _write(tiles, place, [NO_PART] * (RECORD_VECTORS * VECTOR_WORDS))
    return sends


@cute.jit
def _count_others(
    shares: Shares, share: Int32, placed: Placed, groups: object, tile_shape: cutlass.Constexpr
) -> Int32:
    """Counts the other clusters that have K tiles of a tile whose first K tile is this one's. Their shares follow its own."""
    count, begin = Int32(0), Int32(0)
    while share + count + 1 < shares.num_shares and placed.k_tile(begin) < placed.tile.k_tile_cnt:
        count += 1
        begin = shares.first(share + count + 1, groups, tile_shape)
    return count


@cute.jit
def _write(tiles: ScheduledTiles, place: Int32, words: list):
    """Writes the record of a place once it is empty."""
    cute.arch.mbarrier_wait(tiles.ring.empty(_record(place)), place >> RECORD_BITS & 1 ^ PRODUCER_PHASE)
    with cute.arch.elect_one():
        for first in cutlass.range_constexpr(0, RECORD_VECTORS * VECTOR_WORDS, VECTOR_WORDS):
            vector = [Uint32(Int32(word)) for word in words[first : first + VECTOR_WORDS]]
            store_shared(tiles.address(place) + first * 4, vector)
        cute.arch.mbarrier_arrive(tiles.ring.full(_record(place)))
