"""Layers of experts next to LightMoE's: every launch of a call after the router, replayed as a CUDA graph on a cold L2.

Our layer is modelled without ``route``.
"""

import time
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from nvfp4_cute.activation import Activation
from nvfp4_cute.bench.cases import routed_ids
from nvfp4_cute.bench.foreign import lightmoe_layer
from nvfp4_cute.bench.foreign.cells import MODELS, Model
from nvfp4_cute.bench.layers import empty_experts, experts_work
from nvfp4_cute.bench.moe import Model as Sizes
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.roofline import speed_of_light as light
from nvfp4_cute.roofline.modelled import modelled_chain
from nvfp4_cute.timing.result import ChainTiming

LIGHTMOE = "LightMoE"
TOKENS = (1, 16, 128, 1024, 8192)
ACTIVATIONS: dict[str, tuple[Activation, dict[str, Any]]] = {
    # model: (our activation, LightMoE's options)
    "DeepSeek-V4-Flash": (Activation("silu", limit=10.0), {"activation_clamp": 10.0}),
    "MiniMax-M3": (Activation("swiglu_oai", limit=7.0), {"activation": "swiglu_oai"}),
    "Nemotron-3.5-Lightning": (Activation("relu2"), {"activation": "relu2"}),
}
"""Activations of the models that do not use SwiGLU without a clamp."""


@dataclass(frozen=True)
class Layer:
    """A layer of experts on a number of tokens. If experts are divided over GPUs, every token has equally many on each."""

    model: Model
    tokens: int

    def __str__(self) -> str:
        return f"{self.model.name} layer, {self.tokens} token{'s' * (self.tokens > 1)}"

    @property
    def experts(self) -> int:
        """Experts of the GPU."""
        return self.model.experts // self.model.gpus

    @property
    def top_k(self) -> int:
        """Experts of the GPU per token."""
        return self.model.top_k // self.model.gpus

    @property
    def ids(self) -> torch.Tensor:
        """Experts of every token, int32 [tokens, top_k]."""
        return torch.tensor(routed_ids(self.tokens, self.experts, self.top_k), dtype=torch.int32)

    @property
    def work(self) -> light.Work:
        """Least traffic of the layer."""
        rows = [count for count in torch.bincount(self.ids.flatten().long()).tolist() if count]
        return experts_work(rows, self.tokens, self.model.hidden, self.model.intermediate, self.model.gated)


def layers() -> list[Layer]:
    """Returns all layers, few tokens first. Kimi-K3 is left out, because LightMoE does not have its activation."""
    return [Layer(model, tokens) for tokens, model in product(TOKENS, MODELS) if model.name != "Kimi-K3"]


def record(kernel: str, layer: Layer, target: Target) -> dict[str, Any]:
    """Returns the record of a layer: our own, or LightMoE's in a process that has not run another one."""
    began = time.monotonic()
    if kernel == LIGHTMOE:
        options = ACTIVATIONS[layer.model.name][1] if layer.model.name in ACTIVATIONS else {}
        timing = lightmoe_layer.modelled(layer.model, layer.ids, target, **options)
    else:
        timing = ours(layer, target)
    return {
        "us": timing.us,
        "launches": [{"kernel": one.kernel, "us": one.us} for one in timing.launches],
        "seconds": round(time.monotonic() - began, 1),
    }


def ours(layer: Layer, target: Target) -> ChainTiming:
    """Returns the modelled time of our layer."""
    model = layer.model
    activation = ACTIVATIONS[model.name][0] if model.name in ACTIVATIONS else Activation()
    sizes = Sizes(layer.experts, layer.top_k, model.hidden, model.intermediate)
    module = empty_experts(sizes, activation=activation, gated=model.gated)
    x = torch.zeros((layer.tokens, model.hidden), dtype=torch.bfloat16)
    weights = torch.ones(layer.ids.shape) / layer.top_k

    def call(backend: str) -> object:
        module.backend = backend
        return module(x, layer.ids, weights)

    return modelled_chain(call, target)
