"""Lets transformers load quantized checkpoints with these readers and compute with these kernels.

Importing this module registers with transformers:

- the quantizer and config "modelopt", a name that transformers does not use: ``AutoModelForCausalLM.from_pretrained(folder)``
  then loads checkpoints of ModelOpt;
- the attention "grouped_sdpa": after ``model.set_attn_implementation("grouped_sdpa")`` a model decodes without copying keys and
  values for the heads that share them (``models.attention``);
- the experts implementation "nvfp4_cute": ``model.set_experts_implementation("nvfp4_cute")`` quantizes the experts of a 16-bit
  model when each is first called.

transformers has quantizers of its own for some methods. :func:`take_over` replaces them by this one, and :func:`load` does so
for one call.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

try:
    from transformers import AutoConfig
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        'whole models need transformers: run `pip install "nvfp4-cute[models]"`', name=missing.name
    ) from missing
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nvfp4_cute import private_api
from nvfp4_cute.activation import Activation
from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.formats.block_scaled import quantize
from nvfp4_cute.models.attention import GROUPED, grouped_sdpa
from nvfp4_cute.models.auto import auto_class
from nvfp4_cute.models.checkpoints.checkpoint import (
    READERS,
    Checkpoint,
    MissingInputScale,
    quantization_of,
    read_config,
)
from nvfp4_cute.models.checkpoints.folders import HUB_NAME, check_objects, local_folder
from nvfp4_cute.models.checkpoints.names import spellings
from nvfp4_cute.models.checkpoints.stored import StoredExperts
from nvfp4_cute.models.checkpoints.tensors import INDEX, SINGLE, TensorFiles
from nvfp4_cute.models.layers import embedding_module, experts_module, linear_module
from nvfp4_cute.models.router import fuse_routers
from nvfp4_cute.nn.activations import Activations, check_activations
from nvfp4_cute.nn.embedding import reason_against
from nvfp4_cute.nn.experts import EqualGroups, HiddenFunction, Projection, SortedExperts
from nvfp4_cute.nn.fused import fuse as fuse_layers
from nvfp4_cute.nn.kept import keep_decoded as keep_decoded_weights
from nvfp4_cute.nn.seen import Place, Seen
from nvfp4_cute.reference import activated
from nvfp4_cute.terminal import bar

NAME = "nvfp4_cute"
METHODS = tuple(READERS)
# Subclasses of torch.nn.Linear with a forward of their own that computes the same.
PLAIN_LINEARS = ("FalconLinear",)
OTHER_MODEL = "these are different models; fetch config.json and tensors of one checkpoint"
# Dtypes, as files name them, that are not converted to floating-point values.
INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")
# Limits above this one clamp nothing.
LARGEST_LIMIT = 1e6
# Names of activations by the classes of transformers (and torch) that compute them.
ACTIVATION_NAMES = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}


@dataclass(frozen=True)
class _Options:
    """Options of ``load``. The defaults are those of ``from_pretrained``."""

    missing_input_scale: MissingInputScale = "refuse"
    activations: Activations = "auto"
    fuse: bool = True
    decode: bool = False
    keep_decoded: bool = False
    check_plain: bool = False


_options: ContextVar[_Options] = ContextVar("options", default=_Options())  # noqa: B039 (frozen)


class CheckpointConfig(QuantizationConfigMixin):
    """``quantization_config`` of a checkpoint, as its tool wrote it.

    Args:
        quant_method: the tool's name of the method.
        settings: all other entries, unchanged.
    """

    def __init__(self, quant_method: str = "modelopt", **settings: Any):
        self.quant_method: Any = quant_method
        self.settings = settings

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents of config.json's entry."""
        return {"quant_method": self.quant_method, **self.settings}


