"""Warps at one program counter executed together: one NumPy operation computes an instruction for all of their lanes.

Steps of instructions that each lane executes for itself (arithmetic, conversions, moves, global memory) accept any
number of lanes. Shuffles and votes run warp by warp. Only kernels made of such instructions run in lockstep: their
warps neither share memory nor wait for each other, so any order of them is one that a GPU may choose. A branch that
warps take differently divides the warps; lanes of one warp that take different branches run under masks. Warps that
raise an error continue one by one.
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np

from nvfp4_cute.emulator import parallel
from nvfp4_cute.emulator.check.touches import Meets, Touches
from nvfp4_cute.emulator.fused import InRun
from nvfp4_cute.emulator.lanes import ALL_LANES, LANES, Diverging, Group, Wait
from nvfp4_cute.emulator.ptx import Inst
from nvfp4_cute.emulator.specials import cta_specials, fill_constants
from nvfp4_cute.emulator.state import Launch, Warp

Origin = tuple[int, int, int]
Member = tuple[Origin, int]
"""Coordinates of a CTA and the index of a warp in it."""

MOST_WARPS = 64
"""Largest number of warps that run together. More lanes than fit in the processor's caches gain nothing."""

FEWEST_WARPS = 4
"""Smaller numbers of warps run one by one."""

PATIENCE = 1_000_000
"""Number of basic blocks after which warps run one by one, so that runaways are found."""

LANE_WISE = frozenset(
    "mov add sub mul mad mul24 mad24 min max and or xor not cnot shl shr shf bfe bfi popc clz brev bfind lop3 prmt setp set selp "
    "slct cvt fma neg abs div rem rcp sqrt rsqrt ex2 lg2 sin cos tanh copysign testp sad cvta bra brx ret exit griddepcontrol "
    "prefetch prefetchu".split()
)
"""Opcodes whose instructions each lane executes for itself."""

WARP_WISE = frozenset("shfl vote match redux activemask elect".split())
"""Opcodes whose instructions exchange values within a warp, and do nothing else."""


def lane_wise(inst: Inst) -> bool:
    """Whether lanes of any number of warps may execute an instruction together."""
    if inst.opcode in ("ld", "st"):
        return not {"global", "const", "param"}.isdisjoint(inst.mods)
    return inst.opcode in LANE_WISE


def runs_together(launch: Launch) -> bool:
    """Whether the warps of a launch may run together: full warps, in CTAs that share nothing and do not see one another."""
    code = launch.code
    return (
        launch.cluster == (1, 1, 1)
        and launch.threads % LANES == 0
        and all(lane_wise(inst) or inst.opcode in WARP_WISE for inst in code.insts)
        and not parallel.communicates(code)
    )


