"""Layers with INT8 weights and a scale a channel (SmoothQuant, compressed-tensors' int-quantized): rows become INT8, too."""

from typing import Literal, get_args

import torch

from nvfp4_cute.formats.block_format import INT8
from nvfp4_cute.nn.experts_8bit import Experts8Bit
from nvfp4_cute.nn.linear_8bit import Linear8Bit

Activations = Literal["int8", "16bit"]


class LinearINT8(Linear8Bit):
    """``x @ W^T + bias`` with W in INT8: ``torch.nn.Linear`` at 8 bits a weight. There is no backward pass.

    - ``activations="int8"`` (W8A8): every row of x gets a scale of its own, its largest magnitude / 127 (``quantize``); then
      ``gemm`` multiplies, whose integer sums are exact. All backends give the same bits.
    - ``activations="16bit"`` (W8A16): ``gemm`` with 16-bit rows, as of LinearFP8.

    The result has the dtype of ``x``, under autocast that of autocast. The bias is added in float32, before the rounding to that.

    State dict, as compressed-tensors names it:
        weight: int8 [N, K].
        weight_scale: float32 [N, 1].
        bias: [N], where there is one.

    Moving the module to a device moves all of it; ``.to(dtype)`` converts a 16-bit bias.

    Args:
        weight: INT8 [N, K].
        bias: [N], or None.
        dtype: of the bias.
        activations: "int8", as None is, or "16bit".
        backend: as of ``gemm``.

    Example:
        >>> layer = LinearINT8(quantize(torch.randn(256, 512), format=INT8))
        >>> layer(torch.randn(40, 512).bfloat16()).shape
        torch.Size([40, 256])

    Raises:
        TypeError, ValueError: ``weight`` is no matrix of INT8, ``bias`` no tensor [N], or a choice is unknown.
    """

    ROWS = WEIGHTS = INT8
    BLOCK_FACTORS = ("weight_scale",)
    ACTIVATIONS = get_args(Activations)

    weight_scale: torch.Tensor


class ExpertsINT8(Experts8Bit):
    """Experts with INT8 weights: products of rows, each quantized by its largest magnitude / 127, or of 16-bit rows.

    Integer sums are exact, so all backends give the same products of quantized rows. A CUDA graph can hold the call, with 16-bit
    rows on sm_90a alone: elsewhere each expert has products of its own, whose number of rows the host reads.

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
