"""FP8_1x128 results: blocks of 128 columns, whose largest magnitudes warps exchange in shared memory.

With weights on the M side, 128 rows of weights are a block of columns, and the four warps of a warpgroup have 32 columns each;
a warp transposes its 32 x 32 results, so that a lane has those of one token. With tokens on the M side, each warpgroup has half
of the columns of 128 tokens, one token per thread.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from nvfp4_cute.formats.block_format import FP8_1x128
from nvfp4_cute.planning.arch.sm100.limits import EPI_TILE_N, EPI_WARPS, MMA_CTA_M
from nvfp4_cute.planning.arch.sm100_fp8 import PROMOTING_GROUPS

from ...common import ptx
from ...common.encode import Encoding
from ...common.global_access import store_words
from ...common.quantize_block import encode_values, find_scale, largest
from ...common.quantized_output import QuantizedGroup, store_scale
from ...common.shared_access import load_shared, store_shared
from ...common.transpose import transpose_in_warp

BLOCK = FP8_1x128.block_k
ENCODE = Encoding.of(FP8_1x128, has_fp4_convert=True)
# Named barriers of each warpgroup, numbered after those of the kernel, and of both together.
FIRST_BARRIER_ID = 8
BOTH_BARRIER_ID = FIRST_BARRIER_ID + PROMOTING_GROUPS
# Codes per store of a lane.
STORED_CODES = 16


@dataclass(frozen=True)
class BlockPlace:
    """Position of a warp in a block.

    Attributes:
        group, quarter: index of the warpgroup, and of the warp within it.
        buffer: shared address of the exchange, one word for each of 256 threads.
    """

    group: Int32
    quarter: Int32
    buffer: Int32


@cute.jit
def store_columns(
    values: cute.Tensor, target: QuantizedGroup, first_token: Int32, first_column: Int32, place: BlockPlace
):
    """Quantizes and stores a slice whose rows of the M side are columns of the output. All threads of a warpgroup must call it.

    Args:
        values: float32 results of this thread's column, one per token; overwritten.
        first_token: first token of the slice in the group.
        first_column: first column of the tile.
    """
    transpose_in_warp(values)
    results = [values[i] for i in range(EPI_TILE_N)]
    lane = cute.arch.lane_idx()
    amax = largest([ptx.abs_f32(value) for value in results])
    # The words of the four warps are next to each other for every token.
    words = place.buffer + (place.group * EPI_TILE_N + lane) * (EPI_WARPS * 4)
    barrier = FIRST_BARRIER_ID + place.group
    # Wait until the previous slice has been read.
    cute.arch.barrier(barrier_id=barrier, number_of_threads=MMA_CTA_M)
    store_shared(words + place.quarter * 4, [ptx.bits_of(amax)])
    cute.arch.barrier(barrier_id=barrier, number_of_threads=MMA_CTA_M)
    amax = largest([ptx.float_of(word) for word in load_shared(words, EPI_WARPS)])
    column = first_column + place.quarter * EPI_TILE_N
    _store_part(results, amax, target, first_token + lane, column, place.quarter == 0)


@cute.jit
def store_rows(slices: list, target: QuantizedGroup, row: Int32, first_column: Int32, place: BlockPlace):
    """Quantizes and stores a thread's part of a row of the output. All threads of both warpgroups must call it.

    Args:
        slices: consecutive float32 results of the row, half of a block of columns.
        first_column: first column of the slices.
    """
    results = [part[i] for part in slices for i in range(EPI_TILE_N)]
    amax = largest([ptx.abs_f32(value) for value in results])
    thread, threads = cute.arch.thread_idx()[0] % MMA_CTA_M, PROMOTING_GROUPS * MMA_CTA_M
    words = place.buffer + thread * (PROMOTING_GROUPS * 4)
    # Wait until the previous tile has been read.
    cute.arch.barrier(barrier_id=BOTH_BARRIER_ID, number_of_threads=threads)
    store_shared(words + place.group * 4, [ptx.bits_of(amax)])
    cute.arch.barrier(barrier_id=BOTH_BARRIER_ID, number_of_threads=threads)
    amax = largest([ptx.float_of(word) for word in load_shared(words, PROMOTING_GROUPS)])
    _store_part(results, amax, target, row, first_column, place.group == 0)


@cute.jit
def _store_part(
    results: list,
    amax: Float32,
    target: QuantizedGroup,
    row: Int32,
    column: Int32,
    has_scale: cutlass.Boolean,
):
    """Quantizes and stores consecutive columns of a row, part of a block with largest magnitude ``amax``."""
    block = column // BLOCK
    code, divisor = find_scale(amax, None, ENCODE)
    words = encode_values(results, None, amax, code, divisor, ENCODE)
    if row < target.rows and block < target.blocks:
        address = target.data + Int64(row) * target.pitch + column
        for first in cutlass.range_constexpr(0, len(words), STORED_CODES // 4):
            store_words(address + 4 * first, words[first : first + STORED_CODES // 4])
        if has_scale:
            store_scale(code, target, row, block, FP8_1x128)
