"""Sums of one warp matrix instruction: small tiles, for which the fixed cost of every NumPy call counts.

The rounding rules are those of `numerics` (products aligned to the largest exponent, truncated to F fractional bits,
summed exactly, rounded toward zero). This module adds a short path for tiles whose sum is provably exact, and the rule
of Hopper's 8-bit `wgmma`, whose adder keeps F = 13 fractional bits and whose float32 results carry 13 mantissa bits.

Proof of the exact path. Let eA, eB be the largest exponents of the operands in the hardware (including zeros and
subnormals), eC that of C, and q = 2**(emax - F) with emax = max(eA + eB, eC). If every element of A is a multiple of
2**x, every element of B a multiple of 2**y with 2**(x + y) = q, and C a multiple of q, then every term is a multiple of
q. The hardware's emax for one element of D is at most the tile's, so it truncates nothing. In float64, |a| < 2**(eA +
w) with w = 1 (w = 4 if only the scales make up the exponent, since an e2m1 value is at most 6). So sums of at most 64
products and C stay below 2**(emax + 2w + 7), which is 2**(F + 2w + 7) <= 2**50 times q. No operation of the product
rounds, in whatever order BLAS forms it. The hardware also rounds the exact sum once.
"""

from functools import lru_cache
from typing import Literal, NamedTuple, cast

import numpy as np

from nvfp4_cute.emulator import numerics
from nvfp4_cute.emulator.numerics import (
    FRACTION_BITS,
    FRACTION_BITS_FP4,
    NAN_F16,
    NAN_F32,
    SCALE_TABLES,
    ZERO_EXPONENT,
    ElementType,
    decode_elements,
)

F32_MANTISSA_BITS = 23
F16_LEAST_EXPONENT = -14


class Rule(NamedTuple):
    """F fractional bits in the adder, and mantissa bits of a float32 result."""

    fraction_bits: int
    mantissa_bits: int


STANDARD = Rule(FRACTION_BITS, F32_MANTISSA_BITS)
HOPPER_FP8 = Rule(13, 13)


class _Factor(NamedTuple):
    """An operand as float64 values (rows, K), with facts for the choice of the path.

    The further fields are the values' exponents, the largest of them, and the exponent of the largest power of 2 that
    divides all values; None if a value is not finite.
    """

    values: np.ndarray
    exponents: np.ndarray
    top: int
    unit: float | None

    @classmethod
    def decode(
        cls, codes: np.ndarray, fmt: ElementType, scales: np.ndarray | None, negate: bool
    ) -> "_Factor":
        """`scales`: ue8m0 bytes (rows,) or None."""
        values, exponents = decode_elements(codes, fmt)
        if scales is not None:
            table = SCALE_TABLES["ue8m0"]
            scale = np.where(table.is_nan.take(scales), np.nan, table.value.take(scales))
            values = values * scale[:, None]
            exponents = exponents + table.exponent.take(scales)[:, None]
        return cls(-values if negate else values, exponents, int(exponents.max()), _unit(values))

    @classmethod
    def decode_fp4(cls, packed: np.ndarray, scales: np.ndarray, scale_type: str) -> "_Factor":
        """Returns e2m1 pairs (rows, 32) times scales (rows, 2 or 4); the exponents are those of the scales."""
        return _decoded_fp4(packed.tobytes(), scales.tobytes(), len(packed), scale_type)


# An operand is multiplied with every other one of its warp's tile, and used again in other warps that read it.
@lru_cache(maxsize=1024)
def _decoded_fp4(packed_bytes: bytes, scale_bytes: bytes, rows: int, scale_type: str) -> _Factor:
    packed, scales = (
        np.frombuffer(values, np.uint8).reshape(rows, -1) for values in (packed_bytes, scale_bytes)
    )
    table = SCALE_TABLES[scale_type]
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(rows, scales.shape[1], -1)
    scale = np.where(table.is_nan.take(scales), np.nan, table.value.take(scales))
    exponents = table.exponent.take(scales)
    values = (numerics.E2M1_VALUES.take(codes) * scale[:, :, None]).reshape(rows, -1)
    return _Factor(values, exponents, int(exponents.max()), _unit(values))


def multiply(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray | None,
    formats: tuple[str, str],
    *,
    d_type: Literal["f32", "f16"],
    rule: Rule = STANDARD,
    scales: tuple[np.ndarray, np.ndarray] | tuple[None, None] = (None, None),
    negate: tuple[bool, bool] = (False, False),
) -> np.ndarray:
    """Computes D = A @ B^T + C of one instruction.

    Args:
        a: codes (M, K), see `numerics.decode_elements`.
        b: codes (N, K).
        c: (M, N) of `d_type`, or None for zero.
        formats: element formats of A and B, see `numerics.ElementType`.
        d_type: format of C and D.
        rule: precision of the adder.
        scales: ue8m0 bytes (M,) and (N,), or (None, None).
        negate: use -A, use -B.

    Returns:
        float32 or float16 (M, N), a new array.
    """
    format_a, format_b = cast(ElementType, formats[0]), cast(ElementType, formats[1])
    left = _Factor.decode(a, format_a, scales[0], negate[0])
    right = _Factor.decode(b, format_b, scales[1], negate[1])
    total = _exact(left, right, c, rule.fraction_bits)
    if total is not None:
        return _rounded(total, d_type, rule.mantissa_bits)
    if rule is not STANDARD:
        return _truncated(left, right, c, d_type, rule)
    return numerics.mma_fused(
        a, b, c, a_format=format_a, b_format=format_b, sfa=scales[0], sfb=scales[1], d_type=d_type,
        negate_a=negate[0], negate_b=negate[1],
    )  # fmt: skip


