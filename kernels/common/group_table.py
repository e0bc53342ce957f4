"""Device half of the schedule: the groups of a launch as kernel parameters, and the tile that an index names.

The twin of ``nvfp4_cute.planning.schedule.TileSchedule``: same slots (groups by descending M), same prefix sums, same raster
order. A test runs both on random problems and compares every field.
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
        m, n, k: extents in elements, one Int32 a slot.
        tile_offsets: tiles of all earlier slots, one Int32 a slot.
        num_tiles: tiles of all slots.
        reciprocals: of the tiles along M, one Uint32 a slot (:func:`reciprocal`): for tiles of one height only.
    """

    m: list
    n: list
    k: list
    tile_offsets: list
    num_tiles: Int32
    reciprocals: list

    @classmethod
    def of(cls, m: list, n: list, k: list, tile_offsets: list, num_tiles: Int32, tile_m: int) -> "GroupTable":
        """The table of groups that are cut into tiles of ``tile_m`` rows; host code."""
        reciprocals = [reciprocal(cutlass.max(ceil_div(extent, tile_m), 1)) for extent in m]
        return cls(m, n, k, tile_offsets, num_tiles, reciprocals)

    def with_factors(self, factors: list | None) -> "GroupTable":
        """The same groups: their factors are read where they are used."""
        return self

    @cute.jit
    def first_cursor(self, tile_idx: Int32, tile_shape_mnk: cutlass.Constexpr) -> tuple:
        """Where a worker starts whose first tile is ``tile_idx``."""
        return (tile_idx,)

    @cute.jit
    def next_cursor(self, cursor: tuple, stride: Int32, tile_shape_mnk: cutlass.Constexpr) -> tuple:
        """``stride`` tiles further."""
        return (cursor[0] + stride,)

    @cute.jit
    def has_tile(self, cursor: tuple):
        """Whether there is a tile at the cursor."""
        return cursor[0] < self.num_tiles

    @cute.jit
    def tile(self, cursor: tuple, tile_shape_mnk: cutlass.Constexpr) -> "WorkTile":
        """The tile at the cursor."""
        return locate_tile(self, tile_shape_mnk, cursor[0])

    @property
    def num_groups(self) -> int:
        """Slots of this launch, a compile-time constant."""
        return len(self.m)


@dataclass(frozen=True)
class WorkTile:
    """One output tile: the record that the scheduler hands to every role.

    Attributes:
        slot: position of the group in the launch order.
        tile_m_idx, tile_n_idx: tile coordinates inside the group.
        k_tile_cnt: K tiles to accumulate, at least 1.
        m, n: extents of the group, for clipping at its edges.
        a_row: row of ``a`` and of the output where the group begins.
        a_sf_block: 128-row block of ``a_scale`` where it begins.
        a_batch, b_batch: its batch of ``a`` and the output, and of ``b``.
        factors: of the group, one a product, where they were read with its sizes.
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
    """The value of ``slot``: a chain of selects, since kernel parameters cannot be indexed at run time."""
    chosen = values[0]
    for i in cutlass.range_constexpr(1, len(values)):
        chosen = select(slot == i, values[i], chosen)
    return chosen


def ceil_div(extent: Int32, divisor: int) -> Int32:
    """Of an extent, which is never negative: two instructions, where a signed division takes eight."""
    return Int32((Uint32(extent) + (divisor - 1)) // divisor)


def reciprocal(divisor: Int32) -> Uint32:
    """What :func:`divide` takes beside a divisor of at least 1: host code, so that the device only multiplies."""
    return Uint32(0xFFFFFFFF) // Uint32(divisor)


@cute.jit
def divide(value: Int32, divisor: Int32, reciprocal: Uint32) -> tuple:
    """Quotient and remainder of numbers that are not negative, without the instructions of a division."""
    # At most one too small: reciprocal > 2**32 / divisor - 1, and value < 2**32.
    quotient = Int32(mul_hi(Uint32(value), reciprocal))
    rest = value - quotient * divisor
    is_small = rest >= divisor
    return select(is_small, quotient + 1, quotient), select(is_small, rest - divisor, rest)


@cute.jit
def locate_slot(groups: GroupTable, tile_idx: Int32) -> tuple:
    """Slot of a linear index, the slot's m, n and k, its first index, and the reciprocal of its tiles along M."""
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
    """The work tile with linear index ``tile_idx`` (0 <= tile_idx < num_tiles); M is the fast axis in a group.

    Walking along M first reads each weight tile from memory once while its neighbours find it in L2. An index behind
    the last tile gives a tile of the last slot that does not exist.
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
