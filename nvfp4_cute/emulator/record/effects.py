"""Notes of the recorder about each asynchronous operation, and the effect that remains of it: signals of barriers.

Each function takes the recorder, the issuing warp, and the arguments of the operation. It returns the barriers whose
bytes the operation would complete, because the operation does not run; None if the operation itself must run.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.addresses import RANK_SHIFT
from nvfp4_cute.emulator.descriptors import COPY_SHAPES, decode_instruction_descriptor
from nvfp4_cute.emulator.isa import (
    async_store,
    bulk,
    cluster_launch,
    tcgen05,
    tcgen05_copy,
    tcgen05_mma,
    tma,
)
from nvfp4_cute.emulator.isa.cluster_launch import RESPONSE_BYTES
from nvfp4_cute.emulator.record.events import LINE, SECTOR, Op, Piece
from nvfp4_cute.emulator.record.track import Notes

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Cta, Warp
    from nvfp4_cute.emulator.tensormap import TensorMap

Signals = list[tuple["Cta", int, int]]
"""CTA, offset and bytes of each barrier whose bytes an operation completes."""


def barrier_number(cta: "Cta", offset: int) -> int:
    """Returns a barrier's number in its cluster."""
    return cta.rank << RANK_SHIFT | offset


def _region(r: Notes, m: "TensorMap", coords: tuple[int, ...]) -> list[Piece]:
    """Returns the part of a box inside the tensor, as one piece."""
    address, rows, row_bytes, pitch = m.extent(coords)
    if not rows:
        return []
    address = r.placement.of(address)
    first = address // SECTOR * SECTOR
    row_bytes = -(-(address + row_bytes - first) // SECTOR) * SECTOR
    return [(address, rows * row_bytes, pitch, row_bytes) if pitch else (address, rows * row_bytes)]


def touched_lines(r: Notes, addresses: np.ndarray, nbytes: int) -> tuple[Piece, ...]:
    """Returns (address, bytes) of each cache line that an access touches.

    The address is that of its first sector in the line; the bytes are those of all its sectors there.

    `addresses`: host addresses, int64. The lines have device addresses.
    """
    sectors = r.placement.of_lanes(addresses) // SECTOR
    if nbytes > SECTOR:
        sectors = np.concatenate([sectors + i for i in range(nbytes // SECTOR)])
    sectors = np.unique(sectors)
    _, first, counts = np.unique(sectors // (LINE // SECTOR), return_index=True, return_counts=True)
    return tuple(
        (sector * SECTOR, count * SECTOR)
        for sector, count in zip(sectors[first].tolist(), counts.tolist(), strict=True)
    )


def _tile_load(
    r: Notes,
    warp: "Warp",
    cta: "Cta",
    m: "TensorMap",
    boxes: Any,
    targets: Any,
    offset: int,
    signals: Any,
    use: Any,
) -> Signals:
    pieces = [piece for box in boxes for piece in _region(r, m, box)]
    nbytes = m.transaction_bytes * len(boxes)
    warp.track.count(pieces)
    cta.machine.stats.tma_load_bytes += 0 if r.with_data else m.tile_bytes * len(boxes)
    noted = tuple(barrier_number(owner, at) for owner, at in signals)
    ranks = tuple(target.rank for target in targets)
    warp.track.add(Op.LOAD, tuple(pieces), nbytes, noted, ranks, m.address, warp.track.block)
    return [(owner, at, nbytes) for owner, at in signals]


def _tile_prefetch(r: Notes, warp: "Warp", m: "TensorMap", boxes: Any) -> Signals:
    pieces = [piece for box in boxes for piece in _region(r, m, box)]
    warp.track.add(Op.PREFETCH, tuple(pieces), m.tile_bytes * len(boxes), m.address)
    return []


def _bulk_load(
    r: Notes, warp: "Warp", cta: "Cta", src: int, from_shared: bool, nbytes: int, targets: Any, offset: int, signals: Any
) -> Signals:  # fmt: skip
    noted = tuple(barrier_number(owner, at) for owner, at in signals)
    if from_shared:
        warp.track.add(Op.EXCHANGE, nbytes, noted)
    else:
        pieces = ((r.placement.of(src), nbytes),) if nbytes else ()
        warp.track.count(list(pieces))
        cta.machine.stats.tma_load_bytes += 0 if r.with_data else nbytes
        warp.track.add(Op.LOAD, pieces, nbytes, noted, tuple(t.rank for t in targets), 0, warp.track.block)
    return [(owner, at, nbytes) for owner, at in signals]


def _tile_store(r: Notes, warp: "Warp", cta: "Cta", m: "TensorMap", boxes: Any, reduce: Any) -> None:
    pieces = [piece for box in boxes for piece in _region(r, m, box)]
    warp.track.count(pieces, stored=True)
    cta.machine.stats.tma_store_bytes += 0 if r.with_data else m.tile_bytes * len(boxes)
    warp.track.add(Op.STORE, tuple(pieces), m.tile_bytes * len(boxes))


def _bulk_store(
    r: Notes, warp: "Warp", cta: "Cta", dst: int, nbytes: int, mask: int, reduce: Any, kind: str
) -> None:
    warp.track.count([(dst, nbytes)], stored=True)
    cta.machine.stats.tma_store_bytes += 0 if r.with_data else nbytes
    warp.track.add(Op.STORE, ((r.placement.of(dst), nbytes),), nbytes)


def _take_over(r: Notes, warp: "Warp", asking: "Cta", ctas: Any, where: int, signal: int) -> None:
    warp.track.add(Op.TAKE_OVER, tuple(barrier_number(cta, signal) for cta in ctas), RESPONSE_BYTES)


def _async_store(
    r: Notes,
    warp: "Warp",
    target: "Cta",
    offset: int,
    data: np.ndarray,
    update: Any,
    owner: "Cta",
    at: int,
) -> None:
    warp.track.add(Op.EXCHANGE, data.size, (barrier_number(owner, at),))


def _async_global_store(
    r: Notes, warp: "Warp", cta: "Cta", where: int, data: np.ndarray, update: Any
) -> None:
    warp.track.count([(where, SECTOR)], stored=True)
    warp.track.add(Op.WRITE, ((r.placement.of(where) // LINE * LINE, SECTOR),))


def _mma(r: Notes, warp: "Warp", ctas: Any, form: Any, operands: Any) -> Signals:
    desc = decode_instruction_descriptor(
        operands.idesc, form.kind, cta_group=form.cta_group, scale_block=form.scale_block, ws=form.ws
    )
    warp.track.add(Op.MMA, (form.kind, desc.m, desc.n, form.cta_group, form.a_in_tmem, desc.row_bytes))
    return []


def _tensor_copy(
    r: Notes, warp: "Warp", ctas: Any, name: str, source: Any, address: int, descriptor: int
) -> Signals:
    shape = COPY_SHAPES[name]
    warp.track.add(Op.TENSOR_COPY, shape.rows * shape.row_bytes, len(ctas))
    return []


def _commit(r: Notes, warp: "Warp", targets: Any, offset: int) -> None:
    warp.track.add(Op.COMMIT_MMA, tuple(barrier_number(target, offset) for target in targets))


def _small_copy(
    r: Notes, warp: "Warp", of: "Warp", dst: Any, src: Any, nbytes: int, lanes: np.ndarray
) -> Signals | None:
    lines = touched_lines(r, np.atleast_1d(np.broadcast_to(src, 32)[lanes]).astype(np.int64), nbytes)
    warp.track.count(list(lines))
    warp.track.add(Op.ASYNC_READ, lines)
    return []


def _padded_copy(
    r: Notes,
    warp: "Warp",
    of: "Warp",
    dst: Any,
    src: Any,
    nbytes: int,
    counts: np.ndarray,
    lanes: np.ndarray,
) -> Signals | None:
    reads = lanes & (counts > 0)
    if reads.any():
        return _small_copy(r, warp, of, dst, src, nbytes, reads)
    warp.track.add(Op.ASYNC_READ, ())
    return []


def _small_arrive(r: Notes, warp: "Warp", cta: "Cta", barrier: Any, counted: bool) -> None:
    warp.track.add(Op.ARRIVE_ASYNC, barrier_number(cta, barrier.offset), not counted)


EFFECTS: dict[Any, Callable[..., Signals | None]] = {
    tma.load_boxes: _tile_load,
    tma.write_boxes: _tile_store,
    tma.fetch_boxes: _tile_prefetch,
    bulk.bulk_in: _bulk_load,
    bulk.bulk_out: _bulk_store,
    cluster_launch.take_over: _take_over,
    async_store.store_shared: _async_store,
    async_store.store_global: _async_global_store,
    bulk.copy_lanes: _small_copy,
    bulk.copy_padded: _padded_copy,
    bulk.arrive_after_copies: _small_arrive,
    tcgen05_mma.execute: _mma,
    tcgen05_copy.copy_matrix: _tensor_copy,
    tcgen05.arrive_all: _commit,
}
