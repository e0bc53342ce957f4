"""Assigns the K steps of all tiles to CTAs, and finds which CTAs share a tile.

A position is the number of a step among the steps of all tiles of all groups. K varies fastest, then the tiles of a group, along
tokens before weight rows, so that tiles that share weights are neighbours. All CTAs get the same number of consecutive positions,
or one more. A CTA computes two positions per turn if both belong to one tile.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from nvfp4_cute.formats.scale_layout import ATOM_ROWS
from nvfp4_cute.planning.arch.warp_mma import MOST_GROUPS, STEPS_OF_TURN, WARP_SIZE

from ..common.device_groups import inclusive_sum
from ..common.group_table import select_slot
from ..common.select import select


@dataclass(frozen=True)
class Place:
    """The current tile and step of a CTA.

    Attributes:
        first, steps: first position of the tile, and its number of steps.
        step, end: first step of this turn within the tile, and the step at which the CTA's share of the tile ends. Equal or
            beyond if the CTA has no work left.
        slot: number of the group.
        unit: first weight rows of the tile, in units of one warp's rows.
        row, rows: first token row of the tile (among the rows of all groups, or of the group's batch), and number of rows.
            In a routed group, ``row`` is the batch of its weights, or -1 if it has none.
    """

    first: Int32
    steps: Int32
    step: Int32
    end: Int32
    slot: Int32
    unit: Int32
    row: Int32
    rows: Int32


@dataclass(frozen=True)
class Shares:
    """Numbers of positions per CTA: ``base``, and one more for each of the first ``longer`` CTAs."""

    base: Int32
    longer: Int32

    @classmethod
    def of(cls, total: Int32, num_cta: Int32) -> "Shares":
        """Divides all positions between ``num_cta`` CTAs."""
        base = divide(total, num_cta)
        return cls(base, total - base * num_cta)

    def first(self, cta: Int32) -> Int32:
        """Returns the first position of a CTA."""
        return cta * self.base + cutlass.min(cta, self.longer)

    def owner(self, position: Int32) -> Int32:
        """Returns the CTA that has a position."""
        beyond = position - self.longer * (self.base + 1)
        of_rest = self.longer + divide(cutlass.max(beyond, 0), cutlass.max(self.base, 1))
        return select(beyond < 0, divide(position, self.base + 1), of_rest)


@dataclass(frozen=True)
class Extents:
    """Extents of groups, as kernel parameters. Lists have one entry per slot, or one for all groups.

    Attributes:
        m, n, k: extents of the groups. m is the total of ragged groups, and the maximum of masked ones.
        tile_offsets: for a list, the number of tiles of all earlier slots; the last entry is the total.
        sizes: pointer to int32 on the device: offsets of ragged groups, rows of masked ones, ids of routed ones.
        count: number of groups.
        experts: for routed groups, the id of the first expert, the number of experts, and 32-bit words per id; otherwise empty.
    """

    m: list
    n: list
    k: list
    tile_offsets: list
    sizes: Any
    count: Int32
    experts: list


@dataclass(frozen=True)
class Sizes:
    """The division of groups into tiles.

    Attributes:
        form: "list", "ragged", "masked", "batched" or "routed".
        atom_units: units of weight rows (one warp's each) per row of scale atoms.
        units, tokens: units of weight rows, and tokens, per tile.
        step_k: values of K per step of all warps.
    """

    extents: Extents
    form: str
    atom_units: int
    units: int
    tokens: int
    step_k: int

    @property
    def count(self) -> Int32:
        """Number of groups."""
        return self.extents.count

    def unit_tiles(self, slot: Int32) -> Int32:
        """Returns the number of tiles of a group along its weight rows."""
        atoms = cute.ceil_div(select_slot(self.extents.n, slot), ATOM_ROWS)
        return cute.ceil_div(atoms * self.atom_units, self.units)

    def steps(self, slot: Int32) -> Int32:
        """Returns the number of steps of a group's tiles."""
        return cute.ceil_div(select_slot(self.extents.k, slot), self.step_k)

    @cute.jit
    def count_rows(self, group: Int32) -> tuple:
        """Returns a group's first row and its number of rows, from the device or from the table."""
        extents = self.extents
        first, rows = Int32(0), select_slot(extents.m, group)
        if cutlass.const_expr(self.form in ("ragged", "masked")):
            sizes = cute.make_tensor(extents.sizes, cute.make_layout(self.count))
            rows = cutlass.min(sizes[group], rows)
            if cutlass.const_expr(self.form == "ragged"):
                if group > 0:
                    first = cutlass.max(sizes[group - 1], 0)
        elif cutlass.const_expr(self.form == "list"):
            # A group without rows has no tiles; its extents in the table are 1.
            tiles = select_slot(extents.tile_offsets[1:], group) - select_slot(
                extents.tile_offsets[:-1], group
            )
            rows = select(tiles > 0, rows, Int32(0))
        return first, cutlass.max(rows - first, 0)

    @cute.jit
    def weights_of(self, group: Int32) -> Int32:
        """Returns the batch of a routed group's weights; -1 if the expert is not local."""
        first, count, words = self.extents.experts
        ids = cute.make_tensor(self.extents.sizes, cute.make_layout(self.count, stride=words))
        batch = ids[group] - first
        return select((batch >= 0) & (batch < count), batch, Int32(-1))


@dataclass(frozen=True)
class Groups:
    """Groups, with one entry per group in shared memory that the CTA computes.

    Attributes:
        sizes: the division of groups into tiles.
        ends: number of positions of all groups up to and including this one.
        starts, rows: first row and number of rows. For routed groups, ``starts`` is the batch of the weights.
    """

    sizes: Sizes
    ends: Any
    starts: Any
    rows: Any

    @classmethod
    def allocate(cls, sizes: Sizes, smem: Any) -> "Groups":
        """Allocates the entries, without values."""
        room = len(sizes.extents.m) if sizes.form == "list" else MOST_GROUPS
        return cls(sizes, *(smem.allocate_tensor(Int32, cute.make_layout(room), 16) for _ in range(3)))

    @cute.jit
    def find(self, tidx: Int32, threads: cutlass.Constexpr):
        """Computes the entries: all threads read sizes, then one warp adds them up. All threads of the CTA must call it."""
        sizes, ends, starts, rows_of = self.sizes, self.ends, self.starts, self.rows
        for group in cutlass.range(tidx, sizes.count, threads, unroll=1):
            first, rows = Int32(0), Int32(1)
            if cutlass.const_expr(sizes.form == "routed"):
                first = Sizes.weights_of(sizes, group)
            else:
                first, rows = Sizes.count_rows(sizes, group)
            starts[group], rows_of[group] = first, rows
            tiles = cute.ceil_div(rows, sizes.tokens) * Sizes.unit_tiles(sizes, group)
            ends[group] = tiles * Sizes.steps(sizes, group)
        cute.arch.sync_threads()
        if tidx < WARP_SIZE:
            before = Int32(0)
            for base in cutlass.range(0, sizes.count, WARP_SIZE, unroll=1):
                own = Int32(0)
                if base + tidx < sizes.count:
                    own = ends[base + tidx]
                total = before + inclusive_sum(own)
                if base + tidx < sizes.count:
                    ends[base + tidx] = total
                before = cute.arch.shuffle_sync(total, WARP_SIZE - 1)
        cute.arch.sync_threads()

    @cute.jit
    def total(self) -> Int32:
        """Returns the number of positions of all groups."""
        return self.ends[self.sizes.count - 1]

    @cute.jit
    def place(self, position: Int32, stop: Int32) -> Place:
        """Returns the place at ``position`` for a CTA whose share ends at ``stop``."""
        sizes, slot, before = self.sizes, self._slot_of(position), Int32(0)
        if slot > 0:
            before = self.ends[slot - 1]
        steps, rows = sizes.steps(slot), self.rows[slot]
        tile = divide(position - before, steps)
        first = before + tile * steps
        token_tiles = cute.ceil_div(rows, sizes.tokens)
        unit_tile, token_tile = tile, Int32(0)
        if token_tiles > 1:
            unit_tile = divide(tile, token_tiles)
            token_tile = tile - unit_tile * token_tiles
        row = token_tile * sizes.tokens
        return Place(
            first=first,
            steps=steps,
            step=position - first,
            end=cutlass.min(steps, stop - first),
            slot=slot,
            unit=unit_tile * sizes.units,
            row=self.starts[slot] + row,
            rows=cutlass.min(rows - row, sizes.tokens),
        )

    @cute.jit
    def next_tile(self, position: Int32) -> Int32:
        """Returns the first position of the tile that begins at ``position`` or after it."""
        place = Groups.place(self, position, position)
        return select(place.step == 0, position, place.first + place.steps)

    @cute.jit
    def next(self, place: Place, stop: Int32) -> Place:
        """Returns the place of the next turn."""
        step = place.step + STEPS_OF_TURN
        found = Place(
            place.first, place.steps, step, place.end, place.slot, place.unit, place.row, place.rows
        )
        if step >= place.end:
            position = place.first + place.steps
            if position < stop:
                found = Groups.place(self, position, stop)
        return found

    @cute.jit
    def _slot_of(self, position: Int32) -> Int32:
        """Returns the first group that ends after a position."""
        low, high = Int32(0), self.sizes.count - 1
        while low < high:
            middle = (low + high) // 2
            is_beyond = self.ends[middle] > position
            low = select(is_beyond, low, middle + 1)
            high = select(is_beyond, middle, high)
        return low


def divide(a: Int32, b: Int32) -> Int32:
    """Returns ``a // b`` of numbers that are not negative, by an unsigned division."""
    return Int32(Uint32(a) // Uint32(b))
