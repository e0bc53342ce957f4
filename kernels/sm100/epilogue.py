"""EPILOGUE role: four warps that move accumulators to the output.

Consumes ``acc``. Thread t of the warpgroup owns row t of the CTA's part of the tile (tensor-memory lane t): one row of
the MMA's M side. Where the output runs along the N side, a thread stores a run of its row at once; where it runs along
the M side, the 32 lanes of a warp store a run of a column together. Nothing beyond the group's extents is touched.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import tcgen05

from nvfp4_cute.arch.sm100 import EPI_TILE_N, MMA_CTA_M, TmemMap
from nvfp4_cute.config import KernelConfig

from ..common.activation import activate
from ..common.output_table import OutputTable, group_output, load_alphas
from ..common.sides import mma_sides
from ..common.warp_schedule import WARP_SIZE
from .columns import mma_columns

# Widths of a thread's store: sm_100 writes a whole 32-byte sector at once; rows of odd pitches start in mid-sector.
WIDE_STORE_BYTES = 32
STORE_BYTES = 16
WORD_BYTES = 4
# Byte permutations of (own, neighbour's) words: both lower halves, or both upper ones with the neighbour's first.
PICK_LOWER, PICK_UPPER = 0x5410, 0x3276
# Tensor-memory addresses: the lane in the upper half, the column in the lower.
LANE_STRIDE = 1 << 16


@dataclass(frozen=True)
class EpilogueArgs:
    """What the epilogue warps read.

    Attributes:
        tmem_ptr: fp32 pointer to the allocation.
        out_m_major: whether columns of the output are contiguous, not rows.
        groups: ``GroupTable`` or ``DeviceGroups``.
        cta_rank: which CTA of the pair this is.
        activation: of a dual GEMM's first product (``common.activation``); None where there is one product.
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


@cute.jit
def run_epilogue(args: EpilogueArgs, first_tile: Int32, stride: Int32):
    """For each tile: wait for its accumulator, read it in column slices, scale, convert, store, release.

    A dual GEMM's accumulator is two, side by side: their slices are read together and combined in fp32.
    """
    acc_consumer, config, groups, tmem = args.acc_consumer, args.config, args.groups, args.tmem
    tidx, _, _ = cute.arch.thread_idx()
    item_bytes = args.out_dtype.width // 8
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
    # Two slices in registers: one is read from tensor memory while the other is converted and stored.
    num_products = 1 if args.activation is None else 2
    tTR_rAcc = [[cute.make_rmem_tensor(slice_shape, Float32) for _ in range(num_products)] for _ in range(2)]
    tTR_rOut = cute.make_rmem_tensor(EPI_TILE_N, args.out_dtype)
    tile_n = config.cta_tile_shape_mnk[1]
    max_slices = tile_n // EPI_TILE_N
    # Slices that share columns with the other accumulator are read first; then the MMA may have it.
    shared_slices = max_slices
    if cutlass.const_expr(tmem.overlap_cols > 0):
        shared_slices = -(-tmem.overlap_cols // EPI_TILE_N)

    acc_idx = Int32(0)
    cursor = groups.first_cursor(first_tile, config.work_tile_mnk)
    while groups.has_tile(cursor):
        tile = groups.tile(cursor, config.work_tile_mnk)
        m_side, n_side = mma_sides(config, tile)
        row = m_side.first_row + args.cta_rank * MMA_CTA_M + tidx
        num_slices = mma_columns(config, n_side) // EPI_TILE_N
        origin, row_pitch, column_pitch = group_output(args.outputs, tile, args.out_dtype, args.out_m_major)
        pitch_m, pitch_n = (column_pitch, row_pitch) if config.swap_ab else (row_pitch, column_pitch)
        address = origin + (Int64(row) * pitch_m + Int64(n_side.first_row) * pitch_n) * item_bytes
        alphas = load_alphas(args.outputs, tile.slot, num_products)
        num_valid = n_side.extent - n_side.first_row
        # Two lanes may store two rows as one word where the whole warp has rows and words are aligned.
        pitch_bytes = pitch_n * item_bytes
        in_pairs = False
        if cutlass.const_expr(across_lanes and item_bytes == 2):
            lane = cute.arch.lane_idx()
            aligned = (address - lane * item_bytes) % WORD_BYTES == 0 and pitch_bytes % WORD_BYTES == 0
            in_pairs = aligned and row - lane + WARP_SIZE <= m_side.extent
        # Accumulators that share columns: the first one's are its last, the second one's its first.
        first_slice, slice_step = Int32(0), Int32(1)
        if cutlass.const_expr(tmem.overlap_cols):
            first_slice = num_slices - 1 if acc_idx == 0 else Int32(0)
            slice_step = Int32(-1) if acc_idx == 0 else Int32(1)
        column = acc_idx * tmem.acc_stride

        stage = acc_consumer.wait_and_advance()
        _read_slice(tiled_load, tTR_tAcc, column + first_slice * EPI_TILE_N, tTR_rAcc[0], tile_n)
        for i in cutlass.range_constexpr(max_slices):
            if i < num_slices:
                slice_idx = first_slice + i * slice_step
                # tcgen05.ld is asynchronous: its registers may be read only after tcgen05.wait::ld.
                cute.arch.fence_view_async_tmem_load()
                if i + 1 < num_slices:
                    _read_slice(
                        tiled_load,
                        tTR_tAcc,
                        column + (slice_idx + slice_step) * EPI_TILE_N,
                        tTR_rAcc[(i + 1) % 2],
                        tile_n,
                    )
                if i == cutlass.min(num_slices, shared_slices) - 1:
                    # What the next MMA overwrites is in registers.
                    with cute.arch.elect_one():
                        stage.release()
                tTR_rOut.store(_combine(tTR_rAcc[i % 2], alphas, args.activation).to(args.out_dtype))
                slice_address = address + Int64(slice_idx * EPI_TILE_N) * pitch_n * item_bytes
                valid = num_valid - slice_idx * EPI_TILE_N
                if cutlass.const_expr(across_lanes):
                    if in_pairs:
                        _store_column_pairs(tTR_rOut, slice_address, pitch_bytes, valid)
                    elif row < m_side.extent:
                        _store_column_elements(tTR_rOut, slice_address, pitch_bytes, valid)
                elif row < m_side.extent:
                    _store_run(tTR_rOut, slice_address, valid)
        acc_idx = acc_idx + 1 if acc_idx + 1 < tmem.num_acc_stage else Int32(0)
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)


