"""MATH role: two warpgroups that decode weights into registers, multiply them with the tokens, and store the result.

Each warpgroup has 64 rows of weights as MMA-M and all tokens of the tile as MMA-N: the result is C transposed. The
fp16 weights of half a K tile (a slab) fill 16 registers; two sets alternate, so that one is decoded while the other multiplies.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ..common.group_table import GroupTable, locate_tile
from ..common.output_table import OutputTable
from ..common.ring import CONSUMER_PHASE, Ring, arrive_warp, next_stage
from .activations import SLAB_ROW_BYTES, SLABS
from .decode import decode_scales, decode_word
from .epilogue import store_tile
from .operands import (
    ROW_BYTES,
    SF_BLOCK_WORDS,
    chunk_address,
    load_shared,
    scale_word_address,
    tokens_of_tile,
)
from .warp_schedule import GROUP_THREADS, WARP_SIZE

MMA_M = 64
MMA_K = 16
# MMAs along K in a slab of 64 values.
SLAB_STEPS = 4
# Loops are generated for multiples of this many tokens, from two of them up to the tile's own number: a tile at the end
# of its group takes less time.
TOKEN_STEP = 32


@dataclass(frozen=True)
class MathArgs:
    """What the warpgroups read.

    Attributes:
        b_address, sfb_address: shared addresses of the packed weights and of their scales, stage 0.
        decoded_ptr: fp16 tokens in shared memory, swizzled as wgmma reads them: ``decoded_tensor``.
        staging_address: shared address where results are turned, ``epilogue.STAGING_BYTES`` a warpgroup.
    """

    b_address: Int32
    sfb_address: Int32
    decoded_ptr: cute.Pointer
    staging_address: Int32
    groups: GroupTable
    outputs: OutputTable
    out_dtype: type
    work_tile_mnk: tuple
    packed: Ring
    decoded: Ring


def make_tiled_mma(tokens: int) -> cute.TiledMma:
    """m64nNk16, fp16 x fp16 -> fp32, A in registers, B in shared memory, both K-major (PTX ISA 9.7.15.5)."""
    op = warpgroup.MmaF16BF16Op(
        Float16,
        Float32,
        (MMA_M, tokens, MMA_K),
        warpgroup.OperandSource.RMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    tiled_mma = cute.make_tiled_mma(op)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    return tiled_mma


@cute.jit
def run_math(args: MathArgs):
    """For each tile: accumulate its K tiles, then scale, convert and store."""
    tile_m = args.work_tile_mnk[0]
    # Value 4i + 2h + e: weight row h * 8 below the lane's first, token 8i + 2 * (lane % 4) + e.
    acc = cute.make_rmem_tensor(tile_m // 2, Float32)
    stage, phase = Int32(0), Int32(CONSUMER_PHASE)
    in_stage, in_phase = Int32(0), Int32(CONSUMER_PHASE)
    tile_idx, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    while tile_idx < args.groups.num_tiles:
        tile = locate_tile(args.groups, args.work_tile_mnk, tile_idx)
        num_tokens = tokens_of_tile(tile, tile_m)
        counts = [*range(2 * TOKEN_STEP, tile_m, TOKEN_STEP), tile_m]
        for i in cutlass.range_constexpr(len(counts)):
            fewer = 0 if i == 0 else counts[i - 1]
            if fewer < num_tokens and num_tokens <= counts[i]:
                stage, phase, in_stage, in_phase = _accumulate(
                    args, acc, counts[i], tile.k_tile_cnt, stage, phase, in_stage, in_phase
                )
        store_tile(acc, args.outputs, args.out_dtype, tile, args.work_tile_mnk, args.staging_address)
        tile_idx += stride


@cute.jit
def _accumulate(
    args: MathArgs,
    acc: cute.Tensor,
    tokens: cutlass.Constexpr,
    k_tile_cnt: Int32,
    stage: Int32,
    phase: Int32,
    in_stage: Int32,
    in_phase: Int32,
):
    """Sum the K tiles of one work tile into the first ``tokens / 2`` registers of ``acc``."""
    tile_m, tile_n, _ = args.work_tile_mnk
    tidx = cute.arch.thread_idx()[0]
    # Row of weights in the tile that this lane's first accumulator belongs to; the others are eight below.
    row = tidx // WARP_SIZE * 16 + tidx % WARP_SIZE // 4
    tiled_mma = make_tiled_mma(tokens)
    thr_mma = tiled_mma.get_slice(tidx % GROUP_THREADS)
    sB = decoded_tensor(args.decoded_ptr, tokens, tile_m, args.decoded.num_stages)
    # (MMA, MMA_N, MMA_K, STAGE)
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))
    # (MMA, MMA_M, MMA_N)
    c_layout = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C((MMA_M, tokens))).layout
    tCrC = cute.make_tensor(acc.iterator, c_layout)
    tCrC.fill(0.0)
    last_stage = in_stage
    for k_tile_idx in cutlass.range(k_tile_cnt, unroll=1):
        cute.arch.mbarrier_wait(args.packed.full(stage), phase)
        words, scales = _load_weights(
            args.b_address + stage * tile_n * ROW_BYTES, args.sfb_address + stage * SF_BLOCK_WORDS * 4, row
        )
        arrive_warp(args.packed.empty(stage))
        for slab in cutlass.range_constexpr(SLABS):
            tCrA = _decode_slab(words, scales, slab)
            cute.arch.mbarrier_wait(args.decoded.full(in_stage), in_phase)
            warpgroup.fence()
            for step in cutlass.range_constexpr(SLAB_STEPS):
                cute.gemm(tiled_mma, tCrC, tCrA[(None, None, step)], tCrB[(None, None, step, in_stage)], tCrC)
            warpgroup.commit_group()
            # The MMAs before these are done: their registers and their stage are free.
            warpgroup.wait_group(1)
            if slab > 0 or k_tile_idx > 0:
                arrive_warp(args.decoded.empty(last_stage))
            last_stage = in_stage
            in_stage, in_phase = next_stage(args.decoded, in_stage, in_phase)
        stage, phase = next_stage(args.packed, stage, phase)
    warpgroup.wait_group(0)
    arrive_warp(args.decoded.empty(last_stage))
    return stage, phase, in_stage, in_phase


def decoded_tensor(ptr: cute.Pointer, tokens: int, tile_m: int, num_stages: int) -> cute.Tensor:
    """The first tokens of every stage: (TOKENS, 64, STAGE) fp16, K-major in 128-byte swizzle atoms of eight rows."""
    layout = cute.make_layout(
        ((8, tokens // 8), (64, 1), num_stages), stride=((64, 512), (1, 0), tile_m * SLAB_ROW_BYTES // 2)
    )
    return cute.make_tensor(ptr, layout)


@cute.jit
def _load_weights(packed_address: Int32, scale_address: Int32, row: Int32):
    """One K tile of two rows: ([2][4] words of eight e2m1, [2][2] pairs of fp16 scales, the index of K last)."""
    quad_lane = cute.arch.thread_idx()[0] % 4
    # Of eight scales of a row, every second: those of the words that this lane holds.
    selector = Int32(0x6420) + quad_lane // 2 * 0x1111
    words, scales = [], []
    for i in cutlass.range_constexpr(2):
        r = row + 8 * i
        words.append(
            [load_shared(chunk_address(packed_address, r, j) + quad_lane * 4, 1)[0] for j in range(4)]
        )
        low = load_shared(scale_word_address(scale_address, r, 0), 1)[0]
        high = load_shared(scale_word_address(scale_address, r, 1), 1)[0]
        codes = Uint32(cute.arch.prmt(low, high, selector))
        scales.append([decode_scales(codes), decode_scales(codes >> 16)])
    return words, scales


@cute.jit
def _decode_slab(words: list, scales: list, slab: cutlass.Constexpr) -> cute.Tensor:
    """fp16 weights of four MMAs: (MMA, MMA_M, MMA_K). Registers of an MMA: rows r, r + 8, then both eight K on."""
    tCrA = cute.make_rmem_tensor(((2, 2, 2), 1, SLAB_STEPS), Float16)
    registers = cute.recast_tensor(tCrA, Uint32)
    for i in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(2):
            pairs = decode_word(words[i][2 * slab + j], scales[i][slab], j == 1)
            for u in cutlass.range_constexpr(2):
                first = (2 * j + u) * 4 + i
                registers[first] = pairs[2 * u]
                registers[first + 2] = pairs[2 * u + 1]
    return tCrA
