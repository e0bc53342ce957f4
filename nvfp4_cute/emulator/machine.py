"""The machine: grid -> clusters -> CTAs -> warps, their scheduling, divergence, and hang detection.

One cluster runs at a time, with all of its CTAs. Warps take turns; a warp runs until it blocks (a step returned a
`Wait`), exits, or has used up its turn. If asynchronous work happens at issue, a turn also ends when a warp is the
first of several to find a phase of an mbarrier complete. Otherwise it could run through phases that the others never
see.

Within a warp, lanes with the same program counter form a group; the group with the lowest program counter runs first,
and groups that reach the same program counter merge. When a group blocks, the others run.
"""

import itertools
import math
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import length_hint
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator import parallel
from nvfp4_cute.emulator.check.hazards import Checker
from nvfp4_cute.emulator.check.ledger import HazardError
from nvfp4_cute.emulator.check.touches import Meets, Touches, watchable
from nvfp4_cute.emulator.faults import HangFault, SiliconFault
from nvfp4_cute.emulator.fused import InRun
from nvfp4_cute.emulator.kernel_names import short_name
from nvfp4_cute.emulator.lanes import (
    REGROUP,
    Group,
    RuleWait,
    Wait,
    mask_bits,
)
from nvfp4_cute.emulator.lockstep import Lockstep, runs_together, together_size
from nvfp4_cute.emulator.memory import GlobalMemory
from nvfp4_cute.emulator.modes import make_queue
from nvfp4_cute.emulator.record import forms as form_log
from nvfp4_cute.emulator.state import Cluster, Launch, Stats, Warp
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.record.recorder import Recorder

TURN = 2000
"""Basic blocks that a warp runs before the next warp gets its turn."""

WARP_INSTRUCTION_LIMIT = 1_000_000_000
"""Instructions of one warp after which the machine stops it as a runaway."""


