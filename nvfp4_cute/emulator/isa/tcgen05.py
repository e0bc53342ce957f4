"""Tensor memory: allocation, copies from shared memory, loads and stores, and completion (PTX ISA "tcgen05").

All asynchronous operations go through `Cta.issue` to the engines that `modes` orders. mma, cp and commit share one
engine, so a commit arrives after every earlier operation of its thread. Loads and stores have one engine each.
`tcgen05_mma` has matrix instructions; `tcgen05_copy` has copies from shared memory and shifts.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator import silicon
from nvfp4_cute.emulator.descriptors import LOAD_SHAPES, load_map
from nvfp4_cute.emulator.faults import TensorMemoryFault
from nvfp4_cute.emulator.isa import Builder, Mods, Step, handler, merge_lanes
from nvfp4_cute.emulator.isa import tcgen05_copy as tcgen05_copy  # registers tcgen05.cp and .shift
from nvfp4_cute.emulator.isa import tcgen05_mma as tcgen05_mma  # registers tcgen05.mma
from nvfp4_cute.emulator.isa.issue import (
    any_shared,
    converged,
    cta_group,
    cta_pair,
    in_mask,
    issuing_pair,
    own_offset,
    per_thread,
    vector_items,
)
from nvfp4_cute.emulator.lanes import Condition
from nvfp4_cute.emulator.late_registers import defer
from nvfp4_cute.emulator.memory import TMEM_POISON
from nvfp4_cute.emulator.modes import Engine
from nvfp4_cute.emulator.ptx import Inst, Sink

if TYPE_CHECKING:
    from nvfp4_cute.emulator.lanes import Wait
    from nvfp4_cute.emulator.state import Cta, Warp

LANE_SHIFT = 16
COLUMN_MASK = 0xFFFF
_U32 = np.dtype(np.uint32)


# ---- allocation --------------------------------------------------------------------------------------------------
@handler("tcgen05.alloc")
def alloc(inst: Inst, b: Builder) -> Step:
    """Allocates columns and writes their base address to shared memory; blocks until there is room.

    With cta_group::2 both CTAs of a pair execute it. The CTA of even rank allocates for both and continues; the other
    one waits for that. A B300 does the same (CUTLASS #3435): delaying the odd CTA stops nothing else.
    """
    mods = Mods(inst)
    group = cta_group(inst, mods)
    mods.drop("sync", "aligned", "shared::cta", "b32")
    mods.done()
    address, columns = b.address(inst.operands[0]), b.read(inst.operands[1], "u32")

    def run(warp: "Warp") -> "Wait | None":
        cta, lane = warp.cta, warp.first_lane()
        count = _one_value(columns(warp), lane)
        leader, follower = cta_pair(cta) if group == 2 else (cta, cta)
        if cta is leader:
            base = cta.tmem.alloc(count, follower.tmem if group == 2 else None)
        else:
            base = cta.tmem.claim(count)
        if base is None:
            return _no_room(count, leader, follower) if cta is leader else _not_promised(cta)
        offset = own_offset(cta, _one_value(address(warp), lane))
        cta.machine.changes += 1
        cta.smem.write(offset, np.array([base], np.uint32).view(np.uint8))
        return None

    return converged(run)


def _no_room(count: int, *ctas: "Cta") -> Condition:
    """Returns a wait of an allocation until one of the CTAs frees columns."""
    taken = [cta.tmem.owned.copy() for cta in ctas]
    live = ctas[0].tmem.allocations
    return Condition(
        lambda: any(bool((cta.tmem.owned != t).any()) for cta, t in zip(ctas, taken, strict=True)),
        lambda: f"tcgen05.alloc of {count} columns while {live} are live",
    )


def _not_promised(cta: "Cta") -> Condition:
    """Returns the odd CTA's wait for the allocation of the even one."""
    return Condition(
        lambda: bool(cta.tmem.promised),
        lambda: f"tcgen05.alloc.cta_group::2: the CTA of rank {cta.rank & ~1} has not executed it",
    )


@handler("tcgen05.dealloc")
def dealloc(inst: Inst, b: Builder) -> Step:
    """Frees an allocation; with cta_group::2 each CTA of a pair frees its own columns."""
    mods = Mods(inst)
    group = cta_group(inst, mods)
    mods.drop("sync", "aligned", "b32")
    mods.done()
    address, columns = b.read(inst.operands[0], "u32"), b.read(inst.operands[1], "u32")

    def run(warp: "Warp") -> None:
        lane = warp.first_lane()
        if group == 2:
            for peer in cta_pair(warp.cta):
                if peer.tmem.promised:
                    raise silicon.fault(
                        "pair-dealloc-order",
                        f"the CTA of rank {warp.cta.rank} frees columns before that of rank {peer.rank} has allocated",
                    )
        warp.cta.machine.changes += 1
        who = f"warp {warp.idx} at {inst.place}"
        warp.cta.tmem.dealloc(_one_value(address(warp), lane), _one_value(columns(warp), lane), who)

    return converged(run)


@handler("tcgen05.relinquish_alloc_permit")
def relinquish(inst: Inst, b: Builder) -> Step:
    """Gives up the right to allocate."""
    mods = Mods(inst)
    cta_group(inst, mods)
    mods.drop("sync", "aligned")
    mods.done()

    def run(warp: "Warp") -> None:
        warp.cta.tmem.may_allocate = False

    return converged(run)


def _one_value(value: Any, lane: int) -> int:
    """Returns the value on which all lanes must agree."""
    return int(value[lane]) if value.__class__ is np.ndarray else value


# ---- loads and stores --------------------------------------------------------------------------------------------
def _load_shape(inst: Inst, mods: Mods, packing: str) -> tuple[str, int, bool]:
    """Returns (shape, repetitions, packed) of a tcgen05.ld or .st; consumes all modifiers."""
    mods.drop("sync", "aligned", "b32")
    shape = mods.one_of(*LOAD_SHAPES)
    packed = mods.flag(packing)
    if shape is None or len(mods.left) != 1 or not mods.left[0][1:].isdigit() or mods.left[0][0] != "x":
        raise inst.unsupported(f"shape or repetition in {mods.left}")
    repeat = int(mods.left[0][1:])
    if repeat & (repeat - 1) or not 1 <= repeat <= LOAD_SHAPES[shape].most:
        raise inst.unsupported(f"repetition .x{repeat} of shape .{shape}")
    return shape, repeat, packed


_Reduction = Callable[[np.ndarray], np.ndarray]
"""uint32 (registers, 32) -> uint32 (32,)."""


def _reduction(inst: Inst, mods: Mods) -> _Reduction:
    """Returns the operation of a tcgen05.ld.red: the least or the greatest of a thread's values.

    f32: a number wins over a NaN unless `.NaN` is given; `.abs` compares and returns magnitudes.
    """
    operation, type_ = mods.one_of("min", "max"), mods.one_of("u32", "s32", "f32")
    absolute, nan = mods.flag("abs"), mods.flag("NaN")
    if operation is None or type_ is None or ((absolute or nan) and type_ != "f32"):
        raise inst.unsupported("operation or type of .red")
    if type_ == "f32":
        function = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}[operation][nan]
    else:
        function = {"min": np.minimum, "max": np.maximum}[operation]
    dtype = {"u32": np.uint32, "s32": np.int32, "f32": np.float32}[type_]

    def reduce(data: np.ndarray) -> np.ndarray:
        values = np.abs(data.view(dtype)) if absolute else data.view(dtype)
        result = function.reduce(values, axis=0)
        if type_ == "f32":
            result[np.isnan(result)] = np.uint32(0x7FFFFFFF).view(np.float32)
        return np.asarray(result).view(np.uint32)

    return reduce


