"""Hides a value from ptxas, which otherwise recomputes it every K tile to save a register."""

import cutlass.cute as cute


def opaque(value):
    """Returns a lane's 32-bit value through a shuffle with itself. All lanes of the warp must call it."""
    return cute.arch.shuffle_sync(value, cute.arch.lane_idx())