class Machine:
    """Runs launches one after the other.

    Attributes:
        memory: global memory.
        stats: counters.
        changes: grows with every effect that another warp could see.
        progress: called with (finished CTAs, all CTAs of the launch) after each cluster.
        queue: asynchronous operations under way; None if they happen at issue and leave no record.
        checker: finds hazards, or None.
        recorder: records everything that takes time, or None.
        forms: notes the forms of hardware use in kernels, or None.
    """

    def __init__(
        self,
        sm_count: int = 148,
        memory: GlobalMemory | None = None,
        progress: Callable[[int, int], None] | None = None,
        instruction_limit: int = WARP_INSTRUCTION_LIMIT,
        jobs: int | None = None,
        mode: str = "eager",
        check: bool = False,
        count_banks: bool = False,
    ):
        """Makes a machine without launches.

        Args:
            instruction_limit: instructions of one warp after which the launch counts as a runaway.
            jobs: cores that a large launch may use; None means all cores of the process.
            mode: when asynchronous operations happen, see `modes.make_queue`.
            check: look for hazards.
            count_banks: count bank conflicts of shared memory.
        """
        self.sm_count = sm_count
        self.memory = memory or GlobalMemory()
        self.progress = progress
        self.instruction_limit = instruction_limit
        self.jobs = parallel.available_cores() if jobs is None else jobs
        self.stats = Stats()
        self.count_banks = count_banks
        self.changes = 0
        self.waiting: list[tuple[int, int, int]] = []
        self.queue = make_queue(mode, checked=check)
        self.checker = Checker() if check else None
        self.recorder: Recorder | None = None
        self.forms = form_log.current()
        if self.forms is not None:
            self.jobs = 1  # notes of another process would be lost
        if self.queue is not None:
            self.queue.failed, self.queue.checker = _located, self.checker

    def run(self, launch: Launch) -> None:
        """Runs a launch to completion.

        Raises:
            EmulatorError: the kernel broke a rule, hung, or ran away; names kernel, CTA, warp, and PTX line.
        """
        origins = _cluster_origins(launch)
        internal = [launch.params, *launch.code.buffers]
        for buffer in internal:
            self.memory.add_range(
                "kernel parameters and module variables", buffer.ctypes.data, buffer.size, own=True
            )
        self.stats.launches += 1
        if self.forms is not None:
            self.forms.begin(launch)
        per_cluster = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        started = time.perf_counter()

        def report() -> None:
            if self.progress is not None:
                self.progress(total - len(self.waiting) * per_cluster, total)

        try:
            if self.recorder is not None:
                origins = self.recorder.executed(origins, launch, self.memory)
            total = len(origins) * per_cluster
            # CTAs that run together are one piece of work; starting processes pays only for several pieces.
            pieces = origins[:: together_size(launch)] if self._runs_together(launch) else origins
            divided = parallel.can_divide(self, launch, pieces)
            if self.checker is not None:
                if not (
                    self._run_clean(self.checker, launch, origins, report)
                    or (divided and parallel.run_checked(self, launch, origins))
                ):
                    self._run_checked(self.checker, launch, origins, report)
            elif divided:
                parallel.run(self, launch, origins)
            else:
                self.run_clusters(launch, origins, report)
        finally:
            for buffer in internal:
                self.memory.remove_range(buffer.ctypes.data)
            self.stats.seconds += time.perf_counter() - started
        self.stats.ctas += total

    def _run_clean(
        self,
        checker: Checker,
        launch: Launch,
        origins: list[tuple[int, int, int]],
        finished: Callable[[], None],
    ) -> bool:
        """Runs a launch in lockstep under the checker. False if there may be something to report: memory is as before."""
        code, watchers = launch.code, (self.recorder, self.forms)
        if (
            code.together is None
            or code.buffers
            or launch.programmatic
            or not self.memory.is_checked
            or any(watcher is not None for watcher in watchers)
            or not (watchable(code.insts) and runs_together(launch))
        ):
            return False
        checker.begin_launch(launch, self.memory)
        before, touches = replace(self.stats), Touches(self.memory)
        together = replace(launch, code=code.together())
        try:
            with np.errstate(all="ignore"):
                self._run_together(together, origins, finished, touches)
        except Meets:
            touches.undo()
            self.stats = before
            return False
        checker.dependencies.end_launch(checker.globals.footprint())
        return True

    def _run_checked(
        self,
        checker: Checker,
        launch: Launch,
        origins: list[tuple[int, int, int]],
        finished: Callable[[], None],
    ) -> None:
        """Runs clusters and raises the checker's findings, from the error that stopped the launch if there was one."""
        checker.begin_launch(launch, self.memory)
        failure: EmulatorError | None = None
        try:
            self.run_clusters(launch, origins, finished)
        except EmulatorError as error:
            failure = error
            checker.stopped(error)
        checker.dependencies.end_launch(checker.globals.footprint())
        if checker.failed:
            raise HazardError(checker.of_this_launch()) from failure

    def run_clusters(
        self, launch: Launch, origins: list[tuple[int, int, int]], finished: Callable[[], None]
    ) -> None:
        """Runs clusters one after the other, or side by side if a recorder asks for that. Calls `finished` after each."""
        shares, together = [origins], 1
        if self.recorder is not None:
            shares = self.recorder.shares(launch, origins, self.sm_count)
            together = self.recorder.together(launch, self.sm_count)
        with np.errstate(all="ignore"):
            if self._runs_together(launch):
                self._run_together(launch, origins, finished)
                return
            for share in shares:
                self.waiting = share[::-1]
                while self.waiting:
                    count = min(together, len(self.waiting))
                    self._run_clusters([Cluster(self, launch, self.waiting.pop()) for _ in range(count)])
                    finished()

    def _runs_together(self, launch: Launch) -> bool:
        """Whether the warps of a launch run in lockstep: they may, and nobody watches single warps.

        Such kernels have no asynchronous operations and do not communicate, so they run alike in every mode.
        """
        watchers = self.checker, self.recorder, self.forms
        return all(watcher is None for watcher in watchers) and runs_together(launch)

    def _run_together(
        self,
        launch: Launch,
        origins: list[tuple[int, int, int]],
        finished: Callable[[], None],
        touches: Touches | None = None,
    ) -> None:
        """Runs CTAs in lockstep, and warps that cannot stay in lockstep one by one.

        `touches`: notes accesses and allows nothing else.
        """
        lockstep, size = Lockstep(self, launch, touches), together_size(launch)

        def alone(origin: tuple[int, int, int], states: dict[int, Callable[[Warp], None]]) -> None:
            cluster = Cluster(self, launch, origin)
            together = 0
            for warp in cluster.ctas[0].warps:
                if warp.idx in states:
                    states[warp.idx](warp)
                    together += warp.executed
                else:
                    warp.done = True
            self._run_clusters([cluster])
            self.stats.instructions -= together  # counted already

        self.waiting = origins[::-1]
        while self.waiting:
            group = [self.waiting.pop() for _ in range(min(size, len(self.waiting)))]
            executed = lockstep.run(group, alone)  # includes the instructions of `alone`
            self.stats.instructions += executed
            finished()

    @property
    def immediate(self) -> bool:
        """Whether asynchronous operations happen when they are issued."""
        return self.queue is None or self.queue.immediate

    def cancel_cluster(self) -> tuple[int, int, int] | None:
        """Takes the next cluster that has not started out of the grid. Returns its first CTA's coordinates, or None."""
        return self.waiting.pop() if self.waiting else None

    # ---- scheduling ----------------------------------------------------------------------------
    def _run_clusters(self, clusters: list[Cluster]) -> None:
        """Runs clusters to their end, together with the clusters that they turn out to wait for."""
        warps = [w for cluster in clusters for cta in cluster.ctas for w in cta.warps if not w.done]
        live, queue, checker = list(warps), self.queue, self.checker
        for cluster in clusters:
            if checker is not None:
                checker.begin_cluster(cluster)
            if self.recorder is not None:
                self.recorder.begin(cluster)
        try:
            while live:
                ran = False
                for warp in live if queue is None else queue.order(live):
                    if warp.wait is not None:
                        if not warp.wait.ready():
                            continue
                        warp.wait = None
                    if queue is None:
                        self._run_warp(warp, TURN)
                    else:
                        self._run_warp(warp, queue.turn(TURN))
                        queue.between_turns()
                    ran = ran or not _polls(warp)
                if not ran and (queue is None or not queue.advance()) and not self._retry_spins(live):
                    clusters.append(self._next_resident(clusters, live))
                    new = [w for cta in clusters[-1].ctas for w in cta.warps]
                    warps, live = warps + new, live + new
                live = [w for w in live if not w.done]
            if queue is not None:
                queue.drain()
            if checker is not None:
                checker.end_clusters()
            if self.recorder is not None:
                for ended in clusters:
                    self.recorder.end(ended)
        finally:
            self.stats.instructions += sum(w.executed for w in warps)

    def _retry_spins(self, live: list[Warp]) -> bool:
        """Lets spinning warps read memory once more when every warp is blocked or spins. Returns False if none can continue."""
        for warp in live:
            if _polls(warp):
                warp.wait = None
                for group in warp.groups:
                    group.wait = None if isinstance(group.wait, _Spin) else group.wait
                self._run_warp(warp, TURN)
                if not _polls(warp):
                    return True
        return any(w.wait is None or w.wait.ready() for w in live)

    def _next_resident(self, clusters: list[Cluster], live: list[Warp]) -> Cluster:
        """Returns the next cluster of the grid if stuck warps poll memory and a device of this size runs it at the same time.

        Raises:
            HangFault: no other cluster can help the stuck warps.
        """
        launch = clusters[0].launch
        resident = sum(len(cluster.ctas) for cluster in clusters)
        room = launch.resident_ctas(self.sm_count) - resident
        polls = any(map(_polls, live))
        if polls and self.waiting and room >= len(clusters[0].ctas):
            cluster = Cluster(self, launch, self.waiting.pop())
            if self.checker is not None:
                if not launch.cooperative:
                    spinning = next(warp for warp in live if _polls(warp))
                    self.checker.silicon.spin(spinning, math.prod(launch.grid), room + resident)
                self.checker.begin_cluster(cluster)
            if self.recorder is not None:
                self.recorder.begin(cluster)
            return cluster
        why = self.checker.mbarriers.explain_hang(live) if self.checker is not None else ""
        fault = SiliconFault if any(isinstance(warp.wait, RuleWait) for warp in live) else HangFault
        raise fault(hang_report(live) + why)

    def _poison_registers(self, warp: Warp, pc: int) -> bool:
        """Poisons registers that an instruction reads and that were never written. Returns False if there are none.

        PTX leaves their value open. Compilers read registers that predicated loads of rows outside a tensor did not
        write. The poison, all ones, is NaN.
        """
        undefined = warp.code.undefined(warp, pc)
        for slot in undefined:
            warp.regs[slot] = warp.code.builder.poison(slot)
        if undefined and self.checker is not None:
            self.checker.unwritten_register(warp, pc, warp.code.builder.names[undefined[0]])
        return bool(undefined)

    def _run_warp(self, warp: Warp, turn: int) -> None:
        """Runs a warp for `turn` basic blocks, or until it blocks or ends."""
        tails = warp.code.tails
        pc = warp.pc
        for _ in range(turn):
            if warp.groups and (pc := self._regroup(warp, pc)) < 0:
                return
            steps, places = tails[pc] or warp.code.tail(pc)
            iterator = iter(steps)
            result: Any = None
            try:
                for step in iterator:
                    result = step(warp)
                    if result is not None:
                        break
            except Exception as raised:
                at, error = places[-2 - length_hint(iterator)], raised
                if isinstance(raised, InRun):
                    at, error = raised.pc, raised.error
                if not (
                    isinstance(error, TypeError | AttributeError | struct.error)
                    and self._poison_registers(warp, at)
                ):
                    raise _located(error, warp, at) from error
                warp.executed += at - pc
                pc = at
                continue
            after = places[-1 - length_hint(iterator)]
            warp.executed += after - pc
            if result is None:
                pc = after
            elif result.__class__ is int:
                pc = result
            elif result is REGROUP:
                pc = -1
                if not warp.groups:
                    self._finish(warp)
                    return
            else:
                warp.executed -= 1
                pc = warp.pc = after - 1
                if not self._block(warp, result):
                    return
                pc = -1
            if warp.looks or warp.polled:
                warp.pc = pc
                if self._spins(warp, pc):
                    if warp.groups:
                        warp.looks.clear()
                    if not self._block(warp, _Spin(self, self.changes)):
                        return
                    pc = -1
            if warp.gives_way:
                warp.gives_way, warp.pc = False, pc
                return
        warp.pc = pc
        warp.polled = warp.polled or turn == TURN
        if warp.executed > self.instruction_limit:
            raise EmulatorError(
                f"{_place(warp, pc)}: {warp.executed} instructions executed by one warp: runaway kernel"
            )

    def _regroup(self, warp: Warp, pc: int) -> int:
        """Chooses the next group among the current one (at `pc`, if it has lanes) and the waiting ones."""
        groups = warp.groups
        if warp.num_active and pc >= 0:
            if len(groups) == 1 and groups[0].pc == pc:
                other = groups.pop()
                warp.resume(warp.active | other.mask)
                return pc
            if all(g.pc > pc for g in groups):
                return pc
            groups.append(Group(pc, warp.active))
        merged: dict[int, Group] = {}
        for group in groups:
            if group.pc in merged:
                same = merged[group.pc]
                same.mask, same.wait = same.mask | group.mask, None
            else:
                merged[group.pc] = group
        runnable = [g for g in merged.values() if g.wait is None or g.wait.ready()]
        if not runnable:
            warp.groups = list(merged.values())
            warp.num_active = 0
            warp.pc = -1
            warp.wait = _AnyGroup(warp)
            return -1
        chosen = min(runnable, key=lambda g: g.pc)
        warp.groups = [g for g in merged.values() if g is not chosen]
        warp.looks.clear()
        warp.resume(chosen.mask)
        return chosen.pc

    def _block(self, warp: Warp, wait: Wait) -> bool:
        """Blocks the current group at warp.pc. Returns True if another group of the warp may continue."""
        if not warp.groups:
            warp.wait = wait
            return False
        warp.groups.append(Group(warp.pc, warp.active, wait))
        warp.num_active = 0
        return True

    def _finish(self, warp: Warp) -> None:
        warp.done = True
        self.changes += 1

    def _spins(self, warp: Warp, pc: int) -> bool:
        """Whether the running lanes are back in the state of an earlier read of memory, and nothing changed since."""
        looks = warp.looks
        if pc < 0:
            looks.clear()
            warp.polled = False
            return False
        look = looks.pop(pc, None)
        if look is not None and look[1] == self.changes and _same_registers(look[0], warp.regs):
            looks[pc] = look
            return True
        if warp.polled:
            warp.polled = False
            looks[pc] = (warp.regs.copy(), self.changes)
        return False


