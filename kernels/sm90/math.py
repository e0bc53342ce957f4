"""MATH role: two warpgroups dequantize weights into registers, multiply them by the tokens, and store the result.

Each warpgroup has 64 rows of weights as MMA-M and all tokens of the tile as MMA-N, so the accumulator is C transposed. The
dequantized weights of half a K tile fill 16 registers. Two such sets alternate: one is dequantized while wgmma reads the other.
The packed weights of a K tile are read from shared memory while the previous K tile is multiplied.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup

from nvfp4_cute.planning.arch.sm90 import SLABS, k_tiles_of_stage, shares_stages, token_counts
from nvfp4_cute.planning.config import KernelConfig

from ..common import ptx, ue8m0
from ..common.decode import SIGN_BITS, decode_scales
from ..common.group_table import WorkTile
from ..common.output_kind import OutputKind
from ..common.output_table import OutputTable
from ..common.ring import CONSUMER_PHASE, Ring, arrive_lanes, arrive_warp, barrier_of_lane, next_stage
from ..common.shared_access import load_shared, load_shared_half
from ..common.split_k import PartialSums, add_sums, send_sums
from .epilogue import store_tile
from .fixup import Fixup, add, send
from .opaque import opaque
from .operands import SF_ATOM_BYTES, UNIT_BYTES, tokens_multiplied
from .packed import Packed
from .scheduler import ScheduledTiles
from .tile_walk import WalkedTiles
from .warp_schedule import WarpSchedule
from .weight_rows import LaneRows, lane_rows
from .wgmma import BF16, F16, multiply_slab, slab_matrix

# A lane holds two times eight values of a row for the MMAs of a slab. They share one scale.
SLAB_EIGHTS = 2
# Rows of weights per lane and MMA.
LANE_ROWS = 2
UNIT_WORDS = 4
# Global addresses use fewer than 57 bits.
UNUSED_ADDRESS_BITS = 57


@dataclass(frozen=True)
class MathArgs:
    """Inputs of the MATH role.

    Attributes:
        b_address, sfb_address: shared addresses of the packed weights and of their scales, stage 0.
        decoded_address: shared address of the fp16 tokens, stage 0: ``wgmma.slab_matrix``.
        staging_address: shared address where the epilogue transposes results, ``epilogue.STAGING_BYTES`` per warpgroup.
        b_stage_bytes, sfb_stage_bytes: bytes per stage of the weights and of their scales.
        tiles: work tiles of this CTA.
        partial: split-K exchange, where the first CTA of a cluster receives the partial sums of the others.
        stages_of_k_tile: stages of dequantized tokens per K tile.
        format: format of the packed weights.
        exponent: log2 of the factor that undoes the scaling of dequantized operands.
        fixup: stream-K fixup memory; None without stream-K.
        sent: mbarrier of ``fixup.send``. It is one of ``partial``'s, which stream-K does not use.
    """

    b_address: Int32
    sfb_address: Int32
    b_stage_bytes: int
    sfb_stage_bytes: int
    decoded_address: Int32
    staging_address: Int32
    tiles: WalkedTiles | ScheduledTiles
    outputs: OutputTable
    kind: OutputKind
    config: KernelConfig
    schedule: WarpSchedule
    partial: PartialSums
    packed: Ring
    decoded: Ring
    stages_of_k_tile: int
    format: Packed
    exponent: int
    fixup: Fixup | None
    sent: cute.Pointer


@dataclass(frozen=True)
class Weights:
    """Packed weights of one 16-byte unit in a lane's registers: a K tile of e2m1, or half of one of e4m3 or e5m2.

    Attributes:
        words: Uint32 (4 words of a unit, 2 rows): eight e2m1, or four e4m3 or e5m2 per word.
        codes: Uint32 (2 rows): two e4m3 scales of the unit, or the K tile's four ue8m0 scales.
    """

    words: cute.Tensor
    codes: cute.Tensor


@cute.jit
def run_math(args: MathArgs):
    """Accumulates the K tiles of each work tile, then scales, converts and stores the tile."""
    tiles, tile_m = args.tiles, args.config.work_tile_mnk[0]
    # Accumulator 4i + 2h + e belongs to weight row (lane's first + 8h) and token 8i + 2 * (lane % 4) + e.
    acc = cute.make_rmem_tensor(tile_m // 2, Float32)
    stage, phase = Int32(0), Int32(CONSUMER_PHASE)
    in_stage, in_phase = Int32(0), Int32(CONSUMER_PHASE)
    parity, unsent = Int32(0), Int32(1)
    place = tiles.first()
    while tiles.has_tile(place):
        part = tiles.part(place)
        tile = part.tile
        # First 16-byte unit of the lane's block of 32 values.
        unit = cute.arch.thread_idx()[0] % 4 * (args.format.block_bytes // UNIT_BYTES)
        rows = lane_rows(args.kind, tile, unit, args.format.row_bytes, args.format.atoms)
        tokens = opaque(tokens_multiplied(tile, args.config))
        stage, phase, in_stage, in_phase = _accumulate(
            args, acc, rows, tokens, part.count, stage, phase, in_stage, in_phase
        )
        if cutlass.const_expr(args.config.stream_k):
            if part.first > 0:
                send(args.fixup, acc, tokens, args.sent)
                unsent = Int32(0)
            else:
                # Read the part again here rather than keep it: its registers hold accumulators until now.
                add_others(args.fixup, args.config, acc, tokens, tiles.part(place).num_others)
                _store(args, acc, tiles.part(place).tile)
            tiles.release(place)
        else:
            parity = finish_tile(args.partial, acc, parity, lambda: _store(args, acc, tile))
        place = tiles.next(place)
    if cutlass.const_expr(args.config.stream_k):
        # FIXUP waits for every MATH warp, also in a CTA that sends nothing.
        if unsent == 1:
            arrive_warp(args.sent)


def _store(args: MathArgs, acc: cute.Tensor, tile: WorkTile):
    store_tile(acc, args.outputs, args.kind, tile, args.config, args.staging_address, args.exponent)


@cute.jit
def add_others(
    fixup: Fixup,
    config: cutlass.Constexpr[KernelConfig],
    acc: cute.Tensor,
    tokens: Int32,
    num_others: Int32,
):
    """Adds the partial sums of the ``num_others`` preceding clusters, which have the tile's other K tiles."""
    cta = cute.arch.block_idx()[0]
    for _ in cutlass.range(num_others, unroll=1):
        cta -= config.cluster_size
        add(fixup, acc, tokens, cta, not config.decode_first)


