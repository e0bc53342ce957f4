"""The report of `prove` as one page for a browser, which needs no network."""

from typing import Any

from nvfp4_cute.bench import page as pages
from nvfp4_cute.prove import picture
from nvfp4_cute.prove.rows import (
    CONSTANTS_HEADER,
    PROBES_HEADER,
    TIMES_HEADER,
    constant_rows,
    probe_rows,
    time_rows,
)


def page(found: dict[str, Any], title: str, conditions: str, short: str) -> str:
    """The page.

    Args:
        found: the report.
        conditions: where and when, a paragraph.
        short: what a person reads first, in lines that begin with a dash.
    """
    probes, times = probe_rows(found), time_rows(found)
    surprises = [n for n, row in enumerate(probes) if row[3].endswith("!")]
    slow = [n for n, row in enumerate(found["timed"]) if row["is_slow"] or row["us"] is None]
    counts = {
        what: [f"{count} {verdict}" for verdict, count in found["correctness"][kind]["verdicts"].items()]
        or ["none tried"]
        for kind, what in (
            ("problem", "random problems of every operation"),
            ("config", "configs on an awkward problem"),
        )
    }
    failures = [
        (f["name"], f["verdict"], f["detail"])
        for part in found["correctness"].values()
        for f in part["failures"]
    ]
    host = [
        (
            row["name"],
            row["verdict"],
            "; ".join(f"{k} {v:.4g}" for k, v in row["numbers"].items()),
            row["detail"],
        )
        for row in found["host"]
    ]
    body = [
        pages.heading(title, conditions),
        pages.cards({"in short": [line.removeprefix("- ") for line in short.splitlines()]} | counts),
        pages.section(
            "Wrong or failed", pages.table(("what", "verdict", "detail"), failures, range(len(failures)))
        ),
        pages.section("Times", (picture.svg(found) or "") + pages.table(TIMES_HEADER, times, slow)),
        pages.section("Probes of the silicon", pages.table(PROBES_HEADER, probes, surprises)),
        pages.section("Constants", pages.table(CONSTANTS_HEADER, constant_rows(found))),
        pages.section("Host and soak", pages.table(("what", "verdict", "numbers", "detail"), host)),
    ]
    return pages.page(title, "".join(body))
