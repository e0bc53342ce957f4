"""`nvfp4-cute bench --html FILE`: writes every committed time to one page that needs no network.

The rows come from ``bench/results``: the tables of the pages that ``bench --save`` makes, the cases that ``prove``
timed on a GPU without such a page, and the layers of experts. Only ratios are computed here.
"""

import html
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvfp4_cute.bench.report import HEADER, MEASURED, MODELLED, PUBLISHED
from nvfp4_cute.gpus import targets

TEMPLATE = Path(__file__).parent / "gallery.html"
RESULTS = Path(__file__).parent / "results"
PEER = re.compile(r"(.+) \((\w+)\)")
MOE_PEERS = ("torch bf16 rows", "torch fp8 rows")


@dataclass(frozen=True)
class Entry:
    """One case on one GPU. Times in microseconds.

    Attributes:
        gpu, problem, case: place and subject of the run.
        us, kind: time of this library, "measured" or "modelled".
        sol_us: speed of light, computed; None if no page has it.
        peer, peer_us, peer_kind: the fastest other implementation, "measured" or "published"; None without one.
        page: page in ``bench/results`` with the row.
    """

    gpu: str
    problem: str
    case: str
    us: float
    kind: str
    sol_us: float | None
    peer: str | None
    peer_us: float | None
    peer_kind: str | None
    page: str

    @property
    def percent(self) -> float | None:
        """Percent of the speed of light."""
        return None if self.sol_us is None else 100 * self.sol_us / self.us

    @property
    def peer_percent(self) -> float | None:
        """Percent of the speed of light that the fastest other implementation reaches."""
        return None if self.sol_us is None or self.peer_us is None else 100 * self.sol_us / self.peer_us

    @property
    def ratio(self) -> float | None:
        """Time of the fastest other implementation over ours."""
        return None if self.peer_us is None else self.peer_us / self.us


def run(path: Path, folder: Path = RESULTS) -> int:
    """Writes the page. Returns 0.

    Raises:
        ValueError: the folder has no result.
    """
    found = entries(folder)
    path.write_text(page(found), encoding="utf-8")
    gpus = len({entry.gpu for entry in found})
    print(f"{path}: {len(found)} cases on {gpus} GPUs; open it in a browser")
    return 0


def entries(folder: Path) -> list[Entry]:
    """Returns every case of a folder of results.

    Raises:
        ValueError: there is none.
    """
    found = [entry for path in sorted(folder.glob("*.md")) for entry in _of_page(path)]
    known = {entry.gpu for entry in found}
    for path in sorted(folder.glob("prove-*.json")):
        found += [entry for entry in _of_prove(path) if entry.gpu not in known]
    for path in sorted(folder.glob("*_moe.json")):
        found += _of_experts(path)
    if not found:
        raise ValueError(f"{folder} has no page of `nvfp4-cute bench --save`; run this from a checkout")
    return found


def _of_page(path: Path) -> Iterator[Entry]:
    """Yields the rows of a page with a table of `bench`."""
    title, *lines = path.read_text(encoding="utf-8").splitlines()
    starts = [number for number, line in enumerate(lines) if line.split() == " ".join(HEADER).split()]
    if not starts:
        return
    for line in lines[starts[0] + 1 :]:
        if line.startswith("```"):
            return
        names = re.split(r" {2,}", line, maxsplit=2)
        cells = [*names[:2], *names[2].split(maxsplit=len(HEADER) - 3)]
        row = dict(zip(HEADER, cells, strict=True))
        if row["time us"] == "-":
            continue
        peer = PEER.fullmatch(row["peer"])
        yield Entry(
            title.removeprefix("# "),
            row["problem"],
            row["case"],
            float(row["time us"]),
            row[""],
            float(row["SOL us"]),
            peer[1] if peer else None,
            float(row["best peer us"]) if peer else None,
            peer[2] if peer else None,
            path.name,
        )


def _of_prove(path: Path) -> Iterator[Entry]:
    """Yields the cases that `prove` timed."""
    content = json.loads(path.read_text(encoding="utf-8"))
    for row in content["timed"]:
        if row["us"] is None or row["verdict"] != "passed":
            continue
        problem, case = _split(row["case"])
        peer = min(row["peers"].items(), key=lambda item: item[1], default=(None, None))
        kind = None if peer[0] is None else MEASURED
        gpu = content["machine"]["gpu"]["target"]
        yield Entry(
            gpu,
            problem,
            case,
            row["us"],
            MEASURED,
            row["floor_us"] or None,
            peer[0],
            peer[1],
            kind,
            path.name,
        )


