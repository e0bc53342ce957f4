"""The report: plain data with a schema, and its text for each step. It contains nothing private."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from nvfp4_cute.prove import constants, machine, moe
from nvfp4_cute.prove.outcome import FAILURES, NOT_HERE, PASSED, WRONG, Outcome
from nvfp4_cute.prove.probes import PROBES
from nvfp4_cute.prove.timed import PEER

SCHEMA = 1
SLOW = 1.5
"""Factor over its prediction from which a time is reported as slow."""
MOST_FAILURES = 40
TOP = {
    "schema": int, "tool": str, "made": str, "backend": str, "quick": bool, "machine": dict, "sources": str,
    "steps": dict, "correctness": dict, "probes": list, "constants": list, "timed": list, "host": list, "summary": dict,
}  # fmt: skip
"""Every entry and its type; "commit" and "prediction" may also be None."""


def make(
    *,
    made: str,
    backend: str,
    arch: str,
    quick: bool,
    description: dict[str, Any],
    sources: str,
    commit: str | None,
    steps: dict[str, dict[str, Any]],
    outcomes: Sequence[Outcome],
    prediction: dict[str, Any] | None,
) -> dict[str, Any]:
    """Makes the report of a run.

    Args:
        steps: jobs and jobs done, by step.
        outcomes: outcomes of all jobs.
        prediction: earlier predictions, from ``predictions.load``.
    """
    of = lambda kind: [o for o in outcomes if o.kind == kind]
    report = {
        "schema": SCHEMA,
        "tool": "nvfp4-cute prove",
        "made": made,
        "backend": backend,
        "quick": quick,
        "machine": description,
        "sources": sources,
        "commit": commit,
        "prediction": None
        if prediction is None
        else {key: prediction[key] for key in ("made", "commit", "error")},
        "steps": steps,
        "correctness": {kind: _counted(of(kind)) for kind in ("problem", "config")},
        "probes": [_probe(o, backend) for o in (*of("probe"), *_elsewhere(of("probe"), arch))],
        "constants": _constants(of("constant"), description),
        "timed": [_timed(o, prediction) for o in of("timed")],
        "host": [o.record() for o in of("host")],
    }
    report["summary"] = _summary(report)
    return machine.scrub(report)


def _elsewhere(asked: Sequence[Outcome], arch: str) -> list[Outcome]:
    """Returns probes of other architectures."""
    names = {o.name for o in asked}
    away = [name for name, probe in PROBES.items() if arch not in probe.archs and name not in names]
    return [Outcome("probe", name, NOT_HERE, f"asked of {', '.join(PROBES[name].archs)}") for name in away]


def _counted(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns the number of outcomes by verdict, and the failed ones."""
    failed = [o for o in outcomes if o.verdict in FAILURES]
    return {
        "tried": len(outcomes),
        "verdicts": dict(Counter(o.verdict for o in outcomes)),
        "failures": [
            {"name": o.name, "verdict": o.verdict, "detail": o.detail} for o in failed[:MOST_FAILURES]
        ],
        "refused": [f"{o.name}: {o.detail}" for o in outcomes if o.verdict == "refused"][:MOST_FAILURES],
    }


def _probe(outcome: Outcome, backend: str) -> dict[str, Any]:
    probe = PROBES[outcome.name]
    is_surprise = outcome.verdict not in (*probe.expected, NOT_HERE)
    return {
        "name": outcome.name,
        "rule": probe.rule,
        "question": probe.question,
        "decides": probe.decides,
        "expected": list(probe.expected),
        "verdict": outcome.verdict,
        "detail": outcome.detail,
        "numbers": outcome.numbers,
        "is_surprise": is_surprise and backend == "cuda",
    }


