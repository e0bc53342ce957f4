"""Activations between the two products of a layer of experts, in float32 operations with the same bits on every device.

Every line is IEEE 754 float32 operations, each rounded to nearest even; sigmoid is that of ``formats.silu``::

    1  gate = gate + bias;  up = up + bias                       where there is a bias
    2  gate = min(gate, limit);  up = max(min(up, limit), -limit)   where there is a limit
    3  silu: x * sigmoid(x).  relu2: p * p, p = 0 where x < 0, else x.  swiglu_oai: x * sigmoid(x * 1.702).
       gelu_tanh: x * sigmoid((x + ((x * x) * x) * 0.044715) * 1.5957691)
    4  result = activation(gate) * up;  for swiglu_oai: activation(gate) * (up + 1)

A layer without a gate computes activation(x + bias). NaN stays NaN.
"""

from typing import Literal, get_args

import torch

from nvfp4_cute.formats.silu import sigmoid
from nvfp4_cute.problem import Activation

GateLayout = Literal["concatenated", "interleaved", "none"]
ACTIVATIONS = get_args(Activation)
OAI_SLOPE = 1.702
GELU_LINEAR, GELU_CUBIC = 1.5957691216057308, 0.044715


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Computes line 3 for float32 ``x``."""
    if activation == "relu2":
        positive = torch.where(x < 0, 0.0, x)
        return positive * positive
    if activation == "gelu_tanh":
        cube = x * x * x
        inner = x + cube * GELU_CUBIC
        return x * sigmoid(inner * GELU_LINEAR)
    return x * sigmoid(x * OAI_SLOPE if activation == "swiglu_oai" else x)


def activate_rows(
    h: torch.Tensor, activation: str, gate_layout: GateLayout, limit: float | None
) -> torch.Tensor:
    """Computes lines 2 to 4.

    Args:
        h: float32 [rows, N], or [rows, 2 N] with a gate: [gate, up], or alternating columns of both ("interleaved").
        activation: name of the activation.
        gate_layout: how the columns of gate and up are arranged in ``h``.
        limit: see line 2, or None.

    Returns:
        float32 [rows, N].
    """
    if gate_layout == "none":
        return activate(h, activation)
    gate, up = h.chunk(2, 1) if gate_layout == "concatenated" else (h[:, ::2], h[:, 1::2])
    if limit is not None:
        bound = torch.tensor(limit, dtype=torch.float32, device=h.device)
        gate, up = torch.minimum(gate, bound), torch.maximum(torch.minimum(up, bound), -bound)
    if activation == "swiglu_oai":
        up = up + 1.0
    return activate(gate, activation) * up
