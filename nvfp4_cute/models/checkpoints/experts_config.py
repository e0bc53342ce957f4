"""What config.json says about a model's layers of experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvfp4_cute.activation import Activation, ActivationName
from nvfp4_cute.errors import CheckpointError

# Keys that name the activation of experts, in the order of preference.
NAME_KEYS = ("mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function")
# Names of activations in config.json, those of transformers' ACT2FN and of the models' own code.
ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "situ": "situ",
    "swigluoai": "swiglu_oai",
}
# Models that say "silu" and compute SwiGLU-OAI.
OAI_MODELS = ("gpt_oss", "openai_privacy_filter")
# Models that multiply tokens by router weights before the experts.
WEIGHT_ON_INPUT_MODELS = ("llama4", "llama4_text")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token")
LATENT_KEYS = ("moe_latent_size", "routed_expert_hidden_size")


@dataclass(frozen=True)
class ExpertsConfig:
    """The options of ``MoE`` that follow from config.json.

    Attributes:
        activation: activation of routed experts, with its limit and constants.
        weight_on_input: whether tokens are multiplied by router weights before the experts; see ``ActivationFormat``.
        latent_size: hidden size of the experts; None for the model's.
        top_k: experts per token; None if no key says it.
    """

    activation: Activation
    weight_on_input: bool = False
    latent_size: int | None = None
    top_k: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ExpertsConfig":
        """Reads config.json, of a text model or of one with a ``text_config``.

        Raises:
            CheckpointError: an activation is unknown, or has a limit that no kernel computes.
        """
        text = config.get("text_config")
        text = text if isinstance(text, Mapping) else config
        model = text.get("model_type")
        key = next((key for key in NAME_KEYS if text.get(key) is not None), None)
        name = None if key is None else ACTIVATIONS.get(str(text[key]))
        if name is None:
            given = "none of " + ", ".join(NAME_KEYS) if key is None else f"{key}={text[key]!r}"
            raise CheckpointError(
                f"config.json of model_type={model!r} has {given}; experts compute {', '.join(ACTIVATIONS)}"
            )
        if text.get("swiglu_limits") is not None:
            raise CheckpointError(
                f"config.json of model_type={model!r} has swiglu_limits, a limit per layer of the activation's result, which "
                "no kernel computes"
            )
        if model in OAI_MODELS:
            name = "swiglu_oai"
        own = {
            "swiglu_oai": {"alpha": "swiglu_alpha"},
            "situ": {"beta": "activation_situ_beta", "linear_beta": "activation_situ_linear_beta"},
        }.get(name, {})
        constants: dict[str, Any] = {constant: text.get(place) for constant, place in own.items()}
        try:
            activation = Activation(name, text.get("swiglu_limit"), **constants)
        except ValueError as error:
            raise CheckpointError(f"config.json of model_type={model!r}: {error}") from None
        latent, top_k = (
            next((text[key] for key in keys if text.get(key)), None) for keys in (LATENT_KEYS, TOP_K_KEYS)
        )
        return cls(activation, model in WEIGHT_ON_INPUT_MODELS, latent, top_k)
