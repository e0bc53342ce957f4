"""Matrix-multiply arithmetic, rounded bit for bit as by the tensor cores.

The hardware adds all products of one instruction and the accumulator in one fused sum:

* every term is written as significand * 2**exponent, with the sum of its factors' exponents (products are not
  renormalised, and a product that is zero keeps the exponent of its scales);
* all terms are aligned to the largest exponent ``emax`` and **truncated toward zero** to F fractional bits, that is,
  to a multiple of ``q = 2**(emax - F)``; F is 35 for the 4-bit kinds (mxf4, mxf4nvf4) and 25 for
  all others, except for Hopper's 8-bit `wgmma` (`isa.products`);
* the truncated terms are summed exactly and the sum is rounded toward zero to float32 (to nearest even for float16);
* a NaN scale or accumulator, or an invalid operation, gives the one NaN 0x7FFFFFFF (float16: 0x7FFF).

In the 4-bit kinds a term is the exact dot product of 16 consecutive elements times its two scales; in the others it is
one product. "MMA-Sim" (arXiv 2511.10909) validated these rules on hardware.

Why three paths
---------------
All three paths give the same bits. The first one that can be *proved* equal from the operands and the accumulator runs.
Let ``2**k`` divide every scaled product, ``bound`` be at least the sum of the magnitudes of any element's products,
and ``emax`` at least every exponent of the tile (zero products and C included), so that ``2**(emax - F) >= q``.

1. *float32* (`_sum_float32`). Conditions: C is a multiple of ``2**k``, ``bound + max|C| <= 2**24 * 2**k`` and
   ``emax - F <= k``. Every partial sum, in whatever order BLAS forms it and with or without fused multiply-add, is a
   multiple of ``2**k`` of magnitude at most ``2**(24+k)``, hence a float32: no operation rounds. Each term is a
   multiple of ``2**k >= 2**(emax-F) >= q``, so the hardware truncates nothing, and its final rounding sees a float32
   (a float16 result is rounded from it once). Both sides therefore equal the exact sum.
2. *float64* (`_sum_float64`). Conditions: ``bound <= 2**53 * 2**k``, so the products of matrices are exact by the
   argument above; ``emax - F <= k`` and C a multiple of ``2**(emax-F)``, so nothing is truncated; and
   ``bound + max|C| <= 2**53 * 2**(emax-F)``: the sum of product and C is a multiple of ``2**(emax-F)`` of at most that
   magnitude, hence exact in float64. One rounding toward zero is then what the hardware does.
3. *general* (`_fused_sum`): exponents and truncation per element, in float64 used for integers below ``2**53``: in
   units of q a truncated term is below ``2**(35+2) * 576`` (4-bit kinds: a dot product is at most 16*6*6, each scale
   significand below 2) or ``2**(25+2)`` (others), C below ``2**36``, so that their sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, Protocol

import numpy as np

ScaleType = Literal["ue4m3", "ue8m0"]
ElementType = Literal["f16", "bf16", "tf32", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1"]

FRACTION_BITS_FP4 = 35
FRACTION_BITS = 25
ZERO_EXPONENT = -126  # exponent of a zero significand in the alignment
NAN_F32 = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
NAN_F16 = np.array(0x7FFF, np.uint16).view(np.float16)

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BYTES = np.arange(256)
# One 64-bit entry per byte: the low nibble's float32 below the high nibble's, so that one gather decodes two values.
_E2M1_PAIRS = np.stack([E2M1_VALUES[_BYTES & 15], E2M1_VALUES[_BYTES >> 4]], 1).view(np.uint64)[:, 0]
_MAGNITUDE_BITS = np.uint64(0x7777777777777777)
_ABOVE_1_5_BITS = np.uint64(0x4444444444444444)
_SIGN_BITS = np.uint8(0x88)
_F32_FROM_F64_MASK = np.int64(-1 << 29)


# ---- scales ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _ScaleTable:
    """Facts about each of the 256 scale bytes."""

    value: np.ndarray  # float64; 0 for NaN
    value32: np.ndarray  # float32; the same values (2**127 is the largest, subnormals are exact)
    exponent: np.ndarray  # int16; exponent of the significand in [1, 2), the least exponent for subnormals
    lsb: np.ndarray  # int16; exponent of the lowest set bit, _NO_LSB for zero
    is_nan: np.ndarray  # bool
    one: int  # the byte that means 1.0


_NO_LSB = 1000


def _ue4m3_table() -> _ScaleTable:
    code = _BYTES & 0x7F  # the sign is ignored
    field, mantissa = code >> 3, code & 7
    exponent = np.maximum(field, 1) - 7
    significand = mantissa + 8 * (field > 0)
    value = significand * 2.0 ** (exponent - 3)
    lowest = np.where(significand > 0, np.log2((significand & -significand).clip(1)) + exponent - 3, _NO_LSB)
    is_nan = code == 0x7F
    value[is_nan] = 0
    exponent = np.where(significand == 0, ZERO_EXPONENT, exponent)
    return _ScaleTable(
        value, value.astype(np.float32), exponent.astype(np.int16), lowest.astype(np.int16), is_nan, 0x38
    )


def _ue8m0_table() -> _ScaleTable:
    exponent = (_BYTES - 127).astype(np.int16)
    is_nan = _BYTES == 255
    value = np.where(is_nan, 0.0, 2.0 ** exponent.astype(np.float64))
    return _ScaleTable(value, value.astype(np.float32), exponent, exponent, is_nan, 127)


SCALE_TABLES: dict[str, _ScaleTable] = {"ue4m3": _ue4m3_table(), "ue8m0": _ue8m0_table()}


# ---- operands and accumulators, as the fast paths use them ----------------------------------------------------------
class _Operand(Protocol):
    """An operand tile (R, K) with the facts that choose the path.

    lsb: 2**lsb divides every scaled value.
    max_scaled: at least the magnitude of every scaled value.
    emax: at least every exponent, those of zeros included.
    depth: K.
    """

    @property
    def lsb(self) -> int: ...
    @property
    def max_scaled(self) -> float: ...
    @property
    def emax(self) -> int: ...
    @property
    def depth(self) -> int: ...

    def scaled(self, dtype: type) -> np.ndarray:
        """Returns the values with their scales, exact, as dtype (R, K). Rows of zeros at the end may be left out."""
        ...


# ---- 4-bit block-scaled kinds ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Fp4Operand:
    """An `_Operand` of packed e2m1 values with one scale per 16 of them; K is 64 or 96.

    Attributes:
        packed: uint8 (R, K/2), two e2m1 per byte, even k in the low nibble.
        scales: uint8 (R, K/16), one byte per 16 elements; NaN bytes are replaced by 1.0.
        table: meaning of the scale bytes.
        nan_rows: bool (R,) rows with a NaN scale, or None where there is none.
        lsb: 2**lsb divides every scaled value.
        max_scaled: at least the magnitude of every scaled value.
        emax: largest scale exponent, including that of all-zero blocks.
        rows: number of rows up to the last one with a nonzero element. Tiles may extend past the end of their tensors.
    """

    packed: np.ndarray
    scales: np.ndarray
    table: _ScaleTable
    nan_rows: np.ndarray | None
    lsb: int
    max_scaled: float
    emax: int
    rows: int

    @property
    def depth(self) -> int:
        return 2 * self.packed.shape[1]

    @classmethod
    def make(cls, packed: np.ndarray, scales: np.ndarray, table: _ScaleTable, negate: bool) -> _Fp4Operand:
        groups = packed.shape[1] // 8
        if scales.shape[1] != groups:
            scales = np.repeat(scales, groups // scales.shape[1], axis=1)
        nan_rows: np.ndarray | None = None
        is_nan = table.is_nan.take(scales)
        if is_nan.any():
            nan_rows = np.asarray(is_nan.any(1))
            scales = np.where(is_nan, np.uint8(table.one), scales)
        blocks = np.ascontiguousarray(packed).view(
            np.uint64
        )  # (R, K/16): one word holds the 16 elements of a scale
        live = (blocks & _MAGNITUDE_BITS) != 0
        live_scales = scales[live]
        lsb, max_scale = 0, 0.0
        if live_scales.size and (max_scale := float(table.value.take(live_scales).max())):
            lsb = int(table.lsb.take(live_scales).min()) - 1  # e2m1 values are multiples of 1/2
        max_value = 6.0 if np.bitwise_or.reduce(blocks, None) & _ABOVE_1_5_BITS else 1.5
        if negate:
            packed = packed ^ _SIGN_BITS
        emax = int(table.exponent.take(scales).max())
        rows = len(live) - int(live[::-1].any(1).argmax()) if live_scales.size else 0
        return cls(packed, scales, table, nan_rows, lsb, max_value * max_scale, emax, rows)

    def scaled(self, dtype: type) -> np.ndarray:
        """Returns element times scale, exact, as dtype (rows, K)."""
        scales = self.scales[: self.rows]
        values = _E2M1_PAIRS.take(self.packed[: self.rows]).view(np.float32).reshape(*scales.shape, 16)
        scale = (self.table.value32 if dtype is np.float32 else self.table.value).take(scales)
        return np.multiply(values, scale[:, :, None]).reshape(-1, self.depth)


def mma_block_scaled(
    a: np.ndarray,
    b: np.ndarray,
    sfa: np.ndarray,
    sfb: np.ndarray,
    c: np.ndarray | None,
    *,
    scale_type: ScaleType = "ue4m3",
    negate_a: bool = False,
    negate_b: bool = False,
) -> np.ndarray:
    """Computes one multiply-accumulate of the kinds mxf4 and mxf4nvf4 with K=64 or 96: D = (A*SFA) @ (B*SFB)^T + C.

    The hardware's rounding with K=96 is not published. We assume one fused sum of six groups, like the four groups of
    K=64.

    Args:
        a: uint8 (M, K/2), two e2m1 values per byte, even k in the low nibble.
        b: uint8 (N, K/2), packed like A.
        sfa: uint8 (M, K/16) or (M, K/32), for blocks of 16 or 32.
        sfb: uint8 (N, K/16) or (N, K/32).
        c: float32 (M, N), or None for a zero accumulator. Not modified.
        scale_type: meaning of the scale bytes.
        negate_a: use -A.
        negate_b: use -B.

    Returns:
        float32 (M, N), a new array.
    """
    table = SCALE_TABLES[scale_type]
    op_a, op_b = _Fp4Operand.make(a, sfa, table, negate_a), _Fp4Operand.make(b, sfb, table, negate_b)
    out = _multiply_add(op_a, op_b, c)
    assert out is not None
    return out


def accumulate_block_scaled(
    products: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]],
    c: np.ndarray | None,
    *,
    scale_type: ScaleType = "ue4m3",
    negate_a: bool = False,
    negate_b: bool = False,
) -> np.ndarray:
    """Computes several `mma_block_scaled` in order, each with the result of the one before as C.

    A run of instructions is computed as one product if that gives the same bits: if the conditions of the float32 path
    hold for all their products together. Then they also hold for each instruction, whose products are some of these and
    whose C is a partial sum: a multiple of ``2**k`` of magnitude at most ``bound + max|C|``. So each result is exact,
    and the last one is the exact sum of C and all products, which one matrix product gives.

    Args:
        products: (a, b, sfa, sfb) of each instruction, see `mma_block_scaled`; equal shapes.
        c: float32 (M, N), or None for a zero accumulator. Not modified.
        scale_type, negate_a, negate_b: see `mma_block_scaled`.

    Returns:
        float32 (M, N), a new array.
    """
    table = SCALE_TABLES[scale_type]
    out, start, run = c, 0, len(products)
    while start < len(products):
        part = products[start : start + run]
        a, b, sfa, sfb = part[0] if len(part) == 1 else _side_by_side(part)
        op_a, op_b = _Fp4Operand.make(a, sfa, table, negate_a), _Fp4Operand.make(b, sfb, table, negate_b)
        found = _multiply_add(op_a, op_b, out, only_float32=len(part) > 1)
        if found is None:
            run = _shorter_run(op_a, op_b, len(part))
        else:
            out, start = found, start + len(part)
    assert out is not None
    return out


def _shorter_run(a: _Fp4Operand, b: _Fp4Operand, run: int) -> int:
    """Returns how many instructions to try as one product after `run` of them failed."""
    k = a.lsb + b.lsb
    if max(a.emax + b.emax, ZERO_EXPONENT) - FRACTION_BITS_FP4 > k:
        return 1
    bound = a.depth // run * a.max_scaled * b.max_scaled
    return max(1, min(run // 2, int(2.0 ** (24 + k) // bound) if bound else 1))


def _multiply_add(
    a: _Fp4Operand, b: _Fp4Operand, c: np.ndarray | None, *, only_float32: bool = False
) -> np.ndarray | None:
    """Computes A @ B^T + C by the first path that applies; None if it must be the float32 path and that does not apply."""
    accumulator = _Accumulator.make(c, (len(a.packed), len(b.packed)))
    out = _sum_float32(a, b, accumulator, FRACTION_BITS_FP4)
    if out is None:
        if only_float32:
            return None
        out = _sum_float64(a, b, accumulator, FRACTION_BITS_FP4)
    if out is None:
        out = _sum_general(a, b, accumulator)
    accumulator.restore_special(out)
    if a.nan_rows is not None:
        out[a.nan_rows] = NAN_F32
    if b.nan_rows is not None:
        out[:, b.nan_rows] = NAN_F32
    return out


def _side_by_side(products: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Joins operands and scale factors of several instructions along K."""
    return tuple(np.concatenate(parts, axis=1) for parts in zip(*products, strict=True))


