"""Protocols of the observers of a machine, the hazard checker and the recorder, and what instructions tell them.

CTAs and warps are `Any` here, because `state` defines them and itself imports these protocols.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from nvfp4_cute.emulator.memory import Mbarrier
from nvfp4_cute.emulator.modes import Engine
from nvfp4_cute.emulator.places import Place


class SiliconWatcher(Protocol):
    """Rules of the chip that instructions check (`check.silicon_checks.SiliconChecks`)."""

    def scale_width(self, n: int) -> None:
        """Called for a block-scaled MMA: the current operation has the width `n`."""
        ...

    def tile(self, cta: Any, offset: int, span: int, phases: int, chunks: np.ndarray, *, store: bool) -> None:
        """Called when the current operation copies a tile to or from (`store`) `offset` of a CTA's shared memory.

        Args:
            span: bytes of the swizzle.  phases: lines of 128 bytes after which it repeats.
            chunks: numbers of the tile's 16-byte chunks in shared memory, in logical order (rows, chunks of a row).
        """
        ...

    def multicast_commit(self, warp: Any, pc: int) -> None:
        """Called before a warp commits to barriers of several CTAs."""
        ...

    def cancels(self, cluster: Any) -> None:
        """Called when the current operation asks for a cluster of the grid."""
        ...

    def cancel_failed(self, cluster: Any, stamp: int) -> None:
        """Called when an answer with this epoch says that no cluster was left."""
        ...

    def unbounded_registers(self, warp: Any, pc: int) -> None:
        """Called when a warp executes setmaxnreg in a kernel that does not bound its registers."""
        ...


class MbarrierWatcher(Protocol):
    """Effects of the current operation on mbarriers (`check.mbarriers.Mbarriers`)."""

    def arrive_later(self, cta: Any, barrier: Mbarrier, *, outside: bool = True) -> None:
        """Called before it arrives on a barrier."""
        ...

    def signalled(self, cta: Any, offset: int, *, stored: bool = False) -> int:
        """Returns the epoch of data whose arrival it will signal to a barrier."""
        ...


class TensorMapWatcher(Protocol):
    """Uses of tensor maps that a kernel may change (`check.tensor_maps.TensorMaps`)."""

    def used(self, warp: Any, pc: int, address: int) -> Any:
        """Called when a warp issues a copy that uses the map at `address`. Returns the argument of `reading`."""
        ...

    def reading(self, use: Any, stamp: int | None = None) -> None:
        """Called when the current operation is such a copy."""
        ...


class Checker(Protocol):
    """The hazard checker; `check.hazards.Checker` documents each method."""

    @property
    def shared(self) -> Mapping[Any, Any]:
        """Shadows of the shared memories of the running CTAs."""
        ...

    @property
    def tensor(self) -> Mapping[Any, Any]:
        """Shadows of the tensor memories of the running CTAs."""
        ...

    @property
    def silicon(self) -> SiliconWatcher:
        """Rules of the chip."""
        ...

    @property
    def tensor_maps(self) -> TensorMapWatcher:
        """Tensor maps that the kernel edits."""
        ...

    @property
    def mbarriers(self) -> MbarrierWatcher:
        """Knowledge about mbarriers."""
        ...

    # ---- called for the current operation ----------------------------------------------------------------
    def read_operand(self, cta: Any, place: Place, *, stamp: int | None = None, proxy: bool = True) -> None:
        """The operation reads shared memory that must have been written."""
        ...

    def copy_source(self, cta: Any, place: Place) -> bool:
        """The operation copies shared memory. Returns whether all of it was written."""
        ...

    def write_shared(self, cta: Any, place: Place, *, stamp: int | None = None, proxy: bool = True) -> None:
        """The operation writes shared memory."""
        ...

    def read_global(
        self, addresses: np.ndarray, nbytes: int, *, proxy: bool = True, stamp: int | None = None
    ) -> None:
        """The operation reads global memory."""
        ...

    def write_global(self, addresses: np.ndarray, nbytes: int, *, atomic: bool = False) -> None:
        """The operation writes global memory."""
        ...

    def judged(self, check: Callable[[], None], store: Callable[[], Any]) -> Any:
        """The operation checks a write against earlier ones, and performs it."""
        ...

    def read_tensor(self, cta: Any, lanes: slice, columns: slice) -> np.ndarray | None:
        """The operation reads tensor memory. Returns which words were never written, or None if all were written."""
        ...

    def write_tensor(self, cta: Any, lanes: slice, columns: slice, valid: bool | None = True) -> None:
        """The operation writes tensor memory."""
        ...

    def require_tensor(self, what: str, unwritten: np.ndarray | None, columns: slice) -> None:
        """The operation needs words of tensor memory."""
        ...

    def note_unwritten(self, registers: np.ndarray) -> None:
        """The operation loads registers from words that were never written."""
        ...

    def lanes_copied(self, offsets: np.ndarray, nbytes: int, lanes: np.ndarray) -> None:
        """Each lane of the operation copied `nbytes` to its own offset in shared memory."""
        ...

    def lanes_differ(self, where: str) -> None:
        """Lanes of the operation write different bytes to one place."""
        ...

    # ---- called for a warp -------------------------------------------------------------------------------
    def warp_actor(self, warp: Any, pc: int) -> Any:
        """Returns a warp as the actor that accesses memory itself."""
        ...

    def access_shared(self, cta: Any, place: Place, actor: Any, *, write: bool) -> None:
        """An actor accesses shared memory."""
        ...

    def issued_on(self, warp: Any, engine: Engine) -> int:
        """Returns how many operations a warp has issued on an engine."""
        ...

    def covered(self, warp: Any, peer: Any, engine: Engine, number: int) -> None:
        """A warp learns that operations of another warp are complete up to a number."""
        ...


class Recorder(Protocol):
    """Notes asynchronous operations and performs them when it must (`record.recorder.Recorder`)."""

    def issue(self, warp: Any, engine: Engine, effect: Callable[[], Any]) -> None:
        """Accepts an asynchronous operation."""
        ...

    def issue_store(self, warp: Any, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        """Accepts a bulk store."""
        ...
