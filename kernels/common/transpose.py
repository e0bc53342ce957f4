"""Transposition of a square of values inside a warp, by shuffles."""

import cutlass
import cutlass.cute as cute

from .warp_schedule import WARP_SIZE


@cute.jit
def transpose_in_warp(values: cute.Tensor):
    """Value i of lane j becomes value j of lane i, of 32 32-bit values a lane, in place. A whole warp calls this.

    Five steps, each of which exchanges a bit of the lane with the same bit of the index: a lane keeps the half of its
    values whose index has the lane's bit, and swaps the others with its partner.
    """
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(5):
        bit = 1 << step
        is_upper = (lane & bit) != 0
        for i in cutlass.range_constexpr(WARP_SIZE):
            if cutlass.const_expr(i & bit == 0):
                sent = values[i] if is_upper else values[i | bit]
                received = cute.arch.shuffle_sync_bfly(sent, bit)
                values[i] = received if is_upper else values[i]
                values[i | bit] = values[i | bit] if is_upper else received
