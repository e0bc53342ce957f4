"""Experts with weights of 8 bits and float32 scales: what FP8 and INT8 have in common."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from nvfp4_cute import backends
from nvfp4_cute.formats.block_format import ATOM_ROWS, BlockFormat
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.nn.experts import (
    Activation,
    SortedExperts,
    expert_sizes,
)
from nvfp4_cute.nn.state import NamesFormats
from nvfp4_cute.nn.weights import check_weight, kept_bias
from nvfp4_cute.operands.rules import check_choice
from nvfp4_cute.ops.parts import composed_dual
from nvfp4_cute.ops.parts.dual_gemm import grouped_dual_gemm
from nvfp4_cute.ops.parts.grouped_gemm import grouped_gemm
from nvfp4_cute.ops.quantize import quantize

# Activations of a gate that kernels of a dual GEMM compute, too, and what they cut both products to.
FUSED_LIMITS: dict[Any, float | None] = {"silu": None, "gelu_tanh": None, "swiglu_oai": 7.0}


class Experts8Bit(SortedExperts, NamesFormats):
    """Experts with W in 8 bits; rows are quantized before each product, or stay in 16 bits. There is no backward pass.

    Two products of all experts, which a CUDA graph can hold. Of 16-bit rows there is a kernel for sm_90a; elsewhere each expert
    has products of its own, whose number of rows the host reads.

    A subclass states:
        ROWS, WEIGHTS: formats that are multiplied. BLOCK_FACTORS: names of the buffers of scales, of w13 and of w2. ACTIVATIONS:
        choices; the first is of ROWS, "16bit" is of 16-bit rows.
    """

    ROWS: ClassVar[BlockFormat]
    WEIGHTS: ClassVar[BlockFormat]
    ACTIVATIONS: ClassVar[tuple[str, ...]]

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
        activations: str | None = None,
        has_gate: bool = True,
        backend: str = "auto",
    ):
        check_choice("activations", activations or self.ACTIVATIONS[0], self.ACTIVATIONS)
        check_weight("w13", w13, "[E, 2 I, H]", self.WEIGHTS)
        check_weight("w2", w2, "[E, H, I]", self.WEIGHTS)
        backends.resolve(backend, w13.device)
        experts, hidden, rows = expert_sizes(w13.shape, w2.shape, has_gate)
        bias13 = kept_bias("bias13", bias13, (experts, rows), w13.device)
        bias2 = kept_bias("bias2", bias2, (experts, hidden), w13.device)
        super().__init__(experts, activation)
        self.activations = activations or self.ACTIVATIONS[0]
        self.has_gate, self.backend = has_gate, backend
        self.formats = (self.WEIGHTS, self.WEIGHTS)
        for name, weight in (("w13", w13), ("w2", w2)):
            self.register_buffer(name, weight.data.view(self.WEIGHTS.data_dtypes[-1]))
            self.register_buffer(self._scale_name(name), weight.scale)
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
        if self.is_fused(rows.device):
            y = self._product_of_rows(offs, "w2", *self._hidden(offs, rows), rows.dtype)
            return _with_bias(y, self.bias2, own)
        return self._layer(rows, own, partial(self._product, offs))

    def is_fused(self, device: torch.device) -> bool:
        """Whether one launch on ``device`` computes both products of gate and up, and the activation, in float32."""
        is_known = isinstance(self.activation, str) and self.activation in FUSED_LIMITS
        fits = self.has_gate and self.bias13 is None and self.w13.shape[1] % (2 * ATOM_ROWS) == 0
        if self.activations == "16bit" or not (is_known and fits):
            return False
        return composed_dual.is_fused((self.ROWS, self.WEIGHTS), self.backend, device)

    def _hidden(self, offs: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden activations of all experts, whose rows end at ``offs``, quantized: by the same launch where one does it."""
        weight, scale = self._weight("w13")
        q = quantize(x, format=self.ROWS, backend=self.backend)
        activation: Any = self.activation
        quantizes = composed_dual.is_fused((self.ROWS, self.WEIGHTS), self.backend, x.device, self.ROWS)
        out_dtype: Any = self.ROWS.name if quantizes else x.dtype
        h = grouped_dual_gemm(
            q.data, weight, None, q.scale, scale, offs=offs, a_format=self.ROWS, b_format=self.WEIGHTS, activation=activation,
            limit=FUSED_LIMITS[activation], weight_layout="concatenated", out_dtype=out_dtype, backend=self.backend,
        )  # fmt: skip
        if quantizes:
            return h
        q = quantize(h, format=self.ROWS, backend=self.backend)
        return q.data, q.scale

    def _layer(
        self, rows: torch.Tensor, own: torch.Tensor, product: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Of rows whose experts are ``own``. product: of the name of weights, and rows."""
        first = _with_bias(product("w13", rows), self.bias13, own)
        hidden = self.hidden([*first.chunk(2, dim=-1)] if self.has_gate else [first], own)
        return _with_bias(product("w2", hidden), self.bias2, own)

    def _product(self, offs: torch.Tensor, name: str, x: torch.Tensor) -> torch.Tensor:
        """Of all experts, whose rows end at ``offs``."""
        if self.activations == "16bit":
            weight, scale = self._weight(name)
            options: Any = {"b_format": self.WEIGHTS, "out_dtype": x.dtype, "backend": self.backend}
            return grouped_gemm(x, weight, None, scale, offs, **options)
        q = quantize(x, format=self.ROWS, backend=self.backend)
        return self._product_of_rows(offs, name, q.data, q.scale, x.dtype)

    def _product_of_rows(
        self, offs: torch.Tensor, name: str, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The same of quantized rows."""
        weight, weight_scale = self._weight(name)
        return grouped_gemm(
            data, weight, scale, weight_scale, offs, a_format=self.ROWS, b_format=self.WEIGHTS, out_dtype=dtype,
            backend=self.backend,
        )  # fmt: skip

    def _weight(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales."""
        return getattr(self, name), getattr(self, self._scale_name(name))

    def _scale_name(self, name: str) -> str:
        of_w13, of_w2 = self.BLOCK_FACTORS
        return of_w13 if name == "w13" else of_w2

    def extra_repr(self) -> str:
        """Sizes, and how rows are multiplied."""
        sizes = f"{self.num_experts} of {self.w2.shape[1]} x {self.w2.shape[2]}"
        return f"{sizes}, activations={self.activations!r}"


def _with_bias(y: torch.Tensor, bias: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
    """``y`` plus the bias of every row's expert."""
    return y if bias is None else y + bias[own].to(y.dtype)
