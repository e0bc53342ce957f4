"""cvt: conversions between integer and float types, packed and block-scale formats included (PTX ISA 9.7.9.21)."""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.isa import (
    SIGNED,
    UNSIGNED,
    Builder,
    Mods,
    Reader,
    Step,
    float_results,
    floats,
    handler,
    type_bytes,
)
from nvfp4_cute.emulator.isa.arith import INTEGER_TYPES, put_step
from nvfp4_cute.emulator.isa.float_arith import Lanes
from nvfp4_cute.emulator.ptx import TYPE_BYTES, Inst, Sink

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

PACKED_BITS = {"e4m3x2": 8, "e5m2x2": 8, "e2m1x2": 4, "e2m3x2": 8, "e3m2x2": 8, "ue8m0x2": 8}
PACKED_X4 = {"e4m3x4": 8, "e5m2x4": 8, "e2m1x4": 4, "e2m3x4": 8, "e3m2x4": 8}
"""Bits of one element's container in packed narrow types that only cvt has."""

INTEGER_ROUNDINGS = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}
ROUNDING_MODIFIERS = ("rn", "rna", "rz", "rm", "rp", *INTEGER_ROUNDINGS)


def _types(mods: Mods) -> tuple[str, str]:
    known = [m for m in mods.left if m in TYPE_BYTES or m in PACKED_BITS or m in PACKED_X4]
    if len(known) != 2:
        raise mods.inst.unsupported(f"expected two types, found {known}")
    for name in known:
        mods.left.remove(name)
    return known[0], known[1]


@handler("cvt")
def convert(inst: Inst, b: Builder) -> Step:
    """cvt{.rounding}{.ftz}{.relu}{.satfinite|.sat}.dtype.atype d, a{, b}."""
    mods = Mods(inst)
    dest, source = _types(mods)
    rounding = mods.one_of(*ROUNDING_MODIFIERS)
    if "rs" in inst.mods or dest in PACKED_X4:
        raise inst.unsupported("stochastic rounding")
    if dest in PACKED_BITS or dest in ("f16x2", "bf16x2"):
        return _to_packed(inst, b, mods, dest, source, rounding or "rn")
    if source in INTEGER_TYPES and dest in INTEGER_TYPES:
        return _integer_to_integer(inst, b, mods, dest, source)
    if source in INTEGER_TYPES:
        return _integer_to_float(inst, b, mods, dest, source, rounding or "rn")
    if dest in INTEGER_TYPES:
        return _float_to_integer(inst, b, mods, dest, source, rounding)
    return _float_to_float(inst, b, mods, dest, source, rounding)


@handler("cvt.pack")
def convert_pack(inst: Inst, b: Builder) -> Step:
    """cvt.pack.sat: two s32 saturated to 16 (or 8, 4, 2) bits and packed, optionally shifting a third word up."""
    mods = Mods(inst)
    mods.flag("sat")
    narrow, *_ = mods.left
    bits = int(narrow[1:])
    mods.left = []
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if narrow[0] == "s" else (0, (1 << bits) - 1)
    a, c, *rest = (b.read(o, "s32" if i < 2 else "u32") for i, o in enumerate(inst.operands[1:]))
    mask = (1 << bits) - 1

    def compute(warp: "Warp") -> Any:
        x, y = (np.clip(np.asarray(r(warp)).astype(np.int64), low, high) & mask for r in (a, c))
        value = x << bits | y
        if rest:
            value = value | (np.asarray(rest[0](warp)).astype(np.int64) << 2 * bits & 0xFFFFFFFF)
        return value.astype(np.uint32) if value.ndim else int(value)

    return put_step(b, inst.operands[0], compute, "u32")


# ---- between scalars ------------------------------------------------------------------------------


def _range(type_: str) -> tuple[int, int]:
    bits = 8 * type_bytes(type_)
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if type_[0] == "s" else (0, (1 << bits) - 1)


def _integer_to_integer(inst: Inst, b: Builder, mods: Mods, dest: str, source: str) -> Step:
    saturate = mods.flag("sat")
    mods.done()
    read = b.read(inst.operands[1], source)
    size = type_bytes(dest)
    low, high = _range(dest)
    wide = SIGNED[size] if source[0] == "s" else UNSIGNED[size]
    result = SIGNED[size] if dest[0] == "s" else UNSIGNED[size]
    mask = (1 << 8 * size) - 1

    def compute(warp: "Warp") -> Any:
        value = read(warp)
        if value.__class__ is np.ndarray:
            if saturate:
                limits = np.iinfo(value.dtype)
                value = np.clip(value, max(low, limits.min), min(high, limits.max))
            return value.astype(wide).view(result)
        if saturate:
            return min(max(value, low), high)
        value &= mask
        return value - (mask + 1) if dest[0] == "s" and value > high else value

    return put_step(b, inst.operands[0], compute, dest)


