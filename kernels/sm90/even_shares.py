"""Work dealt evenly: every cluster gets as much as every other, to the K tile.

Positions count work: a K tile of a work tile takes ``work_of_tokens``, and so do a few before them, for storing the tile; tiles
follow each other as elsewhere (M is the fast axis in a group). First come waves of whole tiles, one a cluster, as many as leave
every cluster some work: their sums need not be handed over, and clusters that read the same tokens at the same time find them
in L2. The positions behind are divided so that every cluster has the same work in all: what it gets of them begins and ends
within a work tile, and is the end of one tile, whole tiles, and the beginning of one. Who has a tile's first K tile adds up
(``handover``).

The last cluster has the first share: a tile's beginning waits for CTAs that were started before its own.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from nvfp4_cute.planning.arch.sm90 import (
    LEAST_PART,
    LEAST_REST,
    LEAST_SHARE,
    STORING_K_TILES,
    TOKEN_STEP,
    k_tile_work,
)
from nvfp4_cute.planning.config import KernelConfig

from ..common.device_groups import DeviceGroups, inclusive_sum
from ..common.group_table import GroupTable, WorkTile, ceil_div, divide, locate_slot, select_slot
from ..common.select import select
from .token_tiles import TokenTiles
from .warp_schedule import WARP_SIZE


def work_of_tokens(tokens: Int32 | int):
    """Of a K tile of a tile of so many tokens, those that are multiplied."""
    return cutlass.max(*k_tile_work(ceil_div(tokens, TOKEN_STEP)))


def work_of_group(m: Int32, n: Int32, k: Int32, tile_shape_mnk: tuple) -> Int32:
    """Positions that a group takes."""
    return Strip.of(m, ceil_div(k, tile_shape_mnk[2]), tile_shape_mnk).length * ceil_div(n, tile_shape_mnk[1])


@dataclass(frozen=True)
class Strip:
    """Positions of a group's tiles that have the same weights.

    Attributes:
        tiles: their tokens.
        full, first, second: positions of a full tile, and of the last two, as of ``TokenTiles``.
    """

    tiles: TokenTiles
    full: Int32
    first: Int32
    second: Int32

    @classmethod
    def of(cls, m: Int32, k_tile_cnt: Int32, tile_shape_mnk: tuple) -> "Strip":
        """Of a group of so many tokens, with so many K tiles."""
        tiles, count = TokenTiles.of(m, tile_shape_mnk[0]), k_tile_cnt + STORING_K_TILES
        full, first, second = (
            work_of_tokens(of) * count for of in (tile_shape_mnk[0], tiles.first, tiles.second)
        )
        return cls(tiles, full, first, select(tiles.count > 1, second, Int32(0)))

    @property
    def length(self) -> Int32:
        """Positions in all."""
        return self.tiles.num_full * self.full + self.first + self.second

    def before(self, index: Int32) -> Int32:
        """Positions before a tile."""
        return self.tiles.before(index, self.full, self.first)

    def tile_at(self, position: Int32) -> Int32:
        """The tile that has a position, counted in the strip."""
        index = cutlass.min(Int32(Uint32(position) // Uint32(self.full)), self.tiles.num_full)
        return index + select(position >= self.tiles.num_full * self.full + self.first, Int32(1), Int32(0))


@dataclass(frozen=True)
class ListWork(GroupTable):
    """``GroupTable`` whose offsets and end are positions.

    Attributes:
        first_tiles: tiles of all earlier slots, one Int32 a slot.
    """

    first_tiles: list

    def end(self, tile_shape_mnk: tuple) -> Int32:
        """First position behind all groups."""
        return self.num_tiles

    def most_k_tiles(self, tile_shape_mnk: tuple) -> Int32:
        """K tiles of a tile, at most."""
        most = self.k[0]
        for k in self.k[1:]:
            most = cutlass.max(most, k)
        return ceil_div(most, tile_shape_mnk[2])

    @cute.jit
    def position_of_tile(self, index: Int32, tile_shape_mnk: cutlass.Constexpr) -> Int32:
        """First position of the tile of an index, or the end."""
        by_tile = replace(self, tile_offsets=self.first_tiles)
        slot, m, _, k, first_tile, reciprocal = locate_slot(by_tile, index)
        local, begin = index - first_tile, select_slot(self.tile_offsets, slot)
        return begin + _position_in_group(local, m, k, reciprocal, tile_shape_mnk)


@dataclass(frozen=True)
class DeviceWork(DeviceGroups):
    """``DeviceGroups`` whose indices are positions."""

    # Each of its cursors looks for one place.
    WINDOWS_AHEAD: ClassVar[int] = 0

    @cute.jit
    def tiles_of_group(self, m: Int32, tile_shape_mnk: cutlass.Constexpr) -> Int32:
        """What a group of ``m`` rows takes of the positions."""
        work = Int32(0)
        if m > 0:
            work = work_of_group(m, self.n, self.k, tile_shape_mnk)
        return work

    def most_k_tiles(self, tile_shape_mnk: tuple) -> Int32:
        """K tiles of a tile."""
        return ceil_div(self.k, tile_shape_mnk[2])

    @cute.jit
    def position_of_tile(self, index: Int32, tile_shape_mnk: cutlass.Constexpr) -> Int32:
        """First position of the tile of an index, or the end."""
        # A lane a group, as in ``DeviceGroups``, but with ends in both: in tiles, and in positions.
        tiles, last = DeviceGroups(**vars(self)), WARP_SIZE - 1
        first_group, tile_end, end = Int32(-WARP_SIZE), Int32(0), Int32(0)
        lane_m, lane_tile_end, lane_end = Int32(0), Int32(0), Int32(0)
        while first_group < 0 or (index >= tile_end and first_group + WARP_SIZE < self.num_groups):
            first_group += WARP_SIZE
            lane_m, _, lane_end, _ = self._window(first_group, end, Int32(0), tile_shape_mnk)
            lane_tile_end = tile_end + inclusive_sum(tiles.tiles_of_group(lane_m, tile_shape_mnk))
            tile_end, end = (cute.arch.shuffle_sync(ends, last) for ends in (lane_tile_end, lane_end))
        position = end
        if index < tile_end:
            lane = cute.arch.popc(cute.arch.vote_ballot_sync(lane_tile_end <= index))
            m = cute.arch.shuffle_sync(lane_m, lane)
            position = cute.arch.shuffle_sync(lane_end, lane) - self.tiles_of_group(m, tile_shape_mnk)
            first_tile = cute.arch.shuffle_sync(lane_tile_end, lane) - tiles.tiles_of_group(m, tile_shape_mnk)
            position += _position_in_group(index - first_tile, m, self.k, None, tile_shape_mnk)
        return position


def groups_by_work(groups: GroupTable | DeviceGroups, config: KernelConfig) -> ListWork | DeviceWork:
    """The groups with positions for indices; host code."""
    if isinstance(groups, DeviceGroups):
        return DeviceWork(**vars(groups))
    ends, offsets, end = [*groups.tile_offsets[1:], groups.num_tiles], [], Int32(0)
    for m, n, k, first_tile, end_tile in zip(
        groups.m, groups.n, groups.k, groups.tile_offsets, ends, strict=True
    ):
        offsets.append(end)
        # A group without tiles has the extents of a well-formed tensor map.
        end += work_of_group(m, n, k, config.work_tile_mnk) * cutlass.min(end_tile - first_tile, 1)
    fields = vars(groups) | {"tile_offsets": offsets, "num_tiles": end}
    return ListWork(**fields, first_tiles=groups.tile_offsets)


@cute.jit
def _position_in_group(
    local: Int32, m: Int32, k: Int32, reciprocal: Uint32 | None, tile_shape_mnk: cutlass.Constexpr
) -> Int32:
    """Positions of a group before its tile of an index. reciprocal: of its tiles along M, if known."""
    strip = Strip.of(m, ceil_div(k, tile_shape_mnk[2]), tile_shape_mnk)
    if cutlass.const_expr(reciprocal is None):
        tile_n_idx = Int32(Uint32(local) // Uint32(strip.tiles.count))
        tile_m_idx = local - tile_n_idx * strip.tiles.count
    else:
        tile_n_idx, tile_m_idx = divide(local, strip.tiles.count, reciprocal)
    return tile_n_idx * strip.length + strip.before(tile_m_idx)


@dataclass(frozen=True)
class Shares:
    """What is divided among ``num_shares`` clusters.

    Attributes:
        length, longer: positions of a share in all, of which so many have one more.
        num_shares: of clusters that get any.
        waves: whole tiles that each begins with.
    """

    length: Int32
    longer: Int32
    num_shares: Int32
    waves: Int32

    @classmethod
    def of(cls, groups: ListWork | DeviceWork, config: KernelConfig) -> "Shares":
        """Of the launch. There are no more shares than are worth it."""
        tile_shape, num_cluster = config.work_tile_mnk, cute.arch.grid_dim()[0] // config.cluster_size
        end, work = groups.end(tile_shape), work_of_tokens(tile_shape[0])
        useful = Int32(Uint32(end) // (LEAST_SHARE * work))
        num_shares = cutlass.max(cutlass.min(num_cluster, useful), 1)
        length = Int32(Uint32(end) // Uint32(num_shares))
        # What is left of a share is a part of a tile that is worth handing over, whatever tiles it begins with: who has a share
        # within a tile has K tiles of it.
        tile = (groups.most_k_tiles(tile_shape) + STORING_K_TILES) * work
        least_rest = cutlass.max(Int32(Uint32(tile) // LEAST_REST), LEAST_PART * work)
        rest = cutlass.max(length - least_rest, 0)
        return cls(length, end - length * num_shares, num_shares, Int32(Uint32(rest) // Uint32(tile)))

    def before(self, share: Int32) -> Int32:
        """Positions of all shares before one."""
        return share * self.length + cutlass.min(share, self.longer)

    @cute.jit
    def first(self, share: Int32, groups: object, tile_shape: cutlass.Constexpr) -> Int32:
        """Where behind the waves a share begins, and the one before ends.

        Of the positions of all shares before, those in whole tiles are not there: in a wave as many as before this share's tile.
        """
        position = self.before(share)
        for part in cutlass.range(2 * self.waves, unroll=1):
            # The share's tile of a wave, and the end of the wave.
            wave, is_end = part // 2, part % 2
            tile = (wave + is_end) * self.num_shares + select(is_end == 0, share, Int32(0))
            found = groups.position_of_tile(tile, tile_shape)
            position += select(is_end == 0, -found, found)
        return position

    @cute.jit
    def stretch(
        self, share: Int32, number: Int32, groups: object, tile_shape: cutlass.Constexpr
    ) -> "Stretch":
        """Of a share: those before the last are a whole tile each, one of every wave."""
        is_whole = number < self.waves
        begin, end = Int32(0), Int32(0)
        if is_whole:
            begin = groups.position_of_tile(number * self.num_shares + share, tile_shape)
            end = begin + 1
        else:
            # One place for both: what finds a tile is long.
            for following in cutlass.range(2, unroll=1):
                begin, end = end, self.first(share + following, groups, tile_shape)
        return Stretch(begin, end, is_whole)


@dataclass(frozen=True)
class Stretch:
    """Positions that follow each other in a share.

    Attributes:
        begin, end: its positions, of a whole tile only the first one.
        is_whole: whether it is a whole tile.
    """

    begin: Int32
    end: Int32
    is_whole: Boolean

    def k_tiles(self, placed: "Placed", position: Int32) -> tuple:
        """The first of the K tiles that the stretch has of the tile at a position in it, and how many."""
        first, behind = placed.k_tile(position), placed.k_tile(self.end)
        return first, select(self.is_whole, placed.tile.k_tile_cnt, behind) - first


@dataclass(frozen=True)
class Placed:
    """A tile among the positions.

    Attributes:
        tile: the tile.
        end: first position behind it.
        per_k_tile: positions of a K tile.
        least_part: K tiles that a cluster gets of it at least.
    """

    tile: WorkTile
    end: Int32
    per_k_tile: Int32
    least_part: Int32

    def k_tile(self, position: Int32) -> Int32:
        """First K tile of what begins at a position, whole parts being rounded; behind the last one at the tile's end."""
        begin, part = self.end - self.tile.k_tile_cnt * self.per_k_tile, self.least_part * self.per_k_tile
        rounded = cutlass.min(cutlass.max(position, begin), self.end) - begin + part // 2
        parts = Int32(Uint32(rounded) // Uint32(part))
        return select(rounded >= self.end - begin, self.tile.k_tile_cnt, parts * self.least_part)


@cute.jit
def place_at(groups: object, position: Int32, config: cutlass.Constexpr[KernelConfig]) -> Placed:
    """The tile at a position, a cluster's."""
    tile_shape = config.work_tile_mnk
    if cutlass.const_expr(isinstance(groups, GroupTable)):
        slot, m, n, k, offset, _ = locate_slot(groups, position)
        tile = WorkTile(slot, Int32(0), Int32(0), ceil_div(k, tile_shape[2]), m, n)
        local = position - offset
    else:
        tile, local = groups.group_at(groups.first_cursor(position, tile_shape), tile_shape)
    strip = Strip.of(tile.m, tile.k_tile_cnt, tile_shape)
    tile_n_idx = Int32(Uint32(local) // Uint32(strip.length))
    in_strip = local - tile_n_idx * strip.length
    tile_m_idx = strip.tile_at(in_strip)
    begin = position - (in_strip - strip.before(tile_m_idx))
    per_k_tile = work_of_tokens(strip.tiles.tokens(tile_m_idx))
    return Placed(
        replace(tile, tile_m_idx=tile_m_idx, tile_n_idx=tile_n_idx),
        begin + per_k_tile * (tile.k_tile_cnt + STORING_K_TILES),
        per_k_tile,
        cutlass.min(LEAST_PART, tile.k_tile_cnt),
    )
