"""MMA role: warps that multiply in registers and store what they computed.

Consumes ``ab``. All warps work on one tile; each reads its rows and columns (``warp_tile``) of every stage.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32

from nvfp4_cute.arch.sm120 import SF_ATOM_ROWS, SmemPlan

from ..common.group_table import GroupTable, locate_tile
from ..common.output_table import OutputTable
from .epilogue import store_tile
from .instructions import MMA_K, load_matrices, load_word, mma_nvfp4
from .warp_tile import NUM_MMA_M, STRIP, STRIP_PITCH, WARPS_M, WarpTile

CHUNK_BYTES = 16
# In a 128x4 block, rows r and r + 32 are a word apart, rows r and r + 1 four words.
SF_WORD_BYTES = 4
SF_ROW_BYTES = 16
SF_ATOM_BYTES = 512


@dataclass(frozen=True)
class StageBuffers:
    """Shared-memory addresses of stage 0 of every operand."""

    a: Int32
    b: Int32
    sfa: Int32
    sfb: Int32


@dataclass(frozen=True)
class MmaArgs:
    """What the MMA warps read."""

    buffers: StageBuffers
    smem: SmemPlan
    warp_tile: WarpTile
    groups: GroupTable
    outputs: OutputTable
    out_dtype: type
    cta_tile_shape_mnk: tuple
    ab_consumer: pipeline.PipelineConsumer


@cute.jit
def run_mma(args: MmaArgs):
    """For each tile: sum over its K tiles in registers, then scale, convert and store."""
    ab_consumer, warp_tile, plan = args.ab_consumer, args.warp_tile, args.smem
    _, tile_n, tile_k = args.cta_tile_shape_mnk
    num_k_block = tile_k // MMA_K
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    warp_m, warp_n = warp_idx % WARPS_M, warp_idx // WARPS_M
    first_col = warp_n * (STRIP * warp_tile.strips_per_warp)
    a_offset = _a_offset(warp_m, tile_k)
    b_offset = _b_offset(first_col, tile_k)
    sfa_offset = _scale_offset(warp_m * STRIP, SF_ATOM_ROWS // STRIP_PITCH)

    tile_idx, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    while tile_idx < args.groups.num_tiles:
        tile = locate_tile(args.groups, args.cta_tile_shape_mnk, tile_idx)
        # A small tile uses a part of a scale block.
        sfb_offset = _scale_offset(first_col + tile.tile_n_idx * tile_n % SF_ATOM_ROWS, warp_tile.num_group)
        # (REGISTER, MMA_N, MMA_M)
        acc = cute.make_rmem_tensor((4, warp_tile.num_mma_n, NUM_MMA_M), Float32)
        acc.fill(0.0)
        for _ in cutlass.range(tile.k_tile_cnt, unroll=1):
            stage = ab_consumer.wait_and_advance()
            a_address = args.buffers.a + stage.index * plan.a_stage_bytes
            b_address = args.buffers.b + stage.index * plan.b_stage_bytes
            sfa_address = args.buffers.sfa + stage.index * plan.sfa_stage_bytes + sfa_offset
            sfb_address = args.buffers.sfb + stage.index * plan.sfb_stage_bytes + sfb_offset
            for k_block_idx in cutlass.range_constexpr(num_k_block):
                # The swizzle of a lane's row is part of its offset: the chunk of another K block is an exclusive or.
                chunks = 2 * k_block_idx * CHUNK_BYTES
                a = _load_a(a_address + (a_offset ^ chunks), tile_k)
                b = _load_b(b_address + (b_offset ^ chunks), warp_tile, tile_k)
                sfa = load_word(sfa_address + k_block_idx * SF_ATOM_BYTES)
                sfb = [
                    load_word(sfb_address + k_block_idx * SF_ATOM_BYTES + q * STRIP * SF_ROW_BYTES)
                    for q in range(warp_tile.strips_per_warp)
                ]
                for i in cutlass.range_constexpr(NUM_MMA_M):
                    for j in cutlass.range_constexpr(warp_tile.num_mma_n):
                        scale_b, thread_b = sfb[j // warp_tile.num_group], j % warp_tile.num_group
                        sums = [acc[register, j, i] for register in range(4)]
                        sums = mma_nvfp4(sums, a[i], b[j], sfa, i, scale_b, thread_b)
                        for register in cutlass.range_constexpr(4):
                            acc[register, j, i] = sums[register]
            # One lane releases the stage for the warp: all lanes must have read it.
            cute.arch.sync_warp()
            stage.release()
        store_tile(
            acc, args.outputs, args.out_dtype, tile, args.cta_tile_shape_mnk, warp_tile, warp_m, first_col
        )
        tile_idx += stride


@cute.jit
def _a_offset(warp_m: Int32, tile_k: cutlass.Constexpr) -> Int32:
    """Byte that a lane addresses for MMA 0, K block 0: matrices are (strip 0, strip 1) x (first, second chunk)."""
    lane = cute.arch.lane_idx()
    row = warp_m * STRIP + lane % 8 + lane // 8 % 2 * STRIP_PITCH
    return _swizzled(row, lane // 16, tile_k)


@cute.jit
def _b_offset(first_col: Int32, tile_k: cutlass.Constexpr) -> Int32:
    """Byte that a lane addresses for MMA 0, K block 0: matrices are the first and the second chunk; the upper half
    of the lanes addresses the MMA after it, whose offset ``_load_b`` adds."""
    lane = cute.arch.lane_idx()
    return _swizzled(first_col + lane % 8, lane // 8 % 2, tile_k)


@cute.jit
def _swizzled(row: Int32, chunk: Int32, tile_k: cutlass.Constexpr) -> Int32:
    """Byte of a 16-byte chunk in rows of 64 or 128 bytes, as TMA swizzles them (PTX ISA 5.5.7)."""
    if cutlass.const_expr(tile_k == 256):
        return row * 128 + (chunk ^ row % 8) * CHUNK_BYTES
    else:
        return row * 64 + (chunk ^ row // 2 % 4) * CHUNK_BYTES


@cute.jit
def _scale_offset(first_row: Int32, num_strip: cutlass.Constexpr) -> Int32:
    """Byte of a lane's scale word in a 128x4 block: lane 4g + t has row g of strip t, of ``num_strip`` strips."""
    lane = cute.arch.lane_idx()
    row = first_row % STRIP_PITCH + lane // 4
    group = first_row // STRIP_PITCH + lane % num_strip
    return row * SF_ROW_BYTES + group * SF_WORD_BYTES


def _load_a(address: Int32, tile_k: int) -> list:
    """Four registers for each MMA along M."""
    mma_pitch = 2 * STRIP_PITCH * tile_k // 2
    return [load_matrices(address + i * mma_pitch, 4) for i in range(NUM_MMA_M)]


def _load_b(address: Int32, warp_tile: WarpTile, tile_k: int) -> list:
    """Two registers for each MMA along N, two MMAs a load."""
    offsets = [offset * tile_k // 2 for offset in warp_tile.n_offsets]
    if len(offsets) == 1:
        return [load_matrices(address + offsets[0], 2)]
    lane = cute.arch.lane_idx()
    registers = []
    for first, second in zip(offsets[::2], offsets[1::2], strict=True):
        words = load_matrices(address + first + lane // 16 * (second - first), 4)
        registers += [words[:2], words[2:]]
    return registers
