"""Pictures. They need matplotlib, which only the extra `plot` installs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvfp4_cute.gpus.targets import MATH_FORMATS, Target

INTENSITIES = (1.0, 20000.0)
ROOF = {"color": "0.4", "linewidth": 1}


def _pyplot() -> Any:
    """matplotlib's pyplot with a backend that draws into files.

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
    """Write a roofline of ``target`` as a picture; the suffix of ``path`` decides the format.

    Args:
        points: (label, FLOP a byte, FLOP/s) of every case; cases of one label share a colour.

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
        xlabel="FLOP a byte of memory traffic",
        ylabel="FLOP/s",
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
    unit: str = "us",
    scale: str = "log",
) -> None:
    """Write horizontal bars of times, a group of bars for each label.

    Args:
        labels: of the groups, from top to bottom.
        series: by name, a time for each label or None where there is none.
        unit: of the times. scale: of the axis, "log" or "linear".

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    height = 0.8 / len(series)
    figure, axes = pyplot.subplots(
        figsize=(9, 1.5 + 0.18 * len(labels) * len(series)), constrained_layout=True
    )
    for index, (name, times) in enumerate(series.items()):
        known = [(row + height * index, us) for row, us in enumerate(times) if us is not None]
        if not known:
            continue
        drawn = axes.barh(*zip(*known, strict=True), height, label=name)
        axes.bar_label(drawn, fmt="%.3g", padding=2, fontsize=7)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(labels))], labels)
    axes.invert_yaxis()
    axes.set(xscale=scale, xlabel=unit, title=title)
    axes.xaxis.set_major_formatter("{x:g}")
    if scale == "log":
        axes.xaxis.set_minor_formatter("{x:g}")
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def stacked_bars(
    path: Path,
    title: str,
    labels: Sequence[str],
    stacks: Mapping[str, Sequence[float]],
    marks: tuple[str, Sequence[float]],
) -> None:
    """Write horizontal bars of parts one after the other, and a mark for each bar.

    Args:
        labels: of the bars, from top to bottom.
        stacks: by name of the part, its length in each bar.
        marks: their name, and where they are.

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
    axes.set(title=title)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def curves(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float]]]],
    *,
    x: str,
    y: str,
) -> None:
    """Write curves on logarithmic axes, in panels side by side.

    Args:
        panels: by title, by name of the curve, its points: abscissa, ordinate, and the least that this could be.
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
    colours = {
        name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for of in panels.values() for name in of))
    }
    for axes, (label, series) in zip(rows[0], panels.items(), strict=True):
        for name, points in series.items():
            where, times, floors = zip(*points, strict=True)
            axes.plot(where, times, "o-", color=colours[name], markersize=3, linewidth=1.2, label=name)
            axes.plot(where, floors, ":", color=colours[name], linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=x, title=label)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=7)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(which="major", alpha=0.3)
    rows[0][0].set_ylabel(y)
    rows[0][0].legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
