"""``route`` and ``moe`` as ``torch.library`` custom ops, so that ``torch.compile`` does not trace into them."""

from collections.abc import Callable
from typing import Any

import torch

from nvfp4_cute.custom_ops import custom_op, refuse_backward
from nvfp4_cute.formats.block_format import format_named

Tensors = list[torch.Tensor]
Operation = Callable[..., Any]  # schemas have str where an operation has a Literal


@custom_op("nvfp4_cute::route", mutates_args=())
def route(
    router_logits: torch.Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    bias: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    groups: list[int],
    scale: float,
    ids: torch.Tensor | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs ``nvfp4_cute.route``."""
    from nvfp4_cute.experts.routing import route as eager

    run: Operation = eager
    return run(
        router_logits, top_k, scoring=scoring, renormalize=renormalize, bias=bias, correction_bias=correction_bias,
        groups=tuple(groups), scale=scale, ids=ids, backend=backend,
    )  # fmt: skip


@route.register_fake
def _(router_logits, top_k, *rest):
    shape = (router_logits.shape[0], top_k)
    return router_logits.new_empty(shape, dtype=torch.int32), router_logits.new_empty(
        shape, dtype=torch.float32
    )


@custom_op("nvfp4_cute::moe", mutates_args=())
def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: Tensors,
    w2: Tensors,
    w13_format: str,
    w2_format: str,
    activations: str,
    activation: str,
    limit: float | None,
    weight_layout: str,
    input_scale: torch.Tensor | None,
    hidden_scale: torch.Tensor | None,
    gate_alpha: torch.Tensor | None,
    up_alpha: torch.Tensor | None,
    alpha2: torch.Tensor | None,
    bias13: torch.Tensor | None,
    bias2: torch.Tensor | None,
    shared: torch.Tensor | None,
    first_expert: int,
    backend: str,
) -> torch.Tensor:
    """Runs ``nvfp4_cute.moe``; w13 and w2 are data and scale each."""
    from nvfp4_cute.activation import activation_of
    from nvfp4_cute.experts.moe import compute
    from nvfp4_cute.experts.records import ActivationFormat, Experts, LayerOfExperts
    from nvfp4_cute.experts.weights import ExpertWeights

    literal: Any = weight_layout, activations
    same = gate_alpha is up_alpha or (
        gate_alpha is not None and up_alpha is not None and gate_alpha.data_ptr() == up_alpha.data_ptr()
    )
    first, second = (
        ExpertWeights(data, scale, None, format_named(name))
        for (data, scale), name in ((w13, w13_format), (w2, w2_format))
    )
    alpha13: Any = gate_alpha, gate_alpha if same else up_alpha
    layer = LayerOfExperts(
        Experts(first, literal[0], bias13, alpha13),
        Experts(second, "none", bias2, alpha2),
        activation_of(activation, limit),
        ActivationFormat(literal[1], input_scale, hidden_scale),
        first_expert,
        backend,
    )
    return compute(layer, x, ids, weights, shared, None)


@moe.register_fake
def _(x, *rest):
    return x.new_empty(x.shape)


route.register_autograd(refuse_backward)
moe.register_autograd(refuse_backward)
