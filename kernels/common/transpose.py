"""Transposition of values inside a warp: by shuffles, or by the instruction that transposes 16-bit elements."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from . import ptx

# Byte permutations of two words: their lower and their upper halves.
LOWER_HALVES, UPPER_HALVES = 0x5410, 0x7632


@cute.jit
def transpose_in_warp(values: cute.Tensor):
    """Value i of lane j becomes value j of lane i, of 32 32-bit values a lane, in place. A whole warp calls this."""
    exchange_in_warp(values, tuple((bit, bit) for bit in range(5)))


@cute.jit
def exchange_in_warp(values: cute.Tensor, bits: cutlass.Constexpr):
    """Exchange bits of the lane with bits of the index of its 32-bit values, in place. A whole warp calls this.

    A step for each: a lane keeps the half of its values whose index has the lane's bit, and swaps the others with its
    partner.

    Args:
        bits: pairs of a bit of the lane and a bit of the index.
    """
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(len(bits)):
        lane_bit, index_bit = (1 << bit for bit in bits[step])
        is_upper = (lane & lane_bit) != 0
        for i in cutlass.range_constexpr(cute.size(values)):
            if cutlass.const_expr(i & index_bit == 0):
                sent = values[i] if is_upper else values[i | index_bit]
                received = cute.arch.shuffle_sync_bfly(sent, lane_bit)
                values[i] = received if is_upper else values[i]
                values[i | index_bit] = values[i | index_bit] if is_upper else received


def transpose_square(first: Float32, second: Float32) -> list:
    """Transpose an 8 x 8 matrix of which lane 4g + t has row g and columns 2t and 2t + 1. A whole warp calls this.

    The instruction takes 16-bit elements: lower halves, then upper ones (PTX ISA 9.7.14.5.17).
    """
    words = [ptx.bits_of(value) for value in (first, second)]
    low, high = (ptx.transpose_8x8(ptx.prmt(*words, Uint32(half))) for half in (LOWER_HALVES, UPPER_HALVES))
    return [ptx.float_of(ptx.prmt(low, high, Uint32(half))) for half in (LOWER_HALVES, UPPER_HALVES)]
