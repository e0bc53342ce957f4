"""Floating-point instructions, and the opcodes that integers share with them (add, mul, min, ...).

Results are correctly rounded wherever PTX promises it. The `.approx` functions of the hardware are modelled by the
correctly rounded result, which lies inside their error bound.
"""

import operator
import struct
from collections.abc import Callable
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.isa import (
    UNSIGNED,
    Builder,
    Mods,
    Step,
    arith,
    float_results,
    floats,
    handler,
    merge_lanes,
    type_bytes,
)
from nvfp4_cute.emulator.nans import nan_f64
from nvfp4_cute.emulator.ptx import Inst

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

ROUNDING_MODIFIERS = ("rn", "rz", "rm", "rp")
INTEGER_FORMS: dict[str, Callable[[Inst, Builder, Mods, str], Step]] = {
    "add": arith.integer_add_sub,
    "sub": arith.integer_add_sub,
    "mul": arith.integer_mul_mad,
    "mad": arith.integer_mul_mad,
    "div": arith.integer_div,
    "min": arith.integer_min_max,
    "max": arith.integer_min_max,
    "abs": arith.integer_abs_neg,
    "neg": arith.integer_abs_neg,
}

# ---- exact binary32/binary64 kernels: (operands, rounding) -> result, all arrays of one dtype -------


def _add(a: np.ndarray, b: np.ndarray, rounding: str) -> np.ndarray:
    if rounding == "rn":
        return a + b
    if a.dtype == np.float64:
        result = floats.exact_f64(lambda x, y: x + y, a + b, rounding, a, b)
    else:
        result = floats.round_f32(floats.add_odd(a.astype(np.float64), b.astype(np.float64)), rounding)
    return _zero_sum(result, np.signbit(a) | np.signbit(b), rounding)


def _zero_sum(result: np.ndarray, any_negative: np.ndarray, rounding: str) -> np.ndarray:
    """Sets the sign of exact zero sums of terms of both signs: -0 when rounding down (IEEE 754, 6.3)."""
    if rounding != "rm":
        return result
    return np.where((result == 0) & any_negative, -np.abs(result), result)


def _mul(a: np.ndarray, b: np.ndarray, rounding: str) -> np.ndarray:
    if rounding == "rn":
        return a * b
    if a.dtype == np.float64:
        return floats.exact_f64(lambda x, y: x * y, a * b, rounding, a, b)
    return floats.round_f32(a.astype(np.float64) * b.astype(np.float64), rounding)


def _div(a: np.ndarray, b: np.ndarray, rounding: str) -> np.ndarray:
    if rounding == "rn":
        return a / b
    if a.dtype == np.float64:
        return floats.exact_f64(lambda x, y: x / y if y else None, a / b, rounding, a, b)
    # A quotient of binary32 numbers is either a binary32 number or farther than 2**-50 (relative) from all of them, so
    # an earlier rounding to binary64 does not change it.
    return floats.round_f32(a.astype(np.float64) / b.astype(np.float64), rounding)


def _div_approximate(a: np.ndarray, b: np.ndarray, rounding: str) -> np.ndarray:
    """div.approx: a divisor above 2**126 has the reciprocal zero (PTX ISA 9.7.3.8)."""
    huge = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    return np.where(huge, a * np.copysign(np.float32(0), b), _div(a, b, rounding))


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, rounding: str) -> np.ndarray:
    if a.dtype == np.float64:
        return floats.fma_f64(a, b, c, rounding)
    if rounding == "rn":
        return floats.fma_f32(a, b, c)
    total = floats.fma_odd(a, b, c)  # zero only if the exact sum is
    total = _zero_sum(total, (np.signbit(a) ^ np.signbit(b)) | np.signbit(c), rounding)
    return floats.round_f32(total, rounding)


def _sqrt(a: np.ndarray, rounding: str) -> np.ndarray:
    if rounding == "rn":
        return np.sqrt(a)
    if a.dtype == np.float64:
        return floats.sqrt_f64(a, rounding)
    return floats.round_f32(np.sqrt(a.astype(np.float64)), rounding)


def _minimum(a: np.ndarray, b: np.ndarray, rounding: str) -> np.ndarray:
    # -0 counts as less than +0. A number wins over a NaN operand, even a signalling one (np.fmin would return it).
    first = (a < b) | ((a == b) & np.signbit(a)) | (b != b)
    return np.where(first & (a == a), a, b)


