"""Helpers of the asynchronous families: instructions that single threads issue, and shared-memory operands."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nvfp4_cute.emulator import silicon
from nvfp4_cute.emulator.addresses import OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW
from nvfp4_cute.emulator.isa import Builder, Mods, Reader, Step, lane_value
from nvfp4_cute.emulator.lanes import Condition
from nvfp4_cute.emulator.ptx import Inst, Operand, Vector
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.lanes import Wait
    from nvfp4_cute.emulator.state import Cta, Warp


def per_thread(run: Callable[..., None], readers: Sequence[Reader], *, idempotent: bool = False) -> Step:
    """Returns a step that calls `run(warp, *operand values)` once per active lane (mostly one), lowest lane first.

    idempotent: repetition changes nothing, so lanes with equal operands count as one. CuTe DSL lets a whole warp
    execute the same TMA store.
    """

    def step(warp: "Warp") -> None:
        values = [read(warp) for read in readers]
        uniform = True
        for value in values:
            if value.__class__ is np.ndarray:
                uniform = False
                break
        if warp.num_active == 1 or (idempotent and uniform):
            if not uniform:
                lane = warp.first_lane()
                values = [lane_value(v, lane) for v in values]
            run(warp, *values)
            return
        for lane in warp.active_lanes():
            run(warp, *[lane_value(v, lane) for v in values])

    return step


def converged(run: "Callable[[Warp], Wait | None]") -> Step:
    """Returns a step for `.sync.aligned` instructions, which waits until all live lanes of the warp have reached it."""

    def step(warp: "Warp") -> "Wait | None":
        if warp.missing() is not None:
            return Condition(
                lambda: False, lambda: "for the other lanes of the warp to reach this instruction"
            )
        return run(warp)

    return step


def vector_items(inst: Inst, operand: Operand, count: int | None = None) -> tuple[Operand, ...]:
    """Returns the elements of a vector operand (a lone operand is a vector of one), after a check of their number."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if count is not None and len(items) != count:
        raise inst.unsupported(f"{len(items)} registers where {count} are expected")
    return items


def own_offset(cta: "Cta", address: int) -> int:
    """Returns the offset of a shared::cta (or generic) address in the CTA's own shared memory.

    Raises:
        EmulatorError: the address names another CTA of the cluster.
    """
    target, offset = any_shared(cta, address)
    if target is not cta:
        raise EmulatorError(
            f"shared::cta address {address:#x} belongs to the CTA of rank {target.rank}, used in rank {cta.rank}"
        )
    return offset


def own_place(cta: "Cta", address: int) -> "tuple[Cta, int]":
    """`any_shared` for an address that must be the CTA's own.

    Returns the CTA and offset of a shared::cluster (or generic) address.
    """
    return cta, own_offset(cta, address)


def any_shared(cta: "Cta", address: int) -> "tuple[Cta, int]":
    """CTA and offset of a shared::cluster (or generic) address."""
    if address >= SHARED_WINDOW:
        address -= SHARED_WINDOW
    if address >> RANK_SHIFT == cta.rank:
        return cta, address & OFFSET_MASK
    return cta.cluster.resolve(address)


def in_mask(cta: "Cta", mask: int) -> "list[Cta]":
    """Returns the CTAs of the cluster whose rank's bit is set in a multicast mask.

    Raises:
        EmulatorError: a bit beyond the cluster.
    """
    ctas = cta.cluster.ctas
    if mask >> len(ctas) or not mask:
        raise EmulatorError(f"multicast mask {mask:#x} in a cluster of {len(ctas)} CTAs")
    return [c for c in ctas if mask >> c.rank & 1]


def cta_pair(cta: "Cta") -> "tuple[Cta, Cta]":
    """Returns the two CTAs of a `.cta_group::2` instruction, even rank first.

    Raises:
        EmulatorError: the cluster has no such pair.
    """
    ctas, even = cta.cluster.ctas, cta.rank & ~1
    if even + 1 >= len(ctas):
        raise EmulatorError(f"cta_group::2 in a cluster of {len(ctas)} CTAs: CTA rank {cta.rank} has no peer")
    return ctas[even], ctas[even + 1]


def issuing_pair(cta: "Cta") -> "tuple[Cta, Cta]":
    """`cta_pair` for an instruction that only the CTA of even rank may issue.

    Raises:
        EmulatorError: the rank is odd, or the cluster has no such pair.
    """
    if cta.rank & 1:
        raise silicon.fault("pair-leader", f"the CTA of rank {cta.rank} issues an instruction of its pair")
    return cta_pair(cta)


def cta_group(inst: Inst, mods: Mods) -> int:
    """Consumes the `.cta_group` of a tcgen05 instruction. Returns 1 or 2."""
    group = mods.one_of("cta_group::1", "cta_group::2")
    if group is None:
        raise inst.unsupported("no .cta_group")
    return int(group[-1])


def signalled(
    cta: "Cta", targets: "Sequence[Cta]", barrier: int, pair: bool, multicast: bool
) -> "list[tuple[Cta, int]]":
    """Returns CTA and offset of the mbarrier that each target's copy signals.

    The mbarrier has the same offset everywhere. It lies in the CTA that receives the data; with cta_group::2, in the
    CTA of the receiver's pair whose rank has the parity of the CTA that the operand names.
    """
    owner, offset = any_shared(cta, barrier)
    ctas = cta.cluster.ctas
    if pair:
        return [(ctas[(t.rank & ~1) | (owner.rank & 1)], offset) for t in targets]
    if not multicast and owner is not targets[0]:
        raise EmulatorError(
            f"copy into rank {targets[0].rank} with an mbarrier of rank {owner.rank}: "
            "both must be in one CTA without .cta_group::2"
        )
    return [(t, offset) for t in targets]


def drop_policy(inst: Inst, b: Builder, mods: Mods, operands: list[Operand]) -> None:
    """Consumes the cache hint and its operand, which change no result."""
    if mods.flag("L2::cache_hint"):
        b.read(operands.pop(), "b64")
