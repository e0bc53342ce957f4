"""Trains the scales and norms of a quantized block, so that its output approaches that of the 16-bit block.

The 16-bit block reads the output of 16-bit blocks, and the quantized block reads that of quantized blocks, so training also
undoes errors of earlier blocks. The loss of a token is its squared error divided by the square of its target, because the
next norm divides by the token's magnitude.

Training changes the weights of norms and the scales of NVFP4 blocks, and leaves the codes of elements. Each step rounds the
scales to e4m3 and passes their gradients on (a straight-through estimator: Esser et al., "Learned step size quantization",
arXiv 1902.08153).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.formats.codecs import decode_e2m1, decode_e4m3, encode_e4m3, unpack_e2m1

# Learning rate of Adam for the logarithms of factors, and the fraction of it at the end of a cosine schedule. On 3,072 tokens,
# 8e-3 fits the calibration text better and other text worse.
RATE, LAST_RATE = 2e-3, 0.1
MOMENTS = (0.9, 0.95)


class _Gradients:
    """A module whose parameters read as their gradients."""

    def __init__(self, module: torch.nn.Module):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.grad if isinstance(value, torch.nn.Parameter) else value


class _Scaled:
    """NVFP4 weights whose block scales train.

    Attributes:
        factors: float32 [N, K / 16], logarithms of the factors by which scales are multiplied.
    """

    def __init__(self, stored: BlockScaledTensor):
        self.stored = stored
        self.elements = decode_e2m1(unpack_e2m1(stored.data)).unflatten(-1, (-1, NVFP4.block_k))
        self.scales = decode_e4m3(stored.scale.view(torch.uint8))
        self.factors = torch.zeros_like(self.scales, requires_grad=True)

    def __call__(self) -> torch.Tensor:
        """Returns the weights, float32 [N, K], with rounded scales. Gradients flow to the scales before rounding."""
        wanted = self.scales * self.factors.exp()
        scales = decode_e4m3(encode_e4m3(wanted.detach())) + (wanted - wanted.detach())
        assert self.stored.global_scale is not None
        return (self.elements * scales.unsqueeze(-1)).flatten(-2) * self.stored.global_scale

    def result(self) -> BlockScaledTensor:
        """Returns the weights with the trained scales."""
        codes = encode_e4m3((self.scales * self.factors.exp()).detach())
        return replace(self.stored, scale=codes.view(self.stored.scale.dtype))


Views = Callable[[Callable[[torch.nn.Module], Any]], Sequence[torch.Tensor]]
"""(module -> object with its tensors) -> views [N, K] of the tensors of a block's weights."""


@torch.enable_grad()
def distill(
    block: torch.nn.Module,
    stored: Sequence[BlockScaledTensor],
    views: Views,
    runs: Sequence[Callable[[], torch.Tensor]],
    targets: Sequence[torch.Tensor],
    passes: int,
) -> list[BlockScaledTensor]:
    """Trains the scales and norms of a block in place.

    Args:
        block: a block of a model, with quantized weights in its parameters.
        stored: its weights as files store them; those in other formats than NVFP4 do not change.
        views: returns a view per entry of ``stored``: of parameters if called with the identity, of gradients if with a wrapper
            whose attributes are gradients.
        runs: functions that return the block's output for each window.
        targets: outputs of the 16-bit block.
        passes: how often each window is used.

    Returns:
        The weights with trained scales.
    """
    scaled = {i: _Scaled(one) for i, one in enumerate(stored) if one.format == NVFP4}
    weights = [view for i, view in enumerate(views(lambda module: module)) if i in scaled]
    norms = [p for name, p in block.named_parameters() if p.ndim == 1 and name.endswith("norm.weight")]
    given = [p.detach().float().clone() for p in norms]
    factors = [torch.zeros_like(p, requires_grad=True) for p in given]
    optimizer = torch.optim.Adam([*(one.factors for one in scaled.values()), *factors], RATE, MOMENTS)
    total = passes * len(runs)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * step / total))
    )

    def computed() -> list[torch.Tensor]:
        norm_values = [value * factor.exp() for value, factor in zip(given, factors, strict=True)]
        return [*(one() for one in scaled.values()), *norm_values]

    places = [*weights, *norms]
    order = torch.Generator().manual_seed(0)
    for _ in range(passes):
        for window in torch.randperm(len(runs), generator=order).tolist():
            values = computed()
            _put(places, values)
            block.zero_grad(set_to_none=True)
            loss(runs[window](), targets[window]).backward()
            slopes: list[Any] = [view for i, view in enumerate(views(_Gradients)) if i in scaled]
            slopes += [norm.grad for norm in norms]
            optimizer.zero_grad()
            torch.autograd.backward(values, [g.to(value) for g, value in zip(slopes, values, strict=True)])
            optimizer.step()
            schedule.step()
    _put(places, computed())
    block.zero_grad(set_to_none=True)
    return [scaled[i].result() if i in scaled else one for i, one in enumerate(stored)]


@torch.no_grad()
def _put(places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


def loss(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the mean over tokens of the squared error, divided by the square of the target. Both arguments are [..., H]."""
    target = target.to(found.device).float()
    error = (found.float() - target).square().sum(-1)
    return (error / target.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)).mean()