def _maximum(a: np.ndarray, b: np.ndarray, rounding: str) -> np.ndarray:
    first = (a > b) | ((a == b) & ~np.signbit(a)) | (b != b)
    return np.where(first & (a == a), a, b)


def _of_all(pick: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Applies the two-operand `pick` to two or three operands."""

    def kernel(*args: Any) -> np.ndarray:
        *values, rounding = args
        return reduce(lambda a, b: pick(a, b, rounding), values)

    return kernel


def _narrow(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray, str], np.ndarray]:
    """Wraps a transcendental function: computed in float64 and rounded once to the operand's format."""
    return lambda a, rounding: function(a.astype(np.float64)).astype(a.dtype)


KERNELS: dict[str, Callable[..., np.ndarray]] = {
    "add": _add,
    "sub": lambda a, b, rounding: _add(a, -b, rounding),
    "mul": _mul,
    "div": _div,
    "div.approx": _div_approximate,
    "fma": _fma,
    "mad": _fma,
    "sqrt": _sqrt,
    "rcp": lambda a, rounding: _div(np.ones_like(a), a, rounding),
    "rsqrt": _narrow(lambda a: 1.0 / np.sqrt(a)),
    "ex2": _narrow(np.exp2),
    "lg2": _narrow(np.log2),
    "sin": _narrow(np.sin),
    "cos": _narrow(np.cos),
    "tanh": _narrow(np.tanh),
    "min": _of_all(_minimum),
    "max": _of_all(_maximum),
}

# ---- operand formats: register bits <-> arrays for computation --------------------------------------


class Lanes:
    """Storage of a float type in a register: `lanes` elements of format `name`, computed in float32 or float64."""

    def __init__(self, type_: str):
        """Describes a PTX float type, including packed types."""
        self.type = type_
        self.name = type_.removesuffix("x2")
        self.bytes = type_bytes(type_)
        self.element = np.dtype({"f16": "f2", "bf16": "u2", "f32": "f4", "f64": "f8"}[self.name])
        self.register = UNSIGNED[self.bytes]
        self.count = self.bytes // self.element.itemsize
        self.narrow = self.name in ("f16", "bf16")
        self.plain = not self.narrow and self.count == 1

    def load(self, value: Any) -> np.ndarray:
        """Register bits (dual) -> [32] elements, packed types [32, 2]; first extent 1 where the value is uniform."""
        elements = (value if value.__class__ is np.ndarray else _one(value, self.register)).view(self.element)
        if self.plain:
            return elements
        if self.count > 1:
            elements = elements.reshape(-1, self.count)
        if not self.narrow:
            return elements
        return elements.astype(np.float32) if self.name == "f16" else floats._decode_wide(elements, "bf16")

    def store(self, values: np.ndarray) -> Any:
        """Inverse of load; rounds float32 to the narrow formats."""
        if (
            self.plain
            and values.ndim == 1
            and values.size > 1
            and values.dtype == self.element
            and values.flags.c_contiguous
        ):
            return values.view(self.register)
        if self.name == "f16":
            values = values.astype(np.float16)
        elif self.name == "bf16":
            values = floats.f32_to_bf16(np.ascontiguousarray(values, np.float32))
        bits = np.ascontiguousarray(values, self.element).reshape(-1).view(self.register)
        return bits if bits.size > 1 else int(bits[0])


@lru_cache(1024)
def _one(value: int, register: np.dtype) -> np.ndarray:
    """Returns the bits of a uniform register as an array of one element, which must not be changed."""
    array = np.array([value], register)
    array.flags.writeable = False
    return array


def _plain(opcode: str, lanes: Lanes, rounding: str, relu: bool, sat: bool, nan: bool) -> bool:
    """Whether the NumPy operator alone implements the complete instruction."""
    return opcode in ("add", "sub", "mul") and rounding == "rn" and not (relu or sat or nan or lanes.narrow)


def float_operation(inst: Inst, b: Builder, mods: Mods, type_: str) -> Step:
    """Handles any float instruction of KERNELS: rounding, .ftz, .sat, .relu, .NaN, .xorsign.abs, .approx."""
    opcode = inst.opcode
    lanes = Lanes(type_)
    rounding = mods.one_of(*ROUNDING_MODIFIERS, default="rn") or "rn"
    ftz, sat, relu, nan = (mods.flag(name) for name in ("ftz", "sat", "relu", "NaN"))
    xorsign, magnitudes = mods.flag("xorsign"), mods.flag("abs")
    approximate = mods.flag("approx")
    mods.drop("full", "noftz")
    mods.done()
    kernel = KERNELS["div.approx"] if opcode == "div" and approximate else KERNELS[opcode]
    loads = [_operand_loader(b, o, lanes) for o in inst.operands[1:]]
    put = b.write(inst.operands[0], f"b{8 * lanes.bytes}")
    handed_on = type_ == "f64"
    flushed = ftz and lanes.name in float_results.SMALLEST_NORMAL
    plain = _plain(opcode, lanes, rounding, relu, sat, nan) and not flushed
    narrow_fma = lanes.narrow and opcode in ("fma", "mad")

    if plain and type_ == "f32":
        return _plain_f32(inst, b)
    unmodified = rounding == "rn" and not (ftz or sat or relu or nan or xorsign or magnitudes)
    if lanes.name == "f16" and unmodified and opcode in _HALF:
        return _plain_f16(inst, b, lanes)
    if lanes.narrow and opcode in ("min", "max") and not (flushed or sat or relu or xorsign or magnitudes):
        return _narrow_extreme(inst, b, lanes, nan)

    def step(warp: "Warp") -> None:
        args = [load(warp) for load in loads]
        if flushed:
            args = [float_results.flush(x, lanes.name) for x in args]
        if narrow_fma:
            result = _narrow_fma(lanes.name, *args)
        else:
            result = kernel(*(map(np.abs, args) if magnitudes else args), rounding)
        if handed_on:
            result = nan_f64(result, args)
        if nan:
            result = np.where(_any_nan(args), np.float32(np.nan), result)
        if xorsign:
            result = np.copysign(result, np.where(np.signbit(args[0]) ^ np.signbit(args[1]), -1.0, 1.0))
            result = result.astype(args[0].dtype)
        if relu:
            result = float_results.rectify(result)
        if sat:
            result = float_results.saturate(result)
        if flushed:
            if lanes.narrow:
                result = result.astype(lanes.element).astype(np.float32)
            result = float_results.flush_result(result, opcode, args, lanes.name, rounding)
        put(warp, lanes.store(float_results.canonical_nan(result)))

    return step


def _plain_f32(inst: Inst, b: Builder) -> Step:
    """add/sub/mul.rn.f32 without modifiers, on Python floats if the operands are uniform.

    Rounding a double sum or product of binary32 numbers to binary32 is correct: 53 >= 2 * 24 + 2 bits.
    """
    x, y = (arith.same_width(b, o, "f32") for o in inst.operands[1:3])
    d = b.target(inst.operands[0])
    dtype = b.dtypes[d]
    operation = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}[inst.opcode]
    f32 = np.dtype(np.float32)

    def step(warp: "Warp") -> None:
        regs = warp.regs
        left, right = regs[x], regs[y]
        if left.__class__ is int and right.__class__ is int:
            value: Any = _pack_f32(operation(_unpack_f32(left), _unpack_f32(right)))
        else:
            left = left.view(f32) if left.__class__ is np.ndarray else _unpack_f32(left)
            right = right.view(f32) if right.__class__ is np.ndarray else _unpack_f32(right)
            value = float_results.canonical_nan(operation(left, right)).view(dtype)
        if d in warp.protected:
            value = merge_lanes(warp.active, value, regs[d], dtype)
        regs[d] = value

    return step


