"""st.async and red.async: asynchronous stores and reductions by single threads (PTX ISA 9.7.9.12, 9.7.13.7).

They go to the shared memory of a CTA of the cluster, with complete_tx on an mbarrier there, or to global memory,
without a completion signal. st.bulk, which fills shared memory with zeros, is an ordinary store and happens at once.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.faults import AlignmentFault
from nvfp4_cute.emulator.isa import UNSIGNED, Builder, Mods, Reader, Step, handler, type_bytes
from nvfp4_cute.emulator.isa.issue import any_shared, own_offset, per_thread, signalled, vector_items
from nvfp4_cute.emulator.isa.memory import ATOMIC, integer_updater
from nvfp4_cute.emulator.memory import SHARED_BASE
from nvfp4_cute.emulator.modes import Engine
from nvfp4_cute.emulator.places import granules
from nvfp4_cute.emulator.ptx import Inst

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Cta, Warp

Update = Callable[[np.ndarray, np.ndarray], np.ndarray] | None
"""Combines bytes in memory with new bytes; None: the new bytes replace the old ones."""

_REDUCTIONS = {
    "inc": ("u32",), "dec": ("u32",), "min": ("u32", "s32"), "max": ("u32", "s32"), "and": ("b32",), "or": ("b32",),
    "xor": ("b32",), "add": ("u32", "s32", "u64"),
}  # fmt: skip
"""Operations of red.async on shared memory, and their types."""


@handler("st.async", "red.async")
def async_store(inst: Inst, b: Builder) -> Step:
    """Stores or combines after the instruction; `release` forms go to global memory, the others to shared memory."""
    mods = Mods(inst)
    reduction = mods.one_of(*_REDUCTIONS) if inst.opcode == "red.async" else None
    to_global = mods.flag("release")
    mods.drop("weak", "relaxed", "mmio", "cluster", "gpu", "sys")
    mods.drop("global" if to_global else "shared::cluster")
    if not to_global and not mods.flag("mbarrier::complete_tx::bytes"):
        raise inst.unsupported("completion mechanism")
    count = int((mods.one_of("v2", "v4") or "v1")[1:])
    type_ = mods.type()
    mods.done()
    if inst.opcode == "red.async":
        legal = ("u32", "s32", "u64", "s64") if to_global else _REDUCTIONS.get(reduction or "", ())
        if type_ not in legal or (to_global and reduction != "add"):
            raise inst.unsupported(f"operation .{reduction} on .{type_}")
    if len(inst.operands) != 3 - to_global:
        raise inst.unsupported(f"{len(inst.operands)} operands")
    size = type_bytes(type_)
    values = [b.read_as(x, type_, f"u{8 * size}") for x in vector_items(inst, inst.operands[1], count)]
    update = partial(_combine, reduction, type_) if reduction else None
    address = b.address(inst.operands[0])
    barrier: list[Reader] = [] if to_global else [b.address(inst.operands[2])]

    def run(warp: "Warp", where: int, *rest: int) -> None:
        data = np.array(rest[:count], UNSIGNED[size]).view(np.uint8)
        if where % data.size:
            raise AlignmentFault(f"{inst.opcode} to address {where:#x}: must be a multiple of {data.size}")
        cta = warp.cta
        if to_global:
            cta.issue(warp, Engine.COPY, partial(store_global, cta, where, data, update))
            return
        target, offset = any_shared(cta, where)
        owner, at = signalled(cta, [target], rest[count], False, False)[0]
        cta.issue(warp, Engine.COPY, partial(store_shared, target, offset, data, update, owner, at))

    single = per_thread(run, [address, *values, *barrier])
    if to_global or update is not None:
        return single

    def step(warp: "Warp") -> None:
        stores = _together(warp, address(warp), [read(warp) for read in values], barrier[0](warp), size)
        if stores is None:
            single(warp)
        else:
            warp.cta.issue(warp, Engine.COPY, partial(store_rows, *stores))

    return step


def _together(
    warp: "Warp", where: Any, values: list[Any], barrier: Any, size: int
) -> "tuple[Cta, np.ndarray, np.ndarray, Cta, int] | None":
    """Returns arguments of `store_rows` for the stores of all lanes, or None if they must be done one by one.

    They must be done one by one if operations are queued (they may happen in any order), if an event of each is
    recorded, if a store may be illegal, or if the barrier's phase would end before the last store.
    """
    cta, machine = warp.cta, warp.cta.machine
    if warp.num_active == 1 or machine.recorder is not None or not machine.immediate:
        return None
    lanes, nbytes = warp.active, size * len(values)
    if where.__class__ is not np.ndarray:
        return None
    if barrier.__class__ is np.ndarray:
        named = barrier[lanes]
        barrier = int(named[0])
        if np.count_nonzero(named != named[0]):
            return None
    addresses = where[lanes].astype(np.int64)
    target, first = any_shared(cta, int(addresses[0]))
    offsets = addresses - (int(addresses[0]) - first)
    low, high = int(offsets.min()), int(offsets.max())
    if np.unique(offsets).size < offsets.size or (offsets % nbytes).any():
        return None
    if low < SHARED_BASE or high + nbytes > target.smem.size:
        return None
    owner, at = any_shared(cta, barrier)
    found = owner.smem.barriers.get(at)
    if owner is not target or found is None or 0 < found.tx < nbytes * len(offsets):
        return None
    data = np.empty((32, len(values)), UNSIGNED[size])
    for i, value in enumerate(values):
        data[:, i] = value
    return target, offsets, data[lanes].view(np.uint8), owner, at


def _combine(operation: str, type_: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    dtype = UNSIGNED[type_bytes(type_)]
    return integer_updater(ATOMIC[operation], type_)(old.view(dtype), new.view(dtype)).view(np.uint8)


def store_global(cta: "Cta", where: int, data: np.ndarray, update: Update) -> None:
    """Stores or combines into global memory."""
    memory = cta.machine.memory.view(where, data.size, write=True)
    if cta.machine.checker is not None:
        cta.machine.checker.write_global(np.array([where], np.int64), data.size, atomic=True)
    memory[:] = data if update is None else update(memory.copy(), data)


def store_shared(
    target: "Cta", offset: int, data: np.ndarray, update: Update, owner: "Cta", barrier: int
) -> None:
    """Stores or combines into shared memory, and signals the mbarrier."""
    target.smem.check(offset, data.size)
    checker = target.machine.checker
    if checker is not None:
        stamp = checker.mbarriers.signalled(owner, barrier, stored=True)
        if update is None:  # reductions do not race with each other
            place = granules(np.array([offset], np.int64), data.size)
            checker.write_shared(target, place, stamp=stamp, proxy=False)
    memory = target.smem.read(offset, data.size)
    memory[:] = data if update is None else update(memory.copy(), data)
    owner.mbarrier(barrier).complete_tx(data.size)


def store_rows(target: "Cta", offsets: np.ndarray, data: np.ndarray, owner: "Cta", barrier: int) -> None:
    """Stores rows of bytes to separate places in shared memory, and signals one mbarrier for all."""
    checker = target.machine.checker
    if checker is not None:
        stamp = checker.mbarriers.signalled(owner, barrier, stored=True)
        checker.write_shared(target, granules(offsets, data.shape[1]), stamp=stamp, proxy=False)
    target.smem.bytes[offsets[:, None] + np.arange(data.shape[1])] = data
    owner.mbarrier(barrier).complete_tx(data.size)


@handler("st.bulk")
def fill(inst: Inst, b: Builder) -> Step:
    """st.bulk [a], size, 0: fill shared memory of the CTA with zeros."""
    mods = Mods(inst)
    mods.drop("weak", "shared::cta")
    mods.done()
    if b.imm(inst.operands[2]) != 0:
        raise inst.unsupported("an initial value other than 0")
    pc = b.pc

    def run(warp: "Warp", where: int, nbytes: int) -> None:
        cta = warp.cta
        offset = own_offset(cta, where)
        if offset % 8 or nbytes % 8:
            raise AlignmentFault(f"st.bulk of {nbytes:#x} bytes at {where:#x}: both must be multiples of 8")
        cta.machine.changes += 1
        if cta.machine.checker is not None and nbytes:
            actor = cta.machine.checker.warp_actor(warp, pc)
            place = granules(np.arange(offset, offset + nbytes, 8), 8)
            cta.machine.checker.access_shared(cta, place, actor, write=True)
        cta.smem.read(offset, nbytes)[:] = 0

    return per_thread(run, [b.address(inst.operands[0]), b.read(inst.operands[1], "b32")])
