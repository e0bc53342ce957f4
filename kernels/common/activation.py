"""Activations of a dual GEMM's first product: element-wise functions in float32.

silu(x) = x * sigmoid(x). gelu_tanh(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)), which is the tanh form of
GELU since (1 + tanh(u)) / 2 = sigmoid(2 * u). relu2(x) = max(x, 0)^2. swiglu_oai(x) = x * sigmoid(1.702 * x); it is
multiplied by the second product plus 1.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from . import ptx

LOG2_E = 1.4426950408889634
OAI_SLOPE = 1.702
GELU_LINEAR, GELU_CUBIC = 1.5957691216057308, 0.044715  # 2 * sqrt(2 / pi)


@cute.jit
def gate(x: Float32, other: Float32, activation: cutlass.Constexpr, limit: Float32 | None) -> Float32:
    """Returns ``activation(x) * other``. With a limit, x is clamped from above to it and ``other`` to plus or minus it first."""
    if cutlass.const_expr(limit is not None):
        x = ptx.min_nan(x, limit)
        other = ptx.max_nan(ptx.min_nan(other, limit), -limit)
    if cutlass.const_expr(activation == "swiglu_oai"):
        other = other + Float32(1.0)
    return activate(x, activation) * other


@cute.jit
def activate(x: Float32, activation: cutlass.Constexpr) -> Float32:
    """Returns ``activation`` ("silu", "gelu_tanh", "relu2" or "swiglu_oai") of one value."""
    result = x
    if cutlass.const_expr(activation == "relu2"):
        positive = cutlass.max(x, Float32(0.0))
        result = positive * positive
    elif cutlass.const_expr(activation == "gelu_tanh"):
        result = x * _sigmoid(GELU_LINEAR * (x + GELU_CUBIC * (x * x * x)))
    elif cutlass.const_expr(activation == "swiglu_oai"):
        result = x * _sigmoid(OAI_SLOPE * x)
    else:
        result = x * _sigmoid(x)
    return result


@cute.jit
def _sigmoid(x: Float32) -> Float32:
    """Returns 1 / (1 + 2^(-x * log2 e)) by ex2.approx and rcp.approx (relative errors 2^-22 and 2^-23: PTX ISA 9.7.3).

    (1 + tanh.approx(x / 2)) / 2 is not used: its absolute error of 2^-12 exceeds the value itself for negative x.
    """
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(-LOG2_E * x, fastmath=True))
