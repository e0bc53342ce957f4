"""Linear layers and experts of NVFP4 checkpoints in SGLang.

Parameters have the names and shapes of the checkpoint's tensors, so SGLang's loaders fill them. After loading, modules of this
package take over the tensors and compute the layers.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE, FusedMoeWeightScaleSupported
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.parameter import ModelWeightParameter, PerTensorScaleParameter
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, LinearMethodBase
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptMixedPrecisionConfig
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.runtime_context import get_schedule

from nvfp4_cute import env
from nvfp4_cute.activation import Activation, ActivationName
from nvfp4_cute.errors import CheckpointError, UnsupportedProblem
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.models.checkpoints.stored import Scheme, StoredExperts, StoredLinear, stored_weight
from nvfp4_cute.models.layers import (
    ACTIVATION_CHOICES,
    LayerActivations,
    experts_module,
    linear_module,
    product_sizes,
)
from nvfp4_cute.nn import prepare

# ModelOpt's names of weight-only NVFP4, which SGLang's config refuses, and of NVFP4 with 4-bit activations.
WEIGHT_ONLY, BOTH = "W4A16_NVFP4", "NVFP4"
SCHEMES = {
    WEIGHT_ONLY: Scheme(WEIGHT_ONLY, NVFP4.name, None),
    BOTH: Scheme(BOTH, NVFP4.name, NVFP4.name),
}
WAY_OUT = "start SGLang with SGLANG_PLUGINS=none to use its own kernels"
# Activation functions of experts with and without a gate. "gelu" is left out, because SGLang's kernels disagree on what it means.
GATED: tuple[ActivationName, ...] = ("silu",)
UNGATED: tuple[ActivationName, ...] = ("silu", "relu2")


@dataclass(frozen=True)
class Names:
    """Names of a layer's tensors in the checkpoints of a tool.

    Attributes:
        weight: packed data.
        scale: block scales.
        weight_factor: float32 global scale of the weights.
        input_factor: float32 global scale of the activations.
        is_reciprocal: whether dequantizing divides by global scales.
    """

    weight: str
    scale: str
    weight_factor: str
    input_factor: str
    is_reciprocal: bool

    def known(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """Returns loaded global scales, which multiply. Raises CheckpointError if one is missing, not positive or not finite."""
        if not bool(((numbers > 0) & numbers.isfinite()).all()):
            raise CheckpointError(
                f"{name} has {numbers.flatten()[:4].tolist()}: a file of the checkpoint is missing, or the scale is zero or not "
                "finite; fetch the files again"
            )
        return 1 / numbers if self.is_reciprocal else numbers


MODELOPT = Names("weight", "weight_scale", "weight_scale_2", "input_scale", is_reciprocal=False)
COMPRESSED = Names(
    "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", is_reciprocal=True
)


class ModelOptConfig(ModelOptFp4Config):
    """``quantization_config`` of a ModelOpt checkpoint whose layers are NVFP4, with 4-bit or 16-bit activations.

    Attributes:
        keeps_16_bits: whether activations stay in 16 bits, because the checkpoint is weight-only.
    """

    keeps_16_bits = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ModelOptConfig":
        """Reads the entry of config.json, or all of hf_quant_config.json."""
        is_nested = "quantization" in config
        entry = config["quantization"] if is_nested else config
        is_weight_only = entry.get("quant_algo") == WEIGHT_ONLY
        if is_weight_only:
            entry = entry | {"quant_algo": BOTH}
        made = super().from_config(config | {"quantization": entry} if is_nested else entry)
        made.keeps_16_bits = is_weight_only
        return made

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Returns the object that creates, loads and computes a layer; None for a layer that this method does not handle."""
        if not self.is_checkpoint_nvfp4_serialized:
            return super().get_quant_method(layer, prefix)
        return modelopt_method(
            self, SCHEMES[WEIGHT_ONLY if self.keeps_16_bits else BOTH], layer, prefix, self.is_awq
        )