class _Window:
    """The words that a load or store of one warp accesses.

    The lanes are those of the warp's quadrant of tensor memory (32 * (warp index mod 4)). If the address names a
    quadrant, it must be that one.
    """

    def __init__(self, shape: str, repeat: int, half_split: int, packed: bool):
        self.shape = shape
        self.lanes, self.columns = load_map(shape, repeat, half_split)
        if packed:
            self.columns = 2 * self.columns
        self.packed = packed
        self.width = int(self.columns.max()) + 1 + packed
        self.rectangular = shape == "32x32b" and not packed

    def origin(self, warp: "Warp", address: int) -> tuple[int, int]:
        """Returns the first lane and column.

        Raises:
            EmulatorError: a lane that the warp cannot reach, or columns that are not allocated.
        """
        quadrant, lane = divmod(address >> LANE_SHIFT & 0x7F, 32)
        column = address & COLUMN_MASK
        own = warp.idx % 4
        if quadrant not in (0, own):
            raise TensorMemoryFault(
                f"tensor-memory lanes {32 * quadrant}..{32 * quadrant + 31} from warp {warp.idx}, "
                f"which can reach lanes {32 * own}..{32 * own + 31} only"
            )
        if lane not in ((0,) if self.shape == "32x32b" else (0, 16)):
            raise TensorMemoryFault(
                f"tcgen05 shape {self.shape} at tensor-memory lane {lane} of the quadrant"
            )
        warp.cta.tmem.check(32 * own + lane, LOAD_SHAPES[self.shape].lanes, column, self.width)
        return 32 * own + lane, column

    def _span(self, lane: int, column: int) -> tuple[slice, slice]:
        """Returns the rectangle that encloses the words."""
        return slice(lane, lane + LOAD_SHAPES[self.shape].lanes), slice(column, column + self.width)

    def read(self, cta: "Cta", lane: int, column: int, reduce: _Reduction | None = None) -> np.ndarray:
        """Returns uint32 (registers, 32), a copy; with `reduce` one more row, the reduction of the others."""
        checker = cta.machine.checker
        if checker is not None:
            words = checker.read_tensor(cta, *self._span(lane, column))
            if words is not None:
                unwritten = words[self.lanes, self.columns].all(axis=1)
                checker.note_unwritten(unwritten if reduce is None else np.append(unwritten, unwritten.any()))
        data = self._words(cta.tmem.columns(column, self.width), lane, column)
        return data if reduce is None else np.concatenate([data, reduce(data)[None]])

    def _words(self, words: np.ndarray, lane: int, column: int) -> np.ndarray:
        if self.rectangular:
            return words[lane : lane + 32, column : column + self.width].T.copy()
        rows, columns = self.lanes + lane, self.columns + column
        if self.packed:
            return (words[rows, columns] & 0xFFFF) | (words[rows, columns + 1] << 16)
        return words[rows, columns]

    def write(self, cta: "Cta", lane: int, column: int, data: np.ndarray) -> None:
        """Stores uint32 (registers, 32). Unpacking stores each half in the low half of a word."""
        words, checker = cta.tmem.columns(column, self.width), cta.machine.checker
        if checker is not None:
            checker.write_tensor(cta, *self._span(lane, column))
        rows, columns = self.lanes + lane, self.columns + column
        if self.packed:
            words[rows, columns] = data & 0xFFFF
            words[rows, columns + 1] = data >> 16
        else:
            words[rows, columns] = data


