"""EPILOGUE role: four warps that move accumulators to the output.

Consumes ``acc``. Thread t of the warpgroup owns row t of the tile (tensor-memory lane t) and writes it straight to
global memory: rows and columns beyond the group's extents are never touched.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import tcgen05

from ..common.group_table import GroupTable, locate_tile, select_slot

# Columns read from tensor memory at once: enough registers for a full-width store, few enough never to spill.
EPI_TILE_N = 32
# Widths of a thread's store: sm_100 writes a whole 32-byte sector at once; rows of odd pitches start in mid-sector.
WIDE_STORE_BYTES = 32
STORE_BYTES = 16


@dataclass(frozen=True)
class OutputTable:
    """Where each group's result goes.

    Attributes:
        addresses: global address of element (0, 0), one Int64 a slot.
        pitches: elements between rows, one Int64 a slot.
        group_indices: the caller's index of the group, one Int32 a slot: where its alpha lies.
        alpha: fp32 factors [G] in global memory, or None.
    """

    addresses: list
    pitches: list
    group_indices: list
    alpha: object


@dataclass(frozen=True)
class EpilogueArgs:
    """What the epilogue warps read. tCtAcc: (MMA, MMA_M, MMA_N, ACC_STAGE) fp32 in tensor memory."""

    tCtAcc: cute.Tensor
    outputs: OutputTable
    out_dtype: type
    groups: GroupTable
    cta_tile_shape_mnk: tuple
    acc_consumer: pipeline.PipelineConsumer


@cute.jit
def run_epilogue(args: EpilogueArgs):
    """For each tile: wait for its accumulator, read it in column slices, scale, convert, store, release."""
    acc_consumer = args.acc_consumer
    tidx, _, _ = cute.arch.thread_idx()
    tile_m, tile_n, _ = args.cta_tile_shape_mnk
    # (EPI_M, EPI_N, 1, SUBTILE, ACC_STAGE)
    tAcc = cute.flat_divide(args.tCtAcc[((None, None), 0, 0, None)], (tile_m, EPI_TILE_N))
    load_atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(EPI_TILE_N)), Float32)
    tiled_load = tcgen05.make_tmem_copy(load_atom, tAcc[(None, None, 0, 0, 0)])
    thr_load = tiled_load.get_slice(tidx)
    # (T2R, T2R_M, T2R_N, SUBTILE, ACC_STAGE)
    tTR_tAcc = thr_load.partition_S(tAcc)[(None, None, None, 0, None, None)]
    num_subtile = cute.size(tTR_tAcc, mode=[3])
    # (T2R, T2R_M, T2R_N): one row, EPI_TILE_N columns
    slice_shape = thr_load.partition_D(cute.make_identity_tensor((tile_m, EPI_TILE_N))).shape
    # Two slices in registers: one is read from tensor memory while the other is converted and stored.
    tTR_rAcc = [cute.make_rmem_tensor(slice_shape, Float32) for _ in range(2)]
    tTR_rOut = cute.make_rmem_tensor(EPI_TILE_N, args.out_dtype)

    tile_idx, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    while tile_idx < args.groups.num_tiles:
        tile = locate_tile(args.groups, args.cta_tile_shape_mnk, tile_idx)
        pitch = select_slot(args.outputs.pitches, tile.slot)
        out_address = select_slot(args.outputs.addresses, tile.slot)
        alpha = _load_alpha(args.outputs, tile.slot)
        row = tile.tile_m_idx * tile_m + tidx
        col = tile.tile_n_idx * tile_n
        row_address = out_address + (Int64(row) * pitch + col) * (args.out_dtype.width // 8)

        stage = acc_consumer.wait_and_advance()
        cute.copy(tiled_load, tTR_tAcc[(None, None, None, 0, stage.index)], tTR_rAcc[0])
        for subtile_idx in cutlass.range_constexpr(num_subtile):
            # tcgen05.ld is asynchronous: its registers may be read only after tcgen05.wait::ld.
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(subtile_idx + 1 < num_subtile):
                source = tTR_tAcc[(None, None, None, subtile_idx + 1, stage.index)]
                cute.copy(tiled_load, source, tTR_rAcc[(subtile_idx + 1) % 2])
            else:
                # The accumulator is in registers: hand it back before the last stores.
                with cute.arch.elect_one():
                    stage.release()
            scaled = tTR_rAcc[subtile_idx % 2].load().reshape(EPI_TILE_N) * alpha
            tTR_rOut.store(scaled.to(args.out_dtype))
            if row < tile.m:
                _store_row(
                    tTR_rOut,
                    row_address + subtile_idx * EPI_TILE_N * (args.out_dtype.width // 8),
                    tile.n - col - subtile_idx * EPI_TILE_N,
                )
        tile_idx += stride


@cute.jit
def _load_alpha(outputs: OutputTable, slot: Int32) -> Float32:
    alpha = Float32(1.0)
    if cutlass.const_expr(outputs.alpha is not None):
        factors = cute.make_tensor(outputs.alpha, cute.make_layout(len(outputs.addresses)))
        alpha = factors[select_slot(outputs.group_indices, slot)]
    return alpha


@cute.jit
def _store_row(values: cute.Tensor, address: Int64, num_valid: Int32):
    """Store the first ``num_valid`` of EPI_TILE_N converted values at ``address``, as wide as its alignment allows."""
    if num_valid >= cute.size(values) and address % WIDE_STORE_BYTES == 0:
        _store_vectors(values, address, WIDE_STORE_BYTES)
    elif num_valid >= cute.size(values) and address % STORE_BYTES == 0:
        _store_vectors(values, address, STORE_BYTES)
    else:
        ptr = cute.make_ptr(values.element_type, address, cute.AddressSpace.gmem)
        out = cute.make_tensor(ptr, values.layout)
        for i in cutlass.range_constexpr(cute.size(values)):
            if i < num_valid:
                out[i] = values[i]


@cute.jit
def _store_vectors(values: cute.Tensor, address: Int64, align_bytes: cutlass.Constexpr):
    ptr = cute.make_ptr(values.element_type, address, cute.AddressSpace.gmem, assumed_align=align_bytes)
    cute.autovec_copy(values, cute.make_tensor(ptr, values.layout))
