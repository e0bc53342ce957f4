"""Layers of W4A4 checkpoints on GPUs without FP4 tensor cores: each call uses the faster of 4-bit and 16-bit activations.

Such a GPU dequantizes weights in any case. 16-bit activations are exact and save the launch that quantizes; 4-bit ones have the
faster product for many rows. The cost models of the kernels choose (``planning.arch.faster_rows``).
"""

import torch

from nvfp4_cute import backends, private_api
from nvfp4_cute.batch_invariance import is_batch_invariant
from nvfp4_cute.custom_ops import custom_op
from nvfp4_cute.nn.activations import Mode
from nvfp4_cute.nn.linear import QuantizedLinear
from nvfp4_cute.nn.moe import MoE
from nvfp4_cute.nn.products import product
from nvfp4_cute.ops.library import Operation, refuse_backward
from nvfp4_cute.planning.arch.faster_rows import experts_keep_16_bits, has_choice, keeps_16_bits


def faster_mode(rows: int, n: int, k: int, backend: str, device: torch.device) -> Mode:
    """Returns the faster mode for the product of a linear layer.

    Args:
        rows: number of activation rows.
        n, k: extents of the weights [N, K].
        backend: see ``gemm``.
        device: device of the weights.
    """
    gpu = None if is_batch_invariant() else backends.gpu_of_kernels(backend, device)
    keeps = gpu is not None and keeps_16_bits(gpu.arch, gpu.num_sms, rows, n, k)
    return "16bit" if keeps else "nvfp4"


def faster_mode_of_experts(rows: int, layer: MoE) -> Mode:
    """Returns the faster mode of experts for a number of rows: tokens times experts per token."""
    gpu = None if is_batch_invariant() else backends.gpu_of_kernels(layer.backend, layer.w13.device)
    if gpu is None:
        return "nvfp4"
    sizes = (layer.num_experts, layer.hidden_size, layer.intermediate_size)
    is_gated = layer.weight_layout != "none"
    return "16bit" if experts_keep_16_bits(gpu.arch, gpu.num_sms, rows, *sizes, is_gated) else "nvfp4"


def _has_choice(backend: str, device: torch.device) -> bool:
    """Returns whether the layer runs on a GPU without FP4 tensor cores that has kernels for both modes."""
    gpu = backends.gpu_of_kernels(backend, device)
    return gpu is not None and has_choice(gpu.arch)


class LinearByRows(torch.nn.Module):
    """A linear layer that multiplies few rows in 16 bits and many as NVFP4. Both modes share the weights in memory.

    Args:
        quantizing: the layer, with 4-bit activations.
    """

    def __init__(self, quantizing: QuantizedLinear):
        super().__init__()
        self.quantizing = quantizing
        self.exact = QuantizedLinear.from_quantized(
            quantizing.quantized_weight, quantizing.bias, activations="16bit", dtype=quantizing.dtype, backend=quantizing.backend
        )  # fmt: skip
        self.in_features, self.out_features = quantizing.in_features, quantizing.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes ``x @ W^T + bias``; see QuantizedLinear."""
        if private_api.is_traced():  # a graph for any number of rows
            return self._traced(x)
        return self.layer_of(x.numel() // self.in_features)(x)

    def layer_of(self, rows: int) -> QuantizedLinear:
        """Returns the layer that multiplies ``rows`` rows."""
        layer, sizes = self.quantizing, (self.out_features, self.in_features)
        mode = faster_mode(rows, *sizes, layer.backend, layer.packed_weight.device)
        return self.exact if mode == "16bit" else layer

    def _traced(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.quantizing
        (rows, dtype), given = layer.rows(x), layer.given_input_scale()
        weight, scale, alpha = layer.parts(given)
        exact_alpha = self.exact.alpha(None)
        y = torch.ops.nvfp4_cute.linear_by_rows(
            rows, weight, scale, alpha, exact_alpha, given, layer.finds_input_scale, dtype, layer.backend, layer.bias_now()
        )  # fmt: skip
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], self.out_features)


class ExpertsByRows(torch.nn.Module):
    """Experts that multiply few tokens in 16 bits and many as NVFP4. Both modes share the weights in memory.

    Args:
        quantizing: the experts, with 4-bit activations.
        weight_scales: global scales of the weights, float32: [2, E] for gate and up, and [E] for down.
    """

    def __init__(self, quantizing: MoE, weight_scales: tuple[torch.Tensor, torch.Tensor]):
        super().__init__()
        self.quantizing = quantizing
        self.exact = sharing(quantizing, weight_scales)
        self.num_experts = quantizing.num_experts

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Computes the layer's result; see MoE. A traced graph uses 4-bit activations for any number of tokens."""
        layer = self.quantizing
        if not private_api.is_traced():
            if faster_mode_of_experts(ids.numel(), layer) == "16bit":
                layer = self.exact
        return layer(x, ids, weights)


def sharing(layer: MoE, weight_scales: tuple[torch.Tensor, torch.Tensor]) -> MoE:
    """Makes experts with 16-bit activations that share the weights of ``layer``."""
    made = MoE(
        layer.num_experts, layer.hidden_size, layer.intermediate_size, activations="16bit", activation=layer.activation,
        weight_layout=layer.weight_layout, weight_on_input=layer.weight_on_input, parallel=layer.parallel, device="meta",
        backend=layer.backend,
    )  # fmt: skip
    for name in ("w13", "w13_scale", "w2", "w2_scale", "bias13", "bias2"):
        made._buffers[name] = layer._buffers[name]
    made.alpha13, made.alpha2 = weight_scales
    made._compare_alphas()
    return made


@custom_op("nvfp4_cute::linear_by_rows", mutates_args=())
def linear_by_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    alpha: torch.Tensor,
    exact_alpha: torch.Tensor,
    input_global_scale: torch.Tensor | None,
    finds_input_scale: bool,
    out_dtype: torch.dtype,
    backend: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Calls ``nn.products.product`` in the faster mode for the rows of ``x``. ``exact_alpha`` is the factor for 16-bit rows."""
    run: Operation = product
    parts = (x, weight, weight_scale)
    n, k = weight.shape[0], 2 * weight.shape[1]  # without the Python call of len
    if faster_mode(x.shape[0], n, k, backend, x.device) == "16bit":
        return run(*parts, exact_alpha, None, False, "16bit", out_dtype, backend, bias)
    scales = (alpha, input_global_scale, finds_input_scale)
    return run(*parts, *scales, "nvfp4", out_dtype, backend, bias)


@linear_by_rows.register_fake
def _(x, weight, scale, alpha, exact_alpha, input_scale, finds_scale, out_dtype, backend, bias=None):
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


linear_by_rows.register_autograd(refuse_backward)


def by_rows(layer: torch.nn.Module) -> torch.nn.Module:
    """Wraps ``layer`` by rows if it has NVFP4 weights and activations and the GPU has no FP4 tensor cores."""
    if not isinstance(layer, QuantizedLinear) or layer.mode != "nvfp4":
        return layer
    return LinearByRows(layer) if _has_choice(layer.backend, layer.packed_weight.device) else layer


def experts_by_rows(layer: MoE, weight_scales: tuple[torch.Tensor, torch.Tensor]) -> torch.nn.Module:
    """Does for experts what ``by_rows`` does for linear layers."""
    if layer.activations != "nvfp4" or layer.bias13 is not None:
        return layer
    has_choice = _has_choice(layer.backend, layer.w13.device)
    return ExpertsByRows(layer, weight_scales) if has_choice else layer
