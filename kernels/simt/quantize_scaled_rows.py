"""Quantizes fp16 or bf16, or silu(x) * up of two such tensors, to NVFP4 with a global scale per row that it computes.

All bits are those of ``formats.quantize``. The operands are those of ``quantize``, except that the kernel writes the global
scales, fp32 (batches, rows).

Work: a CTA takes a row, one block per thread at a time. Shared memory holds up to 8,192 values until the global scale is known;
threads compute the rest of a longer row again. CTAs of padding rows write zeros to their scales.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.formats.scale_layout import ATOM_COLS, ATOM_ROWS
from nvfp4_cute.launch_table import Quantize
from nvfp4_cute.planning.arch.simt import WARP_SIZE

from ..common import ptx
from ..common.global_access import store_word
from ..common.quantize_block import encode_block
from ..common.shared_access import load_shared, store_shared
from ..common.versions import SmemAllocator
from .global_scale import (
    largest_of_cta,
    largest_of_values,
    largest_of_words,
    scale_of_largest,
    scale_of_values,
)
from .quantize import (
    VECTOR_WORDS,
    QuantizeKernel,
    QuantizeOperands,
    ScalePlace,
    load_block,
    quantize_words,
    store_block,
    unpack,
)
from .silu import silu_mul

# Rows of up to 4,096 values are at most two blocks per thread.
THREADS = 4 * WARP_SIZE
HELD_VALUES = 8192
VECTOR_BYTES = 4 * VECTOR_WORDS
# Blocks in flight per thread, without and with silu(x) * up.
UNROLL = {False: 2, True: 1}


class QuantizeScaledRowsKernel(QuantizeKernel):
    """One compiled variant; arguments as for ``QuantizeKernel``, with a format that has a global scale."""

    def __init__(
        self,
        is_bf16: bool,
        is_grouped: bool,
        is_blocked: bool,
        has_up: bool,
        format: BlockFormat,
        has_fp4_convert: bool,
        lets_next_begin: bool,
        name: str,
    ):
        of_tensor = (is_bf16, True, is_grouped, is_blocked, has_fp4_convert, has_up, lets_next_begin, name)
        super().__init__(*of_tensor, format, "up", format.block_k // 2)
        # A held block is words of x, or float32 values.
        self.held_words = format.block_k if has_up else self.input_words
        self.held_blocks = HELD_VALUES // format.block_k
        self.held_bytes = 4 * self.held_words * self.held_blocks

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches one CTA per row, padding included.

        Args:
            table: Int64 in host memory: ``launch_table.Quantize``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(Quantize)))
        operands = QuantizeOperands.of(t)
        rows = cutlass.min(operands.m, ATOM_ROWS)
        if cutlass.const_expr(self.is_blocked):
            rows = Int32(ATOM_ROWS)
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands).launch(
            grid=(rows, operands.atom_rows, Int32(t[Quantize.BATCHES])), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, operands: QuantizeOperands):
        """Finds the row and its global scale, then encodes and stores."""
        if cutlass.const_expr(self.lets_next_begin):
            # A product may load weights meanwhile.
            cute.arch.griddepcontrol_launch_dependents()
        tidx, _, _ = cute.arch.thread_idx()
        row_in_atom, atom_row, batch = cute.arch.block_idx()
        group, row, row_end = self.locate(operands, atom_row, row_in_atom)
        k_blocks = operands.k // self.block_k
        held = SmemAllocator().allocate(self.held_bytes, VECTOR_BYTES).toint()
        scale = Float32(1.0)
        if row < row_end:
            most = Uint32(0)
            for block in cutlass.range(tidx, k_blocks, THREADS, unroll=UNROLL[self.has_up]):
                words = self.words(operands, batch, row, block)
                most = self.largest(most, words)
                if block < self.held_blocks:
                    for vector in cutlass.range_constexpr(self.held_words // VECTOR_WORDS):
                        first = vector * VECTOR_WORDS
                        store_shared(self.place(held, block, vector), words[first : first + VECTOR_WORDS])
            most = largest_of_cta(most, tidx, THREADS)
            scale = self.scale_of_row(most)
            if tidx == 0:
                store_word(operands.global_scale + (Int64(batch) * operands.m + row) * 4, ptx.bits_of(scale))
        # Whole atoms of columns, whose padding is written as zeros.
        for block in cutlass.range(tidx, cute.ceil_div(k_blocks, ATOM_COLS) * ATOM_COLS, THREADS, unroll=1):
            place, code = ScalePlace(batch, atom_row, row_in_atom, row, block), Uint32(0)
            is_block = (row < row_end) & (block < k_blocks)
            if is_block:
                words = cute.make_rmem_tensor(self.held_words, Uint32)
                if block < self.held_blocks:
                    for vector in cutlass.range_constexpr(self.held_words // VECTOR_WORDS):
                        for i, word in enumerate(load_shared(self.place(held, block, vector), VECTOR_WORDS)):
                            words[vector * VECTOR_WORDS + i] = word
                else:
                    for i, word in enumerate(self.words(operands, batch, row, block)):
                        words[i] = word
                encoded, code = self.encode_words(words, scale)
                first = (Int64(batch) * operands.m + row) * k_blocks + block
                store_block(operands.data + first * self.output_bytes, encoded)
            self.store_scale(operands, place, code, Boolean(is_block))

    def place(self, held: Int32, block: Int32, vector: int) -> Int32:
        """Returns the address of a vector of a held block. Neighbouring threads have neighbouring addresses."""
        return held + (block + vector * self.held_blocks) * VECTOR_BYTES

    def words(self, operands: QuantizeOperands, batch: Int32, row: Int64, block: Int32) -> list:
        """Returns the values of a block that are quantized: words of x, or silu(x) * up as float32 bits."""
        words = cute.make_rmem_tensor(self.input_words, Uint32)
        offset = block * (4 * self.input_words)
        load_block(words, operands.x + batch * operands.x_batch + row * operands.x_pitch + offset)
        if not self.has_up:
            return [words[i] for i in range(self.input_words)]
        factors = cute.make_rmem_tensor(self.input_words, Uint32)
        load_block(factors, operands.up + batch * operands.up_batch + row * operands.up_pitch + offset)
        x, up = (
            [value for i in range(self.input_words) for value in unpack(source[i], self.is_bf16)]
            for source in (words, factors)
        )
        return [ptx.bits_of(silu_mul(gate, other)) for gate, other in zip(x, up, strict=True)]

    def largest(self, most: Uint32, words: list) -> Uint32:
        """Returns the larger one of ``most`` and the bits of the largest finite magnitude of a block."""
        if self.has_up:
            return largest_of_values(most, [ptx.float_of(word) for word in words])
        return largest_of_words(most, words, self.is_bf16)

    def scale_of_row(self, most: Uint32) -> Float32:
        """Returns the global scale of a row from the magnitude that ``largest`` found."""
        divisor = self.encode.format.global_scale_divisor
        return (
            scale_of_values(most, divisor) if self.has_up else scale_of_largest(most, self.is_bf16, divisor)
        )

    @cute.jit
    def encode_words(self, words: cute.Tensor, scale: Float32) -> tuple:
        """Returns words of elements and the code of a block's scale."""
        if cutlass.const_expr(self.has_up):
            return encode_block([ptx.float_of(words[i]) for i in range(self.held_words)], scale, self.encode)
        return quantize_words(words, scale, self.is_bf16, self.encode)
