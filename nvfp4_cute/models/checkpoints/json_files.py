"""Reads JSON objects of a checkpoint folder. Damaged or hostile files are refused by name."""

import json
from pathlib import Path
from typing import Any

from nvfp4_cute.errors import CheckpointError

MAX_BYTES = 100_000_000  # also the largest header that the safetensors library accepts
MAX_DEPTH = 100  # nesting of objects and lists in a config, into which transformers recurses


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        CheckpointError: the file is not UTF-8 or JSON, holds something other than an object, names a key twice, or is
            nested deeper than ``MAX_DEPTH``.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise CheckpointError(
            f"{path} has {size} bytes; a JSON file here has at most {MAX_BYTES}: fetch it again"
        )
    found = parse_object(path.read_bytes(), path)
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        level = [child for one in level for child in (one.values() if isinstance(one, dict) else one)]
        level = [child for child in level if isinstance(child, dict | list)]
        if not level:
            return found
    raise CheckpointError(
        f"{path} is nested deeper than {MAX_DEPTH} levels: the file is damaged; fetch it again"
    )


def parse_object(text: bytes, path: Path) -> dict[str, Any]:
    """Returns the JSON object in ``text``; ``path`` is for messages.

    Raises:
        CheckpointError: for the reasons of :func:`read_object`, except that only Python's own limit applies to the depth.
    """
    try:
        found = json.loads(text.decode(), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not JSON ({error}): the file is damaged or cut; fetch it again"
        ) from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} has JSON that is not an object: the file is damaged; fetch it again")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of pairs with distinct keys; of two equal keys, two readers might use different values."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"key {twice!r} is there twice")
    return found
