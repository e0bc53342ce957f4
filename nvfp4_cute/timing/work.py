"""Computation of warps: issue slots and ALUs of their schedulers, matrix pipes, tensor memory."""

from collections.abc import Sequence

from nvfp4_cute.emulator.addresses import RANK_SHIFT
from nvfp4_cute.emulator.record.events import Op
from nvfp4_cute.timing.barriers import arrived
from nvfp4_cute.timing.simulation import Simulation
from nvfp4_cute.timing.state import SCHEDULERS, Cta, Handler, Sm, Span, Warp


def _compute(
    sim: Simulation,
    warp: Warp,
    time: float,
    slots: float,
    alu: float,
    port: float,
    path: float,
    fresh: int,
    in_main: float = 0.0,
) -> float:
    sm, index, trace = warp.sm, warp.scheduler, warp.cta.grid.trace
    if sim.constants.follows_stalls:
        main, rest, others = trace.main, trace.rest, slots - in_main
        path = max(path, in_main * main.cycles + others * rest.cycles)
        slots = in_main * main.issue + others * rest.issue
    if fresh and warp.cta.start <= warp.cta.grid.start:
        path += fresh * sim.constants.fetch
    issued = sm.schedulers[index] = worked(sim, sm, index, max(sm.schedulers[index], time), slots)
    done = sm.alus[index] = worked(sim, sm, index, max(sm.alus[index], time), alu)
    if not sim.constants.follows_stalls:
        issued, done = in_turns(sm, index, time, (issued, done), (slots, alu))
    sm.port = max(sm.port, time) + port
    return sim.wait(warp, time, max(time + path, issued, done, sm.port if port else 0.0), "compute")


def in_turns(
    sm: Sm, index: int, time: float, ends: tuple[float, float], cycles: tuple[float, float]
) -> tuple[float, float]:
    """Returns the ends of a block if the scheduler takes turns among its warps, so that short blocks do not wait for long ones.

    Args:
        ends: ends after everything that was issued earlier, on the scheduler and on the ALU.
        cycles: cycles of the block on both.
    """
    others = [end for end in sm.blocks[index] if end > time]
    if others:
        sharing = 1 + len(others)
        ends = min(ends[0], time + sharing * cycles[0]), min(ends[1], time + sharing * cycles[1])
    sm.blocks[index] = [*others, max(ends)]
    return ends


def _conflicts(sim: Simulation, warp: Warp, time: float, cycles: int) -> float:
    if not sim.constants.follows_stalls:
        return time
    warp.sm.port = max(warp.sm.port, time) + cycles
    return sim.wait(warp, time, warp.sm.port, "bank conflicts")


def worked(sim: Simulation, sm: Sm, index: int, start: float, cycles: float) -> float:
    """Returns when `cycles` of a scheduler or an ALU are done. wgmma slows them down, because it also uses registers."""
    left = sim.issue_left
    if left == 1:
        return start + cycles
    beside = sm.matrix[index] - start
    if beside <= 0:
        return start + cycles
    return start + cycles / left if cycles <= beside * left else start + cycles + beside * (1 - left)


def _matrix(sim: Simulation, warp: Warp, time: float, element: str, flops: int) -> float:
    sm, index = warp.sm, warp.scheduler
    cycles = SCHEDULERS * flops / (sim.constants.matrix_rate(element) * sim.constants.sync_share)
    start = max(sm.matrix[index], time)
    sm.matrix[index] = start + cycles
    if sim.constants.sync_issue:
        sm.schedulers[index] = max(sm.schedulers[index], time) + cycles * sim.constants.sync_issue
    sm.mma_busy += cycles / SCHEDULERS
    sim.stall(warp, time, start, "matrix pipe")
    return start + 1


def _sleep(sim: Simulation, warp: Warp, time: float, nanoseconds: int) -> float:
    return sim.wait(warp, time, time + nanoseconds * sim.constants.clock_hz / 1e9, "sleep")


def _mma(sim: Simulation, warp: Warp, time: float, shape: tuple[str, int, int, int, bool, int]) -> float:
    interval = sim.intervals.get(shape)
    if interval is None:
        interval = sim.intervals[shape] = sim.constants.mma_interval(*shape)
    sm = warp.sm
    start = max(sm.pipe, sm.last_copy, time)
    sm.last_start, sm.pipe = start, start + interval
    for cta in _pair(sim, warp, shape[3]):
        cta.sm.mma_busy += interval
        if sim.timeline:
            cta.sm.matrix_spans.append(Span(start, start + interval, "MMA"))
    return time + 4


