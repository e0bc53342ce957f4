"""What instructions tell those who watch a machine: the hazard checker and the recorder, as protocols.

CTAs and warps are `Any` here: `state` has them, and needs these protocols itself.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from nvfp4_cute.emulator.memory import Mbarrier
from nvfp4_cute.emulator.modes import Engine
from nvfp4_cute.emulator.places import Place


class SiliconWatcher(Protocol):
    """Rules of the chip that instructions know to be at stake (`check.silicon_checks.SiliconChecks`)."""

    def scale_width(self, n: int) -> None:
        """The current operation is a block-scaled MMA of a width that nobody else uses."""
        ...

    def tile(self, offset: int, span: int, rows: int) -> None:
        """The current operation copies a tile at an offset of shared memory, with a swizzle of so many bytes, or 0."""
        ...

    def multicast_commit(self, warp: Any, pc: int) -> None:
        """A warp is about to commit to barriers of several CTAs."""
        ...

    def cancels(self, cluster: Any) -> None:
        """The current operation asks for a cluster of the grid."""
        ...

    def cancel_failed(self, cluster: Any, stamp: int) -> None:
        """Nothing was left for a cluster, which an answer with this epoch says."""
        ...

    def unbounded_registers(self, warp: Any, pc: int) -> None:
        """A warp executes setmaxnreg in a kernel that does not bound its registers."""
        ...


class MbarrierWatcher(Protocol):
    """What the current operation does to mbarriers (`check.mbarriers.Mbarriers`)."""

    def arrive_later(self, cta: Any, barrier: Mbarrier, *, outside: bool = True) -> None:
        """It is about to arrive on a barrier."""
        ...

    def signalled(self, cta: Any, offset: int, *, stored: bool = False) -> int:
        """Epoch of data whose arrival it will signal to a barrier."""
        ...


class TensorMapWatcher(Protocol):
    """Uses of tensor maps that may change (`check.tensor_maps.TensorMaps`)."""

    def used(self, warp: Any, pc: int, address: int) -> Any:
        """A warp issues a copy that uses the map there. Returns what `reading` takes."""
        ...

    def reading(self, use: Any, stamp: int | None = None) -> None:
        """The current operation is such a copy."""
        ...


class Checker(Protocol):
    """The hazard checker (`check.hazards.Checker` says what each of these does)."""

    @property
    def shared(self) -> Mapping[Any, Any]:
        """Shadows of the shared memories of the running CTAs."""
        ...

    @property
    def tensor(self) -> Mapping[Any, Any]:
        """Shadows of their tensor memories."""
        ...

    @property
    def silicon(self) -> SiliconWatcher:
        """Rules of the chip."""
        ...

    @property
    def tensor_maps(self) -> TensorMapWatcher:
        """Tensor maps that a kernel edits."""
        ...

    @property
    def mbarriers(self) -> MbarrierWatcher:
        """What is known of mbarriers."""
        ...

    # ---- what the current operation does -------------------------------------------------------------
    def read_operand(self, cta: Any, place: Place, *, stamp: int | None = None, proxy: bool = True) -> None:
        """It reads shared memory that must have been written."""
        ...

    def copy_source(self, cta: Any, place: Place) -> bool:
        """It copies shared memory. Returns whether all of that was written."""
        ...

    def write_shared(self, cta: Any, place: Place, *, stamp: int | None = None, proxy: bool = True) -> None:
        """It writes shared memory."""
        ...

    def read_global(
        self, addresses: np.ndarray, nbytes: int, *, proxy: bool = True, stamp: int | None = None
    ) -> None:
        """It reads global memory."""
        ...

    def write_global(self, addresses: np.ndarray, nbytes: int, *, atomic: bool = False) -> None:
        """It writes global memory."""
        ...

    def judged(self, check: Callable[[], None], store: Callable[[], Any]) -> Any:
        """It checks a write against earlier ones, and does it."""
        ...

    def read_tensor(self, cta: Any, lanes: slice, columns: slice) -> np.ndarray | None:
        """It reads tensor memory. Returns which words nobody wrote, None if all were written."""
        ...

    def write_tensor(self, cta: Any, lanes: slice, columns: slice, valid: bool | None = True) -> None:
        """It writes tensor memory."""
        ...

    def require_tensor(self, what: str, unwritten: np.ndarray | None, columns: slice) -> None:
        """It needs words of tensor memory."""
        ...

    def note_unwritten(self, registers: np.ndarray) -> None:
        """It loads registers with words that nobody wrote."""
        ...

    def lanes_copied(self, offsets: np.ndarray, nbytes: int, lanes: np.ndarray) -> None:
        """Each of its lanes copied `nbytes` to its own offset in shared memory."""
        ...

    def lanes_differ(self, where: str) -> None:
        """Its lanes write different bytes to one place."""
        ...

    # ---- what a warp does ----------------------------------------------------------------------------
    def warp_actor(self, warp: Any, pc: int) -> Any:
        """A warp as one who accesses memory itself."""
        ...

    def access_shared(self, cta: Any, place: Place, actor: Any, *, write: bool) -> None:
        """Somebody accesses shared memory."""
        ...

    def issued_on(self, warp: Any, engine: Engine) -> int:
        """How many operations a warp has issued on an engine."""
        ...

    def covered(self, warp: Any, peer: Any, engine: Engine, number: int) -> None:
        """A warp knows that another one's operations are complete up to a number."""
        ...


class Recorder(Protocol):
    """Notes asynchronous operations, and lets happen what it must of them (`record.recorder.Recorder`)."""

    def issue(self, warp: Any, engine: Engine, effect: Callable[[], Any]) -> None:
        """An asynchronous operation."""
        ...

    def issue_store(self, warp: Any, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        """A bulk store."""
        ...
