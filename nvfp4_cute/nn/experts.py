"""Experts of models: ``SortedExperts`` for those that ``MoE`` does not compute, and wrappers of both for models."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from nvfp4_cute.activation import Activation, activation_of
from nvfp4_cute.batch_invariance import refuse_found_scales
from nvfp4_cute.experts.checks import PER_ROW_SUFFIX, has_row_scales, kernel_ids
from nvfp4_cute.formats.block_format import NVFP4, BlockFormat, format_named
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.formats.codecs import FLOAT32_MIN_NORMAL
from nvfp4_cute.formats.global_scale import PER_ROW
from nvfp4_cute.nn.products import KERNEL_DTYPE
from nvfp4_cute.nn.rounded import ROUNDED_FORMATS, PreparedRows, rounded
from nvfp4_cute.nn.state import KeepsBits
from nvfp4_cute.nn.weights import scales_of, words_of
from nvfp4_cute.operands.rules import check_choice, check_tensors
from nvfp4_cute.operands.whole import Parts
from nvfp4_cute.ops.parts.grouped_gemm import grouped_gemm
from nvfp4_cute.ops.quantize import grouped_quantize as grouped_quantize_rows
from nvfp4_cute.ops.quantize import grouped_quantize_parts as grouped_quantize
from nvfp4_cute.ops.quantize import quantize
from nvfp4_cute.problem import OUT_DTYPES
from nvfp4_cute.reference import activated

# An activation, or a function of (gate, up), or of (up) where there is no gate, to the hidden activations; float [rows, I].
HiddenFunction = Activation | Callable[..., torch.Tensor]


class ProductRows(NamedTuple):
    """Rows of all experts as a product reads them: quantized, with scales, global scales of experts or rows, or in 16 bits."""

    data: torch.Tensor
    scale: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    format: BlockFormat = NVFP4
    row_scale: torch.Tensor | None = None


class Projection(KeepsBits):
    """Weights of one projection of all experts: block-scaled in the layout of kernels, or in 16 bits.

    Args:
        weight: [E, N, K], a BlockScaledTensor or a float tensor.
        bias: [E, N], or None.
    """

    data: torch.Tensor
    scale: torch.Tensor | None
    factor: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, weight: BlockScaledTensor | torch.Tensor, bias: torch.Tensor | None = None):
        super().__init__()
        self.shape = tuple(weight.shape)
        self.format = None if isinstance(weight, torch.Tensor) else weight.format
        parts: tuple[torch.Tensor | None, ...] = (weight, None, None)  # type: ignore[assignment]
        if not isinstance(weight, torch.Tensor):
            factor = weight.global_scale
            factor = None if factor is None else factor.expand(self.shape[0]).contiguous()
            parts = weight.data.contiguous(), words_of(weight), factor
        for name, part in zip(("data", "scale", "factor", "bias"), (*parts, bias), strict=True):
            self.register_buffer(name, None if part is None else part.detach())

    @property
    def _block_factors(self) -> tuple[str, ...]:
        has_numbers = self.scale is not None and self.scale.dtype == torch.float32
        return ("factor", "scale") if has_numbers else ("factor",)

    def multiply(
        self, rows: ProductRows, offs: torch.Tensor, own: torch.Tensor, dtype: torch.dtype, backend: str
    ) -> torch.Tensor:
        """Multiplies rows of all experts, which end at ``offs``, and adds the bias of each row's expert ``own``.

        16-bit weights take one product per expert, for which the host reads ``offs``.
        """
        bias = None if self.bias is None else self.bias.to(dtype)
        if self.format is None or self.scale is None:
            y = torch.zeros((len(rows.data), self.shape[1]), dtype=dtype, device=rows.data.device)
            for e, part in segments(offs):
                of_e = None if bias is None else bias[e]
                y[part] = functional.linear(rows.data[part], self.data[e].to(dtype), of_e)
            return y
        y = grouped_gemm(
            Parts(rows.data, rows.scale, rows.format, rows.row_scale, rows.factor),
            Parts(self.data, scales_of(self.scale, self.format), self.format, None, self.factor),
            offs, out_dtype=dtype, backend=backend,
        )  # fmt: skip
        return y if bias is None else y + bias[own]


class SortedExperts(KeepsBits):
    """Experts that ``MoE`` does not compute: any function as activation, weights of any format, scales computed in every call.

    Computes ``sum over a token's experts of weight * down(activation(gate(x), up(x)))`` with one product per projection. Torch
    sorts tokens by expert on the device, without waiting for it, and adds up the weighted results. A CUDA graph can capture
    calls with block-scaled weights.

    Args:
        projections: weights of gate and up, or of up, then of down; all block-scaled, or all in 16 bits.
        activation: an ``Activation`` or its name, or a function of (gate, up), or of (up) where there is no gate.
        activations: format of rows that are multiplied, a name of ``rounded.ROUNDED_FORMATS``, or "16bit". Block-scaled weights
            have to have a product with it; rows of 16-bit weights are rounded to it.
        inputs: float32 [E], calibrated global scales of x and of the hidden activations, for NVFP4 rows; None computes them
            from every call's largest magnitude.
        backend: see ``gemm``.

    Attributes:
        first_rows, second_rows: functions applied to rows of x, and to the hidden activations, before they are multiplied; or
            None.

    Raises:
        ValueError: a choice is unknown.
    """

    first_rows: PreparedRows | None
    second_rows: PreparedRows | None
    first_input: torch.Tensor | None
    second_input: torch.Tensor | None

    def __init__(
        self,
        projections: Sequence[Projection],
        activation: str | HiddenFunction = "silu",
        *,
        activations: str = "16bit",
        inputs: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        backend: str = "auto",
    ):
        super().__init__()
        if isinstance(activation, str):
            activation = activation_of(activation)
        check_choice("activations", activations, ("16bit", *ROUNDED_FORMATS))
        self.projections = torch.nn.ModuleList(projections)
        down = projections[-1]
        self.num_experts, self.hidden_size, self.intermediate_size = down.shape
        self.is_decoded = down.format is None
        self.activation, self.activations, self.backend = activation, activations, backend
        self.first_rows = self.second_rows = None
        self.register_buffer("first_input", inputs[0])
        self.register_buffer("second_input", inputs[1])

    def extra_repr(self) -> str:
        """Shows sizes and the format of rows."""
        return f"{self.num_experts} of {self.hidden_size} x {self.intermediate_size}, activations={self.activations!r}"

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Computes the layer's result.

        Args:
            x: [T, H], float16, bfloat16, or float32, which is rounded to bfloat16.
            topk_ids: integers [T, k]; an id outside 0 to E - 1 adds nothing.
            topk_weights: float [T, k].

        Returns:
            [T, H] in the dtype of ``x``; the k products are added in float32, in the order of ``topk_ids``.

        Raises:
            TypeError, ValueError: a dtype or shape does not fit.
            UnsupportedProblem: a gradient is required.
        """
        check_choices(x, topk_ids, topk_weights)
        tokens, top_k = topk_ids.shape
        if not topk_ids.numel():
            return torch.zeros_like(x)
        ids = kernel_ids(topk_ids).reshape(-1)
        ids = torch.where((ids < 0) | (ids >= self.num_experts), self.num_experts, ids)
        order = torch.argsort(ids, stable=True)
        sorted_ids = ids[order]
        numbers = torch.arange(self.num_experts, device=x.device, dtype=sorted_ids.dtype)
        offs = torch.searchsorted(sorted_ids, numbers, right=True, out_int32=True)
        rows = _kernel_rows(x)[order // top_k].contiguous()
        if self.first_rows is not None:
            rows = self.first_rows(rows, sorted_ids.clamp(max=self.num_experts - 1))
        y = self.products(rows, offs, sorted_ids).float()
        y = y * topk_weights.reshape(-1)[order].float().unsqueeze(1)
        # Products leave arbitrary values in rows of no expert.
        y = torch.where((sorted_ids < self.num_experts).unsqueeze(1), y, 0)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=x.device))
        return y[back].view(tokens, top_k, -1).sum(1).to(x.dtype)

    def products(self, rows: torch.Tensor, offs: torch.Tensor, expert_of_row: torch.Tensor) -> torch.Tensor:
        """Multiplies ``rows``, which are sorted by expert. Rows after the last of ``offs`` may hold anything.

        Args:
            rows: [T k, H].
            offs: int32 [E], the row where each expert ends.
            expert_of_row: [T k]; E for rows of no expert.

        Returns:
            [T k, H].
        """
        own, dtype = expert_of_row.clamp(max=self.num_experts - 1), rows.dtype
        projections: list[Any] = [*self.projections]
        *first, down = projections
        ready = self._ready(rows, offs, self.first_input, expert_of_row)
        h = self.hidden([one.multiply(ready, offs, own, dtype, self.backend) for one in first], own)
        ready = self._ready(h, offs, self.second_input, expert_of_row)
        return down.multiply(ready, offs, own, dtype, self.backend)

    def waits(self, device: torch.device) -> bool:
        """Returns whether a call on ``device`` waits to read the rows per expert, which a CUDA graph cannot capture."""
        return self.is_decoded

    def hidden(self, sides: list[torch.Tensor], own: torch.Tensor) -> torch.Tensor:
        """Computes the hidden activations in float32, rounds them once, and prepares them for down.

        Args:
            sides: products of gate and up, or of up.
            own: the expert of each row, 0 to E - 1.
        """
        wide = [side.float() for side in sides]
        if isinstance(self.activation, Activation):
            h = activated(wide[0], wide[1] if len(wide) > 1 else None, self.activation)
        else:
            h = self.activation(*wide)
        h = h.to(sides[0].dtype)
        return h if self.second_rows is None else self.second_rows(h, own)

    def _ready(
        self, x: torch.Tensor, offs: torch.Tensor, given: torch.Tensor | None, expert_of_row: torch.Tensor
    ) -> ProductRows:
        """Quantizes rows for the next product, or rounds them for 16-bit weights. ``given``: global scales [E]."""
        if self.activations == "16bit":
            return ProductRows(x)
        if self.is_decoded:
            y = torch.zeros_like(x)
            for e, part in segments(offs):
                y[part] = rounded(x[part], self.activations, "auto" if given is None else given[e])
            return ProductRows(y)
        format = format_named(self.activations.removesuffix(PER_ROW_SUFFIX))
        if has_row_scales(self.activations):
            q = grouped_quantize_rows(x, offs, format=format, global_scale=PER_ROW, backend=self.backend)
            assert q.global_scale is not None
            return ProductRows(q.data, q.scale, None, format.stored, q.global_scale[:, 0])
        if not format.has_global_scale:
            made = quantize(x, format=format, backend=self.backend)
            return ProductRows(made.data, made.scale, None, format)
        scales = self._found(x, format, expert_of_row) if given is None else given
        data, scale = grouped_quantize(x, offs, format=format, global_scale=scales, backend=self.backend)
        return ProductRows(data, scale, scales, format.stored)

    def _found(self, x: torch.Tensor, format: BlockFormat, expert_of_row: torch.Tensor) -> torch.Tensor:
        """Returns one global scale for the rows of all experts, repeated as float32 [E]."""
        refuse_found_scales()
        used = (expert_of_row < self.num_experts).unsqueeze(1)
        amax = torch.where(used, x, 0).abs().amax().float()
        # Divides by a tensor on the device: torch would multiply by the inverse of a host number.
        scale = (amax / torch.full_like(amax, format.global_scale_divisor)).clamp(min=FLOAT32_MIN_NORMAL)
        return torch.where(amax == 0, 1.0, scale).expand(self.num_experts).contiguous()