def _array(value: Any, dtype: Any = None) -> np.ndarray:
    """Returns a dual value as an array of its lanes, or of one element if it is uniform."""
    return value if value.__class__ is np.ndarray else np.array([value], dtype)


def _dual(values: np.ndarray) -> Any:
    """Inverse of `_array` for unsigned words."""
    return values if values.size > 1 else int(values[0])


def _integer_to_float(inst: Inst, b: Builder, mods: Mods, dest: str, source: str, rounding: str) -> Step:
    saturate = mods.flag("sat")
    mods.drop("ftz")
    mods.done()
    read = b.read(inst.operands[1], source)
    size = type_bytes(dest)
    dtype = SIGNED[type_bytes(source)] if source[0] == "s" else UNSIGNED[type_bytes(source)]

    def compute(warp: "Warp") -> Any:
        values = _array(read(warp), dtype)
        if dest == "f64":
            exact = values.astype(np.float64)
            if rounding != "rn" and dtype.itemsize == 8:
                exact = np.array([floats._round_fraction(floats.Fraction(int(v)), rounding) for v in values])
        else:
            exact = _to_odd(values)
        if saturate:
            exact = np.clip(exact, 0.0, 1.0)
        return _dual(_encode_scalar(exact, dest, rounding, False))

    return put_step(b, inst.operands[0], compute, f"u{8 * size}")


def _to_odd(values: np.ndarray) -> np.ndarray:
    """Converts integers to float64, rounded to odd if they need more than 53 bits."""
    if values.dtype.itemsize < 8:
        return values.astype(np.float64)
    high = (values >> 32).astype(np.float64) * 2.0**32
    return floats.add_odd(high, (values & values.dtype.type(0xFFFFFFFF)).astype(np.float64))


def _encode_scalar(values: np.ndarray, dest: str, rounding: str, saturate: bool) -> np.ndarray:
    """float64 values -> unsigned words of a scalar float type."""
    if dest == "f64":
        return values.view(np.uint64)
    if dest == "f32" and not saturate:
        bits = floats.round_f32(values, rounding).view(np.uint32)
        return np.where(values != values, np.uint32(0x7FFFFFFF), bits)
    codes = floats.encode(values, dest, rounding, saturate)
    return codes << np.uint32(13) if dest == "tf32" else codes.astype(UNSIGNED[type_bytes(dest)])


def _float_reader(b: Builder, operand: Any, source: str) -> "Callable[[Warp], np.ndarray]":
    """Returns a reader of a scalar float operand as float64 (32 elements, or 1 if uniform)."""
    lanes = Lanes(source)
    type_ = source if source in ("f32", "f64") else f"b{8 * lanes.bytes}"
    read = b.read_as(operand, type_, f"b{8 * lanes.bytes}")
    return lambda warp: lanes.load(read(warp)).astype(np.float64)


def _float_to_integer(
    inst: Inst, b: Builder, mods: Mods, dest: str, source: str, rounding: str | None
) -> Step:
    mode = INTEGER_ROUNDINGS.get(rounding or "", None)
    if mode is None:
        raise inst.unsupported("float to integer needs .rni, .rzi, .rmi or .rpi")
    ftz = mods.flag("ftz")
    mods.drop("sat")  # float to integer always clamps
    mods.done()
    read = _float_reader(b, inst.operands[1], source)
    low, high = _range(dest)
    size = type_bytes(dest)
    functions = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}
    whole = functions[mode]
    # NaN converts to 0, except that 64-bit results and f64 sources give only the sign bit.
    invalid = 1 << (8 * size - 1) if size == 8 or source == "f64" else 0

    def compute(warp: "Warp") -> Any:
        values = read(warp)
        if ftz and source == "f32":
            values = np.where(np.abs(values) < 2.0**-126, 0.0, values)
        nan = values != values
        rounded = whole(np.where(nan, 0.0, values))
        if size == 8:
            clamped = [
                min(max(int(v), low), high) if np.isfinite(v) else (high if v > 0 else low) for v in rounded
            ]
            words = np.array([v & (1 << 64) - 1 for v in clamped], np.uint64)
        else:
            words = np.clip(rounded, low, high).astype(np.int64).astype(UNSIGNED[size])
        if nan.any():
            words = np.where(nan, words.dtype.type(invalid & high * 2 + 1 if size < 8 else invalid), words)
        return _dual(words.view(SIGNED[size]) if dest[0] == "s" else words)

    return put_step(b, inst.operands[0], compute, dest)


