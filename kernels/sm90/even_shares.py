"""Work dealt evenly: every cluster gets as much as every other, to the K tile, and begins and ends within a work tile.

Positions count work: a K tile of a work tile takes ``work_of_tokens``, tiles follow each other as elsewhere (M is
the fast axis in a group), and the shares of the clusters, of equal length, follow each other. So a share is the end of one
tile, whole tiles, and the beginning of one. Who has a tile's first K tile adds up (``handover``).

The last cluster has the first share: a tile's beginning waits for CTAs that were started before its own.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from nvfp4_cute.arch.sm90 import LEAST_PART, LEAST_SHARE, TOKEN_STEP, k_tile_work
from nvfp4_cute.config import KernelConfig

from ..common.device_groups import DeviceGroups
from ..common.group_table import GroupTable, WorkTile, ceil_div, locate_slot
from ..common.select import select


def work_of_tokens(tokens: Int32 | int):
    """Of a K tile of a tile of so many tokens, those that are multiplied."""
    return k_tile_work(ceil_div(tokens, TOKEN_STEP), cutlass.max)


def work_of_group(m: Int32, n: Int32, k: Int32, tile_shape_mnk: tuple) -> Int32:
    """Positions that a group takes."""
    tiles_m, last_tokens = _tiles_of_strip(m, tile_shape_mnk[0])
    full, last = _work_of_tiles(last_tokens, ceil_div(k, tile_shape_mnk[2]), tile_shape_mnk[0])
    return ((tiles_m - 1) * full + last) * ceil_div(n, tile_shape_mnk[1])


def _tiles_of_strip(m: Int32, tile_tokens: int) -> tuple:
    """Tiles of a group that have the same weights, and tokens of the last one."""
    tiles_m = ceil_div(m, tile_tokens)
    return tiles_m, m - (tiles_m - 1) * tile_tokens


def _work_of_tiles(last_tokens: Int32, k_tile_cnt: Int32, tile_tokens: int) -> tuple:
    """Of a full tile, and of one of so many tokens."""
    return work_of_tokens(tile_tokens) * k_tile_cnt, work_of_tokens(last_tokens) * k_tile_cnt


@dataclass(frozen=True)
class DeviceWork(DeviceGroups):
    """``DeviceGroups`` whose indices are positions."""

    @cute.jit
    def tiles_of_group(self, m: Int32, tile_shape_mnk: cutlass.Constexpr) -> Int32:
        """What a group of ``m`` rows takes of the positions."""
        work = Int32(0)
        if m > 0:
            work = work_of_group(m, self.n, self.k, tile_shape_mnk)
        return work


def groups_by_work(groups: GroupTable | DeviceGroups, config: KernelConfig) -> GroupTable | DeviceWork:
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
    return replace(groups, tile_offsets=offsets, num_tiles=end)


@dataclass(frozen=True)
class Shares:
    """Positions [0, end) in ``num_shares`` shares."""

    length: Int32
    longer: Int32
    num_shares: Int32

    @classmethod
    def of(cls, end: Int32, num_shares: Int32) -> "Shares":
        """Of positions from 0 to ``end``."""
        length = Int32(Uint32(end) // Uint32(num_shares))
        return cls(length, end - length * num_shares, num_shares)

    def first(self, share: Int32) -> Int32:
        """First position of a share, and the end of the one before."""
        return share * self.length + cutlass.min(share, self.longer)


@dataclass(frozen=True)
class EvenWalk:
    """The rest of a share.

    Attributes:
        shares: of all clusters.
        share: this cluster's.
        end: of it.
        step: from the cursor to the next tile.
    """

    shares: Shares
    share: Int32
    end: Int32
    step: Int32

    @classmethod
    def start(cls, groups: GroupTable | DeviceWork, config: KernelConfig) -> tuple:
        """The cursor of this cluster's first position, and the way on. There are no more shares than are worth it."""
        size, tile_shape = config.cluster_size, config.work_tile_mnk
        end = groups.num_tiles if isinstance(groups, GroupTable) else groups.end(tile_shape)
        useful = Int32(Uint32(end) // (LEAST_SHARE * work_of_tokens(tile_shape[0])))
        num_shares = cutlass.max(cutlass.min(cute.arch.grid_dim()[0] // size, useful), 1)
        # Of clusters that have none: -1, which ends where the first one begins.
        share = cutlass.max(num_shares - 1 - cute.arch.block_idx()[0] // size, -1)
        shares = Shares.of(end, num_shares)
        cursor = groups.first_cursor(shares.first(cutlass.max(share, 0)), tile_shape)
        return cursor, cls(shares, share, shares.first(share + 1), Int32(0))

    def has_tile(self, groups: object, cursor: tuple):
        """Whether the cursor is within the share."""
        return cursor[0] < self.end

    def turned(self) -> "EvenWalk":
        """The way from the next tile on."""
        return self


@dataclass(frozen=True)
class Placed:
    """A tile among the positions.

    Attributes:
        tile: the tile.
        begin, end: its positions.
        per_k_tile: positions of a K tile.
        least_part: K tiles that a cluster gets of it at least.
    """

    tile: WorkTile
    begin: Int32
    end: Int32
    per_k_tile: Int32
    least_part: Int32

    def k_tile(self, position: Int32) -> Int32:
        """First K tile of what begins at a position, whole parts being rounded; behind the last one at the tile's end."""
        inside = cutlass.min(cutlass.max(position, self.begin), self.end) - self.begin
        part = self.least_part * self.per_k_tile
        rounded = inside + part // 2
        parts = Int32(Uint32(rounded) // Uint32(part))
        return select(rounded >= self.end - self.begin, self.tile.k_tile_cnt, parts * self.least_part)


@cute.jit
def place_at(groups: object, cursor: tuple, config: cutlass.Constexpr[KernelConfig]) -> Placed:
    """The tile at the cursor, a cluster's."""
    position, tile_shape = cursor[0], config.work_tile_mnk
    if cutlass.const_expr(isinstance(groups, GroupTable)):
        slot, m, n, k, offset, _ = locate_slot(groups, position)
        tile = WorkTile(slot, Int32(0), Int32(0), ceil_div(k, tile_shape[2]), m, n)
        local = position - offset
    else:
        tile, local = groups.group_at(cursor, tile_shape)
    tiles_m, last_tokens = _tiles_of_strip(tile.m, tile_shape[0])
    full, last = _work_of_tiles(last_tokens, tile.k_tile_cnt, tile_shape[0])
    strip = (tiles_m - 1) * full + last
    tile_n_idx = Int32(Uint32(local) // Uint32(strip))
    in_strip = local - tile_n_idx * strip
    tile_m_idx = cutlass.min(Int32(Uint32(in_strip) // Uint32(full)), tiles_m - 1)
    begin = position - (in_strip - tile_m_idx * full)
    is_last = tile_m_idx == tiles_m - 1
    per_k_tile = work_of_tokens(last_tokens if is_last else Int32(tile_shape[0]))
    return Placed(
        replace(tile, tile_m_idx=tile_m_idx, tile_n_idx=tile_n_idx),
        begin,
        begin + per_k_tile * tile.k_tile_cnt,
        per_k_tile,
        cutlass.min(LEAST_PART, tile.k_tile_cnt),
    )
