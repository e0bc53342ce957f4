"""Activations between the two products of a layer of experts, in float32 operations with the same bits on every device.

Every line is IEEE 754 float32 operations, each rounded to nearest even; sigmoid and exp_minus are those of ``formats.silu``;
exp_minus(y) approximates e to the power of -y::

    1  gate = gate + bias;  up = up + bias                       where there is a bias
    2  gate = min(gate, limit);  up = max(min(up, limit), -limit)   where there is a limit
    3  silu: x * sigmoid(x).  relu: p = 0 where x < 0, else x.  relu2: p * p.  swiglu_oai: x * sigmoid(x * alpha).
       gelu_tanh: x * sigmoid((x + ((x * x) * x) * 0.044715) * 1.5957691).  gelu: p - a * ((s * t) * exp_minus((a * a) * 0.5)),
       a = min(|x|, 16), t = 1 / (a * 0.3 + 1), s = NORMAL[7]; s = s * t + NORMAL[i] for i = 6 ... 0
       situ: bounded(x, beta) * sigmoid(x)
    4  result = activation(gate) * up;  for swiglu_oai: activation(gate) * (up + 1);  for situ with linear_beta:
       activation(gate) * bounded(up, linear_beta)

    bounded(x, b): z = x * (1 / b); w = z * z; s = TANH[3]; s = s * w + TANH[i] for i = 2 ... 0
       tanh = (1 - e) * (1 / (1 + e)) with the sign of z, e = exp_minus(|z| + |z|), where |z| > 0.6, else z * (w * s) + z
       result = tanh * b

A layer without a gate computes activation(x + bias). NaN stays NaN.
"""

from typing import Any, Literal

import torch

from nvfp4_cute.activation import (
    GELU_CUBIC,
    GELU_LINEAR,
    IDENTITY,
    NORMAL,
    NORMAL_MAX,
    NORMAL_SLOPE,
    TANH,
    TANH_SMALL,
    parse,
)
from nvfp4_cute.formats.silu import exp_minus, sigmoid

GateLayout = Literal["concatenated", "interleaved", "none"]


def activate(x: torch.Tensor, activation: Any) -> torch.Tensor:
    """Computes line 3 for float32 ``x`` and an ``Activation``."""
    name = activation.name
    if name in ("relu", "relu2"):
        positive = torch.where(x < 0, 0.0, x)
        return positive if name == "relu" else positive * positive
    if name == "gelu":
        a = x.abs().clamp(max=NORMAL_MAX)
        t = torch.ones_like(a) / (a * NORMAL_SLOPE + 1.0)
        below = _series(NORMAL, t) * t * exp_minus(a * a * 0.5)
        return torch.where(x < 0, 0.0, x) - a * below
    if name == "gelu_tanh":
        cube = x * x * x
        inner = x + cube * GELU_CUBIC
        return x * sigmoid(inner * GELU_LINEAR)
    if name == "situ":
        return _bounded(x, activation.beta) * sigmoid(x)
    return x * sigmoid(x * activation.alpha if name == "swiglu_oai" else x)


def _bounded(x: torch.Tensor, bound: float) -> torch.Tensor:
    z = x * (1.0 / bound)
    square = z * z
    small = z * (square * _series(TANH, square)) + z
    e = exp_minus(z.abs() + z.abs())
    large = (1.0 - e) * (torch.ones_like(e) / (e + 1.0))
    return torch.where(z.abs() > TANH_SMALL, torch.where(z < 0, -large, large), small) * bound


def _series(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x
        total = total + coefficient
    return total


def activate_rows(
    h: torch.Tensor, activation: str, gate_layout: GateLayout, limit: float | None
) -> torch.Tensor:
    """Computes lines 2 to 4.

    Args:
        h: float32 [rows, N], or [rows, 2 N] with a gate: [gate, up], or alternating columns of both ("interleaved").
        activation: text of ``nvfp4_cute.activation``, or ``IDENTITY``, without a gate.
        gate_layout: how the columns of gate and up are arranged in ``h``.
        limit: the limit of line 2, or None.

    Returns:
        float32 [rows, N].
    """
    if activation == IDENTITY:
        return h
    own = parse(activation)
    if gate_layout == "none":
        return activate(h, own)
    gate, up = h.chunk(2, 1) if gate_layout == "concatenated" else (h[:, ::2], h[:, 1::2])
    if limit is not None:
        bound = torch.tensor(limit, dtype=torch.float32, device=h.device)
        gate, up = torch.minimum(gate, bound), torch.maximum(torch.minimum(up, bound), -bound)
    if own.name == "swiglu_oai":
        up = up + 1.0
    if own.linear_beta is not None:
        up = _bounded(up, own.linear_beta)
    return activate(gate, own) * up
