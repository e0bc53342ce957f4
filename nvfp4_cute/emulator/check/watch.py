"""Steps of a checked machine: wraps each synchronous instruction that the hazard checker must know of.

Asynchronous operations report where they happen, in the module of their family; waits for them report from `modes`.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.addresses import OFFSET_MASK, RANK_SHIFT
from nvfp4_cute.emulator.check.clocks import NOBODY
from nvfp4_cute.emulator.check.hazards import Checker, checker_of
from nvfp4_cute.emulator.check.shadow import Actor, TensorShadow
from nvfp4_cute.emulator.isa import Builder, Reader, Step, Wrappers, lane_value, type_bytes
from nvfp4_cute.emulator.isa.barrier import barrier_place, mbarrier_mods
from nvfp4_cute.emulator.isa.issue import cta_pair
from nvfp4_cute.emulator.isa.memory import memory_mods
from nvfp4_cute.emulator.isa.spaces import SPACES, generic_space
from nvfp4_cute.emulator.isa.warp import SHUFFLES, source_lanes
from nvfp4_cute.emulator.lanes import LANE_IDS, LANES, NOTHING
from nvfp4_cute.emulator.places import LanePlaces, granules, lane_places
from nvfp4_cute.emulator.ptx import Inst
from nvfp4_cute.emulator.tensormap import DESCRIPTOR_BYTES

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Cta, Warp

WATCHERS = Wrappers()

STRONG = {"acquire", "release", "relaxed", "acq_rel", "volatile", "mmio"}
FENCES = {"acq_rel", "sc", "acquire", "release", "cta", "cluster", "gpu", "sys"}
"""First words of fences that order memory; without semantics they are .acq_rel."""


# ---- loads and stores ------------------------------------------------------------------------------------------------
def _lanes(warp: "Warp", where: Any) -> np.ndarray:
    """Returns the addresses of the active lanes, int64; one if they agree."""
    if where.__class__ is not np.ndarray:
        return np.array([where], np.int64)
    return (where if warp.all_active else where[warp.active]).astype(np.int64)


def _access(
    warp: "Warp",
    pc: int,
    space: str,
    where: Any,
    nbytes: int,
    *,
    write: bool,
    atomic: bool = False,
    reads: bool = False,
    targets: frozenset[int] = NOTHING,
) -> None:
    """Reports a generic access of the active lanes.

    atomic: it is an atomic, or a strong store.
    reads: the stored value depends on the old one.
    targets: register slots that a load writes.
    """
    checker, addresses = checker_of(warp), _lanes(warp, where)
    if space == "generic":
        space = generic_space(int(addresses[0]))
        addresses = addresses - SPACES[space].window
    actor = checker.warp_actor(warp, pc)
    actor.lanes = warp.lanes
    if atomic:
        actor.site = checker.site(warp, pc, atomic=True)
    if space == "global":
        checker.globals.access(addresses, nbytes, actor, write=write, atomic=atomic)
    elif space.startswith("shared"):
        places = lane_places(addresses, nbytes)
        if atomic:
            _shared_atomic(checker, warp, places, actor, reads=reads)
            return
        checker.warp_order.access(warp, actor.site, addresses, nbytes, places, write=write)
        if write:
            checker.lane_order.stored(warp, actor.lanes)
        _shared_access(checker, warp, places, actor, write, targets)


def _shared_access(
    checker: "Checker",
    warp: "Warp",
    places: LanePlaces,
    actor: Actor,
    write: bool,
    targets: frozenset[int],
) -> None:
    if not write:
        actor = checker.early_releases.loaded(warp, actor, targets)
    for rank, place in places:
        cta, writers = warp.cta.cluster.ctas[rank], None
        if not write:
            checker.silicon.loads(cta, place[1])
            writers = checker.shared[cta].writers_of(place[0])
            if writers == [NOBODY]:
                checker.unwritten_load(cta, place, actor)
        checker.access_shared(cta, place, actor, write=write, writers=writers)
        _remote_access(checker, warp, cta, actor)


def _shared_atomic(
    checker: "Checker", warp: "Warp", places: LanePlaces, actor: Actor, *, reads: bool
) -> None:
    for rank, place in places:
        cta = warp.cta.cluster.ctas[rank]
        checker.access_atomically(cta, place, actor, reads=reads)
        _remote_access(checker, warp, cta, actor)


def _remote_access(checker: "Checker", warp: "Warp", cta: "Cta", actor: Actor) -> None:
    if cta is not warp.cta:
        checker.touch(cta, actor)
        checker.silicon.remote_access(warp, checker.sites[actor.site], cta)


def _keys(warp: "Warp", space: str, addresses: np.ndarray) -> list[Any]:
    """Returns the checker's keys for the places of a strong access."""
    unique = np.unique(addresses).tolist()
    if space == "global":
        return unique
    return [(warp.cta.cluster.ctas[a >> RANK_SHIFT], a & OFFSET_MASK) for a in unique]


