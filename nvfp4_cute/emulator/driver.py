"""Launching: from PTX and arguments (run_ptx), or from CuTe DSL host code (Emulator and the launch shim)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nvfp4_cute.emulator.code import Code
from nvfp4_cute.emulator.machine import Launch, Machine, Stats
from nvfp4_cute.emulator.ptx import Entry, Program, parse
from nvfp4_cute.errors import EmulatorError

Dim3 = tuple[int, int, int]


def dim3(value: int | Sequence[int]) -> Dim3:
    """A launch dimension given as an int or up to three ints."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    x, y, z = (*numbers, 1, 1, 1)[:3]
    return x, y, z


def param_buffer(nbytes: int) -> np.ndarray:
    """Zeroed parameter buffer, aligned to 128 bytes (tensor maps are parameters)."""
    raw = np.zeros(nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 128
    return raw[start : start + max(nbytes, 16)]


def pack_arguments(entry: Entry, args: Sequence[Any]) -> np.ndarray:
    """Parameter buffer of an entry from bytes, ints, floats, or arrays (whose address is passed).

    Raises:
        EmulatorError: the count or the size of an argument does not fit the entry's signature.
    """
    if len(args) != len(entry.params):
        raise EmulatorError(f"kernel {entry.name} takes {len(entry.params)} parameters, got {len(args)}")
    buffer = param_buffer(entry.param_bytes)
    for param, arg in zip(entry.params, args, strict=True):
        if isinstance(arg, np.ndarray):
            data = int(arg.ctypes.data).to_bytes(8, "little")
        elif isinstance(arg, bytes | bytearray):
            data = bytes(arg)
        elif isinstance(arg, float):
            data = np.array(arg, np.float32 if param.nbytes == 4 else np.float64).tobytes()
        else:
            data = (int(arg) & ((1 << 8 * param.nbytes) - 1)).to_bytes(param.nbytes, "little")
        if len(data) != param.nbytes:
            raise EmulatorError(
                f"parameter {param.name} has {param.nbytes} bytes, the argument has {len(data)}"
            )
        buffer[param.offset : param.offset + param.nbytes] = np.frombuffer(data, np.uint8)
    return buffer


def run_ptx(
    ptx: str | Program,
    entry: str | None = None,
    grid: int | Sequence[int] = 1,
    block: int | Sequence[int] = 32,
    args: Sequence[Any] = (),
    *,
    cluster: int | Sequence[int] = 1,
    smem_bytes: int = 0,
    sm_count: int = 148,
    checked: bool = True,
    machine: Machine | None = None,
) -> Stats:
    """Run one kernel of a PTX text.

    Args:
        ptx: module text, or a parsed Program.  entry: kernel name; may be left out if there is only one.
        grid, block, cluster: launch shape.  smem_bytes: dynamic shared memory.
        args: one per parameter: bytes, int, float, or an ndarray (passed by address, and registered as memory).
        checked: accesses outside the given arrays raise; False trusts every address.
        machine: run on this machine (its ranges and statistics) instead of a fresh one.

    Returns:
        The machine's statistics.

    Raises:
        EmulatorError: the text, the arguments, or the kernel's behaviour is not acceptable.
    """
    program = parse(ptx) if isinstance(ptx, str) else ptx
    if entry is None:
        if len(program.entries) != 1:
            raise EmulatorError(
                f"the module has {len(program.entries)} entries, name one of {list(program.entries)}"
            )
        entry = next(iter(program.entries))
    if entry not in program.entries:
        raise EmulatorError(f"no entry `{entry}` in the module; it has {list(program.entries)}")
    kernel = program.entries[entry]
    machine = machine or Machine(sm_count)
    if checked:
        for i, arg in enumerate(args):
            if isinstance(arg, np.ndarray):
                machine.memory.add_range(f"argument {i}", arg.ctypes.data, arg.nbytes, arg.flags.writeable)
    params = pack_arguments(kernel, args)
    code = Code(program, kernel)
    machine.run(Launch(code, dim3(grid), dim3(block), dim3(cluster), smem_bytes, params))
    return machine.stats
