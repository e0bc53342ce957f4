"""Values that the assembler must take as they are. What it can work out again, it does, in every K tile, to save a register."""

import cutlass.cute as cute


def opaque(value):
    """A lane's value, 32 bits, from a shuffle with itself: all lanes of the warp at once."""
    return cute.arch.shuffle_sync(value, cute.arch.lane_idx())
