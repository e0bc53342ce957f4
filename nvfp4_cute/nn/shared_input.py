"""Merges linear layers that read the same input into one product with their concatenated weights."""

from collections.abc import Sequence
from typing import Any

import torch

from nvfp4_cute import private_api
from nvfp4_cute.batch_invariance import is_layer_invariant, refuse_capture
from nvfp4_cute.formats.block_format import ATOM_ROWS, NVFP4
from nvfp4_cute.formats.block_scaled import NVFP4Tensor
from nvfp4_cute.nn.linear import FIXED, QuantizedLinear
from nvfp4_cute.nn.seen import Place, Seen


def reason_against(layers: Sequence[QuantizedLinear]) -> str | None:
    """Returns the reason why these layers cannot become one product, or None if they can."""
    first = layers[0]
    if any(layer.format != NVFP4 for layer in layers):
        return "weights are not all NVFP4, whose global scales one product can have a column"
    if any(layer.pre_decode for layer in layers):
        return "weights are decoded once (pre_decode=True)"
    if any(layer.in_features != first.in_features for layer in layers):
        return "layers have different in_features"
    if any(layer.out_features % ATOM_ROWS for layer in layers[:-1]):
        return f"rows of blocked scales begin with every {ATOM_ROWS} rows, and out_features is not a multiple of it"
    same = lambda layer: (
        layer.mode, layer.keep_decoded, layer.backend, layer.dtype, layer.packed_weight.device,
        None if layer.bias is None else layer.bias.dtype,
    )  # fmt: skip
    if any(same(layer) != same(first) for layer in layers):
        return "layers have different activations, backends, dtypes or devices, or some keep decoded weights"
    if len({layer.bias is None for layer in layers}) > 1:
        return "some of the layers have a bias"
    if any("bias" not in layer._parameters for layer in layers):
        return "a bias is computed anew in every call (torch.nn.utils.parametrize, prune)"
    return (
        None
        if first.mode == "16bit" or is_one_input_scale(layers)
        else "layers quantize their input differently"
    )


def is_one_input_scale(layers: Sequence[QuantizedLinear]) -> bool:
    """Returns whether layers in mode "nvfp4" quantize a shared input to the same bits. Waits for the device."""
    if len({layer.finds_input_scale for layer in layers}) > 1:
        return False
    scales = [layer.input_global_scale for layer in layers]
    given = [scale for scale in scales if scale is not None]
    if not given or given[0].is_meta:
        return not given or len(given) == len(scales)
    return len(given) == len(scales) and bool((torch.stack(given) == given[0]).all())


