"""The page that `nvfp4-cute emulate --html` writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvfp4_cute.bench import page as pages
from nvfp4_cute.emulator.check.ledger import counted
from nvfp4_cute.emulator.fronts.launch_report import (
    NEEDS_NOTE,
    TIMES_NOTE,
    launch_cells,
    needs_cells,
)
from nvfp4_cute.emulator.fronts.virtual_gpu import LaunchRow

NOT_CHECKED = "not checked"
FINDINGS = ("severity", "kind", "kernel", "what", "where")


def browser_page(summary: dict[str, Any], launches: Sequence[LaunchRow]) -> str:
    """What ``--json`` writes, and the tables of launches and kernels, as one page that needs no network."""
    found = summary["findings"]
    said = counted(finding["severity"] for finding in found)
    title = f"{Path(summary['script']).name} on {summary['arch']}"
    how = f"nvfp4-cute emulate, asynchronous operations {summary['mode']}. Arguments: {' '.join(summary['arguments']) or 'none'}."
    facts = {
        "findings": [said or ("no finding" if summary["checked"] else NOT_CHECKED)],
        "exit code": [str(summary["exit_code"])],
        "launches": [str(len(launches))],
    }
    timed = [row.timing for row in launches if row.timing is not None]
    if timed:
        total = sum(timing.us for timing in timed)
        facts["modelled time"] = [f"{total:.2f} us on {timed[0].constants.name}"]
    rows = [(f["severity"], f["kind"], f.get("kernel", ""), f["text"], _places(f)) for f in found]
    wrong = [number for number, finding in enumerate(found) if finding["severity"] == "error"]
    error = pages.table(("error",), [(summary["error"],)], [0]) if summary["error"] else ""
    body = [
        pages.heading(title, how, TIMES_NOTE),
        pages.cards(facts),
        pages.section("What stopped it", error),
        pages.section("Findings", pages.table(FINDINGS, rows, wrong)),
        pages.section("Launches", _table(launch_cells(launches))),
        pages.section("Kernels", _table(needs_cells(launches))),
        f"<p>{NEEDS_NOTE}</p>" if launches else "",
    ]
    return pages.page(title, "".join(body))


def _table(lines: Sequence[Sequence[str]]) -> str:
    return pages.table(lines[0], lines[1:])


def _places(finding: dict[str, Any]) -> str:
    """Both places of a finding, and those of others with the same cause."""
    parts = [_place(finding[name]) for name in ("site", "other") if name in finding]
    also = finding.get("also", ())
    if also:
        parts.append("the same at " + ", ".join(dict.fromkeys(_line(place) for place in also)))
    return "\n\n".join(parts)


def _place(site: dict[str, Any]) -> str:
    """A place of a finding: the Python line with its text, and the PTX."""
    python = f"{_line(site)}: {site['python']}\n" if "file" in site else ""
    return (
        f"{python}PTX line {site['ptx_line']}: {site['ptx']}\nCTA {tuple(site['cta'])}, warp {site['warp']}"
    )


def _line(site: dict[str, Any]) -> str:
    """File and line: the path from the current folder, or the last two parts of one elsewhere."""
    if "file" not in site:
        return f"PTX line {site['ptx_line']}"
    path, here = Path(site["file"]).resolve(), Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else Path(*path.parts[-2:])
    return f"{shown}:{site['line']}"
