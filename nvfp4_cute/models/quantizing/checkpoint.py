"""A 16-bit checkpoint folder to a quantized one, a group of layers at a time."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models.checkpoints.checkpoint import read_config
from nvfp4_cute.models.checkpoints.names import expert_of, spellings
from nvfp4_cute.models.checkpoints.tensors import INDEX, TensorFiles, TensorWriter
from nvfp4_cute.models.quantizing.calibrate import Seen
from nvfp4_cute.models.quantizing.layouts import (
    LAYOUTS,
    RECIPES,
    Recipe,
    announced,
    config_entry,
    hf_quant_config,
    tensors,
)
from nvfp4_cute.models.quantizing.rules import Layer, groups, layers_to_quantize
from nvfp4_cute.models.quantizing.weights import global_scale, quantized

# What a folder has beside tensors and config.json, and what belongs to its model whatever its weights.
NOT_COPIED = ("config.json", "hf_quant_config.json", INDEX)


@dataclass(frozen=True)
class Written:
    """What was done.

    Attributes:
        layers: how many were quantized. left_out: name -> reason of matrices that were not.
        unreached: experts' projections that no token of the calibration reached; they have their layer's largest scale.
        bytes_before, bytes_after: of all tensors. error: root mean square of the weights' errors over that of the weights.
    """

    layers: int
    left_out: dict[str, str]
    unreached: list[str]
    bytes_before: int
    bytes_after: int
    error: float


def quantize_checkpoint(
    folder: str | Path,
    out: str | Path,
    *,
    format: str = "nvfp4",
    layout: str = "modelopt",
    seen: Seen | None = None,
    search: bool = False,
    keep: Sequence[str] = (),
    device: torch.device | str = "cpu",
) -> Written:
    """Write ``out``: the layers' weights quantized, everything else as it was.

    Args:
        folder: of a 16-bit model, config.json and safetensors files. out: a folder without tensors; made if need be.
        format: of RECIPES. layout: of LAYOUTS.
        seen: of ``calibrate.largest_inputs``; needed where activations have stored scales.
        search: as of ``weights.quantized``. keep: patterns of layers to leave in 16 bits, beside ``rules.LEFT_OUT``.
        device: where weights are rounded.

    Raises:
        CheckpointError: the model is quantized already, has no layer to quantize, or a layer was not calibrated.
        ValueError: an unknown choice.
    """
    if format not in RECIPES or layout not in LAYOUTS:
        raise ValueError(
            f"format={format!r}, layout={layout!r}: formats are {', '.join(RECIPES)}, layouts {', '.join(LAYOUTS)}"
        )
    recipe, source, target = RECIPES[format], Path(folder), Path(out)
    config = read_config(source)
    if "quantization_config" in config:
        raise CheckpointError(f"{source} is quantized already; pass the 16-bit model that it was made of")
    files = TensorFiles(source)
    layers, left_out = layers_to_quantize(files.entries, recipe.group_size, keep)
    if not layers:
        raise CheckpointError(
            f"{source} has no layer to quantize: {next(iter(left_out.items()), 'no matrix at all')}"
        )
    unreached: list[str] = []
    inputs = _input_scales(layers, recipe, seen, unreached)
    by_name = {f"{layer.name}.weight": layer for layer in layers}
    shapes = [
        one
        for name, entry in files.entries.items()
        for one in (
            announced(name.removesuffix(".weight"), by_name[name].shape, recipe, layout)
            if name in by_name
            else [(name, files[name].dtype, entry.shape)]
        )
    ]
    errors = [0.0, 0.0]
    with TensorWriter(target, shapes) as writer:
        for name in files:
            if name not in by_name:
                writer.write(name, files[name])
        for members in tqdm(groups(layers).values(), desc="layers", leave=False, disable=None):
            _write_group(writer, files, members, recipe, layout, inputs, search, device, errors)
    _write_rest(
        source, target, config, recipe, layout, sorted(n for n in left_out if not n.endswith(".weight"))
    )
    after = TensorFiles(target).nbytes
    return Written(
        len(layers), left_out, unreached, files.nbytes, after, (errors[0] / max(errors[1], 1e-300)) ** 0.5
    )


def _write_group(
    writer, files, members: list[Layer], recipe: Recipe, layout, inputs, search, device, errors
) -> None:
    """Layers that share a global scale."""
    weights = [files[f"{layer.name}.weight"].to(device) for layer in members]
    amax = torch.stack([w.abs().amax().float() for w in weights]).amax()
    for layer, weight in zip(members, weights, strict=True):
        try:
            stored = quantized(weight, recipe.weights.name, amax, search)
        except ValueError as error:
            raise CheckpointError(f"{layer.name}.weight: {error}") from error
        values = weight.double()
        errors[0] += float((stored.dequantize(torch.float32).double() - values).square().sum())
        errors[1] += float(values.square().sum())
        names = [name for name, _, _ in announced(layer.name, layer.shape, recipe, layout)]
        for name, tensor in zip(names, tensors(stored, inputs.get(layer.name), layout), strict=True):
            writer.write(name, tensor)


def _input_scales(
    layers: list[Layer], recipe: Recipe, seen: Seen | None, unreached: list[str]
) -> dict[str, torch.Tensor]:
    """Layer -> global scale of its input, which layers of a group share."""
    if not recipe.needs_calibration:
        return {}
    if seen is None:
        raise CheckpointError(
            "activations of nvfp4 have stored scales; calibrate with a text, or quantize weights only (nvfp4a16)"
        )
    amax = {layer.name: _seen_by(layer.name, seen, unreached) for layer in layers}
    scales = {}
    for members in groups(layers).values():
        largest = max(amax[layer.name] for layer in members)
        for layer in members:
            scales[layer.name] = global_scale(torch.tensor(largest))
    return scales


def _seen_by(name: str, seen: Seen, unreached: list[str]) -> float:
    expert = expert_of(name)
    for one in spellings(name):
        if one in seen.linears:
            return seen.linears[one]
    if expert is not None:
        prefix, kind, number = expert
        table = next((seen.experts[one] for one in spellings(prefix) if one in seen.experts), None)
        if table is not None and number is not None:
            row = table[1 if kind == "down" else 0]
            if row[number] == 0:
                unreached.append(name)
            return float(row[number]) or float(row.amax())
    raise CheckpointError(
        f"{name} was not calibrated: the model of config.json has no such layer; leave it out with --keep {name}"
    )


def _write_rest(
    source: Path, target: Path, config: dict[str, Any], recipe: Recipe, layout: str, left_out: list[str]
) -> None:
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in NOT_COPIED:
            shutil.copy(path, target / path.name)
    entry = config_entry(recipe, layout, left_out)
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": entry}, indent=2) + "\n")
    if layout == "modelopt":
        own = json.dumps(hf_quant_config(recipe, left_out), indent=4)
        (target / "hf_quant_config.json").write_text(own + "\n")