class SharedInput:
    """Layers that a module calls one after the other with the same tensor, such as q, k and v of an attention block.

    The first of these calls computes all results in one product, and the other calls fetch theirs. No tensor outlives the last
    call. If a layer is called with another tensor, it computes its own result, and from then on so do all layers; batch-invariant
    layers go on to compute all results.

    The layers remain modules of their own, with their names in the state dict. Their weights, block scales and biases become
    views of one tensor each. Where global scales of weights differ, a second launch multiplies the float32 sums of each column
    by its layer's scale, so the bits are those of separate products. The next eager call notices written scales and swapped
    tensors (``nn.seen``); a traced graph keeps the global scales with which it was made.

    Args:
        layers: in the order of their calls.

    Raises:
        TypeError: a layer is not a QuantizedLinear.
        ValueError: there are no layers, or ``reason_against`` has a reason.
    """

    def __init__(self, layers: Sequence[QuantizedLinear]):
        if not layers:
            raise ValueError("layers is empty; pass those that read the same input")
        for layer in layers:
            if not isinstance(layer, QuantizedLinear):
                raise TypeError(
                    f"layers has a {type(layer).__name__}; pass QuantizedLinear.from_linear(layer) of each"
                )
        reason = reason_against(layers)
        if reason is not None:
            raise ValueError(reason)
        self.layers = tuple(layers)
        self.sizes = [layer.out_features for layer in layers]
        self.is_shared = True
        self.whole: QuantizedLinear | None = None
        self.seen: Seen | None = None
        # The input, its version counter, and the results that were not fetched yet.
        self.kept: tuple[torch.Tensor, int, list[torch.Tensor | None]] | None = None
        for number, layer in enumerate(layers):
            layer.shared = (self, number)
            layer.register_load_state_dict_post_hook(_loaded)
        self.changed()

    def result(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Returns the result of layer ``number`` for ``x``, [..., N]; see ``QuantizedLinear.forward``."""
        if not self.is_shared:
            return self.layers[number].product(x)
        kept = self.kept
        if kept is not None and kept[2][number] is not None:
            if kept[0] is x and kept[1] == _version(x):
                found = kept[2][number]
                assert found is not None
                kept[2][number] = None
                if all(one is None for one in kept[2]):
                    self.kept = None
                return found
            self.kept = None
            if not is_layer_invariant():  # one product and separate ones may have different bits
                self.is_shared = False
                return self.layers[number].product(x)
        whole = self.whole
        if whole is None or not (
            private_api.is_traced() or (self.seen is not None and self.seen.is_current())
        ):
            whole = self.join()
        if whole is None:
            return self.layers[number].product(x)
        results: list[torch.Tensor | None] = [*whole.product(x).split_with_sizes(self.sizes, -1)]
        found = results[number]
        assert found is not None
        results[number] = None
        self.kept = (x, _version(x), results)
        return found

    def changed(self) -> None:
        """Concatenates again after tensors were replaced, once all layers are on the device of the last one."""
        self.whole = self.kept = None
        if not self.layers[0].packed_weight.is_meta:
            self.join()

    def join(self) -> QuantizedLinear | None:
        """Makes the layer of all rows, from weights that are already adjacent or are copied into one tensor.

        Returns None where the layers do not fit together, or cannot be compared, as while a graph is captured.
        """
        if private_api.is_traced() or reason_against(self.layers) is not None:
            return None
        first = self.layers[0]
        if first.packed_weight.is_cuda and torch.cuda.is_current_stream_capturing():
            refuse_capture("layers with one input")
            return None
        is_new = self.whole is None or not self._has_weights(self.whole)
        whole = self._of_all_rows() if is_new else self.whole
        assert whole is not None
        factors = torch.stack([layer.weight_global_scale for layer in self.layers])
        is_one = bool((factors == factors[0]).all())
        sizes = torch.tensor(self.sizes, device=factors.device)
        factor, known = factors[0] if is_one else factors.repeat_interleave(sizes), whole.weight_global_scale
        if known.shape == factor.shape and not known.is_inference():
            known.copy_(factor)  # in place, where captured graphs read it
        else:
            whole.weight_global_scale = factor
        whole.input_global_scale = first.input_global_scale
        if whole.bias is not None:
            self._join_biases(whole, is_new or self.seen is None)
        self.whole = whole
        self._see()
        return whole

    def _of_all_rows(self) -> QuantizedLinear:
        """Makes a layer with the weights of all layers, which become views of it."""
        first = self.layers[0]
        data = torch.cat([layer.packed_weight for layer in self.layers])
        scale = torch.cat([layer.weight_scale.view(torch.uint8) for layer in self.layers])
        scale = scale.view(torch.float8_e4m3fn)
        bias = None if first.bias is None else torch.cat([layer.bias for layer in self.layers])
        whole = QuantizedLinear.from_quantized(
            NVFP4Tensor(data, scale, None, (sum(self.sizes), first.in_features)), bias, activations=first.mode,
            input_scale="auto" if first.finds_input_scale else None, keep_decoded=first.keep_decoded, dtype=first.dtype,
            backend=first.backend,
        )  # fmt: skip
        for layer, own_data, own_scale in zip(self.layers, *self._parts(whole), strict=True):
            layer._buffers["weight"], layer._buffers["weight_scale"] = own_data, own_scale
        return whole

    def _join_biases(self, whole: QuantizedLinear, is_shared: bool) -> None:
        """Gives the layer of all rows the biases of all layers. With ``is_shared``, these become views of its own."""
        biases: list[Any] = [layer.bias for layer in self.layers]
        lies_there = [
            a.data_ptr() == b.data_ptr() for a, b in zip(biases, whole.bias.split(self.sizes), strict=True)
        ]
        if all(lies_there):
            return
        # In new memory, because other biases may use the old.
        whole.bias = torch.nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False)
        if is_shared:
            for bias, part in zip(biases, whole.bias.detach().split(self.sizes), strict=True):
                bias.data = part

    def _parts(self, whole: QuantizedLinear) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Iterates over the weights and block scales of every layer and the places for them in the layer of all rows."""
        rows = [len(layer.weight_scale) for layer in self.layers]
        return whole.packed_weight.split(self.sizes), whole.weight_scale.split(rows)

    def _has_weights(self, whole: QuantizedLinear) -> bool:
        """Returns whether the weights of all layers are views of this layer's."""
        own: list[list[Any]] = [
            [layer._buffers[name] for layer in self.layers] for name in ("weight", "weight_scale")
        ]
        pairs = zip(own, self._parts(whole), strict=True)
        return all(
            a.data_ptr() == b.data_ptr() for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True)
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out cached results, because the layers of a copy have buffers of their own."""
        whole = self.whole if self.whole is not None and self._has_weights(self.whole) else None
        return {**self.__dict__, "whole": whole, "seen": None, "kept": None}

    def _see(self) -> None:
        weights: list[Place] = [(one._buffers, name) for one in self.layers for name in FIXED[:2]]
        biases: list[Place] = [(one._parameters, "bias") for one in self.layers]
        scales: list[Place] = [(one._buffers, name) for one in self.layers for name in FIXED[2:]]
        self.seen = Seen(scales, moved=biases, shared=weights)


def _version(x: torch.Tensor) -> int:
    """Returns the version counter of ``x``; a constant in inference mode and in traced graphs, which have none."""
    return 0 if private_api.is_traced() or x.is_inference() else x._version


def _loaded(layer: QuantizedLinear, keys: object) -> None:
    if layer.shared is not None:
        layer.shared[0].changed()
