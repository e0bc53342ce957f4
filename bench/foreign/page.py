"""The page of the comparison, and its picture."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.foreign import ours
from nvfp4_cute.bench.foreign.cells import FLASHINFER, MODELS, cells, published
from nvfp4_cute.bench.foreign.kernels import FOREIGN
from nvfp4_cute.bench.foreign.layers import LIGHTMOE, Layer, layers
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.roofline import speed_of_light as light
from nvfp4_cute.roofline.plot import bars
from nvfp4_cute.terminal import markdown_table

RESULTS = Path(__file__).parents[1] / "results"
Records = Mapping[str, dict[str, Any]]
LAYERS = "whole layers"
WHY = {
    "B200": "What bounds these products, and what mean a kernel could reach: `bench/notes/2026-11-29-b200-decode.md` for up to "
    "1,024 tokens, `bench/notes/2026-11-29-b200-prefill.md` for more."
}
"""Sentences on the notes about a GPU."""


@dataclass(frozen=True)
class Best:
    """The fastest tile of a kernel on a cell.

    Attributes:
        us: modelled microseconds.
        tile: the tile; empty for our kernel, which chooses for itself.
        equal: whether results were compared and all had the expected bits.
    """

    us: float
    tile: str
    equal: bool


def best_of(known: Records, kernel: str, case: Case | Layer) -> Best | None:
    """Returns the fastest tile, or None if no tile was modelled."""
    start = f"{kernel} | {case} | "
    found = [
        Best(record["us"], key.removeprefix(start), record.get("compared", 0) > 0 and not _wrong(record))
        for key, record in known.items()
        if key.startswith(start) and "us" in record
    ]
    return min(found, key=lambda best: best.us, default=None)


def _wrong(record: Mapping[str, Any]) -> int:
    return int(record.get("differing", 0)) + int(record.get("outside", 0))


@dataclass(frozen=True)
class Row:
    """A cell with times of every kernel that ran."""

    case: Case | Layer
    ours: Best
    others: dict[str, Best]

    @property
    def best(self) -> str:
        """Name of the fastest foreign kernel."""
        return min(self.others, key=lambda name: self.others[name].us)

    @property
    def ratio(self) -> float:
        """Our time over the fastest foreign one's."""
        return self.ours.us / self.others[self.best].us


def rows_of(known: Records) -> list[Row]:
    """Returns the cells and layers with our time and a foreign one, without cells that FlashInfer published."""
    rows = []
    for case in (*cells(), *layers()):
        if isinstance(case, Case) and case.problem == FLASHINFER:
            continue
        mine = best_of(known, ours.NAME, case)
        others = {name: best for name in FOREIGN if (best := best_of(known, name, case)) is not None}
        if mine is not None and others:
            rows.append(Row(case, mine, others))
    return rows


def group_of(case: Case | Layer) -> str:
    """Returns the cell's group in summaries: equal groups, the competition, or a number of tokens, of layers or products."""
    if isinstance(case, Layer):
        return f"{LAYERS}, {str(case).rpartition(', ')[2]}"
    return case.name.rpartition(", ")[2] if ", " in case.name else case.problem


def text(known: Records, target: Target) -> str:
    """Returns the page."""
    groups = _groups(known)
    of_layers = [row for row in rows_of(known) if isinstance(row.case, Layer)]
    parts = [
        f"# Foreign kernels: {target.name}",
        "Modelled times of our grouped products and layers of experts next to those of foreign CuTe DSL kernels. Every kernel "
        "multiplies equal operands on the emulator, and the timing model replays its launch with the same constants. Lower is "
        "better. We cannot measure the error of the model on Blackwell (`bench/results/timing_model.md`).",
        f"![Foreign times over ours]({stem(target)}.png)",
        "## Summary",
        "The ratio is our time, with the config that we choose, over that of the fastest foreign kernel with its best tile. Ours "
        "is faster below 1. A kernel at speed of light would have the least ratio.",
        _summary(groups, target),
        *([WHY[target.name]] if target.name in WHY else []),
        *_slower(rows_of(known), target),
        "## Cells",
        'Times in us. The tile is that of the fastest foreign kernel. "bits": whether all compared results of all kernels in '
        'the row have the expected bits. "-": not modelled.',
        *(
            f"### {name[0].upper()}{name[1:]}\n\n{_table(of, target)}"
            for name, of in groups.items()
            if not name.startswith(LAYERS)
        ),
        *([f"### Whole layers\n\n{_layers(of_layers, target)}"] if of_layers else []),
        "## Notes",
        "\n".join(f"- {note}" for note in _notes(known, target)),
    ]
    return "\n\n".join(parts) + "\n"


def _groups(known: Records) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows_of(known):
        groups[group_of(row.case)].append(row)
    return groups


