"""Layers with FP8 weights in blocks of 128 x 128 (DeepSeek-V3, Qwen3-FP8): activations become FP8 in blocks of 128 values."""

from typing import Literal, get_args

import torch

from nvfp4_cute.formats.block_format import FP8_1x128, FP8_128x128
from nvfp4_cute.nn.experts_8bit import Experts8Bit
from nvfp4_cute.nn.weights import has_products

Activations = Literal["fp8", "16bit"]


class ExpertsFP8(Experts8Bit):
    """Experts with FP8 weights: products of rows that are quantized in blocks of 128, or of 16-bit rows.

    A CUDA graph can hold the call.

    State dict:
        w13, w2: float8_e4m3fn [E, 2 I, H] and [E, H, I].
        w13_scale_inv, w2_scale_inv: float32 [E, ceil(2 I / 128), H / 128] and [E, ceil(H / 128), I / 128], which multiply.
        bias13, bias2: where there are. _extra_state: names of the formats and a version, uint8 bytes of JSON. A state dict
            without it is read, too.

    Args:
        w13: FP8_128x128 [E, 2 I, H], [gate; up] of every expert, or [E, I, H] where there is no gate. w2: [E, H, I].
        bias13, bias2: [E, 2 I] and [E, H], or None.
        activation: as of SortedExperts. has_gate: whether there is a gate.
        activations: "fp8", as None is, or "16bit".
        backend: as of ``gemm``.

    Raises:
        TypeError, ValueError: weights are not FP8_128x128 of three dimensions, sizes do not fit, or a choice is unknown.
    """

    ROWS, WEIGHTS = FP8_1x128, FP8_128x128
    ACTIVATIONS = get_args(Activations)
    BLOCK_FACTORS = ("w13_scale_inv", "w2_scale_inv")

    w13_scale_inv: torch.Tensor
    w2_scale_inv: torch.Tensor


def has_fp8_products(backend: str, device: torch.device) -> bool:
    """Whether a kernel multiplies FP8 rows by FP8 weights on a device, or the reference does."""
    return has_products(backend, device, (FP8_1x128, FP8_128x128))
