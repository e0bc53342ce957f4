"""What the asynchronous families share: instructions that single threads issue, and shared-memory operands."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.isa import Builder, Reader, Step, lane_value
from nvfp4_cute.emulator.machine import OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW, Condition
from nvfp4_cute.emulator.ptx import Inst, Operand, Vector
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.machine import Cta, Wait, Warp


def per_thread(run: Callable[..., None], readers: Sequence[Reader], *, idempotent: bool = False) -> Step:
    """A step that calls `run(cta, *operand values)` once for every active lane (mostly one), lowest lane first.

    idempotent: doing it twice is doing it once, so lanes with equal operands count as one. CuTe DSL lets a whole
    warp execute the same TMA store.
    """

    def step(warp: "Warp") -> None:
        values = [read(warp) for read in readers]
        uniform = not any(v.__class__ is np.ndarray for v in values)
        if warp.num_active == 1 or (idempotent and uniform):
            if not uniform:
                lane = warp.first_lane()
                values = [lane_value(v, lane) for v in values]
            run(warp.cta, *values)
            return
        for lane in warp.active_lanes():
            run(warp.cta, *[lane_value(v, lane) for v in values])

    return step


def converged(run: "Callable[[Warp], Wait | None]") -> Step:
    """A step for `.sync.aligned` instructions: waits until all live lanes of the warp have come here."""

    def step(warp: "Warp") -> "Wait | None":
        if warp.missing() is not None:
            return Condition(
                lambda: False, lambda: "for the other lanes of the warp to reach this instruction"
            )
        return run(warp)

    return step


def vector_items(inst: Inst, operand: Operand, count: int | None = None) -> tuple[Operand, ...]:
    """Elements of a vector operand (a lone operand is a vector of one); checks their number."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if count is not None and len(items) != count:
        raise inst.unsupported(f"{len(items)} registers where {count} are expected")
    return items


def own_offset(cta: "Cta", address: int) -> int:
    """Offset of a shared::cta (or generic) address in the CTA's own shared memory.

    Raises:
        EmulatorError: the address names another CTA of the cluster.
    """
    target, offset = any_shared(cta, address)
    if target is not cta:
        raise EmulatorError(
            f"shared::cta address {address:#x} belongs to the CTA of rank {target.rank}, used in rank {cta.rank}"
        )
    return offset


def any_shared(cta: "Cta", address: int) -> "tuple[Cta, int]":
    """CTA and offset of a shared::cluster (or generic) address."""
    if address >= SHARED_WINDOW:
        address -= SHARED_WINDOW
    if address >> RANK_SHIFT == cta.rank:
        return cta, address & OFFSET_MASK
    return cta.cluster.resolve(address)


def in_mask(cta: "Cta", mask: int) -> "list[Cta]":
    """CTAs of the cluster whose rank's bit is set in a multicast mask.

    Raises:
        EmulatorError: a bit beyond the cluster.
    """
    ctas = cta.cluster.ctas
    if mask >> len(ctas) or not mask:
        raise EmulatorError(f"multicast mask {mask:#x} in a cluster of {len(ctas)} CTAs")
    return [c for c in ctas if mask >> c.rank & 1]


def cta_pair(cta: "Cta") -> "tuple[Cta, Cta]":
    """The two CTAs of a `.cta_group::2` instruction, even rank first.

    Raises:
        EmulatorError: the cluster has no such pair.
    """
    ctas, even = cta.cluster.ctas, cta.rank & ~1
    if even + 1 >= len(ctas):
        raise EmulatorError(f"cta_group::2 in a cluster of {len(ctas)} CTAs: CTA rank {cta.rank} has no peer")
    return ctas[even], ctas[even + 1]


def optional_operands(inst: Inst, b: Builder, operands: Sequence[Operand], types: Sequence[str]) -> list[Any]:
    """Readers of trailing operands; their number must match `types`."""
    if len(operands) != len(types):
        raise inst.unsupported(f"{len(operands)} trailing operands where {len(types)} are expected")
    return [b.read(operand, type_) for operand, type_ in zip(operands, types, strict=True)]
