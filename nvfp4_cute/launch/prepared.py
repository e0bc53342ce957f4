"""Calls that were checked once: the next call with operands of the same kind only looks at addresses.

A thread compares a call first with the last one of the same settings, which torch does in native code where it has the
means (``TensorGuards``, those of torch.compile); only then it works out a signature.

Everything that the checks of an operation depend on, but for addresses, is the *signature* of a call: dtypes, shapes,
strides, devices, and the arguments that are no tensors. A signature that passed them is remembered, each thread its own,
with the kernel and its launch table; a later call fills in addresses after checking their alignment and that no output
touches another tensor. Whatever is unusual takes the long way again.
"""

import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from nvfp4_cute import env, private_api
from nvfp4_cute.compile.compiler import Launcher
from nvfp4_cute.launch import workspace
from nvfp4_cute.launch.task import Launch
from nvfp4_cute.launch_table import Header
from nvfp4_cute.operands import tensor_map_fault
from nvfp4_cute.operands.group_sizes import is_debugging
from nvfp4_cute.operands.overlap import span_bytes
from nvfp4_cute.private_api import TensorGuards  # None: signatures alone do the same

MAX_PREPARED = 1024
# Calls of the same settings that are compared before a signature is worked out, such as the layers of a model.
MAX_RECENT = 8
# Lists of addresses that a call need not look at again.
MAX_ACCEPTED = 256
# New outputs in one allocation start this far apart at least: a line of L2.
OUT_ALIGN_BYTES = 128
# map() over these is the cheapest way to ask many tensors the same.
_dtype, _shape, _requires_grad = attrgetter("dtype"), attrgetter("shape"), attrgetter("requires_grad")
_stride, _get_device, _data_ptr = torch.Tensor.stride, torch.Tensor.get_device, torch.Tensor.data_ptr
_layout, _is_neg = attrgetter("layout"), torch.Tensor.is_neg


class Launchable(Protocol):
    """What was prepared for a signature: one launch, or several."""

    def try_launch(self, inputs: list[Any], outs: list[Any]) -> list[torch.Tensor] | None:
        """As of PreparedCall."""