@WATCHERS.register("ld", "ldu", "st")
def _load_or_store(inst: Inst, b: Builder, step: Step) -> Step:
    mods, space, _ = memory_mods(inst)
    if space in ("param", "param::entry", "local", "const"):
        return step
    write, pc = inst.opcode == "st", b.pc
    nbytes = type_bytes(mods.type()) * int((mods.one_of("v2", "v4", "v8") or "v1")[1:])
    address = b.address(inst.operands[0 if write else 1])
    strong = not STRONG.isdisjoint(inst.mods)
    relaxed = ("release" if write else "acquire") not in inst.mods
    constant = "nc" in inst.mods
    targets = frozenset(b.writes)

    if write and not strong:

        def store(warp: "Warp") -> Any:
            def check() -> None:
                with suppress(IndexError):  # outside shared memory, or not in a CTA: the step reports it
                    _access(warp, pc, space, address(warp), nbytes, write=True)

            return checker_of(warp).judged(check, lambda: step(warp))

        return store

    def run(warp: "Warp") -> Any:
        where = address(warp)  # the value may be written to the address register
        result = step(warp)
        if strong:  # a strong access that others wait for does not race; it orders
            space_, addresses = _resolved(warp, space, where)
            keys = _keys(warp, space_, addresses)
            races = checker_of(warp).globals
            if write:  # a reader of the value may overwrite it: the store precedes what it announces
                _access(warp, pc, space, where, nbytes, write=True, atomic=True)
            (races.release if write else races.acquire)(warp, keys, relaxed=relaxed)
        else:
            _access(warp, pc, space, where, nbytes, write=False, targets=targets)
            if constant:
                checker, (_, addresses) = checker_of(warp), _resolved(warp, space, where)
                checker.globals.constant(addresses, nbytes, checker.site(warp, pc))
        return result

    return run


def _resolved(warp: "Warp", space: str, where: Any) -> tuple[str, np.ndarray]:
    addresses = _lanes(warp, where)
    if space == "generic":
        space = generic_space(int(addresses[0]))
        addresses = addresses - SPACES[space].window
    return space, addresses


@WATCHERS.register("st.async", "red.async", "st.bulk")
def _reports_itself(inst: Inst, b: Builder, step: Step) -> Step:
    return step


