"""Routers of transformers in two launches: the logits, and ``route``."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from nvfp4_cute.experts.routing import route
from nvfp4_cute.nn.experts import RoutedExperts

# Tokens that a router is tried with, and how far its weights may be from those of ``route``, which rounds elsewhere.
TRIED = 16
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Routing:
    """What a router does with its logits: softmax, the ``top_k`` largest, and perhaps a division by their sum.

    Attributes:
        rounds: whether weights have the dtype of the logits; else they are float32.
    """

    top_k: int
    renormalizes: bool
    rounds: bool

    def __call__(self, module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [T, E], weights and ids [T, top_k] of ``hidden`` [..., H]."""
        rows = hidden.reshape(-1, module.weight.shape[1])
        logits = functional.linear(rows, module.weight, module._parameters.get("bias"))
        ids, weights = route(logits, self.top_k, renormalize=self.renormalizes)
        return logits, weights.to(logits.dtype) if self.rounds else weights, ids


def fuse_routers(model: torch.nn.Module) -> list[str]:
    """Have the routers of experts that are MoENVFP4 call ``route``, in place; names of those that do.

    What a router computes is tried: it is called with random weights. Others stay as they are. A module stays of its class.
    """
    done = []
    for name, module in _routers(model):
        routing = routing_of(module)
        if routing is not None:
            module.forward = partial(routing, module)
            done.append(name)
    return done


def _routers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, block in model.named_modules():
        if isinstance(block._modules.get("experts"), RoutedExperts):
            for child in ("gate", "router"):
                if (router := block._modules.get(child)) is not None:
                    yield f"{name}.{child}".lstrip("."), router


def routing_of(router: Any) -> Routing | None:
    """What ``router`` does, where ``route`` does it: a module with ``top_k``, a ``weight`` [E, H] and perhaps a ``bias`` [E]."""
    top_k, own = getattr(router, "top_k", None), router._parameters
    if not isinstance(top_k, int) or not set(own) <= {"weight", "bias"} or router._modules or router._buffers:
        return None
    if own.get("weight") is None or own["weight"].ndim != 2:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    tried = object.__new__(type(router))
    tried.__dict__ = dict(router.__dict__)
    weight, bias = own["weight"], own.get("bias")
    random = lambda *size: torch.randn(*size, generator=generator, device="cpu", dtype=torch.bfloat16)
    given = {"weight": random(*weight.shape) / weight.shape[1] ** 0.5}
    given["bias"] = None if bias is None else random(*bias.shape)
    tried.__dict__["_parameters"] = {name: given[name] for name in own}
    x = random(TRIED, weight.shape[1])
    try:
        with torch.no_grad():
            logits, weights, ids = tried(x)
            for renormalizes in (True, False):
                routing = Routing(top_k, renormalizes, rounds=weights.dtype == torch.bfloat16)
                ours = routing(tried, x)
                if torch.equal(ids, ours[2].to(ids.dtype)) and torch.equal(logits, ours[0]):
                    step = 2**-8 if routing.rounds else TOLERANCE
                    if weights.dtype == ours[1].dtype and torch.allclose(weights, ours[1], rtol=step, atol=0):
                        return routing
    except Exception:  # noqa: BLE001 (any model's code; what cannot be called so is another module)
        return None
    return None
