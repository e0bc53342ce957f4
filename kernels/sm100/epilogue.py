"""EPILOGUE role: four warps move accumulators from tensor memory to the output.

Consumes ``acc``. Thread t of the warpgroup owns row t of the CTA's part of the tile (tensor-memory lane t), one row of the
MMA's M side. ``staging`` stores 16-bit results, ``store`` 32-bit results. Results are quantized in registers, for which a
thread needs the 16 or 32 consecutive columns of a block. If the output is contiguous along the N side, these are its own;
otherwise each warp first transposes its 32 x 32 results.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import tcgen05

from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.launch_table import INTERLEAVE
from nvfp4_cute.planning.arch.sm100.limits import EPI_PART_N, EPI_TILE_N, MMA_CTA_M, TmemMap, skips_columns
from nvfp4_cute.planning.config import KernelConfig

from ..common import ptx
from ..common.activation import gate
from ..common.encode import Encoding
from ..common.group_table import WorkTile, ceil_div, select_slot
from ..common.output_table import OutputTable, load_alphas
from ..common.ptx import pack_16x2
from ..common.quantize_block import largest, over_lanes, scale_of_part
from ..common.quantized_output import (
    HELD_WORDS,
    RUN_COLUMNS,
    QuantizedGroup,
    quantized_group,
    sector_columns,
    store_quantized_half,
    store_quantized_part,
    store_quantized_run,
)
from ..common.ring import CONSUMER_PHASE, Ring, next_stage
from ..common.row_scales import load_row_scales
from ..common.sides import TileSide, mma_sides
from ..common.transpose import exchange_in_warp, transpose_in_warp
from ..common.warp_schedule import WARP_SIZE
from .bias import bias_of_slices, slice_plus_bias, slices_plus_biases
from .columns import used_columns
from .instructions import order_after_wait, order_before_arrival
from .split_k import (
    Exchange,
    add_slice,
    give_room,
    is_sent,
    own_slices,
    send_slice,
    wait_for_room,
    wait_for_sums,
)
from .staging import WARP_BYTES, staged_target, store_staged
from .store import row_target, store_slice

# A tensor-memory address has the lane in its upper half and the column in its lower half.
LANE_STRIDE = 1 << 16
# Alignment of tensor-memory pointers in CuTe's units.
TMEM_ALIGN = 16


@dataclass(frozen=True)
class EpilogueArgs:
    """Inputs of the EPILOGUE role.

    Attributes:
        tmem_address: shared-memory location of the tensor-memory address.
        out_m_major: whether columns rather than rows of the output are contiguous.
        out_dtype: dtype of the results, or the format of quantized results.
        groups: ``GroupTable`` or ``DeviceGroups``.
        m_rank: rank of this CTA among those with rows of a work tile's M side.
        leader_rank: rank, in the cluster, of the CTA that issues this CTA's MMAs.
        tmem_unused: barrier at which each warp arrives, in both CTAs of a pair, after reading its last accumulator.
        staging: shared address of the warps' buffers (``staging``).
        exchange: split-K exchange; None without split-K.
        activation: activation of a dual GEMM's first product (``common.activation``); None for one product.
        weight_layout: layout of a dual GEMM's weights: two operands, or interleaved in one.
        chain: ``common.chain.Chain`` if every group's ``a`` is the result of the previous group; otherwise None.
        integers: ``int8.results.IntegerResults`` for int32 accumulators; None for float32.
        begun_barrier_id, begun_threads: named barrier at which LOAD arrives after issuing its first loads; None without one.
    """

    tmem_address: cute.Pointer
    tmem: TmemMap
    outputs: OutputTable
    out_dtype: type | BlockFormat
    out_m_major: bool
    config: KernelConfig
    groups: object
    m_rank: Int32
    leader_rank: Int32 | int
    acc: Ring
    tmem_unused: cute.Pointer
    staging: Int32
    exchange: Exchange | None
    activation: str | None
    weight_layout: str
    chain: object | None
    begun_barrier_id: int | None
    begun_threads: int
    integers: object | None = None


@dataclass(frozen=True)
class SliceSource:
    """An accumulator in tensor memory.

    Attributes:
        tiled_load, tTR_tAcc: copy of a slice, and this thread's part of tensor memory.
        first_column: first column of the accumulator.
        num_slices: number of its slices.
    """

    tiled_load: cute.TiledCopy
    tTR_tAcc: cute.Tensor
    first_column: Int32
    num_slices: Int32
    weight_layout: str
    tile_n: int


@dataclass(frozen=True)
class Factors:
    """Factors and bias of a tile's products.

    Attributes:
        alphas: factor of every product.
        scales: scales of integers (``int8.results``), or None.
        row_scales, bias: of the thread's slices (:func:`scales_of_slices`, ``bias.bias_of_slices``), or None.
    """

    alphas: list
    scales: object | None
    row_scales: list | None
    bias: list | None


def slice_copy(tmem_ptr: cute.Pointer, thread: Int32, columns: int = EPI_TILE_N) -> tuple:
    """Returns the copy with which a thread of a warpgroup reads tensor memory, its source, and the shape of its destination."""
    # (MMA_CTA_M, columns)
    shape = MMA_CTA_M, columns
    tAcc = cute.make_tensor(tmem_ptr, cute.make_layout(shape, stride=(LANE_STRIDE, 1)))
    load_atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(columns)), Float32)
    tiled_load = tcgen05.make_tmem_copy(load_atom, tAcc)
    thr_load = tiled_load.get_slice(thread)
    # (T2R, T2R_M, T2R_N)
    tTR_tAcc = thr_load.partition_S(tAcc)
    return tiled_load, tTR_tAcc, thr_load.partition_D(cute.make_identity_tensor(shape)).shape


@cute.jit
def wait_for_start(args: EpilogueArgs):
    """Waits until LOAD has issued its first loads and, with split-K, until all CTAs have initialized their barriers."""
    if cutlass.const_expr(args.begun_barrier_id is not None):
        cute.arch.barrier(barrier_id=args.begun_barrier_id, number_of_threads=args.begun_threads)
    if cutlass.const_expr(args.exchange is not None):
        cute.arch.cluster_wait()


@cute.jit
def run_epilogue(args: EpilogueArgs, first_tile: Int32, stride: Int32):
    """Waits for the accumulator of each tile, reads it in column slices, scales, converts, stores and releases it.

    In a dual GEMM, slices of both products are read together and combined in float32: from two neighbouring accumulators or, with
    interleaved weights, from one.
    """
    acc, config, tmem, exchange = args.acc, args.config, args.tmem, args.exchange
    groups = args.groups.with_factors(args.outputs.alphas)
    # Issue the reads of group sizes before LOAD issues operand loads: they would queue up after those.
    cursor = groups.first_cursor(first_tile, config.work_tile_mnk)
    wait_for_start(args)
    if not groups.has_tile(cursor):
        with cute.arch.elect_one():
            give_back_tmem(args.tmem_unused, args.leader_rank, config)
    tmem_ptr = cute.arch.retrieve_tmem_ptr(Float32, TMEM_ALIGN, args.tmem_address)
    tidx, _, _ = cute.arch.thread_idx()
    warp_idx = tidx // WARP_SIZE
    warp_row, staging = warp_idx * WARP_SIZE, args.staging + warp_idx * WARP_BYTES
    is_quantized = args.outputs.scales is not None
    is_staged = not is_quantized and args.out_dtype.width == 16
    encode = Encoding.of(args.out_dtype, has_fp4_convert=True) if is_quantized else None
    # Whether the loop over slices starts with an empty pass, which fetches its code while the MMA works on the first tile.
    warms_up = is_staged and exchange is None
    # Whether the output is contiguous along the MMA's M side, across the lanes of a warp.
    across_lanes = args.out_m_major != config.swap_ab
    tiled_load, tTR_tAcc, slice_shape = slice_copy(tmem_ptr, tidx)
    num_products = 1 if args.activation is None else 2
    tile_n = config.cta_tile_shape_mnk[1]
    # Slices that are read together. With two, the MMA gets their columns back before the first is stored.
    at_once = 2 if warms_up and num_products == 1 and tile_n % (2 * EPI_TILE_N) == 0 else 1
    tTR_rAcc = [
        [cute.make_rmem_tensor(slice_shape, Float32) for _ in range(num_products)] for _ in range(at_once)
    ]
    tTR_rOut = cute.make_rmem_tensor(EPI_TILE_N, Float32)
    if cutlass.const_expr(warms_up):
        for accumulators in tTR_rAcc:
            for accumulator in accumulators:
                accumulator.fill(0.0)
    held = cute.make_rmem_tensor(HELD_WORDS, Uint32)
    held.fill(Uint32(0))
    # Columns of an accumulator that form one run of output slices.
    interleave = INTERLEAVE.get(args.weight_layout, 0)
    period, period_slices = EPI_TILE_N, 1
    if cutlass.const_expr(interleave > 0):
        period, period_slices = 2 * interleave, interleave // EPI_TILE_N
    # Steps of the loop over slices. Columns shared with the other accumulator come first, so that the MMA can start on it.
    shared_steps = tile_n // period * period_slices
    if cutlass.const_expr(tmem.overlap_cols > 0):
        shared_steps = -(-tmem.overlap_cols // period) * period_slices
    shared_steps = -(-shared_steps // at_once)
    limit = None
    if cutlass.const_expr(args.outputs.limit is not None):
        limit = ptx.float_of(args.outputs.limit)

    first_pass = Int32(-1 if warms_up else 0)
    stage, phase, acc_idx, turn = Int32(0), Int32(CONSUMER_PHASE), Int32(0), Int32(0)
    while groups.has_tile(cursor):
        tile = groups.tile(cursor, config.work_tile_mnk)
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)
        is_last = not groups.has_tile(cursor)
        m_side, n_side = mma_sides(config, tile)
        first_row = m_side.first_row + args.m_rank * MMA_CTA_M
        row = first_row + tidx
        num_slices = used_columns(config, n_side, period) // period * period_slices
        columns = tile.n
        if cutlass.const_expr(interleave):
            # Interleaved weights: two rows of weights make one column of the output.
            columns = tile.n // 2
            n_side = TileSide(n_side.first_row // 2, n_side.extent // 2, n_side.origin)
        factors = factors_of_tile(args, tile, (m_side, n_side), row, tile_n // period * period_slices)
        target = target_of_tile(args, tile, (m_side, n_side), columns, first_row + warp_row, row)
        # Accumulators that share columns: they are the last columns of the first accumulator and the first of the second.
        num_tile_slices, num_steps = num_slices, ceil_div(num_slices, at_once)
        first_slice, slice_step = Int32(0), Int32(at_once)
        if cutlass.const_expr(tmem.overlap_cols):
            first_slice = (num_steps - 1) * at_once if acc_idx == 0 else Int32(0)
            slice_step = Int32(-at_once) if acc_idx == 0 else Int32(at_once)
        last_shared = cutlass.min(num_steps, shared_steps) - 1
        source = SliceSource(
            tiled_load,
            tTR_tAcc,
            acc_idx * tmem.acc_stride,
            num_tile_slices,
            args.weight_layout,
            tile_n,
        )
        if first_pass == 0:
            cute.arch.mbarrier_wait(acc.full(stage), phase)
            order_after_wait()
            if cutlass.const_expr(exchange is None):
                _read_slices(source, first_slice, tTR_rAcc)
        num_parts = None
        if cutlass.const_expr(skips_columns(config)):
            num_parts = parts_of_slice(n_side, num_slices)
        if cutlass.const_expr(exchange is not None):
            first_slice, num_steps = _exchange_slices(
                args, source, tTR_rAcc, warp_idx, stage, is_last, turn, num_parts
            )
            slice_step, last_shared = exchange.split, num_steps - 1
        # Not unrolled: a CTA has few tiles, and code that runs once costs more to fetch than to execute.
        for i in cutlass.range(first_pass, num_steps, unroll=1):
            slice_idx = first_slice + i * slice_step
            # tcgen05.ld is asynchronous: its registers may be read only after tcgen05.wait::ld.
            cute.arch.fence_view_async_tmem_load()
            if i == last_shared and not is_last:
                # The columns that the next MMA overwrites are in registers now: release them.
                with cute.arch.elect_one():
                    release(acc.empty(stage), args.leader_rank, config)
            if is_last and i == num_steps - 1:
                with cute.arch.elect_one():
                    give_back_tmem(args.tmem_unused, args.leader_rank, config)
            if cutlass.const_expr(exchange is not None):
                sums = tTR_rAcc[0] if args.integers is None else args.integers.sums(tTR_rAcc[0])
                add_slice(exchange, sums, warp_idx, slice_idx, num_tile_slices, num_parts)
            for j in cutlass.range_constexpr(at_once):
                result = result_of_slice(args, tTR_rAcc[j], factors, slice_idx + j, limit, num_parts)
                words = None
                if cutlass.const_expr(is_staged):
                    is_bf16 = args.out_dtype is cutlass.BFloat16
                    words = [pack_16x2(result[k], result[k + 1], is_bf16) for k in range(0, EPI_TILE_N, 2)]
                else:
                    tTR_rOut.store(result)
                if cutlass.const_expr(j + 1 == at_once):
                    if i >= 0 and i + 1 < num_steps:
                        _read_slices(source, slice_idx + slice_step, tTR_rAcc)
                if cutlass.const_expr(is_quantized):
                    column = n_side.first_row + slice_idx * EPI_TILE_N
                    slices = slice_idx, slice_step, num_slices
                    _store_quantized(args, tTR_rOut, held, target, (row, column), slices, encode)
                elif cutlass.const_expr(is_staged):
                    column = (slice_idx + j) * EPI_TILE_N
                    store_staged(words, target, column, i >= 0, across_lanes, staging)
                else:
                    store_slice(tTR_rOut, target, slice_idx * EPI_TILE_N, across_lanes)
            if cutlass.const_expr(warms_up):
                if i < 0:
                    cute.arch.mbarrier_wait(acc.full(stage), phase)
                    order_after_wait()
                    _read_slices(source, first_slice, tTR_rAcc)
        first_pass = Int32(0)
        if cutlass.const_expr(exchange is not None):
            # After the last tile nobody waits for room, and an arrival must not reach a CTA that has exited.
            if not is_last:
                give_room(exchange)
            turn ^= 1
        if cutlass.const_expr(args.chain is not None):
            args.chain.signal_stored(tile.slot)
        stage, phase = next_stage(acc, stage, phase)
        acc_idx = acc_idx + 1 if acc_idx + 1 < tmem.num_acc_stage else Int32(0)
    if cutlass.const_expr(args.chain is not None):
        if tidx == 0:
            args.chain.leave(cute.arch.grid_dim()[0])


def factors_of_tile(args: EpilogueArgs, tile: WorkTile, sides: tuple, row: Int32, num_slices: int) -> Factors:
    """Issues the loads of a tile's factors and bias.

    Args:
        sides: the tile's M side and N side.
        row: the thread's row of the M side.
        num_slices: slices of the output on the N side.
    """
    outputs, swaps = args.outputs, args.config.swap_ab
    (m_side, n_side), num_products = sides, 1 if args.activation is None else 2
    alphas = load_alphas(outputs, tile, num_products)
    scales = None if args.integers is None else args.integers.of_tile(tile, m_side, n_side, args.m_rank)
    row_scales = bias = None
    if outputs.row_scales is not None:
        row_scales = scales_of_slices(args, tile, n_side if swaps else m_side)
    if outputs.bias is not None:
        layout = None if num_products == 1 else args.weight_layout
        bias = bias_of_slices(outputs, tile, row, n_side.first_row, num_slices, swaps, layout)
    return Factors(alphas, scales, row_scales, bias)


def target_of_tile(
    args: EpilogueArgs, tile: WorkTile, sides: tuple, columns: Int32, warp_row: Int32, row: Int32
) -> object:
    """Returns the destination of a tile's results, as the record that the functions that store them take.

    Args:
        sides: the tile's M side and N side.
        columns: columns of the group's output.
        warp_row, row: first row of the warp, and the thread's row, on the M side.
    """
    how = args.out_dtype, args.out_m_major, args.config.swap_ab
    if args.outputs.scales is not None:
        return quantized_group(args.outputs, tile, columns, args.out_dtype)
    if args.out_dtype.width == 16:
        return staged_target(args.outputs, tile, warp_row, *sides, *how)
    return row_target(args.outputs, tile, row, *sides, *how)


def result_of_slice(
    args: EpilogueArgs,
    products: list,
    factors: Factors,
    slice_idx: Int32,
    limit: Float32 | None,
    num_parts: Int32 | None = None,
):
    """Returns the float32 results of a slice, given the slices of its products. All lanes of a warp must call it."""
    alphas, bias, swaps = factors.alphas, factors.bias, args.config.swap_ab
    is_dual = len(alphas) > 1
    if args.integers is not None:
        result = args.integers.results(products[0], factors.scales, slice_idx, alphas[0])
    else:
        if factors.row_scales is not None:
            products = times_row_scales(products, alphas, factors.row_scales, slice_idx, swaps)
            alphas = [Float32(1.0)] * len(alphas)
        if bias is not None and is_dual:
            products = slices_plus_biases(products, alphas, bias, slice_idx, swaps)
            alphas = [Float32(1.0)] * len(alphas)
        result = combine(products, alphas, args.activation, limit, num_parts)
    return result if bias is None or is_dual else slice_plus_bias(result, bias, slice_idx, swaps)


@cute.jit
def _exchange_slices(
    args: EpilogueArgs,
    source: SliceSource,
    registers: list,
    warp_idx: Int32,
    stage: Int32,
    is_last: Boolean,
    turn: Int32,
    num_parts: Int32 | None,
) -> tuple:
    """Sends the slices that other CTAs of a split-K cluster store, and begins to read the first slice that this CTA stores.

    Args:
        registers: destinations of slices.
        stage: of the accumulator, which is released here if the CTA stores none of its slices.
        is_last: whether this is the CTA's last tile.
        turn: parity of the exchange.
        num_parts: from :func:`parts_of_slice`, or None for all.

    Returns:
        This CTA's first slice, and their number.
    """
    exchange, num_slices = args.exchange, source.num_slices
    wait_for_room(exchange, turn)
    for slice_idx in cutlass.range(num_slices, unroll=1):
        if is_sent(exchange, warp_idx, slice_idx, num_slices):
            _read_slices(source, slice_idx, registers)
            cute.arch.fence_view_async_tmem_load()
            send_slice(exchange, registers[0], warp_idx, slice_idx, num_slices, num_parts)
    first_slice, num_own = own_slices(exchange, warp_idx, num_slices)
    if num_own > 0:
        _read_slices(source, first_slice, registers)
    else:
        with cute.arch.elect_one():
            if is_last:
                give_back_tmem(args.tmem_unused, args.leader_rank, args.config)
            else:
                release(args.acc.empty(stage), args.leader_rank, args.config)
    if cutlass.const_expr(num_parts is None):
        wait_for_sums(exchange, warp_idx, num_slices, turn)
    else:
        wait_for_sums(exchange, warp_idx, num_slices, turn, num_parts)
    return first_slice, num_own


@cute.jit
def _store_quantized(
    args: EpilogueArgs,
    values: cute.Tensor,
    held: cute.Tensor,
    target: QuantizedGroup,
    place: tuple,
    slices: tuple,
    encode: cutlass.Constexpr[Encoding],
):
    """Quantizes and stores a slice, or holds its words until the other half of their sector is ready.

    Args:
        held: words of the previous slice.
        place: the thread's row, and the slice's first column.
        slices: the slice, the distance to the next one, and the number of slices.
    """
    (row, column), (slice_idx, slice_step, num_slices) = place, slices
    if cutlass.const_expr(args.config.swap_ab):
        if cutlass.const_expr(skips_columns(args.config) and encode.format.scaling != "four_over_six"):
            # 4over6 adds up errors over neighboring lanes, but lanes with a block's parts are eight apart here.
            if target.rows - column > EPI_PART_N:
                _store_transposed(values, target, row, column, encode)
            else:
                _store_few(values, target, row, column, encode)
        else:
            _store_transposed(values, target, row, column, encode)
    elif cutlass.const_expr(args.exchange is not None or sector_columns(args.out_dtype) == RUN_COLUMNS):
        # Consecutive slices belong to different CTAs, or fill a sector each: store every run by itself.
        store_quantized_run(values, target, row, column, encode)
    else:
        is_lower = column % sector_columns(args.out_dtype) == 0
        other = slice_idx + 1 if is_lower else slice_idx - 1
        is_paired, is_first = other >= 0 and other < num_slices, other == slice_idx + slice_step
        store_quantized_half(values, held, target, row, column, is_paired, is_first, encode)


@cute.jit
def release(empty: cute.Pointer, leader_rank: Int32 | int, config: cutlass.Constexpr):
    """Releases an accumulator to the MMA, which is the leader's in a pair."""
    order_before_arrival()
    if cutlass.const_expr(config.num_mma_cta == 1):
        cute.arch.mbarrier_arrive(empty)
    else:
        cute.arch.mbarrier_arrive(empty, leader_rank)