@dataclass(frozen=True)
class _Accumulator:
    """C without its NaN and infinite elements, which are stored apart.

    They do not mix with their neighbours, and one of them must not force the whole tile off the fast paths. Padding
    rows of a scale tensor may hold NaN bytes, which make NaN rows in the accumulator.
    """

    values: np.ndarray | None  # float32 (M, N), finite; None for zero
    shape: tuple[int, int]
    max_abs: float
    special: np.ndarray | None  # bool (M, N)
    special_values: np.ndarray | None  # float32, NaN already canonical

    @classmethod
    def make(cls, c: np.ndarray | None, shape: tuple[int, int]) -> _Accumulator:
        if c is None:
            return cls(None, shape, 0.0, None, None)
        special, special_values = None, None
        max_abs = max(float(c.max()), -float(c.min()))
        if not max_abs < np.inf:
            special = ~np.isfinite(c)
            special_values = c[special]
            special_values[np.isnan(special_values)] = NAN_F32
            c = np.where(special, np.float32(0), c)
            max_abs = float(np.abs(c).max())
        return cls(c, shape, max_abs, special, special_values)

    def restore_special(self, out: np.ndarray) -> None:
        """Writes the special elements into the result, because they dominate every finite term."""
        if self.special is not None:
            out[self.special] = self.special_values

    def is_multiple_of(self, exponent: int) -> bool:
        """Whether every element is a multiple of 2**exponent."""
        if self.values is None:
            return True
        # Scaling up in float32 is exact or overflows, and overflowed values are multiples. Scaling down may underflow.
        values = self.values if -100 < exponent <= 0 else self.values.astype(np.float64)
        units = values * values.dtype.type(2.0**-exponent)
        return bool((np.rint(units) == units).all())


