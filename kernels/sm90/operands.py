"""Shared-memory buffers and TMA partitions of packed operands and scales; where their bytes lie."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32

from ..common.group_table import WorkTile
from ..common.tma_operand import TMA_ALIGN_BYTES, LoadPartition, TmaOperand, global_ptr, partition_tiles

# One K tile of 128 values: 64 bytes a row, swizzled by TMA in 16-byte units within 64 bytes: unit ^= row / 2 % 4.
TILE_K = 128
ROW_BYTES = TILE_K // 2
CHUNK_BYTES = 16
PACKED_SWIZZLE = (2, 4, 3)
# Scales of one K tile and a block of 128 rows: two atoms of 32 x 4 words, a word the four scales of 64 values of K.
SF_ATOM_WORDS = 128
SF_BLOCK_WORDS = TILE_K // 64 * SF_ATOM_WORDS


def packed_layout(rows: int, num_stages: int) -> cute.ComposedLayout:
    """(ROWS, 64 bytes, STAGE) of packed e2m1."""
    outer = cute.make_layout((rows, ROW_BYTES, num_stages), stride=(ROW_BYTES, 1, rows * ROW_BYTES))
    return cute.make_composed_layout(cute.make_swizzle(*PACKED_SWIZZLE), 0, outer)


def scale_layout(num_blocks: int, num_stages: int) -> cute.Layout:
    """(1, WORDS, BLOCKS x STAGE) of scales: TMA moves one block of 128 rows at a time."""
    return cute.make_layout(
        (1, SF_BLOCK_WORDS, num_blocks * num_stages), stride=(SF_BLOCK_WORDS, 1, SF_BLOCK_WORDS)
    )


def packed_tensor(address: Int64, rows: Int32, k: Int32, pitch: Int64) -> cute.Tensor:
    """(rows, K / 2) bytes of packed e2m1; ``pitch`` in values."""
    pitch_bytes = cute.assume(pitch // 2, TMA_ALIGN_BYTES)
    return cute.make_tensor(
        global_ptr(Uint8, address), cute.make_layout((rows, k // 2), stride=(pitch_bytes, 1))
    )


def scale_tensor(address: Int64, rows: Int32, k: Int32) -> cute.Tensor:
    """(BLOCKS, WORDS) of scales in the 128x4 blocked layout: a row is a block of 128 rows along all of K."""
    words = cute.ceil_div(k, 64) * SF_ATOM_WORDS
    pitch = cute.assume(Int64(words), SF_ATOM_WORDS)
    return cute.make_tensor(
        global_ptr(Uint32, address), cute.make_layout((cute.ceil_div(rows, 128), words), stride=(pitch, 1))
    )


def partition_operand(operand: TmaOperand, smem: cute.Tensor) -> LoadPartition:
    """Tile by the box of the tensor map. smem: (ROWS, COLUMNS, STAGE)."""
    rows, columns = cute.size(smem, mode=[0]), cute.size(smem, mode=[1])
    # (ROWS, COLUMNS, TILE_ROW, TILE_K)
    tiles = cute.local_tile(operand.coords, (rows, columns), (None, None))
    return partition_tiles(operand, smem, tiles)


@cute.jit
def chunk_address(base: Int32, row: Int32, chunk: Int32) -> Int32:
    """Shared address of 16-byte unit ``chunk`` (32 values of K) of a row in a packed stage at ``base``."""
    return base + row * ROW_BYTES + (chunk ^ (row // 2 % 4)) * CHUNK_BYTES


@cute.jit
def scale_word_address(base: Int32, row: Int32, atom: Int32) -> Int32:
    """Shared address of the four scales of ``row`` (0 to 127) and 64 values of K in a scale block at ``base``."""
    return base + ((row % 32) * 4 + row // 32 + atom * SF_ATOM_WORDS) * 4


@cute.jit
def load_shared(address: Int32, count: cutlass.Constexpr) -> list:
    """``count`` consecutive words, aligned to their total size, in one load."""
    words = cute.make_rmem_tensor(count, Uint32)
    cute.autovec_copy(_shared_words(address, count), words)
    return [words[i] for i in range(count)]


@cute.jit
def store_shared(address: Int32, values: list):
    """Consecutive words, aligned to their total size, in one store."""
    words = cute.make_rmem_tensor(len(values), Uint32)
    for i in cutlass.range_constexpr(len(values)):
        words[i] = values[i]
    cute.autovec_copy(words, _shared_words(address, len(values)))


def _shared_words(address: Int32, count: int) -> cute.Tensor:
    ptr = cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=4 * count)
    return cute.make_tensor(ptr, cute.make_layout(count))


@cute.jit
def tokens_of_tile(tile: WorkTile, tile_m: cutlass.Constexpr) -> Int32:
    """Tokens of the group from the tile's first to its end, at most a tile."""
    remaining = tile.m - tile.tile_m_idx * tile_m
    return remaining if remaining < tile_m else Int32(tile_m)
