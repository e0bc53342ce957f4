"""Steps of a machine that counts bank conflicts: wraps loads, stores and matrix moves of shared memory."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.banks import cycles_of
from nvfp4_cute.emulator.isa import Builder, Step, type_bytes
from nvfp4_cute.emulator.isa.memory import memory_mods
from nvfp4_cute.emulator.isa.spaces import SPACES, generic_space
from nvfp4_cute.emulator.ptx import Inst

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

MATRIX_ROWS, ROW_BYTES = 8, 16
MATRICES = ("ldmatrix", "stmatrix")


def counted(inst: Inst, b: Builder, step: Step) -> Step:
    """Returns the step of an instruction, with a count of its bank accesses if it reaches shared memory."""
    words = (*inst.opcode.split("."), *inst.mods)
    if words[0] in MATRICES:
        rows = MATRIX_ROWS * int(next((w[1:] for w in words if w in ("x1", "x2", "x4")), "1"))
        rows *= 2 if "m16n16" in words else 1
        space = "shared" if any(w.startswith("shared") for w in words) else "generic"
        return _counting(inst, b, step, space, ROW_BYTES, rows, write=words[0] == "stmatrix")
    if words[0] in ("ld", "ldu", "st") and inst.opcode != "st.async":
        mods, space, _ = memory_mods(inst)
        if space.startswith("shared") or space == "generic":
            nbytes = type_bytes(mods.type()) * int((mods.one_of("v2", "v4", "v8") or "v1")[1:])
            return _counting(inst, b, step, space, nbytes, None, write=words[0] == "st")
    return step


def _counting(
    inst: Inst, b: Builder, step: Step, space: str, nbytes: int, rows: int | None, *, write: bool
) -> Step:
    """`rows`: number of lanes, from lane 0, that supply an address; None means the active lanes."""
    address_of: Callable[[Any], Any] = b.address(inst.operands[0 if write else 1])
    place = inst.place

    def run(warp: "Warp") -> Any:
        where = address_of(warp)  # read before the step: a load may overwrite its own address
        result = step(warp)
        if result is not None:
            return result
        if where.__class__ is not np.ndarray:
            addresses = np.array([where], np.int64)
        elif rows is not None:
            addresses = where[:rows].astype(np.int64)
        else:
            addresses = (where if warp.all_active else where[warp.active]).astype(np.int64)
        if space == "generic":
            if generic_space(int(addresses[0])) != "shared::cluster":
                return None
            addresses = addresses - SPACES["shared"].window
        warp.cta.machine.stats.banks.count(place, cycles_of(addresses, nbytes))
        return None

    return run