class _OfThread(threading.local):
    """What a thread has prepared.

    Attributes:
        calls: by signature.
        recent: by settings: the latest calls, each with the guards that know its tensors.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple, Launchable] = {}
        self.recent: dict[tuple, list[tuple[Any, Launchable]]] = {}


_local = _OfThread()


class Addresses:
    """Those of a call's tensors, in launch tables: written where they have changed, unless they are refused.

    Args:
        table: flat, int64. places: in it, with the number of the tensor whose address is there, and bytes from its beginning.
        low_bits: of every tensor, address bits that must be zero. is_filled: of every tensor, whether it has elements.
    """

    def __init__(
        self,
        table: np.ndarray,
        places: Sequence["Place"],
        low_bits: Sequence[int],
        is_filled: Sequence[bool] | np.ndarray,
    ):
        self._table = table
        self._places, self._tensors, self._offsets = np.array(places, np.int64).reshape(-1, 3).T.copy()
        self.pack = struct.Struct(f"={len(low_bits)}q").pack
        """Bytes of the addresses, in the order of the tensors."""
        self._low_bits = int.from_bytes(self.pack(*low_bits), "little")
        self._is_filled = np.array(is_filled, bool)
        # Those in the table, as bytes, and those that were found in order, whatever tensors had them.
        self._written = b""
        self._accepted: set[bytes] = set()

    def write(self, packed: bytes, are_refused: Callable[[np.ndarray], bool] | None) -> bool:
        """Have the table hold what ``pack`` gave; False where an address is odd, is 0 of what has elements, or is refused."""
        if packed == self._written:
            return True
        addresses = np.frombuffer(packed, np.int64)
        if packed not in self._accepted:
            if int.from_bytes(packed, "little") & self._low_bits or (are_refused and are_refused(addresses)):
                return False
            if not addresses[self._is_filled].all():  # memory was given back: the long way says so
                return False
            if len(self._accepted) >= MAX_ACCEPTED:
                self._accepted.clear()
            self._accepted.add(packed)
        self._table[self._places] = addresses[self._tensors] + self._offsets
        self._written = packed
        return True


class PreparedCall:
    """What is fixed by a signature, ready to be launched on other addresses. Of one thread: its table is rewritten.

    Attributes:
        table: the launch table, flat. function: host code that reads it. workspace_bytes: that a launch needs,
            which has counters where ``has_counters``.
        places: of addresses in the table. low_bits: of the tensors' addresses, as ``Addresses`` takes both.
        new_outs: makes outputs like the checked call's, not initialised.
    """

    def __init__(
        self,
        launch: Launch,
        tensors: Sequence[torch.Tensor],
        num_outs: int,
        parts: "Mapping[int, Part] | None" = None,
    ):
        """Keep what a checked call has worked out.

        Args:
            launch: the checked call's, whose table this may write to.
            tensors: what the checked call read and wrote, in the order of the launch's places, the outputs last.
            num_outs: how many of them are outputs.
            parts: places of the table that are no tensor's, with what is there (:func:`parts_of`).
        """
        self.table = launch.table.reshape(-1)
        self.function = launch.kernel.function
        parts = parts or {}
        whole = enumerate(place for place in launch.places if place not in parts)
        self.places = [Place(place, tensor, 0) for tensor, place in whole]
        self.places += [Place(place, *part) for place, part in parts.items()]
        self._launcher = Launcher(self.function, self.table)
        self.workspace_bytes = workspace.needed_bytes(launch.kernel, launch.table)
        self.has_counters = workspace.has_counters(launch.kernel)
        self._first_out = len(tensors) - num_outs
        self._device = tensors[-1].device
        self.new_outs = _allocator(tensors[self._first_out :])
        self._spans = np.array([span_bytes(t) for t in tensors])
        self._num_filled_outs = np.count_nonzero(self._spans[self._first_out :])
        # Operands are bytes, or 16-bit rows, that are read 16 bytes at a time; all else has its natural alignment.
        sizes = [t.element_size() for t in tensors]
        natural = {place.tensor for place in self.places if place.place in launch.natural}
        natural.update(i for i, size in enumerate(sizes) if size > (2 if i < self._first_out else 1))
        wide = [i not in natural for i in range(len(tensors))]
        self.low_bits = [
            (launch.align_bytes if is_wide else size) - 1 for is_wide, size in zip(wide, sizes, strict=True)
        ]
        self._addresses = Addresses(self.table, self.places, self.low_bits, self._spans > 0)

    def try_launch(self, inputs: list[Any], outs: list[Any]) -> list[torch.Tensor] | None:
        """Enqueue with other tensors of the same kind. Returns the outputs; None where the long way has to decide.

        Args:
            inputs, outs: tensors, as :func:`lookup` was given them; without ``outs``, new ones are made.
        """
        results = outs or self.new_outs()
        if not self.take(inputs + results, own_out=bool(outs)):
            return None
        self.launch()
        return results

    def take(self, tensors: Sequence[torch.Tensor], own_out: bool) -> bool:
        """Write addresses into the table, unless they are refused: odd ones, or outputs that touch another tensor.

        Args:
            tensors: like those of the checked call, the outputs last.
            own_out: False where the outputs are new, and touch nothing; the same in every call.
        """
        addresses = self._addresses
        return addresses.write(addresses.pack(*map(_data_ptr, tensors)), self._touch if own_out else None)

    def _touch(self, addresses: np.ndarray) -> bool:
        # Rows may interleave without touching; that is for the long way to decide. An output touches itself.
        ends = addresses + self._spans
        touching = (addresses[self._first_out :, None] < ends) & (addresses < ends[self._first_out :, None])
        return np.count_nonzero(touching) != self._num_filled_outs

    def launch(self) -> None:
        """Enqueue on the current stream of the tensors' device."""
        index = self._device.index
        stream = private_api.current_stream(index)
        if private_api.current_device() == index:
            self._enqueue(stream)
        else:
            with torch.cuda.device(index):
                self._enqueue(stream)

    def _enqueue(self, stream: int) -> None:
        if self.workspace_bytes:
            held = workspace.take(self._device.index, stream, self.workspace_bytes, self.has_counters)
            self.table[Header.WORKSPACE], self.table[Header.COUNTERS] = held.address, held.counters
        self._launcher(stream)


