"""Decides which checkpoints the plug-in serves, without importing vLLM, so that ``nvfp4-cute doctor`` can also tell."""

from collections.abc import Mapping
from typing import Any

from nvfp4_cute import env
from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models.checkpoints.checkpoint import convention_of, unwrapped
from nvfp4_cute.models.checkpoints.names import INTERLEAVED_MODELS
from nvfp4_cute.models.checkpoints.stored import FP8, INT4, Scheme

# Requests of a compressed-tensors config besides quantized weights; vLLM's own method handles these.
OTHERS = ("transform_config", "sparsity_config")
# Supported formats of weights and activations.
TAKEN = (("nvfp4", "nvfp4"), ("nvfp4", None), (INT4, None), ("mxfp4", "mxfp4"), ("mxfp4", None))
# The plug-in's name for ``--quantization``, the config's key for activations, and the value of that key for FP8 rows.
NAME, ACTIVATIONS, FP8_ROWS = "nvfp4_cute", "activations", "fp8"
# Schemes that store one int4 per byte.
BYTES = ("int-quantized",)
# Tool whose configs name a scheme per layer -> vLLM's method that computes their FP8 layers.
MIXED = {"modelopt": "modelopt_mixed", "compressed-tensors": "compressed-tensors"}
FP8_WEIGHTS = (FP8, "fp8_128x128")


def is_ours(scheme: Scheme) -> bool:
    """Returns whether the plug-in computes layers with a scheme."""
    return (scheme.weights, scheme.activations) in TAKEN and scheme.name not in BYTES


def original(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config with the checkpoint's own ``quant_method``, which vLLM replaces for gpt-oss and Kimi-K3."""
    own = dict(unwrapped(quantization))
    if own.get("quant_method") == "gpt_oss_mxfp4":
        own["quant_method"] = "mxfp4"
    if own.get("quant_method") == "mxfp4" and own.get("config_groups"):
        own["quant_method"] = "compressed-tensors"
    return own


def asked_activations(quantization: Mapping[str, Any]) -> str:
    """Returns the activations that the environment asks for, or else the config; "auto" by default."""
    return env.activations() or quantization.get(ACTIVATIONS) or "auto"


def asks(quantization: Mapping[str, Any], method: str | None = None) -> bool:
    """Returns whether the user asks for this package.

    Args:
        quantization: see ``refusal``.
        method: value of ``--quantization``.
    """
    return method == NAME or asked_activations(quantization) == FP8_ROWS


def refusal(
    quantization: Mapping[str, Any], model_type: str | None = None, is_asked: bool | None = None
) -> str | None:
    """Returns the reason why a checkpoint is left to vLLM; None if the plug-in serves it.

    The plug-in serves checkpoints whose quantized layers are NVFP4 with 4-bit or 16-bit activations, or int4 with 16-bit ones.
    In configs of ModelOpt and compressed-tensors, some layers may be FP8; vLLM computes these. Checkpoints with MXFP4 layers
    are served if the user asks for it, because vLLM's own kernels are about as fast for 16-bit rows. ModelOpt's MXFP4
    checkpoints are always served, because vLLM has no method for them.

    Args:
        quantization: quantization_config of config.json, or hf_quant_config.json.
        model_type: entry of config.json.
        is_asked: whether the user asks for this package; None: see ``asks``.
    """
    quantization = original(quantization)
    is_gpt_oss = quantization.get("quant_method") == "mxfp4"
    if model_type in INTERLEAVED_MODELS and not is_gpt_oss:
        return f"models of type {model_type} have gate and up in turns, and biases; the plug-in supports both in MXFP4 only"
    if model_type not in INTERLEAVED_MODELS and is_gpt_oss:
        return f"quant_method mxfp4 has the tensors of gpt_oss, and the model is {model_type}"
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
            return f"layers are {scheme}, and the plug-in has NVFP4, int4 and MXFP4 weights"
    if not convention.schemes:
        return "no layer is quantized"
    is_optional = convention.tool != "modelopt" and any(s.weights == "mxfp4" for s in convention.schemes)
    if is_optional and not (asks(quantization) if is_asked is None else is_asked):
        return (
            f"for MXFP4 weights and 16-bit rows they are about as fast; --quantization {NAME}, or "
            f"{env.ACTIVATIONS.name}={FP8_ROWS}, chooses this package"
        )
    return None