class CheckpointQuantizer(HfQuantizer):
    """Loads a quantized checkpoint: transformers reads the plain tensors, the readers of this package read the others.

    Before loading, modules without weights replace quantized layers and experts, so that transformers finds no place for their
    tensors. After loading, modules that compute replace these, one by one.
    """

    requires_calibration = True

    def __init__(self, quantization_config: QuantizationConfigMixin, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.checkpoint: Checkpoint | None = None
        self.folder: Path | None = None
        # Name of a module -> prefix in the checkpoint.
        self.linears: dict[str, str] = {}
        self.embeddings: dict[str, str] = {}
        self.experts: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the files, which are mapped into this process, so that loaded models can be copied and pickled."""
        return vars(self) | {"checkpoint": None}

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Raises a ValueError that says how to save. transformers calls this in ``save_pretrained``."""
        folder = "the folder that it was loaded from" if self.folder is None else str(self.folder)
        raise ValueError(
            f"save_pretrained does not write quantized layers; the model's saved form is {folder}: copy that. Or quantize the "
            "16-bit model again with `nvfp4-cute quantize`, or keep changed parameters with torch.save(model.state_dict(), ...) "
            "for a model that `load` makes of the same folder"
        )

    @property
    def is_trainable(self) -> bool:
        """False: the kernels have no backward pass."""
        return False

    @property
    def is_compileable(self) -> bool:
        """True: torch.compile captures the layers whole."""
        return True

    def get_weight_conversions(self) -> list:
        """Returns no conversions: transformers does not convert quantized tensors."""
        return []

    def update_weight_conversions(self, weight_conversions: list, model: Any = None) -> list:
        """Keeps the model's conversions, for plain tensors."""
        return weight_conversions

    def _convert_model_for_quantization(self, model: Any) -> None:
        """Does nothing. For some methods transformers would give Llama-4's experts modules with other names."""

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        if not checkpoint_files:
            raise CheckpointError("quantized weights are read from files; pass a folder, not a state dict")
        around = Path(checkpoint_files[0]).parents  # an index may name files in subfolders
        folder = next((one for one in around if (one / "config.json").is_file()), around[0])
        # Uses the files from which transformers reads plain tensors, whatever else is in the folder.
        self.folder = folder
        self.checkpoint = checkpoint = Checkpoint(
            folder,
            missing_input_scale=_options.get().missing_input_scale,
            files=[Path(file).absolute() for file in checkpoint_files],
        )
        for name, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Linear) and (prefix := checkpoint.linear_named(name)):
                _check_linear(name, module)
                _check_bias(checkpoint, prefix, module)
                _replace(model, name, _Pending(module))
                self.linears[name] = prefix
            elif isinstance(module, torch.nn.Embedding) and (prefix := checkpoint.linear_named(name)):
                _check_embedding(name, module)
                _check_bias(checkpoint, prefix, module)
                _replace(model, name, _Pending(module))
                self.embeddings[name] = prefix
            elif prefix := checkpoint.experts_named(name):
                _replace(model, name, _PendingExperts(module))
                self.experts[name] = prefix
        self._untie(model)
        unused = (set(checkpoint.linears) | set(checkpoint.experts)) - {
            *self.linears.values(),
            *self.embeddings.values(),
            *self.experts.values(),
        }
        self._check_unused(model, unused)
        if _options.get().check_plain:
            _check_plain(checkpoint, model)
        ignored = [rf"{_escaped(name)}\." for name in (*self.linears, *self.embeddings, *self.experts)]
        ignored += [rf"{_escaped(name)}_" for name in self.experts]
        ignored += [_escaped(name) for prefix in unused for name in checkpoint.tensors_of(prefix)]
        ignored += [_escaped(name) for name in checkpoint.kv_scales()]
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            *ignored,
        }
        return model

    def _untie(self, model) -> None:
        """Tells transformers, which ties parameters, that there is nothing to tie if one of the two is quantized.

        An output layer that the checkpoint lacks becomes one with the embedding's weights.
        """
        output = next((n for n, m in model.named_modules() if m is model.get_output_embeddings()), None)
        is_tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
        if not is_tied or (output not in self.linears and not self.embeddings):
            return
        if output is not None and output not in self.linears:
            self.linears[output] = next(iter(self.embeddings.values()))
            _replace(model, output, _Pending(model.get_submodule(output)))
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
        pending = tuple(f"{name}." for name in (*self.linears, *self.embeddings))
        keys = model.all_tied_weights_keys
        model.all_tied_weights_keys = {
            k: v for k, v in keys.items() if not (k.startswith(pending) or v.startswith(pending))
        }

    def _check_unused(self, model, unused: set[str]) -> None:
        """Checks layers of the checkpoint that the model lacks.

        The model may leave out whole blocks, such as draft-token layers.

        It may also leave out what its class lists, such as Gemma's layers that share keys and values.
        """
        if not self.linears and not self.experts:
            some = ", ".join(sorted(unused)[:3]) or "none at all"
            raise CheckpointError(
                f"{type(model).__name__} has none of the checkpoint's quantized layers ({some}); load it as the class that "
                "config.json names under architectures"
            )
        modules = {name for name, _ in model.named_modules()} - {""}
        left_out = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        for prefix in sorted(unused):
            if any(pattern.search(name) for name in spellings(f"{prefix}.weight") for pattern in left_out):
                continue
            around = prefix.rpartition(".")[0]
            if not modules.isdisjoint(spellings(around)):
                raise CheckpointError(
                    f"{prefix} is in the checkpoint, and {around} of {type(model).__name__} has no such layer; config.json or a "
                    "file is of another model"
                )

    def _check_complete(self, model) -> None:
        """Raises for a plain tensor that no file has. transformers would draw a random one, and report it only in its log."""
        tensors = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
        made_up = [n for n, t in tensors.items() if not getattr(t, "_is_hf_initialized", False)]
        allowed = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
        untied = [n for n in made_up if n not in model.all_tied_weights_keys]
        missing = [n for n in untied if not any(p.search(n) for p in allowed) and not self._has(n)]
        if missing and len(made_up) < len(tensors):
            raise CheckpointError(
                f"{missing[0]} is in no file of the checkpoint, one of {len(missing)} tensors that {type(model).__name__} needs; "
                "fetch the checkpoint again, or correct config.json"
            )

    def _has(self, name: str) -> bool:
        assert self.checkpoint is not None
        return any(one in self.checkpoint.files for one in spellings(name))

    def _process_model_after_weight_loading(self, model, **kwargs):
        assert self.checkpoint is not None
        self._check_complete(model)
        widen(model)
        work = [(name, False) for name in self.linears] + [(name, True) for name in self.experts]
        for name, is_experts in bar(work, desc="quantized layers"):
            options = self._options(model, name) | {"activations": _options.get().activations}
            pending = model.get_submodule(name)
            if is_experts:
                experts = self.checkpoint.read_experts(self.experts[name])
                _check_experts_size(name, experts, pending)
                _check_experts_biases(name, experts, pending)
                module: Any = experts_module(experts, pending.activation, **options)
                module = EqualGroups(module) if pending.is_equal else module
            else:
                stored = self.checkpoint.linear(self.linears[name])
                _check_size(name, stored.weight.shape, pending)
                module = linear_module(stored, pending.bias, **options)
            _replace(model, name, module.eval())
        for name, prefix in self.embeddings.items():
            stored = self.checkpoint.linear(prefix)
            _check_size(name, stored.weight.shape, model.get_submodule(name))
            tied = next((model.get_submodule(n) for n, own in self.linears.items() if own == prefix), None)
            _replace(model, name, embedding_module(stored, tied=tied, **self._options(model, name)).eval())
        if _options.get().fuse:
            fuse_layers(model)
            fuse_routers(model)
        if _options.get().keep_decoded:
            keep_decoded_weights(model)
        return model

    def _options(self, model, name: str) -> dict[str, Any]:
        """Returns the options for a layer's module: dtype, device, and whether weights are dequantized."""
        places = getattr(model, "hf_device_map", None) or {}
        default = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
        return {
            "dtype": model.dtype,
            "device": _device(name, places, default),
            "decode": _options.get().decode,
        }


