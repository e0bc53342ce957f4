"""vLLM linear layers with NVFP4, MXFP4 or int4 weights."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import PackedvLLMParameter, PerTensorScaleParameter

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.models.checkpoints.axes import axes_of
from nvfp4_cute.models.checkpoints.checks import check_data, check_pre_scale
from nvfp4_cute.models.checkpoints.convention import (
    DATA,
    GLOBAL,
    INPUT,
    ORDER,
    PRE,
    SCALE,
    SHAPE,
    ZERO,
    Convention,
    needed_roles,
)
from nvfp4_cute.models.checkpoints.stored import INT4, Scheme, StoredLinear, stored_weight
from nvfp4_cute.models.layers import LayerActivations, linear_module, product_sizes
from nvfp4_cute.models.vllm.graphs import add_to_key
from nvfp4_cute.models.vllm.kernels import KERNELS
from nvfp4_cute.models.vllm.parameters import (
    Matrix,
    MatrixLoader,
    VectorLoader,
    check_complete,
    factors,
    is_dummy,
    make_up_dummies,
    unknown_numbers,
    vector,
)
from nvfp4_cute.nn.linear import QuantizedLinear

UNORDERED = -1  # marks the absence of an order of K
# Roles of tensors with numbers along K, or with a few per part: initial value and dtype before a file is loaded.
VECTORS: dict[str, tuple[float, torch.dtype]] = {
    ORDER: (UNORDERED, torch.int32), PRE: (1.0, torch.float32), SHAPE: (UNORDERED, torch.int64),
}  # fmt: skip
SHAPE_SIZE = 2

Tensors = dict[str, torch.Tensor]  # by role


@register_weight_loader_v2_supported_method
class LinearMethod(LinearMethodBase):
    """Creates, loads and computes a linear layer, or several that vLLM merges, such as q, k and v.

    Args:
        scheme: how the layer is quantized.
        convention: convention of the checkpoint.
        keeps_16_bits: whether activations stay in 16 bits, whatever the scheme says.
        activations: mode of W4A4 or MXFP4 layers; see ``layers.linear_module``.
    """

    def __init__(
        self,
        scheme: Scheme,
        convention: Convention,
        keeps_16_bits: bool = False,
        activations: LayerActivations = "nvfp4",
    ):
        self.scheme, self.convention, self.activations = scheme, convention, activations
        self.used_scheme = replace(scheme, activations=None) if keeps_16_bits else scheme
        self.axes = axes_of(scheme, convention.tool)
        self.numbers = [role for role in (GLOBAL, INPUT) if role in needed_roles(scheme)]
        self.model_config = get_current_vllm_config()

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
        """Creates the parameters of one rank's part, with vLLM's own loaders, which slice the files' tensors."""
        loader, parts = extra_weight_attrs["weight_loader"], len(output_partition_sizes)
        rows, k = sum(output_partition_sizes), input_size_per_partition
        layer.nvfp4_loaders = {}
        for role, axes in self.axes.items():
            matrix = Matrix(self._path(layer, role), axes, None, rows, k, input_size)
            own = layer.nvfp4_loaders[role] = MatrixLoader(matrix, loader, parts)
            packed_dim = axes.n if axes.n_values > 1 else axes.k
            made = PackedvLLMParameter(
                data=matrix.empty(), input_dim=axes.k, output_dim=axes.n, packed_dim=packed_dim,
                packed_factor=max(axes.n_values, axes.k_values), weight_loader=own,
            )  # fmt: skip
            layer.register_parameter(self.convention.name_of(role), made)
        for role in self.numbers:
            numbers = PerTensorScaleParameter(data=unknown_numbers(parts), weight_loader=loader)
            layer.register_parameter(self.convention.name_of(role), numbers)
        for role in set(self.convention.suffixes.values()) & set(VECTORS):
            own_vector = layer.nvfp4_loaders[role] = VectorLoader(
                self._path(layer, role), getattr(layer, "tp_rank", 0)
            )
            size = SHAPE_SIZE if role == SHAPE else k
            layer.register_parameter(
                self.convention.name_of(role), vector(parts, size, *VECTORS[role], own_vector)
            )
        layer.nvfp4_sizes = (output_partition_sizes, k, input_size, params_dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks what was loaded, and makes the modules of ``layer.nvfp4``, which compute.

        Raises:
            CheckpointError: a tensor is missing, zero or not finite; the message names it.
        """
        given = self._taken(layer)
        sizes, k, all_k, dtype = layer.nvfp4_sizes
        # Numbers of each part. If these agree, all parts become one product.
        own = {role: given.pop(role) for role in (GLOBAL, ORDER, PRE) if role in given}
        # One scale for all parts: they read the same rows, and the largest scale clamps nothing.
        input_scale = given.pop(INPUT).amax() if INPUT in given else None
        products = product_sizes(sizes, own.values())
        bias = self._bias(layer)
        modules = []
        for i, (start, rows) in enumerate(zip(accumulate(products, initial=0), products, strict=False)):
            cut = {role: self._rows(role, tensor, start, rows) for role, tensor in given.items()}
            weight, order = self._weight(layer, cut, {role: one[i] for role, one in own.items()})
            stored = StoredLinear(
                _name(layer), self.used_scheme, weight, input_scale, order, _of_part(own, PRE, i)
            )
            one_bias = None if bias is None else bias[start : start + rows]
            options: Any = {"dtype": dtype, "device": weight.data.device, "activations": self.activations}
            modules.append(linear_module(stored, one_bias, **options))
        # Other code of vLLM checks that a weight exists. The stored one may differ from that of the module.
        layer.weight = next(w for m in modules[0].modules() if (w := _weight_of(m)) is not None)
        layer.nvfp4, layer.nvfp4_has_bias = torch.nn.ModuleList(modules), bias is not None
        add_to_key(self.model_config, _name(layer), layer.nvfp4)
        for module in modules:
            KERNELS.add_linear(module, k, dtype, layer.weight.device)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes ``x @ W^T + bias`` in one product, or in one per part if the parts' global scales or orders of K differ.

        Modules add the layer's own bias in the launch of the product; another bias is added afterwards.
        """
        if layer.nvfp4_has_bias and bias is None:
            y = [_without_bias(part, x) for part in layer.nvfp4]
        else:
            y = [part(x) for part in layer.nvfp4]
        joined = y[0] if len(y) == 1 else torch.cat(y, -1)
        return joined if bias is None or layer.nvfp4_has_bias else joined + bias

    def _path(self, layer: Any, role: str) -> str:
        return f"{_name(layer)}.{self.convention.name_of(role)}"

    def _taken(self, layer: Any) -> Tensors:
        """Returns the checked tensors from the files, by role, and deletes the layer's parameters."""
        loaders, names = layer.nvfp4_loaders, self.convention.name_of
        taken = {role: layer._parameters.pop(names(role)) for role in (*loaders, *self.numbers)}
        optional = {ZERO} - set(needed_roles(self.scheme))
        kept = check_complete({role: loaders[role] for role in self.axes}, taken, optional)
        kept |= {role for role in loaders if role in VECTORS and loaders[role].seen}
        found = {
            role: taken[role].data
            for role in (*self.axes, *self.numbers, *VECTORS)
            if role in {*kept, *self.numbers}
        }
        if self.scheme.weights != INT4:
            make_up_dummies(*(tensor for role, tensor in found.items() if role != DATA))
        for role in self.numbers:
            found[role] = factors(self._path(layer, role), found[role], self.convention)
        all_k = layer.nvfp4_sizes[2]
        if SHAPE in found and bool((found.pop(SHAPE)[:, 1] != all_k).any()):
            raise CheckpointError(
                f"{self._path(layer, SHAPE)} has another K than {all_k}, that of the layer by config.json: these are different "
                "models"
            )
        if ORDER in found:
            found[ORDER] = self._order(layer, found)
        elif ORDER in needed_roles(self.scheme) and not is_dummy():
            raise CheckpointError(
                f"{self._path(layer, ORDER)} is in no file of the checkpoint, whose config says that K has an order (desc_act, "
                "actorder): a file is missing"
            )
        if PRE in found:
            for one in found[PRE]:
                check_pre_scale(self._path(layer, PRE), one, one.numel())
        return found

    def _order(self, layer: Any, found: Tensors) -> torch.Tensor:
        """Returns the blocks of K, [parts, K], counted from the rank's first block."""
        blocks, order = found[SCALE].shape[self.axes[SCALE].k], found[ORDER]
        _, k, all_k, _ = layer.nvfp4_sizes
        first = layer.nvfp4_loaders[ORDER].rank * blocks if k != all_k and blocks > 1 else 0
        return torch.where(order == UNORDERED, order, order - first)

    def _rows(self, role: str, tensor: torch.Tensor, start: int, rows: int) -> torch.Tensor:
        axes = self.axes[role]
        return tensor.narrow(axes.n, start // axes.n_values, rows // axes.n_values)

    def _weight(
        self, layer: Any, given: Tensors, own: Mapping[str, torch.Tensor]
    ) -> tuple[BlockScaledTensor, torch.Tensor | None]:
        """Returns the weights of some rows, and their order of K."""
        if self.scheme.weights == INT4:
            assert self.convention.unpack is not None
            return self.convention.unpack(
                _name(layer), given | {role: own[role] for role in (ORDER,) if role in own}
            )
        data, scale = given[DATA], given[SCALE]
        check_data(self._path(layer, DATA), self.scheme, data, scale, self._path(layer, SCALE))
        return stored_weight(self.scheme.weights, data, scale, own.get(GLOBAL)), None

    def _bias(self, layer: Any) -> torch.Tensor | None:
        """Returns the bias that vLLM passes with every call of a layer; in row-parallel layers only the first rank has it."""
        is_first = not isinstance(layer, RowParallelLinear) or layer.tp_rank == 0
        if not isinstance(layer, LinearBase) or not is_first or layer.skip_bias_add:
            return None
        bias = getattr(layer, "bias", None)
        return None if bias is None else bias.data


def _weight_of(module: torch.nn.Module) -> torch.Tensor | None:
    """Returns the tensor of a module that multiplies, without dequantizing it."""
    if isinstance(module, QuantizedLinear):
        return module.packed_weight
    return module.weight.data if isinstance(module, torch.nn.Linear) else None


def _of_part(own: Tensors, role: str, part: int) -> torch.Tensor | None:
    return own[role][part] if role in own else None


def _without_bias(part: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    zeros = {
        n: torch.zeros_like(t)
        for n, t in (*part.named_parameters(), *part.named_buffers())
        if n.endswith("bias")
    }
    return torch.func.functional_call(part, zeros, (x,))


def _name(layer: torch.nn.Module) -> str:
    return getattr(layer, "prefix", "") or type(layer).__name__
