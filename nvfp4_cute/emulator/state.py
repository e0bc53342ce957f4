"""State of a running launch: clusters, their CTAs, and warps of 32 lanes.

Instructions change this state, and the machine owns it. Instructions know the machine and its observers only as
protocols (`Simulator`, `Executable`, `observers`), so nothing here imports the machine or the instructions.
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
    Condition,
    Diverging,
    Group,
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
"""Shared memory of an SM in bytes, and the bytes reserved per CTA."""
SM_QUARTERS, QUARTER_REGISTERS = 4, 16384
"""Quarters of an SM, and 32-bit registers per quarter. Full warps get them, in steps of eight per thread."""


@dataclass
class Stats:
    """Work of a machine, summed over launches. Instructions are warp instructions.

    Attributes:
        banks: accesses to shared memory by instruction, with their bank conflicts, if the machine counts them.
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
    """Contents of the slots of an entry's registers when a warp starts; see `isa.Builder`."""

    template: list[Any]
    names: list[str]
    specials: dict[int, str]
    shared_symbols: dict[int, int]
    params: dict[int, int]

    @property
    def arch(self) -> object:
        """Target of the module."""
        ...

    def poison(self, slot: int) -> Any:
        """Returns the content of a register that was never written."""
        ...


class Executable(Protocol):
    """An entry that warps can run; see `code.Code`."""

    program: Program
    entry: Entry
    buffers: list[np.ndarray]
    static_shared: int
    local_bytes: int
    polls: bool
    registers: int | None
    tails: list[tuple[tuple[Callable[["Warp"], Any], ...], tuple[int, ...]] | None]

    @property
    def together(self) -> "Callable[[], Executable] | None":
        """Returns the code that checks warps in lockstep; None on a machine that does not check."""
        ...

    @property
    def insts(self) -> Sequence[Inst]:
        """Instructions, by program counter."""
        ...

    @property
    def loops(self) -> list[tuple[int, int]]:
        """First instruction of each loop, and the instruction after the loop."""
        ...

    @property
    def builder(self) -> Slots:
        """Slots of the entry."""
        ...

    def tail(self, pc: int) -> tuple[tuple[Callable[["Warp"], Any], ...], tuple[int, ...]]:
        """Returns the steps to the end of the basic block of `pc`, their first instructions, and the index after the block."""
        ...

    def uses(self, slots: frozenset[int]) -> bool:
        """Whether any instruction reads one of these slots."""
        ...

    def live_at(self, pc: int) -> frozenset[int]:
        """Returns the slots whose value at `pc` may still be read."""
        ...

    def undefined(self, warp: "Warp", pc: int) -> list[int]:
        """Returns slots of registers that instruction `pc` reads and that were never written."""
        ...


class Simulator(Protocol):
    """The machine, from the point of view of warps and CTAs; `machine.Machine` documents the attributes."""

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
        """Finds hazards, or None."""
        ...

    @property
    def recorder(self) -> Recorder | None:
        """Records everything that takes time, or None."""
        ...

    @property
    def forms(self) -> Any:
        """Notes the forms of hardware use, or None."""
        ...

    def cancel_cluster(self) -> tuple[int, int, int] | None:
        """Takes the next cluster that has not started out of the grid. Returns its first CTA's coordinates, or None."""
        ...


