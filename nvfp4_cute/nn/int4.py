"""Layers with int4 weights (AWQ, GPTQ, compressed-tensors): 16-bit activations are multiplied as they are."""

from typing import Any

import torch

from nvfp4_cute import backends
from nvfp4_cute.experts.checks import kernel_ids
from nvfp4_cute.experts.layer import moe
from nvfp4_cute.formats.block_format import BlockFormat, int4_format
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.nn.experts import check_choices, expert_sizes
from nvfp4_cute.nn.products import KERNEL_DTYPE
from nvfp4_cute.nn.state import NamesFormats
from nvfp4_cute.nn.weights import check_weight, kept_bias, scales_of, words_of
from nvfp4_cute.operands.rules import ACTIVATION_DTYPES
from nvfp4_cute.ops.quantize import quantize
from nvfp4_cute.problem import Activation


class ExpertsINT4(NamesFormats):
    """Experts with int4 weights: ``moe`` with 16-bit rows. There are kernels for sm_90a. A CUDA graph can hold the call.

    State dict:
        w13, w2: uint8 [E, 2 I, H/2] and [E, H, I/2]. w13_scale, w2_scale: int32 [E, rm, rk, 32, 4], see QuantizedLinear.
        bias13, bias2: where there are. _extra_state: the names of both formats, see QuantizedLinear.

    Args:
        w13: of an ``int4_format``, [E, 2 I, H], [gate; up] of every expert, or [E, I, H] where there is no gate. w2: [E, H, I].
        bias13, bias2: [E, 2 I] and [E, H], or None.
        activation, limit: as of ``moe``. has_gate: whether there is a gate.
        dtype: of biases.
        backend: as of ``moe``.

    Raises:
        TypeError, ValueError: weights are not int4 of three dimensions, or sizes do not fit.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    bias13: torch.Tensor | None
    bias2: torch.Tensor | None

    def __init__(
        self,
        w13: BlockScaledTensor,
        w2: BlockScaledTensor,
        bias13: torch.Tensor | None = None,
        bias2: torch.Tensor | None = None,
        activation: Activation = "silu",
        *,
        limit: float | None = None,
        has_gate: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "auto",
    ):
        super().__init__()
        check_weight("w13", w13, "[E, 2 I, H]", "int4")
        check_weight("w2", w2, "[E, H, I]", "int4")
        backends.resolve(backend, w13.device)
        experts, hidden, rows = expert_sizes(w13.shape, w2.shape, has_gate)
        self.num_experts, self.activation, self.limit = experts, activation, limit
        self.has_gate, self.backend = has_gate, backend
        self.formats = (w13.format, w2.format)
        for name, weight in (("w13", w13), ("w2", w2)):
            self.register_buffer(name, weight.data.contiguous())
            self.register_buffer(f"{name}_scale", words_of(weight).contiguous())
        for name, bias, shape in (("bias13", bias13, (experts, rows)), ("bias2", bias2, (experts, hidden))):
            self.register_buffer(name, kept_bias(name, bias, shape, w13.device, dtype))

    @classmethod
    def from_experts(
        cls, gate_up: torch.Tensor, down: torch.Tensor, format: BlockFormat | None = None, **options: Any
    ) -> "ExpertsINT4":
        """The layer with weights quantized, on their device.

        Args:
            gate_up: [E, 2 I, H] of any float dtype (without a gate [E, I, H]). down: [E, H, I]. Not changed.
            format: of the weights; None for ``int4_format()``.
            options: of the constructor, but weights.

        Raises:
            What ``quantize`` and the constructor do.
        """
        w13, w2 = (quantize(weights, format=format or int4_format()) for weights in (gate_up, down))
        return cls(w13, w2, **options)

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """The layer's result.

        Args:
            x: [T, H], float16, bfloat16, or float32, which is rounded to bfloat16.
            topk_ids: integers [T, k]; one outside 0 to E - 1 adds nothing. topk_weights: float [T, k].

        Returns:
            [T, H] of the dtype of ``x``.

        Raises:
            TypeError, ValueError: a dtype or shape is another one. UnsupportedProblem: there is a gradient to follow.
            And what ``moe`` refuses.
        """
        check_choices(x, topk_ids, topk_weights)
        if not topk_ids.numel():
            return torch.zeros_like(x)
        ids, factors = kernel_ids(topk_ids), topk_weights.float().contiguous()
        rows = x if x.dtype in ACTIVATION_DTYPES else x.to(KERNEL_DTYPE)
        weights = (
            _tensor(data, words, format)
            for data, words, format in zip(
                (self.w13, self.w2), (self.w13_scale, self.w2_scale), self.formats, strict=True
            )
        )
        bias13, bias2 = (None if b is None else b.to(rows.dtype) for b in (self.bias13, self.bias2))
        y = moe(
            rows, ids, factors, *weights, activations="16bit", activation=self.activation, limit=self.limit,
            weight_layout="concatenated" if self.has_gate else "none", bias13=bias13, bias2=bias2, backend=self.backend,
        )  # fmt: skip
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        """Sizes, and the formats."""
        names = " and ".join(dict.fromkeys(f.name for f in self.formats))
        return f"{self.num_experts} of {self.w2.shape[1]} x {2 * self.w2.shape[2]}, {names}"


def _tensor(data: torch.Tensor, words: torch.Tensor, format: BlockFormat) -> BlockScaledTensor:
    shape = (*data.shape[:-1], format.elements(data.shape[-1]))
    return BlockScaledTensor(data, scales_of(words, format), None, shape, format=format)
