"""Times that the model predicted before any measurement: made without the GPU, committed, and only read by `prove`.

A prediction names its kernels by a digest of their PTX, so a report can say whether the measured kernels are the
predicted ones.
"""

import datetime
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from nvfp4_cute.bench import ours, provenance
from nvfp4_cute.bench.command import RESULTS
from nvfp4_cute.bench.modelled import stated_error
from nvfp4_cute.bench.operands import empty_operands
from nvfp4_cute.compile import cache
from nvfp4_cute.compile.compiler import CompiledKernel
from nvfp4_cute.errors import UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.prove import cases, moe
from nvfp4_cute.roofline.modelled import modelled_chain
from nvfp4_cute.terminal import Progress

SCHEMA = 1
PREDICTED_TOKENS = (8, 128)
"""Numbers of tokens for the layer of experts, whose five launches take minutes to model."""


def path_for(gpu: str, folder: Path = RESULTS) -> Path:
    """Returns the path of the predictions of a GPU: ``predictions-h100_sxm.json``."""
    return folder / f"predictions-{file_name(gpu)}.json"


def file_name(gpu: str) -> str:
    """Returns a GPU's name in the form used in file names."""
    return "".join(c if c.isalnum() else "_" for c in gpu.lower().removeprefix("nvidia ")).strip("_")


def load(gpu: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """Returns the stored predictions of a GPU; None if there are none, or by another schema."""
    path = path_for(gpu, folder)
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found if found.get("schema") == SCHEMA else None


def run(target_name: str, folder: Path = RESULTS) -> int:
    """Predicts every case for a GPU that need not be present, writes the file after each case, and returns 0.

    Cases that the file already holds for the same kernel sources stay. Raises UnsupportedTarget for an unknown GPU.
    """
    from nvfp4_cute.compile import disk_cache

    target = targets.lookup(target_name)
    path, sources = path_for(target.name, folder), disk_cache.source_digest()[:16]
    before = load(target.name, folder)
    known = before["cases"] if before is not None and before["sources"] == sources else {}
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "gpu": target.name,
        "made": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": provenance.commit(),
        "sources": sources,
        "error": stated_error(),
        "cases": dict(known),
    }
    for name, call in Progress(list(wanted()), desc=target.name, unit="call"):
        if name not in known:
            report["cases"][name] = predict(call, target)
            path.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"{path.name}: {len(report['cases'])} predictions for {target.name}; commit it before anything is measured"
    )
    return 0


def wanted() -> Iterable[tuple[str, Callable[[str], object]]]:
    """Yields name and call of everything that is predicted."""
    for case in cases.timed():
        call = lambda backend, case=case: ours.prepare(case, empty_operands(case), backend).run()
        yield str(case), call
    for tokens in PREDICTED_TOKENS:
        yield moe.name_of(tokens), moe.make_layer(tokens, torch.device("cpu"), empty=True).run


def predict(call: Callable[[str], object], target: Target) -> dict[str, Any]:
    """Returns the time of a call in a CUDA graph between two events, and its kernels; or why there is none."""
    with cache.watch() as kernels:
        try:
            timing = modelled_chain(call, target)
        except (UnsupportedProblem, UnsupportedTarget) as error:
            return {"us": None, "why": str(error)}
    return {"us": round(timing.us, 2), "kernels": digests(kernels)}


def digests(kernels: Iterable[CompiledKernel]) -> dict[str, str]:
    """Returns the start of the SHA-256 of each kernel's PTX, by the kernel's name."""
    return {k.key.to_name(): hashlib.sha256(k.ptx.encode()).hexdigest()[:16] for k in kernels}
