"""Replaces routers of transformers by two launches: the logits, and ``route``."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from nvfp4_cute.experts.routing import route
from nvfp4_cute.nn.experts import ModelExperts

# Tokens with which a router is tested, and the tolerance of its weights against ``route``, which rounds differently.
TRIED = 16
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Routing:
    """What a router does with its logits: softmax, the ``top_k`` largest, and optionally a division by their sum.

    Attributes:
        top_k: experts per token.
        rounds: whether weights have the dtype of the logits; otherwise they are float32.
    """

    top_k: int
    renormalizes: bool
    rounds: bool

    def __call__(self, module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns logits [T, E], weights and ids [T, top_k] for ``hidden`` [..., H]."""
        rows = hidden.reshape(-1, module.weight.shape[1])
        logits = functional.linear(rows, module.weight, module._parameters.get("bias"))
        ids, weights = route(logits, self.top_k, renormalize=self.renormalizes)
        return logits, weights.to(logits.dtype) if self.rounds else weights, ids


def fuse_routers(model: torch.nn.Module) -> list[str]:
    """Makes the routers of MoE experts call ``route``, in place; returns the names of those that do.

    A test with random weights finds out what a router computes. Routers that compute something else stay. A module keeps its
    class.
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
        if isinstance(block._modules.get("experts"), ModelExperts):
            for child in ("gate", "router"):
                if (router := block._modules.get(child)) is not None:
                    yield f"{name}.{child}".lstrip("."), router


def routing_of(router: Any) -> Routing | None:
    """Returns what ``router`` does if ``route`` can do it.

    A router has ``top_k``, a ``weight`` [E, H], perhaps a ``bias`` [E].
    """
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
    except Exception:  # runs any model's code; a module that fails is not such a router
        return None
    return None
