"""Results of `nvfp4-cute prove` on this user's GPUs, for planning: which forms were proven on which silicon.

They are stored in ``prove/verdicts.json`` in the cache folder. After the first time, reading costs one file status.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from nvfp4_cute import env

PASSED = "passed"
FORMS = {
    "split_k": ("st_async_v4", "cluster_exit", "pdl_cluster", "pdl_graph"),
    "pdl": ("pdl", "pdl_graph"),
    "cluster": ("cluster_exit", "st_async", "arrives_in_order"),
    "odd_scale_column": ("mma_n32_column1", "mma_n96_column1"),
    "mma_n_multiple_of_32": ("mma_n96", "mma_n160", "mma_n224"),
    "chain_without_cooperative_launch": ("spin_two_streams",),
}
"""Probes that must pass before a form counts as proven."""


def path() -> Path | None:
    """Returns the file; None if nothing is stored on disk."""
    folder = env.cache_dir()
    return None if folder is None else folder / "prove" / "verdicts.json"


def is_proven(arch_or_gpu: str, form: str) -> bool:
    """Returns whether every probe of a form passed on a GPU with this name, or on some GPU of this architecture ("sm_120a").

    Raises: ValueError: the form is unknown.
    """
    if form not in FORMS:
        raise ValueError(f"form={form!r} is unknown; use one of {', '.join(FORMS)}")
    for gpu, found in _known().items():
        if arch_or_gpu in (gpu, found.get("arch")):
            probes = found.get("probes", {})
            if all(probes.get(name) == PASSED for name in FORMS[form]):
                return True
    return False


def store(gpu: str, arch: str, probes: dict[str, str]) -> None:
    """Stores a GPU's verdicts by probe, in addition to the known ones. Does nothing if nothing is stored on disk.

    Raises: OSError: the folder cannot be written.
    """
    file = path()
    if file is None:
        return
    known = dict(_known())
    known[gpu] = {"arch": arch, "probes": {**known.get(gpu, {}).get("probes", {}), **probes}}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def _known() -> dict[str, dict[str, Any]]:
    file = path()
    try:
        stamp = file.stat().st_mtime_ns if file is not None else 0
    except OSError:
        return {}
    return _read(file, stamp) if file is not None else {}


@lru_cache(maxsize=2)
def _read(file: Path, stamp: int) -> dict[str, dict[str, Any]]:
    """Returns the file's content, or nothing if it is damaged. ``stamp``: when it was written."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