@cute.jit
def give_back_tmem(tmem_unused: cute.Pointer, leader_rank: Int32 | int, config: cutlass.Constexpr):
    """Signals the warp that frees tensor memory, in both CTAs of a pair, that this warp has read its last accumulator."""
    order_before_arrival()
    if cutlass.const_expr(config.num_mma_cta == 2):
        for rank in cutlass.range_constexpr(config.num_mma_cta):
            cute.arch.mbarrier_arrive(tmem_unused, leader_rank + rank)
    else:
        cute.arch.mbarrier_arrive(tmem_unused)


@cute.jit
def _read_slices(source: SliceSource, slice_idx: Int32, destinations: list):
    """Issues the reads of consecutive slices, one per entry of ``destinations``, as far as there are any."""
    for j in cutlass.range_constexpr(len(destinations)):
        if cutlass.const_expr(j == 0):
            _read_slice(source, slice_idx, destinations[0])
        elif slice_idx + j < source.num_slices:
            _read_slice(source, slice_idx + j, destinations[j])


@cute.jit
def _read_slice(source: SliceSource, slice_idx: Int32, destinations: list):
    """Issues the reads of a slice of every product: in a dual GEMM the gate's, then the other's."""
    first = slice_idx * EPI_TILE_N
    columns = [first, first + source.tile_n]
    if cutlass.const_expr(source.weight_layout == "interleaved_64_up_first"):
        up = slice_idx // 2 * 128 + slice_idx % 2 * EPI_TILE_N
        columns = [up + 64, up]
    elif cutlass.const_expr(source.weight_layout == "interleaved_32_gate_first"):
        columns = [2 * first, 2 * first + 32]
    for i in cutlass.range_constexpr(len(destinations)):
        read_columns(source.tiled_load, source.tTR_tAcc, source.first_column + columns[i], destinations[i])


