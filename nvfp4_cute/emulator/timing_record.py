"""What a launch does that takes time, recorded while the machine executes it: a list of events for every warp.

Between events a warp only computes; that is one ``COMPUTE`` event with the cost of the instructions (timing_costs). All
other events are what the replay (timing) has to order: barriers, copies, matrix instructions, accesses of global memory.

Control flow and addresses decide the time of a kernel, data hardly ever. A recorder therefore skips data unless asked
not to: copies move nothing and products are not computed, only barriers and counters see them. Registers that such an
instruction would write become zero.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.descriptors import COPY_SHAPES, LOAD_SHAPES, decode_instruction_descriptor
from nvfp4_cute.emulator.isa import (
    Builder,
    Step,
    async_store,
    bulk,
    cluster_launch,
    lane_value,
    merge_lanes,
    mma_sync,
    tcgen05,
    tcgen05_copy,
    tcgen05_mma,
    tma,
    type_bytes,
    wgmma,
)
from nvfp4_cute.emulator.isa import barrier as barriers
from nvfp4_cute.emulator.isa.cluster_launch import RESPONSE_BYTES
from nvfp4_cute.emulator.isa.memory import POLLING, memory_mods
from nvfp4_cute.emulator.isa.spaces import generic_space
from nvfp4_cute.emulator.lanes import REGROUP
from nvfp4_cute.emulator.machine import RANK_SHIFT
from nvfp4_cute.emulator.modes import Engine
from nvfp4_cute.emulator.ptx import Inst, Vector
from nvfp4_cute.emulator.representatives import LaunchWork, choose, everyone
from nvfp4_cute.emulator.timing_costs import block_cost
from nvfp4_cute.emulator.timing_events import (
    LINE,
    SECTOR,
    ClusterTrace,
    Event,
    LaunchTrace,
    Op,
    Origin,
    Piece,
)
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.code import Code
    from nvfp4_cute.emulator.lanes import Warp
    from nvfp4_cute.emulator.machine import Cluster, Cta, Launch
    from nvfp4_cute.emulator.tensormap import TensorMap


MERGED = 8
"""mma.sync that are one event at most."""
SLOTS_BETWEEN = 64
"""Issue slots between them at most."""
LOOP_OF_LOOKS = (Op.COMPUTE, Op.USE, Op.SLEEP)
"""What a loop does that polls global memory, beside looking."""


@dataclass
class Track:
    """What one warp did since its last event, and its events."""

    seen: set[int]
    trace: ClusterTrace
    events: list[Event] = field(default_factory=list)
    slots: float = 0.0
    alu: float = 0.0
    port: float = 0.0
    path: float = 0.0
    fresh: int = 0
    pending: dict[int, int] = field(default_factory=dict)  # register slot -> number of the read that fills it
    reads: int = 0
    block: int = 0  # the basic block that runs
    polled: tuple[int, int, int] | None = None
    look: tuple[int, int, int] | None = (
        None  # the last load that may poll: where it stands, address, its event
    )

    def flush(self) -> None:
        """Close the computation since the last event."""
        if self.slots or self.path:
            self.events.append((Op.COMPUTE, self.slots, self.alu, self.port, self.path, self.fresh))
            self.slots = self.alu = self.port = self.path = 0.0
            self.fresh = 0

    def multiply(self, element: str, flops: int) -> None:
        """Append an mma.sync. A few with little between them are one event: a warp waits for none but the first."""
        last = self.events[-1] if self.events else (None,)
        if (
            last[0] is Op.MATRIX
            and last[1] == element
            and last[2] < MERGED * flops
            and self.slots < SLOTS_BETWEEN
        ):
            self.events[-1] = (Op.MATRIX, element, last[2] + flops)
        else:
            self.add(Op.MATRIX, element, flops)

    def add(self, *event: Any) -> None:
        """Append an event after what was computed before it."""
        self.flush()
        self.events.append(event)

    def looks_again(self, pc: int, address: int) -> bool:
        """Whether a load repeats the last look at an address, with nothing but its loop since. Forgets that look if so."""
        if self.look is None or self.look[:2] != (pc, address):
            return False
        position = self.look[2]
        if any(event[0] not in LOOP_OF_LOOKS for event in self.events[position + 1 :]):
            return False
        del self.events[position:]
        self.slots = self.alu = self.port = self.path = 0.0
        return True

    def count(self, pieces: list[Piece], *, stored: bool = False) -> None:
        """Add requested bytes."""
        nbytes = sum(piece[1] for piece in pieces)
        if stored:
            self.trace.stored += nbytes
        else:
            self.trace.loaded += nbytes


class Recorder:
    """Records clusters as a machine runs them. Set as ``Machine.recorder``.

    Attributes:
        with_data: whether copies and products happen as well.  traces: one for every cluster that has ended.
        work: what the clusters of the next launch compute, if those that are alike are to be executed once.
        writes: how often each word of global memory has been written that one thread writes at a time; counted where code
            polls global memory.
    """

    def __init__(self, *, with_data: bool = False):
        """Nothing recorded yet."""
        self.with_data = with_data
        self.work: LaunchWork | None = None
        self.traces: list[ClusterTrace] = []
        self._origins: list[Origin] = []
        self.writes: dict[int, int] = defaultdict(int)

    def begin(self, cluster: "Cluster") -> None:
        """A cluster starts."""
        trace = ClusterTrace(cluster.origin, [])
        for cta in cluster.ctas:
            seen: set[int] = set()
            for warp in cta.warps:
                warp.track = Track(seen, trace)

    def end(self, cluster: "Cluster") -> None:
        """A cluster has ended."""
        trace = cluster.ctas[0].warps[0].track.trace
        for cta in cluster.ctas:
            for warp in cta.warps:
                warp.track.flush()
            trace.warps.append([warp.track.events for warp in cta.warps])
        self.traces.append(trace)

    def take(self, launch: "Launch") -> LaunchTrace:
        """What was recorded of a launch that has ended; it is forgotten here."""
        traces, self.traces = self.traces, []
        self.writes.clear()
        clusters = sorted(traces, key=lambda trace: trace.origin[::-1])
        if self.work is not None:
            clusters, self.work = everyone(clusters, self.work, self._origins), None
        return LaunchTrace(launch.code.entry.name, launch.resident_ctas(1), clusters)

    def executed(self, origins: "list[Origin]") -> "list[Origin]":
        """The clusters that are executed, of those at `origins`."""
        if self.work is None:
            return origins
        if len(origins) != len(self.work.clusters):
            raise EmulatorError(
                f"{len(origins)} clusters are launched, and the work of {len(self.work.clusters)} is known"
            )
        self._origins = origins
        return [origins[number] for number in sorted(set(choose(self.work)))]

    def shares(self, launch: "Launch", origins: "list[Origin]", sm_count: int) -> "list[list[Origin]]":
        """Divide the clusters of a launch that steals work: the first of a list will do the work of all.

        On a GPU whoever is free takes the next cluster. Here they run one after the other, so that the first would take
        everything; they take turns instead.
        """
        if not any(inst.opcode == "clusterlaunchcontrol" for inst in launch.code.insts):
            return [origins]
        width = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        resident = max(1, launch.resident_ctas(sm_count) // width)
        return [origins[first::resident] for first in range(min(resident, len(origins)))]

    # ---- asynchronous operations -------------------------------------------------------------------
    def issue(self, warp: "Warp", engine: Engine, effect: Callable[[], Any]) -> None:
        """An asynchronous operation: record it, and let happen what it does to barriers."""
        cta = warp.cta
        cta.machine.changes += 1
        if engine is Engine.TMEM_STORE:  # its instruction is an event
            effect()
            return
        function, args = _parts(effect)
        note = _EFFECTS.get(function)
        if note is None:
            raise EmulatorError(f"no timing of {getattr(function, '__qualname__', function)}")
        signals = note(self, warp, *args)
        if self.with_data or signals is None:
            effect()
            return
        for owner, offset, nbytes in signals:
            owner.mbarrier(offset).complete_tx(nbytes)

    def issue_store(self, warp: "Warp", read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        """A bulk store."""
        warp.cta.machine.changes += 1
        function, args = _parts(write)
        _EFFECTS[function](self, warp, *args)
        if self.with_data:
            write(read())


def _recorder(warp: "Warp") -> Recorder:
    recorder = warp.cta.machine.recorder
    assert recorder is not None, "code compiled to be recorded on a machine without a recorder"
    return recorder


def _parts(effect: Any) -> tuple[Any, tuple[Any, ...]]:
    return (effect.func, effect.args) if isinstance(effect, partial) else (effect, ())


def _barrier(cta: "Cta", offset: int) -> int:
    return cta.rank << RANK_SHIFT | offset


def _region(m: "TensorMap", coords: tuple[int, ...]) -> list[Piece]:
    """The part of a box inside the tensor, as one piece."""
    address, rows, row_bytes = m.extent(coords)
    if not rows:
        return []
    first = address // SECTOR * SECTOR
    sectors = -(-(address + row_bytes - first) // SECTOR)
    return [(address, rows * sectors * SECTOR)]


# ---- effects: what takes the place of each asynchronous operation ------------------------------------------------
Signals = list[tuple["Cta", int, int]]


def _tile_load(
    r: Recorder, warp: "Warp", cta: "Cta", m: "TensorMap", boxes: Any, targets: Any, offset: int, signals: Any
) -> Signals:
    pieces = [piece for box in boxes for piece in _region(m, box)]
    nbytes = m.transaction_bytes * len(boxes)
    warp.track.count(pieces)
    cta.machine.stats.tma_load_bytes += 0 if r.with_data else m.tile_bytes * len(boxes)
    noted = tuple(_barrier(owner, at) for owner, at in signals)
    ranks = tuple(target.rank for target in targets)
    warp.track.add(Op.LOAD, tuple(pieces), nbytes, noted, ranks, m.address, warp.track.block)
    return [(owner, at, nbytes) for owner, at in signals]


def _tile_prefetch(r: Recorder, warp: "Warp", m: "TensorMap", boxes: Any) -> Signals:
    pieces = [piece for box in boxes for piece in _region(m, box)]
    warp.track.add(Op.PREFETCH, tuple(pieces), m.tile_bytes * len(boxes), m.address)
    return []


def _bulk_load(
    r: Recorder, warp: "Warp", cta: "Cta", src: int, from_shared: bool, nbytes: int, targets: Any, offset: int, signals: Any
) -> Signals:  # fmt: skip
    noted = tuple(_barrier(owner, at) for owner, at in signals)
    if from_shared:
        warp.track.add(Op.EXCHANGE, nbytes, noted)
    else:
        pieces = ((src, nbytes),) if nbytes else ()
        warp.track.count(list(pieces))
        cta.machine.stats.tma_load_bytes += 0 if r.with_data else nbytes
        warp.track.add(Op.LOAD, pieces, nbytes, noted, tuple(t.rank for t in targets), 0, warp.track.block)
    return [(owner, at, nbytes) for owner, at in signals]


def _tile_store(r: Recorder, warp: "Warp", cta: "Cta", m: "TensorMap", boxes: Any, reduce: Any) -> None:
    pieces = [piece for box in boxes for piece in _region(m, box)]
    warp.track.count(pieces, stored=True)
    cta.machine.stats.tma_store_bytes += 0 if r.with_data else m.tile_bytes * len(boxes)
    warp.track.add(Op.STORE, tuple(pieces), m.tile_bytes * len(boxes))


def _bulk_store(
    r: Recorder, warp: "Warp", cta: "Cta", dst: int, nbytes: int, mask: int, reduce: Any, kind: str
) -> None:
    warp.track.count([(dst, nbytes)], stored=True)
    cta.machine.stats.tma_store_bytes += 0 if r.with_data else nbytes
    warp.track.add(Op.STORE, ((dst, nbytes),), nbytes)


def _take_over(r: Recorder, warp: "Warp", asking: "Cta", ctas: Any, where: int, signal: int) -> None:
    warp.track.add(Op.TAKE_OVER, tuple(_barrier(cta, signal) for cta in ctas), RESPONSE_BYTES)


def _async_store(
    r: Recorder,
    warp: "Warp",
    target: "Cta",
    offset: int,
    data: np.ndarray,
    update: Any,
    owner: "Cta",
    at: int,
) -> None:
    warp.track.add(Op.EXCHANGE, data.size, (_barrier(owner, at),))


def _async_global_store(
    r: Recorder, warp: "Warp", cta: "Cta", where: int, data: np.ndarray, update: Any
) -> None:
    warp.track.count([(where, SECTOR)], stored=True)
    warp.track.add(Op.WRITE, ((where // LINE * LINE, SECTOR),))


def _mma(r: Recorder, warp: "Warp", ctas: Any, form: Any, operands: Any) -> Signals:
    desc = decode_instruction_descriptor(
        operands.idesc, form.kind, cta_group=form.cta_group, scale_block=form.scale_block, ws=form.ws
    )
    warp.track.add(Op.MMA, (form.kind, desc.m, desc.n, form.cta_group, form.a_in_tmem))
    return []


def _tensor_copy(
    r: Recorder, warp: "Warp", ctas: Any, name: str, source: Any, address: int, descriptor: int
) -> Signals:
    shape = COPY_SHAPES[name]
    warp.track.add(Op.TENSOR_COPY, shape.rows * shape.row_bytes, len(ctas))
    return []


def _commit(r: Recorder, warp: "Warp", targets: Any, offset: int) -> None:
    warp.track.add(Op.COMMIT_MMA, tuple(_barrier(target, offset) for target in targets))


def _small_copy(
    r: Recorder, warp: "Warp", of: "Warp", dst: Any, src: Any, nbytes: int, lanes: np.ndarray
) -> Signals | None:
    lines = _lines(np.atleast_1d(np.broadcast_to(src, 32)[lanes]).astype(np.int64), nbytes)
    warp.track.count(list(lines))
    warp.track.add(Op.ASYNC_READ, lines)
    return []


def _padded_copy(
    r: Recorder, warp: "Warp", cta: "Cta", offset: int, src: int, nbytes: int, count: int
) -> Signals:
    lines = ((src, SECTOR),) if count else ()
    warp.track.count(list(lines))
    warp.track.add(Op.ASYNC_READ, lines)
    return []


def _small_arrive(r: Recorder, warp: "Warp", cta: "Cta", barrier: Any, counted: bool) -> None:
    warp.track.add(Op.ARRIVE_ASYNC, _barrier(cta, barrier.offset), not counted)


_EFFECTS: dict[Any, Callable[..., Signals | None]] = {
    tma.load_boxes: _tile_load,
    tma.write_boxes: _tile_store,
    tma.fetch_boxes: _tile_prefetch,
    bulk.bulk_in: _bulk_load,
    bulk.bulk_out: _bulk_store,
    cluster_launch.take_over: _take_over,
    async_store.store_shared: _async_store,
    async_store.store_global: _async_global_store,
    bulk.copy_lanes: _small_copy,
    bulk.copy_padded: _padded_copy,
    bulk.arrive_after_copies: _small_arrive,
    tcgen05_mma.execute: _mma,
    tcgen05_copy.copy_matrix: _tensor_copy,
    tcgen05.arrive_all: _commit,
}


# ---- steps: what the recorder puts around instructions -------------------------------------------------------------
Wrapper = Callable[[Inst, Builder, Step], Step]
_WRAPPERS: dict[str, Wrapper] = {}
_STEP_EVENTS = ("tcgen05", "cp", "wgmma", "clusterlaunchcontrol")
"""First words of opcodes whose events come through `Recorder.issue`: their instructions begin basic blocks, too."""


def _wraps(*prefixes: str) -> Callable[[Wrapper], Wrapper]:
    def register(function: Wrapper) -> Wrapper:
        _WRAPPERS.update(dict.fromkeys(prefixes, function))
        return function

    return register


def recorded(inst: Inst, b: Builder, step: Step) -> Step:
    """The step of an instruction, wrapped to record its event if it has one."""
    words = (*inst.opcode.split("."), *inst.mods[inst.opcode.count(".") :])
    for count in range(len(words), 0, -1):
        found = _WRAPPERS.get(".".join(words[:count]))
        if found is not None:
            return found(inst, b, step)
    return step


def is_event(inst: Inst) -> bool:
    """Whether an instruction may record an event."""
    words = (inst.opcode, *inst.mods)
    return words[0] in _STEP_EVENTS or any(".".join(words[:n]) in _WRAPPERS for n in range(1, len(words) + 1))


def prepare(code: "Code") -> None:
    """Have every block of `code` account for its cost, and every use of a loaded register recorded."""
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
    for start, end in zip(code.leaders, ends, strict=True):
        code.steps[start] = _accounting(code.steps[start], start, block_cost(code, start, end))


def _with_moves(code: "Code", slots: frozenset[int]) -> frozenset[int]:
    """The slots, and those that moves copy them to."""
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


def _accounting(step: Step, start: int, cost: Any) -> Step:
    slots, alu, port, path, instructions = cost

    def run(warp: "Warp") -> Any:
        track = warp.track
        track.block = start
        result = step(warp)
        if result is None or result.__class__ is int or result is REGROUP:
            track.slots += slots
            track.alu += alu
            track.port += port
            track.path += path
            if start not in track.seen:
                track.seen.add(start)
                track.fresh += instructions
        return result

    return run


def _using(step: Step, slots: tuple[int, ...], moved: tuple[int, ...]) -> Step:
    """A step that reads registers which loads may still be filling; a move only passes the promise on."""

    def run(warp: "Warp") -> Any:
        pending = warp.track.pending
        if pending:
            number = max((pending.get(slot, -1) for slot in slots), default=-1)
            if number >= 0 and moved:
                pending.update(dict.fromkeys(moved, number))
            elif number >= 0:
                warp.track.add(Op.USE, number)
                for slot in [slot for slot, read in pending.items() if read <= number]:
                    del pending[slot]
        return step(warp)

    return run


def _done(result: Any) -> bool:
    return result is None or result.__class__ is int or result is REGROUP


def _after(note: "Callable[[Warp], None]", step: Step) -> Step:
    """A step that records something once it is done."""

    def run(warp: "Warp") -> Any:
        result = step(warp)
        if _done(result):
            note(warp)
        return result

    return run


def _event(*event: Any) -> Wrapper:
    """A wrapper that records always the same event."""
    return lambda inst, b, step: _after(lambda warp: warp.track.add(*event), step)


def _clear(b: Builder, step: Step) -> Step:
    """Instead of `step`, where data is skipped: its registers become zero."""
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
@_wraps("mbarrier.init")
def _init(inst: Inst, b: Builder, step: Step) -> Step:
    _, space = barriers.mbarrier_mods(inst)
    address, count = b.address(inst.operands[0]), b.read(inst.operands[1], "u32")

    def note(warp: "Warp") -> None:
        for (where, number), _ in barriers.each_operand(warp, address(warp), count(warp)):
            warp.track.add(Op.INIT, _barrier(*barriers.barrier_place(warp, space, where)), number)

    return _after(note, step)


@_wraps("mbarrier.arrive", "mbarrier.arrive_drop")
def _arrive(inst: Inst, b: Builder, step: Step) -> Step:
    mods, space = barriers.mbarrier_mods(inst)
    expect = mods.flag("expect_tx")
    place, *rest = inst.operands[1:] if len(inst.operands) > 1 else inst.operands
    address = b.address(place)
    amount = b.read(rest[0], "u32") if rest else lambda warp: 1
    op = Op.DROP if inst.opcode == "mbarrier.arrive_drop" else Op.ARRIVE

    def run(warp: "Warp") -> Any:
        for (where, number), lanes in barriers.each_operand(warp, address(warp), amount(warp)):
            place = _barrier(*barriers.barrier_place(warp, space, where))
            if expect:
                warp.track.add(Op.TX, place, number * lanes)
            warp.track.add(op, place, lanes if expect else number * lanes)
        return step(warp)

    return run


@_wraps("mbarrier.expect_tx", "mbarrier.complete_tx")
def _transaction(inst: Inst, b: Builder, step: Step) -> Step:
    _, space = barriers.mbarrier_mods(inst)
    address, amount = b.address(inst.operands[0]), b.read(inst.operands[1], "u32")
    sign = 1 if inst.opcode == "mbarrier.expect_tx" else -1

    def run(warp: "Warp") -> Any:
        for (where, number), lanes in barriers.each_operand(warp, address(warp), amount(warp)):
            place = _barrier(*barriers.barrier_place(warp, space, where))
            warp.track.add(Op.TX, place, sign * number * lanes)
        return step(warp)

    return run


@_wraps("mbarrier.test_wait", "mbarrier.try_wait")
def _wait(inst: Inst, b: Builder, step: Step) -> Step:
    """A wait that ends a phase is an event.

    A look that does not block answers no the first time, so that what the kernel does then, its blocking wait, is
    recorded where it stands; a loop of such looks is a wait.
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
            track.add(Op.WAIT, _barrier(cta, offset), barrier.phase)
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
    """A step in two phases that records its event when it begins; what the others do meanwhile comes after."""

    def run(warp: "Warp") -> Any:
        beginning = warp.pending is None
        result = step(warp)
        if beginning and (warp.pending is not None or _done(result)):
            note(warp)
        return result

    return run


