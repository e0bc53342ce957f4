"""What a launch has while it runs: clusters, their CTAs, and warps of 32 lanes.

Instructions change this state; the machine owns it. What they ask of the machine, and what watches them, they know as
protocols (`Simulator`, `Executable`, `observers`), so that nothing here needs the machine or the instructions.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from nvfp4_cute.emulator.addresses import OFFSET_MASK, RANK_SHIFT
from nvfp4_cute.emulator.banks import BankUse
from nvfp4_cute.emulator.cubin import MachineCode
from nvfp4_cute.emulator.faults import MbarrierFault
from nvfp4_cute.emulator.lanes import (
    ALL_LANES,
    LANES,
    NOTHING,
    REGROUP,
    Condition,
    Group,
    Signal,
    Wait,
    bits_mask,
    mask_bits,
)
from nvfp4_cute.emulator.memory import GlobalMemory, Mbarrier, SharedMemory, TensorMemory
from nvfp4_cute.emulator.modes import EVERY_LANE, Engine, Operation, Queue, WarpOperations
from nvfp4_cute.emulator.observers import Checker, Recorder
from nvfp4_cute.emulator.ptx import Entry, Inst, Program
from nvfp4_cute.emulator.specials import cta_specials, fill_constants
from nvfp4_cute.errors import EmulatorError

SM_SHARED, RESERVED_SHARED = 228 * 1024, 1024
SM_QUARTERS, QUARTER_REGISTERS = 4, 16384
"""Of an SM; of 32 bits, given to whole warps, eight for every thread at a time."""
"""Bytes of shared memory of an SM, and what it keeps for itself of each CTA's."""


@dataclass
class Stats:
    """What a machine executed, summed over launches. Instructions are warp instructions.

    Attributes:
        banks: accesses to shared memory by instruction, with their bank conflicts, where the machine counts them.
    """

    launches: int = 0
    ctas: int = 0
    instructions: int = 0
    load_bytes: int = 0
    store_bytes: int = 0
    tma_load_bytes: int = 0
    tma_store_bytes: int = 0
    mmas: int = 0
    seconds: float = 0.0
    banks: BankUse = field(default_factory=BankUse)


class Slots(Protocol):
    """What the slots of an entry's registers hold when a warp starts, as `isa.Builder` has it."""

    template: list[Any]
    names: list[str]
    specials: dict[int, str]
    shared_symbols: dict[int, int]
    params: dict[int, int]

    @property
    def arch(self) -> object:
        """What the module was compiled for."""
        ...

    def poison(self, slot: int) -> Any:
        """What a register holds that nobody wrote."""
        ...


class Executable(Protocol):
    """An entry that warps can run, as `code.Code` has it."""

    program: Program
    entry: Entry
    buffers: list[np.ndarray]
    static_shared: int
    local_bytes: int
    polls: bool
    registers: int | None
    tails: list[tuple[tuple[Callable[["Warp"], Any], ...], tuple[int, ...]] | None]

    @property
    def insts(self) -> Sequence[Inst]:
        """Its instructions, by program counter."""
        ...

    @property
    def loops(self) -> list[tuple[int, int]]:
        """First instruction of each loop, and the one after it."""
        ...

    @property
    def builder(self) -> Slots:
        """Its slots."""
        ...

    def tail(self, pc: int) -> tuple[tuple[Callable[["Warp"], Any], ...], tuple[int, ...]]:
        """Steps from `pc` to the end of its basic block, the index of the first instruction of each, and the one after them."""
        ...

    def uses(self, slots: frozenset[int]) -> bool:
        """Whether any instruction reads one of the slots."""
        ...

    def live_at(self, pc: int) -> frozenset[int]:
        """Slots whose value at `pc` may still be read."""
        ...

    def undefined(self, warp: "Warp", pc: int) -> list[int]:
        """Slots of registers that instruction `pc` reads and nobody wrote."""
        ...


