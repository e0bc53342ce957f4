"""Device half of the schedule where groups share operands: ragged (``offs``), masked (``masked_m``), or batched.

Batched is masked with every row in use and no sizes to read. A warp processes 32 groups at a time, one per lane: it reads their
sizes, counts their tiles, and scans. It reads the next groups' sizes in advance: where tokens choose few of many experts, many
empty groups lie between a worker's tiles. The kernel reads sizes when it runs, so a replayed CUDA graph follows the current
sizes; any number of groups works. Groups keep the caller's order, and M is the fast axis within a group, as in ``group_table``.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from nvfp4_cute.formats.scale_layout import ATOM_ROWS

from .group_table import WorkTile, ceil_div
from .select import select
from .warp_schedule import WARP_SIZE

# Windows that are read together in front of a worker's first tile, and windows up to which none is skipped.
WINDOWS_AT_ONCE, FEW_WINDOWS = 4, 2


@dataclass(frozen=True)
class DeviceGroups:
    """Groups with equal N and K. All lanes of a warp must call every method.

    Attributes:
        form: "ragged": ``sizes`` are inclusive ends of the groups' rows in ``a``; "masked": their row counts; "batched":
            not read.
        sizes: int32 [num_groups] in global memory.
        m_max: rows of ``a`` in total (ragged) or per batch (masked, batched). No group extends beyond.
        n, k: extents in elements.
        factors: pointers to float32 [num_groups] in global memory; a tile carries its group's values.
    """

    form: Literal["ragged", "masked", "batched"]
    sizes: cute.Pointer
    num_groups: Int32
    m_max: Int32
    n: Int32
    k: Int32
    factors: tuple = ()

    # Windows of 32 groups whose sizes are read ahead of counting.
    WINDOWS_AHEAD: ClassVar[int] = 1

    def with_factors(self, factors: list | None) -> "DeviceGroups":
        """Returns the groups with factors that are read along with sizes.

        A separate load would wait in line after operand loads.
        """
        return replace(self, factors=tuple(factors or ()))

    @cute.jit
    def first_cursor(self, tile_idx: Int32, tile_shape_mnk: cutlass.Constexpr) -> tuple:
        """Returns the cursor of a worker whose first tile is ``tile_idx``: its window and what was read ahead."""
        first_group, tiles, blocks = self._skip(tile_idx, tile_shape_mnk)
        factors, zero = tuple(Float32(0.0) for _ in self.factors), Int32(0)
        ahead = tuple(self._read(first_group + i * WARP_SIZE) for i in range(self.WINDOWS_AHEAD))
        # The first window uses the code of all others, to keep that code in the kernel once.
        cursor = (tile_idx, first_group - WARP_SIZE, zero, zero, tiles, blocks, factors, ahead)
        return self._seek(cursor, tile_shape_mnk)

    @cute.jit
    def next_cursor(self, cursor: tuple, stride: Int32, tile_shape_mnk: cutlass.Constexpr) -> tuple:
        """Returns the cursor ``stride`` tiles further on."""
        return self._seek((cursor[0] + stride, *cursor[1:]), tile_shape_mnk)

    @cute.jit
    def has_tile(self, cursor: tuple):
        """Returns whether there is a tile at the cursor."""
        return cursor[1] < self.num_groups

    @cute.jit
    def tile(self, cursor: tuple, tile_shape_mnk: cutlass.Constexpr) -> WorkTile:
        """Returns the tile at the cursor."""
        tile, tile_n_idx = self.group_at(cursor, tile_shape_mnk)
        tiles_m, tile_m_idx = ceil_div(tile.m, tile_shape_mnk[0]), Int32(0)
        # Groups of few rows have one tile along M. Skip the division then: it takes as long as finding the group.
        if tiles_m > 1:
            local_idx = tile_n_idx
            tile_n_idx = Int32(Uint32(local_idx) // Uint32(tiles_m))
            tile_m_idx = local_idx - tile_n_idx * tiles_m
        return replace(tile, tile_m_idx=tile_m_idx, tile_n_idx=tile_n_idx)

    @cute.jit
    def group_at(self, cursor: tuple, tile_shape_mnk: cutlass.Constexpr) -> tuple:
        """Returns the first tile of the cursor's group and the cursor's distance from it."""
        tile_idx, first_group, lane_m, lane_row, lane_tile_end, lane_block_end, lane_factors, _ = cursor
        # Count the lanes whose groups end at or before the tile; the next group holds it.
        lane = cute.arch.popc(cute.arch.vote_ballot_sync(lane_tile_end <= tile_idx))
        m = cute.arch.shuffle_sync(lane_m, lane)
        tiles = self.tiles_of_group(m, tile_shape_mnk)
        local_idx = tile_idx - (cute.arch.shuffle_sync(lane_tile_end, lane) - tiles)
        ragged = self.form == "ragged"
        a_row = cute.arch.shuffle_sync(lane_row, lane) if ragged else 0
        a_sf_block = cute.arch.shuffle_sync(lane_block_end, lane) - ceil_div(m, ATOM_ROWS) if ragged else 0
        zero, k_tile_cnt = Int32(0), ceil_div(self.k, tile_shape_mnk[2])
        tile = self.tile_of_group(first_group + lane, zero, zero, k_tile_cnt, m, a_row, a_sf_block)
        factors = tuple(cute.arch.shuffle_sync(factor, lane) for factor in lane_factors)
        return replace(tile, factors=factors), local_idx

    def tile_of_group(
        self,
        group: Int32,
        tile_m_idx: Int32,
        tile_n_idx: Int32,
        k_tile_cnt: Int32,
        m: Int32,
        a_row: Int32 | int,
        a_sf_block: Int32 | int,
    ) -> WorkTile:
        """Returns a tile of a group. a_row, a_sf_block: see ``WorkTile``; used only if groups are ragged."""
        ragged = self.form == "ragged"
        return WorkTile(
            slot=group,
            tile_m_idx=tile_m_idx,
            tile_n_idx=tile_n_idx,
            k_tile_cnt=k_tile_cnt,
            m=m,
            n=self.n,
            a_row=a_row if ragged else 0,
            a_sf_block=a_sf_block if ragged else 0,
            a_batch=0 if ragged else group,
            b_batch=group,
        )

    @cute.jit
    def tiles_of_group(self, m: Int32, tile_shape_mnk: cutlass.Constexpr) -> Int32:
        """Returns the number of tile indices of a group of ``m`` rows."""
        return ceil_div(m, tile_shape_mnk[0]) * ceil_div(self.n, tile_shape_mnk[1])

    @cute.jit
    def end(self, tile_shape_mnk: cutlass.Constexpr) -> Int32:
        """Returns the first index after all groups."""
        first_group, tile_end = Int32(0), Int32(0)
        while first_group < self.num_groups:
            _, _, lane_tile_end, _ = self._window(first_group, tile_end, Int32(0), tile_shape_mnk)
            tile_end = cute.arch.shuffle_sync(lane_tile_end, WARP_SIZE - 1)
            first_group += WARP_SIZE
        return tile_end

    @cute.jit
    def _skip(self, tile_idx: Int32, tile_shape_mnk: cutlass.Constexpr) -> tuple:
        """Returns the first group of the window with a tile, or an index past the last group, and all earlier tiles and blocks.

        Adds up whole windows and reads several of them together: a scan per window takes longer where many groups lie before
        the tile. Few groups are left to ``_seek``.
        """
        first_group, tiles, blocks = Int32(0), Int32(0), Int32(0)
        if self.num_groups > FEW_WINDOWS * WARP_SIZE:
            is_before = Int32(1)
            while is_before > 0 and first_group < self.num_groups:
                start = first_group
                read = [self._read_sizes(start + i * WARP_SIZE) for i in range(WINDOWS_AT_ONCE)]
                for i in cutlass.range_constexpr(WINDOWS_AT_ONCE):
                    m, _ = self._rows(start + i * WARP_SIZE, read[i])
                    more = cute.arch.warp_redux_sync(self.tiles_of_group(m, tile_shape_mnk), "add")
                    is_before = select(tile_idx < tiles + more, Int32(0), is_before)
                    first_group = first_group + is_before * WARP_SIZE
                    tiles = tiles + is_before * more
                    if cutlass.const_expr(self.form == "ragged"):
                        blocks = blocks + is_before * cute.arch.warp_redux_sync(ceil_div(m, ATOM_ROWS), "add")
        return first_group, tiles, blocks

    @cute.jit
    def _seek(self, cursor: tuple, tile_shape_mnk: cutlass.Constexpr) -> tuple:
        """Moves the window of 32 groups to the one with the cursor's tile, or past the last group."""
        tile_idx, first_group, m, row, tile_end, block_end, factors, ahead = cursor
        tiles_before = cute.arch.shuffle_sync(tile_end, WARP_SIZE - 1)
        while tile_idx >= tiles_before and first_group < self.num_groups:
            first_group += WARP_SIZE
            blocks_before = cute.arch.shuffle_sync(block_end, WARP_SIZE - 1)
            # Read ahead: nothing here waits for these values.
            ahead = (*ahead, self._read(first_group + self.WINDOWS_AHEAD * WARP_SIZE))
            (sizes, factors), ahead = ahead[0], ahead[1:]
            m, row, tile_end, block_end = self._count(
                first_group, sizes, tiles_before, blocks_before, tile_shape_mnk
            )
            tiles_before = cute.arch.shuffle_sync(tile_end, WARP_SIZE - 1)
        return tile_idx, first_group, m, row, tile_end, block_end, factors, ahead

    @cute.jit
    def _window(
        self, first_group: Int32, tiles_before: Int32, blocks_before: Int32, tile_shape_mnk: cutlass.Constexpr
    ) -> tuple:
        """Returns, for group ``first_group`` + lane: rows, first row, and tiles and scale blocks of all groups up to its end."""
        sizes, _ = self._read(first_group)
        return self._count(first_group, sizes, tiles_before, blocks_before, tile_shape_mnk)

    @cute.jit
    def _read(self, first_group: Int32) -> tuple:
        """Reads sizes and factors of group ``first_group`` + lane, or of the last group.

        A ragged group's sizes are its end and the previous group's end; a masked group's size is its number of rows. Uses no
        branches, so that all reads are issued together.
        """
        group, values = self._group_of_lane(first_group), cute.make_layout(self.num_groups)
        factors = tuple(cute.make_tensor(factor, values)[group] for factor in self.factors)
        return self._read_sizes(first_group), factors

    def _group_of_lane(self, first_group: Int32) -> Int32:
        return cutlass.min(first_group + cute.arch.lane_idx(), self.num_groups - 1)

    @cute.jit
    def _read_sizes(self, first_group: Int32) -> tuple:
        """Reads the sizes of ``_read``."""
        group, values = self._group_of_lane(first_group), cute.make_layout(self.num_groups)
        places = {"ragged": (group, cutlass.max(group - 1, 0)), "masked": (group,), "batched": ()}
        return tuple(cute.make_tensor(self.sizes, values)[place] for place in places[self.form])

    @cute.jit
    def _count(
        self,
        first_group: Int32,
        sizes: tuple,
        tiles_before: Int32,
        blocks_before: Int32,
        tile_shape_mnk: cutlass.Constexpr,
    ) -> tuple:
        """Computes the result of ``_window`` from ``sizes`` that were read."""
        m, row = self._rows(first_group, sizes)
        tile_end = tiles_before + inclusive_sum(self.tiles_of_group(m, tile_shape_mnk))
        block_end = Int32(0)
        if cutlass.const_expr(self.form == "ragged"):
            block_end = blocks_before + inclusive_sum(ceil_div(m, ATOM_ROWS))
        return m, row, tile_end, block_end

    @cute.jit
    def _rows(self, first_group: Int32, sizes: tuple) -> tuple:
        """Returns the rows of group ``first_group`` + lane, 0 past the last group, and its first row."""
        group, row, end = first_group + cute.arch.lane_idx(), Int32(0), self.m_max
        if cutlass.const_expr(self.form != "batched"):
            end = cutlass.min(sizes[0], self.m_max)
        if cutlass.const_expr(self.form == "ragged"):
            row = select(group > 0, cutlass.max(sizes[1], 0), Int32(0))
        return select(group < self.num_groups, cutlass.max(end - row, 0), Int32(0)), row


@cute.jit
def inclusive_sum(value: Int32) -> Int32:
    """Returns the sum of the values of all lanes up to and including this one."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(5):
        # CuTe DSL before 4.7 defaults to a clamp of 31, with which a shuffle up returns the lane's own value.
        other = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        value = value + other if lane >= (1 << step) else value
    return value
