"""Pictures. They need matplotlib, which only the extra `plot` installs.

Bars begin at zero on a linear axis. A logarithmic axis holds only points or curves, and is labelled as logarithmic.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from nvfp4_cute.gpus.targets import MATH_FORMATS, Target

INTENSITIES = (1.0, 20000.0)
ROOF = {"color": "0.4", "linewidth": 1}
GROUP_GAP = 0.7
"""Space after a group of bars, in bars."""
LOOKS = ("o-", "s--", "^-.", "v-", "D--")
"""Markers and lines of curves, in order."""


def _pyplot() -> Any:
    """Returns matplotlib's pyplot with a backend that draws into files.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            'pictures need matplotlib, which is not installed; run `pip install "nvfp4-cute[plot]"`'
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def roofline(path: Path, target: Target, points: Sequence[tuple[str, float, float]]) -> None:
    """Writes a roofline of ``target`` as a picture; the suffix of ``path`` determines the format.

    Args:
        points: (label, FLOP per byte, FLOP/s) of every case; cases with one label share a colour.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(10, 6), constrained_layout=True)
    bandwidth = target.floor_bandwidth_bytes_per_s
    rates = {math: target.math_flops_per_s(math) for math in MATH_FORMATS}
    known: dict[float, list[str]] = {}
    for math, known_rate in rates.items():
        if known_rate is not None:
            known.setdefault(known_rate, []).append(math)
    ridge = max(known) / bandwidth
    axes.plot([INTENSITIES[0], ridge], [INTENSITIES[0] * bandwidth, ridge * bandwidth], **ROOF)
    for rate, maths in known.items():
        axes.plot([rate / bandwidth, INTENSITIES[1]], [rate, rate], **ROOF)
        axes.annotate(
            f"{', '.join(maths)} {rate / 1e15:.4g} PFLOP/s", (INTENSITIES[1], rate), ha="right", va="bottom"
        )
    for label in dict.fromkeys(label for label, _, _ in points):
        of_label = [(x, y) for name, x, y in points if name == label]
        axes.plot(*zip(*of_label, strict=True), "o", alpha=0.7, label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=INTENSITIES,
        xlabel="FLOP per byte of memory traffic, logarithmic axis",
        ylabel="FLOP/s, logarithmic axis",
        title=f"{target.name}: computed floors, not measurements ({bandwidth / 1e12:.4g} TB/s)",
    )
    axes.grid(which="major", alpha=0.3)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def bars(
    path: Path,
    title: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    unit: str,
) -> None:
    """Writes horizontal bars on a linear axis that begins at zero, with one group of bars per label.

    Args:
        labels: names of the groups, from top to bottom.
        series: by name, one value per label, or None for a missing value, which takes no space.
        unit: name and unit of the axis.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    known = [sum(values[row] is not None for values in series.values()) for row in range(len(labels))]
    tops = [sum(known[:row]) + GROUP_GAP * row for row in range(len(labels))]
    rows = sum(known) + GROUP_GAP * len(labels)
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.17 * rows), constrained_layout=True)
    used = [0] * len(labels)
    for name, values in series.items():
        places, lengths = [], []
        for row, value in enumerate(values):
            if value is not None:
                places.append(tops[row] + used[row])
                lengths.append(value)
                used[row] += 1
        if places:
            drawn = axes.barh(places, lengths, 0.9, label=name)
            axes.bar_label(drawn, fmt="%.3g", padding=2, fontsize=7)
    middles = [top + (count - 1) / 2 for top, count in zip(tops, known, strict=True)]
    axes.set_yticks(middles, labels)
    axes.set_ylim(rows - 0.5, -1)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.03)
    axes.set_xlabel(unit)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    _title_and_legend(figure, title, axes)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def _title_and_legend(figure: Any, title: str, axes: Any) -> None:
    """Puts the title above the figure, wrapped if needed, and the legend below it, clear of the drawing."""
    width = int(9.5 * figure.get_figwidth())
    lines = [line for part in title.split("\n") for line in wrap(part, width)]
    figure.suptitle("\n".join(lines), fontsize=11)
    handles, names = axes.get_legend_handles_labels()
    columns = max(1, int(figure.get_figwidth() / 2.8))
    figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=8)