def _pair(sim: Simulation, warp: Warp, cta_group: int) -> Sequence[Cta]:
    if cta_group == 1:
        return (warp.cta,)
    even = warp.cta.rank & ~1
    return warp.cta.cluster.ctas[even : even + 2]


def _tensor_copy(sim: Simulation, warp: Warp, time: float, nbytes: int, cta_group: int) -> float:
    sm = warp.sm
    sm.copy_pipe = max(sm.copy_pipe, sm.last_start, time) + nbytes / sim.constants.tensor_copy_bandwidth
    sm.last_copy = sm.copy_pipe
    return time + 4


def _commit_mma(sim: Simulation, warp: Warp, time: float, places: tuple[int, ...]) -> float:
    sm, cluster = warp.sm, warp.cta.cluster
    done = max(sm.pipe, sm.last_copy, time) + sim.constants.commit_latency - sim.constants.wake
    for place in places:
        remote = place >> RANK_SHIFT != warp.cta.rank
        when = done + (sim.constants.arrive_remote / 2 if remote else 0)
        sim.at(when, arrived, sim, cluster, place, 1, 0, "MMA", warp, time)
    return time + 4


def _tensor_load(sim: Simulation, warp: Warp, time: float, columns: int) -> float:
    warp.tensor_done = _columns_done(sim, warp, time, columns)
    return time + 2


def _tensor_store(sim: Simulation, warp: Warp, time: float, columns: int) -> float:
    warp.tensor_stored = _columns_done(sim, warp, time, columns)
    return time + 2


def _columns_done(sim: Simulation, warp: Warp, time: float, columns: int) -> float:
    """Returns when a load or store of tensor memory is done: one column per cycle in each quadrant."""
    busy = warp.sm.tensor_loads
    busy[warp.scheduler] = max(busy[warp.scheduler], time) + columns
    return busy[warp.scheduler] + sim.constants.tensor_load_latency


def _wait_tensor_load(sim: Simulation, warp: Warp, time: float) -> float:
    return sim.wait(warp, time, warp.tensor_done, "tensor memory")


def _wait_tensor_store(sim: Simulation, warp: Warp, time: float) -> float:
    return sim.wait(warp, time, warp.tensor_stored, "tensor memory")


def _allocate(sim: Simulation, warp: Warp, time: float) -> float:
    return sim.wait(warp, time, time + sim.constants.allocate, "tensor memory allocation")


def _wgmma(sim: Simulation, warp: Warp, time: float, shape: tuple[str, int, bool]) -> float:
    interval = sim.intervals.get(shape)
    if interval is None:
        interval = sim.intervals[shape] = sim.constants.wgmma_interval(*shape)
    sm, index = warp.sm, warp.scheduler
    start = max(sm.matrix[index], time)
    sm.matrix[index] = start + interval
    sm.mma_busy += interval / SCHEDULERS
    warp.wgmmas.add(start + interval + sim.constants.wgmma_latency)
    if sim.timeline and index == 0:
        sm.matrix_spans.append(Span(start, start + interval, "MMA"))
    return time + 2


def _commit_wgmma(sim: Simulation, warp: Warp, time: float) -> float:
    warp.wgmmas.commit()
    return time


def _wait_wgmma(sim: Simulation, warp: Warp, time: float, pending: int) -> float:
    return sim.wait(warp, time, warp.wgmmas.wait(pending), "MMA")


def _mark(sim: Simulation, warp: Warp, time: float) -> float:
    warp.marked = time
    return time


HANDLERS: dict[Op, Handler] = {
    Op.MARK: _mark,
    Op.COMPUTE: _compute,
    Op.CONFLICTS: _conflicts,
    Op.MATRIX: _matrix,
    Op.SLEEP: _sleep,
    Op.MMA: _mma,
    Op.TENSOR_COPY: _tensor_copy,
    Op.COMMIT_MMA: _commit_mma,
    Op.TENSOR_LOAD: _tensor_load,
    Op.TENSOR_STORE: _tensor_store,
    Op.WAIT_TENSOR_LOAD: _wait_tensor_load,
    Op.WAIT_TENSOR_STORE: _wait_tensor_store,
    Op.ALLOCATE: _allocate,
    Op.WGMMA: _wgmma,
    Op.COMMIT_WGMMA: _commit_wgmma,
    Op.WAIT_WGMMA: _wait_wgmma,
}