@dataclass
class _Spin:
    """A warp that polls memory in a loop and found it unchanged."""

    machine: Machine
    changes: int

    def ready(self) -> bool:
        return self.machine.changes != self.changes

    def describe(self) -> str:
        return "spinning: a loop that polls memory that no other warp changes"


@dataclass
class _AnyGroup:
    """All groups of a diverged warp are blocked."""

    warp: Warp

    def ready(self) -> bool:
        return any(g.wait is None or g.wait.ready() for g in self.warp.groups)

    def describe(self) -> str:
        return "; ".join(
            f"lanes {mask_bits(g.mask):#010x} at {_line(self.warp, g.pc)}: {g.wait.describe() if g.wait else 'runnable'}"
            for g in self.warp.groups
        )


def _polls(warp: Warp) -> bool:
    """Whether a warp, or some of its lanes, is blocked because it polls memory that no other warp changes."""
    groups = warp.groups if isinstance(warp.wait, _AnyGroup) else ()
    return isinstance(warp.wait, _Spin) or any(isinstance(g.wait, _Spin) for g in groups)


def hang_report(warps: list[Warp]) -> str:
    """Returns what every live warp waits for, with one line for all warps of a CTA that wait for the same thing."""
    kernel = short_name(warps[0].code.entry.name)
    lines = [f"kernel {kernel} hangs: every live warp is blocked"]
    alike: dict[tuple[str, str], list[int]] = {}
    for warp in warps:
        where = "diverged" if warp.groups else _line(warp, warp.pc)
        what = warp.wait.describe() if warp.wait else "runnable"
        cta = f"cta {warp.cta.idx} rank {warp.cta.rank}"
        alike.setdefault((cta, f"{where}: {what}"), []).append(warp.idx)
    for (cta, text), numbers in alike.items():
        plural = "s" if len(numbers) > 1 else ""
        lines.append(f"  {cta} warp{plural} {', '.join(map(str, numbers))}: {text}")
    return "\n".join(lines)


