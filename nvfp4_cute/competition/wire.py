"""Messages between the judge's side and a submission's process: JSON, and tensors as bytes in shared memory.

Nothing is unpickled. The receiver checks every number, because the other process may write anything.
"""

import json
import mmap
import re
import socket
import struct
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

MOST_MESSAGE_BYTES = 1 << 28
"""Largest size of a message or attachment that is read."""

ALIGN = 512
"""Alignment in bytes of everything in an arena, equal to that of device memory."""

_HEADER = struct.Struct("<QQ")
_NORESERVE = 0x4000  # mmap(2); Python's mmap has the name from 3.13 on
_PAGE_BYTES = 1 << 16


class Refused(Exception):
    """A message that the protocol does not allow."""


# ---- messages --------------------------------------------------------------------------------------


def send(connection: socket.socket, message: dict[str, Any], attached: bytes = b"") -> None:
    """Sends a message with bytes."""
    text = json.dumps(message).encode()
    connection.sendall(_HEADER.pack(len(text), len(attached)) + text)
    if attached:
        connection.sendall(attached)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Receives a message and its bytes.

    Raises:
        EOFError: the other side has closed the connection.
        Refused: the message is too long or is not an object of JSON.
    """
    sizes = _HEADER.unpack(_read(connection, _HEADER.size))
    if max(sizes) > MOST_MESSAGE_BYTES:
        raise Refused(f"a message of {max(sizes)} bytes; at most {MOST_MESSAGE_BYTES} are read")
    text, attached = (_read(connection, size) for size in sizes)
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"a message that is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise Refused("a message that is not an object")
    return message, attached


def _read(connection: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the other side has closed")
        view = view[count:]
    return bytes(buffer)


def printable(text: Any, most: int = 4000) -> str:
    """Returns a submission's text in printable form, without escape sequences, line separators or other control characters."""
    text = re.sub(
        r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)", "", str(text)[: 4 * most]
    )
    text = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= most else text[:most] + " ..."


# ---- shared memory ---------------------------------------------------------------------------------


