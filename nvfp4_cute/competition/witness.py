"""Detects, from a submission's process memory, whether it replaced functions that its harness relies on.

A check inside the process would depend on objects that the submission can reach. CPython stores the value of a name
next to the name in a dictionary's table. The parent process reads the table and looks for the pair of addresses that it
held before the submission was imported.
"""

import gc
import os
import struct
import sys
from collections.abc import Iterable
from typing import Any

_KEYS_OFFSET = 32
"""Bytes from a dict object to the address of its table, in CPython 3.10 to 3.14."""

_LENGTH_OFFSET = 16
"""Bytes from a dict object to the number of its entries."""

_POINTER = struct.Struct("<Q")


def note(watched: Iterable[tuple[Any, str]]) -> list[dict[str, Any]]:
    """Records the current values, for comparison by :func:`replaced`. Called in the submission's process before its import.

    Args:
        watched: (module or class, name of an attribute of it).
    """
    return [_note(owner, name) for owner, name in watched]


def _note(owner: Any, name: str) -> dict[str, Any]:
    owners = owner.__mro__ if isinstance(owner, type) else (owner,)
    name = sys.intern(name)
    absent: list[dict[str, int]] = []
    for place in owners:
        table = _dict_of(place)
        if name in table:
            value = table[name]
            code = getattr(value, "__code__", None)
            return {
                "label": f"{getattr(owner, '__name__', owner)}.{name}",
                "absent": absent,
                "dict": id(table),
                "name": id(next(key for key in table if key == name)),
                "value": id(value),
                "size": type(value).__basicsize__,
                "code": 0 if code is None else id(code),
            }
        absent.append({"dict": id(table), "name": id(name)})
    raise AttributeError(f"{owner} has no {name}")


def _dict_of(owner: Any) -> dict[str, Any]:
    """Returns the dictionary of a module or class itself, not a proxy of it."""
    if not isinstance(owner, type):
        return vars(owner)
    return next(found for found in gc.get_referents(owner.__dict__) if isinstance(found, dict))


class Memory:
    """The memory of another process that this one may read."""

    def __init__(self, process: int):
        """Opens the memory of a process.

        Raises:
            OSError: the system does not let this process read it.
        """
        self._file = os.open(f"/proc/{process}/mem", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Closes the memory."""
        os.close(self._file)

    def replaced(self, noted: list[dict[str, Any]]) -> list[str]:
        """Returns the labels of replaced values."""
        return [entry["label"] for entry in noted if not self._is_in_place(entry)]

    def length(self, address: int) -> int:
        """Returns the number of entries of the dict at an address."""
        return int(_POINTER.unpack(self._read(address + _LENGTH_OFFSET, 8).ljust(8, b"\0"))[0])

    def _is_in_place(self, entry: dict[str, Any]) -> bool:
        if any(_POINTER.pack(at["name"]) in self._table(at["dict"]) for at in entry["absent"]):
            return False
        pair = _POINTER.pack(entry["name"]) + _POINTER.pack(entry["value"])
        if pair not in self._table(entry["dict"]):
            return False
        return not entry["code"] or _POINTER.pack(entry["code"]) in self._read(entry["value"], entry["size"])

    def _table(self, address: int) -> bytes:
        """Returns the entries of a dict: addresses of names and values, in newer CPython versions without hashes between them."""
        (keys,) = _POINTER.unpack(self._read(address + _KEYS_OFFSET, 8).ljust(8, b"\0"))
        head = self._read(keys, 40)
        if len(head) < 40:
            return b""
        if sys.version_info >= (3, 11):
            index_bytes, entry_bytes, header_bytes = 1 << (head[9] & 31), 16 if head[10] else 24, 32
            (count,) = _POINTER.unpack_from(head, 24)
        else:
            (slots,) = _POINTER.unpack_from(head, 8)
            index_bytes, entry_bytes, header_bytes = (
                slots * (1 if slots <= 0xFF else 2 if slots <= 0xFFFF else 4),
                24,
                40,
            )
            (count,) = _POINTER.unpack_from(head, 32)
        return self._read(keys + header_bytes + index_bytes, min(count, 1 << 20) * entry_bytes)

    def _read(self, address: int, nbytes: int) -> bytes:
        found = b""
        while len(found) < nbytes:
            at = address + len(found)
            # Up to the end of a page, because the next page may not exist.
            try:
                piece = os.pread(self._file, min(nbytes - len(found), 4096 - at % 4096), at)
            except OSError:
                break
            if not piece:
                break
            found += piece
        return found
