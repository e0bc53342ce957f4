"""Computes silu(x) * up in float32 operations that give the same bits on every device. A fused ``quantize`` uses them.

silu(x) = x / (1 + exp(-x)). Every line is one IEEE 754 float32 operation, rounded to nearest even, with subnormals::

    1  t = |x| * LOG2_E;  t = min(t, 127)
    2  n = (t + MAGIC) - MAGIC              the nearest integer; y = n - t, exact
    3  p = EXP2[5]; p = p * y + EXP2[i]     for i = 4 ... 0, product and sum rounded each: 2^y to 2^-22
    4  e = p * 2^-n                         exp(-|x|); 0 where n = 127
    5  r = 1 / (1 + e)
    6  s = r where x >= 0, else e * r       1 / (1 + exp(-x))
    7  silu = x * s;  result = silu * up

The error is at most (|x| + 16) * 2^-24 of silu(x) * up (tested). For negative x, silu is -0 from |x| = 87.7 on. NaN and
silu(-infinity) give NaN.
"""

import torch

# Constants of the operations above, as float32 numbers.
LOG2_E = 1.44269502162933349609375
MAX_EXPONENT = 127.0
# 1.5 * 2^23. Adding it leaves the nearest integer in the low bits.
MAGIC = 12582912.0
# Coefficients with the smallest maximum relative error of 2^y on [-1/2, 1/2] and first term 1, rounded to float32.
EXP2 = (
    1.0,
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.009671512991189957,
    0.001326472731307149,
)


def silu_mul(x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Computes silu(x) * up as specified above.

    Args:
        x, up: float16, bfloat16 or float32 in one shape.

    Returns:
        float32 in that shape.
    """
    x, up = x.float(), up.float()
    silu = x * sigmoid(x)
    return silu * up


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Computes 1 / (1 + exp(-x)) for float32 by lines 1 to 6; NaN stays NaN."""
    e = exp_minus(x.abs())
    r = torch.ones_like(e) / (e + 1.0)
    return torch.where(x >= 0, r, e * r)


def exp_minus(magnitude: torch.Tensor) -> torch.Tensor:
    """Computes exp(-magnitude) for nonnegative float32 by lines 1 to 4; NaN stays NaN."""
    t = torch.clamp(magnitude * LOG2_E, max=MAX_EXPONENT)
    n = (t + MAGIC) - MAGIC
    y = n - t
    p = torch.full_like(y, EXP2[-1])
    for coefficient in reversed(EXP2[:-1]):
        p = p * y
        p = p + coefficient
    power = ((127 - torch.nan_to_num(n).int()) << 23).view(torch.float32)
    return p * power
