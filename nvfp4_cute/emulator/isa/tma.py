"""Bulk and tensor copies (TMA), cp.async, and edits of tensor maps (PTX ISA "Asynchronous copy", "tensormap").

Operands are read when the instruction executes; everything that touches memory or an mbarrier is the effect given to
`Cta.issue`. A copy signals its mbarrier with the bytes of the whole box, out-of-bounds parts included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.isa import Builder, Mods, Reader, Step, handler, lane_value
from nvfp4_cute.emulator.isa.issue import any_shared, converged, in_mask, own_offset, per_thread
from nvfp4_cute.emulator.isa.spaces import gather, scatter
from nvfp4_cute.emulator.ptx import Inst, Operand, TensorAddress
from nvfp4_cute.emulator.tensormap import DESCRIPTOR_BYTES, TensorMap, reduce_elements, replace_field
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.machine import Cta, Warp

DIMENSIONS = ("1d", "2d", "3d", "4d", "5d")
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_REDUCE_TYPES = ("f16", "bf16", "f32", "f64", "u32", "s32", "u64", "s64", "b32", "b64")


# ---- tensor copies -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Tensor:
    """Modifiers of a tensor copy: rows picked one by one (gather4, scatter4), CTA pairs, and the reduction."""

    rank: int
    four_rows: bool = False
    pair: bool = False
    reduce: str | None = None

    @property
    def coordinates(self) -> int:
        """Number of coordinates: gather4 and scatter4 take a column and four rows of a two-dimensional map."""
        return 5 if self.four_rows else self.rank


def _tensor_mods(inst: Inst, mods: Mods) -> tuple[int, bool]:
    """(rank, four rows); consumes the dimension and the load mode."""
    rank = mods.one_of(*DIMENSIONS)
    if rank is None:
        raise inst.unsupported("no dimension")
    if any(m.startswith("im2col") for m in mods.left):
        raise inst.unsupported("im2col mode")
    mode = mods.one_of("tile::gather4", "tile::scatter4", "tile")
    return int(rank[0]), mode is not None and mode != "tile"


def _tensor_readers(inst: Inst, b: Builder, operand: Operand, form: _Tensor) -> list[Reader]:
    """Readers of the tensor map's address and of the coordinates."""
    if not isinstance(operand, TensorAddress) or len(operand.coords) != form.coordinates:
        raise inst.unsupported(f"operand {operand}; expected [map, {{{form.coordinates} coordinates}}]")
    return [b.read(operand.map, "b64"), *(b.read(c, "s32") for c in operand.coords)]


def _policy(inst: Inst, b: Builder, mods: Mods, operands: list[Operand]) -> None:
    """Consume the cache hint and its operand, which change no result."""
    if mods.flag("L2::cache_hint"):
        b.read(operands.pop(), "b64")


def _load_map(cta: "Cta", address: int) -> TensorMap:
    if address % 64:
        raise EmulatorError(f"tensor map at {address:#x}: must be a multiple of 64")
    params = cta.launch.params
    start = address - params.ctypes.data
    if 0 <= start and start + DESCRIPTOR_BYTES <= params.size:
        return TensorMap.decode(params[start : start + DESCRIPTOR_BYTES].tobytes())
    return TensorMap.decode(cta.machine.memory.view(address, DESCRIPTOR_BYTES, write=False).tobytes())