@WATCHERS.register("atom", "red")
def _atomic(inst: Inst, b: Builder, step: Step) -> Step:
    mods, space, _ = memory_mods(inst)
    nbytes = type_bytes(mods.type()) * int((mods.one_of("v2", "v4", "v8") or "v1")[1:])
    address, pc = b.address(inst.operands[inst.opcode == "atom"]), b.pc
    acquires, releases = {"acquire", "acq_rel"}, {"release", "acq_rel"}
    results, reads = frozenset(b.writes), "exch" not in inst.mods

    def run(warp: "Warp") -> Any:
        where = address(warp)  # the result may be written to the address register
        result = step(warp)
        space_, addresses = _resolved(warp, space, where)
        keys = _keys(warp, space_, addresses)
        races = checker_of(warp).globals
        if space_ != "global":
            _access(warp, pc, space, where, nbytes, write=True, atomic=True, reads=reads)
        if space_ == "global" or warp.code.uses(results):  # an unused value announces nothing
            races.acquire(warp, keys, relaxed=acquires.isdisjoint(inst.mods))
        if space_ == "global":
            _access(warp, pc, space, where, nbytes, write=True, atomic=True)
        races.release(warp, keys, relaxed=releases.isdisjoint(inst.mods))
        return result

    return run


@WATCHERS.register("ldmatrix", "stmatrix")
def _matrix(inst: Inst, b: Builder, step: Step) -> Step:
    write, pc = inst.opcode.startswith("stmatrix"), b.pc
    address = b.address(inst.operands[0 if write else 1])
    words = (*inst.opcode.split("."), *inst.mods)
    count = int(next((w[1:] for w in words if w in ("x1", "x2", "x4")), "1"))
    rows = (16 if "m16n16" in words else 8) * count
    targets = frozenset(b.writes)

    def run(warp: "Warp") -> Any:
        where = address(warp)
        result = step(warp)
        if result is None:
            # Forms without .shared take a generic address, or, from older compilers, 32 bits of a shared address.
            addresses = _lanes(warp, where)[:rows] & 0xFFFF_FFFF
            checker = checker_of(warp)
            checker.warp_order.met(warp)
            actor = checker.warp_actor(warp, pc)
            _shared_access(checker, warp, lane_places(addresses, 16), actor, write, targets)
        return result

    return run


# ---- fences and barriers -----------------------------------------------------------------------------------------------
@WATCHERS.register("fence")
def _fence(inst: Inst, b: Builder, step: Step) -> Step:
    words = inst.mods
    proxy = words[:2] == ("proxy", "async") or any(w.startswith("async") for w in words)
    if words[:2] == ("proxy", "tensormap::generic"):
        return _tensor_map_fence(inst, b, step)
    barriers = proxy or "mbarrier_init" in words or "cluster" in words or "gpu" in words or "sys" in words
    shared, global_ = any("shared" in word for word in words), "global" in words
    restricted = words[0] in FENCES and any("sync_restrict" in word for word in words)
    ordering = words[0] in FENCES and not any("restrict" in word for word in words)

    def run(warp: "Warp") -> Any:
        checker = checker_of(warp)
        if proxy or ordering:
            checker.early_releases.fenced(warp)
        if ordering:
            _order(checker, warp, wide="cta" not in words)
        elif restricted:  # restricted to shared memory: the checker's clocks do not distinguish spaces
            if "acquire" in words:
                checker.clock(warp).acquire_relaxed()
            else:
                checker.clock(warp).fence_memory(wide=True)
        if barriers:
            checker.mbarriers.fence(warp)
        if proxy and not global_:
            checker.clock(warp).fence()
        if proxy and not shared:
            checker.globals.proxy_fence(warp)
        return step(warp)

    return run if barriers or ordering or restricted else step


def _order(checker: Checker, warp: "Warp", *, wide: bool) -> None:
    """Orders memory by a fence. `wide`: of more than CTA scope."""
    if wide:
        checker.globals.fence(warp)
    checker.clock(warp).fence_memory(wide=wide)


def _tensor_map_fence(inst: Inst, b: Builder, step: Step) -> Step:
    address = b.address(inst.operands[0]) if "acquire" in inst.mods else lambda warp: None

    def run(warp: "Warp") -> Any:
        where = address(warp)
        for one in np.unique(_lanes(warp, where)).tolist() if where is not None else [None]:
            checker_of(warp).tensor_maps.fenced(warp, one)
        return step(warp)

    return run


