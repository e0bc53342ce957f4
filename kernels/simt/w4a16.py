"""16-bit activations times 4- or 8-bit weights, up to 32 rows at a time: c[m, n] = alpha * sum over k of x[m, k] (B * SFB)[n, k].

x (M, K, L) fp16 or bf16, B (N, K, L) e2m1 or int4, two values per byte, or e4m3 or e5m2, both K-major; c fp16, bf16 or
fp32. SFB is in the 128x4 blocked layout, read in place: e4m3 per 16 values of K (NVFP4), ue8m0 per 32 (MX, only with
bf16), 16 or 32 bits per 32 to 128 (int4); or in rows: fp32 per 128 x 128 weights (FP8). Memory-bound: the weights are
read once per ``tokens`` rows of x, bypassing L1.

A weight times its e4m3 scale has at most 6 significant bits, so fp16 and bf16 hold it exactly. bf16 also holds a weight
times a power of two (``common.ue8m0``); 8-bit weights are exact except for values below 2^-125 (e4m3) or 2^-117 (e5m2),
which are rounded. An integer times its scale is rounded (``common.int4``). Neither type holds a weight times an fp32
scale of 128 x 128 weights, so the products of a chunk are multiplied by it, and added in fp32. Warps multiply 16 weight
rows by 8 rows of x and 16 k with ``mma.sync``, which every architecture from sm_80 on has.

Work: a CTA has 32 weight rows of one scale atom, r, r + 32, r + 64, r + 96 for eight consecutive r, whose scales for
four blocks of K are 128 consecutive bytes. Its warps, 8 or 16, take chunks of 128 values of K in turn. A lane (4 g + t) holds 32
consecutive k of the four rows with r = g. The assignment of k to MMAs is free as long as both operands agree.

Order of summation. One MMA adds 16 products to the sum in fp32, with the truncating addition of the GPU's tensor cores.
Word w = 0 ... 3 of a lane's 32 k (8 w to 8 w + 7) takes two MMAs: first the k with k % 4 < 2, then the others, of all
four t. A warp adds its chunks in ascending order, starting from 0; warps are added in ascending order. So the order of
products depends only on K and the number of warps. Then the sum is multiplied by alpha and rounded once to the output type.
With fp32 scales each chunk starts from 0, and its sum times its scale is added with one rounding.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import FP32, UE8M0, BlockFormat
from nvfp4_cute.formats.scale_layout import ATOM_BYTES
from nvfp4_cute.launch_table import W4A16
from nvfp4_cute.planning.arch.simt import UNIT_ROWS, W4A16_CHUNK_K, WARP_SIZE

from ..common import fp8, ptx, ue8m0
from ..common.bias import bias_pointer, load_bias
from ..common.e2m1 import e2m1_pairs
from ..common.global_access import KEEP, READ_ONCE, global_scalar, load_words
from ..common.int4 import Int4Decoding, codes_four_apart
from ..common.versions import SmemAllocator
from .quantize import VECTOR_WORDS
from .unit_rows import BAND_GROUP, BAND_ROWS, BANDS, num_units, row_of

# A lane's part of a chunk: 32 values of every row, eight at a time, in one or two scale blocks.
PIECE_K = 32
PIECES = W4A16_CHUNK_K // PIECE_K
GROUP_K = 8
# Rows r, r + 32, r + 64, r + 96: an MMA has 16 weight rows, two per lane.
MMA_M = 2
MMA_TOKENS = 8
SCALES_BYTES = 16
FP32_BYTES = FP32.bits // 8
# Shared memory for the sums of an SM's CTAs; the rest of the unified memory serves as L1 for activations and scales.
SMEM_CARVEOUT_PERCENT = 20


@dataclass(frozen=True)
class FloatFormat:
    """Conversion of weights to a 16-bit float.

    ``common.e2m1`` returns values times 2^(1 - bias). An e4m3 scale times 2^(bias - 8) completes that to the weight times
    2^-7, exactly in both formats and within their range.

    Attributes:
        name: name in PTX.
        scale_factor: factor of scales, except ue8m0.
        weight_factor: factor of the sums at the end.
    """

    name: str
    scale_factor: float
    weight_factor: float


FP16 = FloatFormat("f16", 2.0**7, 2.0**7)
BF16 = FloatFormat("bf16", 2.0**119, 2.0**7)
BF16_OF_UE8M0 = FloatFormat("bf16", 1.0, 2.0**ue8m0.OPERAND_EXPONENT)
# Instructions convert elements of 8 bits; 448 * 2^127 and 57344 * 2^127 over these factors are inside bf16's range.
BF16_OF_FP8 = {"e4m3": FloatFormat("bf16", 1.0, 2.0**8), "e5m2": FloatFormat("bf16", 1.0, 2.0**16)}
# Weights without a factor: integers, and e4m3 without scale (which both types hold) if sums are multiplied by scales.
AS_IT_IS = {name: FloatFormat(name, 1.0, 1.0) for name in ("f16", "bf16")}
# prmt: two pairs of the bytes in two words that are four apart.
APART = (0x5140, 0x7362)


@dataclass(frozen=True)
class W4A16Operands:
    """Operands of one batch. Addresses and byte strides are Int64, extents Int32; strides of ``out`` in elements."""

    x: Int64
    b: Int64
    sfb: Int64
    x_pitch: Int64
    b_pitch: Int64
    m: Int32
    n: Int32
    k: Int32


@dataclass(frozen=True)
class W4A16Output:
    """Destination of results; strides in elements."""

    address: Int64
    alpha: Int64
    row: Int64
    column: Int64
    bias: cute.Pointer | None = None


@dataclass(frozen=True)
class Source:
    """Addresses of a lane's data: its piece of chunk 0 of its first weight row, of the scales, and of its first row of x.

    ``row_offsets``: bytes from the first weight row to each, Int32 (``vector_checks.MAX_PITCH`` bounds them).
    """

    b: Int64
    row_offsets: list
    sfb: Int64
    x: Int64
    x_pitch: Int64
    first_token: Int32
    m: Int32
    piece: Int32
    num_pieces: Int32


class W4A16Kernel:
    """One compiled variant.

    Args:
        is_bf16: whether x is bfloat16, else float16.
        out_dtype: cutlass.Float16, BFloat16 or Float32.
        has_alpha: whether results are multiplied by a factor.
        tokens: rows of x that a CTA multiplies: a multiple of 8.
        warps: warps of a CTA.
        blocks_per_sm: CTAs per SM that the registers must allow.
        name: name of the kernel in profilers and in the emulator's reports.
        weights: format of the weights. Scales are e4m3; ue8m0 with bfloat16; fp32 per 128 x 128 e4m3; those of int4; or
            fp32 per row of INT8.
        bias_dtype: dtype of the bias that is added to the results of every weight row; None without a bias.
    """

    def __init__(
        self,
        is_bf16: bool,
        out_dtype: type,
        has_alpha: bool,
        tokens: int,
        warps: int,
        blocks_per_sm: int,
        name: str,
        weights: BlockFormat,
        bias_dtype: type | None = None,
    ):
        self.has_powers = weights.scale == UE8M0
        self.format = (BF16_OF_UE8M0 if self.has_powers else BF16) if is_bf16 else FP16
        self.weights = weights
        self.is_fp8 = weights.element.bits == 8
        self.int4 = Int4Decoding(weights, is_bf16) if weights.is_int4 else None
        # INT8: one scale per row, which multiplies sums at the end.
        self.is_1xk = weights.is_1xk
        self.promotes = weights.scale == FP32 and self.int4 is None and not self.is_1xk
        if self.promotes or self.is_1xk or self.int4 is not None:
            self.format = AS_IT_IS["bf16" if is_bf16 else "f16"]
        elif self.is_fp8:
            self.format = BF16_OF_FP8[weights.element.name]
        self.piece_words = weights.row_bytes(PIECE_K) // 4
        self.group_words = weights.row_bytes(GROUP_K) // 4
        self.block_k = weights.block_k or PIECE_K
        self.pieces_per_atom = (weights.atom_k or PIECE_K) // PIECE_K
        self.chunks_per_atom = max(self.pieces_per_atom // PIECES, 1)
        # Bytes of the scales per atom of rows and K.
        self.atom_bytes = 0 if self.is_1xk else weights.scale_bytes(weights.atom_rows, weights.atom_k)
        self.out_dtype = out_dtype
        self.has_alpha = has_alpha
        self.bias_dtype = bias_dtype
        self.tokens = tokens
        self.num_mma_n = tokens // MMA_TOKENS
        self.warps = warps
        self.blocks_per_sm = blocks_per_sm
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches weight rows along x of the grid, rows of x along y, batches along z.

        Args:
            table: Int64 in host memory: ``launch_table.W4A16``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(W4A16)))
        m, n, k = (Int32(t[column]) for column in (W4A16.M, W4A16.N, W4A16.K))
        operands = W4A16Operands(
            t[W4A16.X], t[W4A16.B], t[W4A16.SFB], t[W4A16.X_PITCH], t[W4A16.B_PITCH], m, n, k
        )
        bias = None if self.bias_dtype is None else bias_pointer(t[W4A16.BIAS], self.bias_dtype)
        output = W4A16Output(t[W4A16.OUT], t[W4A16.ALPHA], t[W4A16.OUT_ROW], t[W4A16.OUT_COLUMN], bias)
        strides = [
            t[column]
            for column in (
                W4A16.X_BATCH,
                W4A16.B_BATCH,
                W4A16.SFB_BATCH,
                W4A16.OUT_BATCH,
                W4A16.ALPHA_BATCH,
            )
        ]
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands, output, strides).launch(
            grid=(
                num_units(n),
                cute.ceil_div(m, self.tokens),
                Int32(t[W4A16.L]),
            ),
            block=(self.warps * WARP_SIZE, 1, 1),
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: W4A16Operands, output: W4A16Output, strides: list):
        """Accumulates, adds the sums of warps, and stores."""
        tidx, _, _ = cute.arch.thread_idx()
        unit, token_tile, batch = cute.arch.block_idx()
        warp_idx, lane = cute.arch.make_warp_uniform(tidx // WARP_SIZE), tidx % WARP_SIZE
        x_batch, b_batch, sfb_batch, out_batch, alpha_batch = strides
        first_token = token_tile * self.tokens

        # (ROW, TOKEN, WARP)
        sums = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((UNIT_ROWS, self.tokens, self.warps)), 16
        )
        num_pieces = operands.k // PIECE_K
        group, piece = lane // PIECES, lane % PIECES
        atoms = Int64(unit // BANDS) * cute.ceil_div(num_pieces, self.pieces_per_atom) * self.atom_bytes
        sfb = operands.sfb + batch * sfb_batch + atoms
        if cutlass.const_expr(not (self.promotes or self.is_1xk)):
            sfb += (
                row_of(unit, group, 0) % BAND_ROWS * SCALES_BYTES + piece // self.pieces_per_atom * ATOM_BYTES
            )
        # Rows beyond N are read as the last row and dropped at the end.
        rows = [cutlass.min(row_of(unit, group, band), operands.n - 1) for band in range(BANDS)]
        source = Source(
            b=operands.b
            + batch * b_batch
            + Int64(rows[0]) * operands.b_pitch
            + piece * (4 * self.piece_words),
            row_offsets=[(row - rows[0]) * Int32(operands.b_pitch) for row in rows],
            sfb=sfb,
            x=operands.x
            + batch * x_batch
            + Int64(first_token + group) * operands.x_pitch
            + piece * (2 * PIECE_K),
            x_pitch=operands.x_pitch,
            first_token=first_token + group,
            m=operands.m,
            piece=piece,
            num_pieces=num_pieces,
        )
        acc = self.accumulate(source, warp_idx)
        bias = None
        if cutlass.const_expr(output.bias is not None):
            # A thread stores results of one weight row.
            own = tidx % UNIT_ROWS
            own_row = row_of(unit, own % BAND_GROUP, own // BAND_GROUP)
            (bias,) = load_bias(output.bias, [own_row], operands.n)
        for i in cutlass.range_constexpr(MMA_M):
            for j in cutlass.range_constexpr(self.num_mma_n):
                for r in cutlass.range_constexpr(4):
                    # Registers of an MMA: row g, two columns; row g + 8, two columns.
                    row = group + BAND_GROUP * (2 * i + r // 2)
                    sums[row, j * MMA_TOKENS + 2 * piece + r % 2, warp_idx] = acc[r, i, j]
        cute.arch.sync_threads()

        alpha = Float32(1.0)
        if cutlass.const_expr(self.has_alpha):
            alpha = global_scalar(Float32, output.alpha + batch * alpha_batch)[0]
        elements, threads = UNIT_ROWS * self.tokens, self.warps * WARP_SIZE
        for step in cutlass.range_constexpr(-(-elements // threads)):
            element = step * threads + tidx
            place, token = element % UNIT_ROWS, element // UNIT_ROWS
            row = row_of(unit, place % BAND_GROUP, place // BAND_GROUP)
            # With more threads than results, some threads have a token after the tile's last one.
            held = token
            if cutlass.const_expr(elements % threads != 0):
                held = cutlass.min(token, self.tokens - 1)
            total = sums[place, held, 0]
            for w in cutlass.range_constexpr(1, self.warps):
                total = total + sums[place, held, w]
            total = total * Float32(self.format.weight_factor)
            if cutlass.const_expr(self.is_1xk):
                place_of_scale = Int64(cutlass.min(row, operands.n - 1)) * FP32_BYTES
                total = total * global_scalar(Float32, operands.sfb + batch * sfb_batch + place_of_scale)[0]
            if cutlass.const_expr(self.has_alpha):
                total = total * alpha
            if cutlass.const_expr(bias is not None):
                total = ptx.add_f32(total, bias.to(Float32))
            if token < self.tokens and row < operands.n and first_token + token < operands.m:
                index = (
                    Int64(first_token + token) * output.row + Int64(row) * output.column + batch * out_batch
                )
                out = global_scalar(self.out_dtype, output.address + index * (self.out_dtype.width // 8))
                out[0] = total.to(self.out_dtype)

    @cute.jit
    def accumulate(self, source: Source, warp_idx: Int32):
        """Returns the sums of this lane: Float32 (REGISTER, MMA_M, MMA_N)."""
        acc = cute.make_rmem_tensor((4, MMA_M, self.num_mma_n), Float32)
        acc.fill(0.0)
        # (WORD, BAND); one word per band
        weights = cute.make_rmem_tensor((self.piece_words, BANDS), Uint32)
        ahead = cute.make_rmem_tensor((self.piece_words, BANDS), Uint32)
        scales, scales_ahead = (cute.make_rmem_tensor(BANDS, Uint32) for _ in range(2))
        # (WORD OF 2, MMA_N)
        x = cute.make_rmem_tensor((PIECE_K // 2, self.num_mma_n), Uint32)
        num_chunks = cute.ceil_div(source.num_pieces, PIECES)
        steps = (self.chunks_per_atom, max(PIECES // self.pieces_per_atom, 1) * self.atom_bytes)
        num_scales = 0 if self.is_1xk else 1 if self.promotes else BANDS
        load_weights(weights, scales, source, warp_idx, steps, num_scales)
        for chunk in cutlass.range(warp_idx, num_chunks, self.warps, unroll=1):
            self.load_activations(x, source, chunk)
            load_weights(ahead, scales_ahead, source, chunk + self.warps, steps, num_scales)
            if cutlass.const_expr(self.promotes):
                products = cute.make_rmem_tensor(acc.shape, Float32)
                products.fill(0.0)
                self.multiply(products, weights, [[None]] * BANDS, x)
                scale = ptx.float_of(scales[0])
                for i in cutlass.range_constexpr(cute.size(acc)):
                    acc[i] = ptx.fma_f32(products[i], scale, acc[i])
            elif cutlass.const_expr(self.is_1xk):
                self.multiply(acc, weights, [[None]] * BANDS, x)
            else:
                self.multiply(acc, weights, self.block_scales(scales, source, chunk), x)
            for i in cutlass.range_constexpr(BANDS):
                scales[i] = scales_ahead[i]
                for w in cutlass.range_constexpr(self.piece_words):
                    weights[w, i] = ahead[w, i]
        return acc

    @cute.jit
    def load_activations(self, x: cute.Tensor, source: Source, chunk: Int32):
        """Loads the lane's 32 k of a chunk, of one row of x per MMA; zeros for missing rows and k."""
        x.fill(Uint32(0))
        is_inside = chunk * PIECES + source.piece < source.num_pieces
        for j in cutlass.range_constexpr(self.num_mma_n):
            if is_inside and source.first_token + j * MMA_TOKENS < source.m:
                address = source.x + Int64(j * MMA_TOKENS) * source.x_pitch + chunk * (2 * W4A16_CHUNK_K)
                for first in cutlass.range_constexpr(0, PIECE_K // 2, 4):
                    words = load_words(address + 4 * first, 4, KEEP)
                    for i in cutlass.range_constexpr(4):
                        x[first + i, j] = words[i]

    def block_scales(self, scales: cute.Tensor, source: Source, chunk: Int32) -> list:
        """Returns the lane's block scales of every band.

        They are pairs of 16-bit floats times ``scale_factor``. For 8-bit weights it is one float over
        ``weight_factor``; for int4 the form of ``common.int4``.
        """
        if self.int4 is not None:
            index = Uint32((chunk * PIECES + source.piece) // (self.block_k // PIECE_K))
            return [[self.int4.block_scale(scales[band], index)] for band in range(BANDS)]
        if self.is_fp8:
            shift = Uint32(source.piece * 8)
            codes = [scales[band] >> shift & Uint32(0xFF) for band in range(BANDS)]
            exponent = int(math.log2(self.format.weight_factor))
            return [[ue8m0.power_over(code, exponent)] for code in codes]
        if self.has_powers:
            selector = Uint32(ue8m0.BOTH_UPPER + source.piece * ue8m0.BOTH_UPPER_STEP)
            return [[ue8m0.powers(ptx.prmt(scales[band], Uint32(0), selector))] for band in range(BANDS)]
        shift = Uint32(source.piece % self.pieces_per_atom * 16)
        pairs = []
        for band in range(BANDS):
            low, high = ptx.unpack_f16x2(fp8.scales_to_f16x2(scales[band] >> shift))
            pairs.append(
                [ptx.pair_of(s * Float32(self.format.scale_factor), self.format.name) for s in (low, high)]
            )
        return pairs

    def multiply(self, acc: cute.Tensor, weights: cute.Tensor, scales: list, x: cute.Tensor) -> None:
        """Adds the products of a chunk."""
        for w in range(PIECE_K // GROUP_K):
            block = w * GROUP_K // self.block_k
            activations = [paired([x[4 * w + i, j] for i in range(4)]) for j in range(self.num_mma_n)]
            for i in range(MMA_M):
                low, high = (
                    self.decode(
                        [weights[w * self.group_words + j, band] for j in range(self.group_words)],
                        scales[band][block],
                    )
                    for band in (2 * i, 2 * i + 1)
                )
                for first in (0, 2):
                    a = [low[first], high[first], low[first + 1], high[first + 1]]
                    for j in range(self.num_mma_n):
                        b = activations[j][first : first + 2]
                        c = [acc[r, i, j] for r in range(4)]
                        for r, value in enumerate(ptx.mma_m16n8k16(a, b, c, self.format.name)):
                            acc[r, i, j] = value

    def decode(self, words: list, scale: Any) -> list:
        """Returns eight weights over ``weight_factor``, or without their scale, as pairs of k: (0, 4), (1, 5), (2, 6), (3, 7)."""
        if self.int4 is not None:
            return [self.int4.weights(codes, scale) for codes in codes_four_apart(*words)]
        if self.is_fp8:
            four = [ptx.prmt(*words, Uint32(selector)) for selector in APART]
            name = self.weights.element.name
            if self.is_1xk:
                halves = [half for word in four for half in ptx.s8x4_to_f16x2(word)]
            else:
                halves = [half for word in four for half in fp8.to_f16x2(word, name)]
            if self.format.name == "f16":
                return halves
            pairs = [ptx.unpack_f16x2(half) for half in halves]
            if scale is not None:
                pairs = [[ptx.mul_f32(value, scale) for value in pair] for pair in pairs]
            return [ptx.pack_16x2(*pair, True) for pair in pairs]
        pairs = e2m1_pairs(*words, self.format.name)
        if self.has_powers:
            pairs = [ue8m0.lifted(pair) for pair in pairs]
        return [ptx.mul_x2(pair, scale, self.format.name) for pair in pairs]


@cute.jit
def load_weights(
    weights: cute.Tensor,
    scales: cute.Tensor,
    source: Source,
    chunk: Int32,
    scale_steps: cutlass.Constexpr,
    num_scales: cutlass.Constexpr,
):
    """Loads a lane's piece of every row and its scale words; zeros beyond K. scale_steps: chunks, and bytes of their scales."""
    is_inside = chunk * PIECES + source.piece < source.num_pieces
    weights.fill(Uint32(0))
    scales.fill(Uint32(0))
    if is_inside:
        for band in cutlass.range_constexpr(BANDS):
            num_words = cute.size(weights) // BANDS
            address = source.b + source.row_offsets[band] + chunk * (PIECES * 4 * num_words)
            for first in cutlass.range_constexpr(0, num_words, VECTOR_WORDS):
                words = load_words(address + 4 * first, VECTOR_WORDS, READ_ONCE)
                for w in cutlass.range_constexpr(VECTOR_WORDS):
                    weights[first + w, band] = words[w]
        chunks, scale_bytes = scale_steps
        words = []
        if cutlass.const_expr(num_scales > 0):
            words = load_words(source.sfb + Int64(chunk // chunks) * scale_bytes, num_scales, KEEP)
        for i in cutlass.range_constexpr(num_scales):
            scales[i] = words[i]


def paired(words: list) -> list:
    """Returns eight values of x in four words as pairs of k: (0, 4), (1, 5), (2, 6), (3, 7)."""
    return [
        ptx.prmt(words[i], words[i + 2], Uint32(selector)) for i in range(2) for selector in (0x5410, 0x7632)
    ]
