"""The product of ``LinearNVFP4`` as a ``torch.library`` custom op, into which ``torch.compile`` does not look.

Quantized rows stay inside of it. Their blocked scales have an extent of ceil(M / 128): in a graph, torch would ask whether it is
1, and make one graph for up to 128 rows and another one for more.
"""

import torch
from torch.library import custom_op

from nvfp4_cute.ops.library import Operation, refuse_backward


@custom_op("nvfp4_cute::linear", mutates_args=())
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    alpha: torch.Tensor,
    input_global_scale: torch.Tensor | None,
    activations: str,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """``nn.linear.product``."""
    from nvfp4_cute.nn.linear import product

    run: Operation = product
    return run(x, weight, weight_scale, alpha, input_global_scale, activations, out_dtype, backend)


@linear.register_fake
def _(x, weight, weight_scale, alpha, input_global_scale, activations, out_dtype, backend):
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


linear.register_autograd(refuse_backward)