def widen(model: Any) -> None:
    """Makes parameters float32 if the model is; transformers before 5.24 keeps the files' dtype of some that it renames."""
    for parameter in model.parameters() if model.dtype == torch.float32 else ():
        if parameter.dtype in (torch.bfloat16, torch.float16) and parameter.device.type != "meta":
            parameter.data = parameter.data.float()


class _Pending(torch.nn.Module):
    """Replaces a linear layer or an embedding while transformers loads. Holds its bias, which is a plain tensor."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.shape = tuple(layer.weight.shape)  # type: ignore[arg-type]
        self.bias = getattr(layer, "bias", None)


class _PendingExperts(torch.nn.Module):
    """Replaces experts while transformers loads."""

    def __init__(self, experts: torch.nn.Module):
        super().__init__()
        self.activation = activation_of(experts)
        self.shapes = _shapes_of_experts(experts)
        self.biases = _biases_of_experts(experts)
        self.is_equal = type(experts).__name__ == "Llama4TextExperts"


def activation_of(experts: Any) -> HiddenFunction:
    """Returns the activation of transformers' experts, in the form of ``layers.experts_module``.

    Raises:
        CheckpointError: the module has no activation.
    """
    if hasattr(experts, "alpha") and hasattr(experts, "limit"):
        return Activation("swiglu_oai", experts.limit, experts.alpha)
    function = getattr(experts, "act_fn", None)
    name: Any = ACTIVATION_NAMES.get(type(function).__name__)
    own_gate = getattr(type(experts), "_apply_gate", None)
    if own_gate is not None and own_gate.__name__ != "_default_apply_gate":
        gate_of = lambda gate, up: experts._apply_gate(torch.cat([gate, up], -1))
        return _clamped(experts, name, gate_of) or gate_of
    if function is None:
        raise CheckpointError(
            f"{type(experts).__name__} has no act_fn, and is not a known module of experts; report the model"
        )
    if name is not None:
        return Activation(name)
    return function if not getattr(experts, "has_gate", True) else lambda gate, up: function(gate) * up


def _clamped(experts: Any, name: Any, gate_of: Callable[..., torch.Tensor]) -> Activation | None:
    """Returns the activation with the module's limit that computes what ``gate_of`` does; None if none does."""
    limit, alpha = (
        getattr(experts, own, None) or getattr(experts, f"swiglu_{own}", None) for own in ("limit", "alpha")
    )
    if not isinstance(limit, int | float) or limit <= 0 or (name is None and alpha is None):
        return None
    is_clamped = limit < LARGEST_LIMIT
    own, reach = (limit, 2 * limit) if is_clamped else (None, 16.0)
    known = Activation(name, own) if alpha is None else Activation("swiglu_oai", own, alpha)
    line = torch.linspace(-reach, reach, 65, device="cpu")
    gate, up = torch.meshgrid(line, line, indexing="ij")
    with torch.device("cpu"):
        got = gate_of(gate, up)
    return known if torch.allclose(got, activated(gate, up, known), rtol=1e-5, atol=1e-5) else None


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts implementation "nvfp4_cute" of a 16-bit model.

    Quantizes the weights on the first call, and again after they are written, moved or replaced. Arguments and result are
    transformers': [T, H], integers [T, k], [T, k] -> [T, H].
    """
    kept = self.__dict__.get("_nvfp4_cute")
    if kept is None:
        kept = self.__dict__["_nvfp4_cute"] = QuantizedOnce()
    return kept.of(self)(hidden_states, top_k_index, top_k_weights)


class QuantizedOnce:
    """The quantized experts of a module, valid as long as its weights do not change. A copy quantizes again."""

    def __init__(self) -> None:
        self._experts: SortedExperts | None = None
        self._seen = Seen()

    def __getstate__(self) -> dict[str, Any]:
        """Stores nothing, so that a copy quantizes again."""
        return {"_experts": None, "_seen": Seen()}

    def of(self, experts: Any) -> SortedExperts:
        """Returns the module that computes ``experts`` with their parameters quantized."""
        is_traced = private_api.is_traced() and self._experts is not None
        if self._experts is None or not (is_traced or self._seen.is_current()):
            self._experts = None  # frees the old ones before it makes new ones
            self._experts = quantized_experts(experts)
            places: list[Place] = [(experts._parameters, name) for name in experts._parameters]
            self._seen = Seen(moved=places)
        return self._experts


def quantized_experts(experts: Any, activations: Any = "nvfp4") -> SortedExperts:
    """Quantizes experts of transformers, with one global scale per expert and projection.

    Args:
        experts: a module with ``gate_up_proj`` (or ``up_proj``) and ``down_proj``, [E, N, K] or transposed.
        activations: see SortedExperts.
    """
    turn = lambda w: w.transpose(1, 2) if getattr(experts, "is_transposed", False) else w
    has_gate = getattr(experts, "has_gate", True)
    first = turn(experts.gate_up_proj if has_gate else experts.up_proj)
    has_bias = getattr(experts, "has_bias", False)
    bias = experts.gate_up_proj_bias if has_bias else None
    if not has_gate:
        sides = [(first, bias)]
    elif getattr(experts, "is_concatenated", True):
        cut = lambda t: (None, None) if t is None else t.chunk(2, 1)
        sides = list(zip(cut(first), cut(bias), strict=True))
    else:
        cut = lambda t: (None, None) if t is None else (t[:, 0::2], t[:, 1::2])
        sides = list(zip(cut(first), cut(bias), strict=True))
    sides.append((turn(experts.down_proj), experts.down_proj_bias if has_bias else None))
    projections = [
        Projection(quantize(w.detach().contiguous(), global_scale="per_batch"), b) for w, b in sides
    ]
    activation = activation_of(experts)
    return SortedExperts(projections, activation, activations=activations)


def register() -> None:
    """Registers with transformers. Importing this module calls it; further calls change nothing."""
    entries: tuple[tuple[Any, type], ...] = (
        (AUTO_QUANTIZER_MAPPING, CheckpointQuantizer),
        (AUTO_QUANTIZATION_CONFIG_MAPPING, CheckpointConfig),
    )
    for mapping, entry in entries:
        mapping.setdefault("modelopt", entry)
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    ALL_ATTENTION_FUNCTIONS.register(GROUPED, grouped_sdpa)
    ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED, sdpa_mask)


def take_over(*methods: str) -> None:
    """Makes this package load checkpoints of these methods, which are keys of METHODS, from now on; all methods by default."""
    for method in methods or METHODS:
        if method not in METHODS:
            raise ValueError(f"method={method!r} has no reader; there are {', '.join(METHODS)}")
        AUTO_QUANTIZER_MAPPING[method] = CheckpointQuantizer
        AUTO_QUANTIZATION_CONFIG_MAPPING[method] = CheckpointConfig


def load(
    folder: str,
    *,
    missing_input_scale: MissingInputScale = "refuse",
    activations: Activations = "auto",
    fuse: bool = True,
    decode: bool = False,
    keep_decoded: bool = False,
    model_class: Any = None,
    **options: Any,
) -> Any:
    """Load the model of a quantized checkpoint from any tool that has a reader.

    Args:
        folder: folder of the checkpoint, or its name on the hub, such as "owner/name". A name is looked up in the local cache,
            otherwise transformers downloads it.
        missing_input_scale: see ``checkpoints.Checkpoint``.
        activations: mode of layers and experts that have 4-bit activations in the checkpoint. "auto": 16 bits on a GPU whose
            tensor cores do not multiply FP4 (Hopper), where they cost neither a launch nor accuracy, else "nvfp4".
        fuse: merge the launches of layers that read the same input and of gated MLPs (``nn.fuse``), and reduce routers to two
            launches. ``from_pretrained`` does so as well, with activations "auto".
        decode: dequantize all weights to 16 bits, for torch to multiply; activations are still rounded. This takes the memory
            of the 16-bit model and, on a CPU, a fraction of the time of the float64 reference.
        keep_decoded: keep dequantized weights next to the 4-bit ones, for prefill, as long as a GPU has room. For a model of
            ``from_pretrained``, call ``nn.kept.keep_decoded`` instead.
        model_class: class whose ``from_pretrained`` is called. None: AutoModelForCausalLM, or AutoModelForImageTextToText for a
            model that also reads images.
        options: arguments of ``from_pretrained``, such as ``device_map="cuda"``.

    Returns:
        The model, in eval mode.

    Raises:
        FileNotFoundError: the folder, config.json, or a file that the index names does not exist.
        ValueError: a file is damaged.
        CheckpointError: a method, scheme, tensor or size differs from config.json, or something is missing, which the message
            names; or no class for the model was found, and ``model_class`` has to name one.
    """
    folder = str(local_folder(folder))
    check_activations(activations)
    if decode and keep_decoded:
        raise ValueError(
            "decode=True keeps no 4-bit weights, so keep_decoded has no effect; pass decode or keep_decoded, not both"
        )
    # transformers downloads a name that is not a folder, such as "owner/name", from its hub.
    if not Path(folder).is_dir() and not HUB_NAME.fullmatch(folder):
        raise FileNotFoundError(
            f"{folder} is not a folder; pass the folder of a checkpoint, with its config.json, or a name on the hub: owner/name"
        )
    if Path(folder).is_dir():
        quantization = quantization_of(Path(folder))
        check_objects(Path(folder), "generation_config.json")
        if quantization is not None:
            _check_files(Path(folder), options)
        if quantization is not None and not read_config(Path(folder)).get("quantization_config"):
            # Older exports of ModelOpt have it in a separate file, which transformers does not read.
            if "config" not in options:
                trusted = options.get("trust_remote_code")
                options["config"] = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
            config = options["config"]
            config.quantization_config = getattr(config, "quantization_config", None) or quantization
    check_plain = not options.get("ignore_mismatched_sizes", False)
    token = _options.set(_Options(missing_input_scale, activations, fuse, decode, keep_decoded, check_plain))
    try:
        with _taken_over():
            chosen = model_class or auto_class(folder, options)
            return chosen.from_pretrained(folder, **options)
    finally:
        _options.reset(token)


def _check_files(folder: Path, options: dict[str, Any]) -> None:
    """Raises for damaged or missing files, with more detail than transformers gives.

    Raises:
        FileNotFoundError, ValueError: for the reasons of ``TensorFiles``, or because there are several files and no index.
    """
    if options.get("variant") or options.get("subfolder"):
        return  # the files have other names
    count = len({entry.file for entry in TensorFiles(folder).entries.values()})
    names = (INDEX, SINGLE)
    if not any((folder / name).is_file() for name in names):
        raise FileNotFoundError(
            f"{folder} has {count} safetensors files, and neither {' nor '.join(names)}, by which transformers finds them: "
            "fetch all files of the checkpoint"
        )


@contextlib.contextmanager
def _taken_over() -> Iterator[None]:
    mappings: tuple[dict[str, Any], ...] = (AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING)
    before = [dict(mapping) for mapping in mappings]
    take_over()
    try:
        yield
    finally:
        for mapping, kept in zip(mappings, before, strict=True):
            mapping.update(kept)


def _replace(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _escaped(name: str) -> str:
    return name.replace(".", r"\.")


def _check_size(name: str, shape: tuple[int, ...], pending: _Pending) -> None:
    if tuple(shape) != pending.shape:
        raise CheckpointError(
            f"{name} is {list(shape)} in the checkpoint, and {list(pending.shape)} by config.json: {OTHER_MODEL}"
        )


def _shapes_of_experts(experts: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the shapes of the first weights and of down's, [E, N, K] each; None for experts that are separate modules."""
    first = getattr(experts, "gate_up_proj", None)
    first = getattr(experts, "up_proj", None) if first is None else first
    down = getattr(experts, "down_proj", None)
    if not isinstance(first, torch.Tensor) or not isinstance(down, torch.Tensor):
        return None
    is_k_first = getattr(experts, "is_transposed", False) or type(experts).__name__ == "Llama4TextExperts"
    turn = lambda w: (w.shape[0], w.shape[2], w.shape[1]) if is_k_first else tuple(w.shape)
    return turn(first), turn(down)


