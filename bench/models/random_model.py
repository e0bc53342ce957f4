"""Makes models of a config with random weights, in 16 bits or quantized, layer by layer on their device."""

import json
from pathlib import Path
from typing import Any, Literal

import torch

from nvfp4_cute.bench.models.fp8_linear import MULTIPLE, LinearFP8
from nvfp4_cute.experts.weights import ExpertWeights
from nvfp4_cute.formats.block_format import ATOM_ROWS, MXFP8_E4M3, NVFP4, BlockFormat
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.formats.codecs import E4M3_MAX
from nvfp4_cute.formats.global_scale import GLOBAL_SCALE_DIVISOR
from nvfp4_cute.formats.scale_layout import from_blocked, to_blocked
from nvfp4_cute.models.router import fuse_routers
from nvfp4_cute.nn.activations import mode_of
from nvfp4_cute.nn.embedding import QuantizedEmbedding
from nvfp4_cute.nn.experts import ModelExperts
from nvfp4_cute.nn.fused import fuse as fuse_layers
from nvfp4_cute.nn.kept import keep_decoded
from nvfp4_cute.nn.linear import K_STEP, QuantizedLinear
from nvfp4_cute.nn.moe import MoE
from nvfp4_cute.ops.quantize import quantize
from nvfp4_cute.terminal import bar

CONFIGS = Path(__file__).parent / "configs"
NAMES = tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))
DEVIATION = 0.02  # standard deviation of weights, initializer_range in config.json files
# Global scale of weights. The largest of 10^8 normal values is 5.6 deviations, so it need not be measured.
WEIGHT_SCALE = 5.6 * DEVIATION / GLOBAL_SCALE_DIVISOR
# Global scale of activations: 2688 of it is 5.4, about the largest value after a norm.
INPUT_SCALE = 0.002
Scheme = Literal["bf16", "fp8", "nvfp4", "16bit", "auto", "all", "kept"]
# Ways in which the output layer and the embedding are also quantized.
WHOLE = ("all", "kept")


def config_of(model: str) -> Any:
    """Returns the transformers config, without quantization, of a name in ``NAMES``, a folder with config.json, or such a file.

    Raises:
        FileNotFoundError: ``model`` is none of these.
    """
    from transformers import AutoConfig

    path = CONFIGS / f"{model}.json" if model in NAMES else Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{model} is neither a folder, a file, nor one of {', '.join(NAMES)}")
    fields = json.loads(path.read_text())
    fields.pop("quantization_config", None)
    return AutoConfig.for_model(**fields)


def random_model(config: Any, scheme: Scheme, device: torch.device | str, *, fuse: bool = True) -> Any:
    """Makes a model in eval mode on ``device``, with normal weights of deviation 0.02.

    Args:
        config: a config of transformers.
        scheme: "bf16"; "fp8": linear layers use ``torch._scaled_mm``; "nvfp4", "16bit" or "auto": linear layers and experts, but
            not the output layer, have NVFP4 weights and these activations, see QuantizedLinear (experts have 4-bit activations
            where no launch multiplies 16-bit rows of all experts). "all": like "auto"; the output layer has NVFP4 weights and
            16-bit activations, and the embedding is MXFP8, or shares the output layer's weights if they are tied. "kept": like
            "all", with dequantized weights kept (``nn.kept``).
        device: device on which layers are made; at most one of them exists in 16 bits at a time.
        fuse: whether launches are merged (``nn.fuse``).

    Returns:
        A causal model of transformers.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if scheme != "bf16":
        _quantize(model, scheme, torch.device(device))
    _materialize(model, torch.device(device))
    model.initialize_weights()
    model.tie_weights()
    if fuse and scheme not in ("bf16", "fp8"):
        fuse_layers(model)
        fuse_routers(model)
    if scheme == "kept":
        keep_decoded(model)
    return model.eval()


def _quantize(model: Any, scheme: Scheme, device: torch.device) -> None:
    from nvfp4_cute.models.transformers import activation_of

    output = model.get_output_embeddings()
    work = [
        (name, module)
        for name, module in model.named_modules()
        if (
            isinstance(module, torch.nn.Linear)
            and (scheme in WHOLE or module is not output)
            and _has_kernel(module, scheme)
        )
        or (scheme != "fp8" and _is_experts(module))
    ]
    for name, module in bar(work, desc="random layers"):
        asked: Any = "auto" if scheme in WHOLE else scheme
        made = (
            _experts(module, activation_of(module), asked, device)
            if _is_experts(module)
            else _linear(module, "16bit" if module is output else asked, device)
        )
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made)
    if scheme in WHOLE:
        _quantize_embedding(model, device)


def _quantize_embedding(model: Any, device: torch.device) -> None:
    """Quantizes the embedding to MXFP8, or shares the weights of the output layer if they are tied."""
    table, output = model.get_input_embeddings(), model.get_output_embeddings()
    config = model.config.get_text_config()
    if config.tie_word_embeddings and isinstance(output, QuantizedLinear):
        stored: BlockScaledTensor = output.quantized_weight
        model.config.tie_word_embeddings = config.tie_word_embeddings = False
    else:
        stored = _random(table.num_embeddings, table.embedding_dim, device, MXFP8_E4M3)
    model.set_input_embeddings(QuantizedEmbedding(stored))


def _has_kernel(linear: torch.nn.Linear, scheme: Scheme) -> bool:
    """Returns whether the scheme's product supports the sizes of a layer."""
    if scheme == "fp8":
        return not linear.in_features % MULTIPLE and not linear.out_features % MULTIPLE
    return not linear.in_features % K_STEP


