"""Dequantizes weights for wgmma when 16-bit tokens keep their own order of K: which bytes a lane reads, and how it converts them.

Lane t of a quad holds the values of K at 2t, 2t+1, 2t+8 and 2t+9 of an MMA's 16. For e4m3 and e5m2 it reads these pairs, two
bytes each (:func:`load_slab`). For e2m1 they are byte t of a row's 32-bit words of eight values: the lane reads 16 bytes of a
row, four words, in one instruction, and :func:`exchange` distributes bytes among the quad. It then has two words per slab: byte
2i + j of word w holds what step 2i + w of the slab has in half j of its K.

The two e2m1 of a byte become a pair of floats: their bits go to sign, low exponent and top mantissa bit, which reads as the
value times ``2^(1 - bias)``. The product with an e4m3 scale has at most 6 significant bits, so it is exact in fp16 and bf16.
The product of e2m1 with a ue8m0 scale is exact in bf16; for e4m3 and e5m2 all but the smallest are (``common.ue8m0``). Integers
times their scales are rounded (``common.int4``). FP8 and INT8 weights with float32 scales are converted without them;
``scales`` multiplies the sums instead.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from nvfp4_cute.formats.block_format import UE8M0, BlockFormat
from nvfp4_cute.planning.arch.sm90 import TILE_K
from nvfp4_cute.planning.arch.sm90_weight_only import (
    has_fp8_tokens,
    has_scales_of_sums,
    promotes,
    token_bytes,
)

from ...common import ptx, ue8m0
from ...common.decode import MAGNITUDE_AT_EXPONENT, decode_scales
from ...common.int4 import BlockScale, Int4Decoding, codes_of_bytes
from ...common.int8 import integer_pair
from ...common.select import select
from ...common.shared_access import load_shared, load_shared_half
from ...common.versions import inline_ptx
from ..activations import SLAB_ROW_BYTES as TOKEN_ROW_BYTES
from ..opaque import opaque
from ..operands import UNIT_BYTES, sf_atoms, tile_row_bytes, tiles_of_sf_atom
from ..wgmma import BF16, E4M3, F16, MMA_K, Operands
from .fp8_tokens import row_steps

# Words of a row that a lane reads per K tile, and number of lanes that share a row.
UNIT_WORDS, LANES_OF_QUAD = 4, 4
# MMAs per slab, and pairs of a row per lane and MMA, eight values apart.
STEPS, PAIRS_OF_STEP = 4, 2
# prmt selector: the even bytes of both words. Add NEXT_BYTES for the odd ones.
EVEN_BYTES, NEXT_BYTES = 0x6420, 0x1111
# The even bytes with the words swapped.
SWAPPED_EVEN_BYTES = 0x2064
SCALE_BITS = 0x7F7F7F7F
# fp16: bits of sign and magnitude of both values. The epilogue applies the remaining factor of 2 ** 14.
FP16_BITS, FP16_EXPONENT = 0x8E008E00, 14
# bf16: the missing factor is 2 ** 126. Scales have room for 2 ** 119 of it, the epilogue applies the other 2 ** 7.
BF16_EXPONENT, BF16_SCALE = 7, 2.0**119


@dataclass(frozen=True)
class Decoding:
    """Compile-time description of the weights and of their conversion.

    Attributes:
        format: e2m1 with e4m3 scales; with bfloat16 tokens also an MX format; int4; or 8 bits with float32 scales. With FP8
            tokens MXFP4 that was prepared for them (``fp8_tokens``).
        is_bf16: whether weights are converted to bfloat16, otherwise float16.
        slab_k: values of K whose MMAs are one group. A stage has at least two groups, whose registers alternate.
    """

    format: BlockFormat
    is_bf16: bool
    slab_k: int

    @property
    def has_fp8_tokens(self) -> bool:
        """Whether tokens and converted weights are e4m3."""
        return has_fp8_tokens(self.format)

    @property
    def operands(self) -> Operands:
        """Type that MMAs multiply."""
        return E4M3 if self.has_fp8_tokens else BF16 if self.is_bf16 else F16

    @property
    def slabs(self) -> int:
        """Slabs of a K tile."""
        return TILE_K // self.slab_k

    @property
    def slab_words(self) -> int:
        """Words of a row per slab."""
        return self.slab_k // (8 * LANES_OF_QUAD)

    @property
    def row_k(self) -> int:
        """Values of a token in a row of 128 bytes."""
        return TOKEN_ROW_BYTES // token_bytes(self.format)

    @property
    def has_powers(self) -> bool:
        """Whether scales are ue8m0 and multiply weights."""
        return self.format.scale == UE8M0

    @property
    def has_bytes(self) -> bool:
        """Whether elements are e4m3, e5m2 or integers of 8 bits."""
        return self.format.element.bits == 8

    @property
    def promotes(self) -> bool:
        """Whether the sums of each stage are added to float32 accumulators in other registers."""
        return promotes(self.format)

    @property
    def has_scales_of_sums(self) -> bool:
        """Whether scales multiply sums, of a K tile or of all of K, rather than weights."""
        return has_scales_of_sums(self.format)

    @property
    def int4(self) -> Int4Decoding | None:
        """Conversion of int4 weights; None for other formats."""
        return Int4Decoding(self.format, self.is_bf16) if self.format.is_int4 else None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that one TMA copy loads: a K tile, with FP8 tokens a stage."""
        return self.format.row_bytes(2 * self.slab_k) if self.has_fp8_tokens else tile_row_bytes(self.format)

    @property
    def slabs_of_load(self) -> int:
        """Slabs whose weights a lane reads in one load."""
        return 1 if self.has_bytes else self.slabs

    @property
    def words(self) -> int:
        """Words of a row that a lane reads in one load; 8-bit elements fill only half of each word."""
        return STEPS * PAIRS_OF_STEP if self.has_bytes else UNIT_WORDS

    @property
    def atoms(self) -> int:
        """Words of scales per row of a K tile; 0 where scales multiply sums."""
        return 0 if self.has_scales_of_sums else sf_atoms(self.format)

    @property
    def has_half_words(self) -> bool:
        """Whether a row has only 16 bits of scales per K tile, so that two K tiles share a word."""
        return tiles_of_sf_atom(self.format) == 2

    @property
    def exponent(self) -> int:
        """log2 of the factor by which the epilogue multiplies sums."""
        if self.has_bytes or self.has_fp8_tokens or self.int4 is not None:
            return 0
        if self.has_powers:
            return ue8m0.OPERAND_EXPONENT
        return BF16_EXPONENT if self.is_bf16 else FP16_EXPONENT