@cute.jit
def finish_tile(partial: PartialSums, sums: cute.Tensor, parity: Int32, store: cutlass.Constexpr) -> Int32:
    """Reduces a tile over the CTAs of a cluster (split-K) and stores it from the first CTA.

    Args:
        partial: exchange of partial sums.
        sums: accumulators of this CTA's K tiles.
        parity: 0 or 1, the phase of the exchange barriers.
        store: called in the first CTA when the sums are complete.

    Returns:
        The parity for the next tile.
    """
    if cutlass.const_expr(partial.split == 1):
        store()
    else:
        if cute.arch.block_idx_in_cluster() == 0:
            add_sums(partial, sums, cute.arch.thread_idx()[0], parity)
            store()
            _give_room(partial)
        else:
            send_sums(partial, sums, Int32(0), parity)
        parity ^= 1
    return parity


@cute.jit
def _give_room(partial: PartialSums):
    """Lets the other CTAs of the cluster send their next partial sums; called by the first CTA.

    One lane arrives at all CTAs in turn. ``common.split_k.give_room`` uses one lane per CTA, with which ptxas moves the K loop's
    stage counter of some tiles into uniform registers.
    """
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for sender in cutlass.range_constexpr(1, partial.split):
            cute.arch.mbarrier_arrive(partial.empty, Int32(sender))


