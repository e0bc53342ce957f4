"""Turns weights into what ``mma.sync`` multiplies by 16-bit tokens: eight values as four pairs, in few instructions.

The order of K in a product is free as long as both operands agree. The pairs of a 32-bit word of 4-bit values are its nibbles
(0, 4), (1, 5), (2, 6), (3, 7): both halves of the word are treated alike, and no byte has to move. Pairs of bytes are neighbours,
as conversions give them.

With their scales, eight weights of e2m1 take 6 ``lop3``, 5 shifts (``common.e2m1``) and 4 products.
"""

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, Uint32

from nvfp4_cute.formats.block_format import UE8M0, BlockFormat
from nvfp4_cute.planning.arch.warp_mma import STEP_BYTES

from ..common import fp8, ptx, ue8m0
from ..common.e2m1 import e2m1_pairs
from ..common.int4 import Int4Decoding, codes_four_apart
from ..common.int8 import integer_pair

# log2 of the factor of sums of NVFP4 weights. bf16: scales contain the rest of the 2 ** 126 that e2m1 bits lack.
NVFP4_EXPONENTS = {"f16": 14, "bf16": 7}
BF16_SCALE = 2.0**119
# prmt selectors that repeat the lower, or the upper, half of a word.
BOTH_HALVES = (0x1010, 0x3232)
# Lanes that share the values of a row in a step, and values per piece.
LANES_K, PIECE_K = 4, 8


@dataclass(frozen=True)
class Decoding:
    """Dequantizes weights of a format to bf16 or fp16.

    A lane has 16 bytes of a row in a step: pieces of eight values, in ``words`` words each.
    """

    format: BlockFormat
    is_bf16: bool

    @property
    def type_name(self) -> str:
        """PTX's name of the type of dequantized weights."""
        return "bf16" if self.is_bf16 else "f16"

    @property
    def step_k(self) -> int:
        """Values along K per step."""
        return self.format.elements(STEP_BYTES)

    @property
    def lane_k(self) -> int:
        """Values along K per step and lane."""
        return self.step_k // LANES_K

    @property
    def words(self) -> int:
        """Words per piece."""
        return self.format.row_bytes(PIECE_K) // 4

    @property
    def int4(self) -> Int4Decoding | None:
        """Dequantization of 4-bit integers; None for other formats."""
        return Int4Decoding(self.format, self.is_bf16) if self.format.is_int4 else None

    @property
    def has_powers(self) -> bool:
        """Whether scales are ue8m0."""
        return self.format.scale == UE8M0

    @property
    def promotes(self) -> bool:
        """Whether sums of a step are multiplied by a scale of 128 x 128 weights."""
        return self.format.scale_layout == "rowmajor" and not self.format.is_1xk

    @property
    def exponent(self) -> int:
        """log2 of the factor by which sums are multiplied."""
        if self.format.element.bits == 8 or self.int4 is not None:
            return 0
        return ue8m0.OPERAND_EXPONENT if self.has_powers else NVFP4_EXPONENTS[self.type_name]

    def token_pairs(self, words: list) -> list:
        """Returns eight values of a token, in four words, in the order of pairs that dequantized weights have."""
        if self.format.element.bits == 8:
            return words
        return [
            ptx.prmt(words[i], words[i + 2], Uint32(selector))
            for i in range(2)
            for selector in (0x5410, 0x7632)
        ]

    def scales(self, word: Uint32, k: Int32) -> list:
        """Returns the scale of each piece of a lane, from a row's word, as :meth:`pairs` takes it. k: the lane's first."""
        pieces = self.lane_k // PIECE_K
        if self.format.scale_layout == "rowmajor":
            return [None] * pieces
        if self.int4 is not None:
            return [self.int4.block_scale(word, Uint32(k // self.format.block_k))] * pieces
        if self.has_powers:
            block = k // self.format.block_k % 4
            selector = Uint32(ue8m0.BOTH_UPPER) + Uint32(block) * Uint32(ue8m0.BOTH_UPPER_STEP)
            return [ue8m0.powers(ptx.prmt(word, Uint32(0), selector))] * pieces
        codes = word >> Uint32(k // self.format.block_k % 4 * 8)
        pair = fp8.scales_to_f16x2(codes)
        if self.is_bf16:
            factor = Float32(BF16_SCALE)
            both = [ptx.pair_of(ptx.mul_f32(s, factor), "bf16") for s in ptx.unpack_f16x2(pair)]
        else:
            both = [ptx.prmt(pair, Uint32(0), Uint32(selector)) for selector in BOTH_HALVES]
        return [both[piece * len(both) // pieces] for piece in range(pieces)]

    def pairs(self, words: list, scale: Any) -> list:
        """Returns the eight weights of a piece as four pairs, times their scale if the format has one per piece."""
        if self.int4 is not None:
            return [self.int4.weights(codes, scale) for codes in codes_four_apart(*words)]
        if self.format.element.bits == 8:
            pairs = [self._pair_of_bytes(half) for word in words for half in (word, word >> 16)]
            return [ptx.mul_x2(pair, scale, "bf16") for pair in pairs] if self.has_powers else pairs
        pairs = e2m1_pairs(*words, self.type_name)
        if self.has_powers:
            pairs = [ue8m0.lifted(pair) for pair in pairs]
        return [ptx.mul_x2(pair, scale, self.type_name) for pair in pairs]

    def _pair_of_bytes(self, word: Uint32) -> Uint32:
        """Returns the two values in the low half of a word, without their scale."""
        if self.format.has_integer_sums:
            return integer_pair(word, self.is_bf16)
        element = self.format.element.name
        return ue8m0.fp8_pair(word, element) if self.is_bf16 else fp8.to_f16x2(word, element)[0]
