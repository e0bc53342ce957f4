"""Batched NVFP4 matrix times vector, on CUDA cores: c[m, l] = alpha[l] * sum over k of (A * SFA)[m, k, l] (b * SFB)[k, l].

A (M, K, L) and b (K, L) e2m1, two values per byte, K-major; SFA, SFB e4m3 in the 128x4 blocked layout, read in place; c
fp16, bf16 or fp32. Memory-bound: A is read once, bypassing L1, 16 bytes per lane and 512 contiguous bytes per row.

Work: a unit has rows of one scale atom: r, r + 32, r + 64, r + 96, whose scales for 64 values of K are 16 consecutive
bytes, or these and their successors (``planning.arch.simt.GemvSpread``). The lanes of a warp are adjacent along K with
one piece of 32 values each, so one step of a warp covers 1024. Two warps take a unit's steps in turn; a CTA has two
such pairs.

Registers roll: as soon as a piece of a row has been used, the load for the next step is issued into its registers. If
CTAs are persistent, the step after a unit's last is the first of the CTA's next unit, so memory is read while the sums
of lanes are added.

Order of summation. The dot product of a block of 16 is exact (``block_dot``), and so is its product with the two
scales: 12 + 8 bits in fp32. So every block costs one rounding, that of its addition. A lane adds its blocks in
ascending k, starting from 0; lanes are added by distance 16, 8, 4, 2, 1; warps in ascending order. The lane and warp of
a block depend only on k. Then the sum is multiplied by alpha and rounded once to the output type.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from nvfp4_cute.formats.scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, SF_VEC_SIZE
from nvfp4_cute.launch_table import Gemv, GemvBias
from nvfp4_cute.planning.arch.simt import (
    GEMV_LANES_K,
    GEMV_PIECE_K,
    GEMV_WARPS,
    GEMV_WARPS_K,
    WARP_SIZE,
    GemvSpread,
)

from ..common import ptx
from ..common.bias import bias_pointer, load_bias
from ..common.global_access import KEEP, READ_ONCE, global_scalar, load_words
from ..common.select import select
from ..common.versions import SmemAllocator
from .block_dot import WORDS_PER_BLOCK, ByteDot, HalfDot

PIECE_BYTES = GEMV_PIECE_K // 2
PIECE_WORDS = PIECE_BYTES // 4
BLOCKS_PER_PIECE = GEMV_PIECE_K // SF_VEC_SIZE
PIECES_PER_ATOM = ATOM_COLS // BLOCKS_PER_PIECE
UNITS_PER_CTA = GEMV_WARPS // GEMV_WARPS_K
# Scale words of rows 32 apart follow each other.
ROWS_PER_SCALES = 4
SCALES_BYTES = 4 * ROWS_PER_SCALES
# 1 / 4 in two halves: block dot products are 4 times too large.
QUARTER_F16X2 = 0x34003400
# Nearly all of the unified memory serves as L1, for the vector and its scales.
SMEM_CARVEOUT_PERCENT = 5


@dataclass(frozen=True)
class GemvOperands:
    """Operands of one batch. Addresses and byte strides are Int64, extents Uint32; ``out_pitch`` in elements."""

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
    bias: cute.Pointer | None = None


@dataclass(frozen=True)
class GemvRows:
    """Addresses of a lane's data in a unit: of K = 0 of the first row, and of the scales.

    ``offsets``: bytes from the first row to each, Uint32 (``vector_checks.MAX_PITCH`` bounds them).
    """

    a: Int64
    offsets: list
    sfa: Int64


@dataclass(frozen=True)
class GemvLane:
    """Constants of a lane for every unit.

    ``first``: its first piece. ``scale_shift``: its half of a scale word, equal for all of its pieces.
    """

    dot: HalfDot | ByteDot
    first: Uint32
    num_pieces: Uint32
    scale_shift: Uint32


@dataclass(frozen=True)
class GemvWalk:
    """A tile, the CTA's next tile, and whether that exists."""

    tile: Int32
    next_tile: Int32
    has_next: cutlass.Boolean


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
        bias_dtype: dtype of the bias that is added to every row's result; None without a bias.
        has_fp4_convert: whether e2m1 conversions are instructions.
        spread: rows per unit, and CTAs.
        name: name of the kernel in profilers and in the emulator's reports.
    """

    def __init__(
        self,
        out_dtype: type,
        has_alpha: bool,
        has_fp4_convert: bool,
        spread: GemvSpread,
        name: str,
        bias_dtype: type | None = None,
    ):
        self.out_dtype = out_dtype
        self.has_alpha = has_alpha
        self.bias_dtype = bias_dtype
        self.dot = HalfDot if has_fp4_convert else ByteDot
        self.spread = spread
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches ``UNITS_PER_CTA`` work units per CTA at a time, batches along y.

        Args:
            table: Int64 in host memory: ``launch_table.Gemv``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(Gemv)))
        # Unsigned like all indices, so that divisions by powers of two become shifts.
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
            bias=None if self.bias_dtype is None else bias_pointer(t[GemvBias.BIAS], self.bias_dtype),
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
        num_tiles = Int32(cute.ceil_div(m, ATOM_ROWS)) * (ATOM_ROWS // self.spread.rows // UNITS_PER_CTA)
        num_cta, batches = num_tiles, Int32(t[Gemv.L])
        if cutlass.const_expr(self.spread.is_persistent):
            resident = Int32(t[Gemv.NUM_SMS]) * self.spread.ctas_per_sm // batches
            num_cta = cutlass.min(num_cta, cutlass.max(resident, 1))
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands, strides, num_tiles).launch(
            grid=(num_cta, batches, 1),
            block=(GEMV_WARPS * WARP_SIZE, 1, 1),
            min_blocks_per_mp=self.spread.ctas_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: GemvOperands, strides: list, num_tiles: Int32):
        """Loads the first pieces of a CTA's first tile, then computes its tiles."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, batch, _ = cute.arch.block_idx()
        num_cta, _, _ = cute.arch.grid_dim()
        tidx = Uint32(tidx)
        warp_idx, lane_idx = cute.arch.make_warp_uniform(tidx // WARP_SIZE), tidx % WARP_SIZE
        a_batch, b_batch, sfa_batch, sfb_batch, out_batch, alpha_batch = strides
        count = self.spread.rows
        own = replace(
            operands,
            a=operands.a + batch * a_batch,
            b=operands.b + batch * b_batch,
            sfa=operands.sfa + batch * sfa_batch,
            sfb=operands.sfb + batch * sfb_batch,
            out=operands.out + batch * out_batch * (self.out_dtype.width // 8),
            alpha=operands.alpha + batch * alpha_batch,
        )
        lane = GemvLane(
            # K is a multiple of 16, but the compiler does not know it.
            dot=self.dot.make(operands.k * lane_idx % SF_VEC_SIZE),
            first=lane_idx + GEMV_LANES_K * (warp_idx % GEMV_WARPS_K),
            num_pieces=operands.k // GEMV_PIECE_K,
            scale_shift=Uint32(lane_idx % PIECES_PER_ATOM * BLOCKS_PER_PIECE * 8),
        )
        stage = make_stage(count)
        # (PARITY, WARP, ROW): sums of a tile are read while those of the next one are written.
        sums = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((2, GEMV_WARPS, count), stride=(GEMV_WARPS * count, count, 1)), 16
        )
        rows = make_rows(own, unit_of(block_idx, warp_idx // GEMV_WARPS_K), count)
        load_stage(stage, own, rows, lane)
        if cutlass.const_expr(self.spread.is_persistent):
            parity = Uint32(0)
            for tile in cutlass.range(block_idx, num_tiles, num_cta, unroll=1):
                walk = GemvWalk(tile, tile + num_cta, tile + num_cta < num_tiles)
                rows = self.multiply(stage, own, rows, lane, walk, sums[parity, None, None])
                parity = 1 - parity
        else:
            walk = GemvWalk(block_idx, block_idx, cutlass.Boolean(False))
            self.multiply(stage, own, rows, lane, walk, sums[0, None, None])

    @cute.jit
    def multiply(
        self,
        stage: GemvStage,
        own: GemvOperands,
        rows: GemvRows,
        lane: GemvLane,
        walk: GemvWalk,
        sums: cute.Tensor,
    ):
        """Computes a tile: accumulates, adds the sums of lanes, then of warps, and stores.

        ``rows``: addresses of a unit, whose first piece is being loaded. Returns those of the next tile, whose first
        piece is being loaded.
        ``sums``: (WARP, ROW).
        """
        tidx, _, _ = cute.arch.thread_idx()
        tidx = Uint32(tidx)
        warp_idx, lane_idx = tidx // WARP_SIZE, tidx % WARP_SIZE
        count = self.spread.rows
        lanes_per_row, stride = WARP_SIZE // count, GEMV_LANES_K * GEMV_WARPS_K
        pair = warp_idx // GEMV_WARPS_K
        acc = cute.make_rmem_tensor(count, Float32)
        acc.fill(0.0)
        for piece in cutlass.range(lane.first, lane.num_pieces, stride, unroll=1):
            ahead = Uint32(piece) + stride
            valid = ahead < lane.num_pieces
            if cutlass.const_expr(self.spread.is_persistent):
                if ahead >= lane.num_pieces:
                    rows = make_rows(own, unit_of(walk.next_tile, pair), count)
                    ahead, valid = lane.first, walk.has_next
            add_piece(acc, stage, own, rows, lane, ahead, valid)
        # K % 32 == 16 leaves one block, for the next lane in order.
        if own.k % GEMV_PIECE_K != 0 and lane.first == lane.num_pieces % stride:
            last = rows
            if cutlass.const_expr(self.spread.is_persistent):
                last = make_rows(own, unit_of(walk.tile, pair), count)
            add_last_block(acc, own, last, lane)

        total = add_lanes([acc[i] for i in range(count)], lane_idx)
        if lane_idx % lanes_per_row == 0:
            sums[warp_idx, lane_idx // lanes_per_row] = total
        cute.arch.sync_threads()
        if tidx < UNITS_PER_CTA * count:
            first_warp, place = tidx // count * GEMV_WARPS_K, tidx % count
            total = sums[first_warp, place]
            for w in cutlass.range_constexpr(1, GEMV_WARPS_K):
                total = total + sums[first_warp + w, place]
            row = row_of(unit_of(walk.tile, tidx // count), place, count)
            if row < own.m:
                bias = None
                if cutlass.const_expr(own.bias is not None):
                    (bias,) = load_bias(own.bias, [Int32(row)], Int32(own.m))
                if cutlass.const_expr(self.has_alpha):
                    total = total * global_scalar(Float32, own.alpha)[0]
                if cutlass.const_expr(bias is not None):
                    total = ptx.add_f32(total, bias.to(Float32))
                element = Int64(row) * own.out_pitch
                out = global_scalar(self.out_dtype, own.out + element * (self.out_dtype.width // 8))
                out[0] = total.to(self.out_dtype)
        return rows


def add_piece(
    acc: cute.Tensor,
    stage: GemvStage,
    own: GemvOperands,
    rows: GemvRows,
    lane: GemvLane,
    ahead: Uint32,
    valid,
):
    """Adds the two blocks of a piece to every row, and loads piece ``ahead`` of ``rows`` in their place if ``valid``."""
    vector = [word for w in range(PIECE_WORDS) for word in lane.dot.decode_vector(stage.b[w])]
    scale_b = quarter_scales(stage.sfb[0] >> lane.scale_shift)
    load_vector(stage, own, ahead, valid)
    half = len(vector) // BLOCKS_PER_PIECE
    for i in range(len(rows.offsets)):
        words = [stage.a[w, i] for w in range(PIECE_WORDS)]
        factors = scale_products(stage.sfa[i] >> lane.scale_shift, scale_b)
        for block in range(BLOCKS_PER_PIECE):
            packed = words[WORDS_PER_BLOCK * block : WORDS_PER_BLOCK * (block + 1)]
            product = lane.dot.block(packed, vector[half * block : half * (block + 1)])
            acc[i] = ptx.fma_f32(product, factors[block], acc[i])
        load_row(stage, rows, i, ahead, valid)
        if i % ROWS_PER_SCALES == ROWS_PER_SCALES - 1:
            load_scales(stage, rows, i // ROWS_PER_SCALES, ahead, valid)


def add_last_block(acc: cute.Tensor, own: GemvOperands, rows: GemvRows, lane: GemvLane):
    """Adds the first block of the piece after the last full one, 8 bytes per row."""
    piece = lane.num_pieces
    offset, atom = piece * PIECE_BYTES, piece // PIECES_PER_ATOM * ATOM_BYTES
    packed = load_words(own.b + offset, WORDS_PER_BLOCK, KEEP)
    vector = [word for w in packed for word in lane.dot.decode_vector(w)]
    scale_b = quarter_scales(load_words(own.sfb + atom, 1, KEEP)[0] >> lane.scale_shift)
    halves = range(len(rows.offsets) // ROWS_PER_SCALES)
    scales_a = [word for half in halves for word in scale_words(rows, half, piece)]
    for i, row_offset in enumerate(rows.offsets):
        packed = load_words(rows.a + row_offset + offset, WORDS_PER_BLOCK, KEEP)
        factor = scale_products(scales_a[i] >> lane.scale_shift, scale_b)[0]
        acc[i] = ptx.fma_f32(lane.dot.block(packed, vector), factor, acc[i])


def add_lanes(values: list, lane: Uint32) -> Float32:
    """Sums ``values`` over the lanes of a warp. Lanes receive the sums in order: of four, lane 8 i gets that of value i.

    At every distance half of the values move; a lane keeps those of its own half.
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


def make_rows(own: GemvOperands, unit: Uint32, count: int) -> GemvRows:
    """Returns the addresses of unit ``unit``."""
    atoms = Int64(unit // (ATOM_ROWS // count)) * cute.ceil_div(own.k, PIECES_PER_ATOM * GEMV_PIECE_K)
    # Rows beyond M are read as the last row and dropped at the end; their scales are padding.
    indices = [cutlass.min(row_of(unit, i, count), own.m - 1) for i in range(count)]
    return GemvRows(
        a=own.a + Int64(indices[0]) * own.a_pitch,
        offsets=[(index - indices[0]) * Uint32(own.a_pitch) for index in indices],
        sfa=own.sfa + atoms * ATOM_BYTES + row_of(unit, 0, count) % 32 * SCALES_BYTES,
    )


def unit_of(tile: Int32, pair: Uint32) -> Uint32:
    """Returns the unit of a pair of warps."""
    return Uint32(tile) * UNITS_PER_CTA + pair


def row_of(unit: Uint32, place, count: int) -> Uint32:
    """Returns row ``place`` of the ``count`` rows of a unit: neighbours, each with those 32, 64, 96 below."""
    units_per_atom = ATOM_ROWS // count
    first = unit // units_per_atom * ATOM_ROWS + unit % units_per_atom * (count // ROWS_PER_SCALES)
    return first + place // ROWS_PER_SCALES + place % ROWS_PER_SCALES * 32


def make_stage(count: int) -> GemvStage:
    """Returns registers for one piece of ``count`` rows."""
    return GemvStage(
        a=cute.make_rmem_tensor((PIECE_WORDS, count), Uint32),
        sfa=cute.make_rmem_tensor(count, Uint32),
        b=cute.make_rmem_tensor(PIECE_WORDS, Uint32),
        sfb=cute.make_rmem_tensor(1, Uint32),
    )


def load_stage(stage: GemvStage, own: GemvOperands, rows: GemvRows, lane: GemvLane) -> None:
    """Loads a lane's first piece, if it has one."""
    valid = lane.first < lane.num_pieces
    load_vector(stage, own, lane.first, valid)
    for half in range(len(rows.offsets) // ROWS_PER_SCALES):
        load_scales(stage, rows, half, lane.first, valid)
    for i in range(len(rows.offsets)):
        load_row(stage, rows, i, lane.first, valid)


def load_row(stage: GemvStage, rows: GemvRows, i: int, piece: Uint32, valid) -> None:
    """Loads a lane's piece of row ``i``."""
    address = rows.a + rows.offsets[i] + piece * PIECE_BYTES
    for w, word in enumerate(load_words(address, PIECE_WORDS, READ_ONCE, valid)):
        stage.a[w, i] = word


def load_scales(stage: GemvStage, rows: GemvRows, half: int, piece: Uint32, valid) -> None:
    """Loads the scale words of four rows; two lanes read each word."""
    for i, word in enumerate(scale_words(rows, half, piece, valid)):
        stage.sfa[ROWS_PER_SCALES * half + i] = word


def scale_words(rows: GemvRows, half: int, piece: Uint32, valid=None) -> list:
    """Returns the words with a piece's scales of the first or the second four rows."""
    address = rows.sfa + piece // PIECES_PER_ATOM * ATOM_BYTES + half * SCALES_BYTES
    return load_words(address, ROWS_PER_SCALES, KEEP, valid)


def load_vector(stage: GemvStage, own: GemvOperands, piece: Uint32, valid) -> None:
    """Loads a piece of the vector and its scale word: row 0 of the only atom along N."""
    for w, word in enumerate(load_words(own.b + piece * PIECE_BYTES, PIECE_WORDS, KEEP, valid)):
        stage.b[w] = word
    stage.sfb[0] = load_words(own.sfb + piece // PIECES_PER_ATOM * ATOM_BYTES, 1, KEEP, valid)[0]


def quarter_scales(half_word: Uint32) -> Uint32:
    """Returns the two block scales in the low half of a word, divided by 4, as two halves."""
    return ptx.scale_x2(ptx.ue4m3x2_to_f16x2(half_word), QUARTER_F16X2, "f16")


def scale_products(half_word: Uint32, quarter_scale_b: Uint32) -> list:
    """Returns the two products of block scales, divided by 4, as fp32.

    They are exact: multiples of 2^-20 of at most 8 bits up to 50176 are fp16 numbers.
    """
    return list(ptx.unpack_f16x2(ptx.mul_f16x2(ptx.ue4m3x2_to_f16x2(half_word), quarter_scale_b)))