def _sum_float32(
    a: _Operand, b: _Operand, c: _Accumulator, fraction_bits: int, least_exponent: int = ZERO_EXPONENT
) -> np.ndarray | None:
    """Computes the first path of the module docstring, or returns None if its conditions do not hold.

    least_exponent: least exponent of the format of C. The exponents of C need no other check: |C| <= 2**(24+k) keeps
    them within k + 24.
    """
    k = a.lsb + b.lsb
    in_range = min(a.lsb, b.lsb, k) > -100 and max(a.emax, b.emax, a.emax + b.emax) < 100
    if not in_range or max(a.emax + b.emax, least_exponent) - fraction_bits > k:
        return None
    if a.depth * a.max_scaled * b.max_scaled + c.max_abs > 2.0 ** (24 + k) or not c.is_multiple_of(k):
        return None
    out = _filled_up(_exact_product(a.scaled(np.float32), b.scaled(np.float32)), c.shape)
    out += np.float32(0) if c.values is None else c.values
    out += np.float32(0)  # -0 becomes +0, the only zero that the hardware's sum returns
    return out


def _sum_float64(a: _Operand, b: _Operand, c: _Accumulator, fraction_bits: int) -> np.ndarray | None:
    """Computes the second path of the module docstring, or returns None if its conditions do not hold."""
    k = a.lsb + b.lsb
    emax = max(a.emax + b.emax, _exponent_of(c.max_abs), ZERO_EXPONENT)
    quantum, bound = emax - fraction_bits, a.depth * a.max_scaled * b.max_scaled
    if quantum > k or bound > 2.0 ** (53 + k) or bound + c.max_abs > 2.0 ** (53 + quantum):
        return None
    if not c.is_multiple_of(quantum):
        return None
    total = _filled_up(_exact_product(a.scaled(np.float64), b.scaled(np.float64)), c.shape)
    if c.values is not None:
        total += c.values
    return _round_toward_zero(total, may_be_tiny=quantum < -149)


