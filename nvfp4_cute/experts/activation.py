"""Activations between the two products of a layer of experts, in float32 arithmetic that every device repeats bit for bit.

Every line is float32 operations of IEEE 754, each rounded to nearest even; sigmoid is that of ``formats.silu``::

    1  gate = gate + bias;  up = up + bias                       where there is a bias
    2  gate = min(gate, limit);  up = max(min(up, limit), -limit)   where there is a limit
    3  silu: x * sigmoid(x).  relu2: p * p, p = 0 where x < 0, else x.  swiglu_oai: x * sigmoid(x * 1.702).
       gelu_tanh: x * sigmoid((x + ((x * x) * x) * 0.044715) * 1.5957691)
    4  result = activation(gate) * up;  of swiglu_oai: activation(gate) * (up + 1)

A layer without a gate has activation(x + bias). NaN stays NaN.
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
    """Line 3 of float32 ``x``."""
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
    """Lines 2 to 4.

    Args:
        h: float32 [rows, N], or [rows, 2 N] with a gate: [gate, up], or a column of each in turn ("interleaved").

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
