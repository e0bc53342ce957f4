"""Observes the inputs of layers in a running model of transformers: linear layers, and every expert's two products."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

IMPLEMENTATION = "nvfp4_cute_observed"


@dataclass(frozen=True, eq=False)
class Site:
    """A place where rows are multiplied by weights.

    Attributes:
        module: a linear layer, or a module of experts.
        expert: number of the expert; None for a linear layer.
        second: whether it is the product after the activation.
    """

    module: torch.nn.Module
    expert: int | None = None
    second: bool = False

    @property
    def key(self) -> tuple[int, int | None, bool]:
        """Key that identifies the place."""
        return id(self.module), self.expert, self.second


Observer = Callable[[Site, torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def observed(model: Any, observer: Observer) -> Iterator[None]:
    """Inside the context, calls ``observer(site, rows)`` with the rows of every product, and multiplies the rows it returns.

    Args:
        model: a causal model of transformers.
        observer: called with a Site and its rows.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def before(module: torch.nn.Module, args: tuple) -> tuple:
        return (observer(Site(module), args[0]), *args[1:]) if args and args[0].numel() else args

    handles = [
        module.register_forward_pre_hook(before)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, lambda *args: _experts(observer, *args))
    implementation = model.config._experts_implementation
    if any(is_experts(module) for module in model.modules()):
        model.set_experts_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if implementation is not None:
            model.config._experts_implementation = implementation


def is_experts(module: torch.nn.Module) -> bool:
    """Returns whether a module holds all experts of a layer."""
    return hasattr(module, "down_proj") and hasattr(module, "num_experts")


def expert_weight(module: Any, projection: str, expert: int) -> torch.Tensor:
    """Returns a view of one expert's weights, [N, K].

    Args:
        module: a module of experts.
        projection: "gate", "up" or "down".
        expert: number of the expert.
    """
    if projection == "down":
        weight = module.down_proj[expert]
    else:
        weight = (module.gate_up_proj if getattr(module, "has_gate", True) else module.up_proj)[expert]
    weight = weight.T if getattr(module, "is_transposed", False) else weight
    if projection == "down" or not getattr(module, "has_gate", True):
        return weight
    half = int(projection == "up")
    return weight.chunk(2)[half] if getattr(module, "is_concatenated", True) else weight[half::2]


def _experts(
    observer: Observer, module: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Computes the experts' result, expert by expert: [T, H], integers [T, k], [T, k] -> [T, H]."""
    turned = getattr(module, "is_transposed", False)
    has_gate, has_bias = getattr(module, "has_gate", True), getattr(module, "has_bias", False)
    first = module.gate_up_proj if has_gate else module.up_proj
    y = torch.zeros_like(x, dtype=torch.float32)

    def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = rows @ (weight if turned else weight.T)
        return out if bias is None else out + bias

    for e in index.unique().tolist():
        if not 0 <= e < len(first):
            continue
        token, place = torch.where(index == e)
        rows = observer(Site(module, e), x[token])
        h = product(rows, first[e], module.gate_up_proj_bias[e] if has_bias else None)
        h = module._apply_gate(h) if has_gate else module.act_fn(h)
        h = observer(Site(module, e, second=True), h)
        out = product(h, module.down_proj[e], module.down_proj_bias[e] if has_bias else None)
        y.index_add_(0, token, out.float() * weights[token, place, None].float())
    return y.to(x.dtype)
