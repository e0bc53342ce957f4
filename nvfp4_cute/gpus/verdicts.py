"""What `nvfp4-cute prove` found on the GPUs of this user, for whoever plans: which forms were proven on which silicon.

Verdicts lie in ``prove/verdicts.json`` in the cache folder. Reading costs a file's status after the first time.
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
"""The probes that have to pass before a form counts as proven."""


def path() -> Path | None:
    """The file, None where nothing is kept on disk."""
    folder = env.cache_dir()
    return None if folder is None else folder / "prove" / "verdicts.json"


def is_proven(arch_or_gpu: str, form: str) -> bool:
    """Whether every probe of a form passed on a GPU of this name, or on some GPU of this architecture ("sm_120a").

    Raises: ValueError: an unknown form.
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
    """Keep the verdicts of a GPU's probes by name, on top of those that are known. Does nothing where nothing is kept.

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
    """The file's content; ``stamp`` is when it was written. Nothing where it is damaged."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