def stacked_bars(
    path: Path,
    title: str,
    labels: Sequence[str],
    stacks: Mapping[str, Sequence[float]],
    marks: tuple[str, Sequence[float]],
    *,
    unit: str,
) -> None:
    """Writes horizontal bars of consecutive parts on a linear axis, with a mark per bar.

    Args:
        labels: names of the bars, from top to bottom.
        stacks: by name of the part, its length in each bar.
        marks: name and positions of the marks.
        marks: their name and places.
        unit: name and unit of the axis.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.35 * len(labels)), constrained_layout=True)
    lefts = [0.0] * len(labels)
    for name, lengths in stacks.items():
        axes.barh(labels, lengths, left=lefts, label=name)
        lefts = [left + length for left, length in zip(lefts, lengths, strict=True)]
    axes.plot(marks[1], labels, "k|", markersize=12, label=marks[0])
    axes.axvline(1.0, **ROOF)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    _title_and_legend(figure, title, axes)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def curves(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float]]]],
    *,
    x: str,
    y: str,
) -> None:
    """Writes curves on logarithmic axes, in panels next to each other.

    Args:
        panels: by title, by name of the curve, its points: abscissa, ordinate, and the ordinate's least possible value.
        x, y: names of the axes.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, rows = pyplot.subplots(
        1,
        len(panels),
        figsize=(3.2 * len(panels), 4),
        sharex=True,
        sharey=True,
        squeeze=False,
        constrained_layout=True,
    )
    ticks = sorted({point[0] for of in panels.values() for points in of.values() for point in points})
    ticks = [tick for number, tick in enumerate(ticks) if len(ticks) <= 6 or number % 2 == 0]
    colours = {
        name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for of in panels.values() for name in of))
    }
    for axes, (label, series) in zip(rows[0], panels.items(), strict=True):
        for name, points in series.items():
            where, times, floors = zip(*points, strict=True)
            # A hollow circle and a dashed line stay visible under another curve.
            look = LOOKS[list(colours).index(name) % len(LOOKS)]
            axes.plot(
                where,
                times,
                look,
                color=colours[name],
                markersize=5,
                fillstyle="none",
                linewidth=1.2,
                label=name,
            )
            axes.plot(where, floors, ":", color=colours[name], linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=f"{x}, logarithmic")
        axes.set_title(label, fontsize=10)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=7, rotation=45)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(which="major", alpha=0.3)
    rows[0][0].set_ylabel(f"{y}, logarithmic")
    _title_and_legend(figure, title, rows[0][0])
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def points_and_map(
    path: Path,
    points: Mapping[str, Sequence[tuple[float, float]]],
    rows: Sequence[Sequence[float]],
    heads: tuple[str, str, str],
    map_heads: tuple[str, str, str],
) -> None:
    """Write points of several kinds, and next to them a map of counts, where there are any.

    Args:
        points: by name, (x, y) of each. rows: counts, a line of the map each; zeros are red.
        heads, map_heads: title, name of x, and of y or of the rows.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    panels = 2 if rows else 1
    figure, axes = pyplot.subplots(
        1, panels, figsize=(6 * panels, 4.5), constrained_layout=True, squeeze=False
    )
    for name, places in points.items():
        axes[0, 0].plot(*zip(*places, strict=True), "o", markersize=4, label=name)
    axes[0, 0].set(xlabel=heads[1], ylabel=heads[2], ylim=(0, None))
    axes[0, 0].grid(alpha=0.3)
    if rows:
        most = max(map(len, rows))
        counts = [[*row, *[float("nan")] * (most - len(row))] for row in rows]
        colors = pyplot.get_cmap("viridis").with_extremes(under="red", bad="white")
        drawn = axes[0, 1].imshow(counts, aspect="auto", cmap=colors, vmin=0.5, interpolation="nearest")
        figure.colorbar(drawn, ax=axes[0, 1], extend="min", label=f"{map_heads[0]}, none: red")
        axes[0, 1].set(xlabel=map_heads[1], ylabel=map_heads[2])
    _title_and_legend(figure, heads[0], axes[0, 0])
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


Panel = tuple[Mapping[str, Sequence[tuple[float, float]]], str, str]
"""Points by name, and the names of the x and the y axis."""


def points_and_points(path: Path, title: str, left: Panel, right: Panel) -> None:
    """Write two panels of points, next to each other, with y axes that begin at zero.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    for axis, (points, x, y) in zip(axes, (left, right), strict=True):
        for name, places in points.items():
            if places:
                axis.plot(*zip(*places, strict=True), "o", markersize=4, label=name)
        axis.set(xlabel=x, ylabel=y, ylim=(0, None))
        axis.grid(alpha=0.3)
    _title_and_legend(figure, title, axes[1])
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)