def _sum_general(a: _Fp4Operand, b: _Fp4Operand, c: _Accumulator) -> np.ndarray:
    """Computes the third path of the module docstring, which always applies."""
    exponent_a, exponent_b = a.table.exponent.take(a.scales), b.table.exponent.take(b.scales)
    emax = _accumulator_exponents(c)
    for group in range(exponent_a.shape[1]):
        np.maximum(emax, exponent_a[:, group, None] + exponent_b[:, group], out=emax)
    scaled_a, scaled_b = a.scaled(np.float64), b.scaled(np.float64)
    groups = range(0, a.depth, 16)
    products = (_exact_product(scaled_a[:, g : g + 16], scaled_b[:, g : g + 16]) for g in groups)
    terms = (_filled_up(product, c.shape) for product in products)
    return _round_toward_zero(_fused_sum(terms, emax, c, FRACTION_BITS_FP4), may_be_tiny=True)


_SINGLE_THREAD_PRODUCTS = 65536 * 4
"""Multiply-adds of one matrix product up to which OpenBLAS stays in the calling thread."""


def _exact_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Computes A @ B^T for values where no operation rounds, so the order of the sum does not matter.

    Works in stripes small enough that BLAS does not spread them over threads. BLAS threads spin while they wait for
    each other, and on a busy machine a 40 us product then takes up to 20 ms (measured on two shared cores).
    """
    rows, depth = a.shape
    columns = len(b)
    width = max(_SINGLE_THREAD_PRODUCTS // max(rows * depth, 1), 1)
    if columns <= width:
        return a @ b.T
    out = np.empty((rows, columns), a.dtype)
    whole = columns // width * width
    stripes = b[:whole].reshape(-1, width, depth).transpose(0, 2, 1)
    np.matmul(a, stripes, out=out[:, :whole].reshape(rows, -1, width).transpose(1, 0, 2))
    if whole < columns:
        np.matmul(a, b[whole:].T, out=out[:, whole:])
    return out


def _filled_up(product: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Extends a product of the first rows of A and B by zeros."""
    if product.shape == shape:
        return product
    out = np.zeros(shape, product.dtype)
    out[: product.shape[0], : product.shape[1]] = product
    return out