def together_size(launch: Launch) -> int:
    """Number of CTAs that run together."""
    return max(1, MOST_WARPS * LANES // launch.threads)


class Apart(Exception):
    """Raised when warps cannot take the next step together."""


class Wide(Diverging):
    """Warps that run together. Steps use it like one warp with many lanes.

    Attributes:
        members: the warps, in the order in which they would run one after the other.
        numbers: of the members, distinct in a launch, int32.
        regs, active, num_active, all_active, live, groups, protected, code, local: as in `Warp`, with 32 lanes per member.
        pc: current program counter.
        executed: instructions so far of every member.  apart: those of each member while lanes were diverged, int64.
    """

    def __init__(
        self,
        cta: Any,
        code: Any,
        members: Sequence[Member],
        regs: list[Any],
        numbers: np.ndarray,
        pc: int = 0,
    ):
        """`cta`: provides the machine and the launch."""
        self.numbers = numbers
        self.cta, self.code, self.members, self.regs, self.pc = cta, code, list(members), regs, pc
        self.groups: list[Group] = []
        self.live = np.ones(LANES * len(members), bool)
        self.local: np.ndarray | None = None
        self.wait: Wait | None = None
        self.polled, self.executed = False, 0
        self.apart = np.zeros(len(members), np.int64)
        self.looks: dict[int, Any] = {}
        self.resume(self.live)

    @property
    def total(self) -> int:
        """Instructions so far of all members."""
        return self.executed * len(self.members) + int(self.apart.sum())

    def present(self) -> np.ndarray | None:
        """Which members have active lanes, bool; None for all."""
        return None if self.all_active else np.asarray(self.active.reshape(-1, LANES).any(axis=1))

    def count(self, instructions: int, members: np.ndarray | None) -> None:
        """Counts instructions of the members that were `present`."""
        if members is None:
            self.executed += instructions
        else:
            self.apart[members] += instructions

    @property
    def warps(self) -> int:
        """Number of members with active lanes."""
        present = self.present()
        return len(self.members) if present is None else int(np.count_nonzero(present))

    def first_lane(self) -> int:
        """First active lane of the last member that has one. Its store to a shared place is the one that remains."""
        rows = self.active.reshape(-1, LANES)
        last = int(np.flatnonzero(rows.any(axis=1))[-1])
        return LANES * last + int(rows[last].argmax())

    def split_once(self, taken: np.ndarray, count: int, target: int, fallthrough: int) -> int:
        """Divides the lanes. Raises `Apart` if whole members take a branch: they continue faster by themselves."""
        if self.all_active and any(way.size for way in self.ways(taken)[:2]):
            raise Apart
        return super().split_once(taken, count, target, fallthrough)

    def ways(self, taken: np.ndarray) -> list[np.ndarray]:
        """Members all of whose lanes take a branch, those none of whose lanes do, and the others."""
        rows = taken.reshape(-1, LANES)
        yes, no = rows.all(axis=1), ~rows.any(axis=1)
        return [np.flatnonzero(way) for way in (yes, no, ~(yes | no))]

    def rows_of(self, value: Any, rows: Any) -> Any:
        """Returns the part of a register that belongs to some members."""
        if value.__class__ is not np.ndarray:
            return value
        return np.ascontiguousarray(value.reshape(len(self.members), LANES, *value.shape[1:])[rows]).reshape(
            -1, *value.shape[1:]
        )

    def some(self, rows: np.ndarray) -> "Wide":
        """Returns the members with the given numbers as a new `Wide`; nothing may be diverged."""
        regs = self.code.builder.template.copy()
        builder, few = self.code.builder, len(rows) < FEWEST_WARPS
        # Special registers, parameters and symbols are never written, so liveness leaves them out.
        for slot in (
            *self.code.live_at(self.pc),
            *builder.specials,
            *builder.params,
            *builder.shared_symbols,
        ):
            value = self.rows_of(self.regs[slot], rows)
            regs[slot] = _compact(value) if few else value
        part = Wide(
            self.cta, self.code, [self.members[row] for row in rows], regs, self.numbers[rows], self.pc
        )
        part.executed, part.apart = self.executed, self.apart[rows]
        part.local = None if self.local is None else self.rows_of(self.local, rows)
        return part

    def put_into(self, row: int, warp: Warp) -> None:
        """Copies the state of a member into a warp."""
        lanes = slice(LANES * row, LANES * row + LANES)
        current = Group(self.pc, self.active)
        groups = [Group(group.pc, group.mask[lanes]) for group in (current, *self.groups)]
        groups = [group for group in groups if group.mask.any()]
        for slot in frozenset().union(*(self.code.live_at(group.pc) for group in groups)):
            warp.regs[slot] = _compact(self.rows_of(self.regs[slot], [row]))
        warp.live, warp.executed = self.live[lanes], self.executed + int(self.apart[row])
        warp.local = None if self.local is None else self.rows_of(self.local, [row])
        if len(groups) == 1 and groups[0].mask.all():
            warp.pc = groups[0].pc
        else:
            warp.groups, warp.num_active = groups, 0


def _compact(value: Any) -> Any:
    """A register as one value if its lanes agree."""
    lanes = value.__class__ is np.ndarray and value.dtype != object
    return value[0].item() if lanes and not np.count_nonzero(value != value[0]) else value


def start(
    machine: Any, launch: Launch, origins: Sequence[Origin], touches: Touches | None, first: int
) -> Wide:
    """Returns all warps of the CTAs at `origins`, at the entry point. `first`: number of the first warp."""
    code: Any = launch.code
    warps = launch.threads // LANES
    cta = SimpleNamespace(machine=machine, launch=launch, touches=touches)
    regs: list[Any] = code.builder.template.copy()
    specials = code.builder.specials
    within: list[dict[int, Any]] = [{} for _ in range(warps)]
    threads = {slot: name for slot, name in specials.items() if name.startswith(("%tid.", "%warpid"))}
    for index, found in enumerate(within):
        fill_constants(found, threads, index, launch.block, {})
    for slot in threads:
        value = _joined([found[slot] for found in within], code.builder.dtypes[slot])
        regs[slot] = np.tile(value, len(origins)) if value.__class__ is np.ndarray else value
    x, y, z = np.array(origins, np.int64).T
    values = cta_specials(launch, (x, y, z), 0, warps, machine.sm_count)
    for slot, name in specials.items():
        if slot in threads:
            continue
        value = values[name]
        if value.__class__ is np.ndarray:
            by_cta = not name.startswith(("%laneid", "%lanemask"))
            value = np.repeat(value, LANES * warps) if by_cta else np.tile(value, warps * len(origins))
            value = _compact(value.astype(code.builder.dtypes[slot]))
        regs[slot] = value
    for slot, offset in code.builder.shared_symbols.items():
        regs[slot] = offset
    base = launch.params.ctypes.data
    for slot, offset in code.builder.params.items():
        regs[slot] = base + offset
    members = [(origin, index) for origin in origins for index in range(warps)]
    return Wide(cta, code, members, regs, np.arange(first, first + len(members), dtype=np.int32))


def _joined(values: list[Any], dtype: np.dtype) -> Any:
    """Joins the values of a register over the members; uniform if all are uniform and equal."""
    first = values[0]
    if first.__class__ is not np.ndarray and all(
        v.__class__ is not np.ndarray and v == first for v in values
    ):
        return first
    if not any(v.__class__ is np.ndarray for v in values):
        return np.repeat(np.array(values, dtype), LANES)
    return np.concatenate(
        [v if v.__class__ is np.ndarray else np.full(LANES, v, dtype) for v in values], dtype=dtype
    )


class Lockstep:
    """Runs the warps of one launch together as long as they take the same branches."""

    def __init__(self, machine: Any, launch: Launch, touches: Touches | None = None):
        """Makes a runner without warps.

        Args:
            launch: a launch that `runs_together`.
            touches: holds accesses of the warps against each other; then no warp continues by itself.
        """
        self.machine, self.launch, self.touches = machine, launch, touches
        self.code: Any = launch.code
        self._tails: dict[int, tuple[list[Any], tuple[int, ...]]] = {}
        self._scratch: Warp | None = None
        self._warps = 0

    def run(self, origins: Sequence[Origin], alone: Any) -> int:
        """Runs the CTAs at `origins`.

        `alone(origin, states)` runs warps of a CTA by themselves. `states` maps warp indices to functions that load a
        warp's state. Returns the number of instructions that warps executed together.
        """
        executed, work = 0, [start(self.machine, self.launch, origins, self.touches, self._warps + 1)]
        self._warps += len(work[0].members)
        few = self.touches is None and len(work[0].members) < FEWEST_WARPS
        while work:
            wide = work.pop()
            before = wide.total
            ended = not few and self._run(wide)
            executed += wide.total - before
            if ended:
                continue
            parts, rest = ([], list(range(len(wide.members)))) if few else self._parts(wide)
            if rest and self.touches is not None:
                raise Meets
            work += [wide.some(rows) for rows in parts[::-1]]
            for origin, rows in groupby(rest, key=lambda row: wide.members[row][0]):
                alone(origin, {wide.members[row][1]: partial(wide.put_into, row) for row in rows})
        return executed

    def _parts(self, wide: Wide) -> tuple[list[np.ndarray], list[int]]:
        """Returns the members that continue together, by the branch that they take, and those that continue one by one."""
        everybody = np.flatnonzero(wide.live.reshape(-1, LANES).any(axis=1)).tolist()
        inst = self.code.insts[wide.pc]
        predicate = None if inst.pred is None else wide.regs[self.code.builder.slot(inst.pred[0], "pred")]
        if not wide.all_active or inst.opcode != "bra" or predicate.__class__ is not np.ndarray:
            return [], everybody
        parts = [way for way in wide.ways(predicate) if way.size]
        return (parts, []) if len(parts) > 1 else ([], everybody)

    def _run(self, wide: Wide) -> bool:
        """Runs to the end. Returns False if the members have to continue apart, at `wide.pc`."""
        pc = wide.pc
        for _ in range(PATIENCE):
            if wide.groups:
                pc = self.machine._regroup(wide, pc)
            steps, places = self._tail(pc)
            members = wide.present()
            result: Any = None
            number = -1  # index of the current step
            try:
                for step in steps:
                    number += 1
                    result = step(wide)
                    if result is not None:
                        break
            except Exception as raised:
                at, error = places[number], raised
                if isinstance(raised, InRun):
                    at, error = raised.pc, raised.error
                wide.count(at - pc, members)
                pc = at
                plain = self.touches is None and isinstance(error, TypeError | AttributeError)
                if plain and self.machine._poison_registers(wide, at):
                    continue
                wide.pc = pc
                return False
            after = places[number + 1]
            wide.count(after - pc, members)
            if result is None:
                pc = after
            elif result.__class__ is int:
                pc = result
            else:
                pc = -1
                if not wide.groups:
                    return True
        wide.pc = pc
        return False

    def _tail(self, pc: int) -> tuple[list[Any], tuple[int, ...]]:
        found = self._tails.get(pc)
        if found is None:
            steps, places = self.code.tails[pc] or self.code.tail(pc)
            apart = [
                self._each(place, step) if self.code.insts[place].opcode in WARP_WISE else step
                for step, place in zip(steps, places[:-1], strict=True)
            ]
            found = self._tails[pc] = (apart, places)
        return found

    def _each(self, pc: int, step: Any) -> Any:
        """Returns a step that executes an instruction warp by warp."""
        reads, writes = sorted(self.code.reads[pc]), sorted(self.code.writes[pc])
        dtypes = self.code.builder.dtypes

        def run(wide: Wide) -> None:
            warp, present = self._warp(), wide.present()
            warp.protected = wide.protected
            results: list[list[Any]] = []
            for row in range(len(wide.members)):
                for slot in (*reads, *writes):
                    warp.regs[slot] = wide.rows_of(wide.regs[slot], [row])
                if present is not None:
                    lanes = slice(LANES * row, LANES * row + LANES)
                    warp.live, warp.active = wide.live[lanes], wide.active[lanes]
                    warp.num_active = int(np.count_nonzero(warp.active))
                    warp.all_active = warp.num_active == LANES
                    elsewhere = warp.live & ~warp.active
                    warp.groups = [Group(pc, elsewhere)] if elsewhere.any() else []
                if (present is None or present[row]) and step(warp) is not None:
                    self._scratch = None
                    raise Apart
                results.append([0 if warp.regs[slot] is None else warp.regs[slot] for slot in writes])
            if present is not None:
                warp.live, warp.groups = ALL_LANES, []
                warp.resume(ALL_LANES)
            for slot, values in zip(writes, zip(*results, strict=True), strict=True):
                wide.regs[slot] = _joined(list(values), dtypes[slot])

        return run

    def _warp(self) -> Warp:
        """Returns a warp whose registers are set to those of one member after the other."""
        if self._scratch is None:
            cta: Any = SimpleNamespace(machine=self.machine, launch=self.launch)
            self._scratch = Warp(cta, 0, LANES)
        return self._scratch
