"""SCHEDULER role of stream-K: one warp finds the parts of tiles that its CTA computes, and the other roles read them.

To find a part takes divisions and, where sizes are on the device, reading these; a warp that does nothing else has it ready
before it is needed. What it finds goes through a ring of records in shared memory:
  SCHEDULER -> MATH, LOAD   NUM_RECORDS   full: 1   empty: one a warp of MATH
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from nvfp4_cute.planning.config import KernelConfig

from ..common.device_groups import DeviceGroups
from ..common.group_table import WorkTile
from ..common.ring import PRODUCER_PHASE, Ring, arrive_warp
from ..common.select import select
from ..common.shared_access import load_shared, store_shared
from .even_shares import DeviceWork, ListWork, Placed, Shares, place_at
from .tile_walk import TilePart, tile_of_cta

# As many parts may be found ahead.
RECORD_BITS = 3
NUM_RECORDS = 1 << RECORD_BITS
VECTOR_WORDS = 4
RECORD_VECTORS = 3
RECORD_BYTES = RECORD_VECTORS * VECTOR_WORDS * 4
# The word of a record that is the count of K tiles, and what it is behind the last part.
COUNT_WORD, NO_PART = 7, -1


@dataclass(frozen=True)
class ScheduledTiles:
    """A CTA's parts, for a role that reads what SCHEDULER found. Its place is the number of parts before.

    Attributes:
        records: shared address of (RECORD, ``RECORD_BYTES``).
        ring: of the records.
        groups: the work that is dealt.
    """

    records: Int32
    ring: Ring
    groups: ListWork | DeviceWork

    def first(self) -> Int32:
        """The place of the first part."""
        return Int32(0)

    @cute.jit
    def has_tile(self, place: Int32):
        """Whether there is a part at the place, which is waited for."""
        cute.arch.mbarrier_wait(self.ring.full(_record(place)), place >> RECORD_BITS & 1)
        return Int32(load_shared(self.address(place) + COUNT_WORD * 4, 1)[0]) != NO_PART

    @cute.jit
    def part(self, place: Int32) -> TilePart:
        """The part at the place."""
        address, words = self.address(place), []
        for vector in cutlass.range_constexpr(RECORD_VECTORS):
            words += map(Int32, load_shared(address + vector * (VECTOR_WORDS * 4), VECTOR_WORDS))
        slot, tile_m_idx, tile_n_idx, m, n, k_tile_cnt, first, count, num_others, a_row, a_sf_block, _ = words
        tile = WorkTile(slot, tile_m_idx, tile_n_idx, k_tile_cnt, m, n)
        if cutlass.const_expr(isinstance(self.groups, DeviceGroups)):
            tile = self.groups.tile_of_group(slot, tile_m_idx, tile_n_idx, k_tile_cnt, m, a_row, a_sf_block)
        return TilePart(tile, first, count, num_others)

    def next(self, place: Int32) -> Int32:
        """The place of the part after."""
        return place + 1

    @cute.jit
    def release(self, place: Int32):
        """Of a warp of MATH: the part at the place is done. LOAD has read of it before MATH could begin."""
        arrive_warp(self.ring.empty(_record(place)))

    def address(self, place: Int32) -> Int32:
        """Of the record of a place."""
        return self.records + _record(place) * RECORD_BYTES


def _record(place: Int32) -> Int32:
    return place & (NUM_RECORDS - 1)


@cute.jit
def run_scheduler(tiles: ScheduledTiles, config: cutlass.Constexpr[KernelConfig]):
    """Find each part and write its record, as soon as all roles have read what was there."""
    groups, tile_shape, place = tiles.groups, config.work_tile_mnk, Int32(0)
    shares = Shares.of(groups, config)
    share = shares.num_shares - 1 - cute.arch.block_idx()[0] // config.cluster_size
    for number in cutlass.range(select(share >= 0, shares.waves + 1, Int32(0)), unroll=1):
        stretch = shares.stretch(share, number, groups, tile_shape)
        position = stretch.begin
        while position < stretch.end:
            placed = place_at(groups, position, config)
            first, count = stretch.k_tiles(placed, position)
            if count > 0:
                num_others = Int32(0)
                if first == 0 and count < placed.tile.k_tile_cnt:
                    num_others = _count_others(shares, share, placed, groups, tile_shape)
                tile = tile_of_cta(config, placed.tile)
                words = [tile.slot, tile.tile_m_idx, tile.tile_n_idx, tile.m, tile.n, tile.k_tile_cnt]
                _write(tiles, place, [*words, first, count, num_others, tile.a_row, tile.a_sf_block, 0])
                place += 1
            position = placed.end
    _write(tiles, place, [NO_PART] * (RECORD_VECTORS * VECTOR_WORDS))


@cute.jit
def _count_others(
    shares: Shares, share: Int32, placed: Placed, groups: object, tile_shape: cutlass.Constexpr
) -> Int32:
    """Clusters that have K tiles of a tile behind those of this one, which has the first: their shares follow its own."""
    count, begin = Int32(0), Int32(0)
    while share + count + 1 < shares.num_shares and placed.k_tile(begin) < placed.tile.k_tile_cnt:
        count += 1
        begin = shares.first(share + count + 1, groups, tile_shape)
    return count


@cute.jit
def _write(tiles: ScheduledTiles, place: Int32, words: list):
    """Write the record of a place, once it is empty."""
    cute.arch.mbarrier_wait(tiles.ring.empty(_record(place)), place >> RECORD_BITS & 1 ^ PRODUCER_PHASE)
    with cute.arch.elect_one():
        for first in cutlass.range_constexpr(0, RECORD_VECTORS * VECTOR_WORDS, VECTOR_WORDS):
            vector = [Uint32(Int32(word)) for word in words[first : first + VECTOR_WORDS]]
            store_shared(tiles.address(place) + first * 4, vector)
        cute.arch.mbarrier_arrive(tiles.ring.full(_record(place)))
