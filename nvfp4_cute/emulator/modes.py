"""When asynchronous operations happen: at issue (eager), as late as the memory model allows (lazy), or at random.

An operation is the asynchronous work of an instruction: a TMA copy, a matrix multiply, the arrival of a commit. Eager
machines without checks do it at once and never come here. All others submit an `Operation` to the machine's `Queue`,
which keeps only the order that the PTX ISA guarantees:

* tcgen05.mma, .cp and .commit of one warp happen in program order (one pipe; a commit arrives after everything before
it);
* tcgen05.ld of one warp happen in order among themselves, and so do tcgen05.st, wgmma.mma_async, and cp.async;
* TMA and bulk copies have no order, even if one thread issues them;
* the write of a bulk store follows its read.

Waits for exactly these operations (wait_group, tcgen05.wait) finish them. Groups of bulk and small copies belong to the
lanes that issued them, so a wait by other lanes of the warp does not cover them.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any, Protocol, TypeVar

W = TypeVar("W")
P = TypeVar("P", "Operation", "Group")
Effect = Callable[[], Any]

TURNS = (1, 2, 5, 20, 100, 2000)
"""Lengths of turns, in basic blocks, that the random mode chooses from."""

LAG = 0.6
"""Random mode: chance that no operation happens after a warp's turn, and that no further one happens after each."""


class Engine(Enum):
    """Engine that performs an operation. Operations of one warp on one ordered engine happen in program order."""

    COPY = "TMA or bulk copy"
    STORE = "bulk store"
    STORE_READ = "read of a bulk store"
    TCGEN05 = "tcgen05"
    TMEM_LOAD = "tcgen05.ld"
    TMEM_STORE = "tcgen05.st"
    CP_ASYNC = "cp.async"
    WGMMA = "wgmma"

    __hash__ = object.__hash__  # Enum's own hash is written in Python, and engines are keys


UNORDERED = (Engine.COPY, Engine.STORE, Engine.STORE_READ)


class Issuer(Protocol):
    """A warp, as far as its operations are concerned (`state.Warp`)."""

    operations: "WarpOperations | None"
    pc: int

    @property
    def lanes(self) -> int:
        """Active lanes, one bit each."""
        ...


class OperationWatcher(Protocol):
    """An observer of every operation (`check.hazards.Checker`)."""

    current: Any
    """Record of the current operation."""

    def issued(self, operation: "Operation") -> Any:
        """Called when an operation was submitted. Returns a record of it."""
        ...

    def completed(self, operation: "Operation") -> None:
        """Called when the warp that issued an operation knows that it is complete."""
        ...

    def used(self, operation: "Operation", index: int) -> None:
        """Called when a register that an operation wrote is used."""
        ...

    def loaded(self, operation: "Operation", slots: Sequence[int | None]) -> None:
        """Called when a finished operation has written registers (None: a sink)."""
        ...


class Operation:
    """Asynchronous work of an engine. The queue calls `run` once.

    Attributes:
        warp: issuing warp.
        pc: index of the issuing instruction.
        engine: engine that performs it.
        before: an earlier operation that must be done first, or None.
        done: it has happened.
        awaited: a wait instruction of the warp covered it.
        lanes: lanes of the warp that issued it, one bit each.
        result: return value of `effect` (values for registers).
        record: the hazard checker's record of it.
    """

    __slots__ = (
        "awaited",
        "before",
        "done",
        "effect",
        "engine",
        "lanes",
        "pc",
        "queue",
        "record",
        "result",
        "warp",
    )

    def __init__(self, queue: "Queue", warp: Any, engine: Engine, effect: Effect, before: "Operation | None"):
        """`effect`: does everything that the operation does to memory, barriers, and registers."""
        self.queue, self.warp, self.engine, self.effect = queue, warp, engine, effect
        self.before = before
        self.pc = warp.pc
        self.lanes = warp.lanes
        self.done = self.awaited = False
        self.result: Any = None
        self.record: Any = None

    def finish(self) -> None:
        """Performs the operation now, after everything that must precede it."""
        if not self.done:
            self.queue.complete(self)


EVERY_LANE = (1 << 32) - 1


@dataclass(slots=True, eq=False)
class Group:
    """Operations that `lanes` (one bit each) of a warp closed together. `read`: a wait_group.read has covered them."""

    operations: list[Operation]
    lanes: int
    read: bool = False