class MixedConfig(ModelOptMixedPrecisionConfig):
    """``quantization_config`` of a ModelOpt checkpoint with several formats. SGLang computes layers that are not NVFP4."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Returns the object that creates, loads and computes a layer; None for a layer that this method does not handle."""
        scheme = SCHEMES.get(self._resolve_quant_algo(prefix) or "")
        if scheme is None or not isinstance(layer, LinearBase | ParallelLMHead | FusedMoE):
            return super().get_quant_method(layer, prefix)
        return modelopt_method(self, scheme, layer, prefix)


class CompressedConfig(CompressedTensorsConfig):
    """``quantization_config`` of a compressed-tensors checkpoint. SGLang's own methods compute layers that are not NVFP4."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Returns the object that creates, loads and computes a layer; None for a layer that this method does not handle."""
        kinds = {LinearBase: NVFP4LinearMethod, FusedMoE: NVFP4Experts}
        method = next((method for kind, method in kinds.items() if isinstance(layer, kind)), None)
        scheme = None if method is None else self._scheme(layer, prefix)
        if method is None or scheme is None:
            return super().get_quant_method(layer, prefix)
        return method(COMPRESSED, scheme)

    def _scheme(self, layer: torch.nn.Module, prefix: str) -> Scheme | None:
        """Returns the scheme of a layer in NVFP4; None if a part of it has another one, or if weights are sparse or rotated."""
        names = [prefix]
        if isinstance(layer, FusedMoE):
            self._add_fused_moe_to_target_scheme_map()
            names = [f"{prefix}.0.{part}_proj" for part in ("gate", "up", "down")]
        elif self.linear_fp8_config is not None:
            return None
        found = [self.get_scheme_dict(layer, name) for name in names]
        if self.sparsity_scheme_map or self.config.get("transform_config"):
            return None
        if not found[0] or any(one != found[0] for one in found):
            return None
        weights, activations = found[0]["weights"], found[0]["input_activations"]
        if not is_nvfp4(weights) or not (activations is None or is_nvfp4(activations)):
            return None
        return SCHEMES[WEIGHT_ONLY if activations is None else BOTH]


def modelopt_method(
    config: Any, scheme: Scheme, layer: torch.nn.Module, prefix: str, is_awq: bool = False
) -> Any:
    """Returns the method of a layer in NVFP4, or SGLang's for a layer that the checkpoint leaves in 16 bits."""
    return config._get_quant_method(
        layer,
        prefix,
        Linear=lambda _: NVFP4LinearMethod(MODELOPT, scheme, is_awq),
        Moe=lambda _: NVFP4Experts(MODELOPT, scheme),
    )


def is_nvfp4(args: Any) -> bool:
    """Returns whether compressed-tensors' QuantizationArgs describe NVFP4."""
    given = args.num_bits, args.type, args.strategy, args.group_size
    return given == (4, "float", "tensor_group", NVFP4.block_k)


