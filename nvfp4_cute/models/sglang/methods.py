"""Linear layers and experts of NVFP4 checkpoints in SGLang.

Parameters have the names and shapes of ModelOpt's checkpoints, so SGLang's loaders fill them. After loading, modules of this
package take over the tensors and compute the layers.
"""

from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from sglang.srt.layers.moe import MoeRunnerBackend
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.parameter import ModelWeightParameter, PerTensorScaleParameter
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptNvFp4FusedMoEMethod

from nvfp4_cute import env
from nvfp4_cute.activation import Activation, ActivationName
from nvfp4_cute.errors import CheckpointError, UnsupportedProblem
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.models.checkpoints.stored import Scheme, StoredExperts, StoredLinear, stored_weight
from nvfp4_cute.models.layers import ACTIVATION_CHOICES, LayerActivations, experts_module, linear_module
from nvfp4_cute.nn import prepare

# ModelOpt's names of weight-only NVFP4, which SGLang's config refuses, and of NVFP4 with 4-bit activations.
WEIGHT_ONLY, BOTH = "W4A16_NVFP4", "NVFP4"
# Names in checkpoints: packed data, block scales, and the float32 global scales of weights and of activations.
WEIGHT, SCALE, WEIGHT_FACTOR, INPUT_FACTOR = "weight", "weight_scale", "weight_scale_2", "input_scale"
WAY_OUT = "start SGLang with SGLANG_PLUGINS=none to use its own kernels"
# Activation functions of experts with and without a gate. "gelu" is left out, because SGLang's kernels disagree on what it means.
GATED: tuple[ActivationName, ...] = ("silu",)
UNGATED: tuple[ActivationName, ...] = ("silu", "relu2")


class NVFP4Config(ModelOptFp4Config):
    """``quantization_config`` of a ModelOpt checkpoint whose layers are NVFP4, with 4-bit or 16-bit activations.

    Attributes:
        keeps_16_bits: whether activations stay in 16 bits, because the checkpoint is weight-only.
    """

    keeps_16_bits = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "NVFP4Config":
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
        return self._get_quant_method(layer, prefix, Linear=NVFP4LinearMethod, Moe=ModelOptExperts)

    @property
    def scheme(self) -> Scheme:
        """Formats of weights and activations of the quantized layers."""
        if self.keeps_16_bits:
            return Scheme(WEIGHT_ONLY, NVFP4.name, None)
        return Scheme(BOTH, NVFP4.name, NVFP4.name)


class NVFP4LinearMethod(LinearMethodBase):
    """Creates, loads and computes a linear layer, or several that SGLang merges, such as q, k and v."""

    def __init__(self, quant_config: NVFP4Config):
        self.quant_config = quant_config

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
        for name, made in matrices((rows,), k).items():
            layer.register_parameter(
                name, ModelWeightParameter(data=made, input_dim=1, output_dim=0, weight_loader=loader)
            )
        for name in (WEIGHT_FACTOR, INPUT_FACTOR):
            numbers = PerTensorScaleParameter(data=unknown(len(output_partition_sizes)), weight_loader=loader)
            numbers.needs_scalar_to_array = True
            layer.register_parameter(name, numbers)
        if self.quant_config.is_awq:
            ones = torch.ones(k, dtype=params_dtype)
            made = ModelWeightParameter(data=ones, input_dim=0, output_dim=0, weight_loader=loader)
            layer.register_parameter("pre_quant_scale", made)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks the loaded tensors, and makes ``layer.nvfp4``: the modules that compute the layer or its parts.

        Raises:
            CheckpointError: a global scale is missing, zero or not finite.
        """
        scheme = self.quant_config.scheme
        names = (SCALE, WEIGHT_FACTOR, INPUT_FACTOR, "pre_quant_scale")
        taken = {name: layer._parameters.pop(name).data for name in names if name in layer._parameters}
        factors = known(WEIGHT_FACTOR, taken[WEIGHT_FACTOR])
        inputs = None if scheme.activations is None else known(INPUT_FACTOR, taken[INPUT_FACTOR]).amax()
        # Parts with equal global scales become one product.
        is_one = bool((factors == factors[0]).all())
        sizes = [sum(layer.logical_widths)] if is_one else layer.logical_widths
        device, dtype, k = layer.weight.device, layer.params_dtype, layer.input_size_per_partition
        modules = []
        for data, scale, factor in zip(
            layer.weight.data.split(sizes), taken[SCALE].split(sizes), factors, strict=False
        ):
            weight = stored_weight(NVFP4.name, data, scale, factor)
            stored = StoredLinear(
                type(layer).__name__, scheme, weight, inputs, None, taken.get("pre_quant_scale")
            )
            modules.append(linear_module(stored, None, dtype=dtype, device=device, activations=activations()))
        # ``weight`` stays a parameter, because other code of SGLang reads it.
        layer.nvfp4 = torch.nn.ModuleList(modules)
        if device.type == "cuda":
            keys = [prepare.linear_kernels(module, k, most_rows(), dtype, device) for module in modules]
            prepare.load(chain.from_iterable(keys), device)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes ``x @ W^T + bias`` in one product, or in one per part if the parts' global scales differ."""
        parts = [part(x) for part in layer.nvfp4]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return joined if bias is None else joined + bias