def _float_to_float(inst: Inst, b: Builder, mods: Mods, dest: str, source: str, rounding: str | None) -> Step:
    if source in PACKED_BITS:
        raise inst.unsupported(f".{source} to a scalar")
    ftz, sat, relu, satfinite = (mods.flag(name) for name in ("ftz", "sat", "relu", "satfinite"))
    mods.done()
    if dest == "tf32" and rounding == "rna":
        return _to_tf32_away(inst, b, satfinite)
    if (dest, source) == ("f32", "bf16") and not (ftz or sat or relu):
        bits = b.read(inst.operands[1], "b16")
        return put_step(
            b,
            inst.operands[0],
            lambda warp: _dual(_array(bits(warp)).astype(np.uint32) << np.uint32(16)),
            "u32",
        )
    if (dest, source) == ("f32", "f16") and not (ftz or sat or relu):
        return _widen_half(inst, b)
    read = _float_reader(b, inst.operands[1], source)
    size = type_bytes(dest)
    # An f16 result uses subnormal operands unchanged, even with .ftz.
    flushed = ftz and dest != "f16"
    integral = INTEGER_ROUNDINGS.get(rounding or "")
    functions = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}
    mode = "rn" if integral or rounding is None else rounding

    def compute(warp: "Warp") -> Any:
        operand = values = read(warp)
        if flushed and source == "f32":
            values = operand = _canonical(_flush(values))
        if integral:
            values = functions[integral](values)
        values = _clamp(values, sat, relu)
        words = _encode_scalar(values, dest, mode, satfinite)
        if not (sat or relu):
            words = _kept_nan(operand, words, dest, source)
        if ftz and dest == "f32":
            words = floats.flush(words.view(np.float32)).view(np.uint32)
        return _dual(words)

    return put_step(b, inst.operands[0], compute, f"u{8 * size}")


def _widen_half(inst: Inst, b: Builder) -> Step:
    """cvt.f32.f16: exact."""
    bits = b.read(inst.operands[1], "b16")

    def compute(warp: "Warp") -> Any:
        values = _array(bits(warp), np.uint16).view(np.float16).astype(np.float32)
        return _dual(float_results.canonical_nan(values).view(np.uint32))

    return put_step(b, inst.operands[0], compute, "u32")


def _kept_nan(operand: np.ndarray, words: np.ndarray, dest: str, source: str) -> np.ndarray:
    """A narrowed f64 NaN keeps its sign and top bits, made quiet, as on an H200."""
    nan = operand != operand
    if source != "f64" or dest not in ("f32", "f16", "bf16") or not nan.any():
        return words
    bits = operand.view(np.uint64)
    form = floats.FORMATS[dest]
    sign = (bits >> np.uint64(63)) << np.uint64(form.bits - 1)
    payload = (bits & np.uint64((1 << 52) - 1)) >> np.uint64(52 - form.mantissa_bits)
    kept = sign | payload | np.uint64((form.inf or 0) | 1 << form.mantissa_bits - 1)
    return np.where(nan, kept.astype(words.dtype), words)


def _to_tf32_away(inst: Inst, b: Builder, satfinite: bool) -> Step:
    """cvt.rna.tf32.f32, on the bits: an H200 rounds the bit pattern of the magnitude, even for NaN and infinity.

    .satfinite then subtracts one step from all patterns with the top exponent.
    """
    read = b.read(inst.operands[1], "b32")

    def compute(warp: "Warp") -> Any:
        bits = _array(read(warp), np.uint32)
        words = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
        if satfinite:
            top = (words & np.uint32(0x7F800000)) == 0x7F800000
            words = np.where(top, words - np.uint32(0x2000), words)
        return _dual(words)

    return put_step(b, inst.operands[0], compute, "u32")


def _canonical(values: np.ndarray) -> np.ndarray:
    """Replaces NaN (held in float64) by the canonical binary32 NaN."""
    return np.where(values != values, np.uint32(0x7FFFFFFF).view(np.float32).astype(np.float64), values)


