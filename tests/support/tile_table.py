"""A kernel that writes the tile schedule as the device sees it: one record of six Int32 per tile."""

from functools import lru_cache

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.compile.compiler import compile_jit
from nvfp4_cute.kernels.common.group_table import GroupTable, locate_tile

FIELDS = ("slot", "tile_m_idx", "tile_n_idx", "k_tile_cnt", "m", "n")
THREADS = 32


class TileTable:
    """Compiled once per group count. The tile shape is a compile-time constant, as in the real kernels."""

    def __init__(self, cta_tile_shape_mnk):
        self.cta_tile_shape_mnk = cta_tile_shape_mnk

    @cute.jit
    def __call__(self, sizes: list, tile_offsets: list, num_tiles: Int32, table: cute.Pointer):
        m, n, k = ([size[i] for size in sizes] for i in range(3))
        groups = GroupTable.of(m, n, k, list(tile_offsets), num_tiles, self.cta_tile_shape_mnk[0])
        self.kernel(groups, table).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    @cute.kernel
    def kernel(self, groups: GroupTable, table: cute.Pointer):
        tile_idx, _, _ = cute.arch.thread_idx()
        # (FIELD, TILE)
        out = cute.make_tensor(table, cute.make_layout((len(FIELDS), groups.num_tiles)))
        while tile_idx < groups.num_tiles:
            tile = locate_tile(groups, self.cta_tile_shape_mnk, tile_idx)
            out[0, tile_idx] = tile.slot
            out[1, tile_idx] = tile.tile_m_idx
            out[2, tile_idx] = tile.tile_n_idx
            out[3, tile_idx] = tile.k_tile_cnt
            out[4, tile_idx] = tile.m
            out[5, tile_idx] = tile.n
            tile_idx += THREADS


def pointer(address):
    """Int32 pointer to host memory."""
    return cute.runtime.make_ptr(cutlass.Int32, address, cute.AddressSpace.gmem, assumed_align=4)


@lru_cache
def compile_tile_table(num_groups, cta_tile_shape_mnk):
    """Returns (host function, PTX) for a number of groups."""
    sizes = [(Int32(1), Int32(1), Int32(1))] * num_groups
    function, ptx, _ = compile_jit(
        "sm_100a", TileTable(cta_tile_shape_mnk), sizes, [Int32(0)] * num_groups, Int32(1), pointer(0)
    )
    return function, ptx
