"""Split-K: the CTAs of a cluster multiply a share of a tile's K each, and add up and store a share of its columns each.

A warp's rows of a slice of columns are a unit. Units are dealt to the CTAs in turn, so that all of them receive alike.
A CTA sends its sums of a unit to the unit's CTA, which adds them to its own in the order of the others.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from nvfp4_cute.planning.arch.sm100.limits import EPI_TILE_N, EPI_WARPS, UNIT_SUMS_BYTES

from ..common.group_table import ceil_div
from ..common.ptx import bits_of
from ..common.ring import CONSUMER_PHASE, PRODUCER_PHASE, Ring
from ..common.split_k import (
    CHUNK_BYTES,
    CHUNK_VALUES,
    address_in_cta,
    load_chunk,
    store_async,
    wait_for_cluster,
)
from ..common.warp_schedule import WARP_SIZE

CHUNKS = EPI_TILE_N // CHUNK_VALUES


@dataclass(frozen=True)
class Exchange:
    """Where a CTA gets the sums of its units.

    Attributes:
        address: shared address: (UNIT, SENDER, PRODUCT, CHUNK of 4 columns, LANE, 16 bytes). Senders: all CTAs but this.
        ring: one stage. full: 1 arrival + bytes. empty: of every CTA of the cluster, an arrival a warp.
        split: CTAs of the cluster, a power of two.
        num_products: of a unit: 2 of a dual GEMM.
    """

    address: Int32
    ring: Ring
    split: int
    num_products: int

    @property
    def sender_bytes(self) -> int:
        """One CTA's sums of a unit."""
        return self.num_products * UNIT_SUMS_BYTES

    @property
    def unit_bytes(self) -> int:
        """All that is sent of a unit."""
        return (self.split - 1) * self.sender_bytes


@cute.jit
def own_slices(exchange: Exchange, warp_idx: Int32, num_slices: Int32) -> tuple:
    """Of a tile's slices, the first whose rows of this warp are a unit of this CTA, and how many are.

    They are ``exchange.split`` apart.
    """
    rank, split = cute.arch.block_idx_in_cluster(), exchange.split
    first = (rank - warp_idx * num_slices) & (split - 1)
    return first, ceil_div(cutlass.max(num_slices - first, 0), split)


@cute.jit
def wait_for_room(exchange: Exchange, turn: Int32):
    """Wait until every CTA of the cluster has read what it got of the tile before.

    Args:
        turn: 0 and 1 in turn: parity of the tiles before.
    """
    cute.arch.mbarrier_wait(exchange.ring.empty(Int32(0)), turn ^ PRODUCER_PHASE)


@cute.jit
def is_sent(exchange: Exchange, warp_idx: Int32, slice_idx: Int32, num_slices: Int32):
    """Whether a warp's rows of a slice are a unit of another CTA."""
    return _receiver(exchange, warp_idx * num_slices + slice_idx) != cute.arch.block_idx_in_cluster()


@cute.jit
def send_slice(exchange: Exchange, products: list, warp_idx: Int32, slice_idx: Int32, num_slices: Int32):
    """Send this CTA's sums of a unit to the unit's CTA, which is another one.

    Args:
        products: fp32, a row of the slice a lane.
    """
    rank, unit = cute.arch.block_idx_in_cluster(), warp_idx * num_slices + slice_idx
    receiver = _receiver(exchange, unit)
    sender = rank - 1 if rank > receiver else rank
    place = _sums(exchange, unit) + sender * exchange.sender_bytes
    target = address_in_cta(place, receiver)
    barrier = address_in_cta(exchange.ring.full(Int32(0)).toint(), receiver)
    for product in cutlass.range_constexpr(exchange.num_products):
        sums = products[product]
        for chunk in cutlass.range_constexpr(CHUNKS):
            values = [sums[CHUNK_VALUES * chunk + i] for i in range(CHUNK_VALUES)]
            store_async(target + _chunk_offset(product, chunk), values, barrier)


@cute.jit
def wait_for_sums(exchange: Exchange, warp_idx: Int32, num_slices: Int32, turn: Int32):
    """Wait until the sums of all units of this CTA have come."""
    rank, split, full = cute.arch.block_idx_in_cluster(), exchange.split, exchange.ring.full(Int32(0))
    if warp_idx == 0:
        with cute.arch.elect_one():
            units = ceil_div(cutlass.max(EPI_WARPS * num_slices - rank, 0), split)
            cute.arch.mbarrier_arrive_and_expect_tx(full, units * exchange.unit_bytes)
    wait_for_cluster(full.toint(), turn ^ CONSUMER_PHASE)


@cute.jit
def add_slice(exchange: Exchange, products: list, warp_idx: Int32, slice_idx: Int32, num_slices: Int32):
    """Add what the other CTAs sent of a unit to this CTA's sums, ``products``, a row of the slice a lane."""
    address = _sums(exchange, warp_idx * num_slices + slice_idx)
    # Not unrolled: a CTA has few tiles, and code that it executes once costs more to fetch than to run.
    for _ in cutlass.range(exchange.split - 1, unroll=1):
        for product in cutlass.range_constexpr(exchange.num_products):
            sums = products[product]
            for chunk in cutlass.range_constexpr(CHUNKS):
                values = load_chunk(address + _chunk_offset(product, chunk))
                for i in cutlass.range_constexpr(CHUNK_VALUES):
                    column = CHUNK_VALUES * chunk + i
                    sent = values[i] if sums.element_type is Float32 else bits_of(values[i]).to(Int32)
                    sums[column] = sums[column] + sent
        address += exchange.sender_bytes


@cute.jit
def give_room(exchange: Exchange):
    """Tell every CTA of the cluster that this warp has read its units."""
    cute.arch.sync_warp()
    lane = cute.arch.lane_idx()
    if lane < exchange.split:
        cute.arch.mbarrier_arrive(exchange.ring.empty(Int32(0)), lane)


@cute.jit
def _receiver(exchange: Exchange, unit: Int32) -> Int32:
    return unit & (exchange.split - 1)


@cute.jit
def _sums(exchange: Exchange, unit: Int32) -> Int32:
    """Shared address, in the unit's CTA, of this lane's first chunk from the first sender."""
    number = unit >> (exchange.split.bit_length() - 1)
    return exchange.address + number * exchange.unit_bytes + cute.arch.lane_idx() * CHUNK_BYTES


def _chunk_offset(product: int, chunk: int) -> int:
    return product * UNIT_SUMS_BYTES + chunk * (WARP_SIZE * CHUNK_BYTES)
