"""Stream-K partition: every cluster gets the same amount of work, to the K tile.

Positions count work. A K tile takes ``work_of_tokens`` positions; storing a tile takes as many as ``STORING_K_TILES`` K tiles,
which come before the tile's own. Tiles are ordered as elsewhere (M is the fast axis within a group). The launch starts with
waves of whole tiles, one tile per cluster, as long as every cluster still has work left afterwards: whole tiles need no fixup,
and clusters that read the same tokens at the same time find them in L2. The remaining positions are divided so that the total
work per cluster is equal. A cluster's share of them may start and end within a work tile: the end of one tile, then whole
tiles, then the start of another. The cluster with a tile's first K tile adds the partial sums of the others (``fixup``).

The last cluster gets the first share, so that the owner of a tile waits only for CTAs that were started before it.
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
    """Returns the positions of one K tile of a tile whose MMAs multiply ``tokens`` tokens."""
    return cutlass.max(*k_tile_work(ceil_div(tokens, TOKEN_STEP)))


def work_of_group(m: Int32, n: Int32, k: Int32, tile_shape_mnk: tuple) -> Int32:
    """Returns the positions of a group."""
    return Strip.of(m, ceil_div(k, tile_shape_mnk[2]), tile_shape_mnk).length * ceil_div(n, tile_shape_mnk[1])


@dataclass(frozen=True)
class Strip:
    """Positions of the tiles of a group that share one tile of weights.

    Attributes:
        tiles: token counts of the tiles.
        full, first, second: positions of a full tile, and of the last two tiles (see ``TokenTiles``).
    """

    tiles: TokenTiles
    full: Int32
    first: Int32
    second: Int32

    @classmethod
    def of(cls, m: Int32, k_tile_cnt: Int32, tile_shape_mnk: tuple) -> "Strip":
        """Computes the strip of a group of ``m`` tokens with ``k_tile_cnt`` K tiles."""
        tiles, count = TokenTiles.of(m, tile_shape_mnk[0]), k_tile_cnt + STORING_K_TILES
        full, first, second = (
            work_of_tokens(of) * count for of in (tile_shape_mnk[0], tiles.first, tiles.second)
        )
        return cls(tiles, full, first, select(tiles.count > 1, second, Int32(0)))

    @property
    def length(self) -> Int32:
        """Positions of the strip."""
        return self.tiles.num_full * self.full + self.first + self.second

    def before(self, index: Int32) -> Int32:
        """Positions before a tile."""
        return self.tiles.before(index, self.full, self.first)

    def tile_at(self, position: Int32) -> Int32:
        """Returns the index, in the strip, of the tile at a position."""
        index = cutlass.min(Int32(Uint32(position) // Uint32(self.full)), self.tiles.num_full)
        return index + select(position >= self.tiles.num_full * self.full + self.first, Int32(1), Int32(0))


@dataclass(frozen=True)
class ListWork(GroupTable):
    """``GroupTable`` whose offsets and end are positions.

    Attributes:
        first_tiles: number of tiles of all earlier slots, one Int32 per slot.
    """

    first_tiles: list

    def end(self, tile_shape_mnk: tuple) -> Int32:
        """Returns the first position after all groups."""
        return self.num_tiles

    def most_k_tiles(self, tile_shape_mnk: tuple) -> Int32:
        """Returns the largest number of K tiles of any tile."""
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

    # A cursor looks for one position only, so there is nothing to look ahead for.
    WINDOWS_AHEAD: ClassVar[int] = 0

    @cute.jit
    def tiles_of_group(self, m: Int32, tile_shape_mnk: cutlass.Constexpr) -> Int32:
        """Returns the positions of a group of ``m`` rows."""
        work = Int32(0)
        if m > 0:
            work = work_of_group(m, self.n, self.k, tile_shape_mnk)
        return work

    def most_k_tiles(self, tile_shape_mnk: tuple) -> Int32:
        """Returns the number of K tiles of every tile."""
        return ceil_div(self.k, tile_shape_mnk[2])

    @cute.jit
    def position_of_tile(self, index: Int32, tile_shape_mnk: cutlass.Constexpr) -> Int32:
        """First position of the tile of an index, or the end."""
        # One lane per group, as in ``DeviceGroups``, but each lane has two ends: in tiles and in positions.
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
    """Replaces tile indices by positions; host code."""
    if isinstance(groups, DeviceGroups):
        return DeviceWork(**vars(groups))
    ends, offsets, end = [*groups.tile_offsets[1:], groups.num_tiles], [], Int32(0)
    for m, n, k, first_tile, end_tile in zip(
        groups.m, groups.n, groups.k, groups.tile_offsets, ends, strict=True
    ):
        offsets.append(end)
        # An empty group still has the extents of a well-formed tensor map, hence the factor of 0 or 1.
        end += work_of_group(m, n, k, config.work_tile_mnk) * cutlass.min(end_tile - first_tile, 1)
    fields = vars(groups) | {"tile_offsets": offsets, "num_tiles": end}
    return ListWork(**fields, first_tiles=groups.tile_offsets)


@cute.jit
def _position_in_group(
    local: Int32, m: Int32, k: Int32, reciprocal: Uint32 | None, tile_shape_mnk: cutlass.Constexpr
) -> Int32:
    """Returns the positions of a group before its tile ``local``. reciprocal: that of its number of tiles along M, if known."""
    strip = Strip.of(m, ceil_div(k, tile_shape_mnk[2]), tile_shape_mnk)
    if cutlass.const_expr(reciprocal is None):
        tile_n_idx = Int32(Uint32(local) // Uint32(strip.tiles.count))
        tile_m_idx = local - tile_n_idx * strip.tiles.count
    else:
        tile_n_idx, tile_m_idx = divide(local, strip.tiles.count, reciprocal)
    return tile_n_idx * strip.length + strip.before(tile_m_idx)


@dataclass(frozen=True)
class Shares:
    """Partition of the work among ``num_shares`` clusters.

    Attributes:
        length: positions of a share, those of its whole tiles included.
        longer: number of leading shares that have one position more.
        num_shares: number of clusters that get work.
        waves: whole tiles that every share starts with.
    """

    length: Int32
    longer: Int32
    num_shares: Int32
    waves: Int32

    @classmethod
    def of(cls, groups: ListWork | DeviceWork, config: KernelConfig) -> "Shares":
        """Partitions the launch.

        Small launches use fewer clusters than there are: a share below ``LEAST_SHARE`` K tiles does not pay.
        """
        tile_shape, num_cluster = config.work_tile_mnk, cute.arch.grid_dim()[0] // config.cluster_size
        end, work = groups.end(tile_shape), work_of_tokens(tile_shape[0])
        useful = Int32(Uint32(end) // (LEAST_SHARE * work))
        num_shares = cutlass.max(cutlass.min(num_cluster, useful), 1)
        length = Int32(Uint32(end) // Uint32(num_shares))
        # Leave enough of a share after its whole tiles that its part of a tile is worth a fixup.
        tile = (groups.most_k_tiles(tile_shape) + STORING_K_TILES) * work
        least_rest = cutlass.max(Int32(Uint32(tile) // LEAST_REST), LEAST_PART * work)
        rest = cutlass.max(length - least_rest, 0)
        return cls(length, end - length * num_shares, num_shares, Int32(Uint32(rest) // Uint32(tile)))

    def before(self, share: Int32) -> Int32:
        """Returns the positions of all shares before one."""
        return share * self.length + cutlass.min(share, self.longer)

    @cute.jit
    def first(self, share: Int32, groups: object, tile_shape: cutlass.Constexpr) -> Int32:
        """Returns where, after the waves, a share starts and the previous one ends.

        Starts from the positions of all earlier shares and subtracts those that lie in whole tiles of the waves.
        """
        position = self.before(share)
        for part in cutlass.range(2 * self.waves, unroll=1):
            # Even parts: the share's tile in a wave. Odd parts: the end of that wave.
            wave, is_end = part // 2, part % 2
            tile = (wave + is_end) * self.num_shares + select(is_end == 0, share, Int32(0))
            found = groups.position_of_tile(tile, tile_shape)
            position += select(is_end == 0, -found, found)
        return position

    @cute.jit
    def span(self, share: Int32, number: Int32, groups: object, tile_shape: cutlass.Constexpr) -> "Span":
        """Returns span ``number`` of a share. All spans but the last are one whole tile, one per wave."""
        is_whole = number < self.waves
        begin, end = Int32(0), Int32(0)
        if is_whole:
            begin = groups.position_of_tile(number * self.num_shares + share, tile_shape)
            end = begin + 1
        else:
            # A loop rather than two calls, because the code that finds a tile is long.
            for following in cutlass.range(2, unroll=1):
                begin, end = end, self.first(share + following, groups, tile_shape)
        return Span(begin, end, is_whole)


@dataclass(frozen=True)
class Span:
    """Consecutive positions of a share.

    Attributes:
        begin, end: first position and the one after the last; a whole tile has only its first position here.
        is_whole: whether the span is one whole tile.
    """

    begin: Int32
    end: Int32
    is_whole: Boolean

    def k_tiles(self, placed: "Placed", position: Int32) -> tuple:
        """Returns the first K tile and the number of K tiles that the span has of the tile at ``position``."""
        first, end = placed.k_tile(position), placed.k_tile(self.end)
        return first, select(self.is_whole, placed.tile.k_tile_cnt, end) - first


@dataclass(frozen=True)
class Placed:
    """A tile among the positions.

    Attributes:
        tile: the tile.
        end: first position after the tile.
        per_k_tile: positions of one K tile.
        least_part: smallest number of K tiles that a cluster gets of the tile.
    """

    tile: WorkTile
    end: Int32
    per_k_tile: Int32
    least_part: Int32

    def k_tile(self, position: Int32) -> Int32:
        """Returns the K tile at a position, rounded to whole parts. At the tile's end, returns the number of K tiles."""
        begin, part = self.end - self.tile.k_tile_cnt * self.per_k_tile, self.least_part * self.per_k_tile
        rounded = cutlass.min(cutlass.max(position, begin), self.end) - begin + part // 2
        parts = Int32(Uint32(rounded) // Uint32(part))
        return select(rounded >= self.end - begin, self.tile.k_tile_cnt, parts * self.least_part)


@cute.jit
def place_at(groups: object, position: Int32, config: cutlass.Constexpr[KernelConfig]) -> Placed:
    """Returns the work tile, of a whole cluster, at a position."""
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