class Groups:
    """Groups of operations that lanes of a warp close with commit_group and await with wait_group.

    Attributes:
        open: operations since the last commit_group.
        closed: groups that no wait_group has covered.
    """

    __slots__ = ("closed", "open")

    def __init__(self) -> None:
        """Starts without operations."""
        self.open: list[Operation] = []
        self.closed: deque[Group] = deque()

    def close(self, lanes: int = EVERY_LANE) -> None:
        """Executes commit_group for some lanes; operations of other lanes stay open."""
        own, self.open = _parted(self.open, lanes)
        self.closed.append(Group(own, lanes))

    def take(self, pending: int, lanes: int = EVERY_LANE) -> list[Operation]:
        """Returns operations that must be complete when at most the `pending` newest groups may be under way.

        `lanes`: only groups of these lanes.
        """
        own, _ = _parted(self.closed, lanes)
        covered = own[: max(0, len(own) - pending)]
        taken: list[Operation] = []
        for group in covered:
            mine, group.operations = _parted(group.operations, lanes)
            taken += mine
            if not group.operations:
                self.closed.remove(group)
        return taken

    def finish_first(self, count: int) -> None:
        """Performs the operations of the oldest `count` closed groups, if any, although nothing has waited for them."""
        for group in islice(self.closed, max(count, 0)):
            for operation in group.operations:
                operation.finish()

    def take_reads(self, pending: int, lanes: int = EVERY_LANE) -> list[Operation]:
        """Like `take`, for wait_group.read: returns the reads of bulk stores, each once."""
        own, _ = _parted(self.closed, lanes)
        taken: list[Operation] = []
        for group in own[: max(0, len(own) - pending)]:
            if not group.read:
                mine, others = _parted(group.operations, lanes)
                group.read = not others
                taken += [operation for operation in mine if operation.engine is Engine.STORE_READ]
        return taken


def _parted(items: Iterable[P], lanes: int) -> tuple[list[P], list[P]]:
    """Returns the items that some of the lanes issued or closed, and the other items."""
    if lanes == EVERY_LANE:
        return list(items), []
    own: list[P] = []
    others: list[P] = []
    for item in items:
        (own if item.lanes & lanes else others).append(item)
    return own, others


class WarpOperations:
    """Operations of one warp: the newest of each ordered engine, its groups, and its wgmma-groups.

    Attributes:
        commits: number of operations issued before each committed wgmma-group (0 unless checked).
    """

    __slots__ = ("commits", "groups", "last")

    def __init__(self) -> None:
        """Starts without operations."""
        self.last: dict[Engine, Operation] = {}
        self.groups: dict[Engine, Groups] = {}
        self.commits: list[int] = []

    def group(self, engine: Engine) -> Groups:
        """Returns the groups of an engine."""
        return self.groups.setdefault(engine, Groups())


class Queue:
    """Queue of issued operations that have not happened. This class performs them at once, for checked eager machines.

    Attributes:
        failed: turns an exception of an operation into the error to raise (set by the machine).
        checker: observer of every operation, or None.
    """

    immediate = True
    """Operations happen when they are submitted."""

    def __init__(self) -> None:
        """Starts empty."""
        self.pending: deque[Operation] = deque()
        self.checker: OperationWatcher | None = None
        self.failed: Callable[[Exception, Any, int], Exception] = lambda error, warp, pc: error

    # ---- issue -----------------------------------------------------------------------------------
    def submit(self, warp: Issuer, engine: Engine, effect: Effect) -> Operation:
        """Accepts an operation; the subclass decides when it happens."""
        own = operations_of(warp)
        before = None
        if engine not in UNORDERED:
            before = own.last.get(engine)
            if before is not None and before.done:
                before = None
        operation = Operation(self, warp, engine, effect, before)
        if engine not in UNORDERED:
            own.last[engine] = operation
        self._enter(operation)
        return operation

    def submit_store(self, warp: Issuer, read: Effect, write: Callable[[Any], None]) -> Operation:
        """Accepts a bulk store: `read` captures the source, `write` gets its return value. Returns the write."""
        source = self.submit_read(warp, read)
        target = Operation(self, warp, Engine.STORE, lambda: write(source.result), source)
        self._enter_group(target)
        return target

    def submit_read(self, warp: Issuer, read: Effect) -> Operation:
        """Accepts a read that ``wait_group.read`` waits for: of the source of a bulk store, or of a tensor map."""
        source = Operation(self, warp, Engine.STORE_READ, read, None)
        self._enter_group(source)
        return source

    def _enter_group(self, operation: Operation) -> None:
        self._enter(operation)
        operations_of(operation.warp).group(Engine.STORE).open.append(operation)

    def _enter(self, operation: Operation) -> None:
        if self.checker is not None:
            operation.record = self.checker.issued(operation)
        self.admit(operation)

    def admit(self, operation: Operation) -> None:
        """Performs a new operation at once; subclasses delay it."""
        self.complete(operation)

    def complete(self, operation: Operation) -> None:
        """Performs an operation after everything that must precede it."""
        chain = [operation]
        while (before := chain[-1].before) is not None and not before.done:
            chain.append(before)
        for one in reversed(chain):
            self._run(one)

    def _run(self, operation: Operation) -> None:
        operation.done, operation.before = True, None
        operation.warp.cta.machine.changes += 1
        if self.checker is not None:
            self.checker.current = operation.record
        try:
            operation.result = operation.effect()
        except Exception as error:
            raise self.failed(error, operation.warp, operation.pc) from error

    # ---- waiting ---------------------------------------------------------------------------------
    def wait_group(self, warp: Issuer, engine: Engine, pending: int, *, read: bool = False) -> None:
        """Finishes all but the `pending` newest groups of a warp; with `read`, only reads of bulk stores."""
        groups = operations_of(warp).group(engine)
        self.wait_for((groups.take_reads if read else groups.take)(pending, warp.lanes))

    def wait_for(self, operations: Iterable[Operation]) -> None:
        """Finishes operations because their warp waits for them."""
        for operation in operations:
            operation.finish()
            operation.awaited = True
            if self.checker is not None:
                self.checker.completed(operation)

    def used(self, operation: Operation, index: int) -> None:
        """Reports that a register which a checked operation wrote is used, so its value must be defined."""
        assert self.checker is not None
        self.checker.used(operation, index)

    def loaded(self, operation: Operation, slots: Sequence[int | None]) -> None:
        """Reports that a checked operation, performed at its issue, wrote registers (None: a sink)."""
        assert self.checker is not None
        self.checker.loaded(operation, slots)

    def wait_engine(self, warp: Issuer, engine: Engine) -> None:
        """Finishes all operations of a warp on an ordered engine."""
        last = operations_of(warp).last.pop(engine, None)
        if last is not None:
            self.wait_for([last])

    # ---- scheduling ------------------------------------------------------------------------------
    def order(self, warps: list[W]) -> list[W]:
        """Returns the order in which the warps take their next turns."""
        return warps

    def turn(self, longest: int) -> int:
        """Returns the length of the next turn, in basic blocks."""
        return longest

    def between_turns(self) -> None:
        """Called after each turn."""

    def advance(self) -> bool:
        """Performs some operation because no warp can continue. Returns False if there is none."""
        return False

    def drain(self) -> None:
        """Performs all operations, because the cluster has ended."""
        while self.advance():
            pass


