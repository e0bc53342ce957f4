"""Quantizes a 16-bit checkpoint folder into another folder, one group of layers at a time."""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.models.checkpoints.checkpoint import read_config
from nvfp4_cute.models.checkpoints.names import EMBEDDINGS, OUTPUT, expert_of, spellings
from nvfp4_cute.models.checkpoints.tensors import INDEX, TensorFiles, TensorWriter
from nvfp4_cute.models.quantizing.calibrate import Seen
from nvfp4_cute.models.quantizing.gptq import gptq
from nvfp4_cute.models.quantizing.layerwise import Inputs, norms_of, quantize_blocks
from nvfp4_cute.models.quantizing.layouts import (
    FP8_ROWS,
    LAYER_FORMATS,
    LAYOUTS,
    RECIPES,
    Recipe,
    announced,
    config_entry,
    hf_quant_config,
    tensors,
    weight_only,
)
from nvfp4_cute.models.quantizing.report import LayerNote
from nvfp4_cute.models.quantizing.rules import Layer, Rules, groups, layers_to_quantize, named
from nvfp4_cute.models.quantizing.weights import (
    Rounding,
    check_finite,
    four_over_six,
    fp8_rows,
    global_scale,
    quantized,
)
from nvfp4_cute.terminal import Progress

Method = Literal["nearest", "four_over_six", "search", "gptq"]
METHODS = get_args(Method)
# What experts that no token reached become: nothing is written, or their activations have a scale of their layer's others.
Unreached = Literal["refuse", "largest", "median"]
UNREACHED = get_args(Unreached)
# Beside the tensors: what the calibration did not see.
CALIBRATION = "calibration.json"

# Files that are not copied. All others besides tensors belong to the model, whatever its weights are.
NOT_COPIED = ("config.json", "hf_quant_config.json", INDEX)


@dataclass(frozen=True, eq=False)
class Calibration:
    """A model and a text for "gptq".

    Attributes:
        model: the folder's 16-bit causal model of transformers, in eval mode; its weights become the rounded ones.
        batches: token ids, [1, n] each.
    """

    model: Any
    batches: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Written:
    """Result of ``quantize_checkpoint``.

    Attributes:
        layers: number of quantized layers.
        left_out: name -> reason, for matrices that were not quantized.
        unreached: experts' projections that no token of the calibration reached, filled as the caller asked.
        uncompensated: with "gptq", layers without recorded inputs, whose scales were searched instead.
        bits_per_weight: mean over the layers that the rules quantize, including scales and layers that patterns keep in 16
            bits, and over the output layer and the embedding if they are quantized.
        bytes_before, bytes_after: bytes of all tensors.
        error: root mean square of the weights' errors divided by that of the weights.
        notes: one per quantized layer (``quantizing.report``).
    """

    layers: int
    left_out: dict[str, str]
    unreached: list[str]
    uncompensated: list[str]
    bits_per_weight: float
    bytes_before: int
    bytes_after: int
    error: float
    notes: list[LayerNote]


def config_of_16_bits(folder: str | Path) -> dict[str, Any]:
    """Returns config.json of a model. Raises CheckpointError if it is missing, or if the model is already quantized."""
    config = read_config(Path(folder))
    if "quantization_config" in config:
        raise CheckpointError(f"{folder} is quantized already; pass the 16-bit model that it was made of")
    return config


def copy_other_files(source: Path, target: Path, left_out: Collection[str]) -> None:
    """Copies a model's files besides tensors, such as the tokenizer, except those named in ``left_out``."""
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in left_out:
            shutil.copy(path, target / path.name)


