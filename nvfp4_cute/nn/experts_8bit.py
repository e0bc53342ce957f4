"""Experts with weights of 8 bits and float32 scales: what FP8 and INT8 have in common."""

from typing import Any, ClassVar

import torch

from nvfp4_cute import backends
from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.nn.experts import Activation, SortedExperts, expert_sizes
from nvfp4_cute.nn.linear_8bit import check_bias, check_weight
from nvfp4_cute.nn.state import NamesFormats
from nvfp4_cute.ops.grouped_gemm import grouped_gemm
from nvfp4_cute.ops.quantize import quantize


class Experts8Bit(SortedExperts, NamesFormats):
    """Experts with W in 8 bits: two products of all experts, each of quantized rows. There is no backward pass.

    A subclass states:
        ROWS, WEIGHTS: formats that are multiplied. SCALE: how names of buffers of scales end.
    """

    ROWS: ClassVar[BlockFormat]
    WEIGHTS: ClassVar[BlockFormat]
    SCALE: ClassVar[str]

    w13: torch.Tensor
    w2: torch.Tensor
    bias13: torch.Tensor | None
    bias2: torch.Tensor | None

    def __init__(
        self,
        w13: BlockScaledTensor,
        w2: BlockScaledTensor,
        bias13: torch.Tensor | None = None,
        bias2: torch.Tensor | None = None,
        activation: str | Activation = "silu",
        *,
        has_gate: bool = True,
        backend: str = "auto",
    ):
        check_weight("w13", w13, "[E, 2 I, H]", self.WEIGHTS)
        check_weight("w2", w2, "[E, H, I]", self.WEIGHTS)
        backends.resolve(backend, w13.device)
        experts, hidden, rows = expert_sizes(w13.shape, w2.shape, has_gate)
        check_bias("bias13", bias13, (experts, rows))
        check_bias("bias2", bias2, (experts, hidden))
        super().__init__(experts, activation)
        self.has_gate, self.backend = has_gate, backend
        self.formats = (self.WEIGHTS, self.WEIGHTS)
        for name, weight in (("w13", w13), ("w2", w2)):
            self.register_buffer(name, weight.data.view(self.WEIGHTS.data_dtypes[-1]))
            self.register_buffer(f"{name}_{self.SCALE}", weight.scale)
        self.register_buffer("bias13", bias13)
        self.register_buffer("bias2", bias2)

    @classmethod
    def from_experts(cls, gate_up: torch.Tensor, down: torch.Tensor, **options: Any) -> "Experts8Bit":
        """The layer with weights quantized, on their device.

        Args:
            gate_up: [E, 2 I, H] of any float dtype (without a gate [E, I, H]). down: [E, H, I]. Not changed.
            options: of the constructor, but weights.

        Raises:
            What ``quantize`` and the constructor do.
        """
        w13, w2 = (quantize(weights, format=cls.WEIGHTS) for weights in (gate_up, down))
        return cls(w13, w2, **options)

    def products(self, rows: torch.Tensor, offs: torch.Tensor, expert_of_row: torch.Tensor) -> torch.Tensor:
        """As of SortedExperts."""
        own = expert_of_row.clamp(max=self.num_experts - 1)
        first = self._product("w13", self.bias13, rows, offs, own)
        hidden = self.hidden([*first.chunk(2, dim=-1)] if self.has_gate else [first])
        return self._product("w2", self.bias2, hidden, offs, own)

    def _product(
        self, name: str, bias: torch.Tensor | None, x: torch.Tensor, offs: torch.Tensor, own: torch.Tensor
    ) -> torch.Tensor:
        weight, scale = getattr(self, name), getattr(self, f"{name}_{self.SCALE}")
        q = quantize(x, format=self.ROWS, backend=self.backend)
        y = grouped_gemm(
            q.data, weight, q.scale, scale, offs,
            a_format=self.ROWS, b_format=self.WEIGHTS, out_dtype=x.dtype, backend=self.backend,
        )  # fmt: skip
        return y if bias is None else y + bias[own].to(y.dtype)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.num_experts} of {self.w2.shape[1]} x {self.w2.shape[2]}"