def _flush(values: np.ndarray) -> np.ndarray:
    """Replaces binary32 subnormals (held in float64) by zeros of the same sign."""
    return np.where(np.abs(values) < 2.0**-126, np.copysign(0.0, values), values)


def _clamp(values: np.ndarray, sat: bool, relu: bool) -> np.ndarray:
    if sat:
        return float_results.saturate(values)
    return float_results.rectify(values) if relu else values


# ---- packed formats -------------------------------------------------------------------------------


def _to_packed(inst: Inst, b: Builder, mods: Mods, dest: str, source: str, rounding: str) -> Step:
    """Converts two elements into one register, from f32 pairs (a high, b low) or from another packed type."""
    relu, satfinite = mods.flag("relu"), mods.flag("satfinite")
    mods.drop("ftz")  # results of at most 16 bits keep their subnormals
    mods.done()
    narrow = dest.removesuffix("x2")
    element = PACKED_BITS.get(dest, 16)
    register = type_bytes(dest) if dest in TYPE_BYTES else element * 2 // 8
    encode = _packed_encoder(narrow, rounding, satfinite)

    def pack(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        high, low = (_clamp(values, False, relu) for values in (high, low))
        return encode(high) << np.uint32(element) | encode(low)

    if source in PACKED_BITS:
        # For a source of at most 16 bits, a table holds every result, and an execution is one look-up.
        width = 2 * PACKED_BITS[source]
        every = np.arange(1 << width, dtype=UNSIGNED[width // 8])
        table = pack(*_packed_values(every, source)).astype(UNSIGNED[register])
        words = b.read(inst.operands[1], f"b{width}")
        return put_step(b, inst.operands[0], lambda warp: table.take(words(warp)), f"u{8 * register}")
    if source == "f32":
        if dest in ("f16x2", "bf16x2") and rounding == "rn" and not (relu or satfinite):
            return _pack_nearest(inst, b, dest)
        if element <= 8:
            return _pack_stepped(inst, b, element, register, _steps(narrow, rounding, satfinite, relu))
        pair = [_float_reader(b, o, "f32") for o in inst.operands[1:3]]
    else:
        pair = _packed_readers(b, inst, source)

    def compute(warp: "Warp") -> Any:
        high, low = (read(warp) for read in pair)
        word = pack(high, low)
        return _dual(
            np.broadcast_to(word, np.broadcast_shapes(high.shape, low.shape)).astype(UNSIGNED[register])
        )

    return put_step(b, inst.operands[0], compute, f"u{8 * register}")


ZONES = ((0, 0x7F800000), (0x7F800001, 0x7FFFFFFF), (0x80000000, 0xFF800000), (0xFF800001, 0xFFFFFFFF))
"""Patterns of binary32 between which codes rise: numbers, NaN, and both with a sign."""


@lru_cache(64)
def _steps(name: str, rounding: str, satfinite: bool, relu: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns a conversion of binary32 to at most 8 bits as steps: uint32 patterns at which the code changes, and the codes.

    Within a zone the code never falls as the magnitude grows, so it is constant between two patterns of equal codes.
    """
    encode = _packed_encoder(name, rounding, satfinite)

    def codes_of(patterns: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return encode(_clamp(patterns.astype(np.uint32).view(np.float32).astype(np.float64), False, relu))

    firsts = [np.array([zone[0] for zone in ZONES], np.int64)]
    low, high = (np.array(ends, np.int64) for ends in zip(*ZONES, strict=True))
    while low.size:
        differ = codes_of(low) != codes_of(high)
        low, high = low[differ], high[differ]
        firsts.append(high[high - low == 1])
        wide = high - low > 1
        low, high = low[wide], high[wide]
        middle = (low + high) // 2
        low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
    found = np.unique(np.concatenate(firsts)).astype(np.uint32)
    return found, codes_of(found)


def _pack_stepped(
    inst: Inst, b: Builder, element: int, register: int, steps: tuple[np.ndarray, np.ndarray]
) -> Step:
    """Converts two binary32 operands into elements of at most 8 bits each, by a search among `steps`."""
    high, low = (b.read_as(o, "f32", "b32") for o in inst.operands[1:3])
    firsts, codes = steps
    dtype, shift = UNSIGNED[register], np.uint32(element)

    def compute(warp: "Warp") -> Any:
        x, y = high(warp), low(warp)
        width = max(np.size(x), np.size(y))
        bits = np.empty((2, width), np.uint32)
        bits[0], bits[1] = x, y
        pair = codes.take(firsts.searchsorted(bits, "right") - 1)
        return _dual((pair[0] << shift | pair[1]).astype(dtype))

    return put_step(b, inst.operands[0], compute, f"u{8 * register}")


def _packed_encoder(name: str, rounding: str, satfinite: bool) -> Callable[[np.ndarray], np.ndarray]:
    if name == "ue8m0":
        return lambda values: encode_ue8m0(values, rounding, satfinite)
    if name == "bf16" and rounding == "rn" and not satfinite:
        return lambda values: floats.f32_to_bf16(values.astype(np.float32)).astype(np.uint32)
    return lambda values: floats.encode(values, name, rounding, satfinite)


@lru_cache
def _zeros(count: int) -> np.ndarray:
    return np.zeros(count, np.float32)


def nearest_words(pairs: np.ndarray, bf16: bool) -> np.ndarray:
    """Rounds float32 (2 n,) to the nearest bfloat16 or float16: uint32 (n,), the first of a pair low."""
    if bf16:
        return floats.f32_to_bf16(pairs).view(np.uint32)
    halves = pairs.astype(np.float16)
    if not pairs.dot(_zeros(len(pairs))) == 0:  # NaN or an infinity somewhere
        halves.view(np.uint16)[pairs != pairs] = 0x7FFF
    return halves.view(np.uint32)


def _pack_nearest(inst: Inst, b: Builder, dest: str) -> Step:
    """cvt.rn.{f16x2,bf16x2}.f32, the most frequent conversion of epilogues, without a detour through float64."""
    high, low = (b.slot(o, "f32") for o in inst.operands[1:3])
    if b.width(high) != 4 or b.width(low) != 4:
        raise b.refuse("operands that are not 32 bits wide")
    put = b.write(inst.operands[0], "u32")
    target = None if isinstance(inst.operands[0], Sink) else b.target(inst.operands[0])
    if target is not None and b.width(target) != 4:
        target = None
    bf16 = dest == "bf16x2"

    def step(warp: "Warp") -> None:
        regs = warp.regs
        x, y = regs[high], regs[low]
        uniform = x.__class__ is int and y.__class__ is int
        bits = np.empty(2 if uniform else 2 * max(np.size(x), np.size(y)), np.uint32)
        bits[0::2], bits[1::2] = y, x
        words = nearest_words(bits.view(np.float32), bf16)
        if uniform or target is None or warp.protected:
            put(warp, int(words[0]) if uniform else words)
        else:
            regs[target] = words

    return step


def _packed_readers(b: Builder, inst: Inst, source: str) -> "list[Callable[[Warp], np.ndarray]]":
    """Returns readers of the high and the low element of an f16x2 or bf16x2 source, as float64."""
    read: Reader = b.read(inst.operands[1], "b32")

    def half(place: int) -> "Callable[[Warp], np.ndarray]":
        return lambda warp: _packed_values(_array(read(warp), np.uint32), source)[place]

    return [half(0), half(1)]


def _packed_values(words: np.ndarray, source: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the high and the low elements of packed words, as float64."""
    name = source.removesuffix("x2")
    element = PACKED_BITS.get(source, 16)
    mask = (1 << element) - 1
    codes = ((words >> shift & mask).astype(np.uint16) for shift in (element, 0))
    high, low = (decode_ue8m0(c) if name == "ue8m0" else floats.decode(c, name) for c in codes)
    return high, low


def decode_ue8m0(codes: np.ndarray) -> np.ndarray:
    """Decodes to 2**(code - 127); 0xFF is NaN."""
    return np.where(codes == 0xFF, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127))


def encode_ue8m0(values: np.ndarray, rounding: str, satfinite: bool) -> np.ndarray:
    """Returns uint32 codes of float64 magnitudes rounded down (rz) or up (rp) to a power of two; signs are dropped.

    Values above 2**127 become 0xFE with satfinite, and NaN (0xFF) without.
    """
    magnitude = np.abs(values)
    finite = np.isfinite(magnitude) & (magnitude > 0)
    mantissa, exponent = np.frexp(np.where(finite, magnitude, 1.0))
    code = exponent.astype(np.int64) - 1 + 127
    if rounding == "rp":
        code = code + (mantissa > 0.5)
    code = np.where(finite, np.maximum(code, 0), np.where(magnitude == 0, 0, 255))
    code = np.minimum(code, 255)
    if satfinite:
        code = np.where((code == 255) & (values == values), 254, code)
    return code.astype(np.uint32)
