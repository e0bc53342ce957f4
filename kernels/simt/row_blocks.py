"""A lane's block of 16 values of a row: read, optionally quantized to NVFP4, and stored in the row to be sent."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.scale_layout import ATOM_COLS

from ..common.encode import Encoding
from ..common.global_access import global_scalar, store_word, store_words
from .expert_rows import OUTPUT_BYTES, PLAIN_BYTES, scale_word, store_plain_block
from .quantize import input_words, load_block, quantize_words

INPUT_BYTES = 4 * input_words(NVFP4)


@dataclass(frozen=True)
class EncodedBlock:
    """A lane's block of a row.

    Attributes:
        words: its values; a register tensor if they are unchanged.
        scales: for NVFP4 values, the scales of four neighbouring lanes; else None.
    """

    words: list | cute.Tensor
    scales: Uint32 | None


@dataclass(frozen=True)
class RowEncoding:
    """Encoding of values in rows that are sent to other ranks.

    Attributes:
        is_bf16: whether they are bfloat16, else float16.
        quantizes: whether they become NVFP4.
        has_global_scale: whether a factor is read.
        encode: encoder to e2m1.
    """

    is_bf16: bool
    quantizes: bool
    has_global_scale: bool
    encode: Encoding

    def block(self, words: cute.Tensor, global_scale: Int64) -> EncodedBlock:
        """Encodes a lane's words. global_scale: address of the factor."""
        if not self.quantizes:
            return EncodedBlock(words, None)
        factor = global_scalar(Float32, global_scale)[0] if self.has_global_scale else None
        encoded, code = quantize_words(words, factor, self.is_bf16, self.encode)
        return EncodedBlock(encoded, scale_word(code))

    @cute.jit
    def store(self, row: Int64, values: Int32 | int, scales: Int32, number: Int32, block: EncodedBlock):
        """Stores block ``number`` of the row at this address.

        ``values``, ``scales``: offsets of its values and row-major scales.
        """
        if cutlass.const_expr(self.quantizes):
            store_words(row + values + number * OUTPUT_BYTES, block.words)
            if number % ATOM_COLS == 0:
                store_word(row + scales + number, block.scales)
        else:
            words = [block.words[i] for i in range(cute.size(block.words))]
            store_plain_block(row + values + number * PLAIN_BYTES, words)


@cute.jit
def read_block(x: Int64, x_pitch: Int64, row: Int32, number: Int32, num_blocks: Int32) -> cute.Tensor:
    """Returns the words of a lane's block of a row of x; zeros after the last block."""
    words = cute.make_rmem_tensor(input_words(NVFP4), Uint32)
    words.fill(Uint32(0))
    if number < num_blocks:
        load_block(words, x + Int64(row) * x_pitch + number * INPUT_BYTES)
    return words
