"""Calls that were checked once: the next call with operands of the same kind only looks at addresses.

A thread compares a call first with the last one of the same settings, which torch does in native code where it has the
means (``TensorGuards``, those of torch.compile); only then it works out a signature.

Everything that the checks of an operation depend on, but for addresses, is the *signature* of a call: dtypes, shapes,
strides, devices, and the arguments that are no tensors. A signature that passed them is remembered, each thread its own,
with the kernel and its launch table; a later call fills in addresses after checking their alignment and that no output
touches another tensor. Whatever is unusual takes the long way again.
"""

import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from nvfp4_cute import env
from nvfp4_cute.compile import CompiledKernel, Launcher
from nvfp4_cute.problem import TMA_ALIGN_BYTES

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # signatures alone do the same
    TensorGuards = None  # type: ignore[assignment, misc]

MAX_PREPARED = 1024
# map() over these is the cheapest way to ask many tensors the same.
_dtype, _shape, _requires_grad = attrgetter("dtype"), attrgetter("shape"), attrgetter("requires_grad")
_stride, _get_device, _data_ptr = torch.Tensor.stride, torch.Tensor.get_device, torch.Tensor.data_ptr
_local = threading.local()


class PreparedCall:
    """What is fixed by a signature, ready to be launched on other addresses. Of one thread: its table is rewritten.

    Attributes:
        table: the launch table, flat.
    """

    def __init__(
        self,
        kernel: CompiledKernel,
        table: np.ndarray,
        places: Sequence[int],
        tensors: Sequence[torch.Tensor],
        num_outs: int,
    ):
        """Keep what a checked call has worked out.

        Args:
            kernel: compiled code.
            table: the checked call's launch table; the launch has read it when it returns.
            places: where in the flat table the address of every tensor goes.
            tensors: what the checked call read and wrote, the outputs last.
            num_outs: how many of them are outputs.
        """
        self.table = table.reshape(-1)
        self._places = np.array(places)
        self._launcher = Launcher(kernel.function, self.table)
        self._first_out = len(tensors) - num_outs
        self._device = tensors[-1].device
        # Cheaper than torch.empty, which parses its options anew every time.
        self._new_out = tensors[-1].new_empty(0).new_empty_strided
        self._out_layouts = [(t.shape, t.stride()) for t in tensors[self._first_out :]]
        self._spans = np.array([_span_bytes(t) for t in tensors])
        # Addresses that were found in order the last time, as bytes.
        self._accepted = b""
        self._num_filled_outs = np.count_nonzero(self._spans[self._first_out :])
        # Address bits that must be zero: operands are bytes that TMA reads, all else has its natural alignment.
        self._low_bits = np.array(
            [(TMA_ALIGN_BYTES if t.element_size() == 1 else t.element_size()) - 1 for t in tensors]
        )

    def try_launch(self, inputs: list[Any], outs: list[Any]) -> list[torch.Tensor] | None:
        """Enqueue with other tensors of the same kind. Returns the outputs; None where the long way has to decide.

        Args:
            inputs, outs: tensors, as :func:`lookup` was given them; without ``outs``, new ones are made.
        """
        results = outs or self.new_outs()
        addresses = addresses_of(inputs + results)
        if not self.accepts(addresses, own_out=bool(outs)):
            return None
        self.launch(addresses)
        return results

    def new_outs(self) -> list[torch.Tensor]:
        """Outputs like the checked call's, not initialised."""
        return [self._new_out(shape, strides) for shape, strides in self._out_layouts]

    def accepts(self, addresses: np.ndarray, own_out: bool) -> bool:
        """Whether tensors are aligned, and outputs of the caller's (``own_out``) lie apart from all else.

        Args:
            addresses: int64, in the order of the tensors of the checked call.
            own_out: False where the outputs are new.
        """
        if not own_out:
            return not np.count_nonzero(addresses & self._low_bits)
        values = addresses.tobytes()
        if values != self._accepted:
            if np.count_nonzero(addresses & self._low_bits) or not self._are_apart(addresses):
                return False
            self._accepted = values
        return True

    def _are_apart(self, addresses: np.ndarray) -> bool:
        # Rows may interleave without touching; that is for the long way to decide. An output touches itself.
        ends = addresses + self._spans
        touching = (addresses[self._first_out :, None] < ends) & (addresses < ends[self._first_out :, None])
        return np.count_nonzero(touching) == self._num_filled_outs

    def fill(self, addresses: np.ndarray) -> None:
        """Write addresses into the table."""
        self.table[self._places] = addresses

    def launch(self, addresses: np.ndarray) -> None:
        """Enqueue on the device's current queue."""
        self.fill(addresses)
        index = self._device.index
        # What torch.cuda.current_stream(index).cuda_stream is, without making a Stream.
        queue = torch._C._cuda_getCurrentRawStream(index)
        if torch.cuda.current_device() == index:
            self._launcher(queue)
        else:
            with torch.cuda.device(index):
                self._launcher(queue)


def lookup(tensors: Sequence[torch.Tensor], *settings: Any) -> tuple[tuple | None, PreparedCall | None]:
    """Signature of a call and what was prepared for it. Without the signature where the last such call had the same.

    Args:
        tensors, settings: as :func:`signature` takes them.
    """
    kind = (*settings, env.backend(), len(tensors))
    recent = _recent().get(kind)
    if recent is not None and recent[0].check(*tensors):
        return None, recent[1]
    key = signature(tensors, *settings)
    call = None if key is None else find(key)
    if call is not None and TensorGuards is not None:
        _recent()[kind] = _guards_of(tensors), call
    return key, call


def _guards_of(tensors: Sequence[torch.Tensor]) -> Any:
    """What tells tensors of the same kind from others: as much as a signature, and whether gradients are recorded."""
    return TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],  # type: ignore[misc]
        dynamic_dims_strides=[list(t.stride()) for t in tensors],  # type: ignore[misc]
    )


def _recent() -> dict[tuple, tuple[Any, PreparedCall]]:
    if not hasattr(_local, "recent"):
        _local.recent = {}
    return _local.recent


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
        )
    except (AttributeError, TypeError, RuntimeError):
        return None


def addresses_of(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Addresses of tensors, int64."""
    return np.array([*map(_data_ptr, tensors)], np.int64)


def find(key: tuple) -> PreparedCall | None:
    """The call that was prepared for a signature in this thread."""
    return _calls().get(key)


def remember(
    key: tuple,
    kernel: CompiledKernel,
    table: np.ndarray,
    places: Sequence[int],
    tensors: Sequence[torch.Tensor],
    num_outs: int,
) -> None:
    """Keep a call that passed its checks, as PreparedCall takes it; the oldest is forgotten when there are ``MAX_PREPARED``.

    One whose table holds other addresses than its tensors', since some were converted on the way, is not kept.
    """
    if (table.reshape(-1)[list(places)] != addresses_of(tensors)).any():
        return
    calls = _calls()
    if len(calls) >= MAX_PREPARED:
        del calls[next(iter(calls))]
    calls[key] = PreparedCall(kernel, table, places, tensors, num_outs)


def forget() -> None:
    """Prepare this thread's calls anew."""
    _calls().clear()
    _recent().clear()


def _calls() -> dict[tuple, PreparedCall]:
    if not hasattr(_local, "calls"):
        _local.calls = {}
    return _local.calls


def _span_bytes(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
