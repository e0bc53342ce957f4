"""``replace_linears``: replaces the linear layers of a model by QuantizedLinear."""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from nvfp4_cute.nn.activations import Activations
from nvfp4_cute.nn.linear import K_STEP, QuantizedLinear
from nvfp4_cute.nn.options import check_patterns
from nvfp4_cute.terminal import bar

# Output layers lose the most accuracy, and run only once per pass through the model.
KEEP = ("lm_head",)


@dataclass
class Replaced:
    """Result of ``replace_linears``.

    Attributes:
        layers: names of layers that became QuantizedLinear.
        left: name of a linear layer that stays -> reason.
    """

    layers: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def replace_linears(
    model: torch.nn.Module,
    *,
    activations: Activations = "nvfp4",
    input_scale: float | str | Mapping[str, float] | None = "auto",
    pre_decode: bool = False,
    keep: Sequence[str] = KEEP,
    backend: str = "auto",
) -> Replaced:
    """Replace the ``torch.nn.Linear`` layers of ``model``, in place, one by one.

        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 8))
        >>> replace_linears(model, keep=["2"]).layers
        ['0']

    A layer stays if it matches ``keep``, if K is not a multiple of 32, if another module has the same weight (tied embeddings),
    if it computes more than its weight and bias say (hooks, parametrizations, a forward of its own), or if the module around it
    multiplies by its weight without calling it, as torch.nn.MultiheadAttention does, which would dequantize the weight in every
    call. ``torch.nn.TransformerEncoderLayer`` has a fast path that reads weights; it is switched off if a layer inside is
    replaced.

    Args:
        activations, pre_decode, backend: see QuantizedLinear.
        input_scale: see QuantizedLinear, for all layers; or calibrated numbers by name, one for every layer that is replaced.
        keep: fnmatch patterns for names of layers that stay.

    Raises:
        KeyError: ``input_scale`` lacks the number of a layer.
        TypeError: ``model`` is a linear layer itself or not a module, or ``keep`` is a string.
    """
    if isinstance(model, torch.nn.Linear):
        raise TypeError(
            "model is a linear layer itself; QuantizedLinear.from_linear(model) is what replaces it"
        )
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; pass a torch.nn.Module, which is changed in place"
        )
    check_patterns("keep", keep)
    done = Replaced()
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    owners = _owners(model)
    for name, linear in bar(linears, desc="linear layers"):
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        reason = _reason(name, linear, parent, owners, keep)
        if reason is not None:
            done.left[name] = reason
            continue
        if isinstance(input_scale, Mapping) and name not in input_scale:
            raise KeyError(f"input_scale has no number for {name}; calibrate it, or keep it by a pattern")
        scale: Any = input_scale[name] if isinstance(input_scale, Mapping) else input_scale
        options: dict[str, Any] = {"activations": activations, "input_scale": scale, "backend": backend}
        made = QuantizedLinear.from_linear(linear, pre_decode=pre_decode, **options)
        setattr(parent, child, made.train(linear.training))
        if isinstance(parent, torch.nn.TransformerEncoderLayer):
            parent.activation_relu_or_gelu = 0  # the fast path checks this first
        done.layers.append(name)
    if done.layers and hasattr(model, "save_pretrained"):
        object.__setattr__(model, "save_pretrained", _refuse_to_save)
    return done


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    """Replaces ``save_pretrained`` of transformers, which would write a folder that ``from_pretrained`` cannot read."""
    raise ValueError(
        "save_pretrained does not write layers that replace_linears replaced: from_pretrained could not read them. Save "
        "model.state_dict() with torch.save, and load it into a model with the same layers replaced; or write a checkpoint of "
        "the 16-bit model with `nvfp4-cute quantize`"
    )


def _owners(model: torch.nn.Module) -> dict[int, list[str]]:
    """Maps the id of each parameter to the names under which modules have it."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return owners


def _reason(
    name: str,
    linear: torch.nn.Linear,
    parent: torch.nn.Module,
    owners: dict[int, list[str]],
    keep: Sequence[str],
) -> str | None:
    pattern = next((p for p in keep if fnmatch.fnmatchcase(name, p)), None)
    if pattern is not None:
        return f"by the pattern {pattern}"
    if linear.in_features % K_STEP:
        return f"in_features={linear.in_features} is not a multiple of {K_STEP}"
    if isinstance(parent, torch.nn.MultiheadAttention):
        return "torch.nn.MultiheadAttention multiplies by its weight"
    if is_parametrized(linear):
        return "its weight is parametrized; torch.nn.utils.parametrize.remove_parametrizations makes it plain"
    if type(linear).forward is not torch.nn.Linear.forward or "forward" in vars(linear):
        return f"this {type(linear).__name__} has a forward of its own"
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "it has forward hooks, which would be lost"
    others = [other for other in owners[id(linear.weight)] if other != f"{name}.weight"]
    if others:
        return f"its weight is also {others[0]}"
    return None