# ---- the fused sum, shared by all kinds --------------------------------------------------------------------------
def _exponent_of(value: float) -> int:
    """Exponent of a finite float32 magnitude, -126 for zero and subnormals."""
    return max(int(np.frexp(value)[1]) - 1, ZERO_EXPONENT) if value else ZERO_EXPONENT


def _accumulator_exponents(c: _Accumulator) -> np.ndarray:
    """int16 (M, N): exponents of the elements of C."""
    if c.values is None:
        return np.full(c.shape, ZERO_EXPONENT, np.int16)
    field = (np.ascontiguousarray(c.values).view(np.uint32) >> 23) & 0xFF
    return np.maximum(field, 1).astype(np.int16) - np.int16(127)


def _fused_sum(
    terms: Iterable[np.ndarray], emax: np.ndarray, c: _Accumulator, fraction_bits: int
) -> np.ndarray:
    """Sum of the terms (float64 (M, N), exact) and C, each truncated to 2**(emax - fraction_bits); exact float64."""
    # 2**(fraction_bits - emax), built from its bits: all exponents stay far inside float64's normal range
    to_units = ((fraction_bits - emax.astype(np.int64) + 1023) << 52).view(np.float64)
    total = np.zeros(c.shape) if c.values is None else np.trunc(c.values * to_units)
    for term in terms:
        term *= to_units
        total += np.trunc(term, out=term)
    total /= to_units
    return total


def _round_toward_zero(total: np.ndarray, *, may_be_tiny: bool) -> np.ndarray:
    """Truncates float64 to float32: 2**128 and above become infinite, and results that vanish become +0.

    may_be_tiny: nonzero values below 2**-126 that float32 cannot represent can occur; for them dropping 29 bits is not
    enough.
    """
    out = (total.view(np.int64) & _F32_FROM_F64_MASK).view(np.float64)
    if may_be_tiny:
        tiny = np.abs(total) < 2.0**-126
        if tiny.any():
            out[tiny] = np.trunc(total[tiny] * 2.0**149) * 2.0**-149
    with np.errstate(over="ignore"):
        rounded = out.astype(np.float32)
    rounded += np.float32(0)
    return rounded