@dataclass(frozen=True)
class Launch:
    """One kernel launch: code, grid and cluster shape, shared memory, and the parameter buffer.

    Attributes:
        cooperative: all of its CTAs run at the same time.
        programmatic: it may start before the previous launch has ended (attribute of programmatic stream
            serialization).
        machine_code: the assembler's output for it, if known.
        tensor_maps: tensor maps among its parameters that copies have used, by address.
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
        """Bytes of shared memory per CTA, named variables included."""
        return self.code.static_shared + self.smem_bytes

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return self.block[0] * self.block[1] * self.block[2]

    def resident_ctas(self, sm_count: int) -> int:
        """Returns the number of CTAs that a device holds at a time.

        Limits per SM: 2048 threads, the registers, 228 KiB of shared memory, and 32 CTAs.
        """
        shared = self.shared_bytes + RESERVED_SHARED
        most = min(32, 2048 // self.threads, SM_SHARED // shared)
        if self.machine_code is not None:
            of_warp = 32 * (-(-self.machine_code.registers // 8) * 8)
            most = min(most, SM_QUARTERS * (QUARTER_REGISTERS // of_warp) // -(-self.threads // 32))
        return sm_count * max(1, most)


class Warp(Diverging):
    """32 lanes. Handlers use `regs` (through Builder), the active mask, and `cta`.

    Attributes:
        idx: warp index in the CTA.
        active, num_active, all_active: lanes that execute the current step.
        live: lanes that have not exited.
        groups: the other groups of a diverged warp.
        protected: slots that a write must merge because a waiting group still reads them.
        pending: state of a step that has begun and is blocked (for example a barrier that it has arrived at).
        polled: a step read memory that another warp may change (hint for spin detection).
        gives_way: the warp is the first to find a phase of an mbarrier complete that others may wait for, so its turn
            ends.
        looks: registers and the machine's ``changes`` after each such step, by the program counter that follows it.
        operations: asynchronous operations of the warp, if the mode tracks them.
        track: the recorder's notes about it.
        budgets: registers per thread that the warp has set, in order.
    """

    __slots__ = (
        "budgets", "cta", "done", "executed", "gives_way", "idx", "local", "looks", "operations", "pc", "pending", "polled",
        "regs", "track", "wait",
    )  # fmt: skip

    warps = 1
    """Number of warps that execute a step together (`lockstep.Wide`)."""

    def __init__(self, cta: "Cta", idx: int, lanes: int):
        """Starts a warp at the entry point with its first `lanes` lanes alive."""
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

    @property
    def lanes(self) -> int:
        """Active lanes, one bit each."""
        return (
            EVERY_LANE
            if self.all_active
            else int.from_bytes(np.packbits(self.active, bitorder="little").tobytes(), "little")
        )

    def first_lane(self) -> int:
        """Lowest active lane."""
        return 0 if self.all_active else int(self.active.argmax())

    @contextmanager
    def as_if(self, lanes: np.ndarray) -> Iterator[None]:
        """Context manager that makes the given lanes the active ones."""
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

    def missing(self, members: int = 0xFFFFFFFF) -> np.ndarray | None:
        """Returns live lanes of `members` that are not active and must still arrive at a ``.sync`` instruction, or None."""
        if not self.groups and self.num_active == LANES:
            return None
        lacking = self.live & ~self.active & bits_mask(members)
        return lacking if lacking.any() else None

    def clock(self, name: str) -> int:
        """Returns a clock-like special register: executed instructions, or nanoseconds for the global timer."""
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
        idx: grid coordinates.
        rank: %cluster_ctarank.
        smem, tmem: its memories.
    """

    def __init__(
        self, machine: Simulator, cluster: "Cluster", launch: Launch, rank: int, idx: tuple[int, int, int]
    ):
        """Makes a CTA that is ready to run, with fresh poisoned memories."""
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
        """Stores the addresses of shared variables and of parameters in the slots that name them."""
        builder = warp.code.builder
        for slot, offset in builder.shared_symbols.items():
            warp.regs[slot] = self.rank << RANK_SHIFT | offset
        base = self.launch.params.ctypes.data
        for slot, offset in builder.params.items():
            warp.regs[slot] = base + offset

    def issue(self, warp: Warp, engine: Engine, effect: Callable[[], None]) -> Operation | None:
        """Submits an asynchronous operation of a warp. `effect` does everything that it does to memory and barriers."""
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
        """Submits a bulk store: `read` captures shared memory, `write` gets its return value."""
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
        """Returns the initialised mbarrier at a shared-memory offset.

        Raises:
            EmulatorError: no mbarrier was initialised at the offset.
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
        """Number of warps that have not exited."""
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
        """Executes barrier.cluster.arrive for one warp.

        Raises:
            EmulatorError: the warp arrived already and has not waited.
        """
        if warp in self.phase_of:
            raise EmulatorError("barrier.cluster.arrive twice without barrier.cluster.wait")
        self.phase_of[warp] = self.phase
        self._arrived.add(warp)
        self._complete()

    def wait(self, warp: Warp) -> Wait:
        """Executes barrier.cluster.wait for one warp. Returns a wait for the end of the phase in which it arrived.

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
        """Returns the CTA and the offset of a shared::cluster address.

        Raises:
            EmulatorError: the rank is not in this cluster.
        """
        rank = address >> RANK_SHIFT
        if rank >= len(self.ctas):
            raise EmulatorError(
                f"shared::cluster address {address:#x} names rank {rank} of a cluster of {len(self.ctas)} CTAs"
            )
        return self.ctas[rank], address & OFFSET_MASK
