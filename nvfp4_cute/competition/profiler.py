"""Nsight Compute around a harness: what `eval --mode profile` does on a GPU, as a competition's runner does.

The harness calls the submission once inside the NVTX range ``custom_kernel``; ncu looks at the kernels in it.
"""

import re
import shutil
from pathlib import Path

TOOL = "ncu"
MISSING = "ncu (Nsight Compute) is not in PATH: the submission was run, and not profiled"
MAX_KERNELS = 10
SECTION = "GPU Speed Of Light Throughput"


def is_installed() -> bool:
    """Whether there is an ncu."""
    return shutil.which(TOOL) is not None


def command(harness: list[str], log: Path) -> list[str]:
    """The command that runs ``harness`` under ncu, its report going to ``log``."""
    options = ["--set", "full", "--nvtx", "--nvtx-include", "custom_kernel/", "-c", str(MAX_KERNELS)]
    return [TOOL, *options, "--target-processes", "all", "--log-file", str(log), *harness]


def read_report(log: Path) -> str:
    """Of every kernel, its name and the speed-of-light section; ncu's own words where it saw no kernel."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    kept, inside = [], False
    for line in text.splitlines():
        section = re.match(r"\s*Section: (.*)", line)
        if section:
            inside = section[1].strip() == SECTION
        elif re.match(r"  \S.*Context \d+", line):  # a kernel with its grid
            kept.append(line.strip())
            inside = False
        elif inside and line.strip() and set(line.strip()) != {"-", " "}:
            kept.append(line.rstrip())
    return "\n".join(kept) or text.strip()