@WATCHERS.register("tensormap.replace")
def _edit_map(inst: Inst, b: Builder, step: Step) -> Step:
    address, pc = b.address(inst.operands[0]), b.pc
    space = next((mod for mod in inst.mods if mod in ("global", "shared::cta")), "generic")

    def run(warp: "Warp") -> Any:
        checker = checker_of(warp)
        space_, addresses = _resolved(warp, space, address(warp))
        maps = np.unique(addresses).tolist()

        def check() -> None:
            for one in maps:
                if space_ == "global":
                    checker.tensor_maps.edited(warp, pc, one, released=False)
                else:
                    _access(warp, pc, space_, one, DESCRIPTOR_BYTES, write=True)

        return checker.judged(check, lambda: step(warp))

    return run


@WATCHERS.register("tensormap.cp_fenceproxy")
def _publish_map(inst: Inst, b: Builder, step: Step) -> Step:
    target, source, pc = b.address(inst.operands[0]), b.address(inst.operands[1]), b.pc

    def run(warp: "Warp") -> Any:
        lane = warp.first_lane()
        where = [int(lane_value(read(warp), lane)) for read in (target, source)]
        result = step(warp)
        if result is None:
            checker_of(warp).warp_order.met(warp)
            _access(warp, pc, "shared::cta", where[1], DESCRIPTOR_BYTES, write=False)
            checker_of(warp).tensor_maps.edited(warp, pc, where[0], released=True)
        return result

    return run


@WATCHERS.register("tcgen05.fence::after_thread_sync")
def _after_sync(inst: Inst, b: Builder, step: Step) -> Step:
    def run(warp: "Warp") -> Any:
        checker_of(warp).clock(warp).acquire_relaxed()
        return step(warp)

    return run


@WATCHERS.register("griddepcontrol")
def _grid_dependency(inst: Inst, b: Builder, step: Step) -> Step:
    waits = "wait" in inst.mods

    def run(warp: "Warp") -> Any:
        dependencies = checker_of(warp).dependencies
        (dependencies.wait if waits else dependencies.trigger)(warp)
        return step(warp)

    return run


@WATCHERS.register("membar")
def _membar(inst: Inst, b: Builder, step: Step) -> Step:
    def run(warp: "Warp") -> Any:
        _order(checker_of(warp), warp, wide="cta" not in inst.mods)
        return step(warp)

    return _fencing(run)


def _fencing(step: Step) -> Step:
    """Returns a step that begins with a fence, which completes the warp's loads."""

    def run(warp: "Warp") -> Any:
        checker_of(warp).early_releases.fenced(warp)
        return step(warp)

    return run


def _gated(
    step: Step,
    pc: int,
    gate_of: "Callable[[Warp], Any]",
    *,
    waits: bool,
    named: bool = False,
    relaxed: bool = False,
) -> Step:
    """Returns a step that arrives at a gate and passes it when the step is done.

    gate_of: returns the gate of an arrival; evaluated before the step.
    named: the gate belongs to a named barrier.
    relaxed: the arrival does not release.
    """

    def run(warp: "Warp") -> Any:
        checker = checker_of(warp)
        arriving = warp.pending is None
        gate = gate_of(warp) if arriving else None
        result = step(warp)
        if arriving:
            if result is not None and warp.pending is None:
                return result  # lanes of the warp are missing, so it has not arrived
            if named and gate is not None:
                checker.round_in(warp, pc, gate, waits=waits)
            checker.gate_in(warp, pc, gate, relaxed=relaxed)
            if waits:
                checker.passing[warp] = gate
        if waits and result is None:
            gate = checker.passing.pop(warp)
            checker.warp_order.met(warp)
            checker.gate_out(warp, gate)
            if named:
                checker.round_out(warp, gate)
        return result

    return run


