"""Steps of a machine that notes forms: reads the operands of instructions before they execute."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nvfp4_cute.emulator.isa import Builder, Reader, Step, lane_value
from nvfp4_cute.emulator.ptx import Address, Inst, TensorAddress, Vector
from nvfp4_cute.emulator.record import form_fields
from nvfp4_cute.emulator.record.form_fields import Texts
from nvfp4_cute.emulator.record.form_names import family_of, idiom_name, operation

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

Show = Callable[..., Texts]


def watched(inst: Inst, b: Builder, step: Step) -> Step:
    """Returns the step of an instruction, which also notes its operands."""
    prefix = next((p for p in FIELDS if operation(inst).startswith(p)), None)
    if prefix == "mma.sync" and "block_scale" not in inst.mods:
        prefix = None
    name = idiom_name(inst)
    if prefix is not None:
        step = _noting(inst, b, step, *FIELDS[prefix](inst, b))
    return step if name is None else _ordered(step, family_of(str(b.arch)), name)


def _ordered(step: Step, family: str, name: str) -> Step:
    def run(warp: "Warp") -> Any:
        log = warp.cta.machine.forms
        if log is not None:
            log.passed(warp, family, name)
        return step(warp)

    return run


def _noting(inst: Inst, b: Builder, step: Step, readers: list[Reader], texts: Show) -> Step:
    """Returns `step`, which also notes `texts(warp, *operand values)` once per set of values."""
    family = family_of(str(b.arch))
    seen: set[tuple[Any, ...]] = set()

    def run(warp: "Warp") -> Any:
        log = warp.cta.machine.forms
        if log is not None:
            lane = warp.first_lane()
            values = tuple(lane_value(read(warp), lane) for read in readers)
            key = (id(log), len(warp.cta.cluster.ctas), values)
            if key not in seen:
                seen.add(key)
                for kind, text in texts(warp, *values):
                    log.note(family, kind, text)
        return step(warp)

    return run


# ---- readers of operands, by instruction -----------------------------------------------------------------------------
Fields = Callable[[Inst, Builder], tuple[list[Reader], Show]]


def _mma(inst: Inst, b: Builder) -> tuple[list[Reader], Show]:
    of = form_fields.Mma.of(inst)
    a = inst.operands[1]
    readers = [b.address(inst.operands[0]), b.address(a) if of.a_in_tmem else b.read(a, "b64")]
    readers += [b.read(inst.operands[2], "b64"), b.read(inst.operands[3], "b32")]
    if of.is_scaled:
        readers += [b.address(inst.operands[4]), b.address(inst.operands[5])]
    return readers, of.texts


def _tensor_copy(inst: Inst, b: Builder) -> tuple[list[Reader], Show]:
    of = form_fields.TensorCopy.of(inst, operation(inst))
    place = next(x for x in inst.operands if isinstance(x, TensorAddress))
    shared = next((x for x in inst.operands if isinstance(x, Address)), None)
    readers = [b.read(place.map, "b64")]
    readers.append(b.address(shared) if shared is not None else lambda warp: 0)
    readers.append(b.read(inst.operands[-1], "b64") if of.has_hint else lambda warp: 0)
    mask = inst.operands[3] if of.is_multicast else None
    readers.append(b.read(mask, "b16") if mask is not None else lambda warp: 0)
    return readers, of.texts


def _tensor_memory_copy(inst: Inst, b: Builder) -> tuple[list[Reader], Show]:
    readers = [b.address(inst.operands[0]), b.read(inst.operands[1], "b64")]
    return readers, form_fields.TensorMemoryCopy(operation(inst)).texts


def _scaled_mma(inst: Inst, b: Builder) -> tuple[list[Reader], Show]:
    """Returns readers of the byte and thread ids of the scales of mma.sync."""
    name = operation(inst)
    pairs = [x for x in inst.operands[4:] if isinstance(x, Vector) and len(x.items) == 2]
    readers = [b.read(x, "b16") for pair in pairs for x in pair.items]

    def texts(warp: "Warp", *ids: int) -> Texts:
        shown = [f"byte {byte} thread {thread}" for byte, thread in zip(ids[::2], ids[1::2], strict=True)]
        yield "mma", f"{name}, scales at {' and '.join(shown)}"

    return readers, texts


def _allocation(inst: Inst, b: Builder) -> tuple[list[Reader], Show]:
    name = operation(inst)
    return [b.read(inst.operands[1], "u32")], lambda warp, count: iter(
        [("copy", f"{name} of {count} columns")]
    )


def _commit(inst: Inst, b: Builder) -> tuple[list[Reader], Show]:
    name = operation(inst)
    if len(inst.operands) < 2:
        return [], lambda warp: iter(())
    return [b.read(inst.operands[1], "b16")], lambda warp, mask: iter(
        [("copy", f"{name} to {form_fields.shares(mask, warp)}")]
    )


def _wgmma(inst: Inst, b: Builder) -> tuple[list[Reader], Show]:
    a, other = inst.operands[1], inst.operands[2]
    readers = [b.read(other, "b64")]
    if not isinstance(a, Vector):
        readers.append(b.read(a, "b64"))
    return readers, form_fields.Wgmma(inst.mods[-2] + "x" + inst.mods[-1]).texts


FIELDS: dict[str, Fields] = {
    "tcgen05.mma": _mma,
    "tcgen05.cp": _tensor_memory_copy,
    "tcgen05.alloc": _allocation,
    "tcgen05.commit": _commit,
    "cp.async.bulk.tensor": _tensor_copy,
    "cp.reduce.async.bulk.tensor": _tensor_copy,
    "cp.async.bulk.prefetch.tensor": _tensor_copy,
    "wgmma.mma_async": _wgmma,
    "mma.sync": _scaled_mma,
}
"""Opcode prefix -> readers of the operands, and the form that their values belong to."""