def _half_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c for float16, rounded once to nearest even.

    An earlier rounding of the sum to float64 does not change the result. A product has 22 bits and is a multiple of
    2**-48. So a sum of more than 53 bits is either at least 2**29, or the sum of c and a product below 2**-30 of it,
    which is not close to a tie.
    """
    return (a.astype(np.float64) * b + c).astype(np.float16)


# NumPy adds and multiplies float16 in float32 and rounds: correct, since 24 >= 2 * 11 + 2 bits.
_HALF: dict[str, Callable[..., np.ndarray]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "fma": _half_fma,
}


def _plain_f16(inst: Inst, b: Builder, lanes: Lanes) -> Step:
    """add/sub/mul/fma.rn of f16 and f16x2 without modifiers."""
    slots = [arith.same_width(b, o, f"b{8 * lanes.bytes}") for o in inst.operands[1:]]
    put = b.write(inst.operands[0], f"b{8 * lanes.bytes}")
    register, operation = lanes.register, _HALF[inst.opcode]
    f16 = np.dtype(np.float16)

    def step(warp: "Warp") -> None:
        regs = warp.regs
        values = [regs[slot] for slot in slots]
        uniform = not any(v.__class__ is np.ndarray for v in values)
        args = [(v if v.__class__ is np.ndarray else _one(v, register)).view(f16) for v in values]
        if lanes.count > 1 and not uniform:
            args = [x.reshape(-1, lanes.count) for x in args]
        result = operation(*args)
        nan = result != result
        if np.count_nonzero(nan):
            result.view(np.uint16)[nan] = 0x7FFF
        bits = result.reshape(-1).view(register)
        put(warp, int(bits[0]) if uniform else bits)

    return step


def _narrow_extreme(inst: Inst, b: Builder, lanes: Lanes, nan: bool) -> Step:
    """min/max{.NaN} of f16 and bf16 and their pairs, on codes, which are in order if the magnitude of negative ones is inverted.

    A NaN operand counts as the end of that order which the operation never picks, or with .NaN always picks.
    """
    slots = [arith.same_width(b, o, f"b{8 * lanes.bytes}") for o in inst.operands[1:]]
    put = b.write(inst.operands[0], f"b{8 * lanes.bytes}")
    pick = np.maximum if inst.opcode == "max" else np.minimum
    infinity = np.int16(floats.FORMATS[lanes.name].inf or 0)
    magnitude, lowest, highest = np.int16(0x7FFF), np.int16(-0x8000), np.int16(0x7FFF)
    of_nan = highest if nan == (inst.opcode == "max") else lowest
    sign_bits, register, one = np.int16(15), lanes.register, lanes.count

    def ordered(value: Any) -> np.ndarray:
        codes = (value if value.__class__ is np.ndarray else _one(value, register)).view(np.int16)
        codes = codes.reshape(-1, one)
        place = codes ^ (codes >> sign_bits & magnitude)
        strange = (codes & magnitude) > infinity
        return np.where(strange, of_nan, place) if np.count_nonzero(strange) else place

    def step(warp: "Warp") -> None:
        regs = warp.regs
        place = reduce(pick, [ordered(regs[slot]) for slot in slots])
        place = np.where(
            place == lowest, highest, place
        )  # only NaN is there; the canonical NaN is the highest code
        codes = place ^ (place >> sign_bits & magnitude)
        bits = np.ascontiguousarray(codes).reshape(-1).view(register)
        put(warp, bits if bits.size > 1 else int(bits[0]))

    return step


def _unpack_f32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def _pack_f32(value: float) -> int:
    """Returns the bits of a double rounded to binary32; NaN is canonical."""
    if value != value:
        return 0x7FFFFFFF
    try:
        return struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def _operand_loader(b: Builder, operand: Any, lanes: Lanes) -> "Callable[[Warp], np.ndarray]":
    type_ = lanes.type if lanes.type in ("f32", "f64") else f"b{8 * lanes.bytes}"
    slot = arith.same_width(b, operand, type_)
    load = lanes.load
    return lambda warp: load(warp.regs[slot])


def _any_nan(args: list[np.ndarray]) -> np.ndarray:
    result = args[0] != args[0]
    for x in args[1:]:
        result = result | (x != x)
    return result


def _narrow_fma(name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Computes fma of f16/bf16 values with one rounding. The result is exact in float32, so storing does not round again."""
    if name == "f16":  # NumPy rounds float64 to half once
        return floats.fma_odd(a, b, c).astype(np.float16).astype(np.float32)
    codes = floats.encode(floats.fma_odd(a, b, c), name)
    return floats.decode(codes.astype(np.uint16), name).astype(np.float32)


