"""Few rows of NVFP4 activations times NVFP4 weights: c[m, n] = alpha * sum over k of (A * SFA)[m, k] (B * SFB)[n, k].

A (M, K, L), B (N, K, L) e2m1, two values per byte, K-major; SFA, SFB e4m3 in the 128x4 blocked layout, read in place; c
fp16, bf16 or fp32. The weights are read once per ``FEW_ROWS`` rows of A.

Values times their scales are fp16 without rounding (``common.decode``). Warps multiply 16 weight rows by 8 rows of A and 16 k
with ``mma.sync``, which every architecture from sm_90a on has.

Work: a CTA has 32 weight rows of one scale atom, r, r + 32, r + 64, r + 96 for eight consecutive r, whose scales for 64
values of K are 128 consecutive bytes. Its warps take chunks of 128 values of K in turn. A lane (4 g + t) has row g of A
and of each band of weights, and piece t of 32 values of a chunk. The assignment of k to MMAs is free as long as both
operands agree. Each lane copies the data that it will read into its own slots in shared memory, some chunks ahead, so
lanes synchronise only when the sums of warps are added.

Order of summation. One MMA adds 16 products to the sum in fp32, with the truncating addition of the GPU's tensor cores.
Word w = 0 ... 3 of a piece (its k from 8 w on) takes two MMAs: first the even k, then the odd ones, of all four t. A
warp adds its chunks in ascending order, starting from 0; warps are added in ascending order. So the order of products
depends only on K, not on M, N or L. Then the sum is multiplied by 2^28 and alpha, and rounded once to the output type.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32

from nvfp4_cute.formats.scale_layout import ATOM_BYTES, ATOM_ROWS
from nvfp4_cute.launch_table import FewRows
from nvfp4_cute.planning.arch.simt import FEW_ROWS, FEW_ROWS_SLOTS, FEW_ROWS_WARPS, UNIT_ROWS, WARP_SIZE

from ..common import ptx
from ..common.bias import bias_pointer, load_bias
from ..common.decode import OPERAND_EXPONENT, SIGN_BITS, decode_scales, decode_word
from ..common.global_access import SHARED, global_scalar, load_words
from ..common.launch_record import read_record
from ..common.select import select
from ..common.versions import SmemAllocator, inline_ptx
from .unit_rows import BAND_GROUP, BAND_ROWS, BANDS, num_units, row_of

NUM_THREADS = FEW_ROWS_WARPS * WARP_SIZE
assert NUM_THREADS == UNIT_ROWS * FEW_ROWS  # each thread adds up and stores a result
# A lane's piece of a row: 16 bytes in four words, two scale blocks.
PIECE_K, PIECE_BYTES, PIECE_WORDS, BLOCK_WORDS = 32, 16, 4, 2
PIECES_PER_CHUNK, PIECES_PER_ATOM = 4, 2
MMA_M = BANDS // 2
SCALE_WORD_BYTES, ROW_SCALES_BYTES = 4, 16
# From a warp's chunk to its next one: pieces per row, and bytes of values and of scales.
STEP = FEW_ROWS_WARPS * PIECES_PER_CHUNK
STEP_BYTES, SCALE_STEP_BYTES = STEP * PIECE_BYTES, STEP // PIECES_PER_ATOM * ATOM_BYTES
# Contents of a warp's slot: weights (BAND), their scales and A, 16 bytes per lane each, and A's scales, 4 bytes per
# lane.
ENTRY_BYTES = WARP_SIZE * PIECE_BYTES
SFB_OFFSET = BANDS * ENTRY_BYTES
A_OFFSET = SFB_OFFSET + ENTRY_BYTES
SFA_OFFSET = A_OFFSET + ENTRY_BYTES
SLOT_BYTES = SFA_OFFSET + WARP_SIZE * SCALE_WORD_BYTES
# Data that are read once bypass L1; data that every CTA reads again may stay there.
PAST_L1, THROUGH_L1 = "cg", "ca"
SMEM_CARVEOUT_PERCENT = 100
# Pitch between sums of neighbouring rows of A. It exceeds the weight rows so that lanes write to different banks.
SUMS_PITCH = UNIT_ROWS + 4


@dataclass(frozen=True)
class Operands:
    """Operands of one batch. Addresses and strides are Int64, extents Int32; strides in bytes, those of ``out`` in elements."""

    a: Int64
    b: Int64
    sfa: Int64
    sfb: Int64
    out: Int64
    alpha: Int64
    a_pitch: Int64
    b_pitch: Int64
    out_row: Int64
    out_column: Int64
    m: Int32
    n: Int32
    k: Int32
    bias: cute.Pointer | None = None


@dataclass(frozen=True)
class Chunk:
    """Addresses of a lane's piece in a chunk: of each band, of A, and of their scale words; and the number of the piece."""

    b: list
    sfb: Int64
    a: Int64
    sfa: Int64
    piece: Int32


