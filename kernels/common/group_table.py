"""Device half of the schedule: group sizes as kernel parameters, and the tile of a linear index.

Mirrors ``nvfp4_cute.planning.schedule.TileSchedule``: equal slots (groups by descending M), prefix sums and raster order. A
test runs both on random problems and compares every field.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from .ptx import mul_hi
from .select import select


@dataclass(frozen=True)
class GroupTable:
    """Sizes of every group, in slot order, as scalars in the kernel's parameters.

    Attributes:
        m, n, k: extents in elements, one Int32 per slot.
        tile_offsets: number of tiles in all earlier slots, one Int32 per slot.
        num_tiles: number of tiles in all slots.
        reciprocals: reciprocals of the number of tiles along M, one Uint32 per slot (:func:`reciprocal`). Valid for tiles of one
            height only.
    """

    m: list
    n: list
    k: list
    tile_offsets: list
    num_tiles: Int32
    reciprocals: list

    @classmethod
    def of(cls, m: list, n: list, k: list, tile_offsets: list, num_tiles: Int32, tile_m: int) -> "GroupTable":
        """Returns the table for tiles of ``tile_m`` rows; host code."""
        reciprocals = [reciprocal(cutlass.max(ceil_div(extent, tile_m), 1)) for extent in m]
        return cls(m, n, k, tile_offsets, num_tiles, reciprocals)

    def with_factors(self, factors: list | None) -> "GroupTable":
        """Returns the groups unchanged: list-form factors are read where they are used."""
        return self

    @cute.jit
    def first_cursor(self, tile_idx: Int32, tile_shape_mnk: cutlass.Constexpr) -> tuple:
        """Returns the cursor of a worker whose first tile is ``tile_idx``."""
        return (tile_idx,)

    @cute.jit
    def next_cursor(self, cursor: tuple, stride: Int32, tile_shape_mnk: cutlass.Constexpr) -> tuple:
        """Returns the cursor ``stride`` tiles further on."""
        return (cursor[0] + stride,)

    @cute.jit
    def has_tile(self, cursor: tuple):
        """Returns whether there is a tile at the cursor."""
        return cursor[0] < self.num_tiles

    @cute.jit
    def tile(self, cursor: tuple, tile_shape_mnk: cutlass.Constexpr) -> "WorkTile":
        """Returns the tile at the cursor."""
        return locate_tile(self, tile_shape_mnk, cursor[0])

    @property
    def num_groups(self) -> int:
        """Slots of this launch, a compile-time constant."""
        return len(self.m)


@dataclass(frozen=True)
class WorkTile:
    """One output tile, as the scheduler passes it to every role.

    Attributes:
        slot: position of the group in the launch order.
        tile_m_idx, tile_n_idx: tile coordinates inside the group.
        k_tile_cnt: K tiles to accumulate, at least 1.
        m, n: extents of the group, for clipping at its edges.
        a_row: first row of the group in ``a`` and in the output.
        a_sf_block: first 128-row block of the group in the scales of ``a``.
        a_batch, b_batch: batch of the group in ``a`` and the output, and in ``b``.
        factors: the group's factors, one per product, if they were read along with its sizes.
    """

    slot: Int32
    tile_m_idx: Int32
    tile_n_idx: Int32
    k_tile_cnt: Int32
    m: Int32
    n: Int32
    a_row: Int32 | int = 0
    a_sf_block: Int32 | int = 0
    a_batch: Int32 | int = 0
    b_batch: Int32 | int = 0
    factors: tuple = ()


@cute.jit
def select_slot(values: list, slot: Int32):
    """Returns the value of ``slot`` by a chain of selects: kernel parameters cannot be indexed at run time."""
    chosen = values[0]
    for i in cutlass.range_constexpr(1, len(values)):
        chosen = select(slot == i, values[i], chosen)
    return chosen


def ceil_div(extent: Int32, divisor: int) -> Int32:
    """Returns the rounded-up quotient of a non-negative extent in two instructions; a signed division takes eight."""
    return Int32((Uint32(extent) + (divisor - 1)) // divisor)


def reciprocal(divisor: Int32) -> Uint32:
    """Returns the reciprocal that :func:`divide` takes for a divisor of at least 1.

    Host code calls this, so that the device only multiplies.
    """
    return Uint32(0xFFFFFFFF) // Uint32(divisor)


@cute.jit
def divide(value: Int32, divisor: Int32, reciprocal: Uint32) -> tuple:
    """Returns quotient and remainder of non-negative numbers without a division."""
    # The estimate is at most one too small: reciprocal > 2**32 / divisor - 1, and value < 2**32.
    quotient = Int32(mul_hi(Uint32(value), reciprocal))
    rest = value - quotient * divisor
    is_small = rest >= divisor
    return select(is_small, quotient + 1, quotient), select(is_small, rest - divisor, rest)


@cute.jit
def locate_slot(groups: GroupTable, tile_idx: Int32) -> tuple:
    """Returns the slot of a linear index, the slot's m, n and k, its first index, and the reciprocal of its tiles along M."""
    slot, m, n, k, tile_offset = Int32(0), groups.m[0], groups.n[0], groups.k[0], groups.tile_offsets[0]
    reciprocal = groups.reciprocals[0]
    for i in cutlass.range_constexpr(1, groups.num_groups):
        is_behind = tile_idx >= groups.tile_offsets[i]
        slot = select(is_behind, Int32(i), slot)
        m = select(is_behind, groups.m[i], m)
        n = select(is_behind, groups.n[i], n)
        k = select(is_behind, groups.k[i], k)
        tile_offset = select(is_behind, groups.tile_offsets[i], tile_offset)
        reciprocal = select(is_behind, groups.reciprocals[i], reciprocal)
    return slot, m, n, k, tile_offset, reciprocal


@cute.jit
def locate_tile(groups: GroupTable, cta_tile_shape_mnk: cutlass.Constexpr, tile_idx: Int32) -> WorkTile:
    """Returns the work tile of linear index ``tile_idx`` (0 <= tile_idx < num_tiles). M is the fast axis within a group.

    With M as the fast axis, each tile of weights is read from memory once, and neighbouring tiles find it in L2. An index after
    the last tile returns a nonexistent tile of the last slot.
    """
    slot, m, n, k, tile_offset, reciprocal = locate_slot(groups, tile_idx)
    tile_n_idx, tile_m_idx = divide(tile_idx - tile_offset, ceil_div(m, cta_tile_shape_mnk[0]), reciprocal)
    return WorkTile(
        slot=slot,
        tile_m_idx=tile_m_idx,
        tile_n_idx=tile_n_idx,
        k_tile_cnt=ceil_div(k, cta_tile_shape_mnk[2]),
        m=m,
        n=n,
    )