class Arena:
    """Memory that this process shares with its forks, at equal addresses. Untouched pages take no memory.

    The first half belongs to the judge's side, which places inputs there; the second half to the submission's process.
    """

    def __init__(self, nbytes: int = 1 << 38):
        """Reserves `nbytes`, or as much as the system allows.

        Raises:
            OSError: it does not even allow 16 MiB.
        """
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE
        while True:
            try:
                self._map = mmap.mmap(-1, nbytes, flags)
                break
            except OSError:
                if nbytes <= 1 << 24:
                    raise
                nbytes //= 2
        self.nbytes = nbytes
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self._next = 0
        self._free: dict[int, list[int]] = {}

    def take_second_half(self) -> None:
        """Allocates in the second half from now on; called by the submission's process."""
        self._next = self.nbytes // 2
        self._free.clear()

    def allocate(self, nbytes: int) -> np.ndarray:
        """Returns a uint8 view of memory that is freed with the view.

        Raises:
            MemoryError: the half is full.
        """
        unit = ALIGN if nbytes < _PAGE_BYTES else _PAGE_BYTES
        size = -(-max(nbytes, 1) // unit) * unit
        offset = self._free[size].pop() if self._free.get(size) else self._take(size, unit)
        view = np.frombuffer(self._map, np.uint8, max(nbytes, 1), offset)
        weakref.finalize(view, self._release, offset, size).atexit = False
        return view

    def _take(self, size: int, unit: int) -> int:
        offset = -(-self._next // unit) * unit
        half = self.nbytes // 2
        if offset + size > (half if self._next < half else self.nbytes):
            raise MemoryError(f"{size} bytes do not fit into the {half} bytes of an arena's half")
        self._next = offset + size
        return offset

    def _release(self, offset: int, size: int) -> None:
        if size >= _PAGE_BYTES:
            self._map.madvise(mmap.MADV_REMOVE, offset, size)
        self._free.setdefault(size, []).append(offset)

    def offset_of(self, view: np.ndarray) -> int:
        """Returns the offset of a view."""
        return int(view.ctypes.data) - self.address

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether a range of addresses lies in the arena."""
        return self.address <= address and 0 <= nbytes and address + nbytes <= self.address + self.nbytes

    def view(self, offset: Any, nbytes: int) -> np.ndarray:
        """Returns a uint8 view of a place that a message names.

        Raises:
            Refused: the place lies outside.
        """
        if not _is_count(offset) or not self.holds(self.address + offset, nbytes):
            raise Refused(f"{nbytes} bytes at {offset!r}, outside the shared memory")
        return np.frombuffer(self._map, np.uint8, nbytes, offset) if nbytes else np.empty(0, np.uint8)


# ---- nested values ---------------------------------------------------------------------------------

Tree = Any
"""A nested value in JSON: null, a number, a string, or an object with one of "list", "tuple", "tensor" and "other"."""


def to_tree(value: Any, place: Callable[[torch.Tensor], dict[str, Any]], depth: int = 8) -> Tree:
    """Describes nested lists and tuples of numbers, strings and plain tensors. Any other value becomes the name of its type.

    Args:
        place: stores a tensor's bytes and returns their place.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is torch.Tensor:
        return {"tensor": place(value)}
    if isinstance(value, list | tuple) and depth:
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [to_tree(item, place, depth - 1) for item in list(value)]}
    return {"other": type(value).__name__}


def from_tree(tree: Tree, take: Callable[[dict[str, Any]], torch.Tensor], depth: int = 8) -> Any:
    """Inverts :func:`to_tree`.

    Raises:
        Refused: an unsupported type, by its name, or a value that is not a tree.
    """
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if not isinstance(tree, dict) or len(tree) != 1 or not depth:
        raise Refused("an answer that is not described as the protocol says")
    ((kind, inner),) = tree.items()
    if kind == "tensor" and isinstance(inner, dict):
        return take(inner)
    if kind in ("list", "tuple") and isinstance(inner, list):
        items = [from_tree(item, take, depth - 1) for item in inner]
        return items if kind == "list" else tuple(items)
    if kind == "other":
        raise Refused(f"output is a {printable(inner, 80)}: an answer is made of plain tensors")
    raise Refused("an answer that is not described as the protocol says")


def describe(tensor: torch.Tensor, offset: int) -> dict[str, Any]:
    """Returns the place of a tensor's storage, and its layout."""
    return {
        "offset": offset,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
    }


def layout(record: dict[str, Any]) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]:
    """Returns dtype, shape, strides and bytes of a described tensor.

    Raises:
        Refused: not a dtype of torch, or numbers that no tensor has.
    """
    dtype = getattr(torch, str(record.get("dtype")), None)
    shape, strides = record.get("shape"), record.get("strides")
    if not isinstance(dtype, torch.dtype):
        raise Refused(f"a tensor of dtype {printable(record.get('dtype'), 40)}")
    for numbers in (shape, strides):
        if not isinstance(numbers, list) or len(numbers) > 16 or not all(map(_is_count, numbers)):
            raise Refused("a tensor whose shape or strides are not lists of counts")
    assert isinstance(shape, list) and isinstance(strides, list)
    if len(shape) != len(strides):
        raise Refused("a tensor with a stride too many or too few")
    span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    nbytes = span * dtype.itemsize
    if nbytes > MOST_MESSAGE_BYTES << 10:
        raise Refused(f"a tensor of {nbytes} bytes")
    return dtype, tuple(shape), tuple(strides), nbytes


def tensor_over(
    data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """Returns a tensor on the memory of a uint8 array."""
    if not data.size:
        return torch.empty(shape, dtype=dtype)
    storage = torch.from_numpy(data).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48