class Simulator(Protocol):
    """The machine, as what runs on it sees it: `machine.Machine` says what the attributes are."""

    memory: GlobalMemory
    stats: Stats
    changes: int
    sm_count: int

    @property
    def queue(self) -> Queue | None:
        """Asynchronous operations under way."""
        ...

    @property
    def immediate(self) -> bool:
        """Whether asynchronous operations happen when they are issued."""
        ...

    @property
    def checker(self) -> Checker | None:
        """Finds hazards; None where nobody asked for that."""
        ...

    @property
    def recorder(self) -> Recorder | None:
        """Notes what takes time."""
        ...

    @property
    def forms(self) -> Any:
        """Notes what forms kernels use; None where nobody asked for that."""
        ...

    def cancel_cluster(self) -> tuple[int, int, int] | None:
        """Take the next cluster that has not started out of the grid."""
        ...


@dataclass(frozen=True)
class Launch:
    """One kernel launch: code, grid and cluster shape, shared memory, and the parameter buffer.

    Attributes:
        cooperative: all its CTAs run at the same time.  programmatic: it may start before the one before it has ended
            (the attribute of programmatic stream serialisation).
        machine_code: what the assembler made of it, if that is known.
        tensor_maps: those of its parameters that copies have used, by address.
    """

    code: Executable
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    params: np.ndarray
    explicit_cluster: bool = False
    cooperative: bool = False
    programmatic: bool = False
    machine_code: MachineCode | None = None
    tensor_maps: dict[int, Any] = field(default_factory=dict)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA, named variables included."""
        return self.code.static_shared + self.smem_bytes

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return self.block[0] * self.block[1] * self.block[2]

    def resident_ctas(self, sm_count: int) -> int:
        """CTAs that a device holds at a time: by threads (2048 an SM), registers, shared memory (228 KiB), and 32 CTAs an SM."""
        shared = self.shared_bytes + RESERVED_SHARED
        most = min(32, 2048 // self.threads, SM_SHARED // shared)
        if self.machine_code is not None:
            of_warp = 32 * (-(-self.machine_code.registers // 8) * 8)
            most = min(most, SM_QUARTERS * (QUARTER_REGISTERS // of_warp) // -(-self.threads // 32))
        return sm_count * max(1, most)


class Warp:
    """32 lanes. Handlers use `regs` (through Builder), the active mask, and `cta`.

    Attributes:
        idx: warp index in the CTA.  active / num_active / all_active: lanes that execute the current step.
        live: lanes that have not exited.  groups: the other groups of a diverged warp.
        protected: slots that a write must merge because a waiting group still reads them.
        pending: state of a step that has begun and is blocked (a barrier already arrived at).
        polled: a step looked at memory that another warp may change (hint for spin detection).
        gives_way: it is the first to find a phase of an mbarrier complete that others may have to see: its turn ends.
        looks: by program counter after such a step, the registers there and what the machine's ``changes`` were.
        operations: asynchronous operations of the warp, where the mode keeps track of them.
        track: what a recorder notes about it, in a form of its own.
        budgets: registers of a thread that the warp has set, one after the other.
    """

    __slots__ = (
        "active", "all_active", "budgets", "code", "cta", "done", "executed", "gives_way", "groups", "idx", "live", "local",
        "looks", "num_active", "operations", "pc", "pending", "polled", "protected", "regs", "track", "wait",
    )  # fmt: skip

    warps = 1
    """How many warps execute a step together (`lockstep.Wide`)."""

    def __init__(self, cta: "Cta", idx: int, lanes: int):
        """A warp at the entry point with its first `lanes` lanes alive."""
        self.cta, self.idx, self.code = cta, idx, cta.launch.code
        self.live = ALL_LANES if lanes == LANES else np.arange(LANES) < lanes
        self.groups: list[Group] = []
        self.regs: list[Any] = self.code.builder.template.copy()
        self.local: np.ndarray | None = None
        self.pending: Wait | None = None
        self.operations: WarpOperations | None = None
        self.track: Any
        self.budgets: tuple[int, ...] = ()
        self.wait: Wait | None = None
        self.looks: dict[int, tuple[list[Any], int]] = {}
        self.polled = self.gives_way = self.done = False
        self.pc = self.executed = 0
        self.resume(self.live)

    def resume(self, mask: np.ndarray) -> None:
        """Make `mask` the active lanes and work out which registers the waiting groups still need."""
        self.active = mask
        self.num_active = int(np.count_nonzero(mask))
        self.all_active = self.num_active == LANES
        protected = NOTHING
        for group in self.groups:
            live = self.code.live_at(group.pc)
            protected = protected | live if protected else live
        self.protected = protected

    @property
    def lanes(self) -> int:
        """Active lanes, a bit each."""
        return (
            EVERY_LANE
            if self.all_active
            else int.from_bytes(np.packbits(self.active, bitorder="little").tobytes(), "little")
        )

    def active_lanes(self) -> list[int]:
        """Indices of the active lanes, ascending."""
        return np.flatnonzero(self.active).tolist()

    def first_lane(self) -> int:
        """Lowest active lane."""
        return 0 if self.all_active else int(self.active.argmax())

    @contextmanager
    def as_if(self, lanes: np.ndarray) -> Iterator[None]:
        """Within the block the given lanes are the active ones."""
        saved = self.active, self.num_active, self.all_active
        self.active, self.num_active = lanes, int(np.count_nonzero(lanes))
        self.all_active = self.num_active == LANES
        try:
            yield
        finally:
            self.active, self.num_active, self.all_active = saved

    def active_bits(self) -> int:
        """Active mask as an integer, bit i = lane i."""
        return mask_bits(self.active)

    def split(self, taken: np.ndarray, target: int, fallthrough: int) -> Signal:
        """Send the lanes of `taken` to `target` and the other active lanes to `fallthrough`."""
        return self.scatter([(target, taken), (fallthrough, self.active & ~taken)])

    def split_once(self, taken: np.ndarray, count: int, target: int, fallthrough: int) -> int:
        """`split` of a warp that is not diverged (an elected lane, mostly): returns where to go on."""
        rest = self.active & ~taken
        first, second = (target, taken, count), (fallthrough, rest, self.num_active - count)
        if fallthrough < target:
            first, second = second, first
        self.groups.append(Group(second[0], second[1]))
        pc, self.active, self.num_active = first
        self.all_active = False
        self.protected = self.code.live_at(second[0])
        return pc

    def scatter(self, parts: list[tuple[int, np.ndarray]]) -> Signal:
        """Replace the running group by groups of (program counter, lanes)."""
        self.groups.extend(Group(pc, mask) for pc, mask in parts)
        self.num_active = 0
        return REGROUP

    def exit_lanes(self, mask: np.ndarray, next_pc: int) -> Signal:
        """End the lanes of `mask`; the rest of the group goes on at `next_pc`."""
        self.live = self.live & ~mask
        rest = self.active & ~mask
        if rest.any():
            self.groups.append(Group(next_pc, rest))
        self.num_active = 0
        return REGROUP

    def missing(self, members: int = 0xFFFFFFFF) -> np.ndarray | None:
        """Live lanes of `members` that are not active, or None: who must still arrive at a ``.sync`` instruction."""
        if not self.groups and self.num_active == LANES:
            return None
        lacking = self.live & ~self.active & bits_mask(members)
        return lacking if lacking.any() else None

    def clock(self, name: str) -> int:
        """Value of a clock-like special register: executed instructions, or nanoseconds for the global timer."""
        if name.startswith("%globaltimer"):
            value = time.perf_counter_ns()
        else:
            value = self.executed
            self.executed += 1
        if name.endswith("_hi"):
            return value >> 32
        return value if name in ("%clock64", "%globaltimer") else value & 0xFFFFFFFF


class Cta:
    """One thread block: its memories, warps, and named barriers.

    Attributes:
        idx: grid coordinates.  rank: %cluster_ctarank.  smem / tmem: its memories.
    """

    def __init__(
        self, machine: Simulator, cluster: "Cluster", launch: Launch, rank: int, idx: tuple[int, int, int]
    ):
        """A CTA ready to run, with fresh poisoned memories."""
        self.machine, self.cluster, self.launch = machine, cluster, launch
        self.rank, self.idx = rank, idx
        self.smem = SharedMemory(launch.shared_bytes)
        self.tmem = TensorMemory()
        self.named_barriers: dict[int, Any] = {}
        count = -(-launch.threads // LANES)
        self.warps = [Warp(self, i, min(LANES, launch.threads - LANES * i)) for i in range(count)]
        values = cta_specials(launch, idx, rank, count, machine.sm_count)
        for warp in self.warps:
            fill_constants(warp.regs, warp.code.builder.specials, warp.idx, launch.block, values)
            self._place_symbols(warp)

    def _place_symbols(self, warp: Warp) -> None:
        """Addresses of shared variables and of parameters, in the slots that name them."""
        builder = warp.code.builder
        for slot, offset in builder.shared_symbols.items():
            warp.regs[slot] = self.rank << RANK_SHIFT | offset
        base = self.launch.params.ctypes.data
        for slot, offset in builder.params.items():
            warp.regs[slot] = base + offset

    def issue(self, warp: Warp, engine: Engine, effect: Callable[[], None]) -> Operation | None:
        """Submit an asynchronous operation of a warp; `effect` does everything it does to memory and barriers."""
        queue, recorder = self.machine.queue, self.machine.recorder
        if queue is not None:
            return queue.submit(warp, engine, effect)
        if recorder is not None:
            recorder.issue(warp, engine, effect)
            return None
        self.machine.changes += 1
        effect()
        return None

    def issue_store(self, warp: Warp, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        """Submit a bulk store: `read` captures shared memory, `write` gets what it returned."""
        queue, recorder = self.machine.queue, self.machine.recorder
        if queue is not None:
            queue.submit_store(warp, read, write)
            return
        if recorder is not None:
            recorder.issue_store(warp, read, write)
            return
        self.machine.changes += 1
        write(read())

    def mbarrier(self, offset: int) -> Mbarrier:
        """The initialised mbarrier at a shared-memory offset.

        Raises:
            EmulatorError: no mbarrier was initialised there.
        """
        self.machine.changes += 1
        found = self.smem.barriers.get(offset)
        if found is None:
            raise MbarrierFault(
                f"no mbarrier was initialised at smem+{offset:#x} of CTA {self.idx} (rank {self.rank})"
            )
        return found

    @property
    def live_warps(self) -> int:
        """Warps that have not exited."""
        return sum(not w.done for w in self.warps)


class Cluster:
    """CTAs that run together and see one another's shared memory. `ctas[rank]`."""

    def __init__(self, machine: Simulator, launch: Launch, origin: tuple[int, int, int]):
        """`origin`: grid coordinates of the CTA with rank 0."""
        self.machine, self.launch, self.origin = machine, launch, origin
        cx, cy, cz = launch.cluster
        self.ctas: list[Cta] = []
        for z, y, x in itertools.product(range(cz), range(cy), range(cx)):
            idx = (origin[0] + x, origin[1] + y, origin[2] + z)
            self.ctas.append(Cta(machine, self, launch, len(self.ctas), idx))
        self.phase = 0
        self._arrived: set[Warp] = set()
        self.phase_of: dict[Warp, int] = {}

    def arrive(self, warp: Warp) -> None:
        """barrier.cluster.arrive of one warp.

        Raises:
            EmulatorError: the warp arrived already and has not waited.
        """
        if warp in self.phase_of:
            raise EmulatorError("barrier.cluster.arrive twice without barrier.cluster.wait")
        self.phase_of[warp] = self.phase
        self._arrived.add(warp)
        self._complete()

    def wait(self, warp: Warp) -> Wait:
        """barrier.cluster.wait of one warp: the end of the phase that it arrived in.

        Raises:
            EmulatorError: the warp has not arrived.
        """
        if warp not in self.phase_of:
            raise EmulatorError("barrier.cluster.wait without barrier.cluster.arrive")
        phase = self.phase_of.pop(warp)

        def passed() -> bool:
            self._complete()
            return self.phase != phase

        def text() -> str:
            lacking = [f"rank {w.cta.rank} warp {w.idx}" for w in self._live() if w not in self._arrived]
            return f"cluster barrier: not arrived: {', '.join(lacking)}"

        return Condition(passed, text)

    def _live(self) -> list[Warp]:
        return [w for cta in self.ctas for w in cta.warps if not w.done]

    def _complete(self) -> None:
        # Warps that exited count as arrived.
        if self._arrived and all(w in self._arrived for w in self._live()):
            self.phase += 1
            self._arrived.clear()
            self.machine.changes += 1

    def resolve(self, address: int) -> tuple[Cta, int]:
        """CTA and offset that a shared::cluster address means.

        Raises:
            EmulatorError: the rank is not in this cluster.
        """
        rank = address >> RANK_SHIFT
        if rank >= len(self.ctas):
            raise EmulatorError(
                f"shared::cluster address {address:#x} names rank {rank} of a cluster of {len(self.ctas)} CTAs"
            )
        return self.ctas[rank], address & OFFSET_MASK
