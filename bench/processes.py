"""Work in pieces, in processes of one core each; each piece's result is stored in a file at once."""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

import torch

from nvfp4_cute.bench import provenance
from nvfp4_cute.terminal import Progress

Piece = TypeVar("Piece")
Found = TypeVar("Found")


def one_core() -> None:
    """Restricts a process to one core, chosen by the system. The number of processes is that of the cores."""
    torch.set_num_threads(1)


def in_processes(
    work: Callable[[Piece], Found], pieces: Sequence[Piece], jobs: int
) -> Iterator[tuple[Piece, Found]]:
    """Yields every piece with the result of ``work``, as soon as it is there.

    Args:
        work: a function of a module.
        jobs: number of processes; 1 works here, in order.
    """
    if jobs <= 1 or len(pieces) <= 1:
        yield from ((piece, work(piece)) for piece in pieces)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(pieces)), mp_context=context, initializer=one_core) as pool:
        futures = {pool.submit(work, piece): piece for piece in pieces}
        for future in as_completed(futures):
            yield futures[future], future.result()


def write_json(path: Path, value: object) -> None:
    """Writes a file that has the old or the new content, whenever the process ends."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, path)


def records(
    work: Callable[[Piece], dict[str, Any]],
    wanted: Mapping[str, Piece],
    *,
    jobs: int,
    results: Path | None,
    label: str,
) -> dict[str, dict[str, Any]]:
    """Returns records of pieces by their keys, including those that the file of results already has.

    Args:
        work: makes a record, plain data, of a piece.
        wanted: pieces by key; existing records come from the file.
        jobs: see ``in_processes``.
        results: file that stores records; None stores none.
        label: text of the progress bar, and the suite that writes the file.

    Raises:
        ValueError: the file was not written by this command.
    """
    known: dict[str, dict[str, Any]] = {}
    if results is not None and results.exists():
        known = provenance.read_object(results, (), f"nvfp4-cute bench {label} --results")
    keys = {piece: key for key, piece in wanted.items() if key not in known}
    with Progress(total=len(keys), desc=label, unit="case") as bar:
        for piece, found in in_processes(work, list(keys), jobs):
            known[keys[piece]] = found
            if results is not None:
                write_json(results, known)
            bar.update()
    return known
