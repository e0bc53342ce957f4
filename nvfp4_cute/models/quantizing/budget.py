"""Selects layers that get more bits, so that a model loses least within a mean number of bits per weight.

A layer's cost is measured: with only that layer rounded, the KL divergence of the model's predictions from those of the 16-bit
model, on calibration text. With more bits, the cost decreases with the square of the weights' errors, because the divergence is
a quadratic form of small errors. Costs of layers are assumed to add up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nvfp4_cute.models.checkpoints.names import expert_of, spellings
from nvfp4_cute.models.checkpoints.tensors import TensorFiles
from nvfp4_cute.models.quantizing.layouts import RECIPES, SIXTEEN, Recipe, weight_only
from nvfp4_cute.models.quantizing.rules import Layer, Rules, layers_to_quantize
from nvfp4_cute.models.quantizing.weights import quantized
from nvfp4_cute.terminal import Progress

# Windows of the calibration text for measuring costs; the model runs on each window once per layer.
WINDOWS = 1
SIXTEEN_BITS = 16.0


@dataclass(frozen=True)
class Cost:
    """Cost of one layer.

    Attributes:
        kl: mean KL divergence of the model with this layer rounded, in nats per token.
        error: squared error of the rounded weights.
        raised: squared error in formats with more bits, by format.
    """

    kl: float
    error: float
    raised: Mapping[str, float]

    def of(self, format: str | None) -> float:
        """Returns the divergence in a format; None means the format of all layers."""
        if format is None:
            return self.kl
        return self.kl * self.raised[format] / max(self.error, 1e-300)


def within_budget(
    folder: str | Path,
    model: Any,
    batches: Sequence[torch.Tensor],
    budget: float,
    *,
    format: str = "nvfp4",
    layout: str = "modelopt",
    formats: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns the formats of layers that get more bits, by name, for ``quantize_checkpoint``.

    Experts stay in ``format``, because there are too many to measure one by one.

    Args:
        folder: folder of the 16-bit checkpoint.
        model: its model, loaded by transformers, in eval mode; unchanged on return.
        batches: token ids, [1, n] each; only the first ``WINDOWS`` are used.
        budget: mean bits per weight of the layers to which ``format`` applies, including scales.
        format, layout, formats: see ``quantize_checkpoint``; layers that ``formats`` names are not changed.

    Raises:
        ValueError: the budget is below the bits of ``format``, or there is no text.
    """
    recipe = RECIPES[format]
    check_budget(budget, format)
    if not batches:
        raise ValueError("no text to measure layers on; calibrate with a file")
    rules = Rules(recipe, {p: weight_only(f, layout) for p, f in (formats or {}).items()})
    entries = TensorFiles(folder).entries
    layers = [one for one in layers_to_quantize(entries, rules)[0] if one.recipe == recipe]
    every, _ = layers_to_quantize(entries, Rules(recipe))
    raised = (SIXTEEN,) if recipe.activations is None and layout == "modelopt" else ("mxfp8", SIXTEEN)
    costs = measured(model, batches[:WINDOWS], layers, raised)
    spare = budget * sum(_size(one) for one in every) - _taken(every, rules)
    return chosen(layers, costs, spare)


def check_budget(budget: float, format: str) -> None:
    """Raises ValueError if weights in ``format`` take more than ``budget`` bits each."""
    least = _bits(RECIPES[format], 1024)
    if not budget >= least:
        raise ValueError(
            f"budget={budget} bits per weight; {format} takes {least}: pass more, or another format"
        )


def chosen(layers: Sequence[Layer], costs: Mapping[str, Cost], spare: float) -> dict[str, str]:
    """Chooses formats by layer. Steps to more bits that save the most divergence per bit come first, while they fit.

    Args:
        layers: all layers.
        costs: costs of the layers that may have more bits.
        spare: bits to spend.
    """
    steps: list[tuple[float, str, str | None, str, float]] = []
    for layer in layers:
        cost, before = costs.get(layer.name), None
        if cost is None:
            continue
        bits = _bits(layer.recipe, layer.shape[1])
        for format in cost.raised:
            more = SIXTEEN_BITS if format == SIXTEEN else _bits(RECIPES[format], layer.shape[1])
            spent = (more - bits) * _size(layer)
            steps.append(((cost.of(before) - cost.of(format)) / spent, layer.name, before, format, spent))
            before, bits = format, more
    found: dict[str, str] = {}
    for _, name, before, format, spent in sorted(steps, key=lambda step: -step[0]):
        if spent <= spare and found.get(name) == before:
            found[name] = format
            spare -= spent
    return found


@torch.no_grad()
def measured(
    model: Any, batches: Sequence[torch.Tensor], layers: Sequence[Layer], raised: Sequence[str]
) -> dict[str, Cost]:
    """Measures costs of the model's linear layers; ``raised`` are formats with more bits, fewest first."""
    modules = dict(model.named_modules())
    expected = [_log_probabilities(model, ids) for ids in batches]
    costs = {}
    for layer in Progress(layers, desc="sensitivity", unit="layer"):
        module: Any = next((modules[n] for n in spellings(layer.name) if n in modules), None)
        if expert_of(layer.name) is not None or not isinstance(module, torch.nn.Linear):
            continue
        exact = module.weight.clone()
        rounded = quantized(exact, layer.recipe.weights.name, search=True).dequantize().to(exact)
        errors: dict[str, float] = {}
        for format in raised:
            if format == SIXTEEN:
                errors[format] = 0.0
            elif layer.shape[1] % RECIPES[format].group_size == 0:
                other = quantized(exact, RECIPES[format].weights.name).dequantize().to(exact)
                errors[format] = _squared(other, exact)
        module.weight.copy_(rounded)
        try:
            found = [_kl(e, _log_probabilities(model, ids)) for e, ids in zip(expected, batches, strict=True)]
        finally:
            module.weight.copy_(exact)
        costs[layer.name] = Cost(sum(found) / len(found), _squared(rounded, exact), errors)
    return costs


def _log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids.to(model.device)).logits[0].float().log_softmax(-1)


def _kl(expected: torch.Tensor, got: torch.Tensor) -> float:
    return float((expected.exp() * (expected - got)).sum(1).double().mean())


def _squared(values: torch.Tensor, exact: torch.Tensor) -> float:
    return float((values.float() - exact.float()).square().sum())


def _size(layer: Layer) -> int:
    return layer.shape[0] * layer.shape[1]


def _bits(recipe: Recipe, k: int) -> float:
    """Returns the bits per weight, in rows of ``k``."""
    return 8 * recipe.weights.nbytes(1, k) / k


def _taken(every: Sequence[Layer], rules: Rules) -> float:
    """Returns the bits of all layers before any of them gets more."""
    kinds = [(one, rules.of(one.name)) for one in every]
    return sum(
        _size(one) * (_bits(kind, one.shape[1]) if isinstance(kind, Recipe) else SIXTEEN_BITS)
        for one, kind in kinds
    )
