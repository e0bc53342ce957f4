"""Prepared calls: a repeated call with operands of the same kind skips all checks except those of addresses.

A thread first compares a call with recent calls of the same settings. torch does this in native code if it has
``TensorGuards``, those of torch.compile. Only if none matches, the thread computes a signature.

The *signature* of a call contains everything on which the checks depend except addresses: dtypes, shapes, strides, devices, and
arguments that are not tensors. Each thread remembers the signatures that passed, with kernel and launch table. A later call
fills in addresses after checking their alignment, and that no output overlaps another tensor. Unusual calls run all checks
again.
"""

import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby, repeat
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from nvfp4_cute import env, private_api
from nvfp4_cute.batch_invariance import is_batch_invariant
from nvfp4_cute.compile.compiler import Launcher
from nvfp4_cute.launch import workspace
from nvfp4_cute.launch.task import Launch
from nvfp4_cute.launch_table import Header
from nvfp4_cute.operands import tensor_map_fault
from nvfp4_cute.operands.group_sizes import is_debugging
from nvfp4_cute.operands.overlap import span_bytes
from nvfp4_cute.private_api import TensorGuards  # None: signatures are used alone

MAX_PREPARED = 1024
# Number of calls of the same settings, such as layers of a model, that are compared before a signature is computed.
MAX_RECENT = 8
# Number of accepted lists of addresses that a call remembers.
MAX_ACCEPTED = 256
# Distance of new outputs that share an allocation: at least a line of L2.
OUT_ALIGN_BYTES = 128
# map() over these is the fastest way to query many tensors.
_dtype, _shape, _requires_grad = attrgetter("dtype"), attrgetter("shape"), attrgetter("requires_grad")
_stride, _get_device, _data_ptr = torch.Tensor.stride, torch.Tensor.get_device, torch.Tensor.data_ptr
_layout, _is_neg = attrgetter("layout"), torch.Tensor.is_neg


class Launchable(Protocol):
    """One launch, or several, prepared for a signature."""

    def try_launch(self, inputs: list[Any], outs: list[Any]) -> list[torch.Tensor] | None:
        """Enqueues with other tensors; see :meth:`PreparedCall.try_launch`."""


class _OfThread(threading.local):
    """Prepared calls of a thread.

    Attributes:
        calls: by signature.
        recent: by settings, the latest calls with the guards that recognize their tensors.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple, Launchable] = {}
        self.recent: dict[tuple, list[tuple[Any, Launchable]]] = {}


_local = _OfThread()


class Addresses:
    """Addresses of a repeated call's tensors. Rewrites the launch table only when they change and are acceptable.

    Args:
        table: flat, int64.
        places: places in the table, each with the number of the tensor whose address it holds and an offset in bytes.
        low_bits: per tensor, address bits that must be zero.
        is_filled: per tensor, whether it has elements.
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
        # Bytes of the addresses in the table, and entries of the table for addresses that were accepted before.
        self._written = b""
        self._accepted: dict[bytes, np.ndarray] = {}

    def write(self, packed: bytes, are_refused: Callable[[np.ndarray], bool] | None) -> bool:
        """Writes the addresses that ``pack`` returned. Returns False for unaligned, missing, or refused addresses."""
        if packed == self._written:
            return True
        values = self._accepted.get(packed)
        if values is None:
            addresses = np.frombuffer(packed, np.int64)
            if int.from_bytes(packed, "little") & self._low_bits or (are_refused and are_refused(addresses)):
                return False
            if not addresses[self._is_filled].all():  # memory was freed; the checks report it
                return False
            if len(self._accepted) >= MAX_ACCEPTED:
                self._accepted.clear()
            values = self._accepted[packed] = addresses[self._tensors] + self._offsets
        self._table[self._places] = values
        self._written = packed
        return True


