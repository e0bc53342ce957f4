"""Batched NVFP4 matrix times vector, on CUDA cores: c[m, l] = alpha[l] * sum over k of (A * SFA)[m, k, l] (b * SFB)[k, l].

A (M, K, L) and b (K, L) e2m1, two values a byte, K-major; SFA, SFB e4m3 in the 128x4 blocked layout, read in place; c
fp16, bf16 or fp32. Memory-bound: A is read once, 16 bytes a lane and 512 contiguous bytes a row, past L1.

Work: a warp has 8 rows of one scale atom: r, r + 32, r + 64, r + 96 and their successors with r = 2 u (u: the unit in the
atom, 0 to 15), whose scales for 64 values of K are 32 consecutive bytes. The lanes lie side by side along K, one piece of
32 values each, so one step of a warp covers 1024. Two warps take a row's steps in turn; a CTA has two such pairs.

Registers roll: as soon as a piece of a row is used, the load of the next step's is issued into its registers.

Order of summation. The dot product of a block of 16 is exact (``block_dot``), and so is its product with the two
scales: 12 + 8 bits in fp32. So every block costs one rounding, that of its addition. A lane adds its blocks in
ascending k, starting from 0; lanes are added by distance 16, 8, 4, 2, 1; warps in ascending order. Which lane and warp has
a block depends on k alone. Then times alpha, then one rounding to the output type.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from nvfp4_cute.arch.simt import (
    GEMV_LANES_K,
    GEMV_PIECE_K,
    GEMV_ROWS_PER_WARP,
    GEMV_WARPS,
    GEMV_WARPS_K,
    WARP_SIZE,
)
from nvfp4_cute.launch_table import Gemv
from nvfp4_cute.scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, SF_VEC_SIZE

from ..common import ptx
from ..common.global_access import KEEP, READ_ONCE, global_scalar, load_words
from ..common.select import select
from .block_dot import WORDS_PER_BLOCK, ByteDot, HalfDot

PIECE_BYTES = GEMV_PIECE_K // 2
PIECE_WORDS = PIECE_BYTES // 4
BLOCKS_PER_PIECE = GEMV_PIECE_K // SF_VEC_SIZE
PIECES_PER_ATOM = ATOM_COLS // BLOCKS_PER_PIECE
UNITS_PER_ATOM = ATOM_ROWS // GEMV_ROWS_PER_WARP
UNITS_PER_CTA = GEMV_WARPS // GEMV_WARPS_K
# Lanes that hold a row's sum, when lanes are added up.
LANES_PER_SUM = WARP_SIZE // GEMV_ROWS_PER_WARP
# Scale words of rows 32 apart follow each other.
ROWS_PER_SCALES = 4
SCALES_BYTES = 4 * ROWS_PER_SCALES
# 1 / 4 in two halves: the block dot products come out times 4.
QUARTER_F16X2 = 0x34003400
# Nearly all of the unified memory serves as L1, where the vector and its scales stay.
SMEM_CARVEOUT_PERCENT = 5


@dataclass(frozen=True)
class GemvOperands:
    """What one batch reads and writes. Addresses and byte strides Int64, extents Uint32; ``out_pitch`` in elements."""

    a: Int64
    b: Int64
    sfa: Int64
    sfb: Int64
    out: Int64
    alpha: Int64
    a_pitch: Int64
    out_pitch: Int64
    m: Uint32
    k: Uint32


@dataclass(frozen=True)
class GemvSource:
    """Where a lane reads: addresses of K = 0 of its first row, the vector, and the scales of both.

    ``row_offsets``: bytes from the first row to each, Int32 (``vector_checks.MAX_PITCH`` bounds them).
    """

    a: Int64
    row_offsets: list
    b: Int64
    sfa: Int64
    sfb: Int64
    scale_shift: Uint32


@dataclass(frozen=True)
class GemvStage:
    """Registers of one piece, Uint32: a (WORD, ROW), sfa (ROW), b (WORD), sfb (1)."""

    a: cute.Tensor
    sfa: cute.Tensor
    b: cute.Tensor
    sfb: cute.Tensor


class GemvKernel:
    """One compiled variant.

    Args:
        out_dtype: cutlass.Float16, BFloat16 or Float32.
        has_alpha: whether results are multiplied by a factor.
        has_fp4_convert: whether e2m1 conversions are instructions.
        blocks_per_sm: CTAs of an SM that the registers must allow.
        name: what the kernel is called in profilers and in the emulator's reports.
    """

    def __init__(
        self, out_dtype: type, has_alpha: bool, has_fp4_convert: bool, blocks_per_sm: int, name: str
    ):
        self.out_dtype = out_dtype
        self.has_alpha = has_alpha
        self.dot = HalfDot if has_fp4_convert else ByteDot
        self.blocks_per_sm = blocks_per_sm
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, queue):
        """Launch: ``UNITS_PER_CTA`` work units a CTA, batches along y.

        Args:
            table: Int64 in host memory: ``launch_table.Gemv``.
            queue: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(Gemv)))
        # Unsigned, as all indices are: what is divided by powers of two is shifted then.
        m, k = Uint32(t[Gemv.M]), Uint32(t[Gemv.K])
        operands = GemvOperands(
            a=t[Gemv.A],
            b=t[Gemv.B],
            sfa=t[Gemv.SFA],
            sfb=t[Gemv.SFB],
            out=t[Gemv.OUT],
            alpha=t[Gemv.ALPHA],
            a_pitch=t[Gemv.A_PITCH],
            out_pitch=t[Gemv.OUT_PITCH],
            m=m,
            k=k,
        )
        strides = [
            t[column]
            for column in (
                Gemv.A_BATCH,
                Gemv.B_BATCH,
                Gemv.SFA_BATCH,
                Gemv.SFB_BATCH,
                Gemv.OUT_BATCH,
                Gemv.ALPHA_BATCH,
            )
        ]
        units = cute.ceil_div(m, ATOM_ROWS) * UNITS_PER_ATOM
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands, strides).launch(
            grid=(Int32(cute.ceil_div(units, UNITS_PER_CTA)), Int32(t[Gemv.L]), 1),
            block=(GEMV_WARPS * WARP_SIZE, 1, 1),
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            stream=queue,
        )

    @cute.kernel
    def kernel(self, operands: GemvOperands, strides: list):
        """Accumulate, add up lanes, then warps, and store."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, batch, _ = cute.arch.block_idx()
        tidx, block_idx = Uint32(tidx), Uint32(block_idx)
        warp_idx, lane = cute.arch.make_warp_uniform(tidx // WARP_SIZE), tidx % WARP_SIZE
        unit = block_idx * UNITS_PER_CTA + warp_idx // GEMV_WARPS_K
        a_batch, b_batch, sfa_batch, sfb_batch, out_batch, alpha_batch = strides

        # (WARP, ROW)
        sums = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((GEMV_WARPS, GEMV_ROWS_PER_WARP), stride=(GEMV_ROWS_PER_WARP, 1)), 16
        )
        own = replace(
            operands,
            a=operands.a + batch * a_batch,
            b=operands.b + batch * b_batch,
            sfa=operands.sfa + batch * sfa_batch,
            sfb=operands.sfb + batch * sfb_batch,
        )
        acc = self.accumulate(make_source(own, unit, lane), operands.k, warp_idx % GEMV_WARPS_K, lane)
        total = add_lanes([acc[i] for i in range(GEMV_ROWS_PER_WARP)], lane)
        if lane % LANES_PER_SUM == 0:
            sums[warp_idx, lane // LANES_PER_SUM] = total
        cute.arch.sync_threads()

        if tidx < UNITS_PER_CTA * GEMV_ROWS_PER_WARP:
            first_warp = tidx // GEMV_ROWS_PER_WARP * GEMV_WARPS_K
            place = tidx % GEMV_ROWS_PER_WARP
            total = sums[first_warp, place]
            for w in cutlass.range_constexpr(1, GEMV_WARPS_K):
                total = total + sums[first_warp + w, place]
            row = row_of(block_idx * UNITS_PER_CTA + tidx // GEMV_ROWS_PER_WARP, place)
            if row < operands.m:
                if cutlass.const_expr(self.has_alpha):
                    total = total * global_scalar(Float32, operands.alpha + batch * alpha_batch)[0]
                element = Int64(row) * operands.out_pitch + batch * out_batch
                out = global_scalar(self.out_dtype, operands.out + element * (self.out_dtype.width // 8))
                out[0] = total.to(self.out_dtype)

    @cute.jit
    def accumulate(self, source: GemvSource, k: Uint32, k_warp: Uint32, lane: Uint32):
        """What this lane adds up for each of its rows: Float32 (ROW)."""
        # K is a multiple of 16, which the compiler does not know.
        dot = self.dot.make(k * lane % SF_VEC_SIZE)
        acc = cute.make_rmem_tensor(GEMV_ROWS_PER_WARP, Float32)
        acc.fill(0.0)
        num_pieces, stride = k // GEMV_PIECE_K, GEMV_LANES_K * GEMV_WARPS_K
        first = lane + GEMV_LANES_K * k_warp
        stage = make_stage()
        load_vector(stage, source, first, first < num_pieces)
        for i in cutlass.range_constexpr(GEMV_ROWS_PER_WARP):
            load_row(stage, source, i, first, first < num_pieces)
        for half in cutlass.range_constexpr(GEMV_ROWS_PER_WARP // ROWS_PER_SCALES):
            load_scales(stage, source, half, first, first < num_pieces)
        for piece in cutlass.range(first, num_pieces, stride, unroll=1):
            add_piece(dot, acc, stage, source, piece + stride, num_pieces)
        # K % 32 == 16 leaves one block, to the lane whose turn it is.
        if k % GEMV_PIECE_K != 0 and first == num_pieces % stride:
            add_last_block(dot, acc, source, num_pieces)
        return acc


def add_piece(
    dot: HalfDot | ByteDot,
    acc: cute.Tensor,
    stage: GemvStage,
    source: GemvSource,
    ahead: Uint32,
    num_pieces: Uint32,
):
    """Add the two blocks of a piece to every row, and load piece ``ahead`` in their place."""
    valid = ahead < num_pieces
    vector = [word for w in range(PIECE_WORDS) for word in dot.decode_vector(stage.b[w])]
    scale_b = quarter_scales(stage.sfb[0] >> source.scale_shift)
    load_vector(stage, source, ahead, valid)
    half = len(vector) // BLOCKS_PER_PIECE
    for i in range(GEMV_ROWS_PER_WARP):
        words = [stage.a[w, i] for w in range(PIECE_WORDS)]
        factors = scale_products(stage.sfa[i] >> source.scale_shift, scale_b)
        for block in range(BLOCKS_PER_PIECE):
            packed = words[WORDS_PER_BLOCK * block : WORDS_PER_BLOCK * (block + 1)]
            product = dot.block(packed, vector[half * block : half * (block + 1)])
            acc[i] = ptx.fma_f32(product, factors[block], acc[i])
        load_row(stage, source, i, ahead, valid)
        if i % ROWS_PER_SCALES == ROWS_PER_SCALES - 1:
            load_scales(stage, source, i // ROWS_PER_SCALES, ahead, valid)


def add_last_block(dot: HalfDot | ByteDot, acc: cute.Tensor, source: GemvSource, piece: Uint32):
    """Add the first block of ``piece``, 8 bytes a row."""
    offset, atom = piece * PIECE_BYTES, piece // PIECES_PER_ATOM * ATOM_BYTES
    packed = load_words(source.b + offset, WORDS_PER_BLOCK, KEEP)
    vector = [word for w in packed for word in dot.decode_vector(w)]
    scale_b = quarter_scales(load_words(source.sfb + atom, 1, KEEP)[0] >> source.scale_shift)
    scales_a = scale_words(source, 0, piece) + scale_words(source, 1, piece)
    for i in range(GEMV_ROWS_PER_WARP):
        packed = load_words(source.a + source.row_offsets[i] + offset, WORDS_PER_BLOCK, KEEP)
        factor = scale_products(scales_a[i] >> source.scale_shift, scale_b)[0]
        acc[i] = ptx.fma_f32(dot.block(packed, vector), factor, acc[i])


def add_lanes(values: list, lane: Uint32) -> Float32:
    """Sums of ``values`` over the lanes of a warp: lane ``LANES_PER_SUM * i`` gets that of value i.

    At every distance half of the values move: a lane keeps those that its own half of lanes goes on with.
    """
    distance = WARP_SIZE // 2
    while len(values) > 1:
        half = len(values) // 2
        is_upper = lane & distance != 0
        values = [
            select(is_upper, upper, lower)
            + cute.arch.shuffle_sync_bfly(select(is_upper, lower, upper), offset=distance)
            for lower, upper in zip(values[:half], values[half:], strict=True)
        ]
        distance //= 2
    (total,) = values
    while distance:
        total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
        distance //= 2
    return total


def make_source(operands: GemvOperands, unit: Uint32, lane: Uint32) -> GemvSource:
    """What a lane of work unit ``unit`` reads."""
    atoms = Int64(unit // UNITS_PER_ATOM) * cute.ceil_div(operands.k, PIECES_PER_ATOM * GEMV_PIECE_K)
    first_row = clamped_row(operands, unit, 0)
    return GemvSource(
        a=operands.a + Int64(first_row) * operands.a_pitch,
        row_offsets=[
            (clamped_row(operands, unit, i) - first_row) * Uint32(operands.a_pitch)
            for i in range(GEMV_ROWS_PER_WARP)
        ],
        b=operands.b,
        sfa=operands.sfa + atoms * ATOM_BYTES + row_of(unit, 0) % 32 * SCALES_BYTES,
        sfb=operands.sfb,
        # Which half of a scale word is a lane's own: the same for all of its pieces.
        scale_shift=Uint32(lane % PIECES_PER_ATOM * BLOCKS_PER_PIECE * 8),
    )


def clamped_row(operands: GemvOperands, unit: Uint32, place: int) -> Uint32:
    """The row to read: rows beyond M are read as the last one, and dropped in the end; their scales are padding."""
    return cutlass.min(row_of(unit, place), operands.m - 1)


def row_of(unit: Uint32, place) -> Uint32:
    """Row of A that is number ``place`` of the eight of a work unit: two neighbours, each with those 32, 64, 96 below."""
    first = unit // UNITS_PER_ATOM * ATOM_ROWS + unit % UNITS_PER_ATOM * 2
    return first + place // ROWS_PER_SCALES + place % ROWS_PER_SCALES * 32


def make_stage() -> GemvStage:
    """Registers of one stage."""
    return GemvStage(
        a=cute.make_rmem_tensor((PIECE_WORDS, GEMV_ROWS_PER_WARP), Uint32),
        sfa=cute.make_rmem_tensor(GEMV_ROWS_PER_WARP, Uint32),
        b=cute.make_rmem_tensor(PIECE_WORDS, Uint32),
        sfb=cute.make_rmem_tensor(1, Uint32),
    )


def load_row(stage: GemvStage, source: GemvSource, i: int, piece: Uint32, valid) -> None:
    """A lane's piece of row ``i``."""
    for w, word in enumerate(
        load_words(source.a + source.row_offsets[i] + piece * PIECE_BYTES, PIECE_WORDS, READ_ONCE, valid)
    ):
        stage.a[w, i] = word


