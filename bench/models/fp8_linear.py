"""A linear layer in FP8 with torch alone, for comparison: ``models bench --schemes fp8``."""

import torch

from nvfp4_cute.formats.codecs import E4M3_MAX
from nvfp4_cute.nn.state import Picklable

# Rows, columns and K of torch._scaled_mm's operands are multiples of this.
MULTIPLE = 16


class LinearFP8(Picklable):
    """Computes ``x @ W^T`` with both operands in e4m3 and one calibrated scale each: ``torch._scaled_mm``.

    Args:
        weight: [N, K], float; N and K multiples of 16.
        weight_scale, input_scale: divisors of the values of each operand.
        bias: [N], or None.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, weight: torch.Tensor, weight_scale: float, input_scale: float, bias: torch.Tensor | None = None
    ):
        super().__init__()
        device = weight.device
        limit = E4M3_MAX * weight_scale
        scaled = (weight.clamp(-limit, limit) / weight_scale).to(torch.float8_e4m3fn)
        self.register_buffer("weight", scaled)
        self.register_buffer("weight_scale", torch.tensor(weight_scale, dtype=torch.float32, device=device))
        self.register_buffer("input_scale", torch.tensor(input_scale, dtype=torch.float32, device=device))
        self.register_buffer("bias", bias)
        self.inverse = 1 / input_scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``x`` [..., K], with magnitudes of at most 448 times the scale, to [..., N] in its dtype."""
        rows = x.reshape(-1, x.shape[-1])
        quantized = (rows * self.inverse).to(torch.float8_e4m3fn)
        y = torch._scaled_mm(
            quantized, self.weight.t(), self.input_scale, self.weight_scale, bias=self.bias, out_dtype=x.dtype
        )
        return y.view(*x.shape[:-1], len(self.weight))
