"""clusterlaunchcontrol: a running cluster takes over one that has not started (PTX ISA 9.7.13.17)."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nvfp4_cute.emulator.isa import Builder, Mods, Step, handler, lane_value
from nvfp4_cute.emulator.isa.arith import per_lane, put_step
from nvfp4_cute.emulator.isa.barrier import barrier_place
from nvfp4_cute.emulator.modes import Engine
from nvfp4_cute.emulator.places import byte_range
from nvfp4_cute.emulator.ptx import Inst, Vector
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Cta, Warp

RESPONSE_BYTES = 16
CANCELED_BIT = 64
"""The response is {x, y | z << 16, success, 0} as 32-bit words, as read by the compiler's expansion of query_cancel."""


@handler("clusterlaunchcontrol.try_cancel")
def try_cancel(inst: Inst, b: Builder) -> Step:
    """try_cancel.async [response], [mbarrier]: 16 bytes in this CTA, or at the same offset in all CTAs of the cluster."""
    mods = Mods(inst)
    mods.drop("async", "shared::cta", "mbarrier::complete_tx::bytes", "b128")
    everywhere = mods.flag("multicast::cluster::all")
    mods.done()
    response, barrier = b.address(inst.operands[0]), b.address(inst.operands[1])

    def step(warp: "Warp") -> None:
        cluster = warp.cta.cluster
        for lane in warp.active_lanes():
            _, where = barrier_place(warp, "shared::cta", lane_value(response(warp), lane))
            if where % RESPONSE_BYTES:
                raise EmulatorError(f"try_cancel response at smem+{where:#x} is not 16-byte aligned")
            _, signal = barrier_place(warp, "shared::cta", lane_value(barrier(warp), lane))
            ctas = cluster.ctas if everywhere else [warp.cta]

            warp.cta.issue(warp, Engine.COPY, partial(take_over, warp.cta, ctas, where, signal))

    return step


def take_over(asking: "Cta", ctas: "Sequence[Cta]", where: int, signal: int) -> None:
    """Takes the next cluster out of the grid, and writes the answer to shared memory of CTAs of the asking cluster."""
    checker = asking.machine.checker
    if checker is not None:
        checker.silicon.cancels(asking.cluster)
    first = asking.machine.cancel_cluster()
    x, y, z = first or (0, 0, 0)
    words = np.array([x, y | z << 16, first is not None, 0], np.uint32)
    for cta in ctas:
        if checker is not None:
            stamp = checker.mbarriers.signalled(cta, signal)
            checker.write_shared(cta, byte_range(where, RESPONSE_BYTES), stamp=stamp)
            if first is None:
                checker.silicon.cancel_failed(asking.cluster, stamp)
        cta.smem.write(where, words.view(np.uint8))
        cta.mbarrier(signal).complete_tx(RESPONSE_BYTES)


@handler("clusterlaunchcontrol.query_cancel")
def query_cancel(inst: Inst, b: Builder) -> Step:
    """query_cancel.is_canceled p, response; .get_first_ctaid{::x,::y,::z} d, response."""
    mods = Mods(inst)
    what = mods.one_of(
        "is_canceled", "get_first_ctaid", "get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z"
    )
    mods.drop("pred", "b32", "v4", "b128")
    mods.done()
    read = b.read(inst.operands[1], "b128")
    if what == "is_canceled":
        canceled = per_lane(lambda word: word >> CANCELED_BIT & 1, (read,), "u32")
        return put_step(b, inst.operands[0], lambda warp: canceled(warp) != 0, "pred")
    shifts = {"x": (0, 0xFFFFFFFF), "y": (32, 0xFFFF), "z": (48, 0xFFFF)}
    if what == "get_first_ctaid" and isinstance(inst.operands[0], Vector):
        targets = list(zip(inst.operands[0].items, (*shifts.values(), (127, 0)), strict=True))
    elif what is not None and "::" in what:
        targets = [(inst.operands[0], shifts[what[-1]])]
    else:
        raise inst.unsupported("query_cancel of this form")
    parts = [
        (b.write(operand, "b32"), per_lane(lambda word, s=shift, m=mask: word >> s & m, (read,), "u32"))
        for operand, (shift, mask) in targets
    ]

    def step(warp: "Warp") -> None:
        for put, part in parts:
            put(warp, part(warp))

    return step
