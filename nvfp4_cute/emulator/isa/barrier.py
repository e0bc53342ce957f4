"""Barriers: named CTA barriers, the cluster barrier, and mbarrier objects (PTX ISA 9.7.13)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.addresses import OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW
from nvfp4_cute.emulator.faults import AlignmentFault
from nvfp4_cute.emulator.isa import Builder, Mods, Step, handler, lane_value
from nvfp4_cute.emulator.isa.arith import put_step
from nvfp4_cute.emulator.isa.spaces import generic_space
from nvfp4_cute.emulator.isa.warp import converge, uniform
from nvfp4_cute.emulator.lanes import Condition
from nvfp4_cute.emulator.memory import MAX_COUNT, Mbarrier
from nvfp4_cute.emulator.ptx import Inst, Operand, Sink
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.lanes import Wait
    from nvfp4_cute.emulator.state import Cta, Warp

NAMED_BARRIERS = 16

# ---- named barriers -------------------------------------------------------------------------------


class NamedBarrier:
    """One of the 16 barriers of a CTA. Counts warps like the hardware: an arrival is 32 threads."""

    def __init__(self, cta: "Cta", number: int):
        """Makes barrier `number` without arrivals."""
        self.cta, self.number = cta, number
        self.generation = 0
        self.arrived: list[int] = []
        self.expected: int | None = None
        self.votes: list[np.ndarray] = []
        self.result: list[np.ndarray] = []

    def arrive(self, warp: "Warp", threads: int | None) -> int:
        """Counts one warp. Returns the generation that it belongs to."""
        if threads is not None and (threads % 32 or threads <= 0):
            raise EmulatorError(
                f"barrier {self.number}: thread count {threads} is not a positive multiple of 32"
            )
        if self.arrived and threads != self.expected:
            raise EmulatorError(
                f"barrier {self.number}: warp {warp.idx} expects {threads or 'all'} threads, "
                f"warps {self.arrived} expect {self.expected or 'all'}"
            )
        self.expected = threads
        self.arrived.append(warp.idx)
        generation = self.generation
        self.complete()
        return generation

    def complete(self) -> None:
        """Starts the next generation if all warps have arrived; exited warps count for a barrier of all threads."""
        needed = self.cta.live_warps if self.expected is None else self.expected // 32
        if self.arrived and len(self.arrived) >= needed:
            self.generation += 1
            self.arrived = []
            self.result, self.votes = self.votes, []
            self.cta.machine.changes += 1

    def wait(self, generation: int) -> Condition:
        """Returns a wait for the end of a generation."""

        def passed() -> bool:
            if self.generation == generation:
                self.complete()
            return self.generation != generation

        def text() -> str:
            needed = self.cta.live_warps if self.expected is None else self.expected // 32
            return (
                f"barrier {self.number}: {len(self.arrived)} of {needed} warps arrived (warps {self.arrived})"
            )

        return Condition(passed, text)


def _named(cta: "Cta", number: int) -> NamedBarrier:
    if not 0 <= number < NAMED_BARRIERS:
        raise EmulatorError(f"barrier {number} does not exist: a CTA has {NAMED_BARRIERS}")
    if number not in cta.named_barriers:
        cta.named_barriers[number] = NamedBarrier(cta, number)
    return cta.named_barriers[number]


def _number_and_count(
    b: Builder, operands: tuple[Operand, ...]
) -> "tuple[Callable[[Warp], int], Callable[[Warp], int | None]]":
    number = uniform(b.read(operands[0], "u32"), "barrier number")
    count = (
        uniform(b.read(operands[1], "u32"), "barrier thread count")
        if len(operands) > 1
        else lambda warp: None
    )
    return number, count


def two_phase(begin: "Callable[[Warp], Wait]", finish: "Callable[[Warp], None] | None" = None) -> Step:
    """Returns a blocking step: `begin` acts once and returns a wait, `finish` runs after it."""

    def step(warp: "Warp") -> "Wait | None":
        wait = warp.pending
        if wait is None:
            missing = converge(warp)
            if missing is not None:
                return missing
            wait = warp.pending = begin(warp)
        if not wait.ready():
            return wait
        warp.pending = None
        if finish is not None:
            finish(warp)
        return None

    return step


@handler("bar.sync", "bar.cta.sync", "barrier.sync", "barrier.cta.sync")
def barrier_sync(inst: Inst, b: Builder) -> Step:
    """bar.sync id{, threads}: arrive and wait."""
    mods = Mods(inst)
    mods.drop("aligned")
    mods.done()
    number, count = _number_and_count(b, inst.operands)

    def begin(warp: "Warp") -> "Wait":
        barrier = _named(warp.cta, number(warp))
        return barrier.wait(barrier.arrive(warp, count(warp)))

    return two_phase(begin)


@handler("bar.arrive", "bar.cta.arrive", "barrier.arrive", "barrier.cta.arrive")
def barrier_arrive(inst: Inst, b: Builder) -> Step:
    """bar.arrive id, threads: arrive without waiting."""
    mods = Mods(inst)
    mods.drop("aligned")
    mods.done()
    number, count = _number_and_count(b, inst.operands)

    def step(warp: "Warp") -> "Wait | None":
        missing = converge(warp)
        if missing is None:
            _named(warp.cta, number(warp)).arrive(warp, count(warp))
        return missing

    return step


@handler("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red")
def barrier_reduce(inst: Inst, b: Builder) -> Step:
    """bar.red.{popc.u32, and.pred, or.pred} d, id{, threads}, p: bar.sync that combines a predicate."""
    mods = Mods(inst)
    mods.drop("aligned")
    operation = mods.one_of("popc", "and", "or")
    type_ = mods.type()
    mods.done()
    put = b.write(inst.operands[0], type_)
    number, count = _number_and_count(b, inst.operands[1:-1])
    predicate = b.read(inst.operands[-1], "pred")
    combine: dict[str | None, Callable[[np.ndarray], int]] = {
        "popc": lambda votes: int(votes.sum()),
        "and": lambda votes: bool(votes.all()),
        "or": lambda votes: bool(votes.any()),
    }

    def begin(warp: "Warp") -> "Wait":
        barrier = _named(warp.cta, number(warp))
        barrier.votes.append(np.broadcast_to(predicate(warp), 32)[warp.active])
        return barrier.wait(barrier.arrive(warp, count(warp)))

    def finish(warp: "Warp") -> None:
        put(warp, combine[operation](np.concatenate(_named(warp.cta, number(warp)).result)))

    return two_phase(begin, finish)


# ---- the cluster barrier --------------------------------------------------------------------------


@handler("barrier.cluster.arrive")
def cluster_arrive(inst: Inst, b: Builder) -> Step:
    """barrier.cluster.arrive: one arrival per warp and phase."""
    mods = Mods(inst)
    mods.drop("release", "relaxed", "aligned")
    mods.done()

    def step(warp: "Warp") -> "Wait | None":
        missing = converge(warp)
        if missing is None:
            warp.cta.cluster.arrive(warp)
        return missing

    return step


@handler("barrier.cluster.wait")
def cluster_wait(inst: Inst, b: Builder) -> Step:
    """barrier.cluster.wait: blocks until all live warps of the cluster have arrived."""
    mods = Mods(inst)
    mods.drop("acquire", "aligned")
    mods.done()
    return two_phase(lambda warp: warp.cta.cluster.wait(warp))


# ---- mbarrier -------------------------------------------------------------------------------------

ORDERING = ("release", "acquire", "relaxed", "cta", "cluster", "gpu", "sys")


def barrier_place(warp: "Warp", space: str, address: int) -> "tuple[Cta, int]":
    """Returns CTA and offset of an mbarrier address in any space that may hold one.

    Raises:
        EmulatorError: the address is misaligned, not in shared memory, or in another CTA if only the own one is
            allowed.
    """
    if space == "generic":
        if generic_space(address) != "shared::cluster":
            raise EmulatorError(f"mbarrier at generic address {address:#x}, which is not shared memory")
        address -= SHARED_WINDOW
        space = "shared::cluster"
    if address & 7:
        raise AlignmentFault(f"mbarrier address {address:#x} is not a multiple of 8")
    if space == "shared::cluster":
        cta, offset = warp.cta.cluster.resolve(address)
    else:
        cta, offset = warp.cta, address & OFFSET_MASK
        if address >> RANK_SHIFT != cta.rank:
            raise EmulatorError(
                f"mbarrier address {address:#x} is not in the shared memory of this CTA (rank {cta.rank})"
            )
    cta.smem.check(offset, 8)
    return cta, offset


def mbarrier_mods(inst: Inst) -> tuple[Mods, str]:
    """Consumes the ordering and the space. Returns (remaining modifiers, space)."""
    mods = Mods(inst)
    space = mods.one_of("shared::cluster", "shared::cta", "shared", default="generic") or "generic"
    mods.drop("b64", *ORDERING)
    return mods, space


def each_operand(warp: "Warp", *values: Any) -> list[tuple[tuple[int, ...], int]]:
    """Returns the distinct operand tuples of the active lanes, each with its number of lanes."""
    if all(v.__class__ is not np.ndarray for v in values):
        return [(values, warp.num_active)]
    return [(tuple(int(lane_value(v, lane)) for v in values), 1) for lane in warp.active_lanes()]


@handler("mbarrier.init")
def mbarrier_init(inst: Inst, b: Builder) -> Step:
    """mbarrier.init [a], count."""
    mods, space = mbarrier_mods(inst)
    mods.done()
    address, count = b.address(inst.operands[0]), b.read(inst.operands[1], "u32")

    def step(warp: "Warp") -> None:
        for (where, expected), _ in each_operand(warp, address(warp), count(warp)):
            cta, offset = barrier_place(warp, space, where)
            cta.smem.barriers[offset] = Mbarrier(offset, expected)
            cta.machine.changes += 1

    return step


@handler("mbarrier.inval")
def mbarrier_inval(inst: Inst, b: Builder) -> Step:
    """mbarrier.inval [a]: the storage may be reused."""
    mods, space = mbarrier_mods(inst)
    mods.done()
    address = b.address(inst.operands[0])

    def step(warp: "Warp") -> None:
        for (where,), _ in each_operand(warp, address(warp)):
            cta, offset = barrier_place(warp, space, where)
            cta.mbarrier(offset)
            del cta.smem.barriers[offset]

    return step


@handler("mbarrier.arrive", "mbarrier.arrive_drop")
def mbarrier_arrive(inst: Inst, b: Builder) -> Step:
    """mbarrier.arrive{_drop}{.expect_tx}{.noComplete} state, [a]{, count or bytes}."""
    mods, space = mbarrier_mods(inst)
    expect = mods.flag("expect_tx")
    mods.drop("noComplete")
    mods.done()
    dest, place, *rest = inst.operands if len(inst.operands) > 1 else (Sink(), *inst.operands)
    put = b.write(dest, "b64")
    address = b.address(place)
    amount = b.read(rest[0], "u32") if rest else lambda warp: 1
    drop = inst.opcode == "mbarrier.arrive_drop"

    def step(warp: "Warp") -> None:
        token = 0
        for (where, number), lanes in each_operand(warp, address(warp), amount(warp)):
            cta, offset = barrier_place(warp, space, where)
            barrier = cta.mbarrier(offset)
            token = barrier.state()
            if expect:
                barrier.expect_tx(number * lanes)
            count = lanes if expect else number * lanes
            if drop:
                barrier.arrive_drop(count)
            else:
                barrier.arrive(count)
        put(warp, token)

    return step


@handler("mbarrier.expect_tx", "mbarrier.complete_tx")
def mbarrier_tx(inst: Inst, b: Builder) -> Step:
    """mbarrier.expect_tx / complete_tx [a], bytes."""
    mods, space = mbarrier_mods(inst)
    mods.done()
    address, amount = b.address(inst.operands[0]), b.read(inst.operands[1], "u32")
    expect = inst.opcode == "mbarrier.expect_tx"

    def step(warp: "Warp") -> None:
        for (where, number), lanes in each_operand(warp, address(warp), amount(warp)):
            cta, offset = barrier_place(warp, space, where)
            barrier = cta.mbarrier(offset)
            if expect:
                barrier.expect_tx(number * lanes)
            else:
                barrier.complete_tx(number * lanes)

    return step


@dataclass
class MbarrierWait:
    """A warp's wait for a phase of an mbarrier to complete."""

    warp: "Warp"
    barrier: Mbarrier
    token: int
    by_parity: bool

    def ready(self) -> bool:
        """True when the phase has completed."""
        return self.barrier.test_parity(self.token) if self.by_parity else self.barrier.test_state(self.token)

    def describe(self) -> str:
        """Returns the barrier, the awaited phase, and what is missing."""
        kind = "parity" if self.by_parity else "state"
        barrier, notes = self.barrier, ""
        if self.by_parity and barrier.phase:
            notes += (
                f"; phase {barrier.phase - 1} is complete, this waits for the end of phase {barrier.phase}"
            )
            found = barrier.found.get(self.warp, 0)
            if barrier.phase > found + 1:
                notes += (
                    f"; the warp has found {found} of the {barrier.phase} complete phases: the barrier passed on twice "
                    "before it looked, and nothing makes the others wait"
                )
        if barrier.tx and not barrier.pending:
            notes += (
                "; more bytes are expected than copied"
                if barrier.tx > 0
                else "; more bytes were copied than expected"
            )
        return f"mbarrier smem+{barrier.offset:#x} {kind} {self.token} ({barrier.describe()}){notes}"


