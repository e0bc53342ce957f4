"""What tools write for a quantized layer and into config.json, so that the tools and engines can read it back."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch

from nvfp4_cute.formats.block_format import (
    MXFP4,
    MXFP8_E4M3,
    NVFP4,
    BlockFormat,
    FP8_1xK,
    int4_format,
)
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.models.checkpoints.names import is_embedding
from nvfp4_cute.models.checkpoints.stored import FP8

LAYOUTS = ("modelopt", "compressed-tensors")
# One scale per output channel of weights and per token of activations, under the readers' name.
FP8_ROWS = replace(FP8_1xK, name=FP8)


@dataclass(frozen=True)
class Recipe:
    """A format of weights and activations.

    Attributes:
        weights: format of the weights.
        algorithm: ModelOpt's name, empty if it has none.
        group_format: compressed-tensors' name.
        has_input: whether activations are quantized, to the format of the weights.
        needs_calibration: whether activations have a stored scale.
    """

    weights: BlockFormat
    algorithm: str
    group_format: str
    has_input: bool
    needs_calibration: bool = False

    def __str__(self) -> str:
        """Returns a description such as "nvfp4, 16-bit activations"."""
        return f"{self.weights}" + ("" if self.has_input else ", 16-bit activations")

    @property
    def activations(self) -> str | None:
        """Format of the activations; None for 16 bits."""
        return self.weights.name if self.has_input else None

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts that have a name for the recipe."""
        return LAYOUTS if self.algorithm else LAYOUTS[1:]

    @property
    def group_size(self) -> int:
        """Number of values that share a scale."""
        return self.weights.block_k

    @property
    def bits(self) -> int:
        """Bits per element."""
        return self.weights.element.bits


RECIPES = {
    "nvfp4": Recipe(NVFP4, "NVFP4", "nvfp4-pack-quantized", True, True),
    "nvfp4a16": Recipe(NVFP4, "W4A16_NVFP4", "nvfp4-pack-quantized", False),
    "mxfp4": Recipe(MXFP4, "mxfp4", "mxfp4-pack-quantized", True),
    "mxfp8": Recipe(MXFP8_E4M3, "MXFP8", "mxfp8-quantized", True),
    "int4": Recipe(int4_format(128), "", "pack-quantized", False),
    "fp8": Recipe(FP8_ROWS, "FP8_PER_CHANNEL_PER_TOKEN", "float-quantized", True),
}
# Recipes of single layers with 16-bit activations, by format of the weights. ModelOpt has no name for MXFP8 weights alone.
WEIGHT_ONLY = {
    "nvfp4": RECIPES["nvfp4a16"],
    "mxfp4": Recipe(MXFP4, "W4A16_MXFP4", "mxfp4-pack-quantized", False),
    "mxfp8": Recipe(MXFP8_E4M3, "MXFP8", "mxfp8-quantized", False),
    # Activations get one scale per token when they arrive: nothing to calibrate.
    "fp8": RECIPES["fp8"],
}
SIXTEEN = "16bit"
# Formats that single layers can have: weight-only formats, or unchanged 16-bit weights.
LAYER_FORMATS = (*WEIGHT_ONLY, SIXTEEN)


def weight_only(format: str, layout: str) -> Recipe | None:
    """Returns the recipe of a layer with only quantized weights; in ModelOpt's layout, MXFP8 layers also quantize activations.

    Returns None for "16bit", which leaves the layer unchanged.
    """
    if format == SIXTEEN:
        return None
    return RECIPES["mxfp8"] if (format, layout) == ("mxfp8", "modelopt") else WEIGHT_ONLY[format]


