"""The report's picture: times as points on a logarithmic axis, as SVG, which needs no library."""

from math import ceil, floor, log10
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LABEL, RIGHT, BAR, GAP, TOP = 960, 300, 110, 9, 8, 48
COLOURS = {"ours": "#2a6fb0", "torch": "#b0b0b0", "predicted": "#e0913a"}


def svg(report: dict[str, Any]) -> str | None:
    """Draws our times, torch's best and the predictions of a report; None if nothing was timed."""
    rows = [row for row in report["timed"] if row["us"] is not None]
    if not rows:
        return None
    bars = [
        {
            "ours": row["us"],
            "torch": min(row["peers"].values(), default=None),
            "predicted": row["predicted_us"],
        }
        for row in rows
    ]
    known = [us for bar in bars for us in bar.values() if us is not None]
    low, high = log10(min(known) / 1.2), log10(max(known) * 1.2)
    place = lambda us: LABEL + (log10(us) - low) / (high - low) * (WIDTH - LABEL - RIGHT)
    bottom = TOP + len(rows) * (3 * BAR + GAP)
    gpu = report["machine"]["gpu"]["name"]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 40}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{bottom + 40}" fill="white"/>',
        f'<text x="12" y="20" font-size="14">{escape(gpu)}: times, measured; predicted before by the model</text>',
    ]
    for index, (name, colour) in enumerate(COLOURS.items()):
        x: float = LABEL + 160 * index
        lines.append(f'<circle cx="{x + 5}" cy="33" r="4" fill="{colour}"/>')
        lines.append(f'<text x="{x + 14}" y="37">{"torch, the fastest" if name == "torch" else name}</text>')
    for us in _ticks(low, high):
        x = place(us)
        lines.append(f'<path d="M{x:.1f} {TOP - 4}V{bottom}" stroke="#dddddd"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{us:g}</text>')
    middle = (LABEL + WIDTH - RIGHT) / 2
    lines.append(
        f'<text x="{middle}" y="{bottom + 32}" text-anchor="middle">us, logarithmic axis (log scale)</text>'
    )
    for index, (row, bar) in enumerate(zip(rows, bars, strict=True)):
        y = TOP + index * (3 * BAR + GAP)
        lines.append(
            f'<text x="{LABEL - 8}" y="{y + 2 * BAR}" text-anchor="end">{escape(row["case"])}</text>'
        )
        for number, (name, us) in enumerate(bar.items()):
            if us is None:
                continue
            x, centre = place(us), y + number * BAR + BAR / 2
            lines.append(f'<circle cx="{x:.1f}" cy="{centre}" r="3.5" fill="{COLOURS[name]}"/>')
            lines.append(f'<text x="{x + 7:.1f}" y="{centre + 3}" font-size="9">{us:.3g}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 of every decade between two exponents of ten."""
    every = [m * 10.0**e for e in range(floor(low), ceil(high) + 1) for m in (1, 2, 5)]
    return [us for us in every if low <= log10(us) <= high]
