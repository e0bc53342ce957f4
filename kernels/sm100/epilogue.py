"""EPILOGUE role: four warps that move accumulators to the output.

Consumes ``acc``. Thread t of the warpgroup owns row t of the CTA's part of the tile (tensor-memory lane t): one row of
the MMA's M side. ``store`` says how its results reach memory. Results that become NVFP4 are quantized in registers: a
thread needs 16 consecutive columns of the output, which are its own where the output runs along the N side; where it
runs along the M side, each warp first transposes its 32 x 32 results.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from nvfp4_cute.arch.sm100 import EPI_TILE_N, INTERLEAVE, MMA_CTA_M, TmemMap
from nvfp4_cute.config import KernelConfig

from ..common import ptx
from ..common.activation import gate
from ..common.chain import Chain, leave_chain, signal_stored
from ..common.encode import ConvertE2M1
from ..common.output_table import OutputTable, load_alphas
from ..common.quantized_output import QuantizedGroup, quantized_group, store_quantized_run
from ..common.sides import TileSide, mma_sides
from ..common.transpose import transpose_in_warp
from .columns import mma_columns
from .store import row_target, store_slice

# Tensor-memory addresses: the lane in the upper half, the column in the lower.
LANE_STRIDE = 1 << 16


@dataclass(frozen=True)
class EpilogueArgs:
    """What the epilogue warps read.

    Attributes:
        tmem_ptr: fp32 pointer to the allocation.
        out_m_major: whether columns of the output are contiguous, not rows.
        out_dtype: Float4E2M1FN stands for NVFP4, whose scales ``outputs`` places.
        groups: ``GroupTable`` or ``DeviceGroups``.
        cta_rank: which CTA of the pair this is.
        activation: of a dual GEMM's first product (``common.activation``); None where there is one product.
        weight_layout: how the rows of a dual GEMM's weights lie: in two operands, or interleaved in one.
        chain: where every group's ``a`` is the result of the one before; None otherwise.
    """

    tmem_ptr: cute.Pointer
    tmem: TmemMap
    outputs: OutputTable
    out_dtype: type
    out_m_major: bool
    config: KernelConfig
    groups: object
    cta_rank: Int32
    acc_consumer: pipeline.PipelineConsumer
    activation: str | None
    weight_layout: str
    chain: Chain | None


@cute.jit
def run_epilogue(args: EpilogueArgs, first_tile: Int32, stride: Int32):
    """For each tile: wait for its accumulator, read it in column slices, scale, convert, store, release.

    Of a dual GEMM, slices of both products are read together and combined in fp32: from two accumulators, side by side,
    or, where the weights are interleaved, from one.
    """
    acc_consumer, config, groups, tmem = args.acc_consumer, args.config, args.groups, args.tmem
    tidx, _, _ = cute.arch.thread_idx()
    is_quantized = args.outputs.scales is not None
    # Whether a run of the output lies along the MMA's M side, across the lanes of a warp.
    across_lanes = args.out_m_major != config.swap_ab
    # (MMA_CTA_M, EPI_TILE_N): one slice
    tAcc = cute.make_tensor(args.tmem_ptr, cute.make_layout((MMA_CTA_M, EPI_TILE_N), stride=(LANE_STRIDE, 1)))
    load_atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(EPI_TILE_N)), Float32)
    tiled_load = tcgen05.make_tmem_copy(load_atom, tAcc)
    thr_load = tiled_load.get_slice(tidx)
    # (T2R, T2R_M, T2R_N)
    tTR_tAcc = thr_load.partition_S(tAcc)
    slice_shape = thr_load.partition_D(cute.make_identity_tensor((MMA_CTA_M, EPI_TILE_N))).shape
    num_products = 1 if args.activation is None else 2
    # Two slices in registers: one is read from tensor memory while the other is converted and stored.
    tTR_rAcc = [cute.make_rmem_tensor(slice_shape, Float32) for _ in range(num_products)]
    tTR_rOut = cute.make_rmem_tensor(EPI_TILE_N, Float32 if is_quantized else args.out_dtype)
    tile_n = config.cta_tile_shape_mnk[1]
    # Columns of an accumulator that become one run of slices of the output
    interleave = INTERLEAVE.get(args.weight_layout, 0)
    period, period_slices = EPI_TILE_N, 1
    if cutlass.const_expr(interleave > 0):
        period, period_slices = 2 * interleave, interleave // EPI_TILE_N
    # Slices that share columns with the other accumulator are read first; then the MMA may have it.
    shared_slices = tile_n // period * period_slices
    if cutlass.const_expr(tmem.overlap_cols > 0):
        shared_slices = -(-tmem.overlap_cols // period) * period_slices
    limit = None
    if cutlass.const_expr(args.outputs.limit is not None):
        limit = ptx.float_of(args.outputs.limit)

    acc_idx = Int32(0)
    cursor = groups.first_cursor(first_tile, config.work_tile_mnk)
    while groups.has_tile(cursor):
        tile = groups.tile(cursor, config.work_tile_mnk)
        m_side, n_side = mma_sides(config, tile)
        row = m_side.first_row + args.cta_rank * MMA_CTA_M + tidx
        num_slices = mma_columns(config, n_side) // period * period_slices
        columns = tile.n
        if cutlass.const_expr(interleave):
            # Two rows of weights make a column of the output.
            columns = tile.n // 2
            n_side = TileSide(n_side.first_row // 2, n_side.extent // 2, n_side.origin)
        alphas = load_alphas(args.outputs, tile.slot, num_products)
        if cutlass.const_expr(is_quantized):
            target = quantized_group(args.outputs, tile, columns)
        else:
            target = row_target(
                args.outputs, tile, row, m_side, n_side, args.out_dtype, args.out_m_major, config.swap_ab
            )
        # Accumulators that share columns: the first one's are its last, the second one's its first.
        first_slice, slice_step = Int32(0), Int32(1)
        if cutlass.const_expr(tmem.overlap_cols):
            first_slice = num_slices - 1 if acc_idx == 0 else Int32(0)
            slice_step = Int32(-1) if acc_idx == 0 else Int32(1)
        acc_column = acc_idx * tmem.acc_stride

        stage = acc_consumer.wait_and_advance()
        _read_slice(tiled_load, tTR_tAcc, acc_column, first_slice, tTR_rAcc, args.weight_layout, tile_n)
        # Not unrolled: a CTA has few tiles, and code that it executes once costs more to fetch than to run.
        for i in cutlass.range(num_slices, unroll=1):
            slice_idx = first_slice + i * slice_step
            # tcgen05.ld is asynchronous: its registers may be read only after tcgen05.wait::ld.
            cute.arch.fence_view_async_tmem_load()
            if i == cutlass.min(num_slices, shared_slices) - 1:
                # What the next MMA overwrites is in registers.
                with cute.arch.elect_one():
                    stage.release()
            result = _combine(tTR_rAcc, alphas, args.activation, limit)
            tTR_rOut.store(result if is_quantized else result.to(args.out_dtype))
            if i + 1 < num_slices:
                next_idx = slice_idx + slice_step
                _read_slice(tiled_load, tTR_tAcc, acc_column, next_idx, tTR_rAcc, args.weight_layout, tile_n)
            if cutlass.const_expr(is_quantized):
                column = n_side.first_row + slice_idx * EPI_TILE_N
                _store_quantized(tTR_rOut, target, row, column, config.swap_ab)
            else:
                store_slice(tTR_rOut, target, slice_idx * EPI_TILE_N, across_lanes)
        if cutlass.const_expr(args.chain is not None):
            signal_stored(args.chain, tile.slot)
        acc_idx = acc_idx + 1 if acc_idx + 1 < tmem.num_acc_stage else Int32(0)
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)
    if cutlass.const_expr(args.chain is not None):
        if tidx == 0:
            leave_chain(args.chain, cute.arch.grid_dim()[0])


@cute.jit
def _read_slice(
    tiled_load: cute.TiledCopy,
    tTR_tAcc: cute.Tensor,
    acc_column: Int32,
    slice_idx: Int32,
    destinations: list,
    weight_layout: cutlass.Constexpr,
    tile_n: cutlass.Constexpr,
):
    """Start reading a slice of every product: of a dual GEMM the gate's, then the other's."""
    first = slice_idx * EPI_TILE_N
    columns = [first, first + tile_n]
    if cutlass.const_expr(weight_layout == "interleaved_64_up_first"):
        up = slice_idx // 2 * 128 + slice_idx % 2 * EPI_TILE_N
        columns = [up + 64, up]
    elif cutlass.const_expr(weight_layout == "interleaved_32_gate_first"):
        columns = [2 * first, 2 * first + 32]
    for i in cutlass.range_constexpr(len(destinations)):
        source = cute.make_tensor(tTR_tAcc.iterator + (acc_column + columns[i]), tTR_tAcc.layout)
        cute.copy(tiled_load, source, destinations[i])


@cute.jit
def _combine(accumulators: list, alphas: list, activation: cutlass.Constexpr, limit: Float32 | None):
    """The result, in fp32, of a slice of every product's accumulator."""
    result = accumulators[0].load().reshape(EPI_TILE_N) * alphas[0]
    if cutlass.const_expr(activation is not None):
        other = accumulators[1].load().reshape(EPI_TILE_N) * alphas[1]
        gated = cute.make_rmem_tensor(EPI_TILE_N, Float32)
        for i in cutlass.range_constexpr(EPI_TILE_N):
            gated[i] = gate(result[i], other[i], activation, limit)
        result = gated.load()
    return result


@cute.jit
def _store_quantized(
    values: cute.Tensor, group: QuantizedGroup, m_row: Int32, n_row: Int32, swap_ab: cutlass.Constexpr
):
    """Quantize and store a slice: rows of the M side, one a lane, from ``m_row`` on, and of the N side from ``n_row`` on."""
    row, column = m_row, n_row
    if cutlass.const_expr(swap_ab):
        lane = cute.arch.lane_idx()
        transpose_in_warp(values)
        row, column = n_row + lane, m_row - lane
    store_quantized_run(values, group, row, column, ConvertE2M1)
