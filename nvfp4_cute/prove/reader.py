"""`nvfp4-cute prove --read FILE`: a report as a page, a picture, and constants for the timing model."""

import json
from pathlib import Path
from typing import Any

from nvfp4_cute.prove import picture, report
from nvfp4_cute.prove.predictions import file_name
from nvfp4_cute.prove.rows import CONSTANTS_HEADER, TIMES_HEADER, constant_rows, time_rows
from nvfp4_cute.terminal import text_table


def load(path: Path) -> dict[str, Any]:
    """Reads a report from a file. Raises ValueError if it is not a report, OSError if the file cannot be read."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; give the prove-<gpu>.json that a run wrote") from None
    except ValueError as error:
        raise ValueError(
            f"{path.name} is not JSON ({error}); give the prove-<gpu>.json that a run wrote"
        ) from error
    report.check(found)
    return found


def stem(found: dict[str, Any]) -> str:
    """Returns ``prove-h100_sxm``, or ``prove-emulator_sm_90a`` for a run without a GPU."""
    gpu = found["machine"]["gpu"]
    if found["backend"] != "cuda" or gpu is None:
        return f"prove-{file_name(found['backend'])}"
    return f"prove-{file_name(gpu['target'] or gpu['name'])}"


def write(found: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the report, its pages and its picture to a folder. Returns the written files."""
    folder.mkdir(parents=True, exist_ok=True)
    name = stem(found)
    written = [folder / f"{name}.json", folder / f"{name}.md"]
    drawn = picture.svg(found)
    # Replaces files atomically, so readers never see half of one.
    texts = (
        json.dumps(found, indent=1) + "\n",
        page(found),
    )
    for path, text in zip(written, texts, strict=True):
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text)
        partial.replace(path)
    if drawn is not None:
        written.append(folder / f"{name}.svg")
        written[-1].write_text(drawn)
    return written


# ---- the page --------------------------------------------------------------------------------------------------
def page(found: dict[str, Any]) -> str:
    """Returns the report for people, in Markdown."""
    parts = [
        f"# {_title(found)}\n\n{_conditions(found)}",
        f"## In short\n\n{short(found)}",
        f"## Correctness\n\n{_correctness(found)}",
        f"## Probes of the silicon\n\n{_probes(found)}",
    ]
    if found["timed"]:
        drawn = f"![times]({stem(found)}.svg)\n\n" if picture.svg(found) else ""
        parts.append(f"## Times\n\n{drawn}{_times(found)}")
    if found["constants"]:
        parts.append(f"## Constants\n\n{_constants(found)}")
    if found["host"]:
        parts.append(f"## Host and soak\n\n{_host(found)}")
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _title(found: dict[str, Any]) -> str:
    gpu = found["machine"]["gpu"]
    return f"{found['backend'] if found['backend'] != 'cuda' else gpu['name']}: what was proven"


def _conditions(found: dict[str, Any]) -> str:
    gpu, versions = found["machine"]["gpu"], found["machine"]["versions"]
    where = f"Executed on the {found['backend'].replace(':', ' of ')}; no GPU was used."
    if found["backend"] == "cuda":
        where = f"{gpu['name']} ({gpu['arch']}, {gpu['sms']} SMs, power limit {gpu['power_limit']}), driver {gpu['driver']}."
    tools = ", ".join(
        f"{name} {versions[name]}" for name in ("python", "torch", "nvidia-cutlass-dsl") if versions.get(name)
    )
    commit = f"commit {found['commit']}, " if found["commit"] else ""
    return f"{where} {found['made']}; {commit}sources {found['sources']}; {tools}. Written by `nvfp4-cute prove`."


