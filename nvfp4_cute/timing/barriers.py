"""Waits for other warps: mbarriers, named barriers, the cluster barrier, words of global memory."""

from math import ceil

from nvfp4_cute.emulator.addresses import RANK_SHIFT
from nvfp4_cute.emulator.record.events import Op, Piece
from nvfp4_cute.timing.simulation import Simulation
from nvfp4_cute.timing.state import Barrier, Cluster, Handler, NamedBarrier, Warp


def _init(sim: Simulation, warp: Warp, time: float, barrier: int, count: int) -> float:
    warp.cta.cluster.barriers[barrier] = Barrier(count)
    return time + 2


def _arrive(sim: Simulation, warp: Warp, time: float, barrier: int, count: int) -> float:
    cluster = warp.cta.cluster
    if barrier >> RANK_SHIFT == warp.cta.rank:
        arrived(sim, cluster, barrier, count, 0, "arrival", warp, time)
    else:
        remote = time + sim.constants.arrive_remote
        sim.at(remote, arrived, sim, cluster, barrier, count, 0, "arrival", warp, time)
    return time + 4


def _drop(sim: Simulation, warp: Warp, time: float, barrier: int, count: int) -> float:
    warp.cta.cluster.barriers[barrier].count -= count
    return _arrive(sim, warp, time, barrier, count)


def _tx(sim: Simulation, warp: Warp, time: float, barrier: int, nbytes: int) -> float:
    arrived(sim, warp.cta.cluster, barrier, 0, -nbytes, "arrival", warp, time)
    return time + 2


def arrived(
    sim: Simulation,
    cluster: Cluster,
    place: int,
    count: int,
    nbytes: int,
    what: str,
    by: Warp | None,
    since: float,
) -> None:
    """Counts arrivals and completed bytes; wakes the waiting warps if these complete the phase."""
    barrier = cluster.barriers[place]
    barrier.pending -= count
    barrier.tx -= nbytes
    if barrier.pending or barrier.tx:
        return
    barrier.phase += 1
    barrier.pending = barrier.count
    barrier.last = (what, by, since)
    if barrier.waiting:
        waiting, barrier.waiting = barrier.waiting, []
        end = sim.now + sim.constants.wake
        for needed, warp, start in waiting:
            if barrier.phase >= needed:
                sim.stall(warp, start, end, _cause(warp, what, by), by, since)
                sim.at(end, sim.advance, warp, end)
            else:
                barrier.waiting.append((needed, warp, start))


def _wait(sim: Simulation, warp: Warp, time: float, place: int, needed: int) -> float | None:
    barrier = warp.cta.cluster.barriers[place]
    if barrier.phase >= needed:
        return time + sim.constants.wait_ready
    barrier.waiting.append((needed, warp, time))
    return None


def _barrier(
    sim: Simulation, warp: Warp, time: float, number: int, threads: int, waits: bool
) -> float | None:
    named, cta = warp.cta.named[number], warp.cta
    named.arrived += 1
    named.expected = threads // 32
    if waits:
        named.waiting.append((warp, time))
    complete(sim, named, cta.live, time, named.expected or cta.live)
    return None if waits else time + 4


def complete(sim: Simulation, named: NamedBarrier, live: int, time: float, warps: int) -> None:
    """Releases the warps at a named barrier if it has the expected number of arrivals, or those of all live warps."""
    needed = named.expected or live
    if not named.arrived or named.arrived < needed:
        return
    named.arrived = 0
    end = time + sim.constants.barrier_base + sim.constants.barrier_per_warp * warps
    waiting, named.waiting = named.waiting, []
    last = waiting[-1][0] if waiting else None
    for warp, start in waiting:
        sim.stall(warp, start, end, "barrier", last, time)
        sim.at(end, sim.advance, warp, end)


def _cluster_arrive(sim: Simulation, warp: Warp, time: float) -> float:
    cluster = warp.cta.cluster
    cluster.barrier.arrived += 1
    warp.passed = cluster.phase
    complete_cluster(sim, cluster, time)
    return time + 4


