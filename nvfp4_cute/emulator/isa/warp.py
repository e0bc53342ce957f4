"""Instructions that lanes of one warp execute together: election, shuffles, votes, reductions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.isa import UNSIGNED, Builder, Mods, Reader, Step, handler, lane_value, type_bytes
from nvfp4_cute.emulator.isa.arith import as_array
from nvfp4_cute.emulator.lanes import LANE_IDS, bits_mask, mask_bits
from nvfp4_cute.emulator.ptx import Inst, Operand, Pair, Sink
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.lanes import Wait
    from nvfp4_cute.emulator.state import Warp


ONE_HOT = tuple(LANE_IDS == lane for lane in range(32))
"""Predicates that hold in one lane."""


@dataclass
class Converging:
    """Wait of lanes that reached a `.sync` instruction for the other lanes in its mask."""

    warp: "Warp"
    lacking: np.ndarray

    def ready(self) -> bool:
        """Whether the missing lanes have exited. The machine merges lanes that arrive."""
        return not (self.warp.live & self.lacking).any()

    def describe(self) -> str:
        """Names the missing lanes."""
        return f"warp convergence: lanes {mask_bits(self.lacking):#010x} have not arrived"


def converge(warp: "Warp", members: int = 0xFFFFFFFF) -> "Wait | None":
    """Returns None if all live lanes of `members` are active, else a wait."""
    if not warp.groups:
        return None
    lacking = warp.missing(members)
    return None if lacking is None else Converging(warp, lacking)


def synchronised(b: Builder, mask: Operand | None, body: "Callable[[Warp], Wait | None]") -> Step:
    """Returns a step that runs `body` once all lanes of the member mask have arrived. `body` may return another wait."""
    members = b.read(mask, "b32") if mask is not None else (lambda warp: 0xFFFFFFFF)

    def step(warp: "Warp") -> "Wait | None":
        if warp.groups:
            named = members(warp)
            wait = converge(warp, int(lane_value(named, warp.first_lane())))
            if wait is not None:
                return wait
        return body(warp)

    return step


def _pair(operand: Operand) -> tuple[Operand, Operand]:
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())


@handler("elect.sync")
def elect(inst: Inst, b: Builder) -> Step:
    """elect.sync d|p, mask: the lowest active lane of the mask is elected (PTX ISA 9.7.13.14)."""
    Mods(inst).done()
    leader_reg, predicate = _pair(inst.operands[0])
    put_leader, put_predicate = b.write(leader_reg, "b32"), b.write(predicate, "pred")
    members = b.read(inst.operands[1], "b32")

    def body(warp: "Warp") -> None:
        named = members(warp)
        if named.__class__ is int and named == 0xFFFFFFFF:
            leader = warp.first_lane()
        else:
            leader = int((warp.active & bits_mask(int(lane_value(named, warp.first_lane())))).argmax())
        put_leader(warp, leader)
        put_predicate(warp, True if warp.num_active == 1 else ONE_HOT[leader])

    return synchronised(b, inst.operands[1], body)


SHUFFLES = ("idx", "up", "down", "bfly")


def source_lanes(mode: str, lane: np.ndarray, delta: Any, limit: Any) -> tuple[np.ndarray, np.ndarray]:
    """Source lane and in-range predicate of a shuffle, per lane (PTX ISA shfl pseudocode)."""
    amount = np.asarray(delta).astype(np.int64) & 31
    clamp = np.asarray(limit).astype(np.int64)
    segment, clamp = clamp >> 8 & 31, clamp & 31
    highest = (lane & segment) | (clamp & ~segment)
    if mode == "up":
        source = lane - amount
        return source, source >= highest
    if mode == "down":
        source = lane + amount
    elif mode == "bfly":
        source = lane ^ amount
    else:
        source = (lane & segment) | (amount & ~segment)
    return source, source <= highest


@handler("shfl.sync")
def shuffle(inst: Inst, b: Builder) -> Step:
    """shfl.sync.{idx,up,down,bfly}.b32 d|p, a, b, c, mask."""
    mods = Mods(inst)
    mode = mods.one_of(*SHUFFLES)
    mods.drop("b32")
    mods.done()
    if mode is None:
        raise inst.unsupported("shfl without a mode")
    dest, predicate = _pair(inst.operands[0])
    put, put_predicate = b.write(dest, "b32"), b.write(predicate, "pred")
    value, delta, limit = (b.read(o, "b32") for o in inst.operands[1:4])
    lanes = LANE_IDS.astype(np.int64)
    broadcast = mode == "idx"

    def body(warp: "Warp") -> None:
        a, n, c = value(warp), delta(warp), limit(warp)
        if broadcast and c.__class__ is int and c == 31 and n.__class__ is int:
            put(warp, lane_value(a, n & 31))
            put_predicate(warp, True)
            return
        source, inside = source_lanes(mode, lanes, n, c)
        source = np.where(inside, source, lanes)
        put(warp, a[source] if a.__class__ is np.ndarray else a)
        put_predicate(warp, np.broadcast_to(inside, 32).copy())

    return synchronised(b, inst.operands[4], body)


@handler("vote.sync")
def vote(inst: Inst, b: Builder) -> Step:
    """vote.sync.{all,any,uni}.pred and .ballot.b32 over the active lanes of the mask."""
    mods = Mods(inst)
    mode = mods.one_of("all", "any", "uni", "ballot")
    mods.drop("pred", "b32")
    mods.done()
    put = b.write(inst.operands[0], "b32" if mode == "ballot" else "pred")
    predicate, members = b.read(inst.operands[1], "pred"), b.read(inst.operands[2], "b32")

    def body(warp: "Warp") -> None:
        lanes = warp.active & bits_mask(int(lane_value(members(warp), warp.first_lane())))
        votes = as_array(predicate(warp), bool)[lanes]
        if mode == "ballot":
            put(warp, mask_bits(as_array(predicate(warp), bool) & lanes))
        elif mode == "any":
            put(warp, bool(votes.any()))
        elif mode == "all":
            put(warp, bool(votes.all()))
        else:
            put(warp, bool(votes.all() or not votes.any()))

    return synchronised(b, inst.operands[2], body)


@handler("match.any.sync", "match.all.sync")
def match(inst: Inst, b: Builder) -> Step:
    """match.any: lanes with the caller's value. match.all: the mask if all agree, else 0 (and a predicate)."""
    mods = Mods(inst)
    type_ = mods.type()
    mods.done()
    dest, predicate = _pair(inst.operands[0])
    put, put_predicate = b.write(dest, "b32"), b.write(predicate, "pred")
    value, members = b.read(inst.operands[1], type_), b.read(inst.operands[2], "b32")
    every = inst.opcode == "match.all.sync"

    def body(warp: "Warp") -> None:
        lanes = warp.active & bits_mask(int(lane_value(members(warp), warp.first_lane())))
        values = as_array(value(warp), UNSIGNED[type_bytes(type_)])
        if every:
            same = bool((values[lanes] == values[lanes][0]).all())
            put(warp, mask_bits(lanes) if same else 0)
            put_predicate(warp, same)
            return
        masks = [mask_bits((values == v) & lanes) for v in values]
        put(warp, np.array(masks, np.uint32))

    return synchronised(b, inst.operands[2], body)


