"""The GPU, its driver, and versions that affect the results; and the removal of private names from texts."""

import getpass
import platform
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

from nvfp4_cute.backends import installed
from nvfp4_cute.gpus import targets

PATH = re.compile(r"(?<![\w.:/])~?(?:/[\w.+@-]+){2,}/?")
LEAST_NAME = 4
"""Least length of a host or user name that is replaced; shorter names are parts of other words."""
COMMON = {"root", "user", "admin", "home", "local", "localhost", "linux", "ubuntu"}


def describe() -> dict[str, Any]:
    """Describes the GPU of this machine, or why there is none, and versions.

    Without names of hosts or users, paths, serial numbers.
    """
    found: dict[str, Any] = {
        "versions": installed.versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": None,
    }
    present = installed.gpus()
    if not present:
        return found
    import torch

    properties = torch.cuda.get_device_properties(present[0].index)
    target = present[0].target
    found["gpu"] = {
        "name": present[0].name,
        "target": None if target is None else target.name,
        "arch": present[0].arch,
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": driver(),
        "cuda_of_torch": torch.version.cuda,
        "power_limit": query("power.limit"),
    }
    return found


def driver() -> str | None:
    """Returns the driver's version, or None if nvidia-smi does not report it."""
    return query("driver_version")


def query(field: str) -> str | None:
    """Returns nvidia-smi's value for the first GPU, or None. Only for fields that identify no single device."""
    try:
        asked = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.strip().splitlines()
    return lines[0].strip() if answer.returncode == 0 and lines else None


def target_of(description: dict[str, Any]) -> targets.Target | None:
    """Returns the table entry of the target that a description names."""
    gpu = description["gpu"]
    return None if gpu is None or gpu["target"] is None else targets.lookup(gpu["target"])


# ---- privacy ---------------------------------------------------------------------------------------------------
def private_names() -> set[str]:
    """Returns names of this host and of its user that a report must not contain."""
    names = {socket.gethostname(), platform.node()}
    names |= {name.split(".")[0] for name in names}
    try:
        names.add(getpass.getuser())
    except (KeyError, OSError):  # a user without a name
        pass
    return {name for name in names if len(name) >= LEAST_NAME and name.lower() not in COMMON}


def scrub(value: Any) -> Any:
    """Returns plain data whose texts name no host, no user and no folder."""
    if isinstance(value, dict):
        return {scrub(key): scrub(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub(item) for item in value]
    if not isinstance(value, str):
        return value
    text = value.replace(str(Path.home()), "~") if str(Path.home()) != "/" else value
    text = PATH.sub(lambda found: Path(found[0]).name, text)
    for name in private_names():
        text = re.sub(rf"\b{re.escape(name)}\b", "...", text)
    return text
