"""Converts Python floats to float32 tensors on the operands' device, without a copy from the host.

A copy from the host waits for the device, and fails while a CUDA graph is captured. A single number, or equal numbers, are
filled in on the device. Different numbers are copied once and cached. Numbers that a capture read are cached for good, because
the graph reads them in every replay.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from numbers import Real
from threading import Lock
from typing import Any

import torch

from nvfp4_cute import private_api

MAX_KEPT = 1024
Key = tuple[torch.device, tuple[float, ...]]
_lock = Lock()
_kept: OrderedDict[Key, torch.Tensor] = OrderedDict()
_captured: dict[Key, torch.Tensor] = {}
# By device and stream: memory for single numbers, and those that it holds.
_shared: dict[tuple[int, int], tuple[torch.Tensor, dict[tuple[float, float], torch.Tensor]]] = {}


def numbers_on(device: torch.device, numbers: Sequence[float]) -> torch.Tensor:
    """Returns float32 [len(numbers)] on ``device``, which callers must not write to.

    Raises:
        TypeError, ValueError: an entry is not a number.
        RuntimeError: different numbers are seen for the first time while a CUDA graph is captured.
    """
    values = tuple(map(float, numbers))
    if device.type != "cuda" or private_api.is_traced():
        return torch.tensor(values, dtype=torch.float32, device=device)
    if len(set(values)) == 1:
        return torch.full((len(values),), values[0], dtype=torch.float32, device=device)
    is_captured = torch.cuda.is_current_stream_capturing()
    key = (device, values)
    with _lock:
        found = _captured.get(key)
        if found is None:
            found = _kept.pop(key, None)
        if found is None:
            if is_captured:
                raise RuntimeError(
                    f"{len(values)} different numbers, the first {values[0]:g}, are not on {device} yet, and nothing is copied "
                    "there while a CUDA graph is captured: make the call once before, or pass a float32 tensor on the device"
                )
            found = torch.tensor(values, dtype=torch.float32, device=device)
        if is_captured:
            _captured[key] = found
        else:
            _kept[key] = found
            while len(_kept) > MAX_KEPT:
                _kept.popitem(last=False)
    return found


def one_number_on(given: Any, beside: Any, *, is_in_result: bool = False) -> Any:
    """Returns a number as float32 [1] on the device of ``beside``, and anything else as it is, for the checks to judge.

    Args:
        is_in_result: whether a result holds the tensor, so that the caller may write to it. Otherwise calls share it.
    """
    if not isinstance(given, int | float) or not isinstance(beside, torch.Tensor):
        return given
    if (
        is_in_result
        or not beside.is_cuda
        or private_api.is_traced()
        or torch.cuda.is_current_stream_capturing()
    ):
        return numbers_on(beside.device, [given])
    return _shared_number(beside.device, float(given))


def _shared_number(device: torch.device, number: float) -> torch.Tensor:
    """Returns float32 [1], filled by the first call on the stream that has this number."""
    place = device.index, private_api.current_stream(device.index)
    value = number, math.copysign(1.0, number)  # 0.0 equals -0.0
    with _lock:
        memory, filled = _shared.get(place, (None, {}))
        found = filled.get(value)
        if found is None:
            if memory is None or len(filled) == len(
                memory
            ):  # full: its numbers live on where they are in use
                memory = private_api.outside_of_pools(device.index, lambda: _memory(device))
                _shared[place] = memory, (filled := {})
            index = len(filled)
            found = filled[value] = memory[index : index + 1].fill_(number)
    return found


def _memory(device: torch.device) -> torch.Tensor:
    return torch.empty(MAX_KEPT, dtype=torch.float32, device=device)


def numbers_of(
    given: Any, a: Any, offs: Any = None, masked_m: Any = None, *, is_in_result: bool = False
) -> Any:
    """Returns numbers, one per group, as a tensor on the device of the groups, and anything else unchanged for later checks.

    Args:
        given: the numbers.
        a, offs, masked_m: operands that tell device and number of groups.
        is_in_result: whether the result will hold the tensor, which callers may write to; it is then a copy.
    """
    if not isinstance(given, list | tuple):
        return given
    groups = a if offs is None and masked_m is None else masked_m if offs is None else offs
    is_one_each = len(given) == len(groups) > 0 and isinstance(groups[0], torch.Tensor)
    if not is_one_each or not all(isinstance(x, Real) for x in given):
        return given
    found = numbers_on(groups[0].device, given)
    return found.clone() if is_in_result else found
