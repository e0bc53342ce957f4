"""Kernels whose warps run in lockstep, checked: which warp reads and writes which bytes of global memory.

Warps of such kernels share nothing else and never wait, so they harm each other only where one of them writes what
another one reads or writes. If that happens nowhere, there is nothing to report. Otherwise, and whenever warps cannot
continue together, the launch is undone and starts again under the full checker, which explains what is wrong.
"""

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from nvfp4_cute.emulator.check.shadow import GlobalRange
from nvfp4_cute.emulator.check.watch import EVERY_LANE, MASKS, STRONG
from nvfp4_cute.emulator.isa import Builder, Step, Wrappers, type_bytes
from nvfp4_cute.emulator.isa.memory import memory_mods
from nvfp4_cute.emulator.lanes import LANES
from nvfp4_cute.emulator.memory import GlobalMemory
from nvfp4_cute.emulator.ptx import Inst

SEVERAL = -1
WIDEST_ITEM = 16

TOUCHES = Wrappers()


class Meets(Exception):
    """Raised when there may be something to report."""


def watchable(insts: Sequence[Inst]) -> bool:
    """Whether accesses order nothing and no later launch may start early."""
    return not any(
        ("launch_dependents" in inst.mods) or (inst.opcode in ("ld", "st") and STRONG & set(inst.mods))
        for inst in insts
    )


class TouchedRange(GlobalRange):
    """Numbers of the warps that wrote and read each granule of a range: 0 for none, `SEVERAL` for more than one."""

    fields = {"writers": np.int32, "readers": np.int32}
    writers: np.ndarray
    readers: np.ndarray
    written = False

    def read(self, index: Any, warps: np.ndarray, *, constant: bool) -> None:
        """Warps read granules. `constant`: as data that the launch does not change."""
        if self.written:
            writers = self.writers[index]
            if np.count_nonzero(writers if constant else (writers != 0) & (writers != warps)):
                raise Meets
        before = self.readers[index]
        readers = np.where((before == 0) | (before == warps), warps, SEVERAL)
        self.readers[index] = readers
        if index.__class__ is not slice:  # warps that read the same granule at once
            self.readers[index[self.readers[index] != readers]] = SEVERAL

    def write(self, index: Any, warps: np.ndarray) -> None:
        """Warps write granules."""
        self.written = True
        for others in (self.writers[index], self.readers[index]):
            if np.count_nonzero(others) and np.count_nonzero((others != 0) & (others != warps)):
                raise Meets
        self.writers[index] = warps
        if index.__class__ is not slice and np.count_nonzero(self.writers[index] != warps):
            raise Meets


class Touches:
    """Accesses of one launch to the writable ranges of global memory."""

    def __init__(self, memory: GlobalMemory):
        """`memory`: has ranges."""
        self._memory = memory
        self._ranges = [found for found in memory.ranges if found.writable]
        self._starts = np.array([found.start for found in self._ranges], np.int64)
        self._touched: dict[int, TouchedRange] = {}
        self._before: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def access(self, wide: Any, where: Any, nbytes: int, *, write: bool, constant: bool) -> None:
        """The active lanes of warps in lockstep access `nbytes` at an address.

        Raises:
            Meets: there may be something to report.
        """
        if where.__class__ is not np.ndarray:
            present = wide.present()
            warps = wide.numbers if present is None else wide.numbers[present]
            addresses = np.full(len(warps), where, np.int64)
        else:
            warps, addresses = np.repeat(wide.numbers, LANES), where.astype(np.int64)
            if not wide.all_active:
                warps, addresses = warps[wide.active], addresses[wide.active]
        first = bisect.bisect_right(self._starts, int(addresses.min())) - 1
        if first >= 0 and int(addresses.max()) + nbytes <= self._ranges[first].end:
            self._within(first, addresses, warps, nbytes, write=write, constant=constant)
            return
        owners = np.searchsorted(self._starts, addresses, side="right") - 1
        for owner in np.unique(owners[owners >= 0]).tolist():
            lanes = (owners == owner) & (addresses + nbytes <= self._ranges[owner].end)
            if lanes.any():
                self._within(owner, addresses[lanes], warps[lanes], nbytes, write=write, constant=constant)

    def _within(
        self,
        which: int,
        addresses: np.ndarray,
        warps: np.ndarray,
        nbytes: int,
        *,
        write: bool,
        constant: bool,
    ) -> None:
        touched = self._touched.get(which)
        if touched is None:
            found = self._ranges[which]
            touched = self._touched[which] = TouchedRange(found.start, found.nbytes)
        index = touched.index(addresses, nbytes)
        width = nbytes // touched.granule
        each = np.repeat(warps, width) if width > 1 else warps
        if not write:
            touched.read(index, each, constant=constant)
            return
        touched.write(index, each)
        size = min(nbytes, WIDEST_ITEM)
        for offset in range(0, nbytes, size):
            items, places = self._memory.lanes((addresses + offset).astype(np.uint64), size, True)
            self._before.append((items, places, items[places]))

    def undo(self) -> None:
        """Gives memory the contents that it had before the launch."""
        for items, places, before in reversed(self._before):
            items[places] = before


@TOUCHES.register("ld", "ldu", "st")
def _load_or_store(inst: Inst, b: Builder, step: Step) -> Step:
    mods, space, _ = memory_mods(inst)
    if space != "global":
        return step
    write, constant = inst.opcode == "st", "nc" in inst.mods
    nbytes = type_bytes(mods.type()) * int((mods.one_of("v2", "v4", "v8") or "v1")[1:])
    address = b.address(inst.operands[0 if write else 1])

    def run(wide: Any) -> Any:
        wide.cta.touches.access(wide, address(wide), nbytes, write=write, constant=constant)
        return step(wide)

    return run


@TOUCHES.register(*MASKS)
def _masked(inst: Inst, b: Builder, step: Step) -> Step:
    mask = b.read(inst.operands[MASKS[inst.opcode]], "b32")

    def run(warp: Any) -> Any:
        if not warp.all_active or mask(warp) != EVERY_LANE:
            raise Meets
        return step(warp)

    return run