@handler("add", "sub", "mul", "mad", "div", "min", "max")
def arithmetic(inst: Inst, b: Builder) -> Step:
    """Arithmetic on integers or floats, by type (PTX ISA 9.7.1, 9.7.3, 9.7.4, 9.7.6)."""
    mods = Mods(inst)
    types = mods.types()
    if len(types) == 2 and types[0] == "f32":
        return _mixed_precision(inst, b, mods, types[1])
    if len(types) != 1:
        raise inst.unsupported(f"types {types}")
    if types[0] in arith.INTEGER_TYPES:
        return INTEGER_FORMS[inst.opcode](inst, b, mods, types[0])
    return float_operation(inst, b, mods, types[0])


def _mixed_precision(inst: Inst, b: Builder, mods: Mods, narrow: str) -> Step:
    """add/sub/fma with f16/bf16 operands and an f32 result (sm_100)."""
    rounding = mods.one_of(*ROUNDING_MODIFIERS, default="rn") or "rn"
    sat = mods.flag("sat")
    mods.done()
    wide, small = Lanes("f32"), Lanes(narrow)
    count = len(inst.operands) - 1
    loads = [
        _operand_loader(b, o, wide if i == count - 1 else small) for i, o in enumerate(inst.operands[1:])
    ]
    put = b.write(inst.operands[0], "b32")
    kernel = KERNELS[inst.opcode]
    narrow_fma = inst.opcode == "fma" and rounding == "rn"

    def step(warp: "Warp") -> None:
        args = [load(warp) for load in loads]
        result = floats.fma_narrow(*args) if narrow_fma else kernel(*args, rounding)
        if sat:
            result = float_results.saturate(result)
        put(warp, wide.store(float_results.canonical_nan(result)))

    return step


