"""Which K steps of which tiles a CTA takes, and which CTAs share a tile.

Steps of all tiles follow each other, K fastest, then the tiles of a group: tokens before weight rows, so that tiles which share
weights are neighbours. Every CTA gets as many steps as any other, or one less. A CTA takes its steps two at a time, as far as
they are of one tile.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ..common.select import select

STEPS_OF_TURN = 2


@dataclass(frozen=True)
class Place:
    """Where a CTA is.

    Attributes:
        tile: its number; ``step``: of the two that follow, the first; ``end``: of the CTA's steps in the tile; none where they
            are over.
        group, unit: of the weights, in units of 32 rows.
        row, rows: the tile's first row of tokens in the group's, and how many there are.
    """

    tile: Int32
    step: Int32
    end: Int32
    group: Int32
    unit: Int32
    row: Int32
    rows: Int32


@dataclass(frozen=True)
class Shares:
    """Steps of CTAs.

    Attributes:
        steps: of a tile.
        base, longer: steps of a CTA, and how many of the first CTAs have one more.
    """

    steps: Int32
    base: Int32
    longer: Int32

    def first(self, cta: Int32) -> Int32:
        """A CTA's first step."""
        return cta * self.base + cutlass.min(cta, self.longer)

    def owner(self, step: Int32) -> Int32:
        """Whose step it is."""
        behind = step - self.longer * (self.base + 1)
        of_rest = self.longer + divide(behind, cutlass.max(self.base, 1))
        return select(behind < 0, divide(step, self.base + 1), of_rest)


@dataclass(frozen=True)
class Groups:
    """Groups of tokens that have weights of their own.

    Attributes:
        form: "one": one group; "ragged": groups' rows follow each other; "masked", "batched": each has ``most`` rows of room.
        ends: in shared memory, tiles of tokens of all groups up to each, inclusive; None of one group.
        starts: in shared memory, of ragged groups, their first rows.
        most: rows.
        count: groups.
        units: of 32 weight rows, that a tile has.
        unit_tiles: tiles along the weights.
        tokens: rows of a tile.
    """

    form: str
    ends: object
    starts: object
    counts: object
    most: Int32
    count: Int32
    units: int
    unit_tiles: Int32
    tokens: int

    @cute.jit
    def tiles(self) -> Int32:
        """Of all groups."""
        if cutlass.const_expr(self.form == "one"):
            return cute.ceil_div(self.most, self.tokens) * self.unit_tiles
        return self.ends[self.count - 1] * self.unit_tiles

    @cute.jit
    def place(self, tile: Int32, step: Int32, end: Int32) -> Place:
        """A tile's."""
        group, before, rows = Int32(0), Int32(0), self.most
        if cutlass.const_expr(self.form != "one"):
            group = self._group_of(divide(tile, self.unit_tiles))
            if group > 0:
                before = self.ends[group - 1]
            rows = self.counts[group]
        local = tile - before * self.unit_tiles
        token_tiles = cute.ceil_div(rows, self.tokens)
        unit_tile, token_tile = local, Int32(0)
        if token_tiles > 1:
            unit_tile = divide(local, token_tiles)
            token_tile = local - unit_tile * token_tiles
        row = token_tile * self.tokens
        first = Int32(0)
        if cutlass.const_expr(self.form == "ragged"):
            first = self.starts[group]
        return Place(
            tile, step, end, group, unit_tile * self.units, first + row, cutlass.min(rows - row, self.tokens)
        )

    @cute.jit
    def _group_of(self, token_tile: Int32) -> Int32:
        """The first group whose tiles end behind this one."""
        low, high = Int32(0), self.count - 1
        while low < high:
            middle = (low + high) // 2
            is_behind = self.ends[middle] > token_tile
            low = select(is_behind, low, middle + 1)
            high = select(is_behind, middle, high)
        return low


@cute.jit
def next_place(place: Place, groups: Groups, steps: Int32, stop: Int32) -> Place:
    """The place after, up to the CTA's ``stop``."""
    tile, step, end = place.tile, place.step + STEPS_OF_TURN, place.end
    if step >= place.end:
        tile, step = place.tile + 1, Int32(0)
        end = cutlass.min(steps, stop - tile * steps)
        place = Place(tile, step, Int32(0), place.group, place.unit, place.row, Int32(0))
        if end > 0:
            place = groups.place(tile, step, end)
    return Place(place.tile, step, place.end, place.group, place.unit, place.row, place.rows)


def turns(first: Int32, stop: Int32, steps: Int32) -> Int32:
    """How many turns a CTA takes."""
    head = cutlass.min(steps - first % steps, stop - first)
    rest = stop - first - head
    whole = rest // steps
    return _half(head) + whole * _half(steps) + _half(rest - whole * steps)


def _half(steps: Int32) -> Int32:
    return (steps + 1) // STEPS_OF_TURN


def divide(a: Int32, b: Int32) -> Int32:
    """Of numbers that are not negative."""
    return Int32(Uint32(a) // Uint32(b))
