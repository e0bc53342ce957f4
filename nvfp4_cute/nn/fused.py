"""Merges the launches of a model's layers: layers that read the same input, and gated MLPs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.nn.gated_mlp import GatedMLP
from nvfp4_cute.nn.linear import QuantizedLinear
from nvfp4_cute.nn.shared_input import SharedInput, reason_against
from nvfp4_cute.problem import Activation

# Names of layers that models call one after the other with the same tensor.
SHARED_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")
ACTIVATION_FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
# Values of the test that finds out which formula a module computes: small ones in steps, and ones that a limit would cut off.
TRIED = 64
LARGE = (7.5, 11.0, 40.0, 300.0, 2e4)


@dataclass
class Fused:
    """Result of ``fuse``.

    Attributes:
        shared: for each merged product, the names of its layers.
        mlps: names of modules that became GatedMLP.
        left: name of a module -> reason why its layers stay separate.
    """

    shared: list[tuple[str, ...]] = field(default_factory=list)
    mlps: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def fuse(model: torch.nn.Module) -> Fused:
    """Merge launches of the QuantizedLinear layers of ``model``, in place.

        >>> model = torch.nn.ModuleDict({n: QuantizedLinear(64, 128, False) for n in ("q_proj", "k_proj", "v_proj")})
        >>> fuse(model).shared
        [('q_proj', 'k_proj', 'v_proj')]

    - q, k and v of an attention block become one product (:class:`SharedInput`); so do the first layers of both sides of latent
      attention, and gate and up. Results keep their bits.
    - An MLP that computes ``down_proj(act_fn(gate_proj(x)) * up_proj(x))`` becomes a :class:`GatedMLP`, which rounds less
      often. ``fuse`` calls the module's ``forward`` with known layers to find out what it computes.

    Names of modules and state dicts do not change. Call this once per model, after its layers were replaced.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; pass a torch.nn.Module, which is changed in place"
        )
    done = Fused()
    for name, module in list(model.named_modules()):
        mlp = None if isinstance(module, GatedMLP) else _gated_mlp(module)
        if isinstance(mlp, str):
            done.left[name] = mlp
        elif mlp is not None and name:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, mlp.train(module.training))
            done.mlps.append(name)
        for layers in _sharing(module):
            reason = reason_against(list(layers.values()))
            if reason is None:
                SharedInput(list(layers.values()))
                done.shared.append(tuple(f"{name}.{child}".lstrip(".") for child in layers))
            else:
                done.left.setdefault(name, reason)
    return done


def _sharing(module: torch.nn.Module) -> Iterator[dict[str, QuantizedLinear]]:
    for names in SHARED_NAMES:
        layers: dict[str, Any] = {name: module._modules.get(name) for name in names}
        if all(_is_nvfp4(layer) and layer.shared is None for layer in layers.values()):
            yield layers


def _is_nvfp4(layer: object) -> bool:
    """Returns whether one launch can compute ``layer`` together with others."""
    return isinstance(layer, QuantizedLinear) and layer.format == NVFP4


def _gated_mlp(module: torch.nn.Module) -> GatedMLP | str | None:
    """Returns the GatedMLP for ``module``, a reason why there is none, or None if it is not an MLP of such layers."""
    layers: list[Any] = [module._modules.get(name) for name in MLP_NAMES]
    if not all(_is_nvfp4(layer) for layer in layers):
        return None
    function = next((f for n in ("act_fn", "activation_fn") if (f := getattr(module, n, None))), None)
    activation = None if function is None else _activation_of(function)
    if function is None or activation is None:
        return "its activation is none that the launch of gate and up computes"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has forward hooks, which would be lost"
    if any(True for _ in module.parameters(recurse=False)) or not _is_gated(module, function):
        return "it computes something else than down_proj(act_fn(gate_proj(x)) * up_proj(x))"
    try:
        gate, up, down = layers
        return GatedMLP(gate, up, down, function, activation)
    except ValueError as error:
        return str(error)


def _activation_of(function: Callable[[torch.Tensor], torch.Tensor]) -> Activation | None:
    values = _tried(-6, 6)
    for name, known in ACTIVATION_FUNCTIONS.items():
        if torch.equal(function(values), known(values)):
            return name
    return None


def _tried(low: float, high: float) -> torch.Tensor:
    large = torch.tensor(LARGE, device="cpu")
    return torch.cat([-large, torch.linspace(low, high, TRIED, device="cpu"), large])


class _Known(torch.nn.Module):
    """A layer that returns a known result, or its input where that is None."""

    def __init__(self, result: torch.Tensor | None):
        super().__init__()
        self.result = result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.result is None else self.result


def _is_gated(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Returns whether ``module`` computes the formula, judging by a call with layers that return known results."""
    gate, up = _tried(-3, 3).view(1, -1), _tried(1, 2).flip(0).view(1, -1)
    own = dict(module._modules)
    try:
        with torch.no_grad():
            for name, result in zip(MLP_NAMES, (gate, up, None), strict=True):
                module._modules[name] = _Known(result)
            return torch.equal(module(torch.zeros_like(gate)), function(gate) * up)
    except Exception:  # runs any model's code; a module that fails computes something else
        return False
    finally:
        module._modules.update(own)
