"""All instruction families. Importing a family registers its handlers, so this module registers every instruction."""

from nvfp4_cute.emulator.isa import (
    HANDLERS,
    HandlerFunction,
    arith,
    async_store,
    barrier,
    bits,
    calls,
    carry,
    cluster_launch,
    control,
    convert,
    float_arith,
    longest_prefix,
    matrix_move,
    memory,
    mma_sync,
    moves,
    registers,
    tcgen05,
    tma,
    warp,
    wgmma,
)
from nvfp4_cute.emulator.ptx import Inst

FAMILIES = (
    arith,
    async_store,
    barrier,
    bits,
    calls,
    carry,
    cluster_launch,
    control,
    convert,
    float_arith,
    matrix_move,
    memory,
    mma_sync,
    moves,
    registers,
    tcgen05,
    tma,
    warp,
    wgmma,
)
"""A missing family is an import error."""


def find_handler(inst: Inst) -> tuple[str, HandlerFunction]:
    """Returns the longest registered dotted prefix of the instruction's opcode, and its handler.

    Raises:
        EmulatorError: no prefix is registered; names the instruction and its PTX line.
    """
    prefix = longest_prefix(inst, HANDLERS)
    if prefix is None:
        opcode = ".".join((inst.opcode, *inst.mods))
        raise inst.unsupported(f"unknown opcode `{opcode}` (no entry in emulator/isa HANDLERS)")
    return prefix, HANDLERS[prefix]
