"""Decides which tensors of a 16-bit checkpoint are quantized, which stay, and which share a global scale."""

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nvfp4_cute.models.checkpoints.names import expert_of
from nvfp4_cute.models.checkpoints.tensors import Entry
from nvfp4_cute.models.quantizing.layouts import FP8_ROWS, Recipe

# Parts of models that do not process text.
TOWERS = (
    "visual.*", "vision_*", "vit.*", "image_*", "audio_*", "sound_*", "speech_*", "multi_modal_*", "multimodal_*",
    "mm_*", "perceiver*", "resampler*", "connector.*", "aligner.*", "conformer.*",
)  # fmt: skip
# Layers that lose the most accuracy for the memory they save (the output layer, embeddings, routers), and tensors that are not
# matrices of products.
LEFT_OUT = (
    "lm_head",
    "*embed*",
    "*.gate",
    "*.router",
    "*norm*",
    "*conv1d*",
    "*.shared_expert_gate",
    "*rotary*",
    # Towers and projectors of images and sounds: text does not calibrate them, and engines read them in 16 bits.
    *(f"{start}{part}" for start in ("", "*.") for part in TOWERS),
)
# Layers that read the same input. Engines merge them, with one global scale of weights and one of activations.
TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
# "--recipe nemotron": NVIDIA's mixture for Nemotron 3.5 (docs.nvidia.com/nemotron/0.2.0, "Lightning 3.5, quantization"): experts
# and the output layer in NVFP4 with 16-bit activations, attention in 16 bits, FP8 for the rest, which is Mamba's projections,
# shared experts and dense MLPs.
RECIPE_PATTERNS: dict[str, dict[str, str]] = {
    "nemotron": {
        "*.experts.*": "nvfp4",
        **dict.fromkeys(("lm_head", "*.lm_head"), "nvfp4"),
        **dict.fromkeys((f"*.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj",
                         "kv_a_proj_with_mqa", "kv_b_proj")), "16bit"),
    }
}  # fmt: skip
FP8_MULTIPLE = 16  # of N and K in torch._scaled_mm; vLLM 0.32 fails to load other N on a GPU
RECIPE_FORMATS = {"nemotron": "fp8"}  # of layers that no pattern names
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Layer:
    """A layer to quantize.

    Attributes:
        name: its prefix; its weight is ``name + ".weight"``.
        shape: [N, K].
        recipe: its format.
        group: key of the layers with which it shares global scales.
    """

    name: str
    shape: tuple[int, int]
    recipe: Recipe
    group: str


@dataclass(frozen=True)
class Rules:
    """Rules for all matrices.

    Attributes:
        recipe: for layers that no pattern matches.
        own: pattern of fnmatch -> recipe of the layers that it matches, even if LEFT_OUT has them; None keeps 16 bits. The
            first matching pattern applies.
    """

    recipe: Recipe
    own: Mapping[str, Recipe | None] = field(default_factory=dict)

    def of(self, name: str) -> Recipe | str:
        """Returns the recipe of a layer, or the rule by which it is left out."""
        for pattern, recipe in self.own.items():
            if fnmatch.fnmatchcase(name, pattern):
                return recipe or pattern
        return next((p for p in LEFT_OUT if fnmatch.fnmatchcase(name, p)), self.recipe)


def layers_to_quantize(entries: Mapping[str, Entry], rules: Rules) -> tuple[list[Layer], dict[str, str]]:
    """Returns the layers to quantize, in the order of the files, and reasons for the others.

    Args:
        entries: all tensors.
        rules: rules for all matrices.

    Returns:
        The layers; and name -> reason of every other matrix. Experts of one layer are treated alike: if one projection is left
        out, all are.
    """
    chosen: list[Layer] = []
    left: dict[str, str] = {}
    for tensor, entry in entries.items():
        name, _, suffix = tensor.rpartition(".")
        if suffix != "weight" or entry.dtype not in FLOATS or len(entry.shape) != 2:
            if len(entry.shape) == 3 and entry.dtype in FLOATS and "experts" in tensor:
                left[tensor] = "experts in one tensor; save the model with one tensor an expert"
            continue
        n, k = entry.shape
        recipe = rules.of(name)
        if isinstance(recipe, str):
            left[name] = f"by the rule {recipe}"
        elif k % recipe.weights.k_multiple:
            left[name] = f"K={k} is not a multiple of {recipe.weights.k_multiple}"
        elif recipe.weights == FP8_ROWS and (n % FP8_MULTIPLE or k % FP8_MULTIPLE):
            left[name] = f"[{n}, {k}] are not multiples of {FP8_MULTIPLE}, which engines' FP8 products need"
        else:
            group = group_of(name)
            chosen.append(
                Layer(name, (n, k), recipe, group if recipe == rules.recipe else f"{group}, {recipe}")
            )
    cut = {found[0]: name for name in left if (found := expert_of(name)) is not None}
    for layer in chosen:
        found = expert_of(layer.name)
        if found is not None and found[0] in cut:
            left[layer.name] = f"for experts of one layer are alike, and {cut[found[0]]} is left out"
    return [layer for layer in chosen if layer.name not in left], left


def named(entries: Mapping[str, Entry], names: Iterable[str]) -> str | None:
    """Returns the layer of a checkpoint whose name ends with one of ``names``; None if there is none."""
    prefixes = (t.removesuffix(".weight") for t in entries if t.endswith(".weight"))
    return next((p for p in prefixes if any(p == n or p.endswith(f".{n}") for n in names)), None)


def group_of(name: str) -> str:
    """Returns the key that layers with shared global scales have in common; otherwise the layer's own name."""
    parent, _, child = name.rpartition(".")
    for group in TOGETHER:
        if child in group:
            return f"{parent}.{'+'.join(group)}"
    return name


def groups(layers: Iterable[Layer]) -> dict[str, list[Layer]]:
    """Groups layers by their ``group``."""
    found: dict[str, list[Layer]] = {}
    for layer in layers:
        found.setdefault(layer.group, []).append(layer)
    return found