def _constants(outcomes: Sequence[Outcome], description: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns one record per figure, with the model's value."""
    target = machine.target_of(description)
    has = {} if target is None else constants.model_has(target)
    found = []
    for outcome in outcomes:
        for name, value in outcome.numbers.items():
            modelled, source = has.get(name, (None, ""))
            line = {
                "name": name,
                "value": value,
                "unit": constants.UNITS[name],
                "model": modelled,
                "source": source,
            }
            found.append(line)
        if outcome.verdict in FAILURES:
            found.append(
                {"name": outcome.name, "value": None, "unit": outcome.detail, "model": None, "source": ""}
            )
    return found


def _timed(outcome: Outcome, prediction: dict[str, Any] | None) -> dict[str, Any]:
    """Returns a case with its time, its prediction, and whether it is slow."""
    numbers = outcome.numbers
    predicted = (prediction or {"cases": {}})["cases"].get(outcome.name, {})
    us, expected = numbers.get("us"), predicted.get("us")
    peers = {name.removeprefix(PEER): value for name, value in numbers.items() if name.startswith(PEER)}
    return {
        "case": outcome.name,
        "is_layer": outcome.name in {moe.name_of(tokens) for tokens in moe.TOKENS},
        "verdict": outcome.verdict,
        "detail": outcome.detail,
        **{key: numbers.get(key) for key in ("us", "low", "high", "floor_us", "bytes", "clean_us")},
        "peers": peers,
        "predicted_us": expected,
        "ratio": None if us is None or expected is None else us / expected,
        "is_slow": us is not None and expected is not None and us > SLOW * expected,
        "kernels": _same_kernels(outcome.notes, predicted.get("kernels")),
        "kernel_names": sorted(outcome.notes),
    }


def _same_kernels(ran: dict[str, str], predicted: dict[str, str] | None) -> str:
    """Returns whether the kernels that ran are those of the prediction."""
    if predicted is None or not ran:
        return "not predicted" if predicted is None else "not known"
    if any(ran.get(name, digest) != digest for name, digest in predicted.items()):
        return "changed since the prediction"
    return "as predicted" if predicted.keys() <= ran.keys() else "others than predicted"


def _summary(report: dict[str, Any]) -> dict[str, Any]:
    """Returns what a person reads first."""
    ratios = sorted(row["ratio"] for row in report["timed"] if row["ratio"] is not None)
    correctness = report["correctness"]
    failures = {kind: len(correctness[kind]["failures"]) for kind in correctness}
    asked = [p for p in report["probes"] if p["verdict"] != NOT_HERE]
    return {
        "problems": f"{correctness['problem']['verdicts'].get(PASSED, 0)} of {correctness['problem']['tried']} bit-equal",
        "configs": f"{correctness['config']['verdicts'].get(PASSED, 0)} of {correctness['config']['tried']} bit-equal",
        "probes": f"{len(asked)} asked, {sum(p['is_surprise'] for p in asked)} not as expected",
        "slow": [row["case"] for row in report["timed"] if row["is_slow"]],
        "wrong": [row["case"] for row in report["timed"] if row["verdict"] in FAILURES],
        "soak": [row["detail"] for row in report["host"] if row["verdict"] == WRONG],
        "measured over predicted": None
        if not ratios
        else {
            "median": ratios[len(ratios) // 2],
            "least": ratios[0],
            "most": ratios[-1],
            "cases": len(ratios),
        },
        "is_good": not any(failures.values())
        and not any(p["is_surprise"] for p in asked)
        and not any(row["is_slow"] or row["verdict"] in FAILURES for row in report["timed"])
        and not any(row["verdict"] in FAILURES for row in report["host"]),
    }


def check(report: Any) -> None:
    """Raises ValueError unless this is a report of this schema; the message says what is wrong."""
    if not isinstance(report, dict) or report.get("tool") != "nvfp4-cute prove":
        raise ValueError("this is no report of `nvfp4-cute prove`: give the prove-<gpu>.json that it wrote")
    if report.get("schema") != SCHEMA:
        raise ValueError(
            f"the report has schema {report.get('schema')}, this program reads {SCHEMA}: use the version that wrote it"
        )
    for name, kind in TOP.items():
        if not isinstance(report.get(name), kind):
            raise ValueError(f"the report's {name!r} is missing or no {kind.__name__}: the file is damaged")