@dataclass(frozen=True)
class Quad:
    """prmt selectors by which a lane exchanges bytes within its quad, the four lanes that share rows.

    Attributes:
        kept, sent: bytes of two words with the lane's own parity, and with the other parity.
        own, other: after the first exchange, bytes for this half of the quad and for the other half, the even lane's first.
        is_upper: whether the lane is one of the upper two.
    """

    kept: Uint32
    sent: Uint32
    own: Uint32
    other: Uint32
    is_upper: cutlass.Boolean

    @classmethod
    def of_lane(cls) -> "Quad":
        """Returns the selectors of this lane."""
        lane = cute.arch.lane_idx() % 4
        odd, upper = Uint32(lane % 2), Uint32(lane // 2)
        kept = opaque(EVEN_BYTES + odd * NEXT_BYTES)
        first = select(odd == 0, Uint32(EVEN_BYTES), Uint32(SWAPPED_EVEN_BYTES))
        own = opaque(first + upper * NEXT_BYTES)
        return cls(kept, kept ^ NEXT_BYTES, own, own ^ NEXT_BYTES, upper == 1)


def load_slab(address: Int32, slab: int, decoding: Decoding) -> list:
    """Loads a lane's weights of a row: ``Decoding.words`` words.

    Args:
        address: shared address of the lane's unit. For 8-bit elements, of its first pair in unit 0 of the row.
        slab: slab of the K tile; only 8-bit elements are loaded slab by slab.
    """
    if not decoding.has_bytes:
        return load_shared(address, UNIT_WORDS)
    units = [address ^ (slab * STEPS + step) * UNIT_BYTES for step in range(STEPS)]
    return [
        load_shared_half(unit + pair * UNIT_BYTES // 2) for unit in units for pair in range(PAIRS_OF_STEP)
    ]


def exchange(words: list, quad: Quad) -> list:
    """Exchanges a row's bytes among the four lanes of a quad, each of which has read 16 of them.

    Args:
        words: four words of the lane's unit.
        quad: the lane's selectors.

    Returns:
        Two words of the lower slab, then two of the upper one.
    """
    pairs = [words[:2], words[2:]]
    kept = [ptx.prmt(*pair, quad.kept) for pair in pairs]
    got = [_from(ptx.prmt(*pair, quad.sent), 1) for pair in pairs]
    own = [ptx.prmt(*both, quad.own) for both in zip(kept, got, strict=True)]
    others = [_from(ptx.prmt(*both, quad.other), 2) for both in zip(kept, got, strict=True)]
    lower = [select(quad.is_upper, *both) for both in zip(others, own, strict=True)]
    upper = [select(quad.is_upper, *both) for both in zip(own, others, strict=True)]
    return lower + upper


def _from(word: Uint32, distance: int) -> Uint32:
    """Returns the word of the lane whose number differs in bit ``distance``."""
    return Uint32(cute.arch.shuffle_sync_bfly(word, distance))


def slab_weights(words: list, codes: list, slab: int, decoding: Decoding, tables: Int32 | None) -> list:
    """Dequantizes the weights of a slab's MMAs into the order that ``wgmma.multiply_slab`` expects.

    Args:
        words: per row, its words of the slab: those of :func:`exchange`, or for 8-bit elements those of :func:`load_slab`.
        codes: per row, the words with its scales of the K tile.
        slab: slab of the K tile.
        decoding: formats.
        tables: shared address of ``fp8_tokens.store_tables``, for FP8 tokens.
    """
    if decoding.has_fp8_tokens:
        first = slab * decoding.slab_words
        rows = [row_steps(row, *word, first, tables) for row, word in zip(words, codes, strict=True)]
    elif decoding.has_scales_of_sums:
        rows = [_row_steps_without_scales(row, decoding) for row in words]
    elif decoding.has_bytes:
        element = decoding.format.element.name
        rows = [
            _row_steps_of_bytes(row, *word, slab, element) for row, word in zip(words, codes, strict=True)
        ]
    elif decoding.int4 is not None:
        rows = [
            _row_steps_of_int4(row, word, slab, decoding.int4) for row, word in zip(words, codes, strict=True)
        ]
    elif decoding.has_powers:
        rows = [_row_steps_of_powers(row, *word, slab) for row, word in zip(words, codes, strict=True)]
    else:
        rows = [_row_steps(row, word[slab], decoding.is_bf16) for row, word in zip(words, codes, strict=True)]
    return [row[step][half] for step in range(len(rows[0])) for half in range(PAIRS_OF_STEP) for row in rows]


def _row_steps(words: list, codes: Uint32, is_bf16: bool) -> list:
    """Dequantizes one row of e2m1 with e4m3 scales: per step of the slab, the pairs of both halves of its K."""
    if is_bf16:
        codes = codes & Uint32(SCALE_BITS)
        scales = [_bf16_scales(codes), _bf16_scales(codes >> 16)]
    else:
        scales = [decode_scales(codes), decode_scales(codes >> 16)]
    multiply = ue8m0.times_one_of if is_bf16 else _multiply_fp16
    decoded = [_bf16_pairs(word) if is_bf16 else _fp16_pairs(word) for word in words]
    return [
        [multiply(decoded[step % 2][step // 2 * 2 + half], scales[step // 2], step % 2) for half in range(2)]
        for step in range(4)
    ]


def _row_steps_of_powers(words: list, codes: Uint32, slab: int) -> list:
    """Dequantizes one row of e2m1 with ue8m0 scales. Two steps share a scale."""
    scales = _slab_powers(codes, slab)
    decoded = [[ue8m0.lifted(pair) for pair in _bf16_pairs(word)] for word in words]
    return [
        [ue8m0.times_one_of(decoded[step % 2][step // 2 * 2 + half], scales, step // 2) for half in range(2)]
        for step in range(4)
    ]


def _row_steps_of_bytes(words: list, codes: Uint32, slab: int, element: str) -> list:
    """Dequantizes one row of e4m3 or e5m2 with ue8m0 scales. Every word holds one pair."""
    scales = _slab_powers(codes, slab)
    pairs = [ue8m0.fp8_pair(word, element) for word in words]
    scaled = [ue8m0.times_one_of(pair, scales, 2 * i // len(pairs)) for i, pair in enumerate(pairs)]
    return [scaled[i : i + PAIRS_OF_STEP] for i in range(0, len(scaled), PAIRS_OF_STEP)]


def _row_steps_without_scales(words: list, decoding: Decoding) -> list:
    """Converts one row of 8-bit elements to 16-bit floats without scales."""
    element = decoding.format.element.name
    if decoding.format.has_integer_sums:
        pairs = [integer_pair(word, decoding.is_bf16) for word in words]
    elif decoding.is_bf16:
        pairs = [ue8m0.fp8_pair(word, element) for word in words]
    else:
        pairs = [ptx.fp8x4_to_f16x2(word, element)[0] for word in words]
    return [pairs[i : i + PAIRS_OF_STEP] for i in range(0, len(pairs), PAIRS_OF_STEP)]


def _row_steps_of_int4(words: list, codes: list, slab: int, int4: Int4Decoding) -> list:
    """Dequantizes one row of int4. A slab's steps may use one block of scales, two, or a part of one."""
    block_steps = int4.format.block_k // MMA_K
    scales = dict[int, BlockScale]()
    steps = []
    for step in range(STEPS):
        block = (slab * STEPS + step) // block_steps
        if block not in scales:
            scales[block] = int4.block_scale(codes[block // int4.blocks_per_word], block)
        pairs = codes_of_bytes(words[step % 2])[step // 2 * 2 :][:PAIRS_OF_STEP]
        steps.append([int4.weights(pair, scales[block]) for pair in pairs])
    return steps


def _slab_powers(codes: Uint32, slab: int) -> Uint32:
    """Returns the scales of both blocks of a slab as two bf16."""
    return ue8m0.powers(ptx.prmt(codes, Uint32(0), Uint32(ue8m0.UPPER_BYTES[slab])))


def _fp16_pairs(word: Uint32) -> list:
    """Converts the eight e2m1 of a word to four pairs of fp16, times 2^-14."""
    low = _magnitudes_and_rest(word << 1, word << 4)
    high = _magnitudes_and_rest(word >> 3, word)
    return [ptx.prmt(low, high, Uint32(0x4400 + 0x1111 * byte)) & Uint32(FP16_BITS) for byte in range(4)]


def _magnitudes_and_rest(magnitudes: Uint32, rest: Uint32) -> Uint32:
    """Takes bits ``MAGNITUDE_AT_EXPONENT`` from one word and all others from the other, in one lop3: upper bytes of four fp16."""
    return inline_ptx(
        f"lop3.b32 {{$w0}}, {{$r0}}, {{$r1}}, {MAGNITUDE_AT_EXPONENT:#x}, 0xE4;",
        write_only_types=[Uint32],
        read_only_args=[magnitudes, rest],
    )


def _bf16_pairs(word: Uint32) -> list:
    """Converts the eight e2m1 of a word to four pairs of bf16, times 2^-126."""
    low, high = word & Uint32(ue8m0.LOW_NIBBLES), word >> 4 & Uint32(ue8m0.LOW_NIBBLES)
    # A prmt selector with its upper bit set replicates a byte's sign. It fills the upper byte with 0, because a byte that holds a
    # nibble is not negative.
    pairs = [ptx.prmt(low, high, Uint32(0xC480 + 0x1111 * byte)) for byte in range(4)]
    return [pair * Uint32(ue8m0.E2M1_MOVES) & Uint32(ue8m0.E2M1_BITS) for pair in pairs]


def _bf16_scales(two_codes: Uint32) -> Uint32:
    """Converts two e4m3 codes in the low 16 bits to two bf16 times 2^119, in the same order. NaN stays NaN."""
    low, high = ptx.unpack_f16x2(decode_scales(two_codes))
    return ptx.pack_16x2(low * Float32(BF16_SCALE), high * Float32(BF16_SCALE), True)


def _multiply_fp16(pair: Uint32, scales: Uint32, upper: int) -> Uint32:
    """Multiplies both values of a pair by one of two scales, whose sign bit is ignored."""
    half = "lh"[upper]
    return inline_ptx(
        "{ .reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, {$r1}; mov.b32 s, {"
        + f"{half}, {half}"
        + "}; abs.f16x2 s, s; mul.rn.f16x2 {$w0}, {$r0}, s; }",
        write_only_types=[Uint32],
        read_only_args=[pair, scales],
    )
