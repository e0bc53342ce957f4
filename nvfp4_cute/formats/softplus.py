"""Computes sqrt(softplus(x)), a score of routers, in float32 operations that give the same bits on every device.

softplus(x) = log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)). Every line is one IEEE 754 float32 operation, rounded to nearest
even, with subnormals::

    1  e = exp(-|x|)                        lines 1 to 4 of ``formats.silu``
    2  s = e / (e + 2)                      log(1 + e) = 2 artanh(s), s at most 1/3
    3  z = s * s
    4  p = ARTANH[4]; p = p * z + ARTANH[i]     for i = 3 ... 0, product and sum rounded each
    5  l = (s + s) * p
    6  result = sqrt(max(x, 0) + l)

The relative error is at most (|x| / 2 + 8) * 2^-24 for x from -86 to 0 and 4 * 2^-24 for x > 0 (tested). For x of -87.7
and less, the result is 0. NaN stays NaN.
"""

import torch

from .silu import exp_minus

# Coefficients with the smallest maximum relative error of artanh(s) / s in z on [0, 1/9] and first term 1, rounded to float32.
ARTANH = (1.0, 0.3333320915699005, 0.2001076340675354, 0.14000901579856873, 0.1400599628686905)


def sqrt_softplus(x: torch.Tensor) -> torch.Tensor:
    """Computes sqrt(log(1 + exp(x))) for float32 as specified above."""
    e = exp_minus(x.abs())
    s = e / (e + 2.0)
    z = s * s
    p = torch.full_like(z, ARTANH[-1])
    for coefficient in reversed(ARTANH[:-1]):
        p = p * z
        p = p + coefficient
    # torch's float32 square root is not the nearest number on every CPU; that of float64, rounded to float32, is.
    return (x.clamp(min=0.0) + (s + s) * p).double().sqrt().float()