class NVFP4LinearMethod(LinearMethodBase):
    """Creates, loads and computes a linear layer, or several that SGLang merges, such as q, k and v."""

    def __init__(self, names: Names, scheme: Scheme, has_pre_scale: bool = False):
        """``has_pre_scale``: whether activations are multiplied by ``pre_quant_scale`` (AWQ)."""
        self.names, self.scheme, self.has_pre_scale = names, scheme, has_pre_scale

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
        """Creates the parameters of one rank's part."""
        loader, k = extra_weight_attrs["weight_loader"], input_size_per_partition
        layer.logical_widths, layer.input_size_per_partition = output_partition_sizes, k
        layer.params_dtype, rows = params_dtype, sum(output_partition_sizes)
        for name, made in matrices(self.names, (rows,), k).items():
            layer.register_parameter(
                name, ModelWeightParameter(data=made, input_dim=1, output_dim=0, weight_loader=loader)
            )
        for name in (self.names.weight_factor, self.names.input_factor):
            numbers = PerTensorScaleParameter(data=unknown(len(output_partition_sizes)), weight_loader=loader)
            numbers.needs_scalar_to_array = True
            layer.register_parameter(name, numbers)
        if self.has_pre_scale:
            ones = torch.ones(k, dtype=params_dtype)
            made = ModelWeightParameter(data=ones, input_dim=0, output_dim=0, weight_loader=loader)
            layer.register_parameter("pre_quant_scale", made)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks the loaded tensors, and makes ``layer.nvfp4``: the modules that compute the layer or its parts.

        Raises:
            CheckpointError: a global scale is missing, zero or not finite.
        """
        names = self.names
        taken = {name: parameter.data for name, parameter in layer._parameters.items() if name != "bias"}
        for name in taken:
            del layer._parameters[name]
        factors = names.known(names.weight_factor, taken[names.weight_factor])
        has_inputs = self.scheme.activations is not None
        inputs = names.known(names.input_factor, taken[names.input_factor]).amax() if has_inputs else None
        sizes = product_sizes(layer.logical_widths, [factors])
        # Other code of SGLang reads ``weight``.
        layer.weight = torch.nn.Parameter(taken[names.weight], requires_grad=False)
        device, dtype, k = layer.weight.device, layer.params_dtype, layer.input_size_per_partition
        modules = []
        for data, scale, factor in zip(
            taken[names.weight].split(sizes), taken[names.scale].split(sizes), factors, strict=False
        ):
            weight = stored_weight(NVFP4.name, data, scale, factor)
            stored = StoredLinear(
                type(layer).__name__, self.scheme, weight, inputs, None, taken.get("pre_quant_scale")
            )
            modules.append(linear_module(stored, None, dtype=dtype, device=device, activations=activations()))
        layer.nvfp4 = torch.nn.ModuleList(modules)
        if device.type == "cuda":
            keys = [prepare.linear_kernels(module, k, most_rows(), dtype, device) for module in modules]
            prepare.load(chain.from_iterable(keys), device)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes ``x @ W^T + bias`` in one product, or in one per part if the parts' global scales differ."""
        parts = [part(x) for part in layer.nvfp4]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return joined if bias is None else joined + bias


