"""Wrappers that record: events of time-consuming instructions, and costs of the blocks between them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.banks import cycles_of
from nvfp4_cute.emulator.descriptors import LOAD_SHAPES
from nvfp4_cute.emulator.isa import (
    Builder,
    Step,
    Wrapper,
    Wrappers,
    lane_value,
    merge_lanes,
    mma_sync,
    tma,
    type_bytes,
    wgmma,
)
from nvfp4_cute.emulator.isa import barrier as barriers
from nvfp4_cute.emulator.isa.memory import POLLING, memory_mods
from nvfp4_cute.emulator.isa.spaces import generic_space
from nvfp4_cute.emulator.lanes import REGROUP
from nvfp4_cute.emulator.ptx import Inst, Sink, Vector
from nvfp4_cute.emulator.record.costs import block_cost
from nvfp4_cute.emulator.record.effects import barrier_number, touched_lines
from nvfp4_cute.emulator.record.events import (
    SECTOR,
    Op,
    Piece,
)
from nvfp4_cute.emulator.record.paces import main_instructions
from nvfp4_cute.emulator.record.track import Notes

if TYPE_CHECKING:
    from nvfp4_cute.emulator.code import Code
    from nvfp4_cute.emulator.state import Warp


RECORDERS = Wrappers()
"""Wrappers that record the events of instructions."""
_STEP_EVENTS = ("tcgen05", "cp", "wgmma", "clusterlaunchcontrol")
"""First words of opcodes whose events come through `Recorder.issue`. Their instructions also begin basic blocks."""


def is_event(inst: Inst) -> bool:
    """Whether an instruction may record an event."""
    return inst.opcode in _STEP_EVENTS or RECORDERS.has(inst)


def prepare(code: "Code") -> None:
    """Makes every block of `code` add its cost, and records every use of a loaded register."""
    code.polls = any(_may_poll(inst) for inst in code.insts)
    loaded = frozenset(
        slot for pc, inst in enumerate(code.insts) if _may_read_global(inst) for slot in code.writes[pc]
    )
    loaded = _with_moves(code, loaded)
    uses = [pc for pc in range(len(code.insts)) if loaded & code.reads[pc]]
    for pc in uses:
        moved = code.writes[pc] if code.insts[pc].opcode == "mov" else frozenset()
        code.steps[pc] = _using(code.steps[pc], tuple(loaded & code.reads[pc]), tuple(moved))
    events = {pc for pc, inst in enumerate(code.insts) if is_event(inst)}
    uses = [pc for pc in uses if code.insts[pc].opcode != "mov"]
    code.leaders = sorted({*code.leaders, *events, *uses})
    ends = [*code.leaders[1:], len(code.steps)]
    main = set(main_instructions(code))
    for start, end in zip(code.leaders, ends, strict=True):
        code.steps[start] = _accounting(code.steps[start], start, block_cost(code, start, end), start in main)


def _with_moves(code: "Code", slots: frozenset[int]) -> frozenset[int]:
    """Returns the slots, and the slots that moves copy them to."""
    while True:
        more = {
            slot
            for pc, inst in enumerate(code.insts)
            if inst.opcode == "mov" and code.reads[pc] & slots
            for slot in code.writes[pc]
        }
        if more <= slots:
            return slots
        slots |= more


def _accounting(step: Step, start: int, cost: Any, is_main: bool) -> Step:
    slots, alu, port, path, instructions = cost
    main = slots if is_main else 0.0

    def run(warp: "Warp") -> Any:
        track = warp.track
        track.block = start
        result = step(warp)
        if result is None or result.__class__ is int or result is REGROUP:
            track.slots += slots
            track.alu += alu
            track.port += port
            track.path += path
            track.main += main
            if start not in track.seen:
                track.seen.add(start)
                track.fresh += instructions
        return result

    return run


def _using(step: Step, slots: tuple[int, ...], moved: tuple[int, ...]) -> Step:
    """Returns a step that reads registers which loads may still fill. A move only passes the `Deferred` on."""

    def run(warp: "Warp") -> Any:
        pending = warp.track.pending
        if pending:
            number = max((pending.get(slot, -1) for slot in slots), default=-1)
            if number >= 0 and moved:
                pending.update(dict.fromkeys(moved, number))
            elif number >= 0:
                warp.track.use(number)
                for slot in [slot for slot, read in pending.items() if read <= number]:
                    del pending[slot]
        return step(warp)

    return run


def _done(result: Any) -> bool:
    return result is None or result.__class__ is int or result is REGROUP


def _after(note: "Callable[[Warp], None]", step: Step) -> Step:
    """Returns a step that records something after it is done."""

    def run(warp: "Warp") -> Any:
        result = step(warp)
        if _done(result):
            note(warp)
        return result

    return run


def _event(*event: Any) -> Wrapper:
    """Returns a wrapper that always records the same event."""
    return lambda inst, b, step: _after(lambda warp: warp.track.add(*event), step)


def _recorder(warp: "Warp") -> Notes:
    recorder = warp.cta.machine.recorder
    assert isinstance(recorder, Notes), "code compiled to be recorded on a machine without a recorder"
    return recorder


def _clear(b: Builder, step: Step) -> Step:
    """Returns a step that sets its registers to zero, instead of `step`, if data is skipped."""
    slots = tuple(b.writes)
    dtypes = [b.dtypes[slot] for slot in slots]

    def run(warp: "Warp") -> Any:
        if _recorder(warp).with_data:
            return step(warp)
        regs, protected = warp.regs, warp.protected
        for slot, dtype in zip(slots, dtypes, strict=True):
            regs[slot] = merge_lanes(warp.active, 0, regs[slot], dtype) if slot in protected else 0
        return None

    return run


# ---- mbarriers ---------------------------------------------------------------------------------------------------
@RECORDERS.register("mbarrier.init")
def _init(inst: Inst, b: Builder, step: Step) -> Step:
    _, space = barriers.mbarrier_mods(inst)
    address, count = b.address(inst.operands[0]), b.read(inst.operands[1], "u32")

    def note(warp: "Warp") -> None:
        for (where, number), _ in barriers.each_operand(warp, address(warp), count(warp)):
            warp.track.add(Op.INIT, barrier_number(*barriers.barrier_place(warp, space, where)), number)

    return _after(note, step)


@RECORDERS.register("mbarrier.arrive", "mbarrier.arrive_drop")
def _arrive(inst: Inst, b: Builder, step: Step) -> Step:
    mods, space = barriers.mbarrier_mods(inst)
    expect = mods.flag("expect_tx")
    place, *rest = inst.operands[1:] if len(inst.operands) > 1 else inst.operands
    address = b.address(place)
    amount = b.read(rest[0], "u32") if rest else lambda warp: 1
    op = Op.DROP if inst.opcode == "mbarrier.arrive_drop" else Op.ARRIVE

    def run(warp: "Warp") -> Any:
        for (where, number), lanes in barriers.each_operand(warp, address(warp), amount(warp)):
            place = barrier_number(*barriers.barrier_place(warp, space, where))
            if expect:
                warp.track.add(Op.TX, place, number * lanes)
            warp.track.add(op, place, lanes if expect else number * lanes)
        return step(warp)

    return run


@RECORDERS.register("mbarrier.expect_tx", "mbarrier.complete_tx")
def _transaction(inst: Inst, b: Builder, step: Step) -> Step:
    _, space = barriers.mbarrier_mods(inst)
    address, amount = b.address(inst.operands[0]), b.read(inst.operands[1], "u32")
    sign = 1 if inst.opcode == "mbarrier.expect_tx" else -1

    def run(warp: "Warp") -> Any:
        for (where, number), lanes in barriers.each_operand(warp, address(warp), amount(warp)):
            place = barrier_number(*barriers.barrier_place(warp, space, where))
            warp.track.add(Op.TX, place, sign * number * lanes)
        return step(warp)

    return run


@RECORDERS.register("mbarrier.test_wait", "mbarrier.try_wait")
def _wait(inst: Inst, b: Builder, step: Step) -> Step:
    """Records a wait that ends a phase as an event.

    A nonblocking test answers no the first time, so that the kernel's following blocking wait is recorded. A loop of
    such tests counts as a wait.
    """
    mods, space = barriers.mbarrier_mods(inst)
    mods.flag("parity")
    address = b.address(inst.operands[1])
    put = b.write(inst.operands[0], "pred")
    blocking = inst.opcode == "mbarrier.try_wait" and len(inst.operands) > 3
    pc = b.pc

    def run(warp: "Warp") -> Any:
        where = int(lane_value(address(warp), warp.first_lane()))
        cta, offset = barriers.barrier_place(warp, space, where)
        barrier, track = cta.mbarrier(offset), warp.track
        if not blocking:
            look = (pc, where, len(track.events))
            if track.polled != look:
                track.flush()
                track.polled = (pc, where, len(track.events))
                put(warp, False)
                return None
        result = step(warp)
        if result is None and not warp.polled:
            track.add(Op.WAIT, barrier_number(cta, offset), barrier.phase)
        return result

    return run


# ---- other barriers ------------------------------------------------------------------------------------------------
def _named(inst: Inst, b: Builder, step: Step, position: int, *, waits: bool) -> Step:
    operands = inst.operands[position:]
    number = b.read(operands[0], "u32")
    counted = len(operands) > 1 + (position == 1)
    threads = b.read(operands[1], "u32") if counted else lambda warp: 0

    def note(warp: "Warp") -> None:
        lane = warp.first_lane()
        which, count = lane_value(number(warp), lane), lane_value(threads(warp), lane)
        warp.track.add(Op.BARRIER, int(which), int(count), waits)

    return _before_blocking(note, step)


def _before_blocking(note: "Callable[[Warp], None]", step: Step) -> Step:
    """Returns a two-phase step that records its event at its beginning; events of other warps until its end come later."""

    def run(warp: "Warp") -> Any:
        beginning = warp.pending is None
        result = step(warp)
        if beginning and (warp.pending is not None or _done(result)):
            note(warp)
        return result

    return run


@RECORDERS.register("bar.sync", "bar.cta.sync", "barrier.sync", "barrier.cta.sync")
def _bar_sync(inst: Inst, b: Builder, step: Step) -> Step:
    return _named(inst, b, step, 0, waits=True)


@RECORDERS.register("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red")
def _bar_red(inst: Inst, b: Builder, step: Step) -> Step:
    return _named(inst, b, step, 1, waits=True)


@RECORDERS.register("bar.arrive", "bar.cta.arrive", "barrier.arrive", "barrier.cta.arrive")
def _bar_arrive(inst: Inst, b: Builder, step: Step) -> Step:
    return _named(inst, b, step, 0, waits=False)


RECORDERS.register("barrier.cluster.arrive")(_event(Op.CLUSTER_ARRIVE))
RECORDERS.register("barrier.cluster.wait")(
    lambda inst, b, step: _before_blocking(lambda warp: warp.track.add(Op.CLUSTER_WAIT), step)
)


RECORDERS.register("griddepcontrol.wait")(_event(Op.GRID_WAIT))
RECORDERS.register("griddepcontrol.launch_dependents")(_event(Op.GRID_TRIGGER))


@RECORDERS.register("nanosleep")
def _sleep(inst: Inst, b: Builder, step: Step) -> Step:
    time = b.read(inst.operands[0], "u32")
    note = lambda warp: warp.track.add(Op.SLEEP, int(lane_value(time(warp), warp.first_lane())))
    return _after(note, step)


# ---- copies ----------------------------------------------------------------------------------------------------------
RECORDERS.register("cp.async.bulk.commit_group")(_event(Op.COMMIT_STORES))
RECORDERS.register("cp.async.commit_group")(_event(Op.COMMIT_ASYNC))


@RECORDERS.register("prefetch.tensormap")
def _prefetch_map(inst: Inst, b: Builder, step: Step) -> Step:
    address = b.address(inst.operands[0])

    def run(warp: "Warp") -> Any:
        where = address(warp)
        maps = {tma.load_map(warp.cta, lane_value(where, lane)).address for lane in warp.active_lanes()}
        warp.track.add(Op.PREFETCH_MAP, tuple(sorted(maps)))
        return step(warp)

    return run


@RECORDERS.register("cp.async.bulk.wait_group", "cp.async.wait_group", "cp.async.wait_all")
def _wait_copies(inst: Inst, b: Builder, step: Step) -> Step:
    pending = b.imm(inst.operands[0]) if inst.operands else 0
    if inst.opcode.startswith("cp.async.bulk"):
        return _event(Op.WAIT_STORES, pending)(inst, b, step)
    if inst.opcode.endswith("wait_all"):
        return _event(Op.COMMIT_ASYNC)(inst, b, _event(Op.WAIT_ASYNC, 0)(inst, b, step))
    return _event(Op.WAIT_ASYNC, pending)(inst, b, step)


# ---- tensor memory and matrix instructions ------------------------------------------------------------------------
def _columns(inst: Inst) -> int:
    """Returns the 32-bit words per lane that a tcgen05.ld or .st moves."""
    shape = next(word for word in inst.mods if word in LOAD_SHAPES)
    repeat = next(int(word[1:]) for word in inst.mods if word[0] == "x" and word[1:].isdigit())
    return LOAD_SHAPES[shape].registers * repeat


@RECORDERS.register("tcgen05.ld")
def _tensor_load(inst: Inst, b: Builder, step: Step) -> Step:
    return _event(Op.TENSOR_LOAD, _columns(inst))(inst, b, _clear(b, step))


@RECORDERS.register("tcgen05.st")
def _tensor_store(inst: Inst, b: Builder, step: Step) -> Step:
    return _event(Op.TENSOR_STORE, _columns(inst))(inst, b, _clear(b, step))


RECORDERS.register("tcgen05.wait::ld")(_event(Op.WAIT_TENSOR_LOAD))
RECORDERS.register("tcgen05.wait::st")(_event(Op.WAIT_TENSOR_STORE))
RECORDERS.register("tcgen05.alloc")(_event(Op.ALLOCATE))


@RECORDERS.register("wgmma.mma_async")
def _wgmma(inst: Inst, b: Builder, step: Step) -> Step:
    in_registers = isinstance(inst.operands[1], Vector)
    form = wgmma.parse_form(inst, b, in_registers)
    return _event(Op.WGMMA, (form.a, form.n, in_registers))(inst, b, _clear(b, step))


RECORDERS.register("wgmma.commit_group")(_event(Op.COMMIT_WGMMA))


@RECORDERS.register("wgmma.wait_group")
def _wait_wgmma(inst: Inst, b: Builder, step: Step) -> Step:
    return _event(Op.WAIT_WGMMA, b.imm(inst.operands[0]))(inst, b, step)


@RECORDERS.register("mma")
def _mma_sync(inst: Inst, b: Builder, step: Step) -> Step:
    form = mma_sync.parse_form(inst)
    flops = 2 * 16 * 8 * form.k
    return _after(lambda warp: warp.track.multiply(form.a, flops), _clear(b, step))


@RECORDERS.register("ldmatrix")
def _matrix_load(inst: Inst, b: Builder, step: Step) -> Step:
    return _clear(b, step)


# ---- global memory -------------------------------------------------------------------------------------------------
def _may_read_global(inst: Inst) -> bool:
    shared = any(word.startswith(("shared", "param", "local", "const")) for word in inst.mods)
    return inst.opcode in ("ld", "ldu", "atom") and not shared


def _may_poll(inst: Inst) -> bool:
    """Whether a warp may wait in a loop of such loads for writes of others: loads of one word, not from shared memory."""
    one = not any(word.startswith(("shared", "v2", "v4", "v8")) for word in inst.mods)
    return inst.opcode == "ld" and one and any(word in POLLING for word in inst.mods)


def is_counter(inst: Inst) -> bool:
    """Whether an instruction adds to a word of global memory and returns the old value, like counters of work."""
    return (
        inst.opcode == "atom"
        and not {"add", "inc"}.isdisjoint(inst.mods)
        and not any(mod.startswith("shared") for mod in inst.mods)
        and not isinstance(inst.operands[0], Sink)
    )


def _global_lines(warp: "Warp", space: str, where: Any, nbytes: int) -> tuple[Piece, ...] | None:
    """Returns the lines of an access of the active lanes; None if it is not in global memory."""
    if where.__class__ is not np.ndarray:
        if space == "generic" and generic_space(where) != "global":
            return None
        where = _recorder(warp).placement.of(where)
        return ((where // SECTOR * SECTOR, SECTOR * max(1, nbytes // SECTOR)),)
    active = where[warp.active].astype(np.int64)
    if space == "generic" and generic_space(int(active[0])) != "global":
        return None
    return touched_lines(_recorder(warp), active, nbytes)


@RECORDERS.register("ld", "ldu", "st", "atom", "red")
def _access(inst: Inst, b: Builder, step: Step) -> Step:
    mods, space, _ = memory_mods(inst)
    if space not in ("global", "generic", "shared", "shared::cta"):
        return step
    types = mods.types()
    width = int((mods.one_of("v2", "v4", "v8") or "v1")[1:])
    nbytes = type_bytes(types[-1]) * width if types else 4
    reads = inst.opcode in ("ld", "ldu", "atom")
    address = b.address(inst.operands[1 if reads else 0])
    if space.startswith("shared"):
        return _in_banks(address, nbytes, step) if inst.opcode in ("ld", "st") else step
    slots = tuple(b.writes) if reads else ()
    may_poll = _may_poll(inst)
    may_signal = inst.opcode in ("st", "atom", "red") and width == 1 and types[-1:] and types[-1][0] in "usb"
    releases = "release" in inst.mods or "acq_rel" in inst.mods
    pc, takes = b.pc, is_counter(inst)

    def run(warp: "Warp") -> Any:
        where = address(warp)
        lines = _global_lines(warp, space, where, nbytes)
        result = step(warp)
        if lines is None:
            return result
        warp.gives_way = warp.gives_way or takes
        recorder, track = _recorder(warp), warp.track
        if may_poll and where.__class__ is not np.ndarray:
            again, written = track.looks_again(pc, where), recorder.writes[where]
            track.flush()
            track.look = (pc, where, len(track.events))
            if again or written:
                track.count([] if again else list(lines))
                track.events.append((Op.POLL, where, written, lines))
                return result
        track.count(list(lines), stored=not reads)
        if may_signal and warp.code.polls:
            words = _signalled(warp, where)
            for word in words:
                recorder.writes[word] += 1
            if words and releases:
                track.add(Op.FENCE)
            if words:
                track.add(Op.SIGNAL, words)
        if reads:
            track.reads += 1
            if inst.opcode == "atom":
                track.add(Op.ATOMIC, track.reads, lines)
            else:
                track.read(pc, track.reads, lines)
            track.pending.update(dict.fromkeys(slots, track.reads))
        else:
            track.add(Op.WRITE, lines)
        return result

    return run


def _in_banks(address: Step, nbytes: int, step: Step) -> Step:
    """Returns a step that notes the extra time of its shared-memory access due to bank conflicts."""

    def run(warp: "Warp") -> Any:
        where = address(warp)
        if where.__class__ is np.ndarray:
            accesses = cycles_of((where if warp.all_active else where[warp.active]).astype(np.int64), nbytes)
            warp.track.conflicts += accesses.cycles - accesses.passes
        return step(warp)

    return run


def _signalled(warp: "Warp", where: Any) -> tuple[int, ...]:
    """Returns the word that an instruction writes if it writes one, else nothing."""
    if where.__class__ is not np.ndarray:
        return (where,)
    return (int(where[warp.first_lane()]),) if warp.num_active == 1 else ()


@RECORDERS.register(
    *(
        f"{fence}.{scope}"
        for fence in ("fence.acq_rel", "fence.sc", "membar")
        for scope in ("gpu", "gl", "sys")
    )
)
def _fence(inst: Inst, b: Builder, step: Step) -> Step:
    """Records a fence of GPU scope, which waits for the writes of the warp's CTA. It matters only if another warp polls."""
    return _after(lambda warp: warp.track.add(Op.FENCE) if warp.code.polls else None, step)
