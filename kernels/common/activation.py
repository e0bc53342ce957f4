"""Activations of a dual GEMM's first product: element-wise functions in float32.

silu(x) = x * sigmoid(x). gelu(x) = max(x, 0) - |x| * N(-|x|), with N the normal distribution. gelu_tanh(x) = x * sigmoid(2 *
sqrt(2 / pi) * (x + 0.044715 * x^3)), which is the tanh form of GELU since (1 + tanh(u)) / 2 = sigmoid(2 * u). relu2(x) =
max(x, 0)^2. swiglu_oai(x) = x * sigmoid(alpha * x); it is multiplied by the second product plus 1. situ(x) = beta * tanh(x /
beta) * sigmoid(x); it may bound the second product likewise.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from nvfp4_cute.activation import (
    GELU_CUBIC,
    GELU_LINEAR,
    NORMAL,
    NORMAL_MAX,
    NORMAL_SLOPE,
    TANH,
    TANH_SMALL,
    parse,
)

from . import ptx
from .select import select

LOG2_E = 1.4426950408889634


@cute.jit
def gate(x: Float32, other: Float32, activation: cutlass.Constexpr, limit: Float32 | None) -> Float32:
    """Returns ``activation(x) * other``. With a limit, x is clamped from above to it and ``other`` to plus or minus it first.

    activation: text of ``nvfp4_cute.activation``.
    """
    if cutlass.const_expr(limit is not None):
        x = ptx.min_nan(x, limit)
        other = ptx.max_nan(ptx.min_nan(other, limit), -limit)
    if cutlass.const_expr(parse(activation).name == "swiglu_oai"):
        other = other + Float32(1.0)
    if cutlass.const_expr(parse(activation).linear_beta is not None):
        other = _bounded(other, parse(activation).linear_beta)
    return activate(x, activation) * other


@cute.jit
def activate(x: Float32, activation: cutlass.Constexpr) -> Float32:
    """Returns the activation of one value."""
    result = x
    name = cutlass.const_expr(parse(activation).name)
    if cutlass.const_expr(name == "relu2"):
        positive = ptx.max_nan(x, Float32(0.0))
        result = positive * positive
    elif cutlass.const_expr(name == "relu"):
        result = ptx.max_nan(x, Float32(0.0))
    elif cutlass.const_expr(name == "gelu"):
        result = _gelu(x)
    elif cutlass.const_expr(name == "gelu_tanh"):
        result = x * _sigmoid(GELU_LINEAR * (x + GELU_CUBIC * (x * x * x)))
    elif cutlass.const_expr(name == "swiglu_oai"):
        result = x * _sigmoid(parse(activation).alpha * x)
    elif cutlass.const_expr(name == "situ"):
        result = _bounded(x, parse(activation).beta) * _sigmoid(x)
    else:
        result = x * _sigmoid(x)
    return result


@cute.jit
def _sigmoid(x: Float32) -> Float32:
    """Returns 1 / (1 + 2^(-x * log2 e)) by ex2.approx and rcp.approx (relative errors 2^-22 and 2^-23: PTX ISA 9.7.3).

    (1 + tanh.approx(x / 2)) / 2 is not used: its absolute error of 2^-12 exceeds the value itself for negative x.
    """
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(-LOG2_E * x, fastmath=True))


@cute.jit
def _gelu(x: Float32) -> Float32:
    """Returns x * (1 + erf(x / sqrt(2))) / 2 by ``activation.NORMAL``, which keeps the relative accuracy of small results."""
    a = ptx.min_nan(ptx.abs_f32(x), Float32(NORMAL_MAX))
    t = cute.arch.rcp_approx(Float32(1.0) + NORMAL_SLOPE * a)
    below = Float32(NORMAL[-1])
    for coefficient in reversed(NORMAL[:-1]):
        below = below * t + coefficient
    below = below * t * cute.math.exp2((-LOG2_E / 2) * (a * a), fastmath=True)
    return ptx.max_nan(x, Float32(0.0)) - a * below


@cute.jit
def _bounded(x: Float32, bound: cutlass.Constexpr) -> Float32:
    """Returns bound * tanh(x / bound): by ``activation.TANH`` near 0, else by 1 - 2 / (1 + exp(2 x / bound)).

    tanh.approx is not used: its relative error of 2^-11 exceeds the rounding of bfloat16 results.
    """
    square = x * x
    series = Float32(TANH[-1] / bound ** (2 * len(TANH)))
    for i in reversed(range(len(TANH) - 1)):
        series = series * square + TANH[i] / bound ** (2 * i + 2)
    small = x + x * (square * series)
    large = bound - (2.0 * bound) * cute.arch.rcp_approx(
        Float32(1.0) + cute.math.exp2((2 * LOG2_E / bound) * x, fastmath=True)
    )
    return select(square <= (TANH_SMALL * bound) ** 2, small, large)