MASKS = {
    "shfl.sync": 4, "vote.sync": 2, "match.any.sync": 2, "match.all.sync": 2, "redux.sync": 2, "elect.sync": 1,
    "bar.warp.sync": 0,
}  # fmt: skip
"""Index of the operand that names the lanes, by instruction."""

EVERY_LANE = 0xFFFFFFFF


# Instructions of full warps (.sync) that have no wrapper of their own.
@WATCHERS.register(
    "bar.warp.sync", "vote.sync", "match.any.sync", "match.all.sync", "redux.sync", "elect.sync", "mma", "movmatrix",
    "wgmma", "tcgen05.ld", "tcgen05.st", "tcgen05.wait::ld", "tcgen05.wait::st", "setmaxnreg",
)  # fmt: skip
def _meeting(inst: Inst, b: Builder, step: Step) -> Step:
    position, barrier = MASKS.get(inst.opcode), inst.opcode == "bar.warp.sync"
    mask = b.read(inst.operands[position], "b32") if position is not None else None
    pc = b.pc

    def run(warp: "Warp") -> Any:
        if mask is not None:
            _check_mask(warp, pc, mask(warp))
        result = step(warp)
        if result is None:
            checker_of(warp).warp_order.met(warp)
            if barrier:
                checker_of(warp).lane_order.met(warp)
        return result

    return run


@WATCHERS.register("shfl.sync")
def _shuffle(inst: Inst, b: Builder, step: Step) -> Step:
    met, pc = _meeting(inst, b, step), b.pc
    mode = next(mod for mod in inst.mods if mod in SHUFFLES)
    if mode in ("up", "down"):  # reductions ignore the values that the last lanes get
        return met
    amount, limit = (b.read(operand, "b32") for operand in inst.operands[2:4])
    lanes = LANE_IDS.astype(np.int64)

    def run(warp: "Warp") -> Any:
        if warp.all_active:
            return met(warp)
        source, inside = source_lanes(mode, lanes, amount(warp), limit(warp))
        result = met(warp)
        if result is None:
            idle = warp.active & inside & ~warp.active[np.where(inside, source, lanes)]
            if idle.any():
                checker = checker_of(warp)
                site = checker.sites[checker.site(warp, pc)]
                text = f"{site}: lanes {idle.nonzero()[0].tolist()} read lanes that do not execute it: the values are undefined"
                checker.report("register", site, None, text, severity="warning")
        return result

    return run


def _check_mask(warp: "Warp", pc: int, mask: Any) -> None:
    """Checks that every lane that executes a warp instruction is named by its mask."""
    if mask.__class__ is int and mask == EVERY_LANE:
        return
    outside = warp.active & (np.broadcast_to(mask, LANES).astype(np.int64) >> LANE_IDS & 1 == 0)
    if outside.any():
        lanes = [int(lane) for lane in outside.nonzero()[0]]
        checker = checker_of(warp)
        site = checker.sites[checker.site(warp, pc)]
        named = int(np.broadcast_to(mask, LANES)[lanes[0]]) & EVERY_LANE
        text = f"{site}: lanes {lanes} execute it with the mask {named:#x}, which does not name them: the result is undefined"
        checker.report("rule", site, None, text)


def _named_gate(inst: Inst, b: Builder, position: int) -> "Callable[[Warp], Any]":
    number = b.read(inst.operands[position], "u32")

    def gate(warp: "Warp") -> Any:
        which = int(lane_value(number(warp), warp.first_lane()))
        barrier = warp.cta.named_barriers.get(which)
        return (warp.cta, which, barrier.generation if barrier is not None else 0)

    return gate


@WATCHERS.register("bar.sync", "bar.cta.sync", "barrier.sync", "barrier.cta.sync")
def _bar_sync(inst: Inst, b: Builder, step: Step) -> Step:
    return _gated(step, b.pc, _named_gate(inst, b, 0), waits=True, named=True)