def read_columns(tiled_load: cute.TiledCopy, tTR_tAcc: cute.Tensor, column: Int32, destination: cute.Tensor):
    """Issues the read of the slice from ``column`` on. ``tcgen05.wait::ld`` must precede any use of its registers."""
    cute.copy(tiled_load, cute.make_tensor(tTR_tAcc.iterator + column, tTR_tAcc.layout), destination)


@cute.jit
def parts_of_slice(n_side: TileSide, num_slices: Int32) -> Int32:
    """Returns how many parts of EPI_PART_N columns of every slice of a tile are in use: all if there are several slices."""
    columns = EPI_TILE_N if num_slices > 1 else n_side.extent - n_side.first_row
    return cutlass.min(ceil_div(columns, EPI_PART_N), EPI_TILE_N // EPI_PART_N)


@cute.jit
def combine(
    accumulators: list,
    alphas: list,
    activation: cutlass.Constexpr,
    limit: Float32 | None,
    num_parts: Int32 | None = None,
):
    """Returns the float32 result of a slice from the slices of every product.

    num_parts: parts of the slice to which the activation is applied; None for all.
    """
    result = accumulators[0].load().reshape(EPI_TILE_N) * alphas[0]
    if cutlass.const_expr(activation is not None):
        other = accumulators[1].load().reshape(EPI_TILE_N) * alphas[1]
        gated = cute.make_rmem_tensor(EPI_TILE_N, Float32)
        if cutlass.const_expr(num_parts is None):
            for i in cutlass.range_constexpr(EPI_TILE_N):
                gated[i] = gate(result[i], other[i], activation, limit)
        else:
            gated.fill(0.0)
            for part in cutlass.range_constexpr(EPI_TILE_N // EPI_PART_N):
                if part < num_parts:
                    for i in cutlass.range_constexpr(EPI_PART_N * part, EPI_PART_N * (part + 1)):
                        factors = [accumulators[which][i] * alphas[which] for which in range(2)]
                        gated[i] = gate(*factors, activation, limit)
        result = gated.load()
    return result


def scales_of_slices(args: EpilogueArgs, tile: WorkTile, side: TileSide) -> list:
    """Issues the loads of global scales per row of ``a``: of the thread's row, or of one column per lane and slice.

    side: the side of ``a``.
    """
    tidx, _, _ = cute.arch.thread_idx()
    rows = [args.m_rank * MMA_CTA_M + tidx]
    if args.config.swap_ab:
        rows = [tidx % WARP_SIZE + first for first in range(0, args.config.cta_tile_shape_mnk[1], EPI_TILE_N)]
    return load_row_scales(args.outputs.row_scales, tile, side, rows)


@cute.jit
def times_row_scales(
    accumulators: list, alphas: list, scales: list, slice_idx: Int32, b_on_m: cutlass.Constexpr
) -> list:
    """Returns the slices of every product times alpha, then times the scale of the row of ``a``. All lanes must call it.

    scales: words from :func:`scales_of_slices`.
    """
    own = select_slot(scales, slice_idx) if b_on_m else scales[0]
    products = [cute.make_rmem_tensor(EPI_TILE_N, Float32) for _ in accumulators]
    for i in cutlass.range_constexpr(EPI_TILE_N):
        scale = ptx.float_of(cute.arch.shuffle_sync(own, i) if b_on_m else own)
        for which in cutlass.range_constexpr(len(accumulators)):
            products[which][i] = accumulators[which][i] * alphas[which] * scale
    return products


@cute.jit
def _store_transposed(
    values: cute.Tensor,
    group: QuantizedGroup,
    m_row: Int32,
    n_row: Int32,
    encode: cutlass.Constexpr[Encoding],
):
    """Quantizes and stores a slice whose rows of the M side (one per lane, from ``m_row`` on) are columns of the output."""
    lane = cute.arch.lane_idx()
    transpose_in_warp(values)
    store_quantized_run(values, group, n_row + lane, m_row - lane, encode)


@cute.jit
def _store_few(
    values: cute.Tensor,
    group: QuantizedGroup,
    m_row: Int32,
    n_row: Int32,
    encode: cutlass.Constexpr[Encoding],
):
    """Does what :func:`_store_transposed` does for the first EPI_PART_N columns of a slice.

    Each lane gets EPI_PART_N results of one row, and the next lanes with that row the rest of their block.
    """
    lane = cute.arch.lane_idx()
    part = cute.make_rmem_tensor(EPI_PART_N, Float32)
    for i in cutlass.range_constexpr(EPI_PART_N):
        part[i] = values[i]
    exchange_in_warp(part, ((0, 0), (1, 1), (2, 2)))
    results = [part[i] for i in range(EPI_PART_N)]
    magnitudes = [ptx.abs_f32(value) for value in results]
    amax = over_lanes(largest(magnitudes), encode.format.block_k // EPI_PART_N, EPI_PART_N)
    scale = scale_of_part(results, magnitudes, amax, group.global_scale, encode)
    column = m_row - lane + lane // EPI_PART_N * EPI_PART_N
    store_quantized_part(part, scale, group, n_row + lane % EPI_PART_N, column, encode)
