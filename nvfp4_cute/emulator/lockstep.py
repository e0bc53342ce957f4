"""Warps at one program counter executed together: one NumPy operation computes an instruction for all of their lanes.

Steps of instructions that each lane executes for itself (arithmetic, conversions, moves, global memory) accept any
number of lanes. Shuffles and votes run warp by warp. Only kernels made of such instructions run in lockstep: their
warps neither share memory nor wait for each other, so any order of them is one that a GPU may choose. A branch that
warps take differently divides the warps. Warps whose own lanes diverge, and warps that raise an error, continue one by
one.
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np

from nvfp4_cute.emulator import parallel
from nvfp4_cute.emulator.fused import InRun
from nvfp4_cute.emulator.lanes import LANES, NOTHING, REGROUP, Signal
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
    "slct cvt fma neg abs div rem rcp sqrt rsqrt ex2 lg2 sin cos tanh copysign testp sad cvta bra ret exit griddepcontrol "
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


class Wide:
    """Warps that run together. Steps use it like one warp with many lanes.

    Attributes:
        members: the warps, in the order in which they would run one after the other.
        regs, active, num_active, all_active, protected, code, local: as in `Warp`, with 32 lanes per member.
        pc: current program counter.
        executed: instructions so far.
    """

    groups: tuple[()] = ()

    def __init__(self, cta: Any, code: Any, members: Sequence[Member], regs: list[Any], pc: int = 0):
        """`cta`: provides the machine and the launch."""
        self.cta, self.code, self.members, self.regs, self.pc = cta, code, list(members), regs, pc
        self.active = np.ones(LANES * len(members), bool)
        self.num_active, self.all_active = self.active.size, True
        self.protected = NOTHING
        self.local: np.ndarray | None = None
        self.polled, self.executed, self.done = False, 0, False
        self.looks: dict[int, Any] = {}

    @property
    def warps(self) -> int:
        """Number of members with active lanes."""
        if self.all_active:
            return len(self.members)
        return int(np.count_nonzero(self.active.reshape(-1, LANES).any(axis=1)))

    def first_lane(self) -> int:
        """First active lane of the last member that has one. Its store to a shared place is the one that remains."""
        rows = self.active.reshape(-1, LANES)
        last = int(np.flatnonzero(rows.any(axis=1))[-1])
        return LANES * last + int(rows[last].argmax())

    def exit_lanes(self, mask: np.ndarray, next_pc: int) -> Signal:
        """Ends all lanes."""
        if not mask.all():
            raise Apart
        self.done = True
        return REGROUP

    def split(self, *args: Any) -> Signal:
        """Raises `Apart`: lanes take different branches."""
        raise Apart

    split_once = scatter = split

    def rows_of(self, value: Any, rows: Any) -> Any:
        """Returns the part of a register that belongs to some members."""
        if value.__class__ is not np.ndarray:
            return value
        return np.ascontiguousarray(value.reshape(len(self.members), LANES, *value.shape[1:])[rows]).reshape(
            -1, *value.shape[1:]
        )

    def some(self, rows: np.ndarray, pc: int) -> "Wide":
        """Returns the members with the given numbers as a new `Wide` that continues at `pc`."""
        regs = self.code.builder.template.copy()
        for slot in self.code.live_at(pc):
            regs[slot] = self.rows_of(self.regs[slot], rows)
        part = Wide(self.cta, self.code, [self.members[row] for row in rows], regs, pc)
        part.executed = self.executed
        part.local = None if self.local is None else self.rows_of(self.local, rows)
        return part

    def put_into(self, row: int, warp: Warp) -> None:
        """Copies the state of a member into a warp."""
        for slot in self.code.live_at(self.pc):
            value = self.rows_of(self.regs[slot], [row])
            if (
                value.__class__ is np.ndarray
                and value.dtype != object
                and not np.count_nonzero(value != value[0])
            ):
                value = value[0].item()
            warp.regs[slot] = value
        warp.pc, warp.executed = self.pc, self.executed
        warp.local = None if self.local is None else self.rows_of(self.local, [row])


def start(machine: Any, launch: Launch, origins: Sequence[Origin]) -> Wide:
    """Returns all warps of the CTAs at `origins`, at the entry point."""
    code: Any = launch.code
    warps = launch.threads // LANES
    cta = SimpleNamespace(machine=machine, launch=launch)
    regs: list[Any] = code.builder.template.copy()
    specials = code.builder.specials
    each: list[dict[int, Any]] = []
    within: list[dict[int, Any]] = [{} for _ in range(warps)]
    threads = {slot: name for slot, name in specials.items() if name.startswith(("%tid.", "%warpid"))}
    for index, found in enumerate(within):
        fill_constants(found, threads, index, launch.block, {})
    others = {slot: name for slot, name in specials.items() if slot not in threads}
    for origin in origins:
        values = cta_specials(launch, origin, 0, warps, machine.sm_count)
        each.append({slot: values[name] for slot, name in others.items()})
    for slot in threads:
        regs[slot] = _joined([found[slot] for found in within] * len(origins), code.builder.dtypes[slot])
    for slot in others:
        regs[slot] = _joined([found[slot] for found in each for _ in range(warps)], code.builder.dtypes[slot])
    for slot, offset in code.builder.shared_symbols.items():
        regs[slot] = offset
    base = launch.params.ctypes.data
    for slot, offset in code.builder.params.items():
        regs[slot] = base + offset
    return Wide(cta, code, [(origin, index) for origin in origins for index in range(warps)], regs)


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

    def __init__(self, machine: Any, launch: Launch):
        """`launch`: a launch that `runs_together`."""
        self.machine, self.launch = machine, launch
        self.code: Any = launch.code
        self._tails: dict[int, tuple[list[Any], tuple[int, ...]]] = {}
        self._scratch: Warp | None = None

    def run(self, origins: Sequence[Origin], alone: Any) -> int:
        """Runs the CTAs at `origins`.

        `alone(origin, states)` runs warps of a CTA by themselves. `states` maps warp indices to functions that load a
        warp's state. Returns the number of instructions that warps executed together.
        """
        executed, work = 0, [start(self.machine, self.launch, origins)]
        while work:
            wide = work.pop()
            before, ended = wide.executed, False
            if len(wide.members) >= FEWEST_WARPS:
                ended = self._run(wide)
            executed += len(wide.members) * (wide.executed - before)
            if ended:
                continue
            parts, rest = self._parts(wide)
            work += [wide.some(rows, wide.pc) for rows in parts[::-1]]
            for origin, rows in groupby(rest, key=lambda row: wide.members[row][0]):
                alone(origin, {wide.members[row][1]: partial(wide.put_into, row) for row in rows})
        return executed

    def _parts(self, wide: Wide) -> tuple[list[np.ndarray], list[int]]:
        """Returns the members that continue together, by the branch that they take, and those that continue one by one."""
        everybody, inst = list(range(len(wide.members))), self.code.insts[wide.pc]
        predicate = None if inst.pred is None else wide.regs[self.code.builder.slot(inst.pred[0], "pred")]
        if len(everybody) < FEWEST_WARPS or inst.opcode != "bra" or predicate.__class__ is not np.ndarray:
            return [], everybody
        rows = predicate.reshape(-1, LANES)
        yes, no = rows.all(axis=1), ~rows.any(axis=1)
        ways = [np.flatnonzero(way) for way in (yes, no)]
        return [way for way in ways if way.size], np.flatnonzero(~(yes | no)).tolist()

    def _run(self, wide: Wide) -> bool:
        """Runs to the end. Returns False if the members have to continue apart, at `wide.pc`."""
        pc = wide.pc
        for _ in range(PATIENCE):
            steps, places = self._tail(pc)
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
                wide.executed, pc = wide.executed + at - pc, at
                if isinstance(error, TypeError | AttributeError) and self.machine._poison_registers(wide, at):
                    continue
                wide.pc = pc
                return False
            after = places[number + 1]
            wide.executed += after - pc
            if result is None:
                pc = after
            elif result.__class__ is int:
                pc = result
            else:
                return wide.done
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
            warp = self._warp()
            results: list[list[Any]] = []
            for row in range(len(wide.members)):
                for slot in (*reads, *writes):
                    warp.regs[slot] = wide.rows_of(wide.regs[slot], [row])
                if step(warp) is not None:
                    raise Apart
                results.append([warp.regs[slot] for slot in writes])
            for slot, values in zip(writes, zip(*results, strict=True), strict=True):
                wide.regs[slot] = _joined(list(values), dtypes[slot])

        return run

    def _warp(self) -> Warp:
        """Returns a warp whose registers are set to those of one member after the other."""
        if self._scratch is None:
            cta: Any = SimpleNamespace(machine=self.machine, launch=self.launch)
            self._scratch = Warp(cta, 0, LANES)
        return self._scratch
