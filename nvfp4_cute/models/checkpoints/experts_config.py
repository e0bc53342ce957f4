"""What config.json says about a model's layers of experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from nvfp4_cute.activation import Activation, ActivationName
from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.experts.routing import Scoring

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
SCORING_KEYS = ("scoring_func", "moe_router_activation_func")
# Models whose code computes a sigmoid, whatever config.json says.
SIGMOID_MODELS = (
    "deepseek_v3", "glm4_moe", "glm_moe_dsa", "llama4", "llama4_text", "minimax_m2", "minimax_m3_vl_text", "nemotron_h",
)  # fmt: skip
NORMALIZING_KEYS = ("norm_topk_prob", "moe_renormalize")
# Models that divide the weights of a token by their sum only where config.json says so.
NOT_NORMALIZING_MODELS = ("llama4", "llama4_text", "qwen2_moe", "qwen3_moe")
GROUP_KEYS = ("n_group", "num_expert_group")
# Number of DeepSeek-V4's hash layers, which look up experts by token id, if config.json does not say.
V4_HASH_LAYERS = 3


@dataclass(frozen=True)
class RouterConfig:
    """Arguments of ``route`` that follow from config.json: ``route(logits, top_k, **asdict(config))``.

    Attributes:
        scoring, renormalize, groups, scale: see ``route``.
    """

    scoring: Scoring = "softmax"
    renormalize: bool = True
    groups: tuple[int, int] = (1, 1)
    scale: float = 1.0

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> "RouterConfig | None":
        """Reads the config of a text model; returns None for a router that ``route`` does not support."""
        model = text.get("model_type")
        scoring: Any = "sigmoid" if model in SIGMOID_MODELS else _first(text, SCORING_KEYS, "softmax")
        groups = _first(text, GROUP_KEYS, 1)
        # DeepSeek-V2 compares groups by their best expert, not by their two best ones.
        if scoring not in get_args(Scoring) or (
            groups > 1 and text.get("topk_method") == "group_limited_greedy"
        ):
            return None
        renormalize = _first(text, NORMALIZING_KEYS, model not in NOT_NORMALIZING_MODELS)
        scale = float(_first(text, ("routed_scaling_factor",), 1.0))
        return cls(scoring, renormalize, (groups, _first(text, ("topk_group",), groups)), scale)


@dataclass(frozen=True)
class ExpertsConfig:
    """The options of ``MoE`` that follow from config.json.

    Attributes:
        activation: activation of routed experts, with its limit and constants.
        weight_on_input: whether tokens are multiplied by router weights before the experts; see ``ActivationFormat``.
        latent_size: hidden size of the experts; None for the model's.
        top_k: experts per token; None if no key says it.
        router: arguments of ``route``; None for a router that it does not support.
        hash_layers: how many of the first layers look up experts by token id, in a table (DeepSeek-V4's ``tid2eid``).
    """

    activation: Activation
    weight_on_input: bool = False
    latent_size: int | None = None
    top_k: int | None = None
    router: RouterConfig | None = RouterConfig()
    hash_layers: int = 0

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
        latent, top_k = (_first(text, keys, None) or None for keys in (LATENT_KEYS, TOP_K_KEYS))
        kinds = text.get("mlp_layer_types")
        hashed = text.get("num_hash_layers", V4_HASH_LAYERS) if model == "deepseek_v4" else 0
        hashed = hashed if kinds is None else kinds.count("hash_moe")
        return cls(activation, model in WEIGHT_ON_INPUT_MODELS, latent, top_k, RouterConfig.of(text), hashed)


def _first(text: Mapping[str, Any], keys: tuple[str, ...], default: Any) -> Any:
    """Returns the value of the first of these keys that config.json has."""
    return next((text[key] for key in keys if text.get(key) is not None), default)