@cute.jit
def _accumulate(
    args: MathArgs,
    acc: cute.Tensor,
    rows: LaneRows,
    tokens: Int32,
    k_tile_cnt: Int32,
    stage: Int32,
    phase: Int32,
    in_stage: Int32,
    in_phase: Int32,
):
    """Accumulates one work tile. Only the first ``tokens`` columns of ``acc`` are computed; the rest stay 0.

    Returns the four ring positions (stage, phase, in_stage, in_phase) for the next tile.
    """
    tile_m = args.config.work_tile_mnk[0]
    acc.fill(0.0)
    weights = Weights(
        cute.make_rmem_tensor((UNIT_WORDS, LANE_ROWS), Uint32), cute.make_rmem_tensor(LANE_ROWS, Uint32)
    )
    # The first arrival has no stage to release. It goes to a spare barrier after the last stage's, which nobody waits for.
    last_stage, read_stage, sign_bits = Int32(args.decoded.num_stages), stage, opaque(Uint32(SIGN_BITS))
    emptied = barrier_of_lane(args.decoded.empty(Int32(0)), args.config.num_m_cta)
    one_ring, k_tiles = shares_stages(args.config), k_tiles_of_stage(args.config)
    slabs, slabs_of_stage = k_tiles * SLABS, k_tiles * SLABS // args.stages_of_k_tile
    slabs_of_unit = args.format.slabs_of_unit
    sources, steps = _sources(args, rows), cute.ceil_div(k_tile_cnt, k_tiles)
    if k_tile_cnt > 0:
        stage, phase = _load_stage(args, weights, sources, stage, phase)
    for step in cutlass.range(steps, unroll=1):
        if cutlass.const_expr(one_ring):
            in_stage = read_stage
        for slab in cutlass.range_constexpr(slabs):
            if cutlass.const_expr(slab % SLABS == 0):
                scales = [_unit_scales(args.format, weights.codes[i]) for i in range(LANE_ROWS)]
            if cutlass.const_expr(slab % slabs_of_stage == 0):
                # wgmma reads descriptors from uniform registers. Moved once here; otherwise the compiler moves each one
                # separately.
                uniform_stage = cute.arch.make_warp_uniform(in_stage)
            decoded = _decode_slab(args.format, weights.words, scales, slab % SLABS, sign_bits)
            if cutlass.const_expr(slab % slabs_of_stage == 0 and not one_ring):
                cute.arch.mbarrier_wait(args.decoded.full(in_stage), in_phase)
            place = uniform_stage * slabs_of_stage + slab % slabs_of_stage
            matrix = slab_matrix(args.decoded_address, place, tile_m)
            counts, most = token_counts(tile_m), args.schedule.mma_tokens
            operands = BF16 if args.format.has_powers else F16
            multiply_slab(acc, decoded, tokens, counts, most, matrix, operands)
            if cutlass.const_expr(slab == SLABS - slabs_of_unit and not one_ring):
                # Release only after wgmma has consumed the registers: an mbarrier.arrive right after shared-memory reads does not
                # wait for them on an H200.
                arrive_warp(args.packed.empty(read_stage))
            if cutlass.const_expr(slab == slabs - 1):
                read_stage = stage
                if step + 1 < steps:
                    stage, phase = _load_stage(args, weights, sources, stage, phase)
            loads_next = slab < slabs - 1 and (slab + 1) % slabs_of_unit == 0
            if cutlass.const_expr(loads_next and slab % slabs_of_stage > 0):
                _load_weights(args, weights, sources, read_stage, slab + 1)
            # Wait for the previous slab's MMAs: their registers are free now, and after a stage's last slab so is the stage.
            warpgroup.wait_group(1)
            if cutlass.const_expr(slab % slabs_of_stage == 0):
                arrive_lanes(emptied + last_stage, args.config.num_m_cta)
                # Load after the arrival, so that no read is in flight when a stage is released.
                if cutlass.const_expr(loads_next):
                    _load_weights(args, weights, sources, read_stage, slab + 1)
            if cutlass.const_expr(slab % slabs_of_stage == slabs_of_stage - 1):
                last_stage = in_stage
                if cutlass.const_expr(not one_ring):
                    in_stage, in_phase = next_stage(args.decoded, in_stage, in_phase)
    warpgroup.wait_group(0)
    if k_tile_cnt > 0:
        released = emptied + last_stage
        if cutlass.const_expr(one_ring):
            words = [weights.codes[0], weights.codes[1], weights.words[0, 0], weights.words[0, 1]]
            released += after_reads(words, args.outputs)
        arrive_lanes(released, args.config.num_m_cta)
    return stage, phase, in_stage, in_phase


