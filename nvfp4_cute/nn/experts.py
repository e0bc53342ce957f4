"""Experts with quantized weights: the part of a mixture-of-experts layer that follows the router."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.nn import functional

from nvfp4_cute.experts.checks import kernel_ids
from nvfp4_cute.formats.block_format import NVFP4, format_named
from nvfp4_cute.formats.block_scaled import NVFP4Tensor
from nvfp4_cute.formats.codecs import FLOAT32_MIN_NORMAL
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.nn.products import KERNEL_DTYPE
from nvfp4_cute.nn.rounded import PreparedRows, rounded
from nvfp4_cute.nn.state import KeepsBits
from nvfp4_cute.operands.rules import check_choice, check_tensors
from nvfp4_cute.ops.parts.grouped_gemm import grouped_gemm
from nvfp4_cute.ops.quantize import grouped_quantize_parts as grouped_quantize
from nvfp4_cute.problem import OUT_DTYPES

Activations = Literal["nvfp4", "nvfp4_four_over_six", "16bit"]
# Maps (gate, up), or (up) where there is no gate, to the hidden activations; float tensors [rows, I].
Activation = Callable[..., torch.Tensor]


def swiglu_oai(
    gate: torch.Tensor, up: torch.Tensor, alpha: float = 1.702, limit: float = 7.0
) -> torch.Tensor:
    """Computes gpt-oss's ``(up + 1) * gate * sigmoid(alpha * gate)`` with gate clamped to ``limit``, up to [-limit, limit]."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


ACTIVATIONS: dict[str, Activation] = {
    "silu": lambda gate, up: functional.silu(gate) * up,
    "gelu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "swiglu_oai": swiglu_oai,
    "relu2": lambda up: functional.relu(up).square(),
}


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """One projection of all experts, in NVFP4.

    Attributes:
        data: uint8 [E, N, K/2].
        scale: float8_e4m3fn [E, N, K/16], row-major.
        factor: float32 [E], by which dequantizing multiplies.
        bias: [E, N], or None.
    """

    data: torch.Tensor
    scale: torch.Tensor
    factor: torch.Tensor
    bias: torch.Tensor | None = None


class Projection(KeepsBits):
    """Weights of one projection of all experts in the layout of kernels, with blocked scales."""

    BLOCK_FACTORS = ("factor",)

    data: torch.Tensor
    scale: torch.Tensor
    factor: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weights: ExpertWeights):
        super().__init__()
        self.register_buffer("data", weights.data.contiguous())
        self.register_buffer("scale", to_blocked(weights.scale))
        self.register_buffer("factor", weights.factor)
        self.register_buffer("bias", None if weights.bias is None else weights.bias.detach())

    def expert(self, e: int) -> NVFP4Tensor:
        """Returns the weights of one expert, [N, K], without a copy."""
        _, n, row_bytes = self.data.shape
        return NVFP4Tensor(self.data[e], self.scale[e], self.factor[e], (n, NVFP4.elements(row_bytes)))

    def with_bias(self, y: torch.Tensor, expert_of_row: torch.Tensor) -> torch.Tensor:
        """Adds to every row of ``y`` the bias of its expert."""
        return y if self.bias is None else y + self.bias[expert_of_row].to(y.dtype)


class SortedExperts(KeepsBits):
    """Computes ``sum over a token's experts of weight * down(activation(gate(x), up(x)))``.

    This class sorts tokens by expert on the device, without waiting for it, and adds up the weighted results. Derived classes
    multiply.

    Args:
        num_experts: E.
        activation: a name of ACTIVATIONS, or a function of (gate, up), or of (up) where there is no gate.

    Attributes:
        first_rows, second_rows: functions applied to rows of x, and to the hidden activations, before they are multiplied; or
            None.

    Raises:
        ValueError: the activation is unknown.
    """

    first_rows: PreparedRows | None
    second_rows: PreparedRows | None

    def __init__(self, num_experts: int, activation: str | Activation):
        super().__init__()
        if isinstance(activation, str) and activation not in ACTIVATIONS:
            raise ValueError(
                f"activation={activation!r} is none of {', '.join(ACTIVATIONS)}; pass a function"
            )
        self.num_experts, self.activation = num_experts, activation
        self.first_rows = self.second_rows = None

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
        raise NotImplementedError

    def waits(self, device: torch.device) -> bool:
        """Returns whether a call on ``device`` waits to read the rows per expert, which a CUDA graph cannot capture."""
        return False

    def hidden(self, sides: list[torch.Tensor], own: torch.Tensor) -> torch.Tensor:
        """Computes the hidden activations in float32, rounds them once, and prepares them for down.

        Args:
            sides: products of gate and up, or of up.
            own: the expert of each row, 0 to E - 1.
        """
        function = ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        h = function(*(side.float() for side in sides)).to(sides[0].dtype)
        return h if self.second_rows is None else self.second_rows(h, own)