class ModelOptExperts(ModelOptNvFp4FusedMoEMethod):
    """Creates, loads and computes the experts of a layer.

    SGLang's loader looks for "ModelOpt" in the name of the class.
    """

    # SGLang asks whether weights need the order of other libraries' kernels.
    enable_flashinfer_trtllm_moe = use_flashinfer_trtllm_weight_layout = load_up_proj_weight_first = False

    def __init__(self, quant_config: NVFP4Config):
        self.quant_config = quant_config

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
        for side, rows, k in (("w13", sides * width, hidden_size), ("w2", hidden_size, width)):
            for name, made in matrices((num_experts, rows), k).items():
                own = ModelWeightParameter(data=made, input_dim=1, output_dim=2, weight_loader=loader)
                layer.register_parameter(f"{side}_{name}", own)
            # SGLang loads scales of activations for the experts of all ranks.
            for name, count in ((WEIGHT_FACTOR, num_experts), (INPUT_FACTOR, layer.num_experts)):
                shape = (count, sides) if side == "w13" and sides > 1 else (count,)
                numbers = PerTensorScaleParameter(data=unknown(*shape), weight_loader=loader)
                numbers._sglang_require_global_experts = name == INPUT_FACTOR
                layer.register_parameter(f"{side}_{name}", numbers)

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        """Keeps the config. With the Marlin backend, SGLang's router leaves the layer's scaling factor to ``apply``."""
        self.moe_runner_config = moe_runner_config
        self._moe_runner_backend = MoeRunnerBackend.MARLIN

    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks the loaded tensors, and makes ``layer.nvfp4``, the module that computes the experts.

        Raises:
            CheckpointError: a global scale is missing, zero or not finite.
            UnsupportedProblem: no kernel computes the activation.
        """
        scheme, config = self.quant_config.scheme, self.moe_runner_config
        (w13, factor13, input13), (w2, factor2, input2) = (self._side(layer, side) for side in ("w13", "w2"))
        if config.is_gated and getattr(layer, "use_flashinfer_trtllm_moe", False):
            # With this backend SGLang loads up before gate.
            w13 = replace(w13, data=halves_swapped(w13.data), scale=halves_swapped(w13.scale))
            factor13 = factor13.flip(1)
        stored = StoredExperts(
            type(layer).__name__, scheme, w13, factor13, w2, factor2.reshape(-1), input13, input2, None, None,
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
        taken = {
            name: layer._parameters.pop(f"{side}_{name}").data
            for name in (WEIGHT, SCALE, WEIGHT_FACTOR, INPUT_FACTOR)
        }
        count = len(taken[WEIGHT])
        weight = stored_weight(NVFP4.name, taken[WEIGHT], taken[SCALE])
        factors = known(f"{side}_{WEIGHT_FACTOR}", taken[WEIGHT_FACTOR]).reshape(count, -1)
        if self.quant_config.scheme.activations is None:
            return weight, factors, None
        own = taken[INPUT_FACTOR][layer.moe_ep_rank * count :][:count]
        return weight, factors, known(f"{side}_{INPUT_FACTOR}", own).reshape(count, -1).amax(1)

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


def matrices(rows: tuple[int, ...], k: int) -> dict[str, torch.Tensor]:
    """Makes uninitialized data and block scales of weights [*rows, K], by their names in checkpoints."""
    return {
        WEIGHT: torch.empty(*rows, NVFP4.row_bytes(k), dtype=torch.uint8),
        SCALE: torch.empty(*rows, NVFP4.num_k_blocks(k), dtype=torch.float8_e4m3fn),
    }


def unknown(*shape: int) -> torch.Tensor:
    """Makes float32 scales that are NaN until a file's scales are loaded."""
    return torch.full(shape, torch.nan, dtype=torch.float32)


def known(name: str, numbers: torch.Tensor) -> torch.Tensor:
    """Returns loaded scales. Raises CheckpointError if one is missing, not positive or not finite."""
    if not bool(((numbers > 0) & numbers.isfinite()).all()):
        raise CheckpointError(
            f"{name} has {numbers.flatten()[:4].tolist()}: a file of the checkpoint is missing, or the scale is zero or not "
            "finite; fetch the files again"
        )
    return numbers


def halves_swapped(rows: torch.Tensor) -> torch.Tensor:
    """Exchanges the two halves of rows [E, 2 I, ...]."""
    return torch.cat(rows.chunk(2, 1)[::-1], 1)


def most_rows() -> int:
    """Returns the largest number of rows per call, from SGLang's arguments; ``prepare.MAX_ROWS`` if they have no limit."""
    given = None
    # Newer and older versions of SGLang.
    places = (("runtime_context", "get_schedule"), ("server_args", "get_global_server_args"))
    for module, name in places:
        with suppress(ImportError, AttributeError, RuntimeError, ValueError):
            given = getattr(import_module(f"sglang.srt.{module}"), name)()
            break
    sizes = (getattr(given, key, None) for key in ("chunked_prefill_size", "max_prefill_tokens"))
    return next((size for size in sizes if size and size > 0), prepare.MAX_ROWS)
