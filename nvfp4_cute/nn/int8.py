"""Layers with INT8 weights and a scale a channel (SmoothQuant, compressed-tensors' int-quantized): rows become INT8, too."""

from typing import Literal, get_args

import torch

from nvfp4_cute.formats.block_format import INT8
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.nn.linear_8bit import Linear8Bit

Activations = Literal["int8", "16bit"]


class LinearINT8(Linear8Bit):
    """``x @ W^T + bias`` with W in INT8: ``torch.nn.Linear`` at 8 bits a weight. There is no backward pass.

    - ``activations="int8"`` (W8A8): every row of x gets a scale of its own, its largest magnitude / 127 (``quantize``); then
      ``gemm`` multiplies, whose integer sums are exact. All backends give the same bits.
    - ``activations="16bit"`` (W8A16): ``gemm`` with 16-bit rows, as of LinearFP8.

    The result has the dtype of ``x``, under autocast that of autocast; it is rounded to it, and again after the bias was added.

    State dict, as compressed-tensors names it:
        weight: int8 [N, K].
        weight_scale: float32 [N, 1].
        bias: [N], where there is one.

    Moving the module to a device moves all of it; ``.to(dtype)`` converts a 16-bit bias.

    Args:
        weight: INT8 [N, K].
        bias: [N], or None.
        dtype: of the bias.
        activations: "int8" or "16bit".
        backend: as of ``gemm``.

    Example:
        >>> layer = LinearINT8(quantize(torch.randn(256, 512), format=INT8))
        >>> layer(torch.randn(40, 512).bfloat16()).shape
        torch.Size([40, 256])

    Raises:
        TypeError, ValueError: ``weight`` is no matrix of INT8, ``bias`` no tensor [N], or a choice is unknown.
    """

    ROWS, WEIGHTS, SCALE = INT8, INT8, "weight_scale"
    BLOCK_FACTORS = (SCALE,)
    ACTIVATIONS = get_args(Activations)

    weight_scale: torch.Tensor

    def __init__(
        self,
        weight: BlockScaledTensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        activations: Activations = "int8",
        backend: str = "auto",
    ):
        super().__init__(weight, bias, dtype, activations, backend)