@handler("mbarrier.test_wait", "mbarrier.try_wait")
def mbarrier_wait(inst: Inst, b: Builder) -> Step:
    """mbarrier.{test,try}_wait{.parity} p, [a], token{, suspend time}.

    A try_wait with a suspend time blocks until the phase completes (the hint is the longest time that a kernel
    accepts). A try_wait without one, and a test_wait, answer at once.
    """
    mods, space = mbarrier_mods(inst)
    parity = mods.flag("parity")
    mods.done()
    put = b.write(inst.operands[0], "pred")
    address = b.address(inst.operands[1])
    token = b.read(inst.operands[2], "u32" if parity else "b64")
    blocking = inst.opcode == "mbarrier.try_wait" and len(inst.operands) > 3

    def look(warp: "Warp", where: int, value: int) -> tuple[MbarrierWait, bool]:
        cta, offset = barrier_place(warp, space, where)
        barrier = cta.smem.barriers.get(offset) or cta.mbarrier(offset)
        wait = MbarrierWait(warp, barrier, value, parity)
        ready = wait.ready()
        if ready and barrier.phase and barrier.found_by(warp) and parity and cta.machine.immediate:
            warp.gives_way = True
        return wait, ready

    def step(warp: "Warp") -> "Wait | None":
        where, value = address(warp), token(warp)
        if where.__class__ is int and value.__class__ is int:
            wait, done = look(warp, where, value)
            answer: Any = done
        else:
            answer = np.zeros(32, bool)
            for lane in warp.active_lanes():
                wait, answer[lane] = look(warp, int(lane_value(where, lane)), int(lane_value(value, lane)))
            done = bool(answer[warp.active].any())
        if not done:
            if blocking:
                return wait
            warp.polled = True
        put(warp, answer)
        return None

    return step


@handler("mbarrier.pending_count")
def mbarrier_pending_count(inst: Inst, b: Builder) -> Step:
    """mbarrier.pending_count.b64 count, state: the arrivals that were pending at the token's creation."""
    mods = Mods(inst)
    mods.drop("b64")
    mods.done()
    token = b.read(inst.operands[1], "b64")
    return put_step(b, inst.operands[0], lambda warp: token(warp) & MAX_COUNT, "u32")
