"""Copies of contiguous bytes: cp.async.bulk, cp.async, and the groups that both wait for.

Operands are read when the instruction executes. All accesses to memory and mbarriers are in the effect passed to
`Cta.issue`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.addresses import OFFSET_MASK
from nvfp4_cute.emulator.faults import AlignmentFault
from nvfp4_cute.emulator.isa import Builder, Mods, Reader, Step, handler
from nvfp4_cute.emulator.isa.issue import (
    any_shared,
    drop_policy,
    in_mask,
    own_offset,
    own_place,
    per_thread,
    signalled,
)
from nvfp4_cute.emulator.isa.spaces import as_u64, gather, scatter
from nvfp4_cute.emulator.lanes import LANE_IDS
from nvfp4_cute.emulator.memory import Mbarrier
from nvfp4_cute.emulator.modes import Engine, operations_of
from nvfp4_cute.emulator.places import byte_range, granules
from nvfp4_cute.emulator.ptx import Inst
from nvfp4_cute.emulator.reductions import REDUCTIONS, reduce_elements

if TYPE_CHECKING:
    from nvfp4_cute.emulator.observers import Checker
    from nvfp4_cute.emulator.state import Cta, Warp

_REDUCE_TYPES = ("f16", "bf16", "f32", "f64", "u32", "s32", "u64", "s64", "b32", "b64")


# ---- bulk copies without a tensor map ----------------------------------------------------------------------------
@handler("cp.async.bulk")
def bulk_copy(inst: Inst, b: Builder) -> Step:
    """Copy contiguous bytes between global memory and shared memory, or between CTAs of a cluster."""
    mods = Mods(inst)
    spaces = tuple(mods.left[:2])
    del mods.left[:2]
    if spaces == ("global", "shared::cta"):
        return _bulk_store(inst, b, mods)
    if spaces not in (
        ("shared::cluster", "global"),
        ("shared::cta", "global"),
        ("shared::cluster", "shared::cta"),
    ):
        raise inst.unsupported(f"copy .{'.'.join(spaces)}")
    if not mods.flag("mbarrier::complete_tx::bytes"):
        raise inst.unsupported("completion mechanism")
    multicast = mods.flag("multicast::cluster")
    operands = list(inst.operands)
    drop_policy(inst, b, mods, operands)
    mods.done()
    if len(operands) != 4 + multicast:
        raise inst.unsupported(f"{len(operands)} operands")
    readers = [b.address(operands[i]) for i in (0, 1, 3)] + [b.read(operands[2], "u32")]
    readers.append(b.read(operands[4], "b16") if multicast else lambda warp: 0)
    from_shared, place = spaces[1] != "global", own_place if spaces[0] == "shared::cta" else any_shared

    def run(warp: "Warp", dst: int, src: int, barrier: int, nbytes: int, mask: int) -> None:
        cta = warp.cta
        _check_bulk(dst, src, nbytes)
        target, offset = place(cta, dst)
        targets = in_mask(cta, mask) if multicast else [target]
        signals = signalled(cta, targets, barrier, False, multicast)
        source = own_offset(cta, src) if from_shared else src
        effect = partial(bulk_in, cta, source, from_shared, nbytes, targets, offset, signals)
        cta.issue(warp, Engine.COPY, effect)

    return per_thread(run, readers)


def _check_bulk(dst: int, src: int, nbytes: int) -> None:
    for what, value in (("destination", dst), ("source", src), ("size", nbytes)):
        if value % 16:
            raise AlignmentFault(f"cp.async.bulk {what} {value:#x}: must be a multiple of 16")


def bulk_in(
    cta: "Cta",
    src: int,
    from_shared: bool,
    nbytes: int,
    targets: "Sequence[Cta]",
    offset: int,
    signals: "Sequence[tuple[Cta, int]]",
) -> None:
    """Copies bytes into shared memory of the targets, and signals their mbarriers."""
    checker = cta.machine.checker
    if checker is not None and nbytes:
        _check_in(checker, cta, src, from_shared, nbytes, targets, offset, signals)
    if nbytes:
        data = (
            cta.smem.read(src, nbytes) if from_shared else cta.machine.memory.view(src, nbytes, write=False)
        )
        for target in targets:
            target.smem.write(offset, data)
    cta.machine.stats.tma_load_bytes += 0 if from_shared else nbytes
    for owner, barrier in signals:
        owner.mbarrier(barrier).complete_tx(nbytes)


def _check_in(
    checker: "Checker",
    cta: "Cta",
    src: int,
    from_shared: bool,
    nbytes: int,
    targets: "Sequence[Cta]",
    offset: int,
    signals: "Sequence[tuple[Cta, int]]",
) -> None:
    for target, (owner, barrier) in zip(targets, signals, strict=True):
        target.smem.check(offset, nbytes)
        stamp = checker.mbarriers.signalled(owner, barrier)
        if from_shared:
            cta.smem.check(src, nbytes)
            checker.read_operand(cta, byte_range(src, nbytes), stamp=stamp)
        else:
            alone = stamp if len(targets) == 1 else None
            checker.read_global(np.array([src], np.int64), nbytes, stamp=alone)
        checker.write_shared(target, byte_range(offset, nbytes), stamp=stamp)


def _bulk_store(inst: Inst, b: Builder, mods: Mods) -> Step:
    """Copies shared to global memory. `.cp_mask`: bit i of a 16-bit mask copies byte i of every 16."""
    masked = mods.flag("cp_mask")
    if not mods.flag("bulk_group"):
        raise inst.unsupported("completion mechanism")
    operands = list(inst.operands)
    readers: list[Reader] = [lambda warp: 0xFFFF]
    if masked:
        readers = [b.read(operands.pop(), "b16")]
    drop_policy(inst, b, mods, operands)
    mods.done()
    if len(operands) != 3:
        raise inst.unsupported(f"{len(operands)} operands")
    readers += [b.address(operands[0]), b.address(operands[1]), b.read(operands[2], "u32")]

    def run(warp: "Warp", mask: int, dst: int, src: int, nbytes: int) -> None:
        _issue_out(warp, dst, src, nbytes, mask=mask)

    return per_thread(run, readers, idempotent=True)


def _issue_out(
    warp: "Warp",
    dst: int,
    src: int,
    nbytes: int,
    *,
    mask: int = 0xFFFF,
    reduce: str | None = None,
    type_name: str = "",
) -> None:
    _check_bulk(dst, src, nbytes)
    cta, offset = warp.cta, own_offset(warp.cta, src)
    if nbytes:
        read = partial(_read_out, cta, offset, nbytes)
        cta.issue_store(warp, read, partial(bulk_out, cta, dst, nbytes, mask, reduce, type_name))


def _read_out(cta: "Cta", offset: int, nbytes: int) -> np.ndarray:
    source = cta.smem.read(offset, nbytes).copy()
    if cta.machine.checker is not None:
        cta.machine.checker.read_operand(cta, byte_range(offset, nbytes))
    return source


def bulk_out(
    cta: "Cta", dst: int, nbytes: int, mask: int, reduce: str | None, type_name: str, source: np.ndarray
) -> None:
    """Copies or combines bytes of shared memory into global memory."""
    target = cta.machine.memory.view(dst, nbytes, write=True)
    checker, store = cta.machine.checker, partial(_store_bytes, target, source, mask, reduce, type_name)
    if checker is None:
        store()
    else:
        where = np.array([dst], np.int64)
        checker.judged(partial(checker.write_global, where, nbytes, atomic=reduce is not None), store)
    cta.machine.stats.tma_store_bytes += nbytes


def _store_bytes(
    target: np.ndarray, source: np.ndarray, mask: int, reduce: str | None, type_name: str
) -> None:
    if reduce is not None:
        _reduce_bytes(reduce, type_name, target, source)
    elif mask == 0xFFFF:
        target[:] = source
    else:
        keep = (mask >> np.arange(16) & 1).astype(bool)
        np.copyto(target.reshape(-1, 16), source.reshape(-1, 16), where=keep)


@handler("cp.reduce.async.bulk")
def bulk_reduce(inst: Inst, b: Builder) -> Step:
    """Combine contiguous shared memory with global memory, or with the shared memory of a CTA of the cluster."""
    mods = Mods(inst)
    spaces = tuple(mods.left[:2])
    del mods.left[:2]
    op, type_name = mods.one_of(*REDUCTIONS), mods.one_of(*_REDUCE_TYPES)
    mods.drop("noftz")
    to_global = spaces == ("global", "shared::cta")
    if op is None or type_name is None or not (to_global or spaces == ("shared::cluster", "shared::cta")):
        raise inst.unsupported("spaces, operation, or type")
    if not mods.flag("bulk_group" if to_global else "mbarrier::complete_tx::bytes"):
        raise inst.unsupported("completion mechanism")
    operands = list(inst.operands)
    drop_policy(inst, b, mods, operands)
    mods.done()
    if len(operands) != 4 - to_global:
        raise inst.unsupported(f"{len(operands)} operands")
    readers = [b.address(operands[0]), b.address(operands[1]), b.read(operands[2], "u32")]
    readers += [] if to_global else [b.address(operands[3])]

    def run(warp: "Warp", dst: int, src: int, nbytes: int, barrier: int = 0) -> None:
        if to_global:
            _issue_out(warp, dst, src, nbytes, reduce=op, type_name=type_name)
            return
        _check_bulk(dst, src, nbytes)
        cta, source = warp.cta, own_offset(warp.cta, src)
        target, offset = any_shared(cta, dst)
        signal = signalled(cta, [target], barrier, False, False)[0]

        def effect() -> None:
            checker = cta.machine.checker
            if checker is not None:
                stamp = checker.mbarriers.signalled(*signal)
                checker.read_operand(cta, byte_range(source, nbytes), stamp=stamp)
            _reduce_bytes(op, type_name, target.smem.read(offset, nbytes), cta.smem.read(source, nbytes))
            signal[0].mbarrier(signal[1]).complete_tx(nbytes)

        cta.issue(warp, Engine.COPY, effect)

    return per_thread(run, readers)


def _reduce_bytes(op: str, type_name: str, target: np.ndarray, source: np.ndarray) -> None:
    """target = op(target, source), elementwise on contiguous bytes."""
    target[:] = reduce_elements(op, type_name, target, source)


# ---- bulk groups -------------------------------------------------------------------------------------------------
@handler("cp.async.bulk.commit_group", "cp.async.commit_group")
def commit_group(inst: Inst, b: Builder) -> Step:
    """Closes a group of copies."""
    mods = Mods(inst)
    mods.done()
    engine = _engine(inst)

    def step(warp: "Warp") -> None:
        queue = warp.cta.machine.queue
        if queue is not None:
            operations_of(warp).group(engine).close(warp.lanes)

    return step


def _engine(inst: Inst) -> Engine:
    return Engine.STORE if inst.opcode.startswith("cp.async.bulk") else Engine.CP_ASYNC


@handler("cp.async.bulk.wait_group", "cp.async.wait_group", "cp.async.wait_all")
def wait_group(inst: Inst, b: Builder) -> Step:
    """Waits until at most N groups are incomplete (wait_all: until every copy is complete)."""
    mods = Mods(inst)
    read = mods.flag("read")
    mods.done()
    engine, everything = _engine(inst), inst.opcode.endswith("wait_all")
    pending = 0 if everything else b.imm(inst.operands[0])

    def step(warp: "Warp") -> None:
        queue = warp.cta.machine.queue
        if queue is None:
            return
        if everything:
            operations_of(warp).group(engine).close(warp.lanes)
        queue.wait_group(warp, engine, pending, read=read)

    return step


# ---- cp.async ----------------------------------------------------------------------------------------------------
@handler("cp.async")
def small_copy(inst: Inst, b: Builder) -> Step:
    """Each thread copies 4, 8 or 16 bytes from global to shared memory; a smaller source size fills with zeros."""
    mods = Mods(inst)
    mods.drop("ca", "cg", "shared", "shared::cta", "global")
    operands = list(inst.operands)
    drop_policy(inst, b, mods, operands)
    mods.drop_prefix("L2::")
    mods.done()
    if len(operands) not in (3, 4):
        raise inst.unsupported(f"{len(operands)} operands")
    nbytes = b.imm(operands[2])
    if nbytes not in (4, 8, 16):
        raise inst.unsupported(f"{nbytes} bytes; legal are 4, 8 and 16")
    dst, src = b.address(operands[0]), b.address(operands[1])
    if len(operands) == 3:

        def copy(warp: "Warp") -> None:
            _issue_small(warp, partial(copy_lanes, warp, dst(warp), src(warp), nbytes, warp.active))

        return copy
    is_predicate = getattr(operands[3], "type", "") == "pred"
    available = b.read(operands[3], "pred" if is_predicate else "u32")

    def run(warp: "Warp") -> None:
        limits = np.broadcast_to(np.asarray(available(warp)), 32)
        # A predicate operand means that the source is ignored.
        counts = np.where(limits, 0, nbytes) if is_predicate else np.minimum(limits.astype(np.int64), nbytes)
        to, source = as_u64(dst(warp)), as_u64(src(warp))
        _issue_small(warp, partial(copy_padded, warp, to, source, nbytes, counts, warp.active))

    return run


def _issue_small(warp: "Warp", effect: "Callable[[], None]") -> None:
    operation = warp.cta.issue(warp, Engine.CP_ASYNC, effect)
    if operation is not None:
        operations_of(warp).group(Engine.CP_ASYNC).open.append(operation)


def copy_lanes(warp: "Warp", dst: Any, src: Any, nbytes: int, lanes: np.ndarray) -> None:
    """Executes cp.async for the given lanes of a warp."""
    element = np.dtype(np.uint32)
    with warp.as_if(lanes):
        rows = gather(warp, "global", src, nbytes, element, nbytes // 4)
        scatter(warp, "shared", dst, list(rows), element)
    checker = warp.cta.machine.checker
    if checker is not None:
        checker.read_global(as_u64(src)[lanes].astype(np.int64), nbytes, proxy=False)
        data = np.ascontiguousarray(np.asarray(rows)[:, lanes].T)
        data = data.view(np.uint8).reshape(len(data), nbytes)
        _check_small(warp.cta, _offsets(dst, lanes), data, LANE_IDS[lanes])


def copy_padded(
    warp: "Warp", dst: np.ndarray, src: np.ndarray, nbytes: int, counts: np.ndarray, lanes: np.ndarray
) -> None:
    """Executes cp.async for the given lanes: copies `counts` bytes of each, then zeros up to `nbytes`."""
    cta, offsets, element = warp.cta, _offsets(dst, lanes), np.dtype(np.uint32)
    full, part = lanes & (counts == nbytes), lanes & (counts > 0) & (counts < nbytes)
    words = np.zeros((nbytes // 4, len(lanes)), element)
    if full.any():
        with warp.as_if(full):
            words[:, full] = gather(warp, "global", src, nbytes, element, nbytes // 4)[:, full]
    for lane in np.flatnonzero(part).tolist():
        row = np.zeros(nbytes, np.uint8)
        row[: counts[lane]] = cta.machine.memory.view(int(src[lane]), int(counts[lane]), write=False)
        words[:, lane] = row.view(element)
    with warp.as_if(lanes):
        scatter(warp, "shared", dst, list(words), element)
    addresses, counts = src[lanes].astype(np.int64), counts[lanes]
    data = np.ascontiguousarray(words[:, lanes].T).view(np.uint8).reshape(len(offsets), nbytes)
    checker = cta.machine.checker
    if checker is not None:
        for count in np.unique(counts[counts > 0]).tolist():
            checker.read_global(addresses[counts == count], count, proxy=False)
        _check_small(cta, offsets, data, LANE_IDS[lanes])


def _offsets(dst: Any, lanes: np.ndarray) -> np.ndarray:
    return (as_u64(dst)[lanes] & np.uint64(OFFSET_MASK)).astype(np.int64)


def _check_small(cta: "Cta", offsets: np.ndarray, data: np.ndarray, lanes: np.ndarray) -> None:
    """Reports cp.async copies (uint8 [lanes, bytes]) by `lanes` to overlapping offsets. Overlaps with equal bytes are legal."""
    checker = cta.machine.checker
    assert checker is not None
    checker.write_shared(cta, granules(offsets, data.shape[1]), proxy=False)
    if len(np.unique(offsets)) == len(offsets):
        checker.lanes_copied(offsets, data.shape[1], lanes)
        return
    for offset, row in zip(offsets.tolist(), data, strict=True):
        if not np.array_equal(cta.smem.read(offset, data.shape[1]), row):
            checker.lanes_differ(f"smem+{offset:#x}..{offset + data.shape[1] - 1:#x}")


@handler("cp.async.mbarrier.arrive")
def small_copy_arrive(inst: Inst, b: Builder) -> Step:
    """Arrives when the warp's earlier cp.async are complete. Without .noinc the pending count is raised until then."""
    mods = Mods(inst)
    counted = mods.flag("noinc")
    mods.drop("shared", "shared::cta", "b64")
    mods.done()

    def run(warp: "Warp", address: int) -> None:
        cta = warp.cta
        barrier = cta.mbarrier(own_offset(cta, address))
        if not counted:
            barrier.pending += 1

        cta.issue(warp, Engine.CP_ASYNC, partial(arrive_after_copies, cta, barrier, counted))

    return per_thread(run, [b.address(inst.operands[0])])


def arrive_after_copies(cta: "Cta", barrier: Mbarrier, counted: bool) -> None:
    """Makes the arrival of the warp's earlier cp.async. `counted`: the pending count was not raised for it."""
    if cta.machine.checker is not None:
        cta.machine.checker.mbarriers.arrive_later(cta, barrier, outside=False)
    barrier.arrive()