class PreparedCall:
    """Everything that a signature fixes, ready to launch with other addresses.

    Belongs to one thread, since its table is rewritten.

    Attributes:
        table: the flat launch table.
        function: host code that reads the table.
        workspace_bytes: size of the workspace of a launch, which has counters if ``has_counters``.
        rows: how the table depends on rows (``task.Launch``).
        places, low_bits: see ``Addresses``.
        new_outs: allocates outputs like those of the checked call.
    """

    def __init__(
        self,
        launch: Launch,
        tensors: Sequence[torch.Tensor],
        num_outs: int,
        parts: "Mapping[int, Part] | None" = None,
    ):
        """Stores the results of a checked call.

        Args:
            launch: the launch of the checked call, whose table may be rewritten.
            tensors: tensors of the checked call in the order of the launch's places, the outputs last.
            num_outs: number of outputs.
            parts: contents of the places of the table that hold no tensor's address (:func:`parts_of`).
        """
        self.table, self.rows = launch.table.reshape(-1), launch.rows
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
        # Operands, as bytes or 16-bit rows, are read 16 bytes at a time. Other tensors need the alignment of their elements.
        sizes = [t.element_size() for t in tensors]
        natural = {place.tensor for place in self.places if place.place in launch.natural}
        natural.update(i for i, size in enumerate(sizes) if size > (2 if i < self._first_out else 1))
        wide = [i not in natural for i in range(len(tensors))]
        self.low_bits = [
            (launch.align_bytes if is_wide else size) - 1 for is_wide, size in zip(wide, sizes, strict=True)
        ]
        self._addresses = Addresses(self.table, self.places, self.low_bits, self._spans > 0)

    def try_launch(self, inputs: list[Any], outs: list[Any]) -> list[torch.Tensor] | None:
        """Enqueues with other tensors of the same kind. Returns the outputs, or None if all checks have to run.

        Args:
            inputs, outs: tensors as passed to :func:`lookup`; without ``outs``, new ones are allocated.
        """
        results = outs or self.new_outs()
        if not self.take(inputs + results, own_out=bool(outs)):
            return None
        self.launch()
        return results

    def take(self, tensors: Sequence[torch.Tensor], own_out: bool) -> bool:
        """Writes addresses into the table. Returns False for unaligned addresses, and for outputs that overlap another tensor.

        Args:
            tensors: tensors like those of the checked call, the outputs last.
            own_out: False if the outputs are new, and so overlap nothing; the same in every call.
        """
        addresses = self._addresses
        return addresses.write(addresses.pack(*map(_data_ptr, tensors)), self._touch if own_out else None)

    def _touch(self, addresses: np.ndarray) -> bool:
        # Compares spans. Interleaved rows, which do not overlap, are left to the checks. Every output overlaps itself.
        ends = addresses + self._spans
        touching = (addresses[self._first_out :, None] < ends) & (addresses < ends[self._first_out :, None])
        return np.count_nonzero(touching) != self._num_filled_outs

    def launch(self) -> None:
        """Enqueues on the current stream of the tensors' device."""
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
    """Returns a function that makes tensors like ``outs``: more than two of one dtype in one allocation.

    An allocation takes the host half as long as a launch. What ``unsafe_split`` returns is not a view to autograd: a caller
    may go on computing with one output in place, and the others do not know.
    """
    families = [[*family] for _, family in groupby(outs, key=lambda t: (t.dtype, t.shape[1:]))]
    if len(families) > 1 and all(map(_is_split, families)):  # as all groups' data and all groups' scales
        makers = [_allocator(family) for family in families]
        return lambda: [tensor for make in makers for tensor in make()]
    first = outs[0]
    layouts = [(t.shape, t.stride()) for t in outs]
    new = first.new_empty(0)  # cheaper than torch.empty, which parses its options in every call
    if len(outs) <= 2 or any(t.dtype != first.dtype for t in outs):
        pairs = zip(outs, layouts, strict=True)
        empty = [partial(t.new_empty(0).new_empty_strided, *layout) for t, layout in pairs]
        if len(empty) == 1:
            (make,) = empty
            return lambda: [make()]
        if len(empty) == 2:  # as data and scale of one result
            make, make_second = empty
            return lambda: [make(), make_second()]
        return lambda: [make() for make in empty]
    split = torch.unsafe_split_with_sizes
    if _is_split(outs):
        rows = [len(t) for t in outs]
        shape = (sum(rows), *first.shape[1:])
        return lambda: [*split(new.new_empty(shape), rows)]
    lengths = [-(-span_bytes(t) // OUT_ALIGN_BYTES) * OUT_ALIGN_BYTES // first.element_size() for t in outs]

    def carved() -> list[torch.Tensor]:
        pieces = split(new.new_empty(sum(lengths)), lengths)
        return [piece.as_strided(*layout) for piece, layout in zip(pieces, layouts, strict=True)]

    return carved


def _is_split(outs: Sequence[torch.Tensor]) -> bool:
    """Returns whether ``outs`` can be parts of one tensor along their first dimension, each beginning a line."""
    row = outs[0].shape[1:]
    return (
        len(outs) > 2
        and all(t.ndim and t.shape[1:] == row and t.is_contiguous() for t in outs)
        and row.numel() * outs[0].element_size() % OUT_ALIGN_BYTES == 0
    )


def lookup(
    tensors: Sequence[torch.Tensor], *settings: Any, with_rows: int = 0
) -> tuple[tuple | None, Launchable | None]:
    """Returns the signature of a call and what was prepared for it. Returns no signature if a recent call matches.

    Returns None for both inside of ``group_sizes.debug``, where every call is checked.

    Args:
        tensors, settings, with_rows: see :func:`signature`.
    """
    if is_debugging():
        return None, None
    kind: tuple = (*settings, env.backend(), is_batch_invariant(), len(tensors), with_rows)
    try:
        recent = _local.recent.get(kind, ())
    except TypeError:  # a setting cannot be hashed; the checks will report it
        return None, None
    for guards, call in recent:
        if guards.check(*tensors):
            return None, call
    different, open_ones = tensors, with_rows
    if len(set(map(id, tensors))) < len(tensors):  # guards refuse a tensor that occurs twice
        known = {id(tensor): tensor for tensor in tensors}
        different, numbers = [*known.values()], {one: number for number, one in enumerate(known)}
        kind += tuple(numbers[id(tensor)] for tensor in tensors)
        with_open = set(map(id, tensors[:with_rows]))
        if not with_open.isdisjoint(
            map(id, tensors[with_rows:])
        ):  # one tensor would need an open and a fixed extent
            return None, None
        open_ones = len(with_open)
        recent = _local.recent.get(kind, ())
        for guards, call in recent:
            if guards.check(*different):
                return None, call
    key = signature(tensors, *settings, with_rows=with_rows)
    found = None if key is None else _local.calls.get(key)
    if found is not None and TensorGuards is not None:
        _local.recent[kind] = [(guards_of(different, open_ones), found), *recent][:MAX_RECENT]
    return key, found


def have_equal_rows(tensors: Iterable[torch.Tensor]) -> bool:
    """Returns whether the first extents are equal, which signatures and guards with open extents do not compare."""
    try:
        return len(set(map(torch.Tensor.size, tensors, repeat(0)))) == 1
    except IndexError:  # a tensor without dimensions
        return False


def guards_of(tensors: Sequence[torch.Tensor], with_rows: int = 0) -> Any:
    """Returns guards that recognize tensors of the same kind: like a signature, and whether gradients are recorded."""
    return TensorGuards(
        *tensors,
        dynamic_dims_sizes=[
            [None, *t.shape[1:]] if number < with_rows else list(t.shape) for number, t in enumerate(tensors)
        ],
        dynamic_dims_strides=[list(t.stride()) for t in tensors],
    )


def signature(tensors: Sequence[torch.Tensor], *settings: Any, with_rows: int = 0) -> tuple | None:
    """Returns a hashable signature; None if an entry is not a tensor or requires a gradient.

    Args:
        tensors: all operands, and outputs if the caller passed them.
        settings: everything else that affects the call, including numbers of operands.
        with_rows: number of leading tensors whose first extent the signature leaves open.
    """
    try:
        if torch.is_grad_enabled() and any(map(_requires_grad, tensors)):
            return None
        return (
            *settings,
            env.backend(),
            is_batch_invariant(),
            *map(_dtype, tensors),
            with_rows,
            *(shape[1:] for shape in map(_shape, tensors[:with_rows])),
            *map(_shape, tensors[with_rows:]),
            *map(_stride, tensors),
            *map(_get_device, tensors),
            # Tensors of other kinds are refused, or run all checks.
            *map(type, tensors),
            *map(_layout, tensors),
            *map(_is_neg, tensors),
        )
    except (AttributeError, TypeError, RuntimeError):
        return None


def remember(key: tuple, launch: Launch, tensors: Sequence[torch.Tensor], num_outs: int) -> None:
    """Stores a call that passed its checks as a PreparedCall, if it can be one."""
    call = prepare(launch, tensors, num_outs)
    if call is not None:
        keep(key, call)


def prepare(launch: Launch, tensors: Sequence[torch.Tensor], num_outs: int) -> PreparedCall | None:
    """Returns a call that passed its checks as a PreparedCall.

    Returns None if the table holds addresses of converted tensors, or if ``tensor_map_fault`` checks addresses of the call.
    """
    parts = parts_of(launch, tensors)
    if parts is None or tensor_map_fault.concerns(list(tensors)):
        return None
    return PreparedCall(launch, tensors, num_outs, parts)


def keep(key: tuple, call: Launchable) -> None:
    """Makes ``lookup`` find the call. Drops the oldest one if there are ``MAX_PREPARED``."""
    calls = _local.calls
    if len(calls) >= MAX_PREPARED:
        del calls[next(iter(calls))]
    calls[key] = call


class Place(NamedTuple):
    """A place in a launch table: the number of the tensor whose address it holds, and an offset in bytes."""

    place: int
    tensor: int
    offset: int


class Part(NamedTuple):
    """Location of a tensor inside a tensor of the call: the latter's index, and an offset in bytes."""

    tensor: int
    offset: int


def parts_of(launch: Launch, tensors: Sequence[torch.Tensor]) -> dict[int, Part] | None:
    """Returns, by place, the tensors inside a tensor of the call, such as a half of concatenated weights, or a band of rows.

    Returns None if a place holds neither the address of the next tensor, nor one inside exactly one earlier tensor.
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
    """Drops this thread's prepared calls."""
    _local.calls, _local.recent = {}, {}


def of_thread() -> dict[tuple, Launchable]:
    """Returns this thread's prepared calls: the same dict until :func:`forget`."""
    return _local.calls
