"""Split-K: the CTAs of a cluster multiply a share of a tile's K each, and add up and store a share of its columns each.

A warp's rows of a slice of columns are a unit. Units are dealt to the CTAs in turn, so that all of them receive alike;
every CTA, the unit's own one included, sends its sums to the unit's CTA, which adds them in the order of the CTAs.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from nvfp4_cute.arch.sm100 import EPI_TILE_N, EPI_WARPS, UNIT_SUMS_BYTES

from ..common.group_table import ceil_div
from ..common.ring import CONSUMER_PHASE, PRODUCER_PHASE, Ring
from ..common.split_k import CHUNK_BYTES, CHUNK_VALUES, address_in_cta, k_tiles_of_cta, store_async
from ..common.warp_schedule import WARP_SIZE

CHUNKS = EPI_TILE_N // CHUNK_VALUES


@dataclass(frozen=True)
class Exchange:
    """Where a CTA gets the sums of its units.

    Attributes:
        address: shared address: (UNIT, PRODUCT, SENDER, CHUNK of 4 columns, LANE, 16 bytes).
        ring: one stage. full: 1 arrival + bytes. empty: of every CTA of the cluster, an arrival a warp.
        split: CTAs of the cluster, a power of two.
        num_products: of a unit: 2 of a dual GEMM.
    """

    address: Int32
    ring: Ring
    split: int
    num_products: int

    @property
    def sums_bytes(self) -> int:
        """Of a unit: every CTA's sums of every product."""
        return self.num_products * self.split * UNIT_SUMS_BYTES


@cute.jit
def k_share(k_tile_cnt: Int32, split: cutlass.Constexpr) -> tuple:
    """First K tile of this CTA's share, and how many: at least one, which TMA fills with zeros where it is behind the last."""
    first, count = k_tiles_of_cta(k_tile_cnt, split)
    if cutlass.const_expr(split > 1):
        first = k_tile_cnt if count == 0 else first
        count = cutlass.max(count, 1)
    return first, count


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
def send_slice(exchange: Exchange, products: list, warp_idx: Int32, slice_idx: Int32, num_slices: Int32):
    """Send this CTA's sums of a unit to the unit's CTA.

    Args:
        products: fp32, a row of the slice a lane.
    """
    rank, split = cute.arch.block_idx_in_cluster(), exchange.split
    unit = warp_idx * num_slices + slice_idx
    receiver = unit & (split - 1)
    barrier = address_in_cta(exchange.ring.full(Int32(0)).toint(), receiver)
    place = _sums(exchange, unit) + rank * UNIT_SUMS_BYTES
    target = address_in_cta(place, receiver)
    for product in cutlass.range_constexpr(exchange.num_products):
        sums = products[product]
        for chunk in cutlass.range_constexpr(CHUNKS):
            values = [sums[CHUNK_VALUES * chunk + i] for i in range(CHUNK_VALUES)]
            offset = product * split * UNIT_SUMS_BYTES + chunk * (WARP_SIZE * CHUNK_BYTES)
            store_async(target + offset, values, barrier)


@cute.jit
def wait_for_sums(exchange: Exchange, warp_idx: Int32, num_slices: Int32, turn: Int32):
    """Wait until the sums of all units of this CTA have come."""
    rank, split, full = cute.arch.block_idx_in_cluster(), exchange.split, exchange.ring.full(Int32(0))
    if warp_idx == 0:
        with cute.arch.elect_one():
            units = ceil_div(cutlass.max(EPI_WARPS * num_slices - rank, 0), split)
            cute.arch.mbarrier_arrive_and_expect_tx(full, units * exchange.sums_bytes)
    cute.arch.mbarrier_wait(full, turn ^ CONSUMER_PHASE)


@cute.jit
def add_slice(exchange: Exchange, products: list, warp_idx: Int32, slice_idx: Int32, num_slices: Int32):
    """Add up the sums of a unit of this CTA into ``products``, a row of the slice a lane."""
    place = _sums(exchange, warp_idx * num_slices + slice_idx)
    for product in cutlass.range_constexpr(exchange.num_products):
        sums = products[product]
        for sender in cutlass.range_constexpr(exchange.split):
            for chunk in cutlass.range_constexpr(CHUNKS):
                offset = (product * exchange.split + sender) * UNIT_SUMS_BYTES + chunk * (
                    WARP_SIZE * CHUNK_BYTES
                )
                values = _load_chunk(place + offset)
                for i in cutlass.range_constexpr(CHUNK_VALUES):
                    column = CHUNK_VALUES * chunk + i
                    sums[column] = sums[column] + values[i] if sender > 0 else values[i]


@cute.jit
def give_room(exchange: Exchange):
    """Tell every CTA of the cluster that this warp has read its units."""
    cute.arch.sync_warp()
    lane = cute.arch.lane_idx()
    if lane < exchange.split:
        cute.arch.mbarrier_arrive(exchange.ring.empty(Int32(0)), lane)


@cute.jit
def _sums(exchange: Exchange, unit: Int32) -> Int32:
    """Shared address, in the unit's CTA, of this lane's first chunk from the first CTA."""
    number = unit // exchange.split
    return exchange.address + number * exchange.sums_bytes + cute.arch.lane_idx() * CHUNK_BYTES


def _load_chunk(address: Int32) -> list:
    return list(
        cute.arch.inline_ptx(
            "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Float32] * 4,
            read_only_args=[address],
        )
    )
