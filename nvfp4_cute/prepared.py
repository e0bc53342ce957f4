"""List-form calls that were checked once: the next call with operands of the same kind only looks at addresses.

Everything that the checks of ``problem.check_list_operands`` depend on, but for addresses, is the *signature* of a call:
dtypes, shapes, strides, devices, requires_grad. A signature that passed them is remembered, each thread its own, with
the plan and the launch table; a later call fills in addresses after checking their alignment and that no output
touches another tensor. Whatever is unusual takes the long way again.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nvfp4_cute import env
from nvfp4_cute.compile import table_pointer
from nvfp4_cute.launch import Plan
from nvfp4_cute.launch_table import Group, Header
from nvfp4_cute.problem import TMA_ALIGN_BYTES, GroupedOperands

MAX_PREPARED = 1024
# Columns of the launch table that hold addresses.
NUM_ADDRESSES = Group.OUT + 1
_local = threading.local()


@dataclass(frozen=True)
class PreparedCall:
    """What is fixed by a signature.

    Attributes:
        plan: kernel and schedule.
        device: index of the CUDA device.
        table: launch table, rewritten by every call of its thread; the launch has read it when it returns.
        pointer: the launch's argument, the table's address.
        order: the group at each slot.
        spans: bytes from the first to the last of every tensor, in the order of the addresses.
    """

    plan: Plan
    device: int
    table: np.ndarray
    pointer: Any
    order: np.ndarray
    spans: np.ndarray

    @classmethod
    def of(cls, plan: Plan, operands: GroupedOperands) -> "PreparedCall":
        """The call that these checked operands make."""
        table = plan.table(operands)
        tensors = [*operands.a, *operands.b, *operands.a_scale, *operands.b_scale, *operands.out]
        if operands.alpha is not None:
            tensors.append(operands.alpha)
        return cls(
            plan,
            operands.device.index,
            table,
            table_pointer(table.ctypes.data),
            np.array(plan.schedule.order),
            np.array([_span_bytes(tensor) for tensor in tensors]),
        )

    def new_outputs(self) -> list[torch.Tensor]:
        """Outputs [M, N] a group, not initialised."""
        dtype, device = self.plan.problem.out_dtype, torch.device("cuda", self.device)
        return [torch.empty((m, n), dtype=dtype, device=device) for m, n, _ in self.plan.problem.sizes]

    def accepts(self, addresses: np.ndarray, own_out: bool) -> bool:
        """Whether operands are aligned for TMA, and outputs of the caller's (``own_out``) lie apart from all else.

        Args:
            addresses: int64, of a, b, a_scale, b_scale and out of every group, and of alpha if there is one.
        """
        num_groups = len(self.order)
        if np.bitwise_or.reduce(addresses[: 4 * num_groups]) % TMA_ALIGN_BYTES:
            return False
        if not own_out:
            return True
        # Rows may interleave without touching; that, and alignment of the outputs, is for the long way to decide.
        if np.bitwise_or.reduce(addresses[4 * num_groups : NUM_ADDRESSES * num_groups]) % TMA_ALIGN_BYTES:
            return False
        order = np.argsort(addresses)
        ends = addresses[order] + self.spans[order]
        return bool((ends[:-1] <= addresses[order][1:]).all())

    def fill(self, addresses: np.ndarray) -> None:
        """Write addresses into the table."""
        num_addresses = NUM_ADDRESSES * len(self.order)
        self.table[1:, :NUM_ADDRESSES] = addresses[:num_addresses].reshape(NUM_ADDRESSES, -1)[:, self.order].T
        if len(addresses) > num_addresses:
            self.table[0, Header.ALPHA] = addresses[-1]

    def launch(self, addresses: np.ndarray) -> None:
        """Enqueue on the device's current queue."""
        import cuda.bindings.driver as cuda

        if not self.plan.schedule.num_tiles:
            return
        self.fill(addresses)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if torch.cuda.current_device() == self.device:
            self.plan.kernel.function(self.pointer, cuda.CUstream(stream))
        else:
            with torch.cuda.device(self.device):
                self.plan.kernel.function(self.pointer, cuda.CUstream(stream))


def signature(lists: Sequence[Any], *settings: Any) -> tuple | None:
    """Hashable; None where an argument is no list or tuple of tensors.

    Args:
        lists: a, b, a_scale, b_scale, and out where the caller gives it.
        settings: everything else that decides how the call is made.
    """
    try:
        return (
            *settings,
            env.backend(),
            torch.is_grad_enabled(),
            *[
                (t.dtype, t.shape, t.stride(), t.get_device(), t.requires_grad)
                for tensors in lists
                for t in tensors
            ],
            *[len(tensors) for tensors in lists],
        )
    except (AttributeError, TypeError, RuntimeError):
        return None


def addresses_of(*lists: Sequence[torch.Tensor]) -> np.ndarray:
    """Addresses of the tensors of all lists, int64."""
    return np.array([t.data_ptr() for tensors in lists for t in tensors], np.int64)


def find(key: tuple) -> PreparedCall | None:
    """The call that was prepared for a signature in this thread."""
    return _calls().get(key)


def remember(key: tuple, call: PreparedCall) -> None:
    """Keep a call; the oldest is forgotten when there are ``MAX_PREPARED``."""
    calls = _calls()
    if len(calls) >= MAX_PREPARED:
        del calls[next(iter(calls))]
    calls[key] = call


def _calls() -> dict[tuple, PreparedCall]:
    if not hasattr(_local, "calls"):
        _local.calls = {}
    return _local.calls


def _span_bytes(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