def _of_experts(path: Path) -> Iterator[Entry]:
    """Yields layers of experts, from rows to rows: ours and others'."""
    content = json.loads(path.read_text(encoding="utf-8"))
    products = [target.name for target in targets.TARGETS if re.fullmatch(target.device_name, content["gpu"])]
    gpu = products[0] if len(products) == 1 else content["gpu"]
    for model, rows in content["models"].items():
        for row in rows:
            times = row["us"]
            if "rows" not in times:
                continue
            peers = [(times[name], name) for name in MOE_PEERS if name in times]
            others = content.get("peers", {}).items()
            tokens = str(row["tokens"])
            peers += [
                (known[model][tokens], name) for name, known in others if tokens in known.get(model, {})
            ]
            us, name = min(peers, default=(None, None))
            kind = None if name is None else MEASURED
            case = f"{row['tokens']} tokens"
            yield Entry(
                gpu,
                f"experts {model}",
                case,
                times["rows"],
                MEASURED,
                None,
                name,
                us,
                kind,
                path.name,
            )


def _split(case: str) -> tuple[str, str]:
    """Splits a name into problem and case, like the pages."""
    found = re.fullmatch(r"(nvfp4_\w+|linear \d+ x \d+|gemm) (.+)", case)
    return (found[1], found[2]) if found else (case, "")


# ---- the page --------------------------------------------------------------------------------------------------


def page(found: Sequence[Entry]) -> str:
    """Returns the page. Every row is in its text, so it can be read, searched and printed without a script."""
    parts = {
        "SUMMARY": "\n".join(_cards(found)),
        "GPUS": _options(entry.gpu for entry in found),
        "PROBLEMS": _options(entry.problem for entry in found),
        "ROWS": "\n".join(_row(entry) for entry in found),
        "COUNT": str(len(found)),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


def _cards(found: Sequence[Entry]) -> Iterator[str]:
    for gpu in dict.fromkeys(entry.gpu for entry in found):
        own = [entry for entry in found if entry.gpu == gpu]
        kinds = " and ".join(kind for kind in (MEASURED, MODELLED) if kind in {e.kind for e in own})
        percent = _geomean(e.percent for e in own)
        ratio = _geomean(e.ratio for e in own)
        facts = [f"{len(own)} cases, {kinds}"]
        facts += [f"{percent:.0f} % of the speed of light"] if percent else []
        facts += (
            [f"the fastest other takes {ratio:.2f} times as long"] if ratio else ["no other to compare with"]
        )
        listed = "".join(f"<li>{html.escape(fact)}</li>" for fact in facts)
        yield f"<section class=card><h2>{html.escape(gpu)}</h2><ul>{listed}</ul></section>"


def _geomean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def _options(values: Iterable[str]) -> str:
    return "".join(f"<option>{html.escape(value)}</option>" for value in dict.fromkeys(values))


def _row(entry: Entry) -> str:
    """Returns cells in the order of the template's header; ``data-value`` is the sort key of a column."""
    peer = "" if entry.peer is None else f"{entry.peer}, {entry.peer_kind}"
    cells = [
        ("GPU", entry.gpu, entry.gpu, ""),
        ("problem", entry.problem, entry.problem, ""),
        ("case", entry.case, entry.case, ""),
        ("speed of light, us", entry.sol_us, _number(entry.sol_us), "number"),
        ("ours, us", entry.us, f"{_number(entry.us)} {_badge(entry.kind)}", "number"),
        ("of the speed of light", entry.percent, _bars(entry), "bars"),
        ("best other, us", entry.peer_us, _number(entry.peer_us), "number"),
        ("other", peer, html.escape(peer), ""),
        ("other / ours", entry.ratio, _number(entry.ratio), "number"),
    ]
    texts = (
        f'<td class="{style}" data-label="{label}" data-value="{"" if value is None else html.escape(str(value))}">'
        f"{html.escape(text) if not style and label != 'other' else text}</td>"
        for label, value, text, style in cells
    )
    names = f'data-gpu="{html.escape(entry.gpu)}" data-problem="{html.escape(entry.problem)}" data-kind="{entry.kind}"'
    return f'<tr {names} title="bench/results/{entry.page}">{"".join(texts)}</tr>'


def _badge(kind: str) -> str:
    return f'<span class="badge {kind}">{kind}</span>'


def _bars(entry: Entry) -> str:
    """Returns two bars, ours above the other's; a full line is the speed of light."""
    lines = []
    for name, percent, kind in (
        ("ours", entry.percent, entry.kind),
        ("other", entry.peer_percent, entry.peer_kind or PUBLISHED),
    ):
        if percent is not None:
            width = f"{min(percent, 100):.1f}%"
            lines.append(
                f'<div class="bar {name} {kind}" style="--width:{width}"><i></i><b>{percent:.0f} %</b></div>'
            )
    return "".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"