class ModelExperts(torch.nn.Module):
    """Experts of a model. Converts rows to 16 bits and router weights to float32, as MoE needs them."""

    def __init__(self, experts: Any):
        super().__init__()
        self.experts, self.num_experts = experts, experts.num_experts

    def _apply(self, fn: Any, recurse: bool = True) -> "ModelExperts":
        """Rounds float32 biases of a ``model.float()`` back to the dtype of the rows."""
        super()._apply(fn, recurse)
        for name in ("bias13", "bias2"):
            bias = getattr(self.experts, name, None)
            if bias is not None:
                setattr(self.experts, name, _kernel_rows(bias))
        return self

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Calls the experts; arguments are those of SortedExperts."""
        if not topk_ids.numel():
            return torch.zeros_like(x)
        ids, weights = kernel_ids(topk_ids), topk_weights.float().contiguous()
        return self.experts(_kernel_rows(x), ids, weights).to(x.dtype)


class EqualGroups(torch.nn.Module):
    """Experts of a model that passes all tokens to each expert: rows [E T, H], expert after expert (Llama-4)."""

    def __init__(self, experts: "SortedExperts | ModelExperts"):
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``x`` [E T, H] to [E T, H]."""
        count = self.experts.num_experts
        ids = torch.arange(count, device=x.device).repeat_interleave(x.shape[0] // count).unsqueeze(1)
        return self.experts(x, ids, torch.ones_like(ids, dtype=x.dtype))


def check_choices(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Raises unless the arguments are rows of tokens with their experts and weights."""
    check_tensors({"x": x, "topk_ids": ids, "topk_weights": weights})
    check_choice("dtype of x", x.dtype, OUT_DTYPES)
    kernel_ids(ids)
    if x.ndim != 2 or ids.ndim != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
        raise ValueError(
            f"x has shape {list(x.shape)}, topk_ids {list(ids.shape)} and topk_weights {list(weights.shape)}; expected [T, H], "
            "[T, k] and [T, k]"
        )


def _kernel_rows(x: torch.Tensor) -> torch.Tensor:
    """Rounds float32 rows to bfloat16, because kernels read 16-bit rows."""
    return x.to(KERNEL_DTYPE) if x.dtype == torch.float32 else x


def segments(offs: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Iterates over experts that have rows, each with its rows. Waits for the device."""
    start = 0
    for e, end in enumerate(offs.tolist()):
        if end > start:
            yield e, slice(start, end)
        start = end
