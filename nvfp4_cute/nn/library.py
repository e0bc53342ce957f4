"""The products of layers as ``torch.library`` custom ops, so that ``torch.compile`` does not trace into them.

Quantized rows never leave an op. Their blocked scales have an extent of ceil(M / 128), and torch would make one graph for an
extent of 1 (up to 128 rows) and another one for more.
"""

import torch

from nvfp4_cute.custom_ops import Operation, custom_op, refuse_backward


@custom_op("nvfp4_cute::linear", mutates_args=())
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    alpha: torch.Tensor,
    input_global_scale: torch.Tensor | None,
    finds_input_scale: bool,
    mode: str,
    out_dtype: torch.dtype,
    backend: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs ``nn.products.product``."""
    from nvfp4_cute.nn.products import product

    run: Operation = product
    scales = (input_global_scale, finds_input_scale)
    return run(x, weight, weight_scale, alpha, *scales, mode, out_dtype, backend, bias)


@linear.register_fake
def _(x, weight, weight_scale, alpha, input_scale, finds_scale, mode, out_dtype, backend, bias=None):
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


linear.register_autograd(refuse_backward)


@custom_op("nvfp4_cute::linear_of_format", mutates_args=())
def linear_of_format(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    format: str,
    mode: str,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """Runs ``nn.products.product_of_format``. ``format`` is a name."""
    from nvfp4_cute.formats.block_format import format_named
    from nvfp4_cute.nn.products import product_of_format

    run: Operation = product_of_format
    return run(x, weight, scale, bias, format_named(format), mode, out_dtype, backend)


@linear_of_format.register_fake
def _(x, weight, scale, bias, format, mode, out_dtype, backend):
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


linear_of_format.register_autograd(refuse_backward)


@custom_op("nvfp4_cute::gated_mlp", mutates_args=())
def gated_mlp(
    x: torch.Tensor,
    gate: list[torch.Tensor],
    up: list[torch.Tensor],
    down: list[torch.Tensor],
    input_global_scale: torch.Tensor | None,
    hidden_global_scale: torch.Tensor | None,
    finds_input_scale: bool,
    finds_hidden_scale: bool,
    activation: str,
    mode: str,
    out_dtype: torch.dtype,
    backend: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs ``nn.products.gated_product``. Each layer is a list of data, scale and factor."""
    from nvfp4_cute.nn.products import Weights, gated_product

    run: Operation = gated_product
    sides = (Weights(*side) for side in (gate, up, down))
    scales = (input_global_scale, hidden_global_scale, finds_input_scale, finds_hidden_scale)
    return run(x, *sides, *scales, activation, mode, out_dtype, backend, bias)


@gated_mlp.register_fake
def _(
    x,
    gate,
    up,
    down,
    input_scale,
    hidden_scale,
    finds_input,
    finds_hidden,
    activation,
    mode,
    out_dtype,
    backend,
    bias=None,
):
    return x.new_empty((x.shape[0], down[0].shape[0]), dtype=out_dtype)


gated_mlp.register_autograd(refuse_backward)
