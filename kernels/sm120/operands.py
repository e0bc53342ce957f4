"""Shared-memory layouts and tensor maps of A, B and their scales. Static: the same on host and device."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from nvfp4_cute.arch.sm120 import SF_ATOM_ROWS
from nvfp4_cute.scale_layout import SF_VEC_SIZE

from ..common.tma_operand import LoadPartition, TmaOperand, global_ptr, partition_tiles

AB_DTYPE = cutlass.Float4E2M1FN
# A 128x4 block of scales is 512 contiguous bytes: a tensor map moves it as 128 words, and a row of blocks spans 64 K.
SF_ATOM_WORDS = 128
SF_ATOM_K = 4 * SF_VEC_SIZE


def values_layout(rows: int, tile_k: int, num_stage: int) -> cute.ComposedLayout:
    """(rows, K, STAGE) of e2m1, rows of 64 or 128 bytes, their 16-byte chunks swizzled among 8 rows."""
    kind = warpgroup.SmemLayoutAtomKind.K_SW128 if tile_k == 256 else warpgroup.SmemLayoutAtomKind.K_SW64
    atom = warpgroup.make_smem_layout_atom(kind, AB_DTYPE)
    return cute.tile_to_shape(atom, (rows, tile_k, num_stage), order=(0, 1, 2))


def scales_layout(tile_k: int, num_stage: int) -> cute.Layout:
    """(WORD, 1, K_BLOCK, STAGE) of 32-bit words: blocks of 128x4 scales as they lie in global memory."""
    return cute.make_layout((SF_ATOM_WORDS, 1, tile_k // SF_ATOM_K, num_stage))


def scales_box(tile_k: int) -> tuple:
    """(WORD, MN_BLOCK, K_BLOCK) extents that one stage loads."""
    return SF_ATOM_WORDS, 1, tile_k // SF_ATOM_K


def values_tensor(address: Int64, rows: Int32, k: Int32, pitch: Int64) -> cute.Tensor:
    """(rows, K) view of packed e2m1; a TMA row pitch is a multiple of 16 bytes, that is 32 elements."""
    layout = cute.make_layout((rows, k), stride=(cute.assume(pitch, 32), 1))
    return cute.make_tensor(global_ptr(AB_DTYPE, address), layout)


def scales_tensor(address: Int64, rows: Int32, k: Int32) -> cute.Tensor:
    """(WORD, MN_BLOCK, K_BLOCK) view of e4m3 scales in the 128x4 blocked layout."""
    k_blocks = cute.ceil_div(k, SF_ATOM_K)
    shape = (SF_ATOM_WORDS, cute.ceil_div(rows, SF_ATOM_ROWS), k_blocks)
    layout = cute.make_layout(shape, stride=(1, k_blocks * SF_ATOM_WORDS, SF_ATOM_WORDS))
    return cute.make_tensor(global_ptr(Int32, address), layout)


def partition_values(operand: TmaOperand, s_values: cute.Tensor, rows: int, tile_k: int) -> LoadPartition:
    """Partition A or B. s_values: (rows, K, STAGE) in shared memory."""
    # (rows, K, TILE_MN, TILE_K)
    g_tiles = cute.local_tile(operand.coords, (rows, tile_k), (None, None))
    return partition_tiles(operand, s_values, g_tiles)


def partition_scales(operand: TmaOperand, s_scales: cute.Tensor, tile_k: int) -> LoadPartition:
    """Partition the scales of A or B. s_scales: (WORD, 1, K_BLOCK, STAGE) in shared memory."""
    # (WORD, 1, K_BLOCK, MN_BLOCK, TILE_K)
    g_tiles = cute.local_tile(operand.coords, scales_box(tile_k), (0, None, None))
    return partition_tiles(operand, s_scales, g_tiles)
