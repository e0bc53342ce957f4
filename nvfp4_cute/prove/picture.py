"""The report's one picture: times as bars on a logarithmic axis, as SVG, which needs no library."""

from math import log10
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LABEL, RIGHT, BAR, GAP, TOP = 960, 300, 110, 9, 8, 48
COLOURS = {"ours": "#2a6fb0", "torch": "#b0b0b0", "predicted": "#e0913a"}


def svg(report: dict[str, Any]) -> str | None:
    """Our times, torch's best and the predictions of a report; None where nothing was timed."""
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
    low, high = log10(min(known) / 1.5), log10(max(known) * 1.2)
    place = lambda us: LABEL + (log10(us) - low) / (high - low) * (WIDTH - LABEL - RIGHT)
    height = TOP + len(rows) * (3 * BAR + GAP) + 30
    gpu = report["machine"]["gpu"]["name"]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="20" font-size="14">{escape(gpu)}: us, measured; predicted before by the model</text>',
    ]
    for index, (name, colour) in enumerate(COLOURS.items()):
        x = LABEL + 110 * index
        lines.append(f'<rect x="{x}" y="28" width="10" height="10" fill="{colour}"/>')
        lines.append(f'<text x="{x + 14}" y="37">{"torch, the fastest" if name == "torch" else name}</text>')
    for index, (row, bar) in enumerate(zip(rows, bars, strict=True)):
        y = TOP + index * (3 * BAR + GAP)
        lines.append(
            f'<text x="{LABEL - 8}" y="{y + 2 * BAR}" text-anchor="end">{escape(row["case"])}</text>'
        )
        for number, (name, us) in enumerate(bar.items()):
            if us is None:
                continue
            end, top = place(us), y + number * BAR
            lines.append(
                f'<rect x="{LABEL}" y="{top}" width="{end - LABEL:.1f}" height="{BAR - 1}" fill="{COLOURS[name]}"/>'
            )
            lines.append(f'<text x="{end + 4:.1f}" y="{top + BAR - 1}" font-size="9">{us:.3g}</text>')
    return "\n".join([*lines, "</svg>", ""])
