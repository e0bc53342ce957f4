"""Transposes values within a warp, by shuffles or by movmatrix, which transposes 16-bit elements."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from . import ptx

# prmt selectors: the lower and the upper halves of two words.
LOWER_HALVES, UPPER_HALVES = 0x5410, 0x7632


@cute.jit
def transpose_in_warp(values: cute.Tensor):
    """Transposes 32 32-bit values per lane in place: value i of lane j becomes value j of lane i. All lanes must call it."""
    exchange_in_warp(values, tuple((bit, bit) for bit in range(5)))


@cute.jit
def exchange_in_warp(values: cute.Tensor, bits: cutlass.Constexpr):
    """Exchanges bits of the lane number with bits of the value index, in place. All lanes of a warp must call it.

    In one step per pair of bits, a lane keeps the half of its values whose index bit equals the lane's bit, and swaps the other
    half with its partner.

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
    """Transposes an 8 x 8 matrix; lane 4g + t has row g, columns 2t and 2t + 1. All lanes of a warp must call it.

    The instruction takes 16-bit elements, so the lower and the upper halves go separately (PTX ISA 9.7.14.5.17).
    """
    words = [ptx.bits_of(value) for value in (first, second)]
    low, high = (ptx.transpose_8x8(ptx.prmt(*words, Uint32(half))) for half in (LOWER_HALVES, UPPER_HALVES))
    return [ptx.float_of(ptx.prmt(low, high, Uint32(half))) for half in (LOWER_HALVES, UPPER_HALVES)]
