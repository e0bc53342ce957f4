"""The gated MLP of a transformer, with gate and up in one launch."""

from typing import Any

import torch

from nvfp4_cute import private_api
from nvfp4_cute.activation import activation_of
from nvfp4_cute.backends.last_chains import LastChains
from nvfp4_cute.batch_invariance import refuse_capture
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.nn.linear import QuantizedLinear
from nvfp4_cute.nn.products import Weights, gated_product
from nvfp4_cute.nn.seen import Seen
from nvfp4_cute.nn.shared_input import is_one_input_scale
from nvfp4_cute.problem import Activation


class GatedMLP(torch.nn.Module):
    """Computes ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``, with gate, up and activation in one launch.

    The launch computes in float32 and rounds once; separate layers round three times. With 4-bit activations and few rows it
    also quantizes for ``down_proj``. The layers remain submodules with the same names, also in the state dict.

    The layers are called one by one where one of them has a forward hook, where their modes differ, and where they multiply
    kept weights.

    Args:
        gate_proj, up_proj: [I, H], without biases.
        down_proj: [H, I].
        act_fn: called where layers are called one by one.
        activation: what ``act_fn`` computes, such as "silu"; see :class:`nvfp4_cute.Activation`.

    Raises:
        TypeError: a layer is not a QuantizedLinear.
        ValueError: sizes do not fit, gate or up has a bias, or the activation is unknown.
    """

    gate_proj: QuantizedLinear
    up_proj: QuantizedLinear
    down_proj: QuantizedLinear
    act_fn: Any
    activation: Activation
    is_fused: bool
    """Whether one launch computes gate and up, if no layer has a hook."""

    def __init__(
        self,
        gate_proj: QuantizedLinear,
        up_proj: QuantizedLinear,
        down_proj: QuantizedLinear,
        act_fn: Any,
        activation: Activation,
    ):
        super().__init__()
        for name, layer in (("gate_proj", gate_proj), ("up_proj", up_proj), ("down_proj", down_proj)):
            if not isinstance(layer, QuantizedLinear):
                raise TypeError(
                    f"{name} is a {type(layer).__name__}; pass QuantizedLinear.from_linear(layer)"
                )
            if layer.format != NVFP4:
                raise ValueError(
                    f"{name} has weights of {layer.format.title}; the launch of gate and up takes NVFP4"
                )
        activation = activation_of(activation).function
        if gate_proj.bias is not None or up_proj.bias is not None:
            raise ValueError("gate_proj or up_proj has a bias; the launch of both adds none")
        width, hidden = gate_proj.out_features, gate_proj.in_features
        if (up_proj.out_features, up_proj.in_features, down_proj.in_features) != (width, hidden, width):
            raise ValueError(
                f"gate_proj is [{width}, {hidden}]; up_proj has to be, and down_proj [H, {width}]"
            )
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.act_fn, self.activation = act_fn, activation
        self._last: LastChains = LastChains()
        self.register_load_state_dict_post_hook(_loaded)
        self._look()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``x`` [..., H] to [..., H]. Raises what QuantizedLinear raises."""
        modules: dict[str, Any] = self._modules  # module attributes are slow to look up
        gate, up, down = modules["gate_proj"], modules["up_proj"], modules["down_proj"]
        is_split = gate.keep_decoded and gate.uses_kept(x.numel() // gate.in_features)
        if not private_api.is_traced() and not self._seen.is_current():
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                refuse_capture("gate_proj and up_proj")
                is_split = True  # always correct; scales on the device cannot be read now
            else:
                self._look()
        if not self.is_fused or is_split or _has_hooks(gate) or _has_hooks(up) or _has_hooks(down):
            return down(self.act_fn(gate(x)) * up(x))
        given = gate.given_input_scale()
        hidden = down._buffers["input_global_scale"] if down.mode != "16bit" else None
        sides = Weights(*gate.parts(given)), Weights(*up.parts(given)), Weights(*down.parts(hidden))
        if private_api.is_traced():
            return self._product(torch.ops.nvfp4_cute.gated_mlp, x, sides, given, hidden)
        bias = down._parameters.get("bias")
        finds = (gate.finds_input_scale, down.finds_input_scale)
        settings = (*finds, self.activation, gate.mode, gate.backend, given is None, hidden is None)
        tensors = [
            x,
            *sides[0],
            *sides[1],
            *sides[2],
            *(one for one in (given, hidden, bias) if one is not None),
        ]
        return self._last.call(settings, tensors, self._product, gated_product, x, sides, given, hidden)

    def _product(
        self,
        multiply: Any,
        x: torch.Tensor,
        sides: tuple[Weights, Weights, Weights],
        given: torch.Tensor | None,
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        gate, down = self.gate_proj, self.down_proj
        rows, dtype = gate.rows(x)
        finds = (gate.finds_input_scale, down.finds_input_scale)
        how = (*finds, self.activation, gate.mode, dtype, gate.backend)
        y = multiply(rows, *sides, given, hidden, *how, down.bias_now())
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], down.out_features)

    def _look(self) -> None:
        """Decides ``is_fused``, which depends on modes and on input scales."""
        places = [(layer._buffers, "input_global_scale") for layer in (self.gate_proj, self.up_proj)]
        self._seen, self.is_fused = Seen(places), self._goes_together()

    def _goes_together(self) -> bool:
        gate, up, down = layers = (self.gate_proj, self.up_proj, self.down_proj)
        if any(m.pre_decode or (m.mode, m.backend) != (gate.mode, gate.backend) for m in layers):
            return False
        if gate.mode != "16bit":
            return is_one_input_scale((gate, up))
        return True

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._look()
        return self

    def extra_repr(self) -> str:
        """Shows the activation and whether it is fused."""
        return f"activation={self.activation!r}, is_fused={self.is_fused}"


def _has_hooks(layer: torch.nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _loaded(mlp: GatedMLP, keys: object) -> None:
    mlp._look()