def quantize_checkpoint(
    folder: str | Path,
    out: str | Path,
    *,
    format: str = "nvfp4",
    layout: str = "modelopt",
    method: Method = "nearest",
    seen: Seen | None = None,
    calibration: Calibration | None = None,
    formats: Mapping[str, str] | None = None,
    lm_head: str | None = None,
    embedding: str | None = None,
    unreached: Unreached = "refuse",
    distill: int = 0,
    device: torch.device | str = "cpu",
) -> Written:
    """Writes ``out`` with the layers' weights quantized and everything else unchanged.

    Args:
        folder: folder of a 16-bit model, with config.json and safetensors files.
        out: a folder without tensors; created if necessary.
        format: a key of RECIPES.
        layout: an entry of LAYOUTS.
        method: "nearest" scales every block by its largest value. "four_over_six" (NVFP4) tries this scale and 1.5 times it.
            "search" minimizes the squared error of every block, weighted by the mean squares of the inputs
            if ``seen`` has them. "gptq" searches scales, and later columns compensate for errors of earlier ones
            (``quantizing.gptq``).
        seen: result of ``calibrate.largest_inputs``; required where activations have stored scales, except by "gptq", which
            finds them itself. Inputs of an expert are its own tokens.
        calibration: required by "gptq" and used only by it.
        formats: pattern of fnmatch -> an entry of LAYER_FORMATS, for the layers that it matches; the first matching pattern
            applies.
        lm_head, embedding: entries of LAYER_FORMATS for the output layer and for the embedding; None for "16bit". If the model
            ties them, a None becomes the other's format, and they stay tied. If both are given and differ, the output layer
            gets its own weights.
        unreached: what happens if no token of the calibration reached an expert whose activations need a scale, or that "gptq"
            needs inputs of. "refuse" raises and writes nothing. "largest" and "median" use that scale of the layer's other
            experts, "gptq" searches their scales, and calibration.json names them.
        distill: passes over the text that train norms and scales of NVFP4 blocks after "gptq", one block of the model after
            another, against the outputs of the 16-bit model (``quantizing.distill``); 0 for none.
        device: device on which weights are rounded, and on which "gptq" runs blocks.

    Raises:
        CheckpointError: the model is already quantized, has no layer to quantize, a layer was not calibrated, or no token
            reached an expert.
        ValueError: a choice is unknown, or "gptq" has no calibration.
    """
    own = dict(formats or {})
    if format not in RECIPES or layout not in LAYOUTS or method not in METHODS:
        raise ValueError(
            f"format={format!r}, layout={layout!r}, method={method!r}: formats are {', '.join(RECIPES)}, layouts "
            f"{', '.join(LAYOUTS)}, methods {', '.join(METHODS)}"
        )
    if layout not in RECIPES[format].layouts:
        raise ValueError(
            f'format={format!r} with layout={layout!r}, which has no word for it; pass layout="{RECIPES[format].layouts[0]}"'
        )
    if method == "four_over_six" and RECIPES[format].weights != NVFP4 and "nvfp4" not in own.values():
        raise ValueError(f'method="four_over_six" chooses scales of NVFP4, not of {format}; take "search"')
    unknown = [f for f in (*own.values(), lm_head, embedding) if f is not None and f not in LAYER_FORMATS]
    if unknown:
        raise ValueError(
            f"{unknown[0]!r} is not a format of single layers; there are {', '.join(LAYER_FORMATS)}"
        )
    if unreached not in UNREACHED:
        raise ValueError(f"unreached={unreached!r} is none of {', '.join(UNREACHED)}")
    if (method == "gptq") != (calibration is not None):
        raise ValueError(
            f"method={method!r} with calibration={calibration!r}: gptq, and it alone, runs the model on a text; pass a "
            "Calibration for it"
        )
    if distill < 0 or (distill and method != "gptq"):
        raise ValueError(
            f'distill={distill} with method={method!r}: training comes after method="gptq"; pass 0 for none'
        )
    source, target = Path(folder), Path(out)
    config = config_of_16_bits(source)
    files = TensorFiles(source)
    own = own | _ends(files, config, lm_head, embedding)
    rules = Rules(RECIPES[format], {p: weight_only(f, layout) for p, f in own.items()})
    layers, left_out = layers_to_quantize(files.entries, rules)
    if not layers:
        name, reason = next(iter(left_out.items()), ("every matrix", "for there is none"))
        raise CheckpointError(
            f"{source} has no layer to quantize: {name} is left out {reason}; pass a model whose layers are matrices, or other "
            "patterns to --keep"
        )
    by_name = {f"{layer.name}.weight": layer for layer in layers}
    shapes = [
        one
        for name, entry in files.entries.items()
        for one in (
            announced(by_name[name].name, by_name[name].shape, by_name[name].recipe, layout)
            if name in by_name
            else [(name, files[name].dtype, entry.shape)]
        )
    ]
    work = _Work(files, method, torch.device(device), unreached, distill)
    with TensorWriter(target, shapes) as writer:
        # Steps that may raise come before the first write.
        for members, weights, scale in work.rounded(groups(layers), seen, calibration):
            for layer, stored in zip(members, weights, strict=True):
                names = [name for name, _, _ in announced(layer.name, layer.shape, layer.recipe, layout)]
                for name, tensor in zip(names, tensors(stored, scale, layout), strict=True):
                    writer.write(name, tensor)
        trained = norms_of(calibration.model, files) if calibration is not None and distill else {}
        for name in files:
            if name not in by_name:
                writer.write(name, trained.get(name, files[name]))
    recipes = {layer.name: layer.recipe for layer in layers}
    if work.unreached:
        said = {"unreached": sorted(work.unreached), "filled_by": unreached, "method": method}
        (target / CALIBRATION).write_text(json.dumps(said, indent=1) + "\n")
    _write_rest(
        source, target, config, recipes, layout, sorted(n for n in left_out if not n.endswith(".weight"))
    )
    return Written(
        len(layers), left_out, work.unreached, work.uncompensated, bits_per_weight(files, layers, rules.recipe), files.nbytes,
        TensorFiles(target).nbytes, work.relative_error, work.notes,
    )  # fmt: skip


