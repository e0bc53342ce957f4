"""`nvfp4-cute prove --read FILE`: a report as a page, a picture, and as constants for the timing model."""

import json
from pathlib import Path
from typing import Any

from nvfp4_cute.prove import picture, report
from nvfp4_cute.prove.predictions import file_name
from nvfp4_cute.text_table import text_table


def load(path: Path) -> dict[str, Any]:
    """A report from a file. Raises ValueError for a file that is none, OSError for one that cannot be read."""
    try:
        found = json.loads(path.read_text())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is no text: {error}") from error
    report.check(found)
    return found


def stem(found: dict[str, Any]) -> str:
    """``prove-h100_sxm``, or ``prove-emulator_sm_90a`` where no GPU was asked."""
    gpu = found["machine"]["gpu"]
    if found["backend"] != "cuda" or gpu is None:
        return f"prove-{file_name(found['backend'])}"
    return f"prove-{file_name(gpu['target'] or gpu['name'])}"


def write(found: dict[str, Any], folder: Path) -> list[Path]:
    """Write the report, its page and its picture into a folder; return what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    name = stem(found)
    written = [folder / f"{name}.json", folder / f"{name}.md"]
    drawn = picture.svg(found)
    # A reader never sees half of a file.
    for path, text in zip(written, (json.dumps(found, indent=1) + "\n", page(found)), strict=True):
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text)
        partial.replace(path)
    if drawn is not None:
        written.append(folder / f"{name}.svg")
        written[-1].write_text(drawn)
    return written


# ---- the page --------------------------------------------------------------------------------------------------
def page(found: dict[str, Any]) -> str:
    """The report for people, in Markdown."""
    gpu = found["machine"]["gpu"]
    title = found["backend"] if found["backend"] != "cuda" else gpu["name"]
    parts = [
        f"# {title}: what was proven\n\n{_conditions(found)}",
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
    """What a person reads first, a line each."""
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


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _times(found: dict[str, Any]) -> str:
    rows = []
    for row in found["timed"]:
        peers = sorted(row["peers"].items(), key=lambda item: item[1])
        best = peers[0] if peers else ("-", None)
        share = None if row["us"] is None or row["floor_us"] is None else 100 * row["floor_us"] / row["us"]
        rate = None if row["us"] is None or row["bytes"] is None else row["bytes"] / row["us"] / 1e6
        rows.append(
            (
                row["case"], _us(row["us"]), f"{_us(row['low'])}-{_us(row['high'])}", _us(row["predicted_us"]),
                _us(row["ratio"]) + " slow" * row["is_slow"], _us(share), _us(rate), _us(row["clean_us"]), _us(best[1]),
                best[0], row["verdict"] if row["us"] is None else row["kernels"],
            )
        )  # fmt: skip
    header = (
        "case", "us", "deciles", "predicted", "ratio", "% of SOL", "TB/s", "clean L2 us", "torch us", "torch's way", "kernels",
    )  # fmt: skip
    notes = [f"- {row['case']}: {row['detail']}" for row in found["timed"] if row["detail"]]
    table = text_table(header, rows)
    return (
        f"Median of graph replays on a cold L2, inputs that rotate, torch in turn.\n\n```\n{table}\n```\n"
        + "\n".join(notes)
    )


def _constants(found: dict[str, Any]) -> str:
    rows = []
    for line in found["constants"]:
        value, model = line["value"], line["model"]
        ratio = "-" if value is None or not model else f"{value / model:.2f}"
        rows.append((line["name"], _figure(value), _figure(model), ratio, line["unit"]))
    table = text_table(("figure", "measured", "the model has", "ratio", "what"), rows)
    return f"```\n{table}\n```"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


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
    """The measured constants as lines of ``timing.constants``: name: (value, source)."""
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