@_wraps("bar.sync", "bar.cta.sync", "barrier.sync", "barrier.cta.sync")
def _bar_sync(inst: Inst, b: Builder, step: Step) -> Step:
    return _named(inst, b, step, 0, waits=True)


@_wraps("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red")
def _bar_red(inst: Inst, b: Builder, step: Step) -> Step:
    return _named(inst, b, step, 1, waits=True)


@_wraps("bar.arrive", "bar.cta.arrive", "barrier.arrive", "barrier.cta.arrive")
def _bar_arrive(inst: Inst, b: Builder, step: Step) -> Step:
    return _named(inst, b, step, 0, waits=False)


_wraps("barrier.cluster.arrive")(_event(Op.CLUSTER_ARRIVE))
_wraps("barrier.cluster.wait")(
    lambda inst, b, step: _before_blocking(lambda warp: warp.track.add(Op.CLUSTER_WAIT), step)
)


@_wraps("nanosleep")
def _sleep(inst: Inst, b: Builder, step: Step) -> Step:
    time = b.read(inst.operands[0], "u32")
    note = lambda warp: warp.track.add(Op.SLEEP, int(lane_value(time(warp), warp.first_lane())))
    return _after(note, step)


# ---- copies ----------------------------------------------------------------------------------------------------------
_wraps("cp.async.bulk.commit_group")(_event(Op.COMMIT_STORES))
_wraps("cp.async.commit_group")(_event(Op.COMMIT_ASYNC))