# ---- the other kinds: f16, tf32, f8f6f4, mxf8f6f4 ----------------------------------------------------------------
@dataclass(frozen=True)
class _SmallFloat:
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Literal["ieee", "e4m3", "none"]


_SMALL_FLOATS = {
    "f16": _SmallFloat(5, 10, 15, "ieee"),
    "bf16": _SmallFloat(8, 7, 127, "ieee"),
    "tf32": _SmallFloat(8, 10, 127, "ieee"),
    "e4m3": _SmallFloat(4, 3, 7, "e4m3"),
    "e5m2": _SmallFloat(5, 2, 15, "ieee"),
    "e2m3": _SmallFloat(2, 3, 1, "none"),
    "e3m2": _SmallFloat(3, 2, 3, "none"),
    "e2m1": _SmallFloat(2, 1, 1, "none"),
}


@lru_cache(None)
def _element_table(fmt: ElementType) -> tuple[np.ndarray, np.ndarray]:
    """Returns value (float64) and exponent (int16, -126 for zero) of each code of a format of at most 19 bits."""
    spec = _SMALL_FLOATS[fmt]
    width = 1 + spec.exponent_bits + spec.mantissa_bits
    code = np.arange(1 << width)
    mantissa = code & ((1 << spec.mantissa_bits) - 1)
    field = (code >> spec.mantissa_bits) & ((1 << spec.exponent_bits) - 1)
    exponent = np.maximum(field, 1) - spec.bias
    significand = mantissa + ((field > 0) << spec.mantissa_bits)
    value = np.ldexp(significand.astype(np.float64), exponent - spec.mantissa_bits)
    if spec.specials == "ieee":
        top = field == (1 << spec.exponent_bits) - 1
        value[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    elif spec.specials == "e4m3":
        value[(code & 0x7F) == 0x7F] = np.nan
    value = np.where(code >> (width - 1), -value, value)
    return value, np.where(value == 0, ZERO_EXPONENT, exponent).astype(np.int16)


def decode_elements(codes: np.ndarray, fmt: ElementType) -> tuple[np.ndarray, np.ndarray]:
    """Decodes operand elements.

    Args:
        codes: unsigned integers of any shape. For tf32 the full 32 bits (the low 13 are dropped); for formats below 8
            bits the code in the low bits of its container.
        fmt: the format.

    Returns:
        float64 values and their int16 exponents (-126 for zero, the least exponent for subnormals).
    """
    values, exponents = _element_table(fmt)
    index = codes >> 13 if fmt == "tf32" else codes & (len(values) - 1)
    return values.take(index), exponents.take(index)


def mma_fused(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray | None,
    *,
    a_format: ElementType,
    b_format: ElementType,
    sfa: np.ndarray | None = None,
    sfb: np.ndarray | None = None,
    d_type: Literal["f32", "f16"] = "f32",
    negate_a: bool = False,
    negate_b: bool = False,
    scale_c: int = 0,
) -> np.ndarray:
    """Computes one multiply-accumulate of the kinds f16, tf32, f8f6f4 and mxf8f6f4 (25 fraction bits): D = A @ B^T + C.

    Args:
        a: codes (M, K), see `decode_elements`.
        b: codes (N, K).
        c: float32 or float16 (M, N), or None for zero.
        a_format: format of A.
        b_format: format of B.
        sfa: ue8m0 bytes (M,), one for the whole K of the instruction, or None.
        sfb: ue8m0 bytes (N,), or None.
        d_type: format of C and D.
        negate_a: use -A.
        negate_b: use -B.
        scale_c: C is multiplied by 2**-scale_c first, exactly (the hardware's rounding here is not published).

    Returns:
        float32 or float16 (M, N), a new array.
    """
    op_a, op_b = _Elements.make(a, a_format, sfa, negate_a), _Elements.make(b, b_format, sfb, negate_b)
    shape = (len(op_a.values), len(op_b.values))
    special = _special_results(op_a.values, op_b.values, c, shape)
    accumulator = _Accumulator.make(None if c is None else c.astype(np.float32), shape)
    if special is not None:
        op_a, op_b = op_a.finite(), op_b.finite()
    least = -14 if d_type == "f16" else ZERO_EXPONENT
    out = None
    if not scale_c:
        out = _sum_float32(op_a, op_b, accumulator, FRACTION_BITS, least)
        if out is None and d_type == "f32":
            out = _sum_float64(op_a, op_b, accumulator, FRACTION_BITS)
    if out is None:
        out = _sum_elements(op_a, op_b, accumulator, least, scale_c)
        out = out if d_type == "f16" else _round_toward_zero(out, may_be_tiny=True)
    if d_type == "f16":
        with np.errstate(over="ignore"):
            out = out.astype(np.float16) + np.float16(0)  # one rounding: the sum is exact
    if special is not None:
        where = ~np.isfinite(special)
        nan = NAN_F16 if d_type == "f16" else NAN_F32
        out[where] = np.where(np.isnan(special[where]), nan, special[where].astype(out.dtype))
    return out


@dataclass(frozen=True)
class _Elements:
    """An `_Operand` of single elements: float64 values (R, K) with their scales applied, and their int16 exponents."""

    values: np.ndarray
    exponents: np.ndarray

    @classmethod
    def make(cls, codes: np.ndarray, fmt: ElementType, scales: np.ndarray | None, negate: bool) -> _Elements:
        """Decodes elements. `scales`: ue8m0 bytes (R,); a NaN scale makes its row NaN."""
        values, exponents = decode_elements(codes, fmt)
        if negate:
            values = -values
        if scales is None:
            return cls(values, exponents)
        table = SCALE_TABLES["ue8m0"]
        scale = np.where(table.is_nan.take(scales), np.nan, table.value.take(scales))
        return cls(values * scale[:, None], exponents + table.exponent.take(scales)[:, None])

    def finite(self) -> _Elements:
        """Returns a copy with zeros for infinities and NaN."""
        return _Elements(np.nan_to_num(self.values, nan=0, posinf=0, neginf=0), self.exponents)

    @property
    def depth(self) -> int:
        return self.values.shape[1]

    @property
    def max_scaled(self) -> float:
        return float(np.abs(self.values).max())

    @property
    def emax(self) -> int:
        return int(self.exponents.max())

    @cached_property
    def lsb(self) -> int:
        # All formats have at most 11 significant bits, so each value's lowest set bit is found in an integer of 24
        # bits.
        significand, exponent = np.frexp(self.values[self.values != 0])
        units = (significand * 2.0**24).astype(np.int64)
        lowest = np.frexp((units & -units).astype(np.float64))[1] - 1
        return int((exponent - 24 + lowest).min()) if units.size else 0

    def scaled(self, dtype: type) -> np.ndarray:
        return self.values.astype(dtype)


def _special_results(
    a: np.ndarray, b: np.ndarray, c: np.ndarray | None, shape: tuple[int, int]
) -> np.ndarray | None:
    """float64 (M, N) whose non-finite elements are the results there, or None if all inputs are finite."""
    inputs = [a, b] if c is None else [a, b, c]
    if all(np.isfinite(x).all() for x in inputs):
        return None
    with np.errstate(invalid="ignore"):
        total = a @ b.T
        return total if c is None else total + c


def _sum_elements(a: _Elements, b: _Elements, c: _Accumulator, least: int, scale_c: int) -> np.ndarray:
    """The third path for single products: the exact sum of the truncated terms, float64 (M, N)."""
    if scale_c and c.values is not None:
        c = replace(c, values=c.values * np.float64(2.0**-scale_c))
    emax = _element_exponents(c, least - scale_c)
    for k in range(a.depth):
        np.maximum(emax, a.exponents[:, k, None] + b.exponents[:, k], out=emax)
    terms = (np.multiply.outer(a.values[:, k], b.values[:, k]) for k in range(a.depth))
    return _fused_sum(terms, emax, c, FRACTION_BITS)


def _element_exponents(c: _Accumulator, least: int) -> np.ndarray:
    """int16 (M, N): exponents of C in a format with the given least exponent; -126 for zero."""
    if c.values is None:
        return np.full(c.shape, ZERO_EXPONENT, np.int16)
    exponent = np.frexp(np.abs(c.values))[1].astype(np.int16) - np.int16(1)
    return np.where(c.values == 0, np.int16(ZERO_EXPONENT), np.maximum(exponent, np.int16(least)))