def announced(
    name: str, shape: tuple[int, int], recipe: Recipe, layout: str
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Iterates over name, dtype and shape of the tensors of a layer, in the order of ``tensors``."""
    n, k = shape
    if recipe.weights.is_int4:
        yield f"{name}.weight_packed", torch.int32, (n, k // 8)
        yield (
            f"{name}.weight_scale",
            recipe.weights.scale_dtypes[0],
            recipe.weights.scale_shape(n, k, "rowmajor"),
        )
        yield f"{name}.weight_shape", torch.int64, (2,)
        return
    packed = recipe.bits == 4
    data = (n, recipe.weights.row_bytes(k))
    scale = {NVFP4: torch.float8_e4m3fn, FP8_ROWS: torch.float32}.get(recipe.weights, torch.uint8)
    is_ct = layout == "compressed-tensors"
    word = "weight_packed" if is_ct and packed else "weight"
    yield f"{name}.{word}", torch.uint8 if packed else torch.float8_e4m3fn, data
    # ModelOpt has no dimension for K in scales of rows.
    is_flat = recipe.weights == FP8_ROWS and layout == "modelopt"
    yield f"{name}.weight_scale", scale, (n,) if is_flat else recipe.weights.scale_shape(n, k, "rowmajor")
    scalar: tuple[int, ...] = (1,) if is_ct else ()
    if recipe.weights == NVFP4:
        yield f"{name}.{'weight_global_scale' if is_ct else 'weight_scale_2'}", torch.float32, scalar
    if recipe.needs_calibration:
        yield f"{name}.{'input_global_scale' if is_ct else 'input_scale'}", torch.float32, scalar


def tensors(
    weight: BlockScaledTensor, input_scale: torch.Tensor | None, layout: str
) -> Iterator[torch.Tensor]:
    """Iterates over the tensors of a layer, with global scales in the tool's convention."""
    if weight.format.is_int4:
        yield from (weight.data.view(torch.int32), weight.scale, torch.tensor(weight.shape))
        return
    yield weight.data
    yield weight.scale[:, 0] if (weight.format, layout) == (FP8_1xK, "modelopt") else weight.scale
    for factor in (weight.global_scale, input_scale):
        if factor is not None:
            yield (1 / factor).reshape(1) if layout == "compressed-tensors" else factor.reshape(())


def config_entry(recipes: Mapping[str, Recipe], layout: str, left_out: list[str]) -> dict[str, Any]:
    """Returns ``quantization_config`` of config.json.

    Args:
        recipes: recipe of every quantized layer by prefix. The config names each layer if recipes differ or one layer is an
            embedding.
        layout: an entry of LAYOUTS.
        left_out: names of layers that are not quantized.
    """
    if layout == "compressed-tensors":
        return _compressed_tensors(recipes, left_out)
    entry: dict[str, Any] = {"ignore": left_out, **_algorithm(recipes), "producer": _producer()}
    recipe = _only(recipes)
    if recipe is not None and recipe.weights == NVFP4:
        spec = {"dynamic": False, "num_bits": recipe.bits, "type": "float", "group_size": recipe.group_size}
        group: dict[str, Any] = {"weights": spec, "targets": ["Linear"]}
        if recipe.has_input:
            group = {"input_activations": spec} | group
        entry = {"config_groups": {"group_0": group}} | entry
    return entry | {"quant_method": "modelopt"}


def hf_quant_config(recipes: Mapping[str, Recipe], left_out: list[str]) -> dict[str, Any]:
    """Returns the contents of ModelOpt's hf_quant_config.json."""
    entry: dict[str, Any] = _algorithm(recipes) | {"kv_cache_quant_algo": None}
    recipe = _only(recipes)
    if recipe is not None and recipe.algorithm != "mxfp4":
        entry |= _group_size(recipe)
    return {"producer": _producer(), "quantization": entry | {"exclude_modules": left_out}}


def _only(recipes: Mapping[str, Recipe]) -> Recipe | None:
    """Returns the recipe of all layers; None if each layer has to be named."""
    found = set(recipes.values())
    return found.pop() if len(found) == 1 and not any(map(is_embedding, recipes)) else None


def _algorithm(recipes: Mapping[str, Recipe]) -> dict[str, Any]:
    """Returns ``quant_algo`` and, for mixed precision, that of every layer."""
    recipe = _only(recipes)
    if recipe is not None:
        return {"quant_algo": recipe.algorithm}
    each = {n: {"quant_algo": r.algorithm} | _group_size(r) for n, r in recipes.items()}
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": each}


def _group_size(recipe: Recipe) -> dict[str, int]:
    """Returns the entry for values that share a scale; none where a whole row does."""
    return {"group_size": recipe.group_size} if recipe.group_size else {}


def _compressed_tensors(recipes: Mapping[str, Recipe], left_out: list[str]) -> dict[str, Any]:
    """Makes one group per recipe; the most common recipe's group covers all layers that no other group names."""
    by_recipe: dict[Recipe, list[str]] = {}
    for name, recipe in recipes.items():
        by_recipe.setdefault(recipe, []).append(name)
    order = sorted(by_recipe, key=lambda recipe: -len(by_recipe[recipe]))
    groups = {}
    for number, recipe in enumerate(order):
        names = by_recipe[recipe]
        targets = ["Linear", *filter(is_embedding, names)] if number == 0 else names
        groups[f"group_{number}"] = _group(recipe, targets)
    formats = {recipe.group_format for recipe in order}
    return {
        "quant_method": "compressed-tensors", "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed", "config_groups": groups, "ignore": left_out, "kv_cache_scheme": None,
    }  # fmt: skip


def _group(recipe: Recipe, targets: list[str]) -> dict[str, Any]:
    is_nvfp4 = recipe.weights == NVFP4
    if recipe.weights.is_int4:
        spec = {
            "num_bits": recipe.bits, "type": "int", "symmetric": True, "group_size": recipe.group_size, "strategy": "group",
            "dynamic": False,
        }  # fmt: skip
        return {"targets": targets, "weights": spec, "input_activations": None, "output_activations": None,
                "format": recipe.group_format}  # fmt: skip
    spec = {
        "num_bits": recipe.bits, "type": "float", "symmetric": True, "group_size": recipe.group_size,
        "strategy": "tensor_group" if is_nvfp4 else "group", "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn" if is_nvfp4 else "torch.uint8",
    }  # fmt: skip
    if recipe.weights == FP8_ROWS:
        spec = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
        of_tokens = spec | {"strategy": "token", "dynamic": True}
        return {"targets": targets, "weights": spec, "input_activations": of_tokens, "output_activations": None,
                "format": recipe.group_format}  # fmt: skip
    given = spec | {"dynamic": "local" if is_nvfp4 else True} if recipe.has_input else None
    return {"targets": targets, "weights": spec, "input_activations": given, "output_activations": None,
            "format": recipe.group_format}  # fmt: skip


def _producer() -> dict[str, str]:
    return {"name": "nvfp4-cute", "version": version("nvfp4-cute")}
