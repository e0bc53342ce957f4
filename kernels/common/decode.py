"""Dequantizes NVFP4 to fp16 with few instructions and without rounding.

The bits of an e2m1 value, put into an fp16 as sign, two low exponent bits and top mantissa bit, read as the value times
2^-14. A scale times that is exact: 2 significant bits times 4 make at most 6, and every product is a multiple of
2^-24, the smallest fp16, below 2^-2. Both operands of the MMA therefore carry a factor of 2^-14, which the epilogue
undoes (``OPERAND_EXPONENT``).

A 32-bit word holds eight values; nibble i is the value of K index i. They become four fp16 pairs in the order in which the
instructions produce them: (0, 2), (4, 6), (1, 3), (5, 7). The order inside a K tile is free as long as A and B share it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from . import fp8
from .versions import compiles_for, inline_ptx

# log2 of the factor that a dequantized value still lacks.
OPERAND_EXPONENT = 14

# The sign bit of each nibble of a word; and in each byte, the low exponent bits and the top mantissa bit of an fp16.
SIGN_BITS = 0x88888888
MAGNITUDE_AT_EXPONENT = 0x0E0E0E0E
# prmt selectors: (0, byte, 0, next byte), zero being byte 4.
LOW_PAIR = 0x1404
HIGH_PAIR = 0x3424


@cute.jit
def decode_scales(two_codes: Uint32) -> Uint32:
    """Converts two e4m3 codes in the low 16 bits to two fp16, in the same order. NaN stays NaN."""
    if cutlass.const_expr(compiles_for(fp8.CONVERTS_FROM)):
        halves = inline_ptx(
            "{ .reg .b16 t; cvt.u16.u32 t, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, t; }",
            write_only_types=[Uint32],
            read_only_args=[two_codes],
        )
    else:
        halves = fp8.scales_to_f16x2(two_codes)
    return halves


@cute.jit
def decode_word(word: Uint32, scales: Uint32, upper: cutlass.Constexpr, sign_bits: Uint32) -> list:
    """Returns eight e2m1 values times their scale.

    Args:
        word: nibble i is value i.
        scales: two fp16 scales.
        upper: whether the scale is the upper one.
        sign_bits: ``SIGN_BITS``. If it is ``opaque``, masking both nibbles of a byte takes one instruction instead of two.

    Returns:
        fp16 pairs of the values (0, 2), (4, 6), (1, 3), (5, 7), each times 2^-14.
    """
    return decode_halves(word, scales, (upper, upper), sign_bits)


@cute.jit
def decode_halves(word: Uint32, scales: Uint32, uppers: cutlass.Constexpr, sign_bits: Uint32) -> list:
    """Like ``decode_word``, with separate scales for values 0 to 3 and 4 to 7. uppers: whether each uses the upper scale."""
    signs = word & sign_bits
    pairs = []
    for upper_bytes in (_upper_bytes(word << 1, signs << 4), _upper_bytes(word >> 3, signs)):
        for selector, upper in zip((LOW_PAIR, HIGH_PAIR), uppers, strict=True):
            pairs.append(_multiply(Uint32(cute.arch.prmt(upper_bytes, 0, selector)), scales, upper))
    return pairs


@cute.jit
def _upper_bytes(magnitudes: Uint32, signs: Uint32) -> Uint32:
    """Combines two words into the upper bytes of four fp16.

    Args:
        magnitudes: supplies the bits ``MAGNITUDE_AT_EXPONENT`` of every byte; other bits are ignored.
        signs: supplies the sign bit of every byte. Other bits may be set only where the magnitudes go, so that a & c | b & ~c is
            one instruction.
    """
    return inline_ptx(
        f"lop3.b32 {{$w0}}, {{$r0}}, {{$r1}}, {MAGNITUDE_AT_EXPONENT:#x}, 0xE4;",
        write_only_types=[Uint32],
        read_only_args=[magnitudes, signs],
    )


@cute.jit
def _multiply(pair: Uint32, scales: Uint32, upper: cutlass.Constexpr) -> Uint32:
    """Multiplies both values of a pair by one of two scales, whose sign bit is ignored.

    The instruction selects the half itself.
    """
    half = "h" if upper else "l"
    return inline_ptx(
        "{ .reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, {$r1}; mov.b32 s, {"
        + f"{half}, {half}"
        + "}; abs.f16x2 s, s; mul.rn.f16x2 {$w0}, {$r0}, s; }",
        write_only_types=[Uint32],
        read_only_args=[pair, scales],
    )
