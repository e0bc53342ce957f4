"""vLLM experts with NVFP4, MXFP4 or int4 weights."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from nvfp4_cute.errors import CheckpointError, UnsupportedTarget
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.models.checkpoints.axes import axes_of
from nvfp4_cute.models.checkpoints.checkpoint import MissingInputScale, stacked
from nvfp4_cute.models.checkpoints.checks import check_data
from nvfp4_cute.models.checkpoints.convention import (
    BIAS,
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
from nvfp4_cute.models.checkpoints.stored import INT4, Scheme, StoredExperts, stored_weight
from nvfp4_cute.models.layers import LayerActivations, experts_module
from nvfp4_cute.models.vllm.activations import INTERLEAVED, activation_of
from nvfp4_cute.models.vllm.graphs import add_to_key
from nvfp4_cute.models.vllm.kernels import KERNELS
from nvfp4_cute.models.vllm.parameters import (
    CUT,
    NUMBER,
    ExpertsLoader,
    Matrix,
    check_complete,
    copy_leading,
    factors,
    is_dummy,
    make_up_dummies,
    unknown_numbers,
)
from nvfp4_cute.nn.experts import SortedExperts
from nvfp4_cute.nn.linear import K_STEP

MXFP4_TOOL = "mxfp4"  # the reader of gpt-oss
# Role of a tensor with all experts -> vLLM's name.
GPT_OSS = {DATA: "weight", SCALE: "weight_scale", BIAS: "bias"}


class ExpertsMethod(FusedMoEMethodBase):
    """Creates, loads and computes the experts of a layer.

    Args:
        scheme: how they are quantized.
        convention: convention of the checkpoint.
        moe: vLLM's config of the layer.
        missing_input_scale: see ``checkpoints.Checkpoint``.
        activations: mode of W4A4 or MXFP4 experts; see ``layers.experts_module``.
    """

    supports_eplb = True

    def __init__(
        self,
        scheme: Scheme,
        convention: Convention,
        moe: Any,
        missing_input_scale: MissingInputScale = "refuse",
        activations: LayerActivations = "nvfp4",
    ):
        super().__init__(moe)
        self.scheme, self.convention, self.activations = scheme, convention, activations
        self.missing_input_scale = missing_input_scale
        self.axes = axes_of(scheme, convention.tool)
        self.numbers = [role for role in (GLOBAL, INPUT) if role in needed_roles(scheme)]
        self.model_config = get_current_vllm_config()

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """Returns None, because rows are quantized inside the layer."""
        return None

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *arguments: Any, **options: Any
    ) -> tuple[int, int]:
        """Rounds the width of 4-bit float experts up to the alignment of kernels' rows; vLLM pads with zeros."""
        hidden, width = super().maybe_roundup_sizes(
            hidden_size, intermediate_size_per_partition, *arguments, **options
        )
        return hidden, width if self.scheme.weights == INT4 else -(-width // K_STEP) * K_STEP

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Creates the parameters of one rank's experts, which RoutedExperts.weight_loader fills."""
        layer.nvfp4_activation = activation_of(layer.layer_name, layer.activation.value, layer.moe_config)
        sides = 2 if layer.moe_config.is_act_and_mul else 1
        width, loader = intermediate_size_per_partition, extra_weight_attrs["weight_loader"]
        layer.nvfp4_loaders = {}
        for name, rows, k, all_k, parts in (
            ("w13", sides * width, hidden_size, hidden_size, sides * num_experts),
            ("w2", hidden_size, width, layer.moe_config.intermediate_size, num_experts),
        ):
            own = layer.nvfp4_loaders[name] = {}
            for role, axes in self.axes.items():
                matrix = Matrix(self._path(layer, name, role), axes, num_experts, rows, k, all_k)
                own[role] = ExpertsLoader(matrix, loader, parts)
                self._register(layer, name, role, matrix.empty(), CUT, own[role])
                layer._parameters[self._key(name, role)].is_transposed = axes.n == 1
            numbers = (num_experts, sides) if name == "w13" else (num_experts,)
            for role in self.numbers:
                self._register(layer, name, role, unknown_numbers(*numbers), NUMBER, _by_projection(loader))
            for role in set(self.convention.suffixes.values()) & set(WITHOUT_PLACE):
                check = partial(WITHOUT_PLACE[role], self._path(layer, name, role), all_k)
                self._register(layer, name, role, torch.zeros(1), NUMBER, partial(_checked, check))
            if layer.moe_config.has_bias:
                empty = torch.full((num_experts, rows), torch.nan, dtype=params_dtype)
                self._register(layer, name, BIAS, empty, CUT, copy_leading)
        layer.nvfp4_dtype = params_dtype

    def _key(self, name: str, role: str) -> str:
        named = GPT_OSS if self.convention.tool == MXFP4_TOOL else {}
        return f"{name}_{named.get(role) or self.convention.name_of(role)}"

    def _path(self, layer: Any, name: str, role: str) -> str:
        return f"{layer.layer_name}.{self._key(name, role)}"

    def _register(self, layer, name: str, role: str, tensor: torch.Tensor, kind: str, loader: Any) -> None:
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        set_weight_attrs(parameter, {"weight_loader": loader, "quant_method": kind})
        layer.register_parameter(self._key(name, role), parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks the loaded tensors, and makes ``layer.nvfp4``, which computes.

        Raises:
            CheckpointError: a tensor, which the message names, is missing, zero or not finite.
            UnsupportedTarget: CUDA graphs are requested, and the GPU has no kernel for these experts that can be captured.
        """
        bias13, bias2 = (self._bias(layer, name) for name in ("w13", "w2"))
        sides = {name: self._side(layer, name) for name in ("w13", "w2")}
        (w13, factor13, input13), (w2, factor2, input2) = sides["w13"], sides["w2"]
        if layer.activation.value == INTERLEAVED:
            w13 = replace(w13, data=gate_first(w13.data), scale=gate_first(w13.scale))
            bias13 = None if bias13 is None else gate_first(bias13)
        if input13 is not None:
            input13 = input13.amax(1)  # gate and up read the same rows
        stored = StoredExperts(
            layer.layer_name, self.scheme, w13, factor13, w2, factor2, input13, input2, bias13, bias2,
            has_gate=layer.moe_config.is_act_and_mul,
        )  # fmt: skip
        device, is_moving = w13.data.device, layer.moe_config.moe_parallel_config.enable_eplb
        module: Any = experts_module(
            stored,
            layer.nvfp4_activation,
            dtype=layer.nvfp4_dtype,
            device=device,
            keep_two_factors=is_moving,
            # Experts that move between ranks have one set of factors, which vLLM copies.
            activations="nvfp4" if is_moving and self.activations == "by_rows" else self.activations,
        )
        is_captured = device.type == "cuda" and not get_current_vllm_config().model_config.enforce_eager
        if is_captured and isinstance(module, SortedExperts) and module.waits(device):
            raise UnsupportedTarget(
                f"{layer.layer_name}: experts of {self.scheme} have no kernel on this GPU that a CUDA graph can hold; pass "
                "--enforce-eager, or --quantization with one of vLLM's own methods"
            )
        if is_moving:
            as_moving_parameters(module)
        layer.nvfp4 = module
        add_to_key(self.model_config, layer.layer_name, module)
        moe = layer.moe_config
        KERNELS.add_experts(module, moe.hidden_dim, moe.experts_per_token, layer.nvfp4_dtype, device)

    def _side(
        self, layer: Any, name: str
    ) -> tuple[BlockScaledTensor, torch.Tensor | None, torch.Tensor | None]:
        """Returns a projection's weights, their global scales, and those of activations; deletes the layer's parameters."""
        roles = (*self.axes, *self.numbers, *WITHOUT_PLACE)
        taken = {r: t for r in roles if (t := layer._parameters.pop(self._key(name, r), None)) is not None}
        optional = {ZERO} - set(needed_roles(self.scheme))
        found = check_complete(layer.nvfp4_loaders[name], taken, optional)
        given = {
            role: taken[role].data for role in (*self.axes, *self.numbers) if role in {*found, *self.numbers}
        }
        if self.scheme.weights == INT4:
            return self._int4(layer, name, given), None, None
        path = {role: self._path(layer, name, role) for role in given}
        make_up_dummies(*(tensor for role, tensor in given.items() if role != DATA))
        data, scale = given[DATA], given[SCALE]
        check_data(path[DATA], self.scheme, data, scale, path[SCALE])
        weight = stored_weight(self.scheme.weights, data, scale)
        if GLOBAL not in given:
            return weight, None, None
        factor = factors(path[GLOBAL], given[GLOBAL], self.convention)
        if INPUT not in given:
            return weight, factor, None
        inputs = given[INPUT]
        if self.missing_input_scale == "fill":
            inputs = filled(inputs, self.convention.is_reciprocal)
        return weight, factor, factors(path[INPUT], inputs, self.convention)

    def _bias(self, layer: Any, name: str) -> torch.Tensor | None:
        """Returns a projection's biases, zero in rows that pad a rank's share; deletes the parameter."""
        bias = layer._parameters.pop(self._key(name, BIAS), None)
        if bias is None:
            return None
        if bool(bias.isnan().all()) and not is_dummy():
            raise CheckpointError(
                f"{self._path(layer, name, BIAS)} is in no file of the checkpoint; a file is missing"
            )
        return bias.data.nan_to_num(0.0)

    def _int4(self, layer: Any, name: str, given: dict[str, torch.Tensor]) -> BlockScaledTensor:
        assert self.convention.unpack is not None
        read = []
        for e in range(len(given[DATA])):
            one = {role: tensor[e] for role, tensor in given.items()}
            read.append(self.convention.unpack(f"{layer.layer_name}.{e}.{name}", one)[0])
        return stacked(layer.layer_name, name, read)[0]

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the experts' sum for every row; vLLM adds the result of shared experts."""
        ids = topk_ids
        if layer.expert_map is not None:
            ids = layer.expert_map[ids.clamp(min=0).long()].to(ids.dtype).masked_fill(ids < 0, -1)
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        return layer.nvfp4(x, ids, topk_weights)


def gate_first(rows: torch.Tensor) -> torch.Tensor:
    """Moves rows [E, 2 I, ...] that alternate between gate and up to [gate; up]."""
    return torch.cat([rows[:, ::2], rows[:, 1::2]], 1)


def filled(stored: torch.Tensor, is_reciprocal: bool) -> torch.Tensor:
    """Returns stored scales, where experts that no token reached get the scale of the largest activations."""
    is_known = (stored > 0) & torch.isfinite(stored)
    if not bool(is_known.any()):
        return stored
    known = stored[is_known]
    return torch.where(is_known, stored, known.amin() if is_reciprocal else known.amax())


def _by_projection(loader: Any) -> Any:
    """Wraps ``loader`` for scales of activations, which it would read as one number per expert instead of one per projection.

    vLLM infers a parameter's contents from its name; it treats "input_global_scale" according to ``quant_method``.
    """

    def load(
        param: torch.nn.Parameter, loaded_weight: torch.Tensor, weight_name: str, *rest: Any, **options: Any
    ):
        return loader(
            param, loaded_weight, weight_name.replace("input_scale", "input_global_scale"), *rest, **options
        )

    return load


def _check_unordered(name: str, k: int, loaded: torch.Tensor) -> None:
    """Raises if adjacent values along K belong to different blocks; -1 everywhere means that they do not."""
    step = k // (int(loaded.max()) + 1) if bool((loaded >= 0).all()) else 0
    if step and not torch.equal(loaded.long(), torch.arange(k) // step):
        raise CheckpointError(
            f"{name} orders K by activations, which experts of this plug-in do not follow; export the model with desc_act=False, "
            'or actorder "static", or pass --quantization with one of vLLM\'s own methods'
        )


def _check_no_factors(name: str, k: int, loaded: torch.Tensor) -> None:
    """Raises, because activations of experts cannot have factors of their own."""
    raise CheckpointError(
        f"{name} has factors of activations, which experts of this plug-in do not have; export the model without AWQ"
    )


def _check_shape(name: str, k: int, loaded: torch.Tensor) -> None:
    """Raises if the weights had another K before they were packed."""
    if int(loaded[1]) != k:
        raise CheckpointError(
            f"{name} is {loaded.tolist()}, and by config.json K is {k}: these are different models, or K is not a multiple of 8"
        )


# Roles of tensors that are not stored with the experts' weights, and the functions that check them.
WITHOUT_PLACE = {ORDER: _check_unordered, PRE: _check_no_factors, SHAPE: _check_shape}


def _checked(
    check: Any, param: torch.nn.Parameter, loaded_weight: torch.Tensor, *rest: Any, **options: Any
) -> bool:
    """A loader that checks what is loaded, and stores nothing."""
    check(loaded_weight)
    return True


def as_moving_parameters(module: torch.nn.Module) -> None:
    """Turns all tensors of the experts into parameters with experts first, which vLLM moves between ranks (EPLB).

    vLLM copies rows of every parameter of the layer in place. Factors that are stored in columns become views with experts
    first.
    """
    for part in module.modules():
        for name, tensor in list(part._buffers.items()):
            if tensor is None:
                continue
            if name == "alpha13":
                for side, row in zip(("gate", "up"), tensor, strict=True):
                    part.register_parameter(f"alpha_{side}", torch.nn.Parameter(row, requires_grad=False))
                part.has_two_alphas = True  # type: ignore[assignment]
            elif tensor.ndim:
                del part._buffers[name]
                part.register_parameter(name, torch.nn.Parameter(tensor.contiguous(), requires_grad=False))
