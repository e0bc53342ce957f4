"""Plots: bars start at zero on a linear axis, logarithmic axes are labelled, and every text is inside the figure."""

import pytest

from nvfp4_cute.prove import picture
from nvfp4_cute.roofline import plot

pyplot = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture
def figure(monkeypatch):
    """Returns the last figure that was drawn."""
    found = []
    monkeypatch.setattr(pyplot, "close", found.append)
    yield lambda: found[-1]
    monkeypatch.undo()
    pyplot.close("all")


def _texts_fit(drawn):
    drawn.draw_without_rendering()
    renderer = drawn.canvas.get_renderer()
    texts = [drawn._suptitle, *(t for legend in drawn.legends for t in legend.get_texts())]
    for axes in drawn.axes:
        texts += [axes.xaxis.label, axes.yaxis.label, *axes.get_yticklabels()]
    boxes = [text.get_window_extent(renderer) for text in texts if text.get_text()]
    return all(
        box.x0 >= 0 and box.x1 <= drawn.bbox.x1 and box.y0 >= 0 and box.y1 <= drawn.bbox.y1 for box in boxes
    )


def test_bars(figure, tmp_path):
    series = {"a rather long name of what is drawn here": [1.0, None, 30.0], "ours": [2.0, 3.0, 4.0]}
    plot.bars(
        tmp_path / "x.png",
        "A title of many words " * 8,
        ["first", "second", "third"],
        series,
        unit="us per call",
    )
    (axes,) = figure().axes
    assert axes.get_xscale() == "linear" and axes.get_xlim()[0] == 0 and axes.get_xlabel() == "us per call"
    assert _texts_fit(figure())
    # A missing value leaves no gap: five bars, and some room after each of three groups.
    heights = sorted(bar.get_y() for bar in axes.patches)
    assert len(heights) == 5 and max(b - a for a, b in zip(heights, heights[1:], strict=False)) < 1.8


def test_stacked_bars_name_their_axis(figure, tmp_path):
    stacks = {"send": [0.2, 0.3], "sum": [0.4, 0.5]}
    plot.stacked_bars(
        tmp_path / "x.png",
        "Phases",
        ["a", "b"],
        stacks,
        ("whole", [0.6, 0.9]),
        unit="share of one GPU's time",
    )
    assert figure().axes[0].get_xlabel() == "share of one GPU's time" and _texts_fit(figure())


def test_curves_mark_logarithmic_axes(figure, tmp_path):
    points = [(2.0**i, 3.0 * i + 1, i + 0.5) for i in range(13)]
    plot.curves(tmp_path / "x.png", "Layers", {"m": {"B200": points, "B300": points}}, x="tokens", y="us")
    (axes,) = figure().axes
    assert axes.get_xlabel() == "tokens, logarithmic" and axes.get_ylabel() == "us, logarithmic"
    figure().canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(boxes) == 7 and not any(a.overlaps(b) for a, b in zip(boxes, boxes[1:], strict=False))
    assert len({line.get_marker() for line in axes.lines if line.get_marker() != "None"}) == 2


def test_times_of_prove_are_points_on_a_marked_axis():
    row = {"case": "1", "us": 100.0, "predicted_us": 90.0, "peers": {"bf16": 400.0}}
    drawn = picture.svg({"timed": [row], "machine": {"gpu": {"name": "H100"}}})
    assert "logarithmic axis" in drawn and ">200<" in drawn and drawn.count("<circle") == 6
