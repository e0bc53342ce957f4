"""Page and picture of modelled layers: ``results/layers.md`` and ``.png``, from the times of ``bench.layers``."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvfp4_cute.bench.layers import (
    EXPERTS,
    LINEAR,
    PUBLISHED_TARGETS,
    PUBLISHED_TOKENS,
    TOKENS,
    Cell,
    cells,
    model_all,
)
from nvfp4_cute.bench.modelled import stated_error
from nvfp4_cute.bench.moe import MODELS
from nvfp4_cute.gpus.targets import Target, lookup
from nvfp4_cute.roofline.plot import curves

RESULTS = Path(__file__).parent / "results"
PAGE, PICTURE = "layers.md", "layers.png"
Records = Mapping[str, dict[str, Any]]
"""Records of cells by their keys, made by ``layers.record``."""

FLASHINFER = "FlashInfer, docs/design_docs/flashinfer_moe_api.md: CuTe DSL, TRT-LLM"
PUBLISHED: dict[tuple[str, str, int], tuple[str, str]] = {
    **{
        ("B200", "deepseek-v3", tokens): (times, FLASHINFER)
        for tokens, times in {1: "46, 42", 16: "428, 365", 64: "938, 822", 256: "1115, 936"}.items()
    },
    ("B200", "flashinfer-h1024", 128): ("16", FLASHINFER.replace(", TRT-LLM", "")),
    ("B200", "flashinfer-h1024", 2048): ("23", FLASHINFER.replace(", TRT-LLM", "")),
}
"""us by GPU, layer and tokens, and the source. The implementations' activations are also NVFP4."""

HEAD = """# Layers, modelled

![times of layers of experts by tokens, and their floors](layers.png)

{error} Made by `{command}`.

Times in us of a whole layer as its user calls it, in a CUDA graph with a cold L2: `MoE` with `route` on bf16 tokens, whose
experts are chosen by random logits, and `QuantizedLinear` with a calibrated scale. The first number in parentheses is the
speed of light, that is the least time for moving the chosen experts' weights and the tokens once, in percent of the modelled
time. The other numbers are the rates at which each product reads device memory, in percent of the bandwidth. On the sm_100
family a product loads weights while the previous launch ends; these bytes count as the product's. `-`: not modelled.

Published times are their authors', for other kernels, GPUs and harnesses; FlashInfer's times contain no routing. For other
layers, bandwidths were published. Gluon's first product of gpt-oss-120b's experts, MXFP8 by MXFP4, reads at 5.3 to 7.5 TB/s
on a B200 at 128 to 640 tokens (triton#10047, #10124). FlashInfer's masked NVFP4 products read at 4.5 (flashinfer#2503).

- A B300 runs the kernels of a B200, except where tensor cores are the limit: there an MMA multiplies 96 elements of K
  (`_ultra` in a config).
- Rows of gpt-oss's gate and up take turns in blocks of 32, as in a loaded model, so that one launch computes both.
- The emulator executes one of several clusters with equal work. For 8 tokens of Qwen3-30B-A3B, this makes the time 0.6 %
  longer on a B200, and 0.2 % on an RTX 5090, than executing all of them.
"""


def page(known: Records, targets: Sequence[str], command: str) -> str:
    """Returns records of the cells of `targets` in Markdown."""
    error = f"Modelled, not measured ({stated_error()})."
    parts = [
        HEAD.format(error=error, command=command) + "".join(f"- {note}\n" for note in _notes(known, targets))
    ]
    there = {key.split("/")[1] for key in known}
    parts += [_layer_table(known, layer, targets) for layer in (*EXPERTS, *LINEAR) if layer in there]
    return "\n".join(parts)


def _notes(known: Records, targets: Sequence[str]) -> list[str]:
    """Returns notes: the sources that modelled the records, and the number of cells without a record."""
    sources = sorted({found["sources"] for found in known.values() if "sources" in found})
    notes = [f"modelled by sources {', '.join(sources)}."] if sources else []
    missing = [cell for cell in cells(targets) if cell.key not in known]
    if missing:
        counts = {name: sum(cell.target == name for cell in missing) for name in targets}
        named = ", ".join(f"{count} of {name}" for name, count in counts.items() if count)
        notes.append(f"{len(missing)} cells were not modelled for lack of time: {named}.")
    return notes


