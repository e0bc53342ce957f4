"""Quantizes fp16 or bf16, or silu(x) * up of two such tensors, to NVFP4 with a global scale per row that it computes.

All bits are those of ``formats.quantize``. The operands are those of ``quantize``, except that the kernel writes the global
scales, fp32 (batches, rows).

Work: a CTA takes a row. Until the global scale is known, threads hold blocks of the row in registers; they read the rest of a
longer row again, from caches. CTAs of padding rows write zeros to their scales.
"""

from dataclasses import replace

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
from .global_scale import (
    largest_of_cta,
    largest_of_values,
    largest_of_words,
    scale_of_largest,
    scale_of_values,
)
from .quantize import (
    WORD_VALUES,
    QuantizeKernel,
    QuantizeOperands,
    ScalePlace,
    load_block,
    quantize_words,
    store_block,
    unpack,
)
from .silu import silu_mul


class QuantizeScaledRowsKernel(QuantizeKernel):
    """One compiled variant; arguments as for ``QuantizeKernel``, with a format that has a global scale.

    Args:
        warps: warps of a CTA.
        held: blocks that a thread holds in registers.
    """

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
        warps: int,
        held: int,
    ):
        of_tensor = (is_bf16, True, is_grouped, is_blocked, has_fp4_convert, has_up, lets_next_begin, name)
        super().__init__(*of_tensor, format, "up", format.block_k // 2)
        self.threads = warps * WARP_SIZE
        self.held = held

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
            grid=(rows, operands.atom_rows, Int32(t[Quantize.BATCHES])),
            block=(self.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: QuantizeOperands):
        """Quantizes a row, or writes the zeros of a padding row."""
        if cutlass.const_expr(self.lets_next_begin):
            # A product may load weights meanwhile.
            cute.arch.griddepcontrol_launch_dependents()
        tidx, _, _ = cute.arch.thread_idx()
        row_in_atom, atom_row, batch = cute.arch.block_idx()
        group, row, row_end = self.locate(operands, atom_row, row_in_atom)
        place = ScalePlace(batch, atom_row, row_in_atom, row, tidx)
        if row < row_end:
            self.quantize_row(operands, place)
        else:
            for block in cutlass.range(tidx, self.columns(operands), self.threads, unroll=1):
                self.store_scale(operands, replace(place, k_block=block), Uint32(0), Boolean(False))

    @cute.jit
    def quantize_row(self, operands: QuantizeOperands, place: ScalePlace):
        """Loads, finds the global scale, encodes, and stores. place: that of the thread's first block."""
        tidx, k_blocks = place.k_block, operands.k // self.block_k
        beyond = tidx + self.held * self.threads
        held = [self.new_block() for _ in range(self.held)]
        for i in cutlass.range_constexpr(self.held):
            held[i].fill(Uint32(0))
            if tidx + i * self.threads < k_blocks:
                self.load(held[i], operands, place, tidx + i * self.threads)
        most = self.largest(Uint32(0), held)
        rest = self.new_block()
        for block in cutlass.range(beyond, k_blocks, self.threads, unroll=1):
            self.load(rest, operands, place, block)
            most = self.largest(most, [rest])
        scale = self.scale_of_row(largest_of_cta(most, tidx, self.threads))
        if tidx == 0:
            row = Int64(place.batch) * operands.m + place.row
            store_word(operands.global_scale + row * 4, ptx.bits_of(scale))
        for i in cutlass.range_constexpr(self.held):
            self.store(operands, replace(place, k_block=tidx + i * self.threads), held[i], scale)
        for block in cutlass.range(beyond, self.columns(operands), self.threads, unroll=1):
            if block < k_blocks:
                self.load(rest, operands, place, block)
            self.store(operands, replace(place, k_block=block), rest, scale)

    def columns(self, operands: QuantizeOperands) -> Int32:
        """Returns the number of scales per row, including the padding of atoms, which is written as zeros."""
        return cute.ceil_div(operands.k // self.block_k, ATOM_COLS) * ATOM_COLS

    def new_block(self) -> cute.Tensor:
        """Returns registers for a block to quantize: words of x or, with up, silu(x) * up as float32 bits."""
        return cute.make_rmem_tensor(self.block_k if self.has_up else self.input_words, Uint32)

    @cute.jit
    def load(self, values: cute.Tensor, operands: QuantizeOperands, place: ScalePlace, block: Int32):
        """Loads a block of a row into ``values``, in the form of ``new_block``."""
        offset = block * (4 * self.input_words)
        x = operands.x + place.batch * operands.x_batch + place.row * operands.x_pitch + offset
        if cutlass.const_expr(not self.has_up):
            load_block(values, x)
        else:
            words, factors = (cute.make_rmem_tensor(self.input_words, Uint32) for _ in range(2))
            load_block(words, x)
            load_block(
                factors,
                operands.up + place.batch * operands.up_batch + place.row * operands.up_pitch + offset,
            )
            for i in cutlass.range_constexpr(self.input_words):
                pairs = zip(unpack(words[i], self.is_bf16), unpack(factors[i], self.is_bf16), strict=True)
                for j, (gate, other) in enumerate(pairs):
                    values[WORD_VALUES * i + j] = ptx.bits_of(silu_mul(gate, other))

    @cute.jit
    def store(self, operands: QuantizeOperands, place: ScalePlace, values: cute.Tensor, scale: Float32):
        """Encodes and stores a block, or writes the zero of a padding column."""
        k_blocks, code = operands.k // self.block_k, Uint32(0)
        is_block = place.k_block < k_blocks
        if is_block:
            words, code = self.encode_block(values, scale)
            first = (Int64(place.batch) * operands.m + place.row) * k_blocks + place.k_block
            store_block(operands.data + first * self.output_bytes, words)
        self.store_scale(operands, place, code, Boolean(is_block))

    def largest(self, most: Uint32, blocks: list) -> Uint32:
        """Returns the larger one of ``most`` and the bits of the largest finite magnitude of blocks."""
        words = [block[i] for block in blocks for i in range(cute.size(block))]
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
    def encode_block(self, values: cute.Tensor, scale: Float32) -> tuple:
        """Returns words of elements and the code of a block's scale."""
        if cutlass.const_expr(self.has_up):
            return encode_block([ptx.float_of(values[i]) for i in range(self.block_k)], scale, self.encode)
        return quantize_words(values, scale, self.is_bf16, self.encode)