def _window(inst: Inst, b: Builder, shape: str, repeat: int, packed: bool, extra: tuple[Any, ...]) -> _Window:
    if (shape == "16x32bx2") != bool(extra):
        raise inst.unsupported("the half-split offset belongs to shape .16x32bx2")
    return _Window(shape, repeat, b.imm(extra[0]) if extra else 0, packed)


@handler("tcgen05.ld")
def load(inst: Inst, b: Builder) -> Step:
    """Loads registers of a warp from tensor memory; ready after tcgen05.wait::ld. `.red` also reduces them."""
    mods = Mods(inst)
    operands = list(inst.operands)
    reduce = _reduction(inst, mods) if mods.flag("red") else None
    results = [operands.pop(1)] if reduce else []
    shape, repeat, packed = _load_shape(inst, mods, "pack::16b")
    if reduce and (shape != "32x32b" or repeat < 2 or packed):
        raise inst.unsupported(".red other than of shape .32x32b with at least .x2")
    window = _window(inst, b, shape, repeat, packed, tuple(operands[2:]))
    registers = (*vector_items(inst, operands[0], LOAD_SHAPES[shape].registers * repeat), *results)
    slots = [None if isinstance(r, Sink) else b.target(r) for r in registers]
    address = b.address(operands[1])

    def run(warp: "Warp") -> None:
        lane, column = window.origin(warp, _one_value(address(warp), warp.first_lane()))
        effect = partial(window.read, warp.cta, lane, column, reduce)
        queue = warp.cta.machine.queue
        if queue is None:
            _fill(warp, slots, effect())
            return
        operation = queue.submit(warp, Engine.TMEM_LOAD, effect)
        apart = not warp.protected.isdisjoint(slots)
        if apart or queue.immediate:  # lanes that wait elsewhere need the old values, so deliver at once
            operation.finish()
            _fill(warp, slots, operation.result)
            if not apart:
                queue.loaded(operation, slots)
        else:
            defer(operation, warp, slots)

    return converged(run)