def _is_experts(module: torch.nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return "down_proj" in own and own["down_proj"].ndim == 3


def _random(rows: int, k: int, device: torch.device, format: BlockFormat = NVFP4) -> Any:
    """Makes a random tensor in the format, quantized in one launch."""
    weight = torch.randn(rows, k, device=device, dtype=torch.bfloat16).mul_(DEVIATION)
    return quantize(weight, global_scale=WEIGHT_SCALE if format.has_global_scale else None, format=format)


def _linear(linear: torch.nn.Linear, scheme: Scheme, device: torch.device) -> QuantizedLinear | LinearFP8:
    bias = None if linear.bias is None else torch.zeros(linear.out_features, device=device)
    if scheme == "fp8":
        values = torch.randn(linear.out_features, linear.in_features, device=device, dtype=torch.bfloat16)
        bias = None if bias is None else bias.bfloat16()
        return LinearFP8(
            values.mul_(DEVIATION),
            WEIGHT_SCALE * GLOBAL_SCALE_DIVISOR / E4M3_MAX,
            INPUT_SCALE * GLOBAL_SCALE_DIVISOR / E4M3_MAX,
            bias,
        )
    weight = _random(linear.out_features, linear.in_features, device)
    activations: Any = scheme
    return QuantizedLinear.from_quantized(weight, bias, activations=activations, input_scale=INPUT_SCALE)


def _experts(module: Any, activation: Any, scheme: Scheme, device: torch.device) -> ModelExperts:
    has_gate = getattr(module, "has_gate", True)
    turned = getattr(module, "is_transposed", False)
    size = lambda w: (w.shape[0], *(w.shape[:0:-1] if turned else w.shape[1:]))
    count, width, features = size(module.gate_up_proj if has_gate else module.up_proj)
    has_bias = getattr(module, "has_bias", False)

    def one(n: int, k: int) -> ExpertWeights:
        # All experts form one matrix, with one global scale.
        t = _random(count * n, k, device)
        scale = t.scale
        if n % ATOM_ROWS:
            k_blocks = NVFP4.num_k_blocks(k)
            scale = to_blocked(from_blocked(scale, count * n, k_blocks).view(count, n, k_blocks))
        return ExpertWeights(t.data.view(count, n, NVFP4.row_bytes(k)), scale, t.global_scale)

    def bias(n: int) -> torch.Tensor | None:
        return torch.zeros(count, n, device=device, dtype=torch.bfloat16) if has_bias else None

    asked: Any = scheme
    activations = mode_of(asked, "auto", device)
    hidden = width // 2 if has_gate else width
    is_quantized = activations == "nvfp4"
    scales: dict[str, Any] = {"input_scale": INPUT_SCALE, "hidden_scale": INPUT_SCALE} if is_quantized else {}
    layer = MoE.from_quantized(
        one(width, features), one(features, hidden), bias13=bias(width), bias2=bias(features), activations=activations,
        activation=activation, weight_layout="concatenated" if has_gate else "none", **scales,
    )  # fmt: skip
    return ModelExperts(layer)


def _materialize(model: torch.nn.Module, device: torch.device) -> None:
    """Allocates memory for tensors that are still on the meta device."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                made = torch.empty_like(parameter, device=device)
                module._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
