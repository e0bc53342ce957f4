"""Tensor copies (TMA) and edits of tensor maps (PTX ISA "cp.async.bulk.tensor", "tensormap").

Operands, including the tensor map, are read when the instruction executes. All other accesses to memory and mbarriers
are in the effect passed to `Cta.issue`. A copy signals its mbarrier with the bytes of the full box, including
out-of-bounds parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator import places
from nvfp4_cute.emulator.faults import AlignmentFault
from nvfp4_cute.emulator.isa import Builder, Mods, Reader, Step, handler, lane_value
from nvfp4_cute.emulator.isa import bulk as bulk  # registers the copies without a tensor map
from nvfp4_cute.emulator.isa.issue import (
    any_shared,
    converged,
    drop_policy,
    in_mask,
    own_offset,
    own_place,
    per_thread,
    signalled,
)
from nvfp4_cute.emulator.modes import Engine
from nvfp4_cute.emulator.ptx import Inst, Operand, TensorAddress
from nvfp4_cute.emulator.reductions import REDUCTIONS
from nvfp4_cute.emulator.tensormap import DESCRIPTOR_BYTES, TensorMap, replace_field
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.observers import Checker
    from nvfp4_cute.emulator.state import Cta, Warp

DIMENSIONS = ("1d", "2d", "3d", "4d", "5d")


# ---- tensor copies -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Tensor:
    """Modifiers of a tensor copy: single rows (gather4, scatter4), CTA pairs, and the reduction."""

    rank: int
    four_rows: bool = False
    pair: bool = False
    reduce: str | None = None

    @property
    def coordinates(self) -> int:
        """Number of coordinates. gather4 and scatter4 take a column and four rows of a two-dimensional map."""
        return 5 if self.four_rows else self.rank


def _tensor_mods(inst: Inst, mods: Mods) -> tuple[int, bool]:
    """Returns (rank, whether it copies four rows); consumes the dimension and the load mode."""
    rank = mods.one_of(*DIMENSIONS)
    if rank is None:
        raise inst.unsupported("no dimension")
    if any(m.startswith("im2col") for m in mods.left):
        raise inst.unsupported("im2col mode")
    mode = mods.one_of("tile::gather4", "tile::scatter4", "tile")
    return int(rank[0]), mode is not None and mode != "tile"


def _tensor_readers(inst: Inst, b: Builder, operand: Operand, form: _Tensor) -> list[Reader]:
    """Returns readers of the tensor map's address and of the coordinates."""
    if not isinstance(operand, TensorAddress) or len(operand.coords) != form.coordinates:
        raise inst.unsupported(f"operand {operand}; expected [map, {{{form.coordinates} coordinates}}]")
    return [b.read(operand.map, "b64"), *(b.read(c, "s32") for c in operand.coords)]


def load_map(cta: "Cta", address: int) -> TensorMap:
    """Returns the tensor map at a generic address, in a kernel parameter or in global memory."""
    if address % 64:
        raise AlignmentFault(f"tensor map at {address:#x}: must be a multiple of 64")
    launch = cta.launch
    found = launch.tensor_maps.get(address)
    if found is not None:
        return found
    params = launch.params
    start = address - params.ctypes.data
    if 0 <= start and start + DESCRIPTOR_BYTES <= params.size:  # parameters are constant
        found = TensorMap.decode(params[start : start + DESCRIPTOR_BYTES].tobytes())
        launch.tensor_maps[address] = found
        return found
    return TensorMap.decode(cta.machine.memory.view(address, DESCRIPTOR_BYTES, write=False).tobytes())


def _used_map(warp: "Warp", pc: int, address: int) -> tuple[TensorMap, Any]:
    """Returns the tensor map of a warp's copy, and the hazard checker's record of its use if the kernel may change the map."""
    m, checker = load_map(warp.cta, address), warp.cta.machine.checker
    if checker is None or address in warp.cta.launch.tensor_maps:
        return m, None
    return m, checker.tensor_maps.used(warp, pc, address)


