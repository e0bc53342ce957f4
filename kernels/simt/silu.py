"""silu(x) * up on a GPU, operation by operation as in ``nvfp4_cute.formats.silu``."""

import cutlass.cute as cute
from cutlass import Float32, Uint32

from nvfp4_cute.formats.silu import EXP2, LOG2_E, MAGIC, MAX_EXPONENT

from ..common import ptx

ONE_BITS = 0x3F800000


@cute.jit
def silu_mul(x: Float32, up: Float32) -> Float32:
    """Computes one element. Products and sums are separate, because the assembler must not contract them."""
    return ptx.mul_f32(ptx.mul_f32(x, sigmoid(x)), up)


@cute.jit
def sigmoid(x: Float32) -> Float32:
    """Returns 1 / (1 + exp(-x)); a number for NaN."""
    e = exp_minus(ptx.abs_f32(x))
    r = ptx.rcp_f32(ptx.add_f32(e, Float32(1.0)))
    s = r if x >= 0.0 else ptx.mul_f32(e, r)
    return s


@cute.jit
def exp_minus(magnitude: Float32) -> Float32:
    """Returns exp(-magnitude) of a non-negative number; 0 for NaN."""
    t = ptx.least(ptx.mul_f32(magnitude, Float32(LOG2_E)), Float32(MAX_EXPONENT))
    shifted = ptx.add_f32(t, Float32(MAGIC))
    y = ptx.add_f32(ptx.add_f32(shifted, Float32(-MAGIC)), -t)
    p = Float32(EXP2[-1])
    for coefficient in reversed(EXP2[:-1]):
        p = ptx.add_f32(ptx.mul_f32(p, y), Float32(coefficient))
    # The integer is in the low bits of the shifted number.
    power = ptx.float_of(Uint32(ONE_BITS) - (ptx.bits_of(shifted) << 23))
    return ptx.mul_f32(p, power)
