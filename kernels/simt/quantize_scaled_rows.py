"""Quantizes fp16 or bf16, or silu(x) * up of two such tensors, to NVFP4 with a global scale per row that it computes.

All bits are those of ``formats.quantize``. The operands are those of ``quantize``, except that the kernel writes the global
scales, fp32 (batches, rows).

Work: a CTA takes a row, one block per thread at a time, and reads it twice: first to find the largest magnitude, then, from
caches, to quantize. CTAs of padding rows write zeros to their scales.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.formats.scale_layout import ATOM_COLS, ATOM_ROWS
from nvfp4_cute.launch_table import Quantize

from ..common import ptx
from ..common.global_access import store_word
from .global_scale import largest_of_cta, largest_of_values, scale_of_values
from .quantize import (
    THREADS,
    QuantizeKernel,
    QuantizeOperands,
    ScalePlace,
    load_block,
    store_block,
    unpack,
)
from .silu import silu_mul

# Loads in flight per thread.
UNROLL = 2


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
        """Finds the row and its global scale, then loads again, encodes, and stores."""
        if cutlass.const_expr(self.lets_next_begin):
            # A product may load weights meanwhile.
            cute.arch.griddepcontrol_launch_dependents()
        tidx, _, _ = cute.arch.thread_idx()
        row_in_atom, atom_row, batch = cute.arch.block_idx()
        group, row, row_end = self.locate(operands, atom_row, row_in_atom)
        k_blocks = operands.k // self.block_k
        scale = Float32(1.0)
        if row < row_end:
            most = Uint32(0)
            for block in cutlass.range(tidx, k_blocks, THREADS, unroll=UNROLL):
                most = largest_of_values(most, self.values(self.load(operands, batch, row, block)))
            most = largest_of_cta(most, tidx, THREADS)
            scale = scale_of_values(most, self.encode.format.global_scale_divisor)
            if tidx == 0:
                store_word(operands.global_scale + (Int64(batch) * operands.m + row) * 4, ptx.bits_of(scale))
        # Whole atoms of columns, whose padding is written as zeros.
        for block in cutlass.range(tidx, cute.ceil_div(k_blocks, ATOM_COLS) * ATOM_COLS, THREADS, unroll=1):
            place, code = ScalePlace(batch, atom_row, row_in_atom, row, block), Uint32(0)
            is_block = (row < row_end) & (block < k_blocks)
            if is_block:
                words, code = self.quantize_block(*self.load(operands, batch, row, block), scale)
                first = (Int64(batch) * operands.m + row) * k_blocks + block
                store_block(operands.data + first * self.output_bytes, words)
            self.store_scale(operands, place, code, Boolean(is_block))

    @cute.jit
    def load(self, operands: QuantizeOperands, batch: Int32, row: Int64, block: Int32) -> tuple:
        """Returns the words of a block of x, and those of up; zeros without up."""
        words, factors = (cute.make_rmem_tensor(self.input_words, Uint32) for _ in range(2))
        factors.fill(Uint32(0))
        offset = block * (4 * self.input_words)
        load_block(words, operands.x + batch * operands.x_batch + row * operands.x_pitch + offset)
        if cutlass.const_expr(self.has_up):
            load_block(factors, operands.up + batch * operands.up_batch + row * operands.up_pitch + offset)
        return words, factors

    def values(self, loaded: tuple) -> list:
        """Returns the values to quantize in the words of ``load``."""
        x, up = (
            [value for i in range(self.input_words) for value in unpack(words[i], self.is_bf16)]
            for words in loaded
        )
        return [silu_mul(gate, other) for gate, other in zip(x, up, strict=True)] if self.has_up else x