def load_scales(stage: GemvStage, source: GemvSource, half: int, piece: Uint32, valid) -> None:
    """The scale words of four rows; two lanes read the same."""
    for i, word in enumerate(scale_words(source, half, piece, valid)):
        stage.sfa[ROWS_PER_SCALES * half + i] = word


def scale_words(source: GemvSource, half: int, piece: Uint32, valid=None) -> list:
    """The words that hold a piece's scales of the first or the second four rows."""
    address = source.sfa + piece // PIECES_PER_ATOM * ATOM_BYTES + half * SCALES_BYTES
    return load_words(address, ROWS_PER_SCALES, KEEP, valid)


def load_vector(stage: GemvStage, source: GemvSource, piece: Uint32, valid) -> None:
    """A piece of the vector and its scale word: row 0 of the only atom along N."""
    for w, word in enumerate(load_words(source.b + piece * PIECE_BYTES, PIECE_WORDS, KEEP, valid)):
        stage.b[w] = word
    stage.sfb[0] = load_words(source.sfb + piece // PIECES_PER_ATOM * ATOM_BYTES, 1, KEEP, valid)[0]


def quarter_scales(half_word: Uint32) -> Uint32:
    """The two block scales in the low half of a word, divided by 4, as two halves."""
    return ptx.scale_f16x2(ptx.ue4m3x2_to_f16x2(half_word), QUARTER_F16X2)


def scale_products(half_word: Uint32, quarter_scale_b: Uint32) -> list:
    """The two products of block scales, divided by 4, as fp32. Exact: multiples of 2^-20 of at most 8 bits up to 50176
    are fp16 numbers."""
    return list(ptx.unpack_f16x2(ptx.mul_f16x2(ptx.ue4m3x2_to_f16x2(half_word), quarter_scale_b)))