@_wraps("prefetch.tensormap")
def _prefetch_map(inst: Inst, b: Builder, step: Step) -> Step:
    address = b.address(inst.operands[0])

    def run(warp: "Warp") -> Any:
        where = address(warp)
        maps = {tma.load_map(warp.cta, lane_value(where, lane)).address for lane in warp.active_lanes()}
        warp.track.add(Op.PREFETCH_MAP, tuple(sorted(maps)))
        return step(warp)

    return run


@_wraps("cp.async.bulk.wait_group", "cp.async.wait_group", "cp.async.wait_all")
def _wait_copies(inst: Inst, b: Builder, step: Step) -> Step:
    pending = b.imm(inst.operands[0]) if inst.operands else 0
    if inst.opcode.startswith("cp.async.bulk"):
        return _event(Op.WAIT_STORES, pending, "read" in inst.mods)(inst, b, step)
    if inst.opcode.endswith("wait_all"):
        return _event(Op.COMMIT_ASYNC)(inst, b, _event(Op.WAIT_ASYNC, 0)(inst, b, step))
    return _event(Op.WAIT_ASYNC, pending)(inst, b, step)


# ---- tensor memory and matrix instructions ------------------------------------------------------------------------
def _columns(inst: Inst) -> int:
    """32-bit words a lane that a tcgen05.ld or .st moves."""
    shape = next(word for word in inst.mods if word in LOAD_SHAPES)
    repeat = next(int(word[1:]) for word in inst.mods if word[0] == "x" and word[1:].isdigit())
    return LOAD_SHAPES[shape].registers * repeat


