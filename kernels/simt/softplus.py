"""sqrt(softplus(x)) on a GPU, operation by operation as in ``nvfp4_cute.formats.softplus``."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from nvfp4_cute.formats.softplus import ARTANH

from ..common import ptx
from .silu import exp_minus


@cute.jit
def sqrt_softplus(x: Float32) -> Float32:
    """Returns sqrt(log(1 + exp(x))); for NaN, some number."""
    e = exp_minus(ptx.abs_f32(x))
    s = ptx.div_f32(e, ptx.add_f32(e, Float32(2.0)))
    z = ptx.mul_f32(s, s)
    p = Float32(ARTANH[-1])
    for coefficient in reversed(ARTANH[:-1]):
        p = ptx.add_f32(ptx.mul_f32(p, z), Float32(coefficient))
    log = ptx.mul_f32(ptx.add_f32(s, s), p)
    return ptx.sqrt_f32(ptx.add_f32(cutlass.max(x, Float32(0.0)), log))