class ExpertsNVFP4(SortedExperts):
    """Experts with NVFP4 weights that MoENVFP4 does not take: without calibrated scales, with any activation, or weight-only.

    A CUDA graph can capture calls with 4-bit activations. It can capture calls with 16-bit activations where the GPU has a
    kernel for weight-only products of all experts (sm_90a); on other GPUs every expert has a product of its own, and the host
    reads its number of rows.

    Args:
        gate, up: weights for [E, I, H]; gate is None where there is none.
        down: weights for [E, H, I].
        activation: see SortedExperts.
        activations: "nvfp4" and "nvfp4_four_over_six" quantize rows; "16bit" does not.
        first_input, second_input: float32 [E], calibrated global scales of x and of the hidden activations; None computes them
            from every call's largest magnitude.
        backend: see ``gemm``.

    Raises:
        ValueError: a choice is unknown.
    """

    first_input: torch.Tensor | None
    second_input: torch.Tensor | None

    def __init__(
        self,
        gate: ExpertWeights | None,
        up: ExpertWeights,
        down: ExpertWeights,
        activation: str | Activation = "silu",
        *,
        activations: Activations = "nvfp4",
        first_input: torch.Tensor | None = None,
        second_input: torch.Tensor | None = None,
        backend: str = "auto",
    ):
        super().__init__(len(up.data), activation)
        if activations not in get_args(Activations):
            known = ", ".join(get_args(Activations))
            raise ValueError(f"activations={activations!r} is unknown; use one of {known}")
        self.gate = None if gate is None else Projection(gate)
        self.up, self.down = Projection(up), Projection(down)
        self.activations, self.backend = activations, backend
        self.intermediate_size, self.hidden_size = up.data.shape[1], down.data.shape[1]
        self.register_buffer("first_input", first_input)
        self.register_buffer("second_input", second_input)

    def extra_repr(self) -> str:
        """Shows sizes and the mode of the experts."""
        return f"{self.num_experts} of {self.hidden_size} x {self.intermediate_size}, activations={self.activations!r}"

    def products(self, rows: torch.Tensor, offs: torch.Tensor, expert_of_row: torch.Tensor) -> torch.Tensor:
        """Multiplies with NVFP4 weights; see SortedExperts."""
        own = expert_of_row.clamp(max=self.num_experts - 1)
        if self.activations == "16bit":
            return self._weight_only(rows, offs, own)
        gate, up, format = self.gate, self.up, format_named(self.activations)
        first = self._scale(self.first_input, rows, expert_of_row)
        data, scale = grouped_quantize(rows, offs, format=format, global_scale=first, backend=self.backend)
        sides = [s for s in (gate, up) if s is not None]
        h = self.hidden([self._product(s, data, scale, offs, first, rows.dtype, own) for s in sides], own)
        second = self._scale(self.second_input, h, expert_of_row)
        hidden = grouped_quantize(h, offs, format=format, global_scale=second, backend=self.backend)
        return self._product(self.down, hidden[0], hidden[1], offs, second, rows.dtype, own)

    def _scale(
        self, given: torch.Tensor | None, rows: torch.Tensor, expert_of_row: torch.Tensor
    ) -> torch.Tensor:
        """Returns global scales of the rows, [E], given or computed."""
        if given is not None:
            return given
        used = (expert_of_row < self.num_experts).unsqueeze(1)
        amax = torch.where(used, rows, 0).abs().amax().float()
        # Divides by a tensor on the device: torch would multiply by the inverse of a host number.
        divisor = format_named(self.activations).global_scale_divisor
        scale = (amax / torch.full_like(amax, divisor)).clamp(min=FLOAT32_MIN_NORMAL)
        return torch.where(amax == 0, 1.0, scale).expand(self.num_experts).contiguous()

    def _product(self, side: Projection, data, scale, offs, given, dtype, own) -> torch.Tensor:
        alpha = given * side.factor
        y = grouped_gemm(
            data, side.data, scale, side.scale, offs, alpha, out_dtype=dtype, backend=self.backend
        )
        return side.with_bias(y, own)

    def _weight_only(self, rows: torch.Tensor, offs: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        def all_experts(side: Projection, x: torch.Tensor) -> torch.Tensor:
            y = grouped_gemm(
                x, side.data, None, side.scale, offs, side.factor, out_dtype=rows.dtype, backend=self.backend
            )
            return side.with_bias(y, own)

        sides = [s for s in (self.gate, self.up) if s is not None]
        return all_experts(self.down, self.hidden([all_experts(side, rows) for side in sides], own))


class DecodedExperts(SortedExperts):
    """Experts with weights that no kernel can read: they are dequantized, and activations are rounded as their scheme says.

    Args:
        sides: 16-bit weights [E, N, K] of gate and up, or of up, then of down.
        biases: [E, N] or None, for each of them.
        activation: see SortedExperts.
        rounding: a name of ``rounded.ROUNDED_FORMATS``, or None.
        inputs: for nvfp4 activations: float32 [E] global scales of x and of the hidden activations; or None.
    """

    def __init__(
        self,
        sides: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        activation: str | Activation = "silu",
        rounding: str | None = None,
        inputs: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    ):
        super().__init__(len(sides[-1]), activation)
        for i, (weight, bias) in enumerate(zip(sides, biases, strict=True)):
            self.register_buffer(f"weight{i}", weight.detach())
            self.register_buffer(f"bias{i}", None if bias is None else bias.detach())
        self.count, self.rounding = len(sides), rounding
        self.register_buffer("first_input", inputs[0])
        self.register_buffer("second_input", inputs[1])

    def products(self, rows: torch.Tensor, offs: torch.Tensor, expert_of_row: torch.Tensor) -> torch.Tensor:
        """Multiplies with dequantized weights, one expert at a time; see SortedExperts."""
        down = getattr(self, f"weight{self.count - 1}")
        y = torch.zeros((len(rows), down.shape[1]), dtype=rows.dtype, device=rows.device)
        for e, part in segments(offs):
            x = self._rounded(rows[part], self.first_input, e)
            h = self.hidden([self._linear(i, e, x) for i in range(self.count - 1)], expert_of_row[part])
            y[part] = self._linear(self.count - 1, e, self._rounded(h, self.second_input, e))
        return y

    def waits(self, device: torch.device) -> bool:
        """Always waits, because the host reads the rows per expert."""
        return True

    def _linear(self, i: int, e: int, x: torch.Tensor) -> torch.Tensor:
        bias = getattr(self, f"bias{i}")
        weight = getattr(self, f"weight{i}")[e]
        return functional.linear(x, weight.to(x.dtype), None if bias is None else bias[e].to(x.dtype))

    def _rounded(self, x: torch.Tensor, given, e: int) -> torch.Tensor:
        if self.rounding is None:
            return x
        return rounded(x, self.rounding, "auto" if given is None else given[e])


class RoutedExperts(torch.nn.Module):
    """Converts rows and weights of a model to those that ``experts`` take: MoENVFP4 needs 16-bit rows and float32 weights."""

    def __init__(self, experts: Any):
        super().__init__()
        self.experts, self.num_experts = experts, experts.num_experts

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Calls the experts; arguments are those of SortedExperts."""
        if not topk_ids.numel():
            return torch.zeros_like(x)
        ids, weights = kernel_ids(topk_ids), topk_weights.float().contiguous()
        return self.experts(_kernel_rows(x), ids, weights).to(x.dtype)


class EqualGroups(torch.nn.Module):
    """Experts of a model that passes all tokens to each expert: rows [E T, H], expert after expert (Llama-4)."""

    def __init__(self, experts: "SortedExperts | RoutedExperts"):
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``x`` [E T, H] to [E T, H]."""
        count = self.experts.num_experts
        ids = torch.arange(count, device=x.device).repeat_interleave(x.shape[0] // count).unsqueeze(1)
        return self.experts(x, ids, torch.ones_like(ids, dtype=x.dtype))


def expert_sizes(w13: Sequence[int], w2: Sequence[int], has_gate: bool) -> tuple[int, int, int]:
    """Returns E, H and the rows of an expert's first product, for weights [E, 2 I, H] (or [E, I, H]) and [E, H, I].

    Raises:
        ValueError: the sizes do not fit.
    """
    experts, hidden, width = w2
    rows = 2 * width if has_gate else width
    if tuple(w13) != (experts, rows, hidden):
        raise ValueError(
            f"w13 has shape {list(w13)}; expected {[experts, rows, hidden]}, with w2 {list(w2)} with has_gate={has_gate}"
        )
    return experts, hidden, rows


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
