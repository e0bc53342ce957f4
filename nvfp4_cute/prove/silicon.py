"""Tested and untested silicon in two lines, from the committed reports.

python -m nvfp4_cute.prove.silicon        prints them as in the README
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

from nvfp4_cute.planning.arch import ARCHS

GPUS = {
    "sm_90a": "H100, H200",
    "sm_100a": "B200, GB200",
    "sm_103a": "B300, GB300",
    "sm_110a": "Jetson Thor",
    "sm_120a": "RTX 50, RTX PRO 6000",
    "sm_121a": "GB10",
}


def folder() -> Path | None:
    """Returns the folder of committed reports, or None if this installation has none."""
    spec = importlib.util.find_spec("nvfp4_cute.bench")
    found = Path(spec.origin).parent / "results" if spec is not None and spec.origin else None
    return found if found is not None and found.is_dir() else None


def reports(where: Path | None = None) -> list[dict[str, Any]]:
    """Returns the committed, complete reports of GPUs, by the name of their GPU."""
    where = where or folder()
    found = []
    for path in sorted(where.glob("prove-*.json")) if where is not None else ():
        report = json.loads(path.read_text())
        if report.get("backend") == "cuda" and not report.get("quick"):
            found.append(report)
    return sorted(found, key=lambda report: str(report["machine"]["gpu"]["name"]))


def lines(where: Path | None = None) -> tuple[str, str]:
    """Returns a line of tested GPUs and a line of untested architectures."""
    found = reports(where)
    ran = [
        f"{r['machine']['gpu']['name'].removeprefix('NVIDIA ')} ({r['made'][:10]}: problems {r['summary']['problems']}, "
        f"configs {r['summary']['configs']}, probes {r['summary']['probes']})"
        for r in found
    ]
    archs = {r["machine"]["gpu"]["arch"] for r in found}
    missing = [f"{arch} ({GPUS[arch]})" for arch in ARCHS if arch not in archs]
    return (
        f"Run on silicon by `nvfp4-cute prove`: {'; '.join(ran) or 'no report is committed'}.",
        f"No report yet, tested only on the emulator: {', '.join(missing) or 'none'}.",
    )


if __name__ == "__main__":
    print("\n".join(lines()))