def _single_boxes(form: _Tensor, m: TensorMap, coords: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the coordinates of the boxes that an instruction copies, consecutive in shared memory."""
    if not form.four_rows:
        if m.rank != form.rank:
            raise EmulatorError(f"tensor copy of rank {form.rank} with a tensor map of rank {m.rank}")
        return [coords]
    if m.rank != 2 or m.box[1] != 1:
        raise EmulatorError(f"gather4 and scatter4 need a two-dimensional map with box1 = 1, not box {m.box}")
    return [(coords[0], row) for row in coords[1:]]


@handler("cp.async.bulk.tensor")
def tensor_copy(inst: Inst, b: Builder) -> Step:
    """Copies a box between global and shared memory."""
    mods = Mods(inst)
    rank, four_rows = _tensor_mods(inst, mods)
    if mods.left[:2] == ["global", "shared::cta"]:
        return _tensor_store(inst, b, mods, _Tensor(rank, four_rows))
    space = mods.one_of("shared::cluster", "shared::cta")
    if space is None or not mods.flag("global") or not mods.flag("mbarrier::complete_tx::bytes"):
        raise inst.unsupported("spaces or completion mechanism")
    multicast = mods.flag("multicast::cluster")
    group = mods.one_of("cta_group::1", "cta_group::2")
    form = _Tensor(rank, four_rows, pair=group == "cta_group::2")
    operands = list(inst.operands)
    drop_policy(inst, b, mods, operands)
    mods.done()
    if len(operands) != 3 + multicast:
        raise inst.unsupported(f"{len(operands)} operands")
    readers = [b.address(operands[0]), b.address(operands[2])]
    readers.append(b.read(operands[3], "b16") if multicast else lambda warp: 0)
    readers += _tensor_readers(inst, b, operands[1], form)
    place, pc = own_place if space == "shared::cta" else any_shared, b.pc

    def run(warp: "Warp", dst: int, barrier: int, mask: int, map_address: int, *coords: int) -> None:
        cta = warp.cta
        target, offset = place(cta, dst)
        targets = in_mask(cta, mask) if multicast else [target]
        signals = signalled(cta, targets, barrier, form.pair, multicast)
        m, use = _used_map(warp, pc, map_address)
        checker, queue = cta.machine.checker, cta.machine.queue
        if use is not None and checker is not None and queue is not None:
            queue.submit_read(warp, partial(checker.tensor_maps.reading, use))
        boxes = _single_boxes(form, m, coords)
        cta.issue(warp, Engine.COPY, partial(load_boxes, cta, m, boxes, targets, offset, signals, use))

    return per_thread(run, readers)


def load_boxes(
    cta: "Cta",
    m: TensorMap,
    boxes: list[tuple[int, ...]],
    targets: "Sequence[Cta]",
    offset: int,
    signals: "Sequence[tuple[Cta, int]]",
    use: Any,
) -> None:
    """Copies boxes of a tensor into shared memory of the targets, and signals their mbarriers.

    `use`: the hazard checker's record of the use of the tensor map, or None.
    """
    view = lambda address, nbytes: cta.machine.memory.view(address, nbytes, write=False)
    total = m.tile_bytes * len(boxes)
    for target in targets:
        target.smem.check(offset, m.shared_extent(len(boxes)))
    chunk_lists = _chunk_lists(m, offset, len(boxes))
    checker = cta.machine.checker
    if checker is not None:
        stamps = [checker.mbarriers.signalled(owner, barrier) for owner, barrier in signals]
        alone = (
            stamps[0] if len(stamps) == 1 else None
        )  # a waiter for one of several targets knows nothing of the others
        for target in targets:
            _check_swizzle(checker, target, m, offset, np.concatenate(chunk_lists), store=False)
        for box in boxes:
            checker.read_global(*m.rows_at(box), stamp=alone)
        for target, stamp in zip(targets, stamps, strict=True):
            if use is not None:
                checker.tensor_maps.reading(use, stamp)
            for chunks in chunk_lists:
                checker.write_shared(target, places.chunks(chunks), stamp=stamp)
    for box, chunks in zip(boxes, chunk_lists, strict=True):
        tile = m.read_tile(box, view)
        for target in targets:
            target.smem.views[16][chunks] = tile
    cta.machine.stats.tma_load_bytes += total
    for owner, barrier in signals:
        owner.mbarrier(barrier).complete_tx(m.transaction_bytes * len(boxes))


def _check_swizzle(
    checker: "Checker", cta: "Cta", m: TensorMap, offset: int, chunks: np.ndarray, *, store: bool
) -> None:
    """Tells a checker where the tile of the current operation lies in a CTA's shared memory."""
    if m.swizzle != "none":
        phases = m.row_pitch // int(m.atom.partition("B")[0])
        checker.silicon.tile(
            cta, offset, m.row_pitch, phases, chunks.reshape(-1, chunks.shape[-1]), store=store
        )


def _chunk_lists(m: TensorMap, offset: int, count: int) -> list[np.ndarray]:
    """Returns chunk numbers in shared memory of `count` consecutive boxes."""
    return [m.row_chunk_index(offset, i) if i else m.chunk_index(offset) for i in range(count)]


def _tensor_store(inst: Inst, b: Builder, mods: Mods, form: _Tensor) -> Step:
    """Shared to global, with or without a reduction. Bulk groups track completion."""
    if not (mods.flag("global") and mods.flag("shared::cta") and mods.flag("bulk_group")):
        raise inst.unsupported("spaces or completion mechanism")
    operands = list(inst.operands)
    drop_policy(inst, b, mods, operands)
    mods.done()
    if len(operands) != 2:
        raise inst.unsupported(f"{len(operands)} operands")
    readers, pc = [b.address(operands[1]), *_tensor_readers(inst, b, operands[0], form)], b.pc

    def run(warp: "Warp", src: int, map_address: int, *coords: int) -> None:
        cta, offset = warp.cta, own_offset(warp.cta, src)
        m, use = _used_map(warp, pc, map_address)
        boxes = _single_boxes(form, m, coords)
        read = partial(_read_boxes, cta, m, boxes, offset, use)
        cta.issue_store(warp, read, partial(write_boxes, cta, m, boxes, form.reduce))

    return per_thread(run, readers, idempotent=form.reduce is None)


def _read_boxes(
    cta: "Cta", m: TensorMap, boxes: list[tuple[int, ...]], offset: int, use: Any
) -> list[np.ndarray]:
    cta.smem.check(offset, m.shared_extent(len(boxes)))
    chunk_lists = _chunk_lists(m, offset, len(boxes))
    checker = cta.machine.checker
    if checker is not None:
        _check_swizzle(checker, cta, m, offset, np.concatenate(chunk_lists), store=True)
        if use is not None:
            checker.tensor_maps.reading(use)
        for box, chunks in zip(boxes, chunk_lists, strict=True):
            inside = m.chunks_inside(box)
            if inside is not None:  # dropped parts need not be written
                checker.read_operand(cta, places.chunks(chunks[inside]))
    return [cta.smem.views[16].take(chunks) for chunks in chunk_lists]


def write_boxes(
    cta: "Cta", m: TensorMap, boxes: list[tuple[int, ...]], reduce: str | None, tiles: list[np.ndarray]
) -> None:
    """Stores or combines tiles of shared memory into boxes of a tensor."""
    view = lambda address, nbytes: cta.machine.memory.view(address, nbytes, write=True)
    checker = cta.machine.checker
    for box, tile in zip(boxes, tiles, strict=True):
        store = partial(m.write_tile, box, tile, view, reduce)
        if checker is None:
            store()
        else:
            checker.judged(partial(checker.write_global, *m.rows_at(box), atomic=reduce is not None), store)
    cta.machine.stats.tma_store_bytes += m.tile_bytes * len(boxes)


@handler("cp.reduce.async.bulk.tensor")
def tensor_reduce(inst: Inst, b: Builder) -> Step:
    """Combines a box of shared memory with global memory."""
    mods = Mods(inst)
    rank, four_rows = _tensor_mods(inst, mods)
    op = mods.one_of(*REDUCTIONS)
    if op is None or four_rows:
        raise inst.unsupported("reduction or load mode")
    return _tensor_store(inst, b, mods, _Tensor(rank, reduce=op))


@handler("cp.async.bulk.prefetch")
def prefetch(inst: Inst, b: Builder) -> Step:
    """Handles a prefetch into the L2 cache, which has no effect that a program can see."""
    return lambda warp: None


@handler("cp.async.bulk.prefetch.tensor")
def tensor_prefetch(inst: Inst, b: Builder) -> Step:
    """Handles a prefetch of a box into the L2 cache, which takes time but has no effect that a program can see."""
    mods = Mods(inst)
    form = _Tensor(*_tensor_mods(inst, mods))
    if not (mods.flag("L2") and mods.flag("global")):
        raise inst.unsupported("spaces")
    operands = list(inst.operands)
    drop_policy(inst, b, mods, operands)
    mods.done()
    if len(operands) != 1:
        raise inst.unsupported(f"{len(operands)} operands")

    def run(warp: "Warp", map_address: int, *coords: int) -> None:
        cta = warp.cta
        m = load_map(cta, map_address)
        boxes = _single_boxes(form, m, coords)
        if cta.machine.recorder is not None:
            cta.machine.recorder.issue(warp, Engine.COPY, partial(fetch_boxes, m, boxes))

    return per_thread(run, _tensor_readers(inst, b, operands[0], form))


def fetch_boxes(m: TensorMap, boxes: list[tuple[int, ...]]) -> None:
    """Brings boxes of a tensor into the L2 cache, which only the timing model has."""


# ---- editing tensor maps -----------------------------------------------------------------------------------------
@handler("tensormap.replace")
def replace(inst: Inst, b: Builder) -> Step:
    """Rewrite one field of a tensor map in shared or global memory."""
    mods = Mods(inst)
    if not mods.flag("tile") or not mods.left:
        raise inst.unsupported("mode other than .tile")
    field = mods.left.pop(0)
    space = mods.one_of("global", "shared::cta")
    mods.drop("b1024")
    type_ = mods.type()
    mods.done()
    ordinal = b.imm(inst.operands[1]) if len(inst.operands) == 3 else 0
    readers = [b.address(inst.operands[0]), b.read(inst.operands[-1], type_)]

    def run(warp: "Warp", address: int, value: Any) -> None:
        cta = warp.cta
        replace_field(_bytes_of(cta, space, address, DESCRIPTOR_BYTES, write=True), field, ordinal, value)
        cta.machine.changes += 1

    return per_thread(run, readers)


@handler("tensormap.cp_fenceproxy")
def copy_map(inst: Inst, b: Builder) -> Step:
    """Copies a tensor map from shared to global memory, once per warp, and orders it before later uses."""
    mods = Mods(inst)
    if not (mods.flag("global") and mods.flag("shared::cta")):
        raise inst.unsupported("spaces")
    mods.drop("tensormap::generic", "release", "cta", "cluster", "gpu", "sys", "sync", "aligned")
    mods.done()
    if b.imm(inst.operands[2]) != DESCRIPTOR_BYTES:
        raise inst.unsupported(f"size {b.imm(inst.operands[2])}; must be {DESCRIPTOR_BYTES}")
    dst, src = b.address(inst.operands[0]), b.address(inst.operands[1])

    def run(warp: "Warp") -> None:
        lane, cta = warp.first_lane(), warp.cta
        source = cta.smem.read(own_offset(cta, lane_value(src(warp), lane)), DESCRIPTOR_BYTES)
        cta.machine.memory.view(lane_value(dst(warp), lane), DESCRIPTOR_BYTES, write=True)[:] = source
        cta.machine.changes += 1

    return converged(run)


def _bytes_of(cta: "Cta", space: str | None, address: int, nbytes: int, *, write: bool) -> np.ndarray:
    """Returns the bytes at an address of a space (None: generic)."""
    if space == "shared::cta" or (space is None and address >= 1 << 62):
        return cta.smem.read(own_offset(cta, address), nbytes)
    return cta.machine.memory.view(address, nbytes, write=write)