def _floor(row: Row, target: Target) -> float:
    return light.physical_floor(row.case.work, target).us


def _summary(groups: Mapping[str, Sequence[Row]], target: Target) -> str:
    header = ("cells", "count", "ratio (geometric mean)", "least ratio", "best", "worst", "foreign faster")
    lines = []
    for name, rows in groups.items():
        ratios = [row.ratio for row in rows]
        least = geometric_mean(_floor(row, target) / row.others[row.best].us for row in rows)
        numbers = (geometric_mean(ratios), least, min(ratios), max(ratios))
        lines.append((name, str(len(rows)), *(f"{x:.2f}" for x in numbers), str(sum(x > 1 for x in ratios))))
    return markdown_table(header, lines)


def _slower(rows: Sequence[Row], target: Target) -> list[str]:
    """Returns the section on cells in which a foreign kernel is faster; empty if there are none."""
    slower = sorted((row for row in rows if row.ratio > 1), key=lambda row: -row.ratio)
    if not slower:
        return []
    lines = []
    for row in slower:
        theirs, name = row.others[row.best], str(row.case).removesuffix(" to bf16")
        light_of = (f"{_floor(row, target) / us:.0%}".replace("%", " %") for us in (row.ours.us, theirs.us))
        times = (f"{row.ours.us:.2f}", f"{theirs.us:.2f}")
        lines.append((name, *times, f"{row.ratio:.3f}", *light_of, f"{row.best} {theirs.tile}".strip()))
    header = (
        "cell",
        "ours",
        "foreign",
        "ratio",
        "ours, of speed of light",
        "foreign, of speed of light",
        "foreign kernel",
    )
    return ["## Where a foreign kernel is faster", markdown_table(header, lines)]


def _table(rows: Sequence[Row], target: Target) -> str:
    header = ("cell", "speed of light", "ours", *FOREIGN, "ratio", "fastest foreign", "bits")
    lines = []
    for row in rows:
        kernels = [row.ours, *row.others.values()]
        times = (f"{row.others[name].us:.2f}" if name in row.others else "-" for name in FOREIGN)
        name = f"{row.case.problem}, {row.case.name.partition(',')[0]}"
        lines.append(
            (name, f"{_floor(row, target):.2f}", f"{row.ours.us:.2f}", *times, f"{row.ratio:.2f}",
             f"{row.best} {row.others[row.best].tile}", "equal" if all(k.equal for k in kernels) else "**differ**")
        )  # fmt: skip
    return markdown_table(header, lines)


def _layers(rows: Sequence[Row], target: Target) -> str:
    header = ("layer", "speed of light", "ours", LIGHTMOE, "ratio")
    lines = [
        (str(row.case), f"{_floor(row, target):.2f}", f"{row.ours.us:.2f}",
         f"{row.others[LIGHTMOE].us:.2f}", f"{row.ratio:.2f}")
        for row in rows
    ]  # fmt: skip
    return (
        "All launches after the router, in a CUDA graph on a cold L2, next to LightMoE's `InferenceMoE` with its static "
        "scheduler. The emulator executes a few clusters of every launch. LightMoE pads the 1,856 "
        "columns of Nemotron-3.5-Lightning to 1,920. If experts are divided over GPUs, every token has equally many on "
        "each. Where LightMoE launches two CTAs per SM (some sizes, 2 to 64 tokens), its scheduler starts every CTA at the "
        "same tile and computes few of the tiles; its grid of one CTA per SM is modelled instead. Results of layers are "
        "not compared.\n\n" + markdown_table(header, lines)
    )


