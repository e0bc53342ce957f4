"""Quantizes fp16 or bf16, or silu(x) * up of two such tensors, in one pass, with the bits of ``formats.quantize``.

x (M, K) in rows of unit stride; data (M, bytes of K); scales of one byte, in the 128x4 blocked layout with its padding
written as zeros, or row-major. NVFP4 has an fp32 global scale: none, one in memory, one per group of rows, or a
computed one.

Work: a warp takes 8 neighbouring rows and four blocks of K of each, one block per lane: 128 contiguous bytes of x per
row (256 for blocks of 32). Few rows, such as those of a small group, therefore fill whole warps. ``words`` of each lane
are loaded before the first block is computed.

A computed global scale: every CTA with rows reads all of a small x without gaps, which takes less time than an earlier
launch. The first CTA stores the scale and its products.
"""

from dataclasses import dataclass, replace
from typing import Literal

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.formats.scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS
from nvfp4_cute.launch_table import Quantize
from nvfp4_cute.planning.arch.simt import AMAX_VALUES, QUANTIZE_WARPS, WARP_SIZE

from ..common import ptx
from ..common.device_groups import inclusive_sum
from ..common.encode import Encoding
from ..common.four_over_six import encode_better
from ..common.global_access import KEEP, global_scalar, load_words, store_byte, store_words
from ..common.launch_record import read_record
from ..common.quantize_block import encode_block, encode_values, find_scale, over_lanes, scale_quotient
from .global_scale import (
    UNIT_BYTES,
    UNIT_WORDS,
    largest_of_cta,
    largest_of_words,
    scale_of_largest,
    store_scale_and_products,
    units_at_once,
)
from .silu import silu_mul

ROWS_PER_WARP = WARP_SIZE // ATOM_COLS
UNITS_PER_ATOM = ATOM_ROWS // ROWS_PER_WARP
# Elements of x in a word, and words of a vector.
WORD_VALUES = 2
VECTOR_WORDS = 4
THREADS = QUANTIZE_WARPS * WARP_SIZE
# Loads in flight per thread, in the search for the largest magnitude.
AMAX_IN_FLIGHT = 8


@dataclass(frozen=True)
class QuantizeOperands:
    """Addresses and byte strides are Int64, extents Int32; for a computed global scale also addresses of factors and products."""

    x: Int64
    data: Int64
    scale: Int64
    global_scale: Int64
    offs: Int64
    x_pitch: Int64
    x_batch: Int64
    up: Int64
    up_pitch: Int64
    up_batch: Int64
    m: Int32
    k: Int32
    groups: Int32
    atom_rows: Int32
    times: tuple = ()
    products: tuple = ()

    @classmethod
    def of(cls, t: cute.Tensor, num_times: int = 0) -> "QuantizeOperands":
        """Reads the operands of a launch table; see ``launch_table.Quantize``."""
        return read_record(
            cls,
            Quantize,
            t,
            times=(t[Quantize.TIMES_0], t[Quantize.TIMES_1])[:num_times],
            products=(t[Quantize.PRODUCT_0], t[Quantize.PRODUCT_1])[:num_times],
        )


@dataclass(frozen=True)
class ScalePlace:
    """Position of a block: batch, row of atoms, row inside the atom, row of x, block of K."""

    batch: Int32
    atom_row: Int32
    row_in_atom: Int32
    row: Int64
    k_block: Int32


