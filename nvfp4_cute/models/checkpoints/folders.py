"""Finds checkpoint folders by path, or by the Hugging Face hub name of an earlier download."""

import os
import re
from pathlib import Path

from nvfp4_cute.env import hub_cache
from nvfp4_cute.models.checkpoints.json_files import read_object

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def local_folder(name: str | os.PathLike) -> Path:
    """Returns the folder of ``name``: the path itself, or for "owner/name" the snapshot in the local cache of the hub.

    If neither exists, returns ``name`` as a path, which the caller refuses with :func:`way_out`.
    """
    path = Path(name)
    if path.is_dir() or not HUB_NAME.fullmatch(str(name)):
        return path
    snapshots = hub_cache() / f"models--{str(name).replace('/', '--')}"
    reference = snapshots / "refs" / "main"
    commit = reference.read_text().strip() if reference.is_file() else ""
    found = snapshots / "snapshots" / commit
    return found if commit and found.is_dir() else path


def way_out(folder: str | os.PathLike) -> str:
    """Returns advice for a ``folder`` that is not a checkpoint, for messages."""
    if not Path(folder).is_dir() and HUB_NAME.fullmatch(str(folder)):
        return f"there is no such folder, nor a copy in {hub_cache()}: download it first, with `hf download {folder}`"
    return "pass the folder of a checkpoint"


def check_objects(folder: Path, *names: str) -> None:
    """Raises CheckpointError for a damaged JSON file among ``names``, before other libraries read it."""
    for name in names:
        if (folder / name).is_file():
            read_object(folder / name)
