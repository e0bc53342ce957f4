"""Accesses of threads to global memory: loads, stores, atomics, cp.async."""

from nvfp4_cute.emulator.record.events import Op, Piece
from nvfp4_cute.timing.barriers import arrived
from nvfp4_cute.timing.simulation import Simulation
from nvfp4_cute.timing.state import Handler, Warp


def _fetch_lines(sim: Simulation, warp: Warp, time: float, lines: tuple[Piece, ...]) -> float:
    """Returns when the last line arrives. The SM receives one line per cycle, and rereads none that its cache still holds."""
    sm, there = warp.sm, time
    sm.memory_port = max(sm.memory_port, time)
    for line in lines:
        sm.memory_port += max(1.0, line[1] * sim.sm_cycles)
        known = sm.lines.get(line[0])
        if known is None:
            known = sm.lines[line[0]] = sim.memory.read(line, time, sm.gpc).time
        there = max(there, known, sm.memory_port)
    return there


def _read(sim: Simulation, warp: Warp, time: float, number: int, lines: tuple[Piece, ...]) -> float:
    warp.reads[number] = _fetch_lines(sim, warp, time, lines)
    return time + 1


def _atomic(sim: Simulation, warp: Warp, time: float, number: int, lines: tuple[Piece, ...]) -> float:
    done = max([sim.memory.read(line, time, warp.sm.gpc).time for line in lines], default=time)
    warp.reads[number] = done
    return time + 1


def _use(sim: Simulation, warp: Warp, time: float, number: int) -> float:
    return sim.wait(warp, time, warp.reads.get(number, time), "global load")


def _scoreboard(sim: Simulation, warp: Warp, time: float, numbers: tuple[int, ...]) -> float:
    if not sim.constants.follows_stalls:
        return time
    return sim.wait(warp, time, max(warp.reads.get(number, time) for number in numbers), "global load")


def _write(sim: Simulation, warp: Warp, time: float, lines: tuple[Piece, ...]) -> float:
    sm = warp.sm
    for line in lines:
        sm.memory_port = max(sm.memory_port, time) + max(1.0, line[1] * sim.sm_cycles)
        warp.cta.written = max(warp.cta.written, sim.memory.write(line, time))
    return max(time + 1, sm.memory_port - 200)


def _async_read(sim: Simulation, warp: Warp, time: float, lines: tuple[Piece, ...]) -> float:
    warp.async_reads.add(_fetch_lines(sim, warp, time, lines))
    return time + 1


def _commit_async(sim: Simulation, warp: Warp, time: float) -> float:
    warp.async_reads.commit()
    return time


def _wait_async(sim: Simulation, warp: Warp, time: float, pending: int) -> float:
    return sim.wait(warp, time, warp.async_reads.wait(pending), "memory data")


def _arrive_async(sim: Simulation, warp: Warp, time: float, barrier: int, raised: bool) -> float:
    cluster = warp.cta.cluster
    if raised:
        cluster.barriers[barrier].pending += 1
    done = max(time, warp.async_reads.done)
    sim.at(done, arrived, sim, cluster, barrier, 1, 0, "memory data", warp, time)
    return time + 2


HANDLERS: dict[Op, Handler] = {
    Op.READ: _read,
    Op.ATOMIC: _atomic,
    Op.USE: _use,
    Op.SCOREBOARD: _scoreboard,
    Op.WRITE: _write,
    Op.ASYNC_READ: _async_read,
    Op.COMMIT_ASYNC: _commit_async,
    Op.WAIT_ASYNC: _wait_async,
    Op.ARRIVE_ASYNC: _arrive_async,
}