class QuantizeKernel:
    """One compiled variant.

    Args:
        is_bf16: whether x is bfloat16, else float16.
        has_global_scale: whether there is a factor.
        is_grouped: whether ``offs`` splits the rows into groups with separate scale rows.
        is_blocked: layout of the scales: 128x4 blocked, else row-major.
        has_fp4_convert: whether e2m1 conversions are instructions.
        has_up: whether silu(x) * up is quantized.
        lets_next_begin: whether the next launch may begin while this one runs, if it is programmatic.
        name: name of the kernel in profilers and in the emulator's reports.
        format: format of the results.
        scale_rounding: rounding of scales that are powers of two, "up" or "down".
        words: words of inputs that a lane loads at once; at least one block's.
        found_times: number of factors (up to two) that are multiplied by a computed global scale of one matrix without
            gaps; None without a computed scale.
    """

    def __init__(
        self,
        is_bf16: bool,
        has_global_scale: bool,
        is_grouped: bool,
        is_blocked: bool,
        has_fp4_convert: bool,
        has_up: bool,
        lets_next_begin: bool,
        name: str,
        format: BlockFormat,
        scale_rounding: Literal["up", "down"],
        words: int,
        found_times: int | None = None,
    ):
        self.is_bf16 = is_bf16
        self.has_global_scale = has_global_scale
        self.is_grouped = is_grouped
        self.is_blocked = is_blocked
        self.encode = Encoding.of(format, has_fp4_convert, scale_rounding)
        self.block_k = format.block_k
        self.input_words = input_words(format)
        self.output_bytes = format.row_bytes(format.block_k)
        self.has_up = has_up
        self.lets_next_begin = lets_next_begin
        # Equal bytes in flight from memory, with two inputs and with one.
        self.atoms = max(words // self.input_words // (2 if has_up else 1), 1)
        self.name = name
        self.finds_scale = found_times is not None
        self.num_times = found_times or 0

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches columns of atoms along x, rows of atoms along y, batches along z.

        Args:
            table: Int64 in host memory: ``launch_table.Quantize``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(Quantize)))
        operands = QuantizeOperands.of(t, self.num_times)
        chunks = cute.ceil_div(operands.k, ATOM_COLS * self.block_k * self.atoms)
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands).launch(
            grid=(
                cute.ceil_div(chunks * UNITS_PER_ATOM, QUANTIZE_WARPS),
                operands.atom_rows,
                Int32(t[Quantize.BATCHES]),
            ),
            block=(THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: QuantizeOperands):
        """Finds the block, loads, encodes, and stores."""
        if cutlass.const_expr(self.lets_next_begin):
            # A product may load weights meanwhile.
            cute.arch.griddepcontrol_launch_dependents()
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, atom_row, batch = cute.arch.block_idx()
        k_blocks = operands.k // self.block_k
        chunks = cute.ceil_div(k_blocks, ATOM_COLS * self.atoms)
        # Neighbouring warps take neighbouring columns of one set of rows.
        work = block_idx * QUANTIZE_WARPS + cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        unit, first_atom = work // chunks, work % chunks * self.atoms
        lane = tidx % WARP_SIZE
        row_in_atom = unit * ROWS_PER_WARP + lane // ATOM_COLS
        group, row, row_end = self.locate(operands, atom_row, row_in_atom)
        found = Float32(1.0)
        if cutlass.const_expr(self.finds_scale):
            first_row = atom_row * ATOM_ROWS + block_idx * QUANTIZE_WARPS // chunks * ROWS_PER_WARP
            found = self.find_global_scale(operands, first_row, block_idx + atom_row == 0, tidx)

        if unit < UNITS_PER_ATOM:
            place = ScalePlace(batch, atom_row, row_in_atom, row, first_atom * ATOM_COLS + lane % ATOM_COLS)
            # In groups with few rows most of a row of atoms is padding, which needs no loads and no arithmetic.
            if cute.arch.vote_any_sync(row < row_end):
                self.quantize_rows(operands, place, group, row_end, found)
            else:
                for i in cutlass.range_constexpr(self.atoms):
                    self.store_scale(operands, shifted(place, i), Uint32(0), Boolean(False))

    @cute.jit
    def find_global_scale(self, operands: QuantizeOperands, first_row: Int32, stores: Boolean, tidx: Int32):
        """Returns the global scale of all of x in a CTA whose first row this is; 1 in a CTA without rows."""
        scale = Float32(1.0)
        if first_row < operands.m:
            most = Uint32(0)
            units = operands.m * (operands.k // AMAX_VALUES)
            for first in cutlass.range(tidx, units, THREADS * AMAX_IN_FLIGHT, unroll=1):
                words = []
                for unit in units_at_once(first, THREADS, units, AMAX_IN_FLIGHT):
                    words += load_words(operands.x + Int64(unit) * UNIT_BYTES, UNIT_WORDS, KEEP)
                most = largest_of_words(most, words, self.is_bf16)
            most = largest_of_cta(most, tidx, THREADS)
            scale = scale_of_largest(most, self.is_bf16, self.encode.format.global_scale_divisor)
            if stores and tidx == 0:
                store_scale_and_products(scale, operands.global_scale, operands.times, operands.products)
        return scale

    @cute.jit
    def quantize_rows(
        self, operands: QuantizeOperands, place: ScalePlace, group: Int32, row_end: Int64, found: Float32
    ):
        """Quantizes the blocks of a lane, from ``place`` on. found: the computed global scale, if there is one."""
        k_blocks = operands.k // self.block_k
        x = operands.x + place.batch * operands.x_batch + place.row * operands.x_pitch
        up = operands.up + place.batch * operands.up_batch + place.row * operands.up_pitch
        places = [shifted(place, i) for i in range(self.atoms)]
        inputs, factors = (
            [cute.make_rmem_tensor(self.input_words, Uint32) for _ in places] for _ in range(2)
        )
        valid = [(place.row < row_end) & (p.k_block < k_blocks) for p in places]
        for i in cutlass.range_constexpr(self.atoms):
            inputs[i].fill(Uint32(0))
            factors[i].fill(Uint32(0))
            if valid[i]:
                load_block(inputs[i], x + places[i].k_block * (4 * self.input_words))
                if cutlass.const_expr(self.has_up):
                    load_block(factors[i], up + places[i].k_block * (4 * self.input_words))
        global_scale = found
        if cutlass.const_expr(self.has_global_scale and not self.finds_scale):
            global_scale = global_scalar(Float32, operands.global_scale + group * 4)[0]
        for i in cutlass.range_constexpr(self.atoms):
            words, code = self.quantize_block(inputs[i], factors[i], global_scale)
            if valid[i]:
                first = (Int64(place.batch) * operands.m + place.row) * k_blocks + places[i].k_block
                store_block(operands.data + first * self.output_bytes, words)
            self.store_scale(operands, places[i], code, valid[i])

    @cute.jit
    def locate(self, operands: QuantizeOperands, atom_row: Int32, row_in_atom: Int32):
        """Returns group, row of x, and end of the group's rows. Every group begins with a new row of atoms."""
        group, row = Int32(0), Int64(atom_row) * ATOM_ROWS + row_in_atom
        row_end = Int64(operands.m)
        if cutlass.const_expr(self.is_grouped):
            # Rows of atoms after the last group get an empty range of rows.
            group, start, row_end, first_atom = find_group(operands, atom_row)
            row = Int64(start) + (atom_row - first_atom) * ATOM_ROWS + row_in_atom
        return group, row, row_end

    @cute.jit
    def quantize_block(self, words: cute.Tensor, factors: cute.Tensor, global_scale: Float32):
        """Returns words of elements and the code of the block's scale, by the operations of ``formats.quantize`` in order."""
        if cutlass.const_expr(self.has_up):
            x, up = (
                [value for i in range(self.input_words) for value in unpack(source[i], self.is_bf16)]
                for source in (words, factors)
            )
            products = [silu_mul(gate, other) for gate, other in zip(x, up, strict=True)]
            return encode_block(products, global_scale if self.has_global_scale else None, self.encode)
        return quantize_words(
            words, global_scale if self.has_global_scale else None, self.is_bf16, self.encode
        )

    @cute.jit
    def store_scale(self, operands: QuantizeOperands, place: ScalePlace, code: Uint32, valid: Boolean):
        """Stores the scale of one block, or the zero of the padding if there is no block."""
        k_blocks = operands.k // self.block_k
        if cutlass.const_expr(self.is_blocked):
            atoms_k = cute.ceil_div(k_blocks, ATOM_COLS)
            if place.k_block // ATOM_COLS < atoms_k:
                atom = (
                    Int64(place.batch) * operands.atom_rows + place.atom_row
                ) * atoms_k + place.k_block // ATOM_COLS
                offset = place.row_in_atom % 32 * 16 + place.row_in_atom // 32 * 4 + place.k_block % ATOM_COLS
                store_byte(operands.scale + atom * ATOM_BYTES + offset, code if valid else Uint32(0))
        elif valid:
            row = Int64(place.batch) * operands.m + place.row
            store_byte(operands.scale + row * k_blocks + place.k_block, code)


def shifted(place: ScalePlace, atoms: int) -> ScalePlace:
    """Returns a place that is ``atoms`` columns of atoms further along K."""
    return replace(place, k_block=place.k_block + atoms * ATOM_COLS)


@cute.jit
def find_group(operands: QuantizeOperands, atom_row: Int32):
    """Returns the group of a row of atoms: index, first row, end, first row of atoms. A warp checks 32 groups at a time."""
    lane = cute.arch.lane_idx()
    first_group, atoms_before = Int32(0), Int32(0)
    group, start, row_end, first_atom = Int32(0), Int32(0), Int64(0), Int32(0)
    while atoms_before <= atom_row and first_group < operands.groups:
        own_start, own_end = Int32(0), Int32(0)
        if first_group + lane < operands.groups:
            address = operands.offs + Int64(first_group + lane) * 4
            own_end = within(operands, global_scalar(Int32, address)[0])
            if first_group + lane > 0:
                own_start = within(operands, global_scalar(Int32, address - 4)[0])
        size = cute.ceil_div(cutlass.max(own_end - own_start, 0), ATOM_ROWS)
        atom_end = atoms_before + inclusive_sum(size)
        # Groups that end at or before the row of atoms; the next one has it.
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(atom_end <= atom_row))
        if passed < WARP_SIZE:
            group, start = first_group + passed, cute.arch.shuffle_sync(own_start, passed)
            row_end = Int64(cute.arch.shuffle_sync(own_end, passed))
            first_atom = cute.arch.shuffle_sync(atom_end - size, passed)
        atoms_before = cute.arch.shuffle_sync(atom_end, WARP_SIZE - 1)
        first_group += WARP_SIZE
    return group, start, row_end, first_atom


def within(operands: QuantizeOperands, row: Int32) -> Int32:
    """Clamps a group's end to the existing rows, because ends are data that no check reads."""
    return cutlass.max(cutlass.min(row, Int32(operands.m)), 0)


@cute.jit
def quantize_words(
    words: cute.Tensor, global_scale: Float32 | None, is_bf16: cutlass.Constexpr, encode: cutlass.Constexpr
):
    """Returns a block's words of 16-bit floats, see ``QuantizeKernel.quantize_block``.

    With a part of a block per lane, the next lanes have its other parts, and a full warp must call this.
    """
    num_words = cute.size(words)
    magnitudes = [words[i] & Uint32(0x7FFF7FFF) for i in range(num_words)]
    most = magnitudes[0]
    for word in magnitudes[1:]:
        most = ptx.max_nan_x2(most, word, is_bf16)
    low, high = unpack(most, is_bf16)
    amax = over_lanes(ptx.max_nan(low, high), input_words(encode.format) // num_words)
    source = words if cutlass.const_expr(encode.signed) else magnitudes
    x = [value for i in range(num_words) for value in unpack(source[i], is_bf16)]
    signs = [words[i] for i in range(num_words)]
    if cutlass.const_expr(encode.format.scaling == "four_over_six"):
        quotient = scale_quotient(amax, global_scale, encode)
        return encode_better(x, signs, amax, quotient, global_scale, encode)
    code, factor = find_scale(amax, global_scale, encode)
    return encode_values(x, signs, amax, code, factor, encode), code


def unpack(word: Uint32, is_bf16: bool) -> tuple[Float32, Float32]:
    """Returns the two elements of a word, exactly."""
    return ptx.unpack_bf16x2(word) if is_bf16 else ptx.unpack_f16x2(word)


def input_words(format: BlockFormat) -> int:
    """Returns the words of x per block."""
    return format.block_k // WORD_VALUES


def load_block(words: cute.Tensor, address: Int64) -> None:
    """Loads a block's elements of x."""
    for first in range(0, cute.size(words), VECTOR_WORDS):
        for i, word in enumerate(load_words(address + first * 4, VECTOR_WORDS, KEEP)):
            words[first + i] = word


def store_block(address: Int64, words: list) -> None:
    """Stores a block's words of elements."""
    for first in range(0, len(words), VECTOR_WORDS):
        store_words(address + first * 4, words[first : first + VECTOR_WORDS])