@handler("fma")
def fused_multiply_add(inst: Inst, b: Builder) -> Step:
    """fma with a single rounding."""
    mods = Mods(inst)
    types = mods.types()
    if len(types) == 2:
        return _mixed_precision(inst, b, mods, types[1])
    return float_operation(inst, b, mods, types[0])


@handler("sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def unary_float(inst: Inst, b: Builder) -> Step:
    """One-operand functions, correctly rounded even if PTX allows an approximation."""
    mods = Mods(inst)
    return float_operation(inst, b, mods, mods.type())


@handler("abs", "neg")
def sign_operation(inst: Inst, b: Builder) -> Step:
    """abs/neg: on floats they change only the sign bit, and make NaN canonical."""
    mods = Mods(inst)
    type_ = mods.type()
    if type_ in arith.INTEGER_TYPES:
        return arith.integer_abs_neg(inst, b, mods, type_)
    ftz = mods.flag("ftz")
    mods.done()
    lanes = Lanes(type_)
    word = UNSIGNED[lanes.element.itemsize]
    sign = word.type(1 << 8 * word.itemsize - 1)
    read = b.read(inst.operands[1], f"b{8 * lanes.bytes}")
    absolute = inst.opcode == "abs"

    def compute(warp: "Warp") -> Any:
        bits = read(warp)
        uniform = bits.__class__ is not np.ndarray
        codes = (np.array([bits], lanes.register) if uniform else bits).view(word)
        if ftz and type_ == "f32":
            codes = float_results.flush(codes.view(np.float32), "f32").view(word)
        plain = codes & ~sign if absolute else codes ^ sign
        result = float_results.signed_nan(codes, plain, lanes.name).view(lanes.register)
        return int(result[0]) if uniform else result

    return arith.put_step(b, inst.operands[0], compute, f"b{8 * lanes.bytes}")


@handler("copysign")
def copysign(inst: Inst, b: Builder) -> Step:
    """Magnitude of b with the sign of a."""
    mods = Mods(inst)
    size = 8 * type_bytes(mods.type())
    mods.done()
    sign = 1 << (size - 1)
    x, y = b.read(inst.operands[1], f"b{size}"), b.read(inst.operands[2], f"b{size}")
    return arith.put_step(
        b, inst.operands[0], lambda warp: (x(warp) & sign) | (y(warp) & (sign - 1)), f"b{size}"
    )


@handler("testp")
def test_property(inst: Inst, b: Builder) -> Step:
    """Class of a float: finite, infinite, number, notanumber, normal, subnormal."""
    mods = Mods(inst)
    type_ = mods.type()
    name = mods.one_of("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    mods.done()
    lanes = Lanes(type_)
    load = _operand_loader(b, inst.operands[1], lanes)
    tiny = np.finfo(lanes.element).tiny
    tests: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: x == x,
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & ((np.abs(x) >= tiny) | (x == 0)),
        "subnormal": lambda x: (np.abs(x) < tiny) & (x != 0),
    }
    if name is None:
        raise inst.unsupported("testp without a property")
    test = tests[name]

    def compute(warp: "Warp") -> Any:
        result = test(load(warp))
        return result if result.size > 1 else bool(result[0])

    return arith.put_step(b, inst.operands[0], compute, "pred")
