"""Decides which checkpoints the plug-in serves, without importing vLLM, so that ``nvfp4-cute doctor`` can also tell."""

from collections.abc import Mapping
from typing import Any

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models.checkpoints.checkpoint import convention_of, unwrapped
from nvfp4_cute.models.checkpoints.names import INTERLEAVED_MODELS
from nvfp4_cute.models.checkpoints.stored import FP8, INT4, Scheme

# Requests of a compressed-tensors config besides quantized weights; vLLM's own method handles these.
OTHERS = ("transform_config", "sparsity_config")
# Supported formats of weights and activations.
TAKEN = (("nvfp4", "nvfp4"), ("nvfp4", None), (INT4, None))
# Schemes that store one int4 per byte.
BYTES = ("int-quantized",)
# Tool whose configs name a scheme per layer -> vLLM's method that computes their FP8 layers.
MIXED = {"modelopt": "modelopt_mixed", "compressed-tensors": "compressed-tensors"}
FP8_WEIGHTS = (FP8, "fp8_128x128")


def is_ours(scheme: Scheme) -> bool:
    """Returns whether the plug-in computes layers with a scheme."""
    return (scheme.weights, scheme.activations) in TAKEN and scheme.name not in BYTES


def refusal(quantization: Mapping[str, Any], model_type: str | None = None) -> str | None:
    """Returns the reason why a checkpoint is left to vLLM; None if the plug-in serves it.

    The plug-in serves checkpoints whose quantized layers are NVFP4 with 4-bit or 16-bit activations, or int4 with 16-bit ones.
    In configs of ModelOpt and compressed-tensors, some layers may be FP8; vLLM computes these.

    Args:
        quantization: quantization_config of config.json, or hf_quant_config.json.
        model_type: entry of config.json.
    """
    if model_type in INTERLEAVED_MODELS:
        return f"models of type {model_type} have gate and up in turns, and biases"
    quantization = unwrapped(quantization)
    unknown = [key for key in OTHERS if quantization.get(key)]
    if unknown:
        return f"it has a {unknown[0]}"
    cache = quantization.get("kv_cache_scheme")
    if isinstance(cache, Mapping) and cache.get("strategy", "tensor") != "tensor":
        return f"its KV cache has scales by {cache['strategy']}"
    try:
        convention = convention_of(quantization)
    except CheckpointError as error:
        return str(error)
    others = [scheme for scheme in convention.schemes if not is_ours(scheme)]
    for scheme in others:
        if (
            scheme.weights not in FP8_WEIGHTS
            or convention.tool not in MIXED
            or len(others) == len(convention.schemes)
        ):
            return f"layers are {scheme}, and the plug-in has NVFP4 and int4 weights"
    return None if convention.schemes else "no layer is quantized"