def bits_per_weight(files: TensorFiles, layers: Sequence[Layer], recipe: Recipe) -> float:
    """Returns the mean over ``layers``, with 16 bits for all others that one recipe for all would quantize."""
    chosen = {layer.name for layer in layers}
    rest, _ = layers_to_quantize(files.entries, Rules(recipe))
    left = sum(n * k for n, k in (layer.shape for layer in rest if layer.name not in chosen))
    bits = sum(8 * layer.recipe.weights.nbytes(*layer.shape) for layer in layers) + 16 * left
    return bits / (sum(n * k for n, k in (layer.shape for layer in layers)) + left)


def _ends(
    files: TensorFiles, config: dict[str, Any], lm_head: str | None, embedding: str | None
) -> dict[str, str]:
    """Returns the formats of the output layer and of the embedding by their names.

    If the model ties them and they are to differ, replaces ``files`` and ``config`` by those of an untied model.
    """
    if lm_head is None and embedding is None:
        return {}
    table, output = named(files.entries, EMBEDDINGS), named(files.entries, OUTPUT)
    if table is None:
        raise CheckpointError(f"{files.folder} has no embedding: none of {', '.join(EMBEDDINGS)}")
    if output is None:
        first, second = lm_head or embedding, embedding or lm_head
        assert first is not None and second is not None
        if first == second:
            return {table: first}
        output = f"{'language_model.' * table.startswith('language_model.')}{OUTPUT[0]}"
        files.entries[f"{output}.weight"] = files.entries[f"{table}.weight"]
        for fields in (config, config.get("text_config", {})):
            fields["tie_word_embeddings"] = False
    return {name: f for name, f in ((output, lm_head), (table, embedding)) if f is not None}


Rounded = tuple[list[Layer], list[BlockScaledTensor], torch.Tensor | None]


