"""Activations of experts by the names and constants of vLLM."""

from typing import Any

from nvfp4_cute.activation import Activation, ActivationName
from nvfp4_cute.errors import UnsupportedProblem

# vLLM's name of gpt-oss's activation, whose rows of gate and up alternate, and its limit, which vLLM's config lacks.
INTERLEAVED, OAI_LIMIT = "swigluoai", 7.0
# vLLM's name of an activation -> ours.
ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
    "situ": "situ",
    INTERLEAVED: "swiglu_oai",
    "swigluoai_uninterleave": "swiglu_oai",
    "silu_no_mul": "silu",
    "gelu_no_mul": "gelu",
    "gelu_tanh_no_mul": "gelu_tanh",
    "relu2_no_mul": "relu2",
}


def activation_of(name: str, activation: str, moe: Any) -> Activation:
    """Returns the activation of a layer. Raises UnsupportedProblem by name for one that no kernel computes.

    Args:
        name: name of the layer.
        activation: vLLM's name of the activation.
        moe: vLLM's config of the layer, or None. It may lack constants of the activation.
    """
    limit, alpha, beta = (getattr(moe, f"swiglu_{constant}", None) for constant in ("limit", "alpha", "beta"))
    if activation == INTERLEAVED:
        return Activation("swiglu_oai", OAI_LIMIT if limit is None else limit, alpha)
    own = ACTIVATIONS.get(activation)
    if own == "swiglu_oai" and beta != 1:  # with vLLM's defaults of alpha and beta, it is SwiGLU
        own = "silu" if (alpha or 1, beta or 0) == (1, 0) else None
    if own is None or (limit is not None and own not in ("silu", "swiglu_oai")):
        raise UnsupportedProblem(
            f"{name} has activation {activation!r} (limit {limit}, alpha {alpha}, beta {beta}); the plug-in has "
            f"{', '.join(ACTIVATIONS)}, limits of SwiGLU, and beta 1 with any alpha: pass --quantization with one of vLLM's own "
            "methods"
        )
    if own == "situ":
        bounds = (getattr(moe, f"activation_situ_{constant}", None) for constant in ("beta", "linear_beta"))
        return Activation("situ", None, None, *bounds)
    return Activation(own, limit, (alpha or 1.0) if own == "swiglu_oai" else None)