@_wraps("tcgen05.ld")
def _tensor_load(inst: Inst, b: Builder, step: Step) -> Step:
    return _event(Op.TENSOR_LOAD, _columns(inst))(inst, b, _clear(b, step))


@_wraps("tcgen05.st")
def _tensor_store(inst: Inst, b: Builder, step: Step) -> Step:
    return _event(Op.TENSOR_STORE, _columns(inst))(inst, b, _clear(b, step))


_wraps("tcgen05.wait::ld")(_event(Op.WAIT_TENSOR_LOAD))
_wraps("tcgen05.wait::st")(_event(Op.WAIT_TENSOR_STORE))
_wraps("tcgen05.alloc")(_event(Op.ALLOCATE))


@_wraps("wgmma.mma_async")
def _wgmma(inst: Inst, b: Builder, step: Step) -> Step:
    in_registers = isinstance(inst.operands[1], Vector)
    form = wgmma.parse_form(inst, b, in_registers)
    return _event(Op.WGMMA, (form.a, form.n, in_registers))(inst, b, _clear(b, step))


_wraps("wgmma.commit_group")(_event(Op.COMMIT_WGMMA))


@_wraps("wgmma.wait_group")
def _wait_wgmma(inst: Inst, b: Builder, step: Step) -> Step:
    return _event(Op.WAIT_WGMMA, b.imm(inst.operands[0]))(inst, b, step)


