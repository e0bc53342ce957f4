"""``QuantizedExperts``: experts with 8-bit weights and float32 scales, FP8 or INT8."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nvfp4_cute import backends
from nvfp4_cute.formats.block_format import ATOM_ROWS, INT8, BlockFormat, FP8_128x128, as_format
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.nn.activations import check_activations, rows_format
from nvfp4_cute.nn.experts import (
    Activation,
    SortedExperts,
    expert_sizes,
)
from nvfp4_cute.nn.state import NamesFormats
from nvfp4_cute.nn.weights import check_weight, kept_bias
from nvfp4_cute.ops.parts import composed_dual
from nvfp4_cute.ops.parts.dual_gemm import grouped_dual_gemm
from nvfp4_cute.ops.parts.grouped_gemm import grouped_gemm
from nvfp4_cute.ops.quantize import quantize

FORMATS = (FP8_128x128, INT8)
# Activations that the kernels of a dual GEMM compute, and the limit to which they clamp both products.
FUSED_LIMITS: dict[Any, float | None] = {"silu": None, "gelu_tanh": None, "swiglu_oai": 7.0}


class QuantizedExperts(SortedExperts, NamesFormats):
    """Experts with FP8 or INT8 weights and options that ``MoE`` lacks: 8-bit rows, and functions as activations.

        >>> layer = QuantizedExperts.from_experts(torch.randn(4, 256, 64), torch.randn(4, 64, 128), "int8")
        >>> ids, weights = torch.tensor([[0, 3], [1, 2]]), torch.full((2, 2), 0.5)
        >>> layer(torch.randn(2, 64).bfloat16(), ids, weights).shape
        torch.Size([2, 64])

    Rows are quantized before each product (FP8: in blocks of 128 values; INT8: each row by its largest magnitude / 127), or
    stay in 16 bits. Integer sums are exact, so all backends give the same products of INT8. A CUDA graph can capture the call.
    There is no backward pass.

    State dict:
        w13, w2: float8_e4m3fn or int8 [E, 2 I, H] and [E, H, I].
        w13_scale_inv, w2_scale_inv: FP8: float32 [E, ceil(2 I / 128), H / 128] and [E, ceil(H / 128), I / 128], which multiply.
        w13_scale, w2_scale: INT8: float32 [E, 2 I, 1] and [E, H, 1], which multiply.
        bias13, bias2: where there are biases.
        _extra_state: names of the formats and a version, as uint8 bytes of JSON. A state dict without it can also be loaded.

    Args:
        w13: FP8_128x128 or INT8 [E, 2 I, H], [gate; up] of every expert, or [E, I, H] where there is no gate.
        w2: in the same format, [E, H, I].
        bias13, bias2: [E, 2 I] and [E, H], or None.
        activation: see SortedExperts.
        has_gate: whether there is a gate.
        activations: "fp8" or "int8", matching the weights; None for that; or "16bit".
        backend: see ``gemm``.

    Raises:
        TypeError, ValueError: weights do not have three dimensions or one format, sizes do not fit, or a choice is unknown.
    """

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
        format = w13.format if getattr(w13, "format", None) in FORMATS else FP8_128x128
        activations = check_activations(activations, format)
        check_weight("w13", w13, "[E, 2 I, H]", format)
        check_weight("w2", w2, "[E, H, I]", format)
        backends.resolve(backend, w13.device)
        experts, hidden, rows = expert_sizes(w13.shape, w2.shape, has_gate)
        bias13 = kept_bias("bias13", bias13, (experts, rows), w13.device)
        bias2 = kept_bias("bias2", bias2, (experts, hidden), w13.device)
        super().__init__(experts, activation)
        self.activations, self.has_gate, self.backend = activations, has_gate, backend
        self.formats = (format, format)
        for name, weight in (("w13", w13), ("w2", w2)):
            self.register_buffer(name, weight.data.view(format.data_dtypes[-1]))
            self.register_buffer(self._scale_name(name), weight.scale)
        self.register_buffer("bias13", bias13)
        self.register_buffer("bias2", bias2)

    @classmethod
    def from_experts(
        cls, gate_up: torch.Tensor, down: torch.Tensor, format: BlockFormat | str, **options: Any
    ) -> "QuantizedExperts":
        """Makes a layer with quantized weights, on the device of ``gate_up``.

        Args:
            gate_up: [E, 2 I, H] of any float dtype (without a gate [E, I, H]), not changed.
            down: [E, H, I], not changed.
            format: format of the weights.
            options: arguments of the constructor except weights.

        Raises what ``quantize`` and the constructor raise.
        """
        w13, w2 = (quantize(weights, format=as_format("format", format)) for weights in (gate_up, down))
        return cls(w13, w2, **options)

    def products(self, rows: torch.Tensor, offs: torch.Tensor, expert_of_row: torch.Tensor) -> torch.Tensor:
        """Multiplies with 8-bit weights; see SortedExperts."""
        own = expert_of_row.clamp(max=self.num_experts - 1)
        if self.is_fused(rows.device):
            y = self._product_of_rows(offs, "w2", *self._hidden(offs, rows), rows.dtype)
            return _with_bias(y, self.bias2, own)
        return self._layer(rows, own, partial(self._product, offs))

    def is_fused(self, device: torch.device) -> bool:
        """Returns whether one launch on ``device`` computes gate, up and the activation in float32."""
        is_known = isinstance(self.activation, str) and self.activation in FUSED_LIMITS
        fits = self.has_gate and self.bias13 is None and self.w13.shape[1] % (2 * ATOM_ROWS) == 0
        if self.activations == "16bit" or not (is_known and fits):
            return False
        return composed_dual.is_fused((self._rows, self.formats[0]), self.backend, device)

    def _hidden(self, offs: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the quantized hidden activations of all experts, whose rows end at ``offs``, from one launch if possible."""
        weight, scale = self._weight("w13")
        q = quantize(x, format=self._rows, backend=self.backend)
        activation: Any = self.activation
        quantizes = composed_dual.is_fused((self._rows, self.formats[0]), self.backend, x.device, self._rows)
        out_dtype: Any = self._rows.name if quantizes else x.dtype
        h = grouped_dual_gemm(
            q.data, weight, None, q.scale, scale, offs=offs, a_format=self._rows, b_format=self.formats[0], activation=activation,
            limit=FUSED_LIMITS[activation], weight_layout="concatenated", out_dtype=out_dtype, backend=self.backend,
        )  # fmt: skip
        if quantizes:
            return h
        q = quantize(h, format=self._rows, backend=self.backend)
        return q.data, q.scale

    def _layer(
        self, rows: torch.Tensor, own: torch.Tensor, product: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Computes the layer for rows of the experts ``own``.

        ``product`` maps the name of weights, and rows, to their product.
        """
        first = _with_bias(product("w13", rows), self.bias13, own)
        hidden = self.hidden([*first.chunk(2, dim=-1)] if self.has_gate else [first], own)
        return _with_bias(product("w2", hidden), self.bias2, own)

    def _product(self, offs: torch.Tensor, name: str, x: torch.Tensor) -> torch.Tensor:
        """Multiplies rows of all experts, which end at ``offs``, by the weights ``name``."""
        if self.activations == "16bit":
            weight, scale = self._weight(name)
            options: Any = {"b_format": self.formats[0], "out_dtype": x.dtype, "backend": self.backend}
            return grouped_gemm(x, weight, None, scale, offs, **options)
        q = quantize(x, format=self._rows, backend=self.backend)
        return self._product_of_rows(offs, name, q.data, q.scale, x.dtype)

    def _product_of_rows(
        self, offs: torch.Tensor, name: str, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Multiplies quantized rows of all experts by the weights ``name``."""
        weight, weight_scale = self._weight(name)
        return grouped_gemm(
            data, weight, scale, weight_scale, offs, a_format=self._rows, b_format=self.formats[0], out_dtype=dtype,
            backend=self.backend,
        )  # fmt: skip

    def _weight(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns values and scales of the weights ``name``."""
        return getattr(self, name), getattr(self, self._scale_name(name))

    @property
    def _rows(self) -> BlockFormat:
        """Format to which rows are quantized."""
        return rows_format(self.formats[0])

    @property
    def _block_factors(self) -> tuple[str, ...]:
        return self._scale_name("w13"), self._scale_name("w2")

    def _scale_name(self, name: str) -> str:
        return f"{name}_scale_inv" if self.formats[0] == FP8_128x128 else f"{name}_scale"

    def extra_repr(self) -> str:
        """Shows sizes and the treatment of rows."""
        sizes = f"{self.num_experts} of {self.w2.shape[1]} x {self.w2.shape[2]}"
        return f"{sizes}, activations={self.activations!r}"


def _with_bias(y: torch.Tensor, bias: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
    """Adds the biases of the experts ``own`` to the rows of ``y``."""
    return y if bias is None else y + bias[own].to(y.dtype)