@WATCHERS.register("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red")
def _bar_red(inst: Inst, b: Builder, step: Step) -> Step:
    return _gated(step, b.pc, _named_gate(inst, b, 1), waits=True, named=True)


@WATCHERS.register("bar.arrive", "bar.cta.arrive", "barrier.arrive", "barrier.cta.arrive")
def _bar_arrive(inst: Inst, b: Builder, step: Step) -> Step:
    return _gated(step, b.pc, _named_gate(inst, b, 0), waits=False, named=True)


@WATCHERS.register("barrier.cluster.arrive")
def _cluster_arrive(inst: Inst, b: Builder, step: Step) -> Step:
    relaxed = "relaxed" in inst.mods
    gate_of = lambda warp: (warp.cta.cluster, warp.cta.cluster.phase)
    gated = _gated(step, b.pc, gate_of, waits=False, relaxed=relaxed)
    return gated if relaxed else _fencing(gated)


@WATCHERS.register("barrier.cluster.wait")
def _cluster_wait(inst: Inst, b: Builder, step: Step) -> Step:
    def run(warp: "Warp") -> Any:
        checker, cluster = checker_of(warp), warp.cta.cluster
        if warp.pending is None and warp in cluster.phase_of:
            checker.passing[warp] = (cluster, cluster.phase_of[warp])
        result = step(warp)
        if result is None:
            checker.warp_order.met(warp)
            checker.gate_out(warp, checker.passing.pop(warp, None))
        return result

    return run


# ---- mbarriers -------------------------------------------------------------------------------------------------------
def _barrier_places(inst: Inst, b: Builder, position: int) -> "Callable[[Warp], list[tuple[Any, int]]]":
    _, space = mbarrier_mods(inst)
    address = b.address(inst.operands[position])

    def places(warp: "Warp") -> list[tuple[Any, int]]:
        where = address(warp)
        if where.__class__ is not np.ndarray:
            return [barrier_place(warp, space, where)]
        return [barrier_place(warp, space, a) for a in np.unique(_lanes(warp, where)).tolist()]

    return places


@WATCHERS.register("mbarrier.init")
def _init(inst: Inst, b: Builder, step: Step) -> Step:
    places, pc = _barrier_places(inst, b, 0), b.pc

    def run(warp: "Warp") -> Any:
        found = [(cta, offset, cta.smem.barriers.get(offset)) for cta, offset in places(warp)]
        result = step(warp)
        for cta, offset, old in found:
            checker_of(warp).mbarriers.initialised(warp, pc, cta.smem.barriers[offset], old)
        return result

    return run


@WATCHERS.register("mbarrier.inval")
def _invalidate(inst: Inst, b: Builder, step: Step) -> Step:
    places, pc = _barrier_places(inst, b, 0), b.pc

    def run(warp: "Warp") -> Any:
        for cta, offset in places(warp):
            checker_of(warp).mbarriers.invalidated(warp, pc, cta.mbarrier(offset))
        return step(warp)

    return run


@WATCHERS.register("mbarrier.arrive", "mbarrier.arrive_drop")
def _arrive(inst: Inst, b: Builder, step: Step) -> Step:
    places, pc = _barrier_places(inst, b, 1 if len(inst.operands) > 1 else 0), b.pc
    wide, relaxed = "cluster" in inst.mods, "relaxed" in inst.mods

    def run(warp: "Warp") -> Any:
        for cta, offset in places(warp):
            checker_of(warp).mbarriers.arrive(warp, pc, cta, cta.mbarrier(offset), wide=wide, relaxed=relaxed)
        return step(warp)

    return _fencing(run) if {"release", "cluster"} <= set(inst.mods) else run


@WATCHERS.register("mbarrier.expect_tx", "mbarrier.complete_tx")
def _count_bytes(inst: Inst, b: Builder, step: Step) -> Step:
    places, pc = _barrier_places(inst, b, 0), b.pc

    def run(warp: "Warp") -> Any:
        for cta, offset in places(warp):
            checker_of(warp).mbarriers.counted(warp, pc, cta, cta.mbarrier(offset))
        return step(warp)

    return run