def _line(warp: Warp, pc: int) -> str:
    return warp.code.insts[pc].place


def _place(warp: Warp, pc: int) -> str:
    return f"kernel {short_name(warp.code.entry.name)} cta {warp.cta.idx} warp {warp.idx}: {_line(warp, pc)}"


def _located(error: Exception, warp: Warp, pc: int) -> EmulatorError:
    kind = type(error) if isinstance(error, EmulatorError) else EmulatorError
    text = str(error) if isinstance(error, EmulatorError) else f"{type(error).__name__}: {error}"
    place = _place(warp, pc)
    return kind(text if text.startswith(place) else f"{place}: {text}")


def _same_registers(before: list[Any], now: list[Any]) -> bool:
    for a, b in zip(before, now, strict=True):
        if a is b:
            continue
        if a.__class__ is np.ndarray or b.__class__ is np.ndarray:
            if not np.array_equal(a, b):
                return False
        elif a != b:
            return False
    return True


def _cluster_origins(launch: Launch) -> list[tuple[int, int, int]]:
    for axis, (grid, cluster) in enumerate(zip(launch.grid, launch.cluster, strict=True)):
        if cluster < 1 or grid % cluster:
            raise EmulatorError(
                f"grid {launch.grid} is not a multiple of cluster {launch.cluster} on axis {axis}"
            )
    ranges = [range(0, g, c) for g, c in zip(launch.grid, launch.cluster, strict=True)]
    return [(x, y, z) for z, y, x in itertools.product(*reversed(ranges))]