def _notes(known: Records, target: Target) -> list[str]:
    versions = {name: set[str]() for name in FOREIGN}
    reasons: dict[str, int] = Counter()
    for key, record in known.items():
        kernel = key.partition(" | ")[0]
        if kernel in versions and record.get("version"):
            versions[kernel].add(record["version"])
        if "us" not in record:
            reasons[f"{kernel}: {record['reason']}"] += 1
    modelled = [record for record in known.values() if "us" in record]
    executed = [record for record in modelled if record.get("executed_clusters")]
    parts = [sum(record[name] for record in executed) for name in ("executed_clusters", "clusters")]
    made = {(_maker(key), record["sources"]) for key, record in known.items() if "us" in record}
    sources = ", ".join(
        f"{maker} {count}" for maker, count in sorted(Counter(maker for maker, _ in made).items())
    )
    divided = "; ".join(f"{m.experts} of {m.name} over {m.gpus}" for m in MODELS if m.gpus > 1)
    return [
        f"made by `python -m nvfp4_cute.bench.foreign --target '{target.name}' --results bench/results/{stem(target)}.json "
        "--save`, which continues that file.",
        f"kernels: {'; '.join(f'{name} {chr(44).join(sorted(found))}'.strip() for name, found in versions.items())}. "
        "`python -m nvfp4_cute.bench.foreign --help` says how to get them.",
        f"{len(modelled)} times. Only some of the clusters with equal work were executed: {parts[0]} of {parts[1]} clusters of "
        "foreign launches.",
        f"{sum(r.get('compared', 0) for r in modelled):,} results of executed clusters were compared with exact sums, rounded to "
        f"bfloat16; {sum(map(_wrong, modelled)):,} differ. Scales are 1 or 2, so that fp32 sums are exact in any order. An "
        "executed cluster must also compute the tiles that the replay expects of it, and no others.",
        "all kernels take rows of all experts one after the other, except two: CUTLASS list takes lists of matrices, whose sizes "
        "the host knows, and in FlashInfer masked every expert has room for the rows of the largest one.",
        "tiles that an earlier version of the timing model had more than 3 % behind the fastest foreign kernel are not always "
        "modelled again.",
        "only the launch that multiplies is counted; CUTLASS moe makes tensor maps in a launch before it.",
        "foreign kernels have static schedulers; LightMoE's and QuACK's dynamic ones are not modelled.",
        "tokens choose experts uniformly at random (`bench/cases.py`). If experts are divided over GPUs, one GPU is modelled, "
        f"with tokens of all: {divided}.",
        "versions of the sources that times depend on (emulator, timing model, and our kernels or the calls of foreign ones): "
        f"{sources}; the JSON file has the digest for every time.",
        "times of cells that FlashInfer published: `bench/results/timing_model.md`.",
        *(f"not modelled, {reason} ({count} cells and tiles)" for reason, count in reasons.items()),
        *_missing(known),
    ]


def _maker(key: str) -> str:
    """Returns the kernel of a record, with layers of a foreign one apart."""
    kernel, cell, _ = key.split(" | ")
    return kernel + " (layers)" * (" layer, " in cell and kernel != ours.NAME)


def _missing(known: Records) -> list[str]:
    """Returns a note on cells that are not modelled yet, by group, with names where some of a group are."""
    done = {str(row.case) for row in rows_of(known)}
    by_group: dict[str, list[Case | Layer]] = defaultdict(list)
    for case in cells():
        if case.problem != FLASHINFER:
            by_group[group_of(case)].append(case)
    for layer in layers():
        if any(str(other) in done for other in layers()):
            by_group[group_of(layer)].append(layer)
    missing = {group: [case for case in of if str(case) not in done] for group, of in by_group.items()}
    text = [
        f"{len(of)} of {len(by_group[group])} of {group}"
        + (
            f" ({'; '.join(str(case).removesuffix(' to bf16') for case in of)})"
            if len(of) < len(by_group[group])
            else ""
        )
        for group, of in missing.items()
        if of
    ]
    return [f"not modelled yet: {', '.join(text)}."] if text else []


def published_table(results: Path) -> str:
    """Returns Markdown: times that FlashInfer published for its masked grouped GEMM, and modelled ones from records."""
    known = json.loads(results.read_text())
    header = ("groups of rows x N x K", "published us", "modelled us", "error", "ours, modelled us")
    lines = []
    for case, us in published().items():
        theirs, mine = (best_of(known, kernel, case) for kernel in ("FlashInfer masked", ours.NAME))
        if theirs is not None:
            error, of_ours = 100 * (theirs.us / us - 1), "-" if mine is None else f"{mine.us:.1f}"
            lines.append((case.name, f"{us:g}", f"{theirs.us:.1f}", f"{error:+.0f} %", of_ours))
    return markdown_table(header, lines)


def picture(known: Records, path: Path, target: Target) -> None:
    """Draws the geometric mean of every foreign kernel's time over ours, by group of cells."""
    groups = _groups(known)

    def mean(name: str, rows: Sequence[Row]) -> float | None:
        ratios = [row.others[name].us / row.ours.us for row in rows if name in row.others]
        return geometric_mean(ratios) if ratios else None

    series = {name: [mean(name, rows) for rows in groups.values()] for name in FOREIGN}
    title = f"Foreign grouped GEMMs, {target.name}, modelled: time over ours (geometric mean; above 1 ours is faster)"
    bars(
        path, title, [f"{name} ({len(rows)})" for name, rows in groups.items()], series, unit="time over ours"
    )


def save(known: Records, target: Target) -> None:
    """Writes page and picture into ``bench/results``."""
    (RESULTS / f"{stem(target)}.md").write_text(text(known, target))
    picture(known, RESULTS / f"{stem(target)}.png", target)


def stem(target: Target) -> str:
    """Returns the name of a GPU's page, without an extension."""
    return f"{target.name.lower().replace(' ', '_')}_foreign"
