"""Compares a quantized model with its 16-bit model on a text: KL divergence, perplexity, and every layer's error."""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from nvfp4_cute.formats.global_scale import GLOBAL_SCALE_DIVISOR
from nvfp4_cute.models.quantizing.calibrate import Seen
from nvfp4_cute.nn.replace import replace_linears
from nvfp4_cute.terminal import Progress

Way = Literal["16bit", "nvfp4"]
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")


@dataclass
class Accuracy:
    """Result of a comparison.

    Attributes:
        tokens: number of predicted tokens.
        perplexity: perplexity of the quantized model.
        reference_perplexity: perplexity of the 16-bit model.
        kl: mean over tokens of the KL divergence from the 16-bit model's distribution, in nats.
        kl_worst: largest KL divergence, in nats.
        same_choice: fraction of tokens for which both models find the same token most likely.
        losses: per window, mean negative log likelihood of its tokens in nats: quantized model, 16-bit model.
        layers: name of a layer -> relative error of its result for the 16-bit model's input, in the first window.
    """

    tokens: int
    perplexity: float
    reference_perplexity: float
    kl: float
    kl_worst: float
    same_choice: float
    losses: list[tuple[float, float]] = field(default_factory=list)
    layers: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Perplexity divided by that of the 16-bit model."""
        return self.perplexity / self.reference_perplexity

    @classmethod
    def of(cls, given: dict[str, Any]) -> "Accuracy":
        """Restores the result from ``as_dict``."""
        return cls(**{name: value for name, value in given.items() if name != "ratio"})

    @property
    def reference_perplexities(self) -> list[float]:
        """Perplexity of the 16-bit model in every window."""
        return [math.exp(theirs) for _, theirs in self.losses]

    @property
    def ratios(self) -> list[float]:
        """Ratio of the perplexities in every window."""
        return [math.exp(ours - theirs) for ours, theirs in self.losses]

    def as_dict(self) -> dict[str, Any]:
        """Returns the result for JSON."""
        return asdict(self) | {"ratio": self.ratio}


@torch.no_grad()
def compare(reference: Any, model: Any, windows: Sequence[torch.Tensor], title: str = "text") -> Accuracy:
    """Runs both models on every window, and compares their predictions of each token.

    Args:
        reference: a causal model of transformers in 16 bits, in eval mode.
        model: the same model with some modules quantized.
        windows: token ids, [1, n] each, n at least 2; each window starts without context.
        title: label of the progress bar.

    Raises:
        ValueError: there is no window, a window has a single token, or the models have different modules.
    """
    if not windows or any(ids.shape[-1] < 2 for ids in windows):
        raise ValueError("a text of at least two tokens is needed in every window; pass a longer one")
    _check_same_model(reference, model)
    layers: dict[str, tuple[float, float]] = {}
    losses: list[tuple[float, float]] = []
    divergence, worst, same, tokens = 0.0, 0.0, 0, 0
    for number, ids in enumerate(Progress(windows, desc=title, unit="window")):
        handles = _watch(reference, model, layers) if number == 0 else []
        expected = _log_probabilities(reference, ids)
        for handle in handles:
            handle.remove()
        got = _log_probabilities(model, ids)
        following = ids[0, 1:].to(expected.device).unsqueeze(1)
        losses.append((_loss(got, following), _loss(expected, following)))
        kl = (expected.exp() * (expected - got)).sum(1)
        divergence, worst = divergence + float(kl.double().sum()), max(worst, float(kl.max()))
        same += int((expected.argmax(1) == got.argmax(1)).sum())
        tokens += len(following)
    weights = [ids.shape[-1] - 1 for ids in windows]
    ours, theirs = (
        math.exp(sum(w * one for w, one in zip(weights, each, strict=True)) / tokens)
        for each in zip(*losses, strict=True)
    )
    errors = {name: math.sqrt(error / max(norm, 1e-300)) for name, (error, norm) in layers.items()}
    return Accuracy(tokens, ours, theirs, divergence / tokens, worst, same / tokens, losses, errors)


def quantized_copy(model: Any, way: Way, seen: Seen | None = None) -> Any:
    """Copies a 16-bit model with NVFP4 weights in its linear layers and experts. The output layer stays.

    Args:
        model: the 16-bit model.
        way: "16bit" keeps activations; "nvfp4" quantizes them to 4 bits.
        seen: result of ``calibrate.largest_inputs``, from which global scales of linear layers' activations are computed. None
            computes them from each input. Experts always compute theirs in each call.
    """
    from nvfp4_cute.models.transformers import quantized_experts

    made = copy.deepcopy(model)
    for name, module in list(made.named_modules()):
        if "down_proj" in module._parameters:  # experts, in one tensor
            parent, _, child = name.rpartition(".")
            setattr(made.get_submodule(parent), child, quantized_experts(module, activations=way))
    scale: Any = "auto"
    if seen is not None:
        scale = {name: max(amax, 1e-30) / GLOBAL_SCALE_DIVISOR for name, amax in seen.linears.items()}
    replace_linears(made, activations=way, input_scale=scale)
    return made


def _check_same_model(reference: Any, model: Any) -> None:
    """Raises ValueError for models of different classes or sizes, by config.json where they have one."""
    pairs: dict[str, list[Any]] = {"class": [type(one).__name__ for one in (reference, model)]}
    configs = [one.config.get_text_config() for one in (reference, model) if hasattr(one, "config")]
    for name in SIZES if len(configs) == 2 else ():
        pairs[name] = [getattr(config, name, None) for config in configs]
    different = next((name for name, (a, b) in pairs.items() if a != b), None)
    if different is not None:
        a, b = pairs[different]
        raise ValueError(
            f"{different} of the 16-bit model is {a}, and {b} of the quantized one; pass a checkpoint that was made of this model"
        )


def _log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Returns log probabilities of the tokens after each but the last, float32 [n - 1, vocabulary]."""
    return model(ids.to(model.device)).logits[0, :-1].float().log_softmax(-1)


def _loss(found: torch.Tensor, following: torch.Tensor) -> float:
    """Returns the mean negative log likelihood of the tokens that follow, [n - 1, 1]."""
    return -float(found.gather(1, following).double().mean())


def _watch(reference: Any, model: Any, layers: dict[str, tuple[float, float]]) -> list[Any]:
    """Hooks ``reference`` so that every layer's input also goes to its quantized counterpart."""
    handles = []
    own = dict(reference.named_modules())
    for name, counterpart in model.named_modules():
        if name in own and name and _differs(own[name], counterpart):
            hook = _comparing(layers, name, counterpart)
            handles.append(own[name].register_forward_hook(hook, with_kwargs=True))
    return handles


def _differs(module: torch.nn.Module, counterpart: torch.nn.Module) -> bool:
    """Returns whether the modules themselves, without the modules inside them, compute differently or have other weights."""
    if type(module) is not type(counterpart):
        return True
    own, other = ([*m.parameters(recurse=False), *m.buffers(recurse=False)] for m in (module, counterpart))
    return len(own) != len(other) or any(not torch.equal(a, b) for a, b in zip(own, other, strict=True))


def _comparing(layers: dict[str, tuple[float, float]], name: str, counterpart: torch.nn.Module) -> Any:
    def compare_results(module: torch.nn.Module, given: tuple, named: dict, result: torch.Tensor) -> None:
        exact, got = result.double(), counterpart(*given, **named).double()
        error, norm = layers.get(name, (0.0, 0.0))
        layers[name] = (
            error + float((got - exact).square().sum()),
            norm + float(exact.square().sum()),
        )

    return compare_results