def _layer_table(known: Records, layer: str, targets: Sequence[str]) -> str:
    columns = [name for name in targets if layer not in PUBLISHED_TOKENS or name in PUBLISHED_TARGETS]
    has_published = any(name == layer for _, name, _ in PUBLISHED)
    lines = [("tokens", *columns, *(["published"] if has_published else []))]
    lines.append(("---:",) * (1 + len(columns)) + (("---",) if has_published else ()))
    counts = {int(key.rpartition("/")[2]) for key in known if key.split("/")[1] == layer}
    reasons = {}
    for tokens in sorted(counts):
        row, others = [str(tokens)], []
        for target in columns:
            found = known.get(Cell(target, layer, tokens).key, {})
            row.append(_cell_text(found, target) if "us" in found else "-")
            if "missing" in found:
                reasons[target] = found["missing"]
            if (target, layer, tokens) in PUBLISHED:
                others.append(f"{target}: " + " us (".join(PUBLISHED[target, layer, tokens]) + ")")
        lines.append((*row, *(["; ".join(others)] if has_published else [])))
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"## {layer}\n\n{text}\n" + "".join(f"\n- {target}: {why}\n" for target, why in reasons.items())


def _cell_text(found: dict[str, Any], target: str) -> str:
    """Returns us, percent of speed of light, and percent of bandwidth per product of experts."""
    floor = f"{100 * found['floor_us'] / found['us']:.0f} %"
    shares = [f"{100 * share:.0f}" for share in bandwidth_shares(found.get("launches", ()), lookup(target))]
    return f"{found['us']:.1f} ({'; '.join([floor, *([', '.join(shares)] if shares else [])])})"


def bandwidth_shares(launches: Sequence[dict[str, Any]], target: Target) -> list[float]:
    """Returns each product's traffic over its time, as a share of the bandwidth of floors."""
    most = target.floor_bandwidth_bytes_per_s
    return [
        one["hbm_bytes"] / (1e-6 * one["us"] * most)
        for one in launches
        if one["kernel"].startswith("nvfp4_grouped")
    ]


def picture(path: Path, known: Records, targets: Sequence[str]) -> None:
    """Draws times of layers of experts by tokens, and their floors, to a file.

    Raises:
        ValueError: matplotlib is not installed.
    """
    panels = {}
    for layer in MODELS:
        series = {}
        for target in targets:
            found = [(tokens, known.get(Cell(target, layer, tokens).key, {})) for tokens in TOKENS]
            points = [(tokens, one["us"], one["floor_us"]) for tokens, one in found if "us" in one]
            if points:
                series[target] = points
        panels[layer] = series
    curves(path, "Layers of experts, modelled; dotted: speed of light", panels, x="tokens", y="us")


def run(
    targets: Sequence[Target], *, containing: str, jobs: int, results: Path | None, as_json: bool, save: bool
) -> int:
    """Models the layers of some GPUs and prints them. Returns 0.

    Args:
        containing: only layers whose name contains this text.
        jobs, results: see ``layers.model_all``.
        as_json: print records instead of a page.
        save: write the page and the picture.

    Raises:
        ValueError: no layer's name contains the text.
    """
    names = [target.name for target in targets]
    wanted = cells(names, containing)
    if not wanted:
        raise ValueError(f"no layer contains {containing!r}; there are {', '.join((*EXPERTS, *LINEAR))}")
    known = model_all(wanted, jobs=jobs, results=results)
    chosen = {cell.key: known[cell.key] for cell in wanted}
    options = f" --containing {containing!r}" if containing else ""
    text = page(chosen, names, f"nvfp4-cute bench layers{options} --jobs {jobs} --save")
    print(json.dumps(chosen, indent=1) if as_json else text)
    if save:
        write(chosen, names, text)
    return 0


def write(known: Records, targets: Sequence[str], text: str) -> None:
    """Writes the page and its picture to the results. Raises ValueError if matplotlib is not installed."""
    picture(RESULTS / PICTURE, known, targets)
    (RESULTS / PAGE).write_text(text)
