"""The GPU, its driver, and the versions that decide what runs; and how texts lose what is private."""

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
"""Letters of a host's or a user's name that is replaced: shorter ones are parts of other words."""
COMMON = {"root", "user", "admin", "home", "local", "localhost", "linux", "ubuntu"}


def describe() -> dict[str, Any]:
    """The GPU of this machine, or why there is none, and versions. No names of hosts or users, no paths, no serial numbers."""
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
    """The driver's version, None where nvidia-smi does not say."""
    return query("driver_version")


def query(field: str) -> str | None:
    """What nvidia-smi says of the first GPU, None where it says nothing. Only fields that name no single device."""
    try:
        asked = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.strip().splitlines()
    return lines[0].strip() if answer.returncode == 0 and lines else None


def target_of(description: dict[str, Any]) -> targets.Target | None:
    """The entry of the table of targets that a description names."""
    gpu = description["gpu"]
    return None if gpu is None or gpu["target"] is None else targets.lookup(gpu["target"])


# ---- what is private -------------------------------------------------------------------------------------------
def private_names() -> set[str]:
    """Names of this host and of its user that a report must not hold."""
    names = {socket.gethostname(), platform.node()}
    names |= {name.split(".")[0] for name in names}
    try:
        names.add(getpass.getuser())
    except (KeyError, OSError):  # a user without a name
        pass
    return {name for name in names if len(name) >= LEAST_NAME and name.lower() not in COMMON}


def scrub(value: Any) -> Any:
    """Plain data whose texts name no host, no user and no folder."""
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
