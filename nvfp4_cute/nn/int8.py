"""Layers with INT8 weights and a scale a channel (SmoothQuant, compressed-tensors' int-quantized): rows become INT8, too."""

from typing import Literal, get_args

import torch

from nvfp4_cute.formats.block_format import INT8
from nvfp4_cute.nn.experts_8bit import Experts8Bit

Activations = Literal["int8", "16bit"]


class ExpertsINT8(Experts8Bit):
    """Experts with INT8 weights: products of rows, each quantized by its largest magnitude / 127, or of 16-bit rows.

    Integer sums are exact, so all backends give the same products of quantized rows. A CUDA graph can hold the call.

    State dict:
        w13, w2: int8 [E, 2 I, H] and [E, H, I]. w13_scale, w2_scale: float32 [E, 2 I, 1] and [E, H, 1], which multiply.
        bias13, bias2: where there are. _extra_state: names of the formats and a version, uint8 bytes of JSON. A state dict
            without it is read, too.

    Args:
        w13: INT8 [E, 2 I, H], [gate; up] of every expert, or [E, I, H] where there is no gate. w2: [E, H, I].
        bias13, bias2: [E, 2 I] and [E, H], or None.
        activation: as of SortedExperts. has_gate: whether there is a gate.
        activations: "int8", as None is, or "16bit".
        backend: as of ``gemm``.

    Example:
        >>> layer = ExpertsINT8.from_experts(torch.randn(4, 256, 64), torch.randn(4, 64, 128))
        >>> ids, weights = torch.tensor([[0, 3], [1, 2]]), torch.full((2, 2), 0.5)
        >>> layer(torch.randn(2, 64).bfloat16(), ids, weights).shape
        torch.Size([2, 64])

    Raises:
        TypeError, ValueError: weights are not INT8 of three dimensions, sizes do not fit, or a choice is unknown.
    """

    ROWS = WEIGHTS = INT8
    ACTIVATIONS = get_args(Activations)
    BLOCK_FACTORS = ("w13_scale", "w2_scale")

    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
