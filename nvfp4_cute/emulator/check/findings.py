"""Hazards in machine-readable form: JSON records, and SARIF 2.1.0 for code hosts.

Severities: an **error** breaks a rule of the hardware or the memory model. A **warning** causes harm only on a device
that behaves as none has been seen to: for example, two warps store the same bytes, or a use of registers replaces a
wait that the ISA demands. A **note** is waste or weak evidence.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nvfp4_cute.emulator.check.ledger import SEVERITIES, Hazard, HazardError, Site, by_cause
from nvfp4_cute.emulator.faults import Fault
from nvfp4_cute.emulator.kernel_names import short_name

CHECKS = ("errors", "all")
"""Findings that fail a checked run: errors (warnings are shown), or also warnings (notes are shown)."""

KINDS = {
    "race": "Two accesses of one place, at least one of them a write, that nothing orders",
    "early-release": "A stage is released before its loads are complete",
    "proxy-fence": "Ordinary stores that the async proxy reads without fence.proxy.async",
    "uninitialised": "A read of memory that was never written",
    "mbarrier": "An mbarrier used before its initialisation is visible, or with counts that do not balance",
    "named-barrier": "An arrival at a named barrier that may count for another round",
    "tensor-memory": "Tensor memory outside the allocation, of another warp's quadrant, leaked, or freed early",
    "register": "A register read before its asynchronous writer was awaited, or written while an asynchronous operation uses it",
    "double-store": "Two unordered writes to one place in global memory",
    "out-of-bounds": "An access outside shared memory or every live tensor",
    "alignment": "A misaligned address, descriptor, or size",
    "exit": "A CTA may exit while an asynchronous operation uses its memory",
    "hang": "Every warp is blocked",
    "rule": "Another rule of the machine or of the launch",
}
"""Kinds of findings and what they mean; a kind that is not listed is described by its own text."""


COMMON = {
    "swizzle-phase": "is common in CUTLASS's examples, which address such a buffer from its real start. It is harmless unless "
    "the code assumes that the swizzle pattern begins with the buffer",
    "tcgen05.wait::ld": "is missing in many of CUTLASS's examples. It is harmless on GPUs seen so far, which complete a "
    "load before its registers are used; PTX ISA does not promise it",
}
"""Warnings that CUTLASS's own examples also show: a word of their text or rule, and an explanation for newcomers."""


def common(hazards: Iterable[Hazard]) -> list[str]:
    """Returns one line per warning among `hazards` that CUTLASS's own examples also show."""
    said = [f"{h.rule} {h.text}" for h in hazards if h.severity == "warning"]
    return [f"note: `{word}` {what}" for word, what in COMMON.items() if any(word in text for text in said)]


def reported(hazards: Iterable[Hazard], check: str) -> list[Hazard]:
    """Returns the hazards that a check of this kind shows, one per cause. Errors come first, a hang before other errors."""
    shown = SEVERITIES if check == "all" else SEVERITIES[:2]
    return sorted(
        by_cause(h for h in hazards if h.severity in shown),
        key=lambda h: (SEVERITIES.index(h.severity), h.kind != "hang"),
    )


def of_failure(error: BaseException | None, check: str) -> list[dict[str, Any]]:
    """Returns records of what stopped a launch: its hazards, or the one broken rule; empty for other exceptions."""
    if isinstance(error, HazardError):
        return [record(hazard) for hazard in reported(error.hazards, check)]
    if not isinstance(error, Fault):
        return []
    return [{"kind": error.kind, "severity": "error", "text": str(error), "count": 1}]


def record(hazard: Hazard) -> dict[str, Any]:
    """Returns a hazard as a JSON record."""
    found: dict[str, Any] = {
        "kind": hazard.kind,
        "severity": hazard.severity,
        "kernel": short_name(hazard.kernel),
        "symbol": hazard.kernel,
        "text": hazard.text,
        "count": hazard.count,
    }
    for name, site in (("site", hazard.site), ("other", hazard.other)):
        if site is not None:
            found[name] = _place(site)
    if hazard.also:
        found["also"] = [_place(site) for site in hazard.also]
    return found


def _place(site: Site) -> dict[str, Any]:
    source = site.inst.source
    where = {"file": source[0], "line": source[1], "python": site.python_text} if source else {}
    return {
        "cta": list(site.cta),
        "warp": site.warp,
        "ptx_line": site.inst.line,
        "ptx": site.inst.text,
        **where,
    }


# ---- SARIF -----------------------------------------------------------------------------------------
def sarif(records: Sequence[dict[str, Any]], version: str, script: Path, root: Path) -> dict[str, Any]:
    """Returns a SARIF 2.1.0 log of JSON records.

    Args:
        version: version of this package.
        script: place of findings without a source line.
        root: folder to which places are relative; places outside stay absolute.
    """
    kinds = sorted({found["kind"] for found in records})
    driver = {
        "name": "nvfp4-cute emulate",
        "version": version,
        "rules": [{"id": kind, "shortDescription": {"text": KINDS.get(kind, kind)}} for kind in kinds],
    }
    results = [_result(found, kinds.index(found["kind"]), script, root) for found in records]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _result(found: dict[str, Any], rule: int, script: Path, root: Path) -> dict[str, Any]:
    result = {
        "ruleId": found["kind"],
        "ruleIndex": rule,
        "level": found["severity"],
        "message": {"text": found["text"]},
        "locations": [_location(found.get("site", {}), script, root)],
    }
    related = [place for place in (found.get("other", {}), *found.get("also", ())) if "file" in place]
    if related:
        result["relatedLocations"] = [
            {"id": i, **_location(place, script, root)} for i, place in enumerate(related, 1)
        ]
    return result


def _location(place: dict[str, Any], script: Path, root: Path) -> dict[str, Any]:
    path = Path(place.get("file", script)).resolve()
    uri = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_uri()
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": uri},
            "region": {"startLine": max(1, place.get("line", 1))},
        }
    }