def _single_boxes(form: _Tensor, m: TensorMap, coords: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Coordinates of the boxes that an instruction copies, one after the other in shared memory."""
    if not form.four_rows:
        if m.rank != form.rank:
            raise EmulatorError(f"tensor copy of rank {form.rank} with a tensor map of rank {m.rank}")
        return [coords]
    if m.rank != 2 or m.box[1] != 1:
        raise EmulatorError(f"gather4 and scatter4 need a two-dimensional map with box1 = 1, not box {m.box}")
    return [(coords[0], row) for row in coords[1:]]


@handler("cp.async.bulk.tensor")
def tensor_copy(inst: Inst, b: Builder) -> Step:
    """Copy a box between global and shared memory."""
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
    _policy(inst, b, mods, operands)
    mods.done()
    if len(operands) != 3 + multicast:
        raise inst.unsupported(f"{len(operands)} operands")
    readers = [b.address(operands[0]), b.address(operands[2])]
    readers.append(b.read(operands[3], "b16") if multicast else lambda warp: 0)
    readers += _tensor_readers(inst, b, operands[1], form)
    place = own_place if space == "shared::cta" else any_shared

    def run(cta: "Cta", dst: int, barrier: int, mask: int, map_address: int, *coords: int) -> None:
        target, offset = place(cta, dst)
        targets = in_mask(cta, mask) if multicast else [target]
        signals = _signalled(cta, targets, barrier, form.pair, multicast)
        cta.issue(partial(_load_boxes, cta, form, map_address, coords, targets, offset, signals))

    return per_thread(run, readers)


def own_place(cta: "Cta", address: int) -> "tuple[Cta, int]":
    """As `any_shared`, for an address that must be the CTA's own."""
    return cta, own_offset(cta, address)


def _signalled(
    cta: "Cta", targets: "Sequence[Cta]", barrier: int, pair: bool, multicast: bool
) -> "list[tuple[Cta, int]]":
    """CTA and offset of the mbarrier that each target's copy signals.

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


def _load_boxes(
    cta: "Cta",
    form: _Tensor,
    map_address: int,
    coords: tuple[int, ...],
    targets: "Sequence[Cta]",
    offset: int,
    signals: "Sequence[tuple[Cta, int]]",
) -> None:
    m = _load_map(cta, map_address)
    view = lambda address, nbytes: cta.machine.memory.view(address, nbytes, write=False)
    boxes = _single_boxes(form, m, coords)
    total = m.tile_bytes * len(boxes)
    chunk_lists = [m.chunk_index(offset)]
    chunk_lists += [m.row_chunk_index(offset, i) for i in range(1, len(boxes))]
    for box, chunks in zip(boxes, chunk_lists, strict=True):
        tile = m.read_tile(box, view)
        for target in targets:
            target.smem.check(offset, total)
            target.smem.views[16][chunks] = tile
    cta.machine.stats.tma_load_bytes += total
    for owner, barrier in signals:
        owner.mbarrier(barrier).complete_tx(total)


def _tensor_store(inst: Inst, b: Builder, mods: Mods, form: _Tensor) -> Step:
    """Shared to global, with or without a reduction; completion through bulk groups."""
    if not (mods.flag("global") and mods.flag("shared::cta") and mods.flag("bulk_group")):
        raise inst.unsupported("spaces or completion mechanism")
    operands = list(inst.operands)
    _policy(inst, b, mods, operands)
    mods.done()
    if len(operands) != 2:
        raise inst.unsupported(f"{len(operands)} operands")
    readers = [b.address(operands[1]), *_tensor_readers(inst, b, operands[0], form)]

    def run(cta: "Cta", src: int, map_address: int, *coords: int) -> None:
        cta.issue(partial(_store_boxes, cta, form, map_address, coords, own_offset(cta, src)))

    return per_thread(run, readers, idempotent=form.reduce is None)


def _store_boxes(cta: "Cta", form: _Tensor, map_address: int, coords: tuple[int, ...], offset: int) -> None:
    m = _load_map(cta, map_address)
    view = lambda address, nbytes: cta.machine.memory.view(address, nbytes, write=True)
    boxes = _single_boxes(form, m, coords)
    cta.smem.check(offset, m.tile_bytes * len(boxes))
    for i, box in enumerate(boxes):
        chunks = m.row_chunk_index(offset, i) if i else m.chunk_index(offset)
        m.write_tile(box, cta.smem.views[16].take(chunks), view, form.reduce)
    cta.machine.stats.tma_store_bytes += m.tile_bytes * len(boxes)


@handler("cp.reduce.async.bulk.tensor")
def tensor_reduce(inst: Inst, b: Builder) -> Step:
    """Combine a box of shared memory with global memory."""
    mods = Mods(inst)
    rank, four_rows = _tensor_mods(inst, mods)
    op = mods.one_of(*REDUCTIONS)
    if op is None or four_rows:
        raise inst.unsupported("reduction or load mode")
    return _tensor_store(inst, b, mods, _Tensor(rank, reduce=op))


@handler("cp.async.bulk.prefetch")
def prefetch(inst: Inst, b: Builder) -> Step:
    """A prefetch into the L2 cache, tensor or not: changes nothing that a program can see."""
    return lambda warp: None


# ---- bulk copies without a tensor map ----------------------------------------------------------------------------
@handler("cp.async.bulk")
def bulk_copy(inst: Inst, b: Builder) -> Step:
    """Copy contiguous bytes between global memory and shared memory, or between CTAs of a cluster."""
    mods = Mods(inst)
    spaces = tuple(mods.left[:2])
    del mods.left[:2]
    if spaces == ("global", "shared::cta"):
        return _bulk_store(inst, b, mods)
    if spaces not in (
        ("shared::cluster", "global"),
        ("shared::cta", "global"),
        ("shared::cluster", "shared::cta"),
    ):
        raise inst.unsupported(f"copy .{'.'.join(spaces)}")
    if not mods.flag("mbarrier::complete_tx::bytes"):
        raise inst.unsupported("completion mechanism")
    multicast = mods.flag("multicast::cluster")
    operands = list(inst.operands)
    _policy(inst, b, mods, operands)
    mods.done()
    if len(operands) != 4 + multicast:
        raise inst.unsupported(f"{len(operands)} operands")
    readers = [b.address(operands[i]) for i in (0, 1, 3)] + [b.read(operands[2], "u32")]
    readers.append(b.read(operands[4], "b16") if multicast else lambda warp: 0)
    from_shared, place = spaces[1] != "global", own_place if spaces[0] == "shared::cta" else any_shared

    def run(cta: "Cta", dst: int, src: int, barrier: int, nbytes: int, mask: int) -> None:
        _check_bulk(dst, src, nbytes)
        target, offset = place(cta, dst)
        targets = in_mask(cta, mask) if multicast else [target]
        signals = _signalled(cta, targets, barrier, False, multicast)
        source = own_offset(cta, src) if from_shared else src
        cta.issue(partial(_bulk_in, cta, source, from_shared, nbytes, targets, offset, signals))

    return per_thread(run, readers)


def _check_bulk(dst: int, src: int, nbytes: int) -> None:
    for what, value in (("destination", dst), ("source", src), ("size", nbytes)):
        if value % 16:
            raise EmulatorError(f"cp.async.bulk {what} {value:#x}: must be a multiple of 16")


def _bulk_in(
    cta: "Cta",
    src: int,
    from_shared: bool,
    nbytes: int,
    targets: "Sequence[Cta]",
    offset: int,
    signals: "Sequence[tuple[Cta, int]]",
) -> None:
    if nbytes:
        data = (
            cta.smem.read(src, nbytes) if from_shared else cta.machine.memory.view(src, nbytes, write=False)
        )
        for target in targets:
            target.smem.write(offset, data)
    cta.machine.stats.tma_load_bytes += 0 if from_shared else nbytes
    for owner, barrier in signals:
        owner.mbarrier(barrier).complete_tx(nbytes)


def _bulk_store(inst: Inst, b: Builder, mods: Mods) -> Step:
    """Shared to global; .cp_mask: bit i of a 16-bit mask copies byte i of every 16."""
    masked = mods.flag("cp_mask")
    if not mods.flag("bulk_group"):
        raise inst.unsupported("completion mechanism")
    operands = list(inst.operands)
    readers: list[Reader] = [lambda warp: 0xFFFF]
    if masked:
        readers = [b.read(operands.pop(), "b16")]
    _policy(inst, b, mods, operands)
    mods.done()
    if len(operands) != 3:
        raise inst.unsupported(f"{len(operands)} operands")
    readers += [b.address(operands[0]), b.address(operands[1]), b.read(operands[2], "u32")]

    def run(cta: "Cta", mask: int, dst: int, src: int, nbytes: int) -> None:
        _check_bulk(dst, src, nbytes)
        cta.issue(partial(_bulk_out, cta, dst, own_offset(cta, src), nbytes, mask, None, ""))

    return per_thread(run, readers, idempotent=True)


def _bulk_out(
    cta: "Cta", dst: int, offset: int, nbytes: int, mask: int, reduce: str | None, type_name: str
) -> None:
    if not nbytes:
        return
    source = cta.smem.read(offset, nbytes)
    target = cta.machine.memory.view(dst, nbytes, write=True)
    if reduce is not None:
        _reduce_bytes(reduce, type_name, target, source)
    elif mask == 0xFFFF:
        target[:] = source
    else:
        keep = (mask >> np.arange(16) & 1).astype(bool)
        np.copyto(target.reshape(-1, 16), source.reshape(-1, 16), where=keep)
    cta.machine.stats.tma_store_bytes += nbytes


@handler("cp.reduce.async.bulk")
def bulk_reduce(inst: Inst, b: Builder) -> Step:
    """Combine contiguous shared memory with global memory, or with the shared memory of a CTA of the cluster."""
    mods = Mods(inst)
    spaces = tuple(mods.left[:2])
    del mods.left[:2]
    op, type_name = mods.one_of(*REDUCTIONS), mods.one_of(*_REDUCE_TYPES)
    mods.drop("noftz")
    to_global = spaces == ("global", "shared::cta")
    if op is None or type_name is None or not (to_global or spaces == ("shared::cluster", "shared::cta")):
        raise inst.unsupported("spaces, operation, or type")
    if not mods.flag("bulk_group" if to_global else "mbarrier::complete_tx::bytes"):
        raise inst.unsupported("completion mechanism")
    operands = list(inst.operands)
    _policy(inst, b, mods, operands)
    mods.done()
    if len(operands) != 4 - to_global:
        raise inst.unsupported(f"{len(operands)} operands")
    readers = [b.address(operands[0]), b.address(operands[1]), b.read(operands[2], "u32")]
    readers += [] if to_global else [b.address(operands[3])]

    def run(cta: "Cta", dst: int, src: int, nbytes: int, barrier: int = 0) -> None:
        _check_bulk(dst, src, nbytes)
        source = own_offset(cta, src)
        if to_global:
            cta.issue(partial(_bulk_out, cta, dst, source, nbytes, 0xFFFF, op, type_name))
            return
        target, offset = any_shared(cta, dst)
        signal = _signalled(cta, [target], barrier, False, False)[0]

        def effect() -> None:
            _reduce_bytes(op, type_name, target.smem.read(offset, nbytes), cta.smem.read(source, nbytes))
            signal[0].mbarrier(signal[1]).complete_tx(nbytes)

        cta.issue(effect)

    return per_thread(run, readers)


def _reduce_bytes(op: str, type_name: str, target: np.ndarray, source: np.ndarray) -> None:
    """target = op(target, source), elementwise on contiguous bytes."""
    target[:] = reduce_elements(op, type_name, target, source)


# ---- bulk groups -------------------------------------------------------------------------------------------------
@handler("cp.async.bulk.commit_group", "cp.async.commit_group")
def commit_group(inst: Inst, b: Builder) -> Step:
    """Close a group of copies."""
    mods = Mods(inst)
    mods.drop("commit_group")
    mods.done()
    return lambda warp: None


@handler("cp.async.bulk.wait_group", "cp.async.wait_group", "cp.async.wait_all")
def wait_group(inst: Inst, b: Builder) -> Step:
    """Wait until at most N groups are incomplete: copies are complete when issued, so there is nothing to wait for."""
    mods = Mods(inst)
    mods.drop("read")
    mods.done()
    for operand in inst.operands:
        b.imm(operand)
    return lambda warp: None


# ---- cp.async ----------------------------------------------------------------------------------------------------
@handler("cp.async")
def small_copy(inst: Inst, b: Builder) -> Step:
    """Each thread copies 4, 8 or 16 bytes from global to shared memory; a smaller source size fills with zeros."""
    mods = Mods(inst)
    mods.drop("ca", "cg", "shared", "shared::cta", "global")
    operands = list(inst.operands)
    _policy(inst, b, mods, operands)
    mods.drop_prefix("L2::")
    mods.done()
    if len(operands) not in (3, 4):
        raise inst.unsupported(f"{len(operands)} operands")
    nbytes = b.imm(operands[2])
    if nbytes not in (4, 8, 16):
        raise inst.unsupported(f"{nbytes} bytes; legal are 4, 8 and 16")
    dst, src = b.address(operands[0]), b.address(operands[1])
    if len(operands) == 3:
        element = np.dtype(np.uint32)

        def copy(warp: "Warp") -> None:
            rows = gather(warp, "global", src(warp), nbytes, element, nbytes // 4)
            scatter(warp, "shared", dst(warp), list(rows), element)

        return copy
    available = b.read(operands[3], "pred" if getattr(operands[3], "type", "") == "pred" else "u32")

    def run(cta: "Cta", to: int, source: int, limit: int | bool) -> None:
        # A predicate operand means "ignore the source".
        count = (0 if limit else nbytes) if isinstance(limit, bool) else min(limit, nbytes)
        data = np.zeros(nbytes, np.uint8)
        if count:
            data[:count] = cta.machine.memory.view(source, count, write=False)
        cta.smem.write(own_offset(cta, to), data)

    return per_thread(run, [dst, src, available])


@handler("cp.async.mbarrier.arrive")
def small_copy_arrive(inst: Inst, b: Builder) -> Step:
    """Arrive when the thread's earlier cp.async are complete, which they are.

    Without .noinc the pending count is raised by the instruction and lowered by the arrival: no net effect.
    """
    mods = Mods(inst)
    counted = mods.flag("noinc")
    mods.drop("shared", "shared::cta", "b64")
    mods.done()

    def run(cta: "Cta", address: int) -> None:
        barrier = cta.mbarrier(own_offset(cta, address))
        if counted:
            cta.issue(barrier.arrive)

    return per_thread(run, [b.address(inst.operands[0])])


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

    def run(cta: "Cta", address: int, value: Any) -> None:
        replace_field(_bytes_of(cta, space, address, DESCRIPTOR_BYTES, write=True), field, ordinal, value)
        cta.machine.changes += 1

    return per_thread(run, readers)


@handler("tensormap.cp_fenceproxy")
def copy_map(inst: Inst, b: Builder) -> Step:
    """Copy a tensor map from shared to global memory, once per warp, and order it before later uses."""
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
    """Bytes at an address of a space (None: generic)."""
    if space == "shared::cta" or (space is None and address >= 1 << 62):
        return cta.smem.read(own_offset(cta, address), nbytes)
    return cta.machine.memory.view(address, nbytes, write=write)
