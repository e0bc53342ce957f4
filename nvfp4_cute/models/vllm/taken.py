"""Which checkpoints the plug-in takes, without vLLM: so that ``nvfp4-cute doctor`` says it where vLLM is not installed."""

from collections.abc import Mapping
from typing import Any

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models.checkpoints.checkpoint import convention_of, unwrapped
from nvfp4_cute.models.checkpoints.names import INTERLEAVED_MODELS
from nvfp4_cute.models.checkpoints.stored import INT4

# What a compressed-tensors config may ask for next to quantized weights; vLLM's own method does these.
OTHERS = ("transform_config", "sparsity_config")
# Formats of weights and activations.
TAKEN = (("nvfp4", "nvfp4"), ("nvfp4", None), (INT4, None))
# Schemes that have int4 in a byte each.
BYTES = ("int-quantized",)


def refusal(quantization: Mapping[str, Any], model_type: str | None = None) -> str | None:
    """Why a checkpoint is left to vLLM; None where the plug-in takes it.

    It takes those whose quantized layers are all NVFP4 with 4-bit or 16-bit activations, or int4 with 16-bit ones.

    Args:
        quantization: quantization_config of config.json, or hf_quant_config.json. model_type: of config.json.
    """
    if model_type in INTERLEAVED_MODELS:
        return f"models of type {model_type} have gate and up in turns, and biases"
    quantization = unwrapped(quantization)
    others = [key for key in OTHERS if quantization.get(key)]
    if others:
        return f"it has a {others[0]}"
    cache = quantization.get("kv_cache_scheme")
    if isinstance(cache, Mapping) and cache.get("strategy", "tensor") != "tensor":
        return f"its KV cache has scales by {cache['strategy']}"
    try:
        schemes = convention_of(quantization).schemes
    except CheckpointError as error:
        return str(error)
    for scheme in schemes:
        if (scheme.weights, scheme.activations) not in TAKEN or scheme.name in BYTES:
            return f"some layers are {scheme}, and the plug-in has NVFP4 and int4 weights"
    return None if schemes else "no layer is quantized"
