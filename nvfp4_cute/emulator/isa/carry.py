"""Extended-precision integer arithmetic: add, sub and mad with the carry flag CC.CF (PTX ISA 9.7.2)."""

from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.isa import UNSIGNED, Builder, Mods, Step, handler, type_bytes
from nvfp4_cute.emulator.ptx import Inst, Reg

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

CARRY = Reg("CC.CF", "pred")
"""The flag, stored like any register: one bit per lane.

It is an adder's carry. An H200 also subtracts with the adder, so a set flag means no borrow. Only programs that mix
additions and subtractions see the difference.
"""

TYPES = ("u32", "s32", "u64", "s64")


@handler("add.cc", "addc", "sub.cc", "subc", "mad.lo.cc", "mad.hi.cc", "madc")
def extended(inst: Inst, b: Builder) -> Step:
    """d = a + b, a - b, or a part of a*b, + c; `addc`, `subc` and `madc` read the flag, `.cc` writes it."""
    mods = Mods(inst)
    base, *matched = inst.opcode.split(".")
    taken, operation = base.endswith("c"), base.removesuffix("c")
    given = "cc" in matched or mods.flag("cc")
    part = matched[0] if len(matched) == 2 else mods.one_of("lo", "hi")
    type_ = mods.type()
    mods.done()
    if type_ not in TYPES or (operation == "mad" and part is None):
        raise inst.unsupported(f".{type_}, or no .lo or .hi")
    bits = 8 * type_bytes(type_)
    mask = (1 << bits) - 1
    sources = [b.read(o, f"u{bits}") for o in inst.operands[1:]]
    signed = type_[0] == "s" and part == "hi"
    carry_in = b.read(CARRY, "pred") if taken else lambda warp: operation == "sub"
    put = b.write(inst.operands[0], f"u{bits}")
    put_carry = b.write(CARRY, "pred") if given else None

    def one(values: list[int], carry: bool) -> int:
        """Returns the result before it wraps; bits above the register are the carry."""
        if operation == "sub":
            return values[0] + (values[1] ^ mask) + carry
        if operation == "mad":
            values = [_part(values[0], values[1], part == "hi", signed, bits), values[2]]
        return values[0] + values[1] + carry

    def step(warp: "Warp") -> None:
        operands: list[Any] = [read(warp) for read in (*sources, carry_in)]
        if not any(v.__class__ is np.ndarray for v in operands):
            wide = one(operands[:-1], operands[-1])
            flag: Any = bool(wide >> bits)
            result: Any = wide & mask
        else:
            width = next(len(v) for v in operands if v.__class__ is np.ndarray)
            columns = [v.tolist() if v.__class__ is np.ndarray else [v] * width for v in operands]
            wides = [one(list(lane[:-1]), lane[-1]) for lane in zip(*columns, strict=True)]
            flag = np.array([w >> bits != 0 for w in wides])
            result = np.array([w & mask for w in wides], UNSIGNED[bits // 8])
        put(warp, result)
        if put_carry is not None:
            put_carry(warp, flag)

    return step


def _part(x: int, y: int, high: bool, signed: bool, bits: int) -> int:
    """Returns the low or the high half of a product, as an unsigned pattern."""
    if signed:
        x, y = (v - (1 << bits) if v >> (bits - 1) else v for v in (x, y))
    product = x * y
    return (product >> bits if high else product) & ((1 << bits) - 1)