@dataclass(frozen=True)
class Lane:
    """Position of a lane: its warp, g and t, its CTA's weight rows, and its first row of A.

    Attributes:
        entries, scale_entries: addresses in shared memory of its 16 and its 4 bytes of the first entry of the warp's
            first slot.
    """

    warp_idx: Int32
    group: Int32
    piece: Int32
    unit: Int32
    first_row: Int32
    entries: Int32
    scale_entries: Int32


class FewRowsKernel:
    """One compiled variant.

    Args:
        out_dtype: cutlass.Float16, BFloat16 or Float32.
        has_alpha: whether results are multiplied by a factor.
        bias_dtype: dtype of the bias that is added to the results of every row of b; None without a bias.
        name: name of the kernel in profilers and in the emulator's reports.
    """

    def __init__(self, out_dtype: type, has_alpha: bool, name: str, bias_dtype: type | None = None):
        self.out_dtype = out_dtype
        self.has_alpha = has_alpha
        self.bias_dtype = bias_dtype
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches weight rows along x of the grid, rows of A along y, batches along z.

        Args:
            table: Int64 in host memory: ``launch_table.FewRows``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(FewRows)))
        operands = read_record(
            Operands,
            FewRows,
            t,
            bias=None if self.bias_dtype is None else bias_pointer(t[FewRows.BIAS], self.bias_dtype),
        )
        strides = [
            t[column]
            for column in (
                FewRows.A_BATCH,
                FewRows.B_BATCH,
                FewRows.SFA_BATCH,
                FewRows.SFB_BATCH,
                FewRows.OUT_BATCH,
                FewRows.ALPHA_BATCH,
            )
        ]
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands, strides).launch(
            grid=(num_units(operands.n), cute.ceil_div(operands.m, FEW_ROWS), Int32(t[FewRows.L])),
            block=(NUM_THREADS, 1, 1),
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: Operands, strides: list):
        """Accumulates, adds the sums of warps with one result per thread, and stores."""
        tidx, _, _ = cute.arch.thread_idx()
        unit, row_tile, batch = cute.arch.block_idx()
        warp_idx, lane_idx = cute.arch.make_warp_uniform(tidx // WARP_SIZE), tidx % WARP_SIZE
        a_batch, b_batch, sfa_batch, sfb_batch, out_batch, alpha_batch = strides
        own = replace(
            operands,
            a=operands.a + batch * a_batch,
            b=operands.b + batch * b_batch,
            sfa=operands.sfa + batch * sfa_batch,
            sfb=operands.sfb + batch * sfb_batch,
            out=operands.out + batch * out_batch * (self.out_dtype.width // 8),
            alpha=operands.alpha + batch * alpha_batch,
        )
        smem = SmemAllocator()
        # (WEIGHT ROW, ROW OF A, WARP)
        sizes = (UNIT_ROWS, FEW_ROWS, FEW_ROWS_WARPS)
        layout = cute.make_layout(sizes, stride=(1, SUMS_PITCH, SUMS_PITCH * FEW_ROWS))
        sums = smem.allocate_tensor(Float32, layout, 16)
        slots = smem.allocate_array(
            Uint8, FEW_ROWS_WARPS * FEW_ROWS_SLOTS * SLOT_BYTES, byte_alignment=16
        ).toint()
        slots += warp_idx * (FEW_ROWS_SLOTS * SLOT_BYTES)
        lane = Lane(
            warp_idx=warp_idx,
            group=lane_idx // PIECES_PER_CHUNK,
            piece=lane_idx % PIECES_PER_CHUNK,
            unit=unit,
            first_row=row_tile * FEW_ROWS,
            entries=slots + lane_idx * PIECE_BYTES,
            scale_entries=slots + lane_idx * SCALE_WORD_BYTES,
        )
        # K is a multiple of 32, but the compiler does not know it. It would recompute a constant repeatedly.
        sign_bits = Uint32(SIGN_BITS) + Uint32(own.k * lane_idx % PIECE_K)
        num_pieces = own.k // PIECE_K

        chunk = first_chunk(own, lane, num_pieces)
        for i in cutlass.range_constexpr(FEW_ROWS_SLOTS):
            copy_chunk(lane, chunk, num_pieces, Int32(i * SLOT_BYTES))
            chunk = next_chunk(chunk)
        # (REGISTER, MMA_M)
        acc = cute.make_rmem_tensor((4, MMA_M), Float32)
        acc.fill(0.0)
        slot = Int32(0)
        for _ in cutlass.range(
            warp_idx, cute.ceil_div(num_pieces, PIECES_PER_CHUNK), FEW_ROWS_WARPS, unroll=1
        ):
            wait_for_copies(FEW_ROWS_SLOTS - 1)
            add_chunk(acc, lane, slot, sign_bits)
            copy_chunk(lane, chunk, num_pieces, slot)
            chunk = next_chunk(chunk)
            slot += SLOT_BYTES
            slot = select(slot == FEW_ROWS_SLOTS * SLOT_BYTES, Int32(0), slot)
        wait_for_copies(0)

        for i in cutlass.range_constexpr(MMA_M):
            for r in cutlass.range_constexpr(4):
                # Registers of an MMA: row g, two columns; row g + 8, two columns.
                row = lane.group + BAND_GROUP * (2 * i + r // 2)
                sums[row, 2 * lane.piece + r % 2, warp_idx] = acc[r, i]
        cute.arch.sync_threads()
        place, column = tidx % UNIT_ROWS, tidx // UNIT_ROWS
        row, a_row = row_of(unit, place % BAND_GROUP, place // BAND_GROUP), lane.first_row + column
        if row < own.n and a_row < own.m:
            total = sums[place, column, 0]
            for w in cutlass.range_constexpr(1, FEW_ROWS_WARPS):
                total = total + sums[place, column, w]
            total = total * Float32(4.0**OPERAND_EXPONENT)
            bias = None
            if cutlass.const_expr(own.bias is not None):
                (bias,) = load_bias(own.bias, [row], own.n)
            if cutlass.const_expr(self.has_alpha):
                total = total * global_scalar(Float32, own.alpha)[0]
            if cutlass.const_expr(bias is not None):
                total = ptx.add_f32(total, bias.to(Float32))
            element = Int64(a_row) * own.out_row + Int64(row) * own.out_column
            out = global_scalar(self.out_dtype, own.out + element * (self.out_dtype.width // 8))
            out[0] = total.to(self.out_dtype)


def first_chunk(own: Operands, lane: Lane, num_pieces: Int32) -> Chunk:
    """Returns the first chunk of a lane's warp."""
    # Rows beyond M and N are read as the last row and dropped at the end; scales of rows beyond N are padding.
    a_row = cutlass.min(lane.first_row + lane.group, own.m - 1)
    rows = [cutlass.min(row_of(lane.unit, lane.group, band), own.n - 1) for band in range(BANDS)]
    piece = lane.warp_idx * PIECES_PER_CHUNK + lane.piece
    k_atoms = cute.ceil_div(num_pieces, PIECES_PER_ATOM)
    values, scales = Int64(piece) * PIECE_BYTES, Int64(piece // PIECES_PER_ATOM) * ATOM_BYTES
    return Chunk(
        b=[own.b + Int64(row) * own.b_pitch + values for row in rows],
        sfb=own.sfb + scales_offset(row_of(lane.unit, lane.group, 0), k_atoms) + scales,
        a=own.a + Int64(a_row) * own.a_pitch + values,
        sfa=own.sfa + scales_offset(a_row, k_atoms) + scales,
        piece=piece,
    )


def next_chunk(chunk: Chunk) -> Chunk:
    """Returns the chunk that a warp takes after this one."""
    return Chunk(
        b=[address + STEP_BYTES for address in chunk.b],
        sfb=chunk.sfb + SCALE_STEP_BYTES,
        a=chunk.a + STEP_BYTES,
        sfa=chunk.sfa + SCALE_STEP_BYTES,
        piece=chunk.piece + STEP,
    )


def copy_chunk(lane: Lane, chunk: Chunk, num_pieces: Int32, slot: Int32) -> None:
    """Starts the copy of a lane's part of a chunk, as one group; zeros are written beyond K."""
    is_inside = chunk.piece < num_pieces
    size = select(is_inside, Int32(PIECE_BYTES), Int32(0))
    entry = lane.entries + slot
    for band, source in enumerate(chunk.b):
        copy_async(entry, band * ENTRY_BYTES, source, PIECE_BYTES, size, PAST_L1)
    copy_async(entry, SFB_OFFSET, chunk.sfb, PIECE_BYTES, size, THROUGH_L1)
    copy_async(entry, A_OFFSET, chunk.a, PIECE_BYTES, size, THROUGH_L1)
    word_size = select(is_inside, Int32(SCALE_WORD_BYTES), Int32(0))
    copy_async(lane.scale_entries + slot, SFA_OFFSET, chunk.sfa, SCALE_WORD_BYTES, word_size, THROUGH_L1)
    inline_ptx("cp.async.commit_group;")


def add_chunk(acc: cute.Tensor, lane: Lane, slot: Int32, sign_bits: Uint32) -> None:
    """Adds the products of a lane's piece of the chunk in a slot."""
    entry = lane.entries + slot
    # The upper two of a word's four scales belong to odd pieces.
    shift = Uint32(lane.piece % PIECES_PER_ATOM * 16)
    (code,) = load_words(lane.scale_entries + slot + SFA_OFFSET, 1, SHARED)
    a_scales = decode_scales(code >> shift)
    a_words = load_words(entry + A_OFFSET, PIECE_WORDS, SHARED)
    b_scales = [decode_scales(code >> shift) for code in load_words(entry + SFB_OFFSET, BANDS, SHARED)]
    b_words = [load_words(entry + band * ENTRY_BYTES, PIECE_WORDS, SHARED) for band in range(BANDS)]
    for w in range(PIECE_WORDS):
        upper = w >= BLOCK_WORDS
        a_pairs = decode_word(a_words[w], a_scales, upper, sign_bits)
        b_pairs = [
            decode_word(words[w], scales, upper, sign_bits)
            for words, scales in zip(b_words, b_scales, strict=True)
        ]
        for i in range(MMA_M):
            low, high = b_pairs[2 * i : 2 * i + 2]
            for first in (0, 2):
                weights = [low[first], high[first], low[first + 1], high[first + 1]]
                products = ptx.mma_m16n8k16(
                    weights, a_pairs[first : first + 2], [acc[r, i] for r in range(4)], "f16"
                )
                for r, value in enumerate(products):
                    acc[r, i] = value


def scales_offset(row: Int32, k_atoms: Int32) -> Int64:
    """Returns the offset in bytes of the first word of a row's scales."""
    in_atom = row % BAND_ROWS * ROW_SCALES_BYTES + row % ATOM_ROWS // BAND_ROWS * SCALE_WORD_BYTES
    return Int64(row // ATOM_ROWS) * k_atoms * ATOM_BYTES + in_atom


def copy_async(address: Int32, place: int, source: Int64, nbytes: int, size: Int32, cache: str) -> None:
    """Starts a copy of ``nbytes`` to shared memory at ``address + place``; with ``size`` 0 zeros are written instead."""
    inline_ptx(
        f"cp.async.{cache}.shared.global [{{$r0}}+{place}], [{{$r1}}], {nbytes}, {{$r2}};",
        read_only_args=[address, source, size],
    )


def wait_for_copies(pending: int) -> None:
    """Waits until at most ``pending`` groups of this lane are under way; it may read the data of all others."""
    inline_ptx(f"cp.async.wait_group {pending};")