def _check_experts_size(name: str, stored: StoredExperts, pending: _PendingExperts) -> None:
    found = tuple(stored.w13.shape), tuple(stored.w2.shape)
    if pending.shapes not in (None, found):
        sizes = [" and ".join(str(list(shape)) for shape in pair) for pair in (found, pending.shapes or ())]
        raise CheckpointError(
            f"{name} is {sizes[0]} in the checkpoint, and {sizes[1]} by config.json: {OTHER_MODEL}"
        )


def _biases_of_experts(experts: torch.nn.Module) -> tuple[bool, bool]:
    """Returns whether the first projections have biases, and whether down has."""
    names = [name for name, _ in experts.named_parameters() if name.endswith("bias")]
    is_down = [re.search(r"\b(down_proj|w2)", name) is not None for name in names]
    return not all(is_down), any(is_down)


def _check_experts_biases(name: str, stored: StoredExperts, pending: _PendingExperts) -> None:
    found = ("gate and up", stored.w13_bias), ("down", stored.w2_bias)
    for (what, bias), is_wanted in zip(found, pending.biases, strict=True):
        if (bias is not None) != is_wanted and not _is_zero(bias):
            have = {True: "have biases", False: "have no biases"}
            raise CheckpointError(
                f"{name}: {what} projections {have[not is_wanted]} in the checkpoint, and {have[is_wanted]} by "
                f"config.json: {OTHER_MODEL}"
            )