class LazyQueue(Queue):
    """Delays each operation until something waits for exactly it, or until no warp can continue; then the oldest happens."""

    immediate = False

    def admit(self, operation: Operation) -> None:
        """Keeps the operation."""
        self.pending.append(operation)

    def advance(self) -> bool:
        """Performs the oldest operation."""
        while self.pending:
            operation = self.pending.popleft()
            if not operation.done:
                self.complete(operation)
                return True
        return False


class RandomQueue(Queue):
    """Operations happen in a random order at random moments; warps take turns of random length in random order."""

    immediate = False

    def __init__(self, seed: int):
        """Equal seeds give equal executions."""
        super().__init__()
        self.random = random.Random(seed)
        self.bag: list[Operation] = []

    def admit(self, operation: Operation) -> None:
        """Stores the operation until it is drawn."""
        self.bag.append(operation)

    def order(self, warps: list[W]) -> list[W]:
        """Returns the warps in random order."""
        return self.random.sample(warps, len(warps))

    def turn(self, longest: int) -> int:
        """Returns a random length: short turns are likely, the longest is possible."""
        return self.random.choice(TURNS)

    def between_turns(self) -> None:
        """Performs no operation often, and many operations sometimes."""
        while self.bag and self.random.random() > LAG:
            self.advance()

    def advance(self) -> bool:
        """Performs a random operation, or the first one that must precede it."""
        while self.bag:
            index = self.random.randrange(len(self.bag))
            operation = self.bag[index]
            while operation.before is not None and not operation.before.done:
                operation = operation.before
            if operation is self.bag[index] or operation.done:
                self.bag[index] = self.bag[-1]
                self.bag.pop()
            if not operation.done:
                self.complete(operation)
                return True
        return False


def make_queue(mode: str, *, checked: bool = False) -> Queue | None:
    """Returns the queue of a mode: "eager", "lazy", or "random:SEED". Returns None if operations need no record at all.

    Raises:
        ValueError: an unknown mode, or a seed that is not an integer.
    """
    if mode == "eager":
        return Queue() if checked else None
    if mode == "lazy":
        return LazyQueue()
    word, _, seed = mode.partition(":")
    if word == "random" and seed.removeprefix("-").isdecimal():
        return RandomQueue(int(seed))
    raise ValueError(f'mode {mode!r}: must be "eager", "lazy", or "random:SEED" with an integer seed')


def operations_of(warp: Issuer) -> WarpOperations:
    """Returns the record of a warp's operations, made on first use."""
    if warp.operations is None:
        warp.operations = WarpOperations()
    return warp.operations