@dataclass
class _Work:
    """Rounds groups of layers, and collects what is reported about them."""

    files: TensorFiles
    method: Method
    device: torch.device
    fill: Unreached
    passes: int = 0
    unreached: list[str] = field(default_factory=list)
    notes: list[LayerNote] = field(default_factory=list)
    uncompensated: list[str] = field(default_factory=list)
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])  # sums over errors and over values

    @property
    def relative_error(self) -> float:
        """Root mean square of the weights' errors divided by that of the weights."""
        return (self.squares[0] / max(self.squares[1], 1e-300)) ** 0.5

    def rounded(
        self, parts: Mapping[str, list[Layer]], seen: Seen | None, calibration: Calibration | None
    ) -> Iterator[Rounded]:
        """Iterates over groups: layers, weights, and the global scale of the activations if one is stored."""
        rest = dict(parts)
        if calibration is not None:
            found = quantize_blocks(
                calibration.model, calibration.batches, parts, self.compensated, self.device, self.passes
            )
            for members, weights, inputs in found:
                self.note(members, weights, inputs)
                del rest[members[0].group]
                if not inputs.rows:
                    self.unreached.extend(layer.name for layer in members)
                    self._may_fill()
                needs = members[0].recipe.needs_calibration
                yield members, weights, global_scale(torch.tensor(inputs.amax)) if needs else None
        amax = _largest_inputs(rest, seen, self.unreached, self.fill)
        self._may_fill()
        for members in Progress(rest.values(), desc="quantize", unit="layer"):
            given = amax.get(members[0].group)
            weights = self.compensated(members, Inputs(), seen)
            self.note(members, weights, Inputs(), seen)
            yield members, weights, None if given is None else global_scale(torch.tensor(given))

    def _may_fill(self) -> None:
        """Raises CheckpointError if no token reached an expert and the caller did not ask to fill it."""
        if self.unreached and self.fill == "refuse":
            experts = {name.rpartition(".")[0] for name in self.unreached}
            raise CheckpointError(
                f"no token of the calibration reached {len(experts)} experts, such as {min(experts)}: nothing says which "
                "activations they have; calibrate on more text, or fill them with --unreached median or largest"
            )

    def compensated(
        self, members: list[Layer], inputs: Inputs, seen: Seen | None = None
    ) -> list[BlockScaledTensor]:
        """Rounds layers that share a global scale with GPTQ, or without compensation where no rows of inputs were recorded."""
        weights = [self.files[f"{layer.name}.weight"].to(self.device) for layer in members]
        for layer, weight in zip(members, weights, strict=True):
            try:
                check_finite(weight)
            except ValueError as error:
                raise CheckpointError(f"{layer.name}.weight: {error}") from error
        amax = torch.stack([w.abs().amax().float() for w in weights]).amax()
        search, format = self.method in ("search", "gptq"), members[0].recipe.weights.name
        if members[0].recipe.weights == FP8_ROWS:
            found = [fp8_rows(w) for w in weights]
        elif self.method == "four_over_six" and members[0].recipe.weights == NVFP4:
            found = [four_over_six(w, amax) for w in weights]
        elif inputs.hessian is not None:
            whole = torch.cat(weights)
            rounding = Rounding.of(whole, format, amax, search)
            joined, ends = gptq(whole, rounding, inputs.hessian), list(accumulate(map(len, weights)))
            found = [joined[end - len(w) : end] for w, end in zip(weights, ends, strict=True)]
        else:
            if self.method == "gptq":
                self.uncompensated.extend(layer.name for layer in members)
            squares = [_seen_of(layer, inputs, seen)[1] for layer in members]
            found = [quantized(w, format, amax, search, one) for w, one in zip(weights, squares, strict=True)]
        return found

    def note(
        self, members: list[Layer], weights: list[BlockScaledTensor], inputs: Inputs, seen: Seen | None = None
    ) -> None:
        """Records what rounding did to the layers of a group."""
        for layer, stored in zip(members, weights, strict=True):
            weight = self.files[f"{layer.name}.weight"].to(self.device)
            tokens, squares = _seen_of(layer, inputs, seen)
            note = LayerNote.of(layer, weight, stored, tokens, squares)
            values = float(weight.double().square().sum())
            self.squares[0] += note.error**2 * values
            self.squares[1] += values
            self.notes.append(note)


def _seen_of(layer: Layer, inputs: Inputs, seen: Seen | None) -> tuple[int | None, torch.Tensor | None]:
    """Returns how many tokens reached a layer, and mean squares of its input's columns; None without a calibration."""
    if inputs.hessian is not None:
        return inputs.rows, inputs.hessian.diagonal() / inputs.rows
    return (None, None) if seen is None else seen.tokens(layer.name)


def _largest_inputs(
    parts: Mapping[str, list[Layer]], seen: Seen | None, unreached: list[str], fill: Unreached
) -> dict[str, float]:
    """Returns the largest magnitude of the input of every group that stores a scale of it."""
    parts = {group: members for group, members in parts.items() if members[0].recipe.needs_calibration}
    if not parts:
        return {}
    if seen is None:
        name = next(iter(parts.values()))[0].name
        raise CheckpointError(
            f"activations of nvfp4 have stored scales, and {name} has none; calibrate with a text, quantize weights only "
            f"(nvfp4a16), or leave out what the model of config.json does not have (--keep {name})"
        )
    return {
        group: max(_seen_by(layer.name, seen, unreached, fill) for layer in members)
        for group, members in parts.items()
    }


def _seen_by(name: str, seen: Seen, unreached: list[str], fill: Unreached) -> float:
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
                reached = row[row > 0]
                return float(reached.median() if fill == "median" and len(reached) else row.amax())
            return float(row[number])
    raise CheckpointError(
        f"{name} was not calibrated: the model of config.json has no such layer; leave it out with --keep {name}"
    )


def _write_rest(
    source: Path,
    target: Path,
    config: dict[str, Any],
    recipes: Mapping[str, Recipe],
    layout: str,
    left_out: list[str],
) -> None:
    copy_other_files(source, target, NOT_COPIED)
    entry = config_entry(recipes, layout, left_out)
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": entry}, indent=2) + "\n")
    if layout == "modelopt":
        own = json.dumps(hf_quant_config(recipes, left_out), indent=4)
        (target / "hf_quant_config.json").write_text(own + "\n")
