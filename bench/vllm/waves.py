"""Starts the engines of a wave, waits for them, and collects their measurements."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nvfp4_cute import env
from nvfp4_cute.bench.vllm.engine import STEPS
from nvfp4_cute.bench.vllm.plan import Job, Wave


def environment(job: Job, folder: Path) -> dict[str, str]:
    """Returns the environment of an engine: one process, no network, its own caches, with or without the plug-in.

    vLLM's descriptions of model classes, which are equal for all engines, come from its usual cache.
    """
    own, shared = folder / "cache" / job.name, Path("~/.cache/vllm/modelinfos").expanduser()
    own.mkdir(parents=True, exist_ok=True)
    shared.mkdir(parents=True, exist_ok=True)
    if not (own / "modelinfos").exists():
        (own / "modelinfos").symlink_to(shared)
    return env.with_variables(
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_PLUGINS": "nvfp4_cute" if job.method == "plugin" else "",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(own),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor" / job.name),
            "PYTHONUNBUFFERED": "1",
        }
    )


def run_wave(wave: Wave, folder: Path, seconds: float, logs: Path) -> list[dict[str, Any]]:
    """Returns records of the wave's engines. An engine ended by the time limit has its finished measurements, and an error.

    Args:
        folder: folder for temporary files.
        seconds: time limit of all engines.
        logs: folder that gets one file with the ends of all logs.
    """
    here, begun = folder / wave.name, time.monotonic()
    here.mkdir(parents=True, exist_ok=True)
    running: dict[str, subprocess.Popen[bytes]] = {}
    names = [job.name for job in wave.jobs]
    for job in wave.jobs:
        described = here / f"{job.name}.job"
        described.write_text(json.dumps(job.as_dict()))
        command = [
            sys.executable,
            "-m",
            "nvfp4_cute.bench.vllm.engine",
            str(described),
            str(here),
            *names,
        ]
        with open(here / f"{job.name}.log", "wb") as log:
            running[job.name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment(job, folder), start_new_session=True
            )
    while time.monotonic() < begun + seconds and any(process.poll() is None for process in running.values()):
        for name, process in running.items():
            if process.poll() is not None:  # the others stop waiting, however it ended
                for step in STEPS:
                    (here / f"{name}.{step}").touch()
        time.sleep(0.3)
    records = []
    for name, process in running.items():
        is_late = process.poll() is None
        if is_late:
            process.send_signal(signal.SIGKILL)
            process.wait()
        file = here / f"{name}.json"
        record = json.loads(file.read_text()) if file.exists() else {"name": name}
        if is_late and not record.get("is_measured"):
            record["error"] = f"ended after {seconds:.0f} s"
        elif not is_late and process.returncode and "error" not in record:
            record["error"] = f"exit code {process.returncode}"
        records.append(record)
    with open(logs / f"{wave.name}.log", "w") as kept:
        for name in running:
            text = (here / f"{name}.log").read_text(errors="replace")
            kept.write(f"==== {name}\n{text[-60_000:]}\n")
    shutil.rmtree(here / "models", ignore_errors=True)
    return records