def short(found: dict[str, Any]) -> str:
    """Returns the lines that a person reads first."""
    summary = found["summary"]
    lines = [
        f"random problems: {summary['problems']}",
        f"every config that is chosen by itself: {summary['configs']}",
        f"probes: {summary['probes']}",
    ]
    ratio = summary["measured over predicted"]
    if ratio:
        lines.append(
            f"measured over predicted: median {ratio['median']:.2f}, from {ratio['least']:.2f} to {ratio['most']:.2f}, "
            f"{ratio['cases']} cases"
        )
    if found["timed"]:
        before = found["prediction"]
        made = f"predictions were made {before['made']} at commit {before['commit']}" if before else None
        predicted = sum(row["predicted_us"] is not None for row in found["timed"])
        if made and predicted < len(found["timed"]):
            made = f"{predicted} of {len(found['timed'])} cases were predicted; {made}"
        lines.append(made or "no prediction was made before")
        lines.append(
            f"slow (more than {report.SLOW} times the prediction): {', '.join(summary['slow']) or 'none'}"
        )
        lines += [f"WRONG or failed: {name}" for name in summary["wrong"]]
    lines += [f"soak: {text}" for text in summary["soak"]]
    unfinished = [name for name, step in found["steps"].items() if step["done"] < step["jobs"]]
    if unfinished:
        lines.append(f"not finished: {', '.join(unfinished)}; run the command again to go on")
    return "\n".join(f"- {line}" for line in lines)


def _correctness(found: dict[str, Any]) -> str:
    lines = []
    for kind, what in (
        ("problem", "random problems of every operation"),
        ("config", "configs on an awkward problem"),
    ):
        part = found["correctness"][kind]
        counts = (
            ", ".join(f"{count} {verdict}" for verdict, count in part["verdicts"].items()) or "none tried"
        )
        lines.append(f"- {what}: {counts}")
        lines += [f"  - **{f['verdict']}** {f['name']}: {f['detail']}" for f in part["failures"]]
        lines += [f"  - refused: {text}" for text in part["refused"]]
    return "\n".join(lines)


def _probes(found: dict[str, Any]) -> str:
    asked = [p for p in found["probes"] if p["verdict"] != "not here"]
    if not asked:
        return "None was asked."
    lines = ["| probe | rule | question | answer | seen | decides |", "|---|---|---|---|---|---|"]
    for p in asked:
        answer = {"passed": "yes", "wrong": "no"}.get(p["verdict"], p["verdict"])
        mark = "**" if p["is_surprise"] else ""
        lines.append(
            f"| {p['name']} | {p['rule']} | {p['question']} | {mark}{answer}{mark} | {p['detail']} | {p['decides']} |"
        )
    away = sorted(p["name"] for p in found["probes"] if p["verdict"] == "not here")
    return "\n".join(lines) + (f"\n\nNot to be asked here: {', '.join(away)}." if away else "")


def _times(found: dict[str, Any]) -> str:
    header, rows = TIMES_HEADER, time_rows(found)
    notes = [f"- {row['case']}: {row['detail']}" for row in found["timed"] if row["detail"]]
    table = text_table(header, rows)
    return (
        f"Median of graph replays on a cold L2, inputs that rotate, torch in turn.\n\n```\n{table}\n```\n"
        + "\n".join(notes)
    )


def _constants(found: dict[str, Any]) -> str:
    table = text_table(CONSTANTS_HEADER, constant_rows(found))
    return f"```\n{table}\n```"


def _host(found: dict[str, Any]) -> str:
    lines = []
    for row in found["host"]:
        numbers = "; ".join(f"{name} {value:.4g}" for name, value in row["numbers"].items())
        lines.append(
            f"- {row['name']}: {row['verdict']}; {numbers}{'; ' * bool(row['detail'])}{row['detail']}"
        )
    return "\n".join(lines)


# ---- constants -------------------------------------------------------------------------------------------------
def constants_text(found: dict[str, Any]) -> str:
    """Returns the measured constants as lines of ``timing.constants``: name: (value, source)."""
    gpu = found["machine"]["gpu"]
    if gpu is None:
        return ""
    source = f"nvfp4-cute prove on {gpu['name']}, driver {gpu['driver']}, {found['made'][:10]}"
    lines = [
        f'    "{c["name"]}": ({c["value"]:.6g}, "{source}: {c["unit"]}"),'
        for c in found["constants"]
        if c["value"]
    ]
    if not lines:
        return ""
    clusters = ", ".join(
        f"{int(p['numbers']['clusters'])} of {p['name'].removeprefix('resident_')}"
        for p in found["probes"]
        if "clusters" in p["numbers"]
    )
    name = (gpu["target"] or gpu["name"]).upper().replace(" ", "_")
    return "\n".join(
        [f"{name}: Figures = {{", *lines, "}", f"# resident clusters: {clusters or 'not asked'}"]
    )