@cute.jit
def _read_slice(
    tiled_load: cute.TiledCopy,
    tTR_tAcc: cute.Tensor,
    column: Int32,
    destinations: list,
    product_stride: cutlass.Constexpr,
):
    """Start reading the slice at ``column`` of every product."""
    for i in cutlass.range_constexpr(len(destinations)):
        source = cute.make_tensor(tTR_tAcc.iterator + (column + i * product_stride), tTR_tAcc.layout)
        cute.copy(tiled_load, source, destinations[i])


@cute.jit
def _combine(accumulators: list, alphas: list, activation: cutlass.Constexpr):
    """The result, in fp32, of a slice of every product's accumulator."""
    result = accumulators[0].load().reshape(EPI_TILE_N) * alphas[0]
    if cutlass.const_expr(activation is not None):
        activated = cute.make_rmem_tensor(EPI_TILE_N, Float32)
        for i in cutlass.range_constexpr(EPI_TILE_N):
            activated[i] = activate(result[i], activation)
        result = activated.load() * (accumulators[1].load().reshape(EPI_TILE_N) * alphas[1])
    return result


@cute.jit
def _store_column_pairs(values: cute.Tensor, address: Int64, pitch_bytes: Int64, num_valid: Int32):
    """Store the first ``num_valid`` of EPI_TILE_N 16-bit values, each in a column of its own, with half the stores.

    Lanes 2i and 2i + 1 exchange values of columns 2j and 2j + 1: then each has both rows of one of the two columns.
    """
    is_odd = cute.arch.lane_idx() % 2
    selector = PICK_UPPER if is_odd == 1 else Int32(PICK_LOWER)
    words = cute.recast_tensor(values, Int32)
    first_row = address - is_odd * 2
    for i in cutlass.range_constexpr(cute.size(words)):
        word = Int32(cute.arch.prmt(words[i], cute.arch.shuffle_sync_bfly(words[i], 1), selector))
        column = 2 * i + is_odd
        if column < num_valid:
            ptr = cute.make_ptr(
                Int32, first_row + column * pitch_bytes, cute.AddressSpace.gmem, assumed_align=WORD_BYTES
            )
            cute.make_tensor(ptr, cute.make_layout(1))[0] = word


@cute.jit
def _store_column_elements(values: cute.Tensor, address: Int64, pitch_bytes: Int64, num_valid: Int32):
    """Store the first ``num_valid`` of EPI_TILE_N values, each in a column of its own."""
    for i in cutlass.range_constexpr(cute.size(values)):
        if i < num_valid:
            ptr = cute.make_ptr(values.element_type, address + i * pitch_bytes, cute.AddressSpace.gmem)
            cute.make_tensor(ptr, cute.make_layout(1))[0] = values[i]


@cute.jit
def _store_run(values: cute.Tensor, address: Int64, num_valid: Int32):
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
