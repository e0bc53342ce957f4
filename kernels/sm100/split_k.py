"""Split-K: each CTA of a cluster multiplies a share of a tile's K, and reduces and stores a share of its columns.

A unit is a warp's rows of one slice of columns. Units are assigned to the CTAs round-robin, so that all CTAs receive equally
much. A CTA sends its partial sums of a unit to the unit's CTA, which adds them to its own in a fixed order.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from nvfp4_cute.planning.arch.sm100.limits import EPI_PART_N, EPI_TILE_N, EPI_WARPS, UNIT_SUMS_BYTES

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

PARTS, PART_CHUNKS = EPI_TILE_N // EPI_PART_N, EPI_PART_N // CHUNK_VALUES


@dataclass(frozen=True)
class Exchange:
    """Memory and barriers by which a CTA receives the partial sums of its units.

    Attributes:
        address: shared address: (UNIT, SENDER, PRODUCT, CHUNK of 4 columns, LANE, 16 bytes). Senders are all other CTAs.
        ring: one stage. full: 1 arrival + bytes. empty: one arrival per warp of every CTA of the cluster.
        split: CTAs of the cluster, a power of two.
        num_products: products per unit: 2 in a dual GEMM.
    """

    address: Int32
    ring: Ring
    split: int
    num_products: int

    @property
    def sender_bytes(self) -> int:
        """Bytes of one CTA's sums of a unit."""
        return self.num_products * UNIT_SUMS_BYTES

    @property
    def unit_bytes(self) -> int:
        """Bytes that a unit receives from all senders."""
        return (self.split - 1) * self.sender_bytes


@cute.jit
def own_slices(exchange: Exchange, warp_idx: Int32, num_slices: Int32) -> tuple:
    """Returns the first slice whose unit of this warp belongs to this CTA, and the number of such slices.

    They are ``exchange.split`` slices apart.
    """
    rank, split = cute.arch.block_idx_in_cluster(), exchange.split
    first = (rank - warp_idx * num_slices) & (split - 1)
    return first, ceil_div(cutlass.max(num_slices - first, 0), split)


@cute.jit
def wait_for_room(exchange: Exchange, parity: Int32):
    """Waits until every CTA of the cluster has read its sums of the previous tile.

    Args:
        parity: parity of the number of earlier tiles.
    """
    cute.arch.mbarrier_wait(exchange.ring.empty(Int32(0)), parity ^ PRODUCER_PHASE)


@cute.jit
def is_sent(exchange: Exchange, warp_idx: Int32, slice_idx: Int32, num_slices: Int32):
    """Returns whether a warp's unit of a slice belongs to another CTA."""
    return _receiver(exchange, warp_idx * num_slices + slice_idx) != cute.arch.block_idx_in_cluster()


@cute.jit
def send_slice(
    exchange: Exchange,
    products: list,
    warp_idx: Int32,
    slice_idx: Int32,
    num_slices: Int32,
    num_parts: Int32 | None = None,
):
    """Sends this CTA's sums of a unit to the unit's CTA, which is another one.

    Args:
        products: float32 sums, one row of the slice per lane.
        num_parts: number of parts of a slice that are in use (``epilogue.parts_of_slice``); None for all.
    """
    rank, unit = cute.arch.block_idx_in_cluster(), warp_idx * num_slices + slice_idx
    receiver = _receiver(exchange, unit)
    sender = rank - 1 if rank > receiver else rank
    place = _sums(exchange, unit) + sender * exchange.sender_bytes
    target = address_in_cta(place, receiver)
    barrier = address_in_cta(exchange.ring.full(Int32(0)).toint(), receiver)
    for product in cutlass.range_constexpr(exchange.num_products):
        for part in cutlass.range_constexpr(PARTS):
            if cutlass.const_expr(num_parts is None):
                _send_part(products[product], target, barrier, product, part)
            elif part < num_parts:
                _send_part(products[product], target, barrier, product, part)


@cute.jit
def _send_part(
    sums: cute.Tensor, target: Int32, barrier: Int32, product: cutlass.Constexpr, part: cutlass.Constexpr
):
    for chunk in cutlass.range_constexpr(PART_CHUNKS * part, PART_CHUNKS * (part + 1)):
        values = [sums[CHUNK_VALUES * chunk + i] for i in range(CHUNK_VALUES)]
        store_async(target + _chunk_offset(product, chunk), values, barrier)


@cute.jit
def wait_for_sums(
    exchange: Exchange,
    warp_idx: Int32,
    num_slices: Int32,
    parity: Int32,
    num_parts: Int32 | int = PARTS,
):
    """Waits until the sums of all units of this CTA have arrived."""
    rank, split, full = cute.arch.block_idx_in_cluster(), exchange.split, exchange.ring.full(Int32(0))
    if warp_idx == 0:
        with cute.arch.elect_one():
            units = ceil_div(cutlass.max(EPI_WARPS * num_slices - rank, 0), split)
            cute.arch.mbarrier_arrive_and_expect_tx(full, units * (exchange.unit_bytes // PARTS) * num_parts)
    wait_for_cluster(full.toint(), parity ^ CONSUMER_PHASE)


@cute.jit
def add_slice(
    exchange: Exchange,
    products: list,
    warp_idx: Int32,
    slice_idx: Int32,
    num_slices: Int32,
    num_parts: Int32 | None = None,
):
    """Adds the other CTAs' sums of a unit to ``products``, this CTA's sums, one row of the slice per lane."""
    address = _sums(exchange, warp_idx * num_slices + slice_idx)
    # Not unrolled: a CTA has few tiles, and code that runs once costs more to fetch than to execute.
    for _ in cutlass.range(exchange.split - 1, unroll=1):
        for product in cutlass.range_constexpr(exchange.num_products):
            for part in cutlass.range_constexpr(PARTS):
                if cutlass.const_expr(num_parts is None):
                    _add_part(products[product], address, product, part)
                elif part < num_parts:
                    _add_part(products[product], address, product, part)
        address += exchange.sender_bytes


@cute.jit
def _add_part(sums: cute.Tensor, address: Int32, product: cutlass.Constexpr, part: cutlass.Constexpr):
    for chunk in cutlass.range_constexpr(PART_CHUNKS * part, PART_CHUNKS * (part + 1)):
        values = load_chunk(address + _chunk_offset(product, chunk))
        for i in cutlass.range_constexpr(CHUNK_VALUES):
            column = CHUNK_VALUES * chunk + i
            sent = values[i] if sums.element_type is Float32 else bits_of(values[i]).to(Int32)
            sums[column] = sums[column] + sent


@cute.jit
def give_room(exchange: Exchange):
    """Signals every CTA of the cluster that this warp has read its units."""
    cute.arch.sync_warp()
    lane = cute.arch.lane_idx()
    if lane < exchange.split:
        cute.arch.mbarrier_arrive(exchange.ring.empty(Int32(0)), lane)


@cute.jit
def _receiver(exchange: Exchange, unit: Int32) -> Int32:
    return unit & (exchange.split - 1)


@cute.jit
def _sums(exchange: Exchange, unit: Int32) -> Int32:
    """Returns the shared address, in the unit's CTA, of this lane's first chunk from the first sender."""
    number = unit >> (exchange.split.bit_length() - 1)
    return exchange.address + number * exchange.unit_bytes + cute.arch.lane_idx() * CHUNK_BYTES


def _chunk_offset(product: int, chunk: int) -> int:
    return product * UNIT_SUMS_BYTES + chunk * (WARP_SIZE * CHUNK_BYTES)
