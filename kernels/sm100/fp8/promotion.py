"""EPILOGUE role for FP8: two warpgroups promote the products of each K tile and store the results.

Consumes ``acc`` and the ring of scales. Thread t of each warpgroup has row t of the CTA's part of the tile (tensor-memory lane
t) and half of its columns, or half of each product's. Slice by slice it reads an accumulator of 128 values of K, multiplies it
by both scales, and adds it to float32 sums in registers (DeepSeek-V3 report, section 3.3.2).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from nvfp4_cute.planning.arch.sm100.limits import EPI_TILE_N, MMA_CTA_M
from nvfp4_cute.planning.arch.sm100_fp8 import PROMOTING_GROUPS, scale_counts

from ...common import ptx
from ...common.fp32_scales import SCALE_BYTES
from ...common.output_table import load_alphas
from ...common.ptx import pack_16x2
from ...common.quantized_output import quantized_group
from ...common.ring import arrive_lanes, consumer_place
from ...common.shared_access import load_shared
from ...common.sides import mma_sides
from ...common.split_k import k_share
from ...common.warp_schedule import WARP_SIZE
from ..bias import bias_of_slices, slice_plus_bias
from ..columns import used_columns
from ..epilogue import (
    TMEM_ALIGN,
    EpilogueArgs,
    combine,
    give_back_tmem,
    read_columns,
    release,
    slice_copy,
    wait_for_start,
)
from ..instructions import order_after_wait
from ..split_k import add_slice, give_room, is_sent, send_slice, wait_for_room, wait_for_sums
from ..staging import WARP_BYTES, staged_target, store_staged
from ..store import row_target, store_slice
from .quantized_results import BlockPlace, store_columns, store_rows
from .scales import StagedScales

# Columns whose scales a lane reads at once.
COLUMNS_AT_ONCE = 4


@cute.jit
def run_promotion(args: EpilogueArgs, scales: StagedScales, first_tile: Int32, stride: Int32):
    """Promotes the accumulators of each tile's K tiles, then scales, converts and stores the sums."""
    acc, config, groups, exchange = args.acc, args.config, args.groups, args.exchange
    cursor = groups.first_cursor(first_tile, config.work_tile_mnk)
    wait_for_start(args)
    tmem_ptr = cute.arch.retrieve_tmem_ptr(Float32, TMEM_ALIGN, args.tmem_address)
    tidx, _, _ = cute.arch.thread_idx()
    thread, group = tidx % MMA_CTA_M, cute.arch.make_warp_uniform(tidx // MMA_CTA_M)
    warp_idx = cute.arch.make_warp_uniform(tidx // WARP_SIZE)
    quarter = cute.arch.make_warp_uniform(thread // WARP_SIZE)
    staging = args.staging + warp_idx * WARP_BYTES
    is_quantized = args.outputs.scales is not None
    is_staged = not is_quantized and args.out_dtype.width == 16
    across_lanes = args.out_m_major != config.swap_ab
    num_products, tile_n = 1 if args.activation is None else 2, config.cta_tile_shape_mnk[1]
    num_slices = tile_n // (PROMOTING_GROUPS * EPI_TILE_N)
    # Columns read at once, while the previous ones are promoted. Fewer if columns have scales, which also take registers.
    read = EPI_TILE_N // 2 if config.swap_ab else EPI_TILE_N
    product_parts = num_slices * EPI_TILE_N // read
    num_parts = num_products * product_parts
    tiled_load, tTR_tAcc, read_shape = slice_copy(tmem_ptr, thread, read)
    tTR_rAcc = [cute.make_rmem_tensor(read_shape, Float32) for _ in range(min(num_parts, 2))]
    sums = [
        [cute.make_rmem_tensor(EPI_TILE_N, Float32) for _ in range(num_slices)] for _ in range(num_products)
    ]
    limit = None
    if cutlass.const_expr(args.outputs.limit is not None):
        limit = ptx.float_of(args.outputs.limit)
    result = cute.make_rmem_tensor(EPI_TILE_N, Float32)
    # Quantized results of a thread's row, if that is a row of the output.
    rows_of, block_place = sums[0], BlockPlace(group, quarter, args.staging)
    first_slice = group * num_slices
    # Offsets in a stage: the scale of the thread's token, or of the first of its columns, and of the warpgroup's weights.
    num_tokens, num_blocks = scale_counts(config)
    of_token = (first_slice * EPI_TILE_N if config.swap_ab else thread) * SCALE_BYTES
    of_weight = (num_tokens + group * (num_blocks - 1)) * SCALE_BYTES
    # Number of earlier K tiles gives the positions in both rings.
    k_tile, turn = Int32(0), Int32(0)
    while groups.has_tile(cursor):
        tile = groups.tile(cursor, config.work_tile_mnk)
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)
        m_side, n_side = mma_sides(config, tile)
        first_row = m_side.first_row + args.m_rank * MMA_CTA_M
        row = first_row + thread
        num_tile_slices = used_columns(config, n_side, EPI_TILE_N) // EPI_TILE_N
        # Slices of this warpgroup that contain columns of the group.
        num_used = num_tile_slices - first_slice
        for product in sums:
            for part in product:
                part.fill(0.0)
        first_k_tile, count = k_share(tile.k_tile_cnt, config.split_k)
        for i in cutlass.range(count, unroll=1):
            scale_stage, scale_phase = consumer_place(scales.ring, k_tile)
            stage, phase = consumer_place(acc, k_tile)
            cute.arch.mbarrier_wait(acc.full(stage), phase)
            order_after_wait()
            # Release after a wait that ptxas does not move the uses of the scales across; otherwise the arrival may overtake
            # their reads.
            if i > 0:
                release_scales(scales, k_tile - 1)
            column = stage * args.tmem.acc_stride + first_slice * EPI_TILE_N
            read_columns(tiled_load, tTR_tAcc, column, tTR_rAcc[0])
            cute.arch.mbarrier_wait(scales.ring.full(scale_stage), scale_phase)
            at = scales.at(scale_stage, config)
            # Scale of the row; where every column is another token, the scale of the weights.
            factors = [_scale(at + of_weight + i * (num_blocks * SCALE_BYTES)) for i in range(num_products)]
            if cutlass.const_expr(not config.swap_ab):
                of_row = _scale(at + of_token)
                factors = [factor * of_row for factor in factors]
            for part in cutlass.range_constexpr(num_parts):
                cute.arch.fence_view_async_tmem_load()
                is_last = part + 1 == num_parts
                product, following = divmod(part + 1, product_parts)
                following = column + product * tile_n + following * read
                if cutlass.const_expr(is_last):
                    with cute.arch.elect_one():
                        release(acc.empty(stage), args.leader_rank, config)
                else:
                    read_columns(tiled_load, tTR_tAcc, following, tTR_rAcc[(part + 1) % 2])
                product, first = part // product_parts, part % product_parts * read
                of_slice, first = first // EPI_TILE_N, first % EPI_TILE_N
                tokens = None
                if cutlass.const_expr(config.swap_ab):
                    tokens = at + of_token + of_slice * (EPI_TILE_N * SCALE_BYTES)
                _promote(sums[product][of_slice], first, tTR_rAcc[part % 2], factors[product], tokens)
            k_tile += 1
        release_scales(scales, k_tile - 1)
        if cutlass.const_expr(config.split_k > 1):
            # A K tile beyond the last one has no scales: discard whatever it was multiplied by.
            if first_k_tile >= tile.k_tile_cnt:
                for product in sums:
                    for part in product:
                        part.fill(0.0)

        alphas = load_alphas(args.outputs, tile, num_products)
        bias = None
        if cutlass.const_expr(args.outputs.bias is not None):
            first_column = n_side.first_row + first_slice * EPI_TILE_N
            bias = bias_of_slices(args.outputs, tile, row, first_column, num_slices, config.swap_ab)
        place = (args.out_dtype, args.out_m_major, config.swap_ab)
        if cutlass.const_expr(is_quantized):
            target = quantized_group(args.outputs, tile, tile.n, args.out_dtype)
        elif cutlass.const_expr(is_staged):
            warp_row = first_row + quarter * WARP_SIZE
            target = staged_target(args.outputs, tile, warp_row, m_side, n_side, *place)
        else:
            target = row_target(args.outputs, tile, row, m_side, n_side, *place)
        if cutlass.const_expr(exchange is not None):
            wait_for_room(exchange, turn)
            for j in cutlass.range_constexpr(num_slices):
                if j < num_used and is_sent(exchange, quarter, first_slice + j, num_tile_slices):
                    send_slice(
                        exchange, [product[j] for product in sums], quarter, first_slice + j, num_tile_slices
                    )
            wait_for_sums(exchange, warp_idx, num_tile_slices, turn)
        for j in cutlass.range_constexpr(num_slices):
            slice_idx = first_slice + j
            is_own = j < num_used
            if cutlass.const_expr(exchange is not None):
                is_own = is_own and not is_sent(exchange, quarter, slice_idx, num_tile_slices)
            if is_own:
                if cutlass.const_expr(exchange is not None):
                    add_slice(exchange, [product[j] for product in sums], quarter, slice_idx, num_tile_slices)
                values = combine([product[j] for product in sums], alphas, args.activation, limit)
                if cutlass.const_expr(bias is not None):
                    values = slice_plus_bias(values, bias, j, config.swap_ab)
                if cutlass.const_expr(is_quantized and config.swap_ab):
                    result.store(values)
                    first_token = n_side.first_row + slice_idx * EPI_TILE_N
                    store_columns(result, target, first_token, first_row, block_place)
                elif cutlass.const_expr(is_quantized):
                    rows_of[j].store(values)
                elif cutlass.const_expr(is_staged):
                    is_bf16 = args.out_dtype is cutlass.BFloat16
                    words = [pack_16x2(values[k], values[k + 1], is_bf16) for k in range(0, EPI_TILE_N, 2)]
                    store_staged(words, target, slice_idx * EPI_TILE_N, Boolean(True), across_lanes, staging)
                else:
                    result.store(values)
                    store_slice(result, target, slice_idx * EPI_TILE_N, across_lanes)
        if cutlass.const_expr(is_quantized and not config.swap_ab):
            store_rows(rows_of, target, row, n_side.first_row + first_slice * EPI_TILE_N, block_place)
        if cutlass.const_expr(exchange is not None):
            # After the last tile nobody waits for room, and an arrival must not reach a CTA that has exited.
            if groups.has_tile(cursor):
                give_room(exchange)
            turn ^= 1
    with cute.arch.elect_one():
        give_back_tmem(args.tmem_unused, args.leader_rank, config)


@cute.jit
def release_scales(scales: StagedScales, k_tile: Int32):
    """Releases the stage of a K tile, counted from the CTA's first one. All lanes of a warp must call it."""
    stage, _ = consumer_place(scales.ring, k_tile)
    arrive_lanes(scales.ring.empty(stage), 1)


def _scale(address: Int32) -> Float32:
    """Loads a scale from shared memory."""
    (word,) = load_shared(address, 1, True)
    return ptx.float_of(word)


@cute.jit
def _promote(
    sums: cute.Tensor,
    first: cutlass.Constexpr[int],
    products: cute.Tensor,
    factor: Float32,
    tokens: Int32 | None,
):
    """Adds products times both scales to the sums from ``first`` on.

    Args:
        factor: product of both scales, or the scale of the weights if every column is another token.
        tokens: shared address of the tokens' scales; None if ``factor`` includes them.
    """
    for i in cutlass.range_constexpr(0, cute.size(products), COLUMNS_AT_ONCE):
        factors = [factor] * COLUMNS_AT_ONCE
        if cutlass.const_expr(tokens is not None):
            words = load_shared(tokens + (first + i) * SCALE_BYTES, COLUMNS_AT_ONCE, True)
            factors = [ptx.float_of(word) * factor for word in words]
        for j in cutlass.range_constexpr(COLUMNS_AT_ONCE):
            column = first + i + j
            sums[column] = ptx.fma_f32(products[i + j], factors[j], sums[column])