@_wraps("mma")
def _mma_sync(inst: Inst, b: Builder, step: Step) -> Step:
    form = mma_sync.parse_form(inst)
    flops = 2 * 16 * 8 * form.k
    return _after(lambda warp: warp.track.multiply(form.a, flops), _clear(b, step))


@_wraps("ldmatrix")
def _matrix_load(inst: Inst, b: Builder, step: Step) -> Step:
    return _clear(b, step)


# ---- global memory -------------------------------------------------------------------------------------------------
def _may_read_global(inst: Inst) -> bool:
    shared = any(word.startswith(("shared", "param", "local", "const")) for word in inst.mods)
    return inst.opcode in ("ld", "ldu", "atom") and not shared


def _may_poll(inst: Inst) -> bool:
    """Whether a warp may wait in a loop of such loads for what others write: of one word, and not shared memory."""
    one = not any(word.startswith(("shared", "v2", "v4", "v8")) for word in inst.mods)
    return inst.opcode == "ld" and one and any(word in POLLING for word in inst.mods)


def _lines(addresses: np.ndarray, nbytes: int) -> tuple[Piece, ...]:
    """(address, bytes) of each cache line that an access touches: of its first sector there, and of all of them."""
    sectors = addresses // SECTOR
    if nbytes > SECTOR:
        sectors = np.concatenate([sectors + i for i in range(nbytes // SECTOR)])
    sectors = np.unique(sectors)
    _, first, counts = np.unique(sectors // (LINE // SECTOR), return_index=True, return_counts=True)
    return tuple(
        (sector * SECTOR, count * SECTOR)
        for sector, count in zip(sectors[first].tolist(), counts.tolist(), strict=True)
    )


def _global_lines(warp: "Warp", space: str, where: Any, nbytes: int) -> tuple[Piece, ...] | None:
    """Lines of an access of the active lanes; None if it is not global memory."""
    if where.__class__ is not np.ndarray:
        if space == "generic" and generic_space(where) != "global":
            return None
        return ((where // SECTOR * SECTOR, SECTOR * max(1, nbytes // SECTOR)),)
    active = where[warp.active].astype(np.int64)
    if space == "generic" and generic_space(int(active[0])) != "global":
        return None
    return _lines(active, nbytes)


@_wraps("ld", "ldu", "st", "atom", "red")
def _access(inst: Inst, b: Builder, step: Step) -> Step:
    mods, space, _ = memory_mods(inst)
    if space not in ("global", "generic"):
        return step
    types = mods.types()
    width = int((mods.one_of("v2", "v4", "v8") or "v1")[1:])
    nbytes = type_bytes(types[-1]) * width if types else 4
    reads = inst.opcode in ("ld", "ldu", "atom")
    address = b.address(inst.operands[1 if reads else 0])
    slots = tuple(b.writes) if reads else ()
    may_poll = _may_poll(inst)
    may_signal = inst.opcode in ("st", "atom", "red") and width == 1 and types[-1:] and types[-1][0] in "usb"
    releases = "release" in inst.mods or "acq_rel" in inst.mods
    pc = b.pc

    def run(warp: "Warp") -> Any:
        where = address(warp)
        lines = _global_lines(warp, space, where, nbytes)
        result = step(warp)
        if lines is None:
            return result
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
            track.add(Op.ATOMIC if inst.opcode == "atom" else Op.READ, track.reads, lines)
            track.pending.update(dict.fromkeys(slots, track.reads))
        else:
            track.add(Op.WRITE, lines)
        return result

    return run


def _signalled(warp: "Warp", where: Any) -> tuple[int, ...]:
    """The words that an instruction writes, if it writes one."""
    if where.__class__ is not np.ndarray:
        return (where,)
    return (int(where[warp.first_lane()]),) if warp.num_active == 1 else ()


@_wraps(
    *(
        f"{fence}.{scope}"
        for fence in ("fence.acq_rel", "fence.sc", "membar")
        for scope in ("gpu", "gl", "sys")
    )
)
def _fence(inst: Inst, b: Builder, step: Step) -> Step:
    """A fence of the whole GPU waits for what the warp's CTA has written: of interest where somebody polls."""
    return _after(lambda warp: warp.track.add(Op.FENCE) if warp.code.polls else None, step)
