"""Converts floats to the elements of a format, by the conversion instruction or by arithmetic that rounds equally.

``RoundE2M1``. The codes 0 to 7 of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 are a concave function of the value:
min(2 y, y + 2, y / 2 + 4, 7) at each of them. Rounding to integers is monotone, so it may come before the minimum; each of
the three sums is formed with 2^23 added in the same FMA, which rounds once to an integer, ties to even, and the code
is in the low bits. The minimum ignores NaN, which therefore becomes 7, as with the instruction.
"""

from dataclasses import dataclass
from typing import Literal

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from nvfp4_cute.formats.block_format import E2M1, BlockFormat

from . import fp8, ptx

LARGEST_FLOAT32 = 3.4028234663852886e38
TWO_23 = float(1 << 23)
BYTE_SIGNS = 0x80808080


class ConvertE2M1:
    """Conversion by cvt on sm_100a and later. Values carry their signs."""

    signed = True

    @staticmethod
    def pack(values: list, words: list) -> list:
        """Returns words of eight codes. ``words``: unused."""
        return [ptx.f32x8_to_e2m1(values[first : first + 8]) for first in range(0, len(values), 8)]


class RoundE2M1:
    """Conversion by arithmetic on any architecture. Values are magnitudes; signs come from the 16-bit inputs."""

    signed = False

    @classmethod
    def pack(cls, values: list, words: list) -> list:
        """Returns words of eight codes. ``words``: words of two inputs, for their sign bits."""
        return [
            codes | signs
            for codes, signs in zip(cls.codes(cls.rounded(values)), cls.signs(words), strict=True)
        ]

    @staticmethod
    def rounded(values: list) -> list:
        """Returns a word per magnitude whose low 24 bits are its code."""
        found = []
        for y in values:
            low = ptx.fma_f32(y, Float32(2.0), Float32(TWO_23))
            middle = y + Float32(TWO_23 + 2)
            high = ptx.fma_f32(y, Float32(0.5), Float32(TWO_23 + 4))
            found.append(ptx.bits_of(ptx.least(ptx.least(low, middle), ptx.least(high, Float32(TWO_23 + 7)))))
        return found

    @staticmethod
    def codes(rounded: list) -> list:
        """Returns words of eight codes, from what :meth:`rounded` returned."""
        found = []
        for first in range(0, len(rounded), 8):
            even, odd = (
                ptx.prmt(
                    ptx.prmt(rounded[i], rounded[i + 2], Uint32(0x40)),
                    ptx.prmt(rounded[i + 4], rounded[i + 6], Uint32(0x40)),
                    Uint32(0x5410),
                )
                for i in (first, first + 1)
            )
            found.append(even | odd << 4)
        return found

    @staticmethod
    def signs(words: list) -> list:
        """Returns words of eight sign bits, each the top bit of a nibble, from words of two inputs."""
        found = []
        for first in range(0, len(words), 4):
            # The top bits of bytes 1 and 3 of a word are the signs of its two elements.
            pairs = [ptx.prmt(words[i], words[i + 1], Uint32(0x7351)) for i in (first, first + 2)]
            even, odd = (ptx.prmt(*pairs, Uint32(selector)) for selector in (0x5410, 0x7632))
            found.append((even & Uint32(BYTE_SIGNS)) >> 4 | odd & Uint32(BYTE_SIGNS))
        return found


class ConvertFP8:
    """Conversion to e4m3 or e5m2 by cvt. Values carry their signs.

    Attributes:
        type_name: element type in PTX.
    """

    signed = True

    def __init__(self, type_name: str):
        self.type_name = type_name

    def pack(self, values: list, words: list) -> list:
        """Returns words of four codes. ``words``: unused."""
        return [fp8.codes_of(values[first : first + 4], self.type_name) for first in range(0, len(values), 4)]


@dataclass(frozen=True)
class Encoding:
    """Compile-time description of how a kernel quantizes to a format.

    Attributes:
        format: format with e4m3, ue8m0 or float32 scales.
        element: ``ConvertE2M1``, ``RoundE2M1``, or a ``ConvertFP8``.
        scale_rounding: rounding of ue8m0 scales, see ``formats.block_scales.scale_codes``.
    """

    format: BlockFormat
    element: type[ConvertE2M1] | type[RoundE2M1] | ConvertFP8
    scale_rounding: Literal["up", "down"] = "up"

    @classmethod
    def of(
        cls, format: BlockFormat, has_fp4_convert: bool, scale_rounding: Literal["up", "down"] = "up"
    ) -> "Encoding":
        """Returns the encoding of a format. has_fp4_convert: whether the architecture has e2m1 conversion instructions."""
        e2m1 = ConvertE2M1 if has_fp4_convert else RoundE2M1
        element = e2m1 if format.element == E2M1 else ConvertFP8(format.element.name)
        return cls(format, element, scale_rounding)

    @property
    def signed(self) -> bool:
        """Whether ``pack`` takes signed values; otherwise it takes magnitudes, with the signs passed separately."""
        return self.element.signed


@cute.jit
def without_signs_of_nan(values: list, signs: list, amax: Float32) -> list:
    """Returns words of signs, cleared where a value is NaN: e2m1 has no NaN, and it becomes +6 whatever its sign."""
    size = len(values)
    cleared = cute.make_rmem_tensor(size // 2, Uint32)
    for i in cutlass.range_constexpr(size // 2):
        cleared[i] = signs[i]
    if not amax <= LARGEST_FLOAT32:
        for i in cutlass.range_constexpr(size):
            other_half = Uint32(0xFFFF << 16 * ((i + 1) % 2))
            cleared[i // 2] = cleared[i // 2] if values[i] == values[i] else cleared[i // 2] & other_half
    return [cleared[i] for i in range(size // 2)]
