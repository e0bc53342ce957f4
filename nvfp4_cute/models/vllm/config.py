"""Decides how each layer of a model is quantized: a vLLM method that reads the configs of ``models.checkpoints``."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_safetensors_params_metadata

from nvfp4_cute.errors import CheckpointError, UnsupportedProblem
from nvfp4_cute.formats.block_format import MXFP4
from nvfp4_cute.gpus.targets import arch_of_capability
from nvfp4_cute.models.checkpoints.checkpoint import convention_of
from nvfp4_cute.models.checkpoints.convention import DATA
from nvfp4_cute.models.checkpoints.names import is_embedding, spellings
from nvfp4_cute.models.checkpoints.stored import Scheme
from nvfp4_cute.models.layers import ACTIVATION_CHOICES, LayerActivations
from nvfp4_cute.models.vllm.experts import ExpertsMethod
from nvfp4_cute.models.vllm.linear import LinearMethod
from nvfp4_cute.models.vllm.taken import (
    ACTIVATIONS,
    FP8_ROWS,
    MIXED,
    NAME,
    asked_activations,
    asks,
    is_ours,
    original,
    refusal,
)
from nvfp4_cute.planning.arch.simt import ARCHS

# Keys of a config with names or patterns of modules.
LISTS = ("ignore", "exclude_modules")
# Key that users may add to a config; values are those of ``checkpoints.Checkpoint``.
MISSING = "missing_input_scale"
# Prefix that vLLM adds to the module names of a draft model.
DRAFT = "draft_model."
# Layers that vLLM merges into others. It multiplies ones by them to get their weights, and those ones would be quantized.
ABSORBED = ("kv_b_proj",)


class CheckpointConfig(QuantizationConfig):
    """``quantization_config`` of a checkpoint with NVFP4, int4 or MXFP4 weights.

    Args:
        quantization: the entry of config.json, or all of hf_quant_config.json.
    """

    name = NAME

    def __init__(self, quantization: Mapping[str, Any]):
        super().__init__()
        self.quantization = original(quantization)
        self.convention = convention_of(self.quantization)
        # Layers with packed tensors, in all spellings, if the config does not name the quantized layers.
        self.packed: set[str] | None = None
        # vLLM's own config, for layers with other schemes.
        self._plain, self._mapper = dict(quantization), None
        self._vllms: QuantizationConfig | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "convention"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # in another rank's process
        self.convention = convention_of(self.quantization)

    # ---- methods that vLLM calls on the class -------------------------------------------------------------------------

    def get_name(self) -> str:
        """Returns the name with which the method is registered."""
        return self.name

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Lists the dtypes of activations; float32 is rounded to bfloat16, since kernels read 16 bits."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Returns no minimum, because ``override_quantization_method`` checks the GPU."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Returns the file in which older checkpoints of ModelOpt have the config."""
        return ["hf_quant_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CheckpointConfig":
        """Makes a config from the dict that vLLM read."""
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Returns this method's name for a checkpoint that it supports, unless the user names another method.

        ``taken.refusal`` says which checkpoints it supports, on the CPU and on GPUs with kernels.

        Raises:
            UnsupportedProblem: the user names this method, which does not support the checkpoint.
        """
        if hf_quant_cfg is None or user_quant not in (None, cls.name):
            return None
        is_asked = asks(hf_quant_cfg, user_quant)
        reason = refusal(hf_quant_cfg, getattr(hf_config, "model_type", None), is_asked)
        if reason is None and not _has_kernel():
            reason = "this package has no kernels for this GPU"
        if reason is not None and user_quant == cls.name:
            raise UnsupportedProblem(f"--quantization {cls.name}: {reason}; leave the option out")
        return cls.name if reason is None else None

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """Keeps all tensors; vLLM would drop orders of K, which its own kernels do not support."""
        return WeightsMapper()

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Finds the layers with packed tensors if the config does not name the quantized layers (AutoGPTQ, AutoAWQ).

        Raises:
            CheckpointError: files cannot be read, or none has packed tensors.
        """
        if self.convention.names_layers:
            return
        data = self.convention.name_of(DATA)
        names = get_safetensors_params_metadata(model_name, revision=revision)
        layers = [name.removesuffix(f".{data}") for name in names if name.endswith(f".{data}")]
        self.packed = {spelling for layer in layers for spelling in spellings(layer)}
        if not self.packed:
            raise CheckpointError(
                f"{model_name} has no *.safetensors with a {data}, which says what is quantized; fetch its files, or pass "
                "--quantization with one of vLLM's own methods"
            )

    # ---- layers --------------------------------------------------------------------------------------------------

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Adds vLLM's spellings to the names of modules."""
        self._mapper = hf_to_vllm_mapper
        self.quantization = renamed(self.quantization, hf_to_vllm_mapper)
        self.convention = convention_of(self.quantization)
        if self.packed is not None:
            self.packed |= set(hf_to_vllm_mapper.apply_list(sorted(self.packed)))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Returns the object that creates, loads and computes a layer; None for a layer that this method does not handle.

        Raises:
            CheckpointError: vLLM merges layers of which only some are quantized.
            UnsupportedProblem: LoRA adapters are enabled for experts.
        """
        if isinstance(layer, Attention | MLAAttention):
            return BaseKVCacheMethod(self)
        prefix = prefix.removeprefix(DRAFT)
        if isinstance(layer, RoutedExperts):
            check_no_lora(prefix)
            names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
            scheme = self._scheme(prefix, [f"{prefix}.0.{name}" for name in names if name is not None])
            if scheme is None:
                return None
            if not is_ours(scheme):
                return self._of_vllm().get_quant_method(layer, prefix)
            options = {
                "missing_input_scale": self.quantization.get(MISSING, "refuse"),
                "activations": self.activations_of(scheme),
            }
            return ExpertsMethod(scheme, self.convention, layer.moe_config, **options)
        if not isinstance(layer, LinearBase | ParallelLMHead):
            if isinstance(layer, VocabParallelEmbedding) and names_embedding(self.quantization):
                raise CheckpointError(
                    f"{prefix} is quantized, and vLLM's embedding is not; quantize the model without --embedding"
                )
            return None
        around, _, last = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(last, [last])
        scheme = self._scheme(prefix, [f"{around}.{part}".removeprefix(".") for part in parts])
        if scheme is None:
            return UnquantizedLinearMethod()
        if not is_ours(scheme):
            return self._of_vllm().get_quant_method(layer, prefix)
        return LinearMethod(
            scheme,
            self.convention,
            keeps_16_bits=last in ABSORBED,
            activations=self.activations_of(scheme, last in ABSORBED),
        )

    def _of_vllm(self) -> QuantizationConfig:
        """Returns vLLM's own method for this checkpoint, which computes layers with other schemes."""
        if self._vllms is None:
            made = get_quantization_config(MIXED[self.convention.tool]).from_config(
                copy.deepcopy(self._plain)
            )
            if self._mapper is not None:
                made.apply_vllm_mapper(self._mapper)
            self._vllms = made
        self._vllms.packed_modules_mapping = self.packed_modules_mapping
        return self._vllms

    def activations_of(self, scheme: Scheme, keeps_16_bits: bool = False) -> LayerActivations:
        """Returns the activations of a layer, from the environment or config.json.

        By default W4A4 layers choose by the rows of each call, and rows of MXFP4 layers keep 16 bits.

        Raises:
            ValueError: the choice is unknown, or it is FP8 rows and no layer is MXFP4.
        """
        chosen = asked_activations(self.quantization)
        if chosen not in ACTIVATION_CHOICES:
            raise ValueError(
                f"quantization_config has {ACTIVATIONS}={chosen!r}; use one of {', '.join(ACTIVATION_CHOICES)}"
            )
        own = ACTIVATION_CHOICES[chosen]
        if own == "fp8" and not any(one.weights == MXFP4.name for one in self.convention.schemes):
            raise ValueError(
                f"{ACTIVATIONS}={chosen!r} needs MXFP4 weights, and this checkpoint has none; use one of "
                f"{', '.join(one for one in ACTIVATION_CHOICES if one != FP8_ROWS)}"
            )
        if scheme.weights == MXFP4.name:
            return "fp8" if own == "fp8" and not keeps_16_bits else "16bit"
        return "by_rows" if own == "fp8" else own

    def _scheme(self, prefix: str, names: list[str]) -> Scheme | None:
        """Returns the one scheme of ``names``."""
        is_left_out = lambda name: self.packed is not None and name not in self.packed
        found = {name: None if is_left_out(name) else self.convention.scheme(name) for name in names}
        if len(set(found.values())) > 1:
            each = ", ".join(f"{name} is {scheme or 'not quantized'}" for name, scheme in found.items())
            raise CheckpointError(
                f"{prefix} is one tensor in vLLM, and of the checkpoint's layers {each}; export them alike, or pass "
                "--quantization to choose one of vLLM's own methods"
            )
        return next(iter(found.values()))


def register_config(name: str) -> None:
    """Registers the method with vLLM as ``name``."""
    CheckpointConfig.name = name
    register_quantization_config(name)(CheckpointConfig)


def check_no_lora(prefix: str) -> None:
    """Raises UnsupportedProblem if LoRA adapters are enabled for experts, whose launches cannot add them."""
    lora = get_current_vllm_config().lora_config
    targets = None if lora is None else getattr(lora, "target_modules", None)
    if lora is not None and (targets is None or any("experts" in target for target in targets)):
        raise UnsupportedProblem(
            f"--enable-lora: experts of the nvfp4_cute plug-in, such as {prefix}, take no LoRA adapters; linear layers do: "
            "pass --lora-target-modules with linear layers, such as q_proj, or --quantization with one of vLLM's own methods"
        )


def names_embedding(quantization: Mapping[str, Any]) -> bool:
    """Returns whether a config describes the quantization of an embedding."""
    groups = (quantization.get("config_groups") or {}).values()
    targets = (target for group in groups for target in group.get("targets") or ())
    return any(is_embedding(name) for name in (*(quantization.get("quantized_layers") or ()), *targets))


def renamed(quantization: Mapping[str, Any], mapper: Any) -> dict[str, Any]:
    """Returns a config with the names of modules in the checkpoint's and in vLLM's spelling.

    Args:
        quantization: the config.
        mapper: its ``apply_list`` converts names to vLLM's spelling.
    """

    def both(names: Iterable[str]) -> list[str]:
        own = list(names)
        plain = [name for name in own if not name.startswith("re:") and "." in name]
        # "vision*" means a module and everything inside it. A mapper knows the module's name, and names that begin with it and
        # a dot.
        begins = [n for n in plain if n.endswith("*") and not n.endswith(".*")]
        cut = [m for n in begins for m in (n[:-1], f"{n[:-1]}.*")]
        return [*own, *mapper.apply_list([*(n for n in plain if n not in begins), *cut])]

    made: dict[str, Any] = {k: both(v) if k in LISTS and v else v for k, v in quantization.items()}
    if layers := made.get("quantized_layers"):
        made["quantized_layers"] = layers | {
            new: entry for old, entry in layers.items() for new in mapper.apply_list([old])
        }
    if groups := made.get("config_groups"):
        made["config_groups"] = {
            name: group | {"targets": both(group.get("targets") or ())} for name, group in groups.items()
        }
    return made


def _has_kernel() -> bool:
    if current_platform.is_cpu():
        return True
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return capability is not None and arch_of_capability(tuple(capability)) in ARCHS