class NVFP4Experts(FusedMoEMethodBase):
    """Creates, loads and computes the experts of a layer."""

    def __init__(self, names: Names, scheme: Scheme):
        self.names, self.scheme = names, scheme

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Creates the parameters of one rank's experts.

        Raises:
            UnsupportedProblem: the layer has biases, or rows of gate and up that alternate.
        """
        is_interleaved = getattr(layer, "inference_moe_w13_interleaved", False)
        if extra_weight_attrs.get("with_bias") or is_interleaved:
            raise UnsupportedProblem(
                f"experts with {'alternating rows of gate and up' if is_interleaved else 'biases'} are not among those that the "
                f"nvfp4_cute plug-in of SGLang computes; {WAY_OUT}"
            )
        loader, width = extra_weight_attrs["weight_loader"], intermediate_size_per_partition
        sides = 2 if layer.moe_runner_config.is_gated else 1
        layer.params_dtype = params_dtype
        names, kinds = self.names, FusedMoeWeightScaleSupported
        for side, rows, k in (("w13", sides * width, hidden_size), ("w2", hidden_size, width)):
            made = matrices(names, (num_experts, rows), k)
            shape = (num_experts, sides) if side == "w13" and sides > 1 else (num_experts,)
            made |= {name: unknown(*shape) for name in (names.weight_factor, names.input_factor)}
            for name, data in made.items():
                kind = kinds.TENSOR if data.dtype == torch.float32 else kinds.GROUP
                parameter = torch.nn.Parameter(data, requires_grad=False)
                vars(parameter).update(weight_loader=loader, quant_method=kind.value)
                layer.register_parameter(f"{side}_{name}", parameter)

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        """Keeps the config."""
        self.moe_runner_config = moe_runner_config

    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks the loaded tensors, and makes ``layer.nvfp4``, the module that computes the experts.

        Raises:
            CheckpointError: a global scale is missing, zero or not finite.
            UnsupportedProblem: no kernel computes the activation.
        """
        config = self.moe_runner_config
        (w13, factor13, input13), (w2, factor2, input2) = (self._side(layer, side) for side in ("w13", "w2"))
        stored = StoredExperts(
            type(layer).__name__, self.scheme, w13, factor13, w2, factor2.reshape(-1), input13, input2, None, None,
            has_gate=config.is_gated,
        )  # fmt: skip
        device, dtype, count = w2.data.device, layer.params_dtype, len(w2.data)
        layer.nvfp4 = experts_module(
            stored, activation_of(config), dtype=dtype, device=device, activations=activations()
        )
        if device.type == "cuda":
            sizes = config.hidden_size, count, config.top_k, most_rows()
            prepare.load(prepare.expert_kernels(layer.nvfp4, *sizes, dtype, device), device)

    def _side(self, layer: Any, side: str) -> tuple[BlockScaledTensor, torch.Tensor, torch.Tensor | None]:
        """Removes a projection's parameters. Returns weights, their global scales [E, 1 or 2], and those of activations [E]."""
        names = self.names
        weight, scale, factor, inputs = (
            layer._parameters.pop(f"{side}_{name}").data
            for name in (names.weight, names.scale, names.weight_factor, names.input_factor)
        )
        stored, count = stored_weight(NVFP4.name, weight, scale), len(weight)
        factors = names.known(f"{side}_{names.weight_factor}", factor).reshape(count, -1)
        if self.scheme.activations is None:
            return stored, factors, None
        return stored, factors, names.known(f"{side}_{names.input_factor}", inputs).reshape(count, -1).amax(1)

    def apply(self, layer: Any, dispatch_output: Any) -> StandardCombineInput:
        """Returns the weighted sum of the experts' results per row. Ids of -1 are experts of other ranks."""
        x, chosen, config = dispatch_output.hidden_states, dispatch_output.topk_output, self.moe_runner_config
        weights = chosen.topk_weights
        if config.routed_scaling_factor is not None:
            weights = weights * config.routed_scaling_factor
        if config.apply_router_weight_on_input:
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        return StandardCombineInput(layer.nvfp4(x, chosen.topk_ids, weights))


def activation_of(config: Any) -> Activation:
    """Returns the activation function of a layer's experts. Raises UnsupportedProblem for one that the plug-in does not have."""
    names = GATED if config.is_gated else UNGATED
    name = next((one for one in names if one == config.activation), None)
    limit = config.swiglu_limit or None
    has_other = config.gemm1_alpha is not None or config.gemm1_clamp_limit is not None
    if name is None or has_other or (limit is not None and name != "silu"):
        raise UnsupportedProblem(
            f"activation {config.activation!r} (limit {limit}, alpha {config.gemm1_alpha}): the nvfp4_cute plug-in of SGLang has "
            f"{', '.join(names)}, and limits of silu; {WAY_OUT}"
        )
    return Activation(name, limit)


def activations() -> LayerActivations:
    """Returns the activations of W4A4 layers, from the environment. By default, and for "fp8", each call chooses by its rows."""
    chosen = ACTIVATION_CHOICES[env.activations() or "auto"]
    return "by_rows" if chosen == "fp8" else chosen


def matrices(names: Names, rows: tuple[int, ...], k: int) -> dict[str, torch.Tensor]:
    """Makes uninitialized data and block scales of weights [*rows, K], by their names in checkpoints."""
    return {
        names.weight: torch.empty(*rows, NVFP4.row_bytes(k), dtype=torch.uint8),
        names.scale: torch.empty(*rows, NVFP4.num_k_blocks(k), dtype=torch.float8_e4m3fn),
    }


def unknown(*shape: int) -> torch.Tensor:
    """Makes float32 scales that are NaN until a file's scales are loaded."""
    return torch.full(shape, torch.nan, dtype=torch.float32)


def most_rows() -> int:
    """Returns the largest number of rows per call, from SGLang's arguments. A chunk of -1 or None has no limit of its own."""
    given = get_schedule()
    chunk = given.chunked_prefill_size
    return chunk if chunk and chunk > 0 else given.max_prefill_tokens