@WATCHERS.register("mbarrier.test_wait", "mbarrier.try_wait")
def _wait(inst: Inst, b: Builder, step: Step) -> Step:
    places, pc = _barrier_places(inst, b, 1), b.pc
    by_parity, wide, relaxed = "parity" in inst.mods, "cluster" in inst.mods, "relaxed" in inst.mods
    token: Reader = b.read(inst.operands[2], "u32" if by_parity else "b64")
    answer = b.write(inst.operands[0], "pred")

    def run(warp: "Warp") -> Any:
        value = int(lane_value(token(warp), warp.first_lane()))
        found = [(cta, cta.mbarrier(offset)) for cta, offset in places(warp)]
        complete = lambda barrier: barrier.test_parity(value) if by_parity else barrier.test_state(value)
        checker = checker_of(warp)
        if pc not in checker.clock(warp).gave_up and checker.mbarriers.gives_up(
            warp, pc, [barrier for _, barrier in found], complete
        ):
            answer(warp, False)
            return None
        result = step(warp)
        if result is None:
            if warp.missing() is None:
                checker.warp_order.met(warp)
            for cta, barrier in found:
                if complete(barrier):
                    checker.warp_order.waits(warp, barrier.record.component)
                    checker.mbarriers.waited(
                        warp, pc, cta, barrier, token=None if by_parity else value, wide=wide, relaxed=relaxed
                    )
        return result

    return run


# ---- tensor memory allocation ------------------------------------------------------------------------------------------
@WATCHERS.register("tcgen05.alloc")
def _alloc(inst: Inst, b: Builder, step: Step) -> Step:
    address, columns, pc = b.address(inst.operands[0]), b.read(inst.operands[1], "u32"), b.pc
    pair = "cta_group::2" in inst.mods

    def run(warp: "Warp") -> Any:
        result = step(warp)
        if result is None:
            checker, cta, lane = checker_of(warp), warp.cta, warp.first_lane()
            offset = int(lane_value(address(warp), lane)) & OFFSET_MASK
            place = granules(np.array([offset], np.int64), 4)
            checker.access_shared(cta, place, checker.warp_actor(warp, pc), write=True)
            base = int(cta.smem.read(offset, 4).view(np.uint32)[0])
            own = slice(base, base + int(lane_value(columns(warp), lane)))
            even, odd = cta_pair(cta) if pair else (cta, cta)
            for owner in {even, odd} if cta is even else ():  # the leader's allocation belongs to both
                checker.tensor[owner].forget((slice(None), own))
                checker.tensor[owner].valid[:, own] = False
            if pair:
                checker.silicon.pair_alloc(warp, pc, odd if cta is even else even)
        return result

    return run


@WATCHERS.register("tcgen05.dealloc")
def _dealloc(inst: Inst, b: Builder, step: Step) -> Step:
    pair = "cta_group::2" in inst.mods
    address, columns, pc = b.read(inst.operands[0], "u32"), b.read(inst.operands[1], "u32"), b.pc

    def run(warp: "Warp") -> Any:
        lane = warp.first_lane()
        base, count = (int(lane_value(r(warp), lane)) for r in (address, columns))
        if pair and not warp.cta.rank & 1:
            checker_of(warp).silicon.pair_dealloc(warp, pc, cta_pair(warp.cta)[1])
        other = warp.cta.tmem.freed_by(base, count)
        if other:
            checker_of(warp).freed_again(warp, pc, f"columns {base}..{base + count - 1}", other)
        result = step(warp)
        if result is None:
            checker_of(warp).freed(warp, pc, TensorShadow.rectangle(slice(0, 128), slice(base, base + count)))
        return result

    return run