def _fill(warp: "Warp", slots: list[int | None], data: np.ndarray) -> None:
    regs, protected = warp.regs, warp.protected
    for slot, row in zip(slots, data, strict=True):
        if slot in protected:
            row = merge_lanes(warp.active, row, regs[slot], _U32)
        if slot is not None:
            regs[slot] = row


@handler("tcgen05.st")
def store(inst: Inst, b: Builder) -> Step:
    """Stores registers of a warp to tensor memory, asynchronously; done after tcgen05.wait::st."""
    mods = Mods(inst)
    shape, repeat, packed = _load_shape(inst, mods, "unpack::16b")
    window = _window(inst, b, shape, repeat, packed, inst.operands[1:-1])
    registers = vector_items(inst, inst.operands[-1], LOAD_SHAPES[shape].registers * repeat)
    address, values = b.address(inst.operands[0]), [b.read(r, "b32") for r in registers]

    def run(warp: "Warp") -> None:
        lane, column = window.origin(warp, _one_value(address(warp), warp.first_lane()))
        data = np.empty((len(values), 32), np.uint32)
        for row, read in zip(data, values, strict=True):
            value = read(warp)  # kernels store more registers than they wrote
            row[:] = TMEM_POISON if value is None else value
        warp.cta.issue(warp, Engine.TMEM_STORE, partial(window.write, warp.cta, lane, column, data))

    return converged(run)


@handler("tcgen05.wait::ld", "tcgen05.wait::st")
def wait_for_accesses(inst: Inst, b: Builder) -> Step:
    """Waits for the warp's own loads or stores."""
    mods = Mods(inst)
    mods.drop("sync", "aligned")
    mods.done()
    engine = Engine.TMEM_LOAD if inst.opcode.endswith("ld") else Engine.TMEM_STORE

    def run(warp: "Warp") -> None:
        queue = warp.cta.machine.queue
        if queue is not None:
            queue.wait_engine(warp, engine)

    return converged(run)


@handler("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(inst: Inst, b: Builder) -> Step:
    """Orders nothing, because every access is performed in program order."""
    Mods(inst).done()
    return lambda warp: None


# ---- completion --------------------------------------------------------------------------------------------------
@handler("tcgen05.commit")
def commit(inst: Inst, b: Builder) -> Step:
    """Arrives on an mbarrier when all earlier asynchronous tcgen05 operations of the thread are complete."""
    mods = Mods(inst)
    group = cta_group(inst, mods)
    if not mods.flag("mbarrier::arrive::one"):
        raise inst.unsupported("no .mbarrier::arrive::one")
    mods.drop("shared::cluster", "b64")
    multicast = mods.flag("multicast::cluster")
    mods.done()
    if len(inst.operands) != 1 + multicast:
        raise inst.unsupported(f"{len(inst.operands)} operands")
    address = b.address(inst.operands[0])
    if not multicast:
        return per_thread(partial(_commit, group), [address])
    return per_thread(partial(_commit_multicast, group, b.pc), [address, b.read(inst.operands[1], "b16")])


def _commit(group: int, warp: "Warp", address: int) -> None:
    if group == 2:
        issuing_pair(warp.cta)
    target, offset = any_shared(warp.cta, address)
    _issue_arrivals(warp, [target], offset)


def _commit_multicast(group: int, pc: int, warp: "Warp", address: int, mask: int) -> None:
    if group == 2:
        issuing_pair(warp.cta)
    checker = warp.cta.machine.checker
    if checker is not None:
        checker.silicon.multicast_commit(warp, pc)
    _, offset = any_shared(warp.cta, address)
    _issue_arrivals(warp, in_mask(warp.cta, mask), offset)


def _issue_arrivals(warp: "Warp", targets: "list[Cta]", offset: int) -> None:
    warp.cta.issue(warp, Engine.TCGEN05, partial(arrive_all, targets, offset))


def arrive_all(targets: "list[Cta]", offset: int) -> None:
    """Arrives once on the mbarrier at an offset of each target, as the effect of a commit."""
    for target in targets:
        barrier, checker = target.mbarrier(offset), target.machine.checker
        if checker is not None:
            checker.mbarriers.arrive_later(target, barrier)
        barrier.arrive(1)