def complete_cluster(sim: Simulation, cluster: Cluster, time: float) -> None:
    """Releases the warps at the cluster barrier if every live warp has arrived."""
    barrier = cluster.barrier
    if barrier.arrived and barrier.arrived >= cluster.live:
        barrier.arrived = 0
        cluster.phase += 1
        end = time + sim.constants.cluster_barrier
        waiting, barrier.waiting = barrier.waiting, []
        for warp, start in waiting:
            sim.stall(warp, start, end, "cluster barrier", None, time)
            sim.at(end, sim.advance, warp, end)


def _cluster_wait(sim: Simulation, warp: Warp, time: float) -> float | None:
    cluster = warp.cta.cluster
    if cluster.phase > warp.passed:
        return time + sim.constants.cluster_barrier / 2
    cluster.barrier.waiting.append((warp, time))
    return None


def _fence(sim: Simulation, warp: Warp, time: float) -> float:
    """Waits until L2 has confirmed the writes of the CTA."""
    confirmed = max(time + sim.constants.l2_latency, warp.cta.written + sim.constants.store_latency)
    return sim.wait(warp, time, confirmed, "fence")


def _grid_wait(sim: Simulation, warp: Warp, time: float) -> float | None:
    """Waits until the previous launch has ended."""
    before = warp.cta.grid.before
    if before is None:
        return time
    if before.ended is not None:
        return sim.wait(warp, time, before.ended + sim.constants.released, "launch before")
    before.waiters.append((warp, time))
    return None


def _grid_trigger(sim: Simulation, warp: Warp, time: float) -> float:
    sim.trigger(warp.cta)
    return time


def _signal(sim: Simulation, warp: Warp, time: float, words: tuple[int, ...]) -> float:
    sim.at(time + sim.constants.l2_latency / 2, _written, sim, words, warp, time)
    return time + 1


def _written(sim: Simulation, words: tuple[int, ...], by: Warp, since: float) -> None:
    """Notes that L2 has one more write of each of these words; polls that arrive from now on see it."""
    for address in words:
        word = by.cta.grid.words[address]
        word.writes += 1
        waiting, word.waiting = word.waiting, []
        for needed, warp, start, look in waiting:
            if word.writes < needed:
                word.waiting.append((needed, warp, start, look))
                continue
            # Polls follow each other: each is issued after the previous one was answered.
            between = sim.constants.l2_latency
            look += max(0, ceil((sim.now - look) / between)) * between
            end = look + between / 2
            sim.stall(warp, start, end, "other CTAs", by, since)
            sim.at(end, sim.advance, warp, end)


def _poll(
    sim: Simulation, warp: Warp, time: float, address: int, needed: int, lines: tuple[Piece, ...]
) -> None:
    """Polls a word until it has been written the required number of times."""
    answer = max(sim.memory.read(line, time, warp.sm.gpc).time for line in lines)
    look = answer - sim.constants.l2_latency / 2
    sim.at(look, _look, sim, warp, time, address, needed, look)


def _look(sim: Simulation, warp: Warp, start: float, address: int, needed: int, look: float) -> None:
    word = warp.cta.grid.words[address]
    if word.writes < needed:
        word.waiting.append((needed, warp, start, look))
        return
    end = look + sim.constants.l2_latency / 2
    sim.stall(warp, start, end, "global load")
    sim.at(end, sim.advance, warp, end)


def _cause(warp: Warp, what: str, by: Warp | None) -> str:
    """Returns the cause of a warp's wait, from its role and from the action that completed the phase."""
    if what == "MMA":
        return "free stage" if warp.role == "load" else "MMA"
    if what == "arrival" and by is not None:
        if warp.role == "load":
            return "free stage"
        if by.role.endswith("epilogue"):
            return "epilogue"
        return f"{by.role} warp"
    return what


HANDLERS: dict[Op, Handler] = {
    Op.INIT: _init,
    Op.ARRIVE: _arrive,
    Op.DROP: _drop,
    Op.TX: _tx,
    Op.WAIT: _wait,
    Op.BARRIER: _barrier,
    Op.CLUSTER_ARRIVE: _cluster_arrive,
    Op.CLUSTER_WAIT: _cluster_wait,
    Op.FENCE: _fence,
    Op.GRID_WAIT: _grid_wait,
    Op.GRID_TRIGGER: _grid_trigger,
    Op.SIGNAL: _signal,
    Op.POLL: _poll,
}