def _allocator(outs: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """A function that makes tensors like ``outs``: more than two of one dtype in one allocation.

    An allocation takes the host half as long as a launch. What comes of ``unsafe_split`` is no view to autograd: a caller
    may go on computing with one output in place, and the others do not know.
    """
    first = outs[0]
    layouts = [(t.shape, t.stride()) for t in outs]
    new = first.new_empty(0)  # cheaper than torch.empty, which parses its options anew every time
    if len(outs) <= 2 or any(t.dtype != first.dtype for t in outs):
        makers = [t.new_empty(0).new_empty_strided for t in outs]
        return lambda: [make(*layout) for make, layout in zip(makers, layouts)]  # noqa: B905, as many
    split = torch.unsafe_split_with_sizes
    row = first.shape[1:]
    are_rows = all(t.ndim and t.shape[1:] == row and t.is_contiguous() for t in outs)
    if are_rows and row.numel() * first.element_size() % OUT_ALIGN_BYTES == 0:
        rows = [len(t) for t in outs]
        shape = (sum(rows), *row)
        return lambda: [*split(new.new_empty(shape), rows)]
    lengths = [-(-span_bytes(t) // OUT_ALIGN_BYTES) * OUT_ALIGN_BYTES // first.element_size() for t in outs]

    def carved() -> list[torch.Tensor]:
        pieces = split(new.new_empty(sum(lengths)), lengths)
        return [piece.as_strided(*layout) for piece, layout in zip(pieces, layouts, strict=True)]

    return carved


def lookup(tensors: Sequence[torch.Tensor], *settings: Any) -> tuple[tuple | None, Launchable | None]:
    """Signature of a call and what was prepared for it. Without the signature where a recent call had the same.

    Neither inside of ``group_sizes.debug``, where every call is checked.

    Args:
        tensors, settings: as :func:`signature` takes them.
    """
    if is_debugging():
        return None, None
    kind: tuple = (*settings, env.backend(), len(tensors))
    known = {id(tensor): tensor for tensor in tensors}
    different = tensors
    if len(known) < len(tensors):  # guards refuse a tensor that comes twice
        different, numbers = [*known.values()], {one: number for number, one in enumerate(known)}
        kind += tuple(numbers[id(tensor)] for tensor in tensors)
    try:
        recent = _local.recent.get(kind, ())
    except TypeError:  # a setting that is not hashable: the checks say what is wrong
        return None, None
    for guards, call in recent:
        if guards.check(*different):
            return None, call
    key = signature(tensors, *settings)
    found = None if key is None else _local.calls.get(key)
    if found is not None and TensorGuards is not None:
        _local.recent[kind] = [(guards_of(different), found), *recent][:MAX_RECENT]
    return key, found


def guards_of(tensors: Sequence[torch.Tensor]) -> Any:
    """What tells tensors of the same kind from others: as much as a signature, and whether gradients are recorded."""
    return TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],
        dynamic_dims_strides=[list(t.stride()) for t in tensors],
    )


def signature(tensors: Sequence[torch.Tensor], *settings: Any) -> tuple | None:
    """Hashable; None where an entry is no tensor, or has a gradient to follow.

    Args:
        tensors: all operands, and outputs where the caller gives them.
        settings: everything else that decides how the call is made, counts of operands included.
    """
    try:
        if torch.is_grad_enabled() and any(map(_requires_grad, tensors)):
            return None
        return (
            *settings,
            env.backend(),
            *map(_dtype, tensors),
            *map(_shape, tensors),
            *map(_stride, tensors),
            *map(_get_device, tensors),
            # Tensors of other kinds are refused, or take the long way.
            *map(type, tensors),
            *map(_layout, tensors),
            *map(_is_neg, tensors),
        )
    except (AttributeError, TypeError, RuntimeError):
        return None


def remember(key: tuple, launch: Launch, tensors: Sequence[torch.Tensor], num_outs: int) -> None:
    """Keep a call that passed its checks, as PreparedCall takes it.

    One whose table holds other addresses than its tensors' and those of their parts, since some were converted on the way, is not
    kept, nor one whose addresses a ``tensor_map_fault`` looks at.
    """
    parts = parts_of(launch, tensors)
    if parts is None or tensor_map_fault.concerns(list(tensors)):
        return
    keep(key, PreparedCall(launch, tensors, num_outs, parts))


def keep(key: tuple, call: Launchable) -> None:
    """Have ``lookup`` find it; the oldest is forgotten when there are ``MAX_PREPARED``."""
    calls = _local.calls
    if len(calls) >= MAX_PREPARED:
        del calls[next(iter(calls))]
    calls[key] = call


class Place(NamedTuple):
    """Of a launch table: the number of the tensor whose address is there, and bytes from its beginning."""

    place: int
    tensor: int
    offset: int


class Part(NamedTuple):
    """Where a tensor lies that the call was not given: bytes from the beginning of one that it was, by index."""

    tensor: int
    offset: int


def parts_of(launch: Launch, tensors: Sequence[torch.Tensor]) -> dict[int, Part] | None:
    """By place, what lies inside a tensor of the call, such as the second half of concatenated weights, or a band of rows.

    None where a place has neither the address of the next tensor, nor one inside exactly one tensor before it.
    """
    found: dict[int, Part] = {}
    begins = [*map(_data_ptr, tensors)]
    index = 0
    for place in launch.places:
        address = int(launch.table.reshape(-1)[place])
        if index < len(begins) and address == begins[index]:
            index += 1
            continue
        inside = [i for i in range(index) if begins[i] <= address < begins[i] + span_bytes(tensors[i])]
        if len(inside) != 1:
            return None
        (tensor,) = inside
        found[place] = Part(tensor, address - begins[tensor])
    return found if index == len(begins) else None


def forget() -> None:
    """Prepare this thread's calls anew."""
    _local.calls, _local.recent = {}, {}


def of_thread() -> dict[tuple, Launchable]:
    """What this thread has prepared: the same dict until it forgets that."""
    return _local.calls
