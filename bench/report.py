"""`nvfp4-cute bench`: every case with its floor, its time, and the times of others.

A time is measured if the target is this machine's GPU, otherwise modelled; each is marked.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.roofline import speed_of_light as light
from nvfp4_cute.terminal import text_table

MEASURED, MODELLED, PUBLISHED = "measured", "modelled", "published"


@dataclass(frozen=True)
class Time:
    """A time in us and its source; with deciles if it is measured.

    Attributes:
        sustained_us: for a modelled time, that of a launch repeated for seconds (``gpus.power``); None if unknown.
    """

    us: float
    kind: str
    low: float | None = None
    high: float | None = None
    sustained_us: float | None = None


@dataclass(frozen=True)
class Row:
    """A case on a target.

    Attributes:
        case: the case.
        floor: its physical speed of light.
        time: time of our kernel, or None.
        peers: times of others by name.
        remarks: why a time is missing, by name.
    """

    case: Case
    floor: light.Floor
    time: Time | None = None
    peers: Mapping[str, Time] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)

    @property
    def best_peer(self) -> tuple[str, Time] | None:
        """Returns the fastest of the others."""
        return min(self.peers.items(), key=lambda item: item[1].us) if self.peers else None

    @property
    def percent(self) -> float | None:
        """Percent of the physical speed of light."""
        return None if self.time is None else 100 * self.floor.us / self.time.us

    def record(self) -> dict[str, Any]:
        """Returns all fields as plain data."""
        work = self.case.work
        return {
            "suite": self.case.suite,
            "problem": self.case.problem,
            "case": self.case.name,
            "operation": self.case.operation,
            "sizes": self.case.sizes,
            "bytes": work.bytes,
            "flops": work.flops,
            "competition_us": self.case.sol_us,
            "best_published_us": self.case.best_us,
            "speed_of_light_us": self.floor.us,
            "bound": self.floor.bound,
            "time": None if self.time is None else vars(self.time),
            "percent_of_speed_of_light": self.percent,
            "tb_per_s": None if self.time is None else work.bytes / self.time.us / 1e6,
            "tflop_per_s": None if self.time is None else work.flops / self.time.us / 1e6,
            "peers": {name: vars(time) for name, time in self.peers.items()},
            "remarks": dict(self.remarks),
        }


@dataclass(frozen=True)
class Report:
    """Rows of one target, with notes for reading them."""

    target: Target
    rows: Sequence[Row]
    heading: str
    notes: Sequence[str] = ()
    command: str = "nvfp4-cute bench --save"
    """Command that makes the page."""

    def text(self) -> str:
        """Returns the table with its heading and its notes."""
        return "\n\n".join([self.heading, _table(self.rows), "\n".join(self._remarks())])

    def markdown(self) -> str:
        """Returns the report as a page to commit."""
        return (
            f"# {self.target.name}\n\n{self.heading} Made by `{self.command}`.\n\n```\n{_table(self.rows)}\n```\n\n"
            + "".join(f"- {note}\n" for note in self._remarks())
        )

    def _remarks(self) -> list[str]:
        return [*self.notes, *_limited(self.rows), *_missing(self.rows)]

    def json(self) -> str:
        """Returns the report for machines."""
        return json.dumps(
            {
                "target": self.target.name,
                "heading": self.heading,
                "notes": list(self.notes),
                "rows": [row.record() for row in self.rows],
            },
            indent=1,
        )


LIMITED = 1.01
"""Relative time over one launch's from which it is reported."""
HEADER = (
    "problem",
    "case",
    "MB",
    "GFLOP",
    "SOL us",
    "time us",
    "",
    "% SOL",
    "TB/s",
    "TFLOP/s",
    "best peer us",
    "peer / ours",
    "peer",
)


def _table(rows: Sequence[Row]) -> str:
    return text_table(HEADER, [_cells(row) for row in rows], left=2)


def _cells(row: Row) -> tuple[str, ...]:
    work, peer = row.case.work, row.best_peer
    sizes = (
        row.case.problem,
        row.case.name,
        f"{work.bytes / 1e6:.2f}",
        f"{work.flops / 1e9:.2f}",
        f"{row.floor.us:.2f}",
    )
    time = ("-",) * 5
    if row.time is not None:
        us = row.time.us
        time = (
            f"{us:.2f}",
            row.time.kind,
            f"{row.percent:.1f}",
            f"{work.bytes / us / 1e6:.2f}",
            f"{work.flops / us / 1e6:.1f}",
        )
    others = ("-",) * 3
    if peer is not None:
        ratio = "-" if row.time is None else f"{peer[1].us / row.time.us:.2f}"
        others = (f"{peer[1].us:.2f}", ratio, f"{peer[0]} ({peer[1].kind})")
    return (*sizes, *time, *others)


def _limited(rows: Sequence[Row]) -> list[str]:
    """Returns one line per row that the power limit slows."""
    return [
        f"{row.case}: {us:.2f} us, {row.case.work.flops / us / 1e6:.0f} TFLOP/s, where it is repeated for seconds on random "
        "data: the power limit, computed (nvfp4_cute/gpus/power.py)"
        for row in rows
        if row.time is not None and (us := row.time.sustained_us) is not None and us > LIMITED * row.time.us
    ]


def _missing(rows: Sequence[Row]) -> list[str]:
    """Returns one line per reason for missing times."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for name, reason in row.remarks.items():
            reasons.setdefault(f"{name}: {reason}", []).append(str(row.case))
    return [
        f"{reason} ({cases[0]}{f' and {len(cases) - 1} more' if len(cases) > 1 else ''})"
        for reason, cases in reasons.items()
    ]


# ---- making a report -------------------------------------------------------------------------------------------
Timer = Callable[[Case], tuple[Time | None, dict[str, Time], dict[str, str]]]
"""Returns the time of our kernel, times of peers, and remarks, for a case."""


def make_rows(cases: Sequence[Case], target: Target, timer: Timer) -> list[Row]:
    """Times every case, with a progress bar. Published times of others for the target also count as peers."""
    from nvfp4_cute.terminal import Progress

    rows = []
    bar = Progress(cases, desc=f"times on {target.name}", unit="case")
    for case in bar:
        bar.set_postfix_str(str(case))
        time, peers, remarks = timer(case)
        if case.best_us is not None and target.name == targets.B200.name:
            peers["best entry"] = Time(case.best_us, PUBLISHED)
        for other in case.published:
            if other.target == target.name:
                peers[other.who] = Time(other.us, PUBLISHED)
        rows.append(Row(case, light.physical_floor(case.work, target), time, peers, remarks))
    return rows


def save(report: Report, folder: Path) -> Path:
    """Writes the page of a target to a folder of results."""
    path = folder / f"{report.target.name.lower().replace(' ', '_')}.md"
    path.write_text(report.markdown())
    return path