def _sources(args: MathArgs, rows: LaneRows) -> LaneRows:
    """Turns the lane's offsets within a stage into shared addresses of stage 0."""
    scale = args.sfb_address + rows.scale
    if not args.format.has_powers:
        # A scale atom holds four scales per row; the lane's unit uses two of them.
        unit = cute.arch.thread_idx()[0] % 4
        scale = scale + unit // 2 * SF_ATOM_BYTES + unit % 2 * 2
    return replace(rows, data=opaque(args.b_address + rows.data), scale=opaque(scale))


@cute.jit
def _load_stage(args: MathArgs, weights: Weights, rows: LaneRows, stage: Int32, phase: Int32):
    """Waits for a packed stage and reads the lane's unit of its first slab. Returns the next (stage, phase)."""
    cute.arch.mbarrier_wait(args.packed.full(stage), phase)
    _load_weights(args, weights, rows, stage, 0)
    return next_stage(args.packed, stage, phase)


@cute.jit
def _load_weights(args: MathArgs, weights: Weights, rows: LaneRows, stage: Int32, slab: cutlass.Constexpr):
    """Reads the lane's unit that starts at ``slab`` of a stage, and at the start of a K tile also its scales.

    rows: result of ``_sources``.
    """
    k_tiles, k_tile = k_tiles_of_stage(args.config), slab // SLABS
    data = rows.data + stage * args.b_stage_bytes + k_tile * (args.b_stage_bytes // k_tiles)
    scale = rows.scale + stage * args.sfb_stage_bytes + k_tile * (args.sfb_stage_bytes // k_tiles)
    if cutlass.const_expr(slab % SLABS > 0):
        # The block's second unit. XOR is enough because stages start at whole swizzle spans.
        data = data ^ UNIT_BYTES
    for i in cutlass.range_constexpr(LANE_ROWS):
        words = load_shared(data + i * rows.data_step, UNIT_WORDS)
        for word in cutlass.range_constexpr(UNIT_WORDS):
            weights.words[word, i] = words[word]
        if cutlass.const_expr(slab % SLABS > 0):
            pass
        elif cutlass.const_expr(args.format.has_powers):
            weights.codes[i] = load_shared(scale + i * rows.scale_step, 1)[0]
        else:
            weights.codes[i] = load_shared_half(scale + i * rows.scale_step)


def after_reads(words: list, outputs: OutputTable) -> Int32:
    """Returns 0 in a way that depends on ``words``: an address computed from it is not known before they have been read.

    An mbarrier.arrive does not wait for earlier shared-memory reads otherwise.
    """
    read = words[0]
    for word in words[1:]:
        read = read | word
    return Int32(read & Uint32(unknown_zero(outputs)))


def unknown_zero(outputs: OutputTable) -> Int64:
    """Returns 0. The compiler cannot know that no address has bits this high."""
    return outputs.addresses[0] >> UNUSED_ADDRESS_BITS


def _unit_scales(format: Packed, codes: Uint32) -> Uint32:
    """Returns the two scales of the lane's unit, one per slab, as a pair of 16-bit floats."""
    if not format.has_powers:
        return decode_scales(codes)
    unit = Uint32(cute.arch.thread_idx()[0] % 4)
    return ue8m0.powers(ptx.prmt(codes, Uint32(0), ue8m0.BOTH_UPPER + unit * ue8m0.BOTH_UPPER_STEP))


def _decode_slab(format: Packed, words: cute.Tensor, scales: list, slab: int, sign_bits: Uint32) -> list:
    """Dequantizes the weights of a slab's MMAs into the order that ``multiply_slab`` expects."""
    decoded, eights = [], UNIT_WORDS // format.words
    for eight in range(SLAB_EIGHTS):
        first = (SLAB_EIGHTS * slab + eight) % eights * format.words
        rows = [
            format.decode_halves(
                [words[first + word, i] for word in range(format.words)],
                scales[i],
                (slab == 1, slab == 1),
                sign_bits,
            )
            for i in range(LANE_ROWS)
        ]
        decoded += [row[pair] for pair in range(4) for row in rows]
    return decoded