def multiply_fp4(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, sfa: np.ndarray, sfb: np.ndarray, scale_type: str
) -> np.ndarray:
    """Computes D = (A*SFA) @ (B*SFB)^T + C with K = 64, like `numerics.mma_block_scaled`; float32 (M, N)."""
    left, right = _Factor.decode_fp4(a, sfa, scale_type), _Factor.decode_fp4(b, sfb, scale_type)
    total = _exact(left, right, c, FRACTION_BITS_FP4)
    if total is not None:
        return _rounded(total, "f32", F32_MANTISSA_BITS)
    return numerics.mma_block_scaled(a, b, sfa, sfb, c, scale_type=cast(numerics.ScaleType, scale_type))


def multiply_integers(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, saturate: bool) -> np.ndarray:
    """Computes A @ B^T + C as int32 (M, N), exact, then clamped to the range of int32 (`saturate`) or wrapped.

    a, b: int8 or uint8 (M, K) and (N, K).
    c: int32 (M, N) or None.
    """
    # At most 32 products below 2**16: exact in float32, which has the fastest product.
    total = (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.int64)
    if c is not None:
        total += c
    if saturate:
        total = total.clip(-(2**31), 2**31 - 1)
    return total.astype(np.int32)


# ---- paths -------------------------------------------------------------------------------------------------------
def _exact(a: _Factor, b: _Factor, c: np.ndarray | None, fraction_bits: int) -> np.ndarray | None:
    """Returns the exact sum as float64 (M, N), or None if the conditions of the module docstring do not hold."""
    emax = max(a.top + b.top, ZERO_EXPONENT)
    if c is not None:
        emax = max(emax, _least_exponent(c), int(np.frexp(np.abs(c).max())[1]) - 1)
    quantum = emax - fraction_bits
    room = a.top + b.top - quantum
    if a.unit is None or b.unit is None or a.unit < a.top - room // 2 or b.unit < b.top - room + room // 2:
        return None
    if c is None:
        return a.values @ b.values.T
    wide = c.astype(np.float64)
    if not _is_multiple(wide, quantum):
        return None
    return a.values @ b.values.T + wide


def _least_exponent(c: np.ndarray) -> int:
    """Returns the exponent of the subnormals of C's format."""
    return F16_LEAST_EXPONENT if c.dtype == np.float16 else ZERO_EXPONENT


def _unit(values: np.ndarray) -> float | None:
    """Returns the largest x such that every value is a multiple of 2**x (infinite: all are 0); None if a value is not finite."""
    if not np.isfinite(values).all():
        return None
    mantissas, exponents = np.frexp(values[values != 0])
    integers = np.ldexp(mantissas, 53).astype(np.int64)
    lowest = np.frexp((integers & -integers).astype(np.float64))[1] - 1
    return min((exponents - 53 + lowest).tolist(), default=np.inf)


def _is_multiple(values: np.ndarray, exponent: int) -> bool:
    """Whether every value is a finite multiple of 2**exponent."""
    units = values * 2.0**-exponent
    return bool((units - np.rint(units) == 0).all())  # inf - inf and NaN differ from 0


def _rounded(total: np.ndarray, d_type: str, mantissa_bits: int) -> np.ndarray:
    """Rounds exact float64 sums to nearest even float16, or to float32 toward zero with `mantissa_bits`; -0 becomes +0."""
    if d_type == "f16":
        return total.astype(np.float16) + np.float16(0)
    out = (total.view(np.int64) & np.int64(-1 << (52 - mantissa_bits))).view(np.float64)
    tiny = np.abs(total) < 2.0**ZERO_EXPONENT
    if total[tiny].any():
        unit = 2.0 ** (ZERO_EXPONENT - mantissa_bits)
        out[tiny] = np.trunc(total[tiny] / unit) * unit
    return out.astype(np.float32) + np.float32(0)


def _truncated(a: _Factor, b: _Factor, c: np.ndarray | None, d_type: str, rule: Rule) -> np.ndarray:
    """Computes the sum with every term truncated to F fractional bits of its element's largest exponent; for any values."""
    shape = (len(a.values), len(b.values))
    wide = np.zeros(shape) if c is None else c.astype(np.float64)
    least = ZERO_EXPONENT if c is None else _least_exponent(c)
    exponent = np.where(wide == 0, ZERO_EXPONENT, np.maximum(np.frexp(wide)[1] - 1, least))
    emax = np.maximum((a.exponents[:, None].astype(np.int64) + b.exponents).max(-1), exponent)
    to_units = np.ldexp(1.0, rule.fraction_bits - emax)
    terms = a.values[:, None] * b.values
    units = np.trunc(terms * to_units[..., None]).sum(-1) + np.trunc(wide * to_units)
    out = _rounded(np.where(np.isfinite(units), units / to_units, 0), d_type, rule.mantissa_bits)
    special = terms.sum(-1) + wide
    where = ~np.isfinite(special)
    nan = NAN_F16 if d_type == "f16" else NAN_F32
    out[where] = np.where(np.isnan(special[where]), nan, special[where].astype(out.dtype))
    return out
