"""Pictures. They need matplotlib, which only the extra `plot` installs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvfp4_cute.targets import MATH_FORMATS, Target

INTENSITIES = (1.0, 20000.0)


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
        points: (label, FLOP a byte, FLOP/s) of every case.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(10, 6), constrained_layout=True)
    bandwidth = target.floor_bandwidth_bytes_per_s
    for math in MATH_FORMATS:
        rate = target.math_flops_per_s(math)
        if rate is None:
            continue
        ridge = rate / bandwidth
        axes.plot(
            [INTENSITIES[0], ridge, INTENSITIES[1]], [INTENSITIES[0] * bandwidth, rate, rate], linewidth=1
        )
        axes.annotate(f"{math} {rate / 1e15:.2f} PFLOP/s", (INTENSITIES[1], rate), ha="right", va="bottom")
    for index, (label, intensity, flops_per_s) in enumerate(points):
        axes.plot(intensity, flops_per_s, "o", color=pyplot.cm.tab20(index % 20), label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=INTENSITIES,
        xlabel="FLOP a byte of memory traffic",
        ylabel="FLOP/s",
        title=f"{target.name}: computed floors, not measurements ({bandwidth / 1e12:.4g} TB/s)",
    )
    axes.grid(which="major", alpha=0.3)
    axes.legend(fontsize="x-small", loc="upper left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
