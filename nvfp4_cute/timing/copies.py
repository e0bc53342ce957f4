"""Bulk copies: the copy engine of an SM, copies between shared memories of a cluster, and from shared to global memory."""

from typing import Any

from nvfp4_cute.emulator.record.events import Op, Piece
from nvfp4_cute.timing.barriers import arrived
from nvfp4_cute.timing.simulation import Simulation
from nvfp4_cute.timing.state import Handler, Sm, Span, Warp


def _load(
    sim: Simulation,
    warp: Warp,
    time: float,
    pieces: tuple[Piece, ...],
    nbytes: int,
    signals: Any,
    ranks: Any,
    tensor_map: int,
    instruction: int,
) -> float:
    start = max(time, warp.copied.get(instruction, 0.0))
    sim.stall(warp, time, start, "TMA issue")
    warp.copied[instruction] = start + sim.constants.tma_reissue
    sim.at(
        start,
        _queue_copy,
        sim,
        warp.sm,
        _fetch_tile,
        (warp, start, pieces, nbytes, signals, ranks, tensor_map),
    )
    return start + 4


def _queue_copy(sim: Simulation, sm: Sm, work: Any, operands: tuple[Any, ...]) -> None:
    sm.copies.append((work, operands))
    if not sm.engine_busy:
        sm.engine_busy = True
        _next_copy(sim, sm)


def _next_copy(sim: Simulation, sm: Sm) -> None:
    """Starts the next instruction of an SM's copy engine."""
    if not sm.copies:
        sm.engine_busy = False
        return
    work, operands = sm.copies.popleft()
    sim.at(sim.now + work(sim, sm, *operands), _next_copy, sim, sm)


def _knows_map(sim: Simulation, sm: Sm, tensor_map: int) -> float:
    """Returns when the copy engine, which starts an instruction now, has its tensor map; 0 without a map."""
    if not tensor_map:
        return sim.now
    return max(sim.now, sm.maps.setdefault(tensor_map, sim.now + sim.constants.descriptor_latency))


def _fetch_tile(
    sim: Simulation,
    sm: Sm,
    warp: Warp,
    issued: float,
    pieces: Any,
    nbytes: int,
    signals: Any,
    ranks: Any,
    tensor_map: int,
) -> float:
    """Requests a tile from memory. Returns how long the engine is busy with it."""
    c, start, cluster = sim.constants, _knows_map(sim, sm, tensor_map), warp.cta.cluster
    there = start + (c.l2_latency if not pieces else 0)
    hit = True
    for piece in pieces:
        reply = sim.memory.read(piece, start, sm.gpc)
        there = max(there, reply.time)
        hit = hit and reply.hit
    what = "L2 data" if hit else "memory data"
    for rank, place in zip(ranks, signals, strict=True):
        target = cluster.ctas[rank].sm
        target.ingress = max(target.ingress + nbytes * sim.sm_cycles, there)
        done = target.ingress + c.copy_latency
        sim.at(done, arrived, sim, cluster, place, 0, nbytes, what, warp, issued)
    busy = max(c.tma_issue, nbytes * sim.sm_cycles)
    if sim.timeline:
        sm.engine_spans.append(Span(sim.now, sim.now + busy, what))
    return busy


def _prefetch(
    sim: Simulation, warp: Warp, time: float, pieces: tuple[Piece, ...], nbytes: int, tensor_map: int
) -> float:
    sim.at(time, _queue_copy, sim, warp.sm, _fetch_into_l2, (pieces, nbytes, tensor_map))
    return time + 4


def _fetch_into_l2(sim: Simulation, sm: Sm, pieces: tuple[Piece, ...], nbytes: int, tensor_map: int) -> float:
    """Requests a prefetch of a tile into L2. Returns how long the engine is busy with it."""
    start = _knows_map(sim, sm, tensor_map)
    looked_up = max([sim.now, *(sim.memory.prefetch(piece, start, sm.gpc) for piece in pieces)])
    busy = max(sim.constants.tma_issue, nbytes / sim.constants.prefetch_bandwidth, looked_up - sim.now)
    if sim.timeline:
        sm.engine_spans.append(Span(sim.now, sim.now + busy, "prefetch"))
    return busy


def _prefetch_map(sim: Simulation, warp: Warp, time: float, maps: tuple[int, ...]) -> float:
    for tensor_map in maps:
        warp.sm.maps.setdefault(tensor_map, time + sim.constants.descriptor_latency)
    return time + 1


def _exchange(sim: Simulation, warp: Warp, time: float, nbytes: int, signals: Any) -> float:
    sm = warp.sm
    sm.exchange_port = max(sm.exchange_port, time) + nbytes / sim.constants.exchange_bandwidth
    end = sm.exchange_port + sim.constants.arrive_remote
    for place in signals:
        sim.at(end, arrived, sim, warp.cta.cluster, place, 0, nbytes, "cluster data", warp, time)
    # An instruction of 32 lanes makes 32 of these copies.
    return time + min(4.0, nbytes / sim.constants.smem_bandwidth)


def _take_over(sim: Simulation, warp: Warp, time: float, signals: Any, nbytes: int) -> float:
    end = time + 2 * sim.constants.l2_latency
    for place in signals:
        sim.at(end, arrived, sim, warp.cta.cluster, place, 0, nbytes, "work", warp, time)
    return time + 4


def _store(sim: Simulation, warp: Warp, time: float, pieces: tuple[Piece, ...], nbytes: int) -> float:
    sm = warp.sm
    sm.egress = max(sm.egress, time) + max(sim.constants.tma_issue, nbytes * sim.sm_cycles)
    done = (
        max([sm.egress, *(sim.memory.write(piece, time) for piece in pieces)]) + sim.constants.store_latency
    )
    warp.stores.add(done)
    return time + 4


def _commit_stores(sim: Simulation, warp: Warp, time: float) -> float:
    warp.stores.commit()
    return time


def _wait_stores(sim: Simulation, warp: Warp, time: float, pending: int) -> float:
    return sim.wait(warp, time, warp.stores.wait(pending), "store")


HANDLERS: dict[Op, Handler] = {
    Op.LOAD: _load,
    Op.PREFETCH: _prefetch,
    Op.PREFETCH_MAP: _prefetch_map,
    Op.EXCHANGE: _exchange,
    Op.TAKE_OVER: _take_over,
    Op.STORE: _store,
    Op.COMMIT_STORES: _commit_stores,
    Op.WAIT_STORES: _wait_stores,
}