REDUCTIONS: dict[str, Callable[[np.ndarray], Any]] = {
    "add": np.sum,
    "min": np.min,
    "max": np.max,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


@handler("redux.sync")
def reduce(inst: Inst, b: Builder) -> Step:
    """redux.sync over the active lanes of the mask; f32 min/max with .abs and .NaN."""
    mods = Mods(inst)
    operation = mods.one_of(*REDUCTIONS)
    type_ = mods.type()
    absolute, nan = mods.flag("abs"), mods.flag("NaN")
    mods.done()
    if operation is None:
        raise inst.unsupported("redux without an operation")
    put = b.write(inst.operands[0], type_)
    value, members = b.read(inst.operands[1], type_), b.read(inst.operands[2], "b32")
    dtype = {"f": np.float32, "s": np.int32}.get(type_[0], np.uint32)

    def body(warp: "Warp") -> None:
        lanes = warp.active & bits_mask(int(lane_value(members(warp), warp.first_lane())))
        values = as_array(value(warp), dtype)[lanes]
        if type_ == "f32":
            put(warp, _reduce_floats(np.abs(values) if absolute else values, operation, nan))
        else:
            put(warp, int(REDUCTIONS[operation](values.astype(np.int64))))

    return synchronised(b, inst.operands[2], body)


def _reduce_floats(values: np.ndarray, operation: str, nan: bool) -> np.float32:
    poisoned = values != values
    if (nan and poisoned.any()) or poisoned.all():
        return np.uint32(0x7FFFFFFF).view(np.float32)
    return np.float32(REDUCTIONS[operation](values[~poisoned]))


@handler("activemask")
def active_mask(inst: Inst, b: Builder) -> Step:
    """Returns the mask of the lanes that execute together now."""
    mods = Mods(inst)
    mods.drop("b32")
    mods.done()
    put = b.write(inst.operands[0], "b32")
    return lambda warp: put(warp, warp.active_bits())


@handler("bar.warp.sync")
def warp_barrier(inst: Inst, b: Builder) -> Step:
    """Waits until all lanes of the mask have arrived."""
    Mods(inst).done()
    return synchronised(b, inst.operands[0], lambda warp: None)


def uniform(reader: Reader, what: str) -> "Callable[[Warp], int]":
    """Returns a reader of the value that all active lanes hold.

    Raises:
        EmulatorError: (at run time) the lanes disagree.
    """

    def read(warp: "Warp") -> int:
        value = reader(warp)
        if value.__class__ is not np.ndarray:
            return int(value)
        chosen = value[warp.active]
        if not (chosen == chosen[0]).all():
            raise EmulatorError(f"{what} differs between the lanes: {chosen.tolist()}")
        return int(chosen[0])

    return read
