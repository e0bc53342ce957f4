"""Formats the results of `models bench` as a page and as a picture."""

from pathlib import Path
from typing import Any

from nvfp4_cute.roofline.plot import bars

WAYS = {
    "bf16": "bf16", "fp8": "fp8", "16bit": "NVFP4, 16-bit activations", "nvfp4": "NVFP4, 4-bit activations",
    "auto": "NVFP4, as the layer chooses", "all": "the same with the output layer and the embedding",
    "kept": "as the layer chooses, dequantized weights kept",
}  # fmt: skip
BASE = "bf16"
COLUMNS = (
    ("decode_s", "decode in a graph, ms"),
    ("eager_s", "decode eager, ms"),
    ("prefill_s", "prefill, ms"),
    ("first_token_s", "first token, ms"),
)


def page(report: dict[str, Any], made_by: str, picture: str | None = None) -> str:
    """Returns Markdown with one table per model.

    Args:
        report: result of `models bench --json`, optionally with a "note". None is a time that was not measured.
        made_by: the command.
        picture: name of the file that :func:`draw` writes.
    """
    parts = [
        f"# Whole models on an {report['device']}\n",
        f"Random weights of real configs in transformers {report['transformers']}, torch {report['torch']}, driver "
        f"{report['driver']}, {report['date']}. Made by `{made_by}`.\n",
        "A step decodes one token of every sequence, with a StaticCache. It is replayed from a CUDA graph, or launched kernel by "
        'kernel ("eager"). Prefill is eager: from the prompt to the first token, by the device\'s clock; "first token" is the '
        "same by the host's. The output layer and the embedding stay in 16 bits but where it says so: there they have NVFP4 and "
        "MXFP8. Decoded weights that are kept are not counted in GB. bf16 and fp8 are the modules of transformers with torch's "
        "products. fp8 has one calibrated scale a tensor, and leaves experts in bf16. In parentheses: how many times as fast as "
        "bf16.\n",
        'With a mask, "sdpa" of transformers copies keys and values for every head of a group. "grouped_sdpa", of this package, '
        "does not.\n",
    ]
    parts += [f"{report['note']}\n"] if "note" in report else []
    parts += [f"![Decoding one token: milliseconds a step]({picture})\n"] if picture else []
    for model in report["models"]:
        parts.append(f"## {model['model']}, {model['layers']} layers\n\n{_table(model)}\n")
        parts += [f"- {line}\n" for line in model["left_out"]]
        eager = {w["decode"] for w in model["ways"] if w["decode"] not in ("CUDA graph", "eager")}
        parts += [f"- Not captured: {how}\n" for how in sorted(eager)]
    return "\n".join(parts)


def draw(report: dict[str, Any], path: Path) -> None:
    """Draws the times of decoding in a graph, in ms. Raises ValueError if matplotlib is not installed."""
    key_of = lambda model, w: (model["model"], w["attention"], w["batch"], w["prompt"])
    every = [(model, w) for model in report["models"] for w in model["ways"]]
    cases = dict.fromkeys(key_of(model, w) for model, w in every if w["decode_s"])
    times = {(*key_of(model, w), w["way"]): 1e3 * w["decode_s"] for model, w in every if w["decode_s"]}
    ways = [way for way in WAYS if any(key[-1] == way for key in times)]
    labels = [f"{model}, {batch} x {prompt}, {attention}" for model, attention, batch, prompt in cases]
    series = {WAYS[way]: [times.get((*case, way)) for case in cases] for way in ways}
    title = f"Decoding a token of every sequence, CUDA graph, {report['device']}"
    bars(path, title, labels, series, unit="ms per step")


def _table(model: dict[str, Any]) -> str:
    key_of = lambda w: (w["attention"], w["prompt"], w["batch"])
    base = {key_of(w): w for w in model["ways"] if w["way"] == BASE}
    lines = [
        ("attention", "sequences x prompt", "weights", "GB", "of bf16's", *(title for _, title in COLUMNS))
    ]
    lines.append(("---",) * len(lines[0]))
    order = {way: number for number, way in enumerate(WAYS)}
    for w in sorted(model["ways"], key=lambda w: (*key_of(w), order[w["way"]])):
        beside = base.get(key_of(w))
        share = "-" if beside is None else f"{w['weight_bytes'] / beside['weight_bytes']:.3f}"
        cells = [_cell(w[key], None if beside is None or w is beside else beside[key]) for key, _ in COLUMNS]
        case = f"{w['batch']} x {w['prompt']}"
        lines.append((w["attention"], case, WAYS[w["way"]], f"{w['weight_bytes'] / 1e9:.2f}", share, *cells))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(seconds: float | None, base: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.2f}" + ("" if base is None else f" ({base / seconds:.2f})")
