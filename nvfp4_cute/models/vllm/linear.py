"""Linear layers of vLLM with NVFP4 weights."""

from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import ModelWeightParameter, PerTensorScaleParameter

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.models.checkpoints.checks import check_data
from nvfp4_cute.models.checkpoints.convention import DATA, GLOBAL, INPUT, SCALE, Convention
from nvfp4_cute.models.checkpoints.stored import Scheme, StoredLinear, StoredWeight
from nvfp4_cute.models.layers import linear_module
from nvfp4_cute.models.vllm.parameters import factors, make_up_dummies, matrices, unknown_numbers


@register_weight_loader_v2_supported_method
class LinearMethod(LinearMethodBase):
    """Creates, loads and computes a linear layer, or several that vLLM keeps in one tensor, such as q, k and v.

    Args:
        scheme: how the layer is quantized. convention: the checkpoint's.
        keeps_16_bits: whether activations stay as they are, whatever the scheme says.
    """

    def __init__(self, scheme: Scheme, convention: Convention, keeps_16_bits: bool = False):
        self.scheme, self.convention = scheme, convention
        self.used_scheme = replace(scheme, activations=None) if keeps_16_bits else scheme

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Parameters of one rank's part, with vLLM's own loaders, which cut what is in the files."""
        loader = extra_weight_attrs["weight_loader"]
        rows = sum(output_partition_sizes)
        data, scale = matrices((rows,), input_size_per_partition, _name(layer))
        for role, tensor in ((DATA, data), (SCALE, scale)):
            made = ModelWeightParameter(data=tensor, input_dim=1, output_dim=0, weight_loader=loader)
            layer.register_parameter(self.convention.name_of(role), made)
        for role in (GLOBAL, INPUT) if self.scheme.activations else (GLOBAL,):
            numbers = unknown_numbers(len(output_partition_sizes))
            made = PerTensorScaleParameter(data=numbers, weight_loader=loader)
            layer.register_parameter(self.convention.name_of(role), made)
        layer.nvfp4_parts = (output_partition_sizes, params_dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check what was loaded, and make ``layer.nvfp4`` of it, which computes.

        Raises:
            CheckpointError: a tensor is missing, zero or not finite; it is named.
        """
        roles = (DATA, SCALE, GLOBAL, INPUT)
        taken: list[Any] = [layer._parameters.pop(self.convention.name_of(role), None) for role in roles]
        data, scale, factor, given = taken
        make_up_dummies(scale, factor, given)
        path = {role: f"{_name(layer)}.{self.convention.name_of(role)}" for role in roles}
        check_data(path[DATA], self.scheme, data.data, scale.data, path[SCALE])
        factor = factors(path[GLOBAL], factor.data, self.convention)
        if given is not None:
            # One of all: they read the same rows, and the largest cuts nothing off.
            given = factors(path[INPUT], given.data, self.convention).amax()
        sizes, dtype = layer.nvfp4_parts
        is_one = bool((factor == factor[0]).all())
        starts = [0] if is_one else [sum(sizes[:i]) for i in range(len(sizes))]
        parts = []
        for i, start in enumerate(starts):
            rows = slice(start, None if is_one else start + sizes[i])
            one, own = data.data[rows], scale.data[rows]
            shape = (len(one), NVFP4.elements(one.shape[1]))
            weight = StoredWeight(self.scheme.weights, one, own, factor[i], shape)
            stored = StoredLinear(_name(layer), self.used_scheme, weight, given)
            parts.append(linear_module(stored, None, dtype=dtype, device=one.device))
        layer.nvfp4 = torch.nn.ModuleList(parts)
        layer.weight = data  # other code of vLLM asks whether there is one

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ W^T + bias``: one product, or one a part where parts have global scales of their own."""
        y = [part(x) for part in layer.nvfp4]
        joined = y[0] if len(y) == 1 else torch.cat(y, -1)
        return joined if bias is None else joined + bias


def _name(layer: torch.nn.Module) -> str:
    return getattr(layer, "prefix", "") or type(layer).__name__