def _check_plain(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    """Raises for a plain tensor of another size than the model's, which transformers reports only in its log.

    Tensors that transformers transposes keep their number of values.
    """
    own = model.state_dict()
    for name in checkpoint.plain:
        entry = checkpoint.files.entries[name]
        place = next((own[one] for one in spellings(name) if one in own), None)
        if not isinstance(place, torch.Tensor):
            continue
        if place.numel() != torch.Size(entry.shape).numel():
            raise CheckpointError(
                f"{name} is {list(entry.shape)} in the checkpoint, and {list(place.shape)} by config.json: {OTHER_MODEL}"
            )
        if place.is_floating_point() and entry.dtype in INTEGERS:
            raise CheckpointError(
                f"{name} has dtype {entry.dtype}, and {type(model).__name__} has floating-point values there: export it again"
            )


def _is_zero(bias: torch.Tensor | None) -> bool:
    """Returns whether a bias changes nothing; some quantizing tools give every layer a bias."""
    return bias is not None and not bool(bias.any())


def _check_bias(checkpoint: Checkpoint, prefix: str, module: torch.nn.Module) -> None:
    name = f"{prefix}.bias"
    if name not in checkpoint.files or getattr(module, "bias", None) is not None:
        return
    if not _is_zero(checkpoint.files[name]):
        raise CheckpointError(
            f"{name} is in the checkpoint, and by config.json the layer has none: {OTHER_MODEL}"
        )


def _check_linear(name: str, module: torch.nn.Linear) -> None:
    """Raises CheckpointError for a layer that computes something else than a product, such as DeepSeek-V4's grouped ones."""
    kind = type(module)
    if kind.forward is not torch.nn.Linear.forward and kind.__name__ not in PLAIN_LINEARS:
        raise CheckpointError(
            f"{name} is quantized in the checkpoint, and {kind.__name__} has a forward of its own, which no layer here computes; "
            "export the checkpoint with this layer in 16 bits"
        )


def _check_embedding(name: str, module: torch.nn.Module) -> None:
    error = reason_against(module)
    if error is not None:
        raise CheckpointError(
            f"{name} is quantized in the checkpoint: {error}; quantize the model without --embedding"
        )


def _device(name: str, places: dict[str, Any], default: torch.device) -> torch.device:
    """Returns the device of the longest prefix of ``name`` in the device map."""
    parts = name.split(".")
    for length in range(len(parts), -1, -1):
        place = places.get(".".join(parts[:length]))
        if place is not None and place != "disk":
            return torch.device(place)
    return default


register()
