"""MATH role: two warpgroups that decode weights into registers, multiply them with the tokens, and store the result.

Each warpgroup has 64 rows of weights as MMA-M and all tokens of the tile as MMA-N: the result is C transposed. The
decoded weights of half a K tile fill 16 registers; two sets alternate, so that one is decoded while the other multiplies. The
packed weights of a K tile are read while the one before multiplies.
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
from .handover import Handover, add, send
from .opaque import opaque
from .operands import SF_ATOM_BYTES, UNIT_BYTES, tokens_multiplied
from .packed import Packed
from .scheduler import ScheduledTiles
from .tile_walk import WalkedTiles
from .warp_schedule import WarpSchedule
from .weight_rows import LaneRows, lane_rows
from .wgmma import multiply_slab, slab_matrix

# A lane has twice eight values of a row for the MMAs of a slab, which have one scale.
SLAB_EIGHTS = 2
# Rows of weights that a lane has of an MMA.
LANE_ROWS = 2
UNIT_WORDS = 4
# Addresses of global memory have less bits.
UNUSED_ADDRESS_BITS = 57


@dataclass(frozen=True)
class MathArgs:
    """What the warpgroups read.

    Attributes:
        b_address, sfb_address: shared addresses of the packed weights and of their scales, stage 0.
        decoded_address: shared address of the fp16 tokens, stage 0: ``wgmma.slab_matrix``.
        staging_address: shared address where results are turned, ``epilogue.STAGING_BYTES`` a warpgroup.
        b_stage_bytes, sfb_stage_bytes: of the weights of one stage, and of their scales.
        tiles: what the CTA computes.
        partial: where the first CTA of a cluster gets the others' sums.
        stages_of_k_tile: of decoded tokens.
        format: of the packed weights.
        exponent: log2 of what sums of decoded products must be multiplied with.
        handover: of stream-K: what clusters that share a tile exchange sums through.
        sent: the barrier of ``handover.send``: one of ``partial``'s, which stream-K does not use.
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
    handover: Handover | None
    sent: cute.Pointer


@dataclass(frozen=True)
class Weights:
    """Packed weights of a K tile in a lane's registers, or of half of one: what a unit has.

    Attributes:
        words: (4 words of a unit, 2 rows) of eight e2m1, or of four e4m3 or e5m2.
        codes: a row's two e4m3 scales of the unit, or the K tile's four of ue8m0.
    """

    words: cute.Tensor
    codes: cute.Tensor


@cute.jit
def run_math(args: MathArgs):
    """For each tile: accumulate its K tiles, then scale, convert and store."""
    tiles, tile_m = args.tiles, args.config.work_tile_mnk[0]
    # Value 4i + 2h + e: weight row h * 8 below the lane's first, token 8i + 2 * (lane % 4) + e.
    acc = cute.make_rmem_tensor(tile_m // 2, Float32)
    stage, phase = Int32(0), Int32(CONSUMER_PHASE)
    in_stage, in_phase = Int32(0), Int32(CONSUMER_PHASE)
    turn, owes = Int32(0), Int32(1)
    place = tiles.first()
    while tiles.has_tile(place):
        part = tiles.part(place)
        tile = part.tile
        # Of the lane's block of 32 values.
        unit = cute.arch.thread_idx()[0] % 4 * (args.format.block_bytes // UNIT_BYTES)
        rows = lane_rows(args.kind, tile, unit, args.format.row_bytes, args.format.atoms)
        tokens = opaque(tokens_multiplied(tile, args.config))
        stage, phase, in_stage, in_phase = _accumulate(
            args, acc, rows, tokens, part.count, stage, phase, in_stage, in_phase
        )
        if cutlass.const_expr(args.config.stream_k):
            if part.first > 0:
                send(args.handover, acc, tokens, args.sent)
                owes = Int32(0)
            else:
                # Read again where it is needed: until then its registers are sums'.
                _add_others(args, acc, tokens, tiles.part(place).num_others)
                _store(args, acc, tiles.part(place).tile)
            tiles.release(place)
        else:
            turn = finish_tile(args.partial, acc, turn, lambda: _store(args, acc, tile))
        place = tiles.next(place)
    if cutlass.const_expr(args.config.stream_k):
        if owes == 1:
            arrive_warp(args.sent)


def _store(args: MathArgs, acc: cute.Tensor, tile: WorkTile):
    store_tile(acc, args.outputs, args.kind, tile, args.config, args.staging_address, args.exponent)


@cute.jit
def _add_others(args: MathArgs, acc: cute.Tensor, tokens: Int32, num_others: Int32):
    """Add what the clusters before this one, so many, have summed up of the tile's other K tiles."""
    cta = cute.arch.block_idx()[0]
    for _ in cutlass.range(num_others, unroll=1):
        cta -= args.config.cluster_size
        add(args.handover, acc, tokens, cta)


@cute.jit
def finish_tile(partial: PartialSums, sums: cute.Tensor, turn: Int32, store: cutlass.Constexpr) -> Int32:
    """Store a tile's sums, in the first CTA of a cluster, which adds up all of them.

    Args:
        sums: of this CTA's K tiles.
        turn: 0 or 1, the parity of the exchange.
        store: called where they are complete.

    Returns:
        The next tile's turn.
    """
    if cutlass.const_expr(partial.split == 1):
        store()
    else:
        if cute.arch.block_idx_in_cluster() == 0:
            add_sums(partial, sums, cute.arch.thread_idx()[0], turn)
            store()
            _give_room(partial)
        else:
            send_sums(partial, sums, Int32(0), turn)
        turn ^= 1
    return turn


@cute.jit
def _give_room(partial: PartialSums):
    """In the first CTA: let the others send the next sums. As ``common.split_k.give_room``, but each CTA by its number: with
    a lane for each, the assembler moves the K loop's count of stages of some tiles into uniform registers.
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
    """Sum the K tiles of one work tile, of whose tokens so many are multiplied, into as many registers of ``acc``."""
    tile_m = args.config.work_tile_mnk[0]
    acc.fill(0.0)
    weights = Weights(
        cute.make_rmem_tensor((UNIT_WORDS, LANE_ROWS), Uint32), cute.make_rmem_tensor(LANE_ROWS, Uint32)
    )
    # The first arrival releases no stage: nobody waits for the barrier behind the last stage's.
    last_stage, read_stage, sign_bits = Int32(args.decoded.num_stages), stage, opaque(Uint32(SIGN_BITS))
    emptied = barrier_of_lane(args.decoded.empty(Int32(0)), args.config.num_m_cta)
    one_ring, k_tiles = shares_stages(args.config), k_tiles_of_stage(args.config)
    slabs, slabs_of_stage = k_tiles * SLABS, k_tiles * SLABS // args.stages_of_k_tile
    slabs_of_unit = args.format.slabs_of_unit
    sources, turns = _sources(args, rows), cute.ceil_div(k_tile_cnt, k_tiles)
    if k_tile_cnt > 0:
        stage, phase = _load_stage(args, weights, sources, stage, phase)
    for turn in cutlass.range(turns, unroll=1):
        if cutlass.const_expr(one_ring):
            in_stage = read_stage
        for slab in cutlass.range_constexpr(slabs):
            if cutlass.const_expr(slab % SLABS == 0):
                scales = [_unit_scales(args.format, weights.codes[i]) for i in range(LANE_ROWS)]
            if cutlass.const_expr(slab % slabs_of_stage == 0):
                # MMAs' descriptors in uniform registers: without this the compiler moves each one there by itself.
                uniform_stage = cute.arch.make_warp_uniform(in_stage)
            decoded = _decode_slab(args.format, weights.words, scales, slab % SLABS, sign_bits)
            if cutlass.const_expr(slab % slabs_of_stage == 0 and not one_ring):
                cute.arch.mbarrier_wait(args.decoded.full(in_stage), in_phase)
            place = uniform_stage * slabs_of_stage + slab % slabs_of_stage
            matrix = slab_matrix(args.decoded_address, place, tile_m)
            counts, most = token_counts(tile_m), args.schedule.mma_tokens
            multiply_slab(acc, decoded, tokens, counts, most, matrix, args.format.has_powers)
            if cutlass.const_expr(slab == SLABS - slabs_of_unit and not one_ring):
                # The MMAs have what was read. An arrival right behind the reads does not wait for them on an H200.
                arrive_warp(args.packed.empty(read_stage))
            if cutlass.const_expr(slab == slabs - 1):
                read_stage = stage
                if turn + 1 < turns:
                    stage, phase = _load_stage(args, weights, sources, stage, phase)
            loads_next = slab < slabs - 1 and (slab + 1) % slabs_of_unit == 0
            if cutlass.const_expr(loads_next and slab % slabs_of_stage > 0):
                _load_weights(args, weights, sources, read_stage, slab + 1)
            # The MMAs before these are done: their registers are free, after a stage's last ones the stage, too.
            warpgroup.wait_group(1)
            if cutlass.const_expr(slab % slabs_of_stage == 0):
                arrive_lanes(emptied + last_stage, args.config.num_m_cta)
                # Behind the arrival: no read is under way when a stage is released.
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
            released += behind_reads(words, args.outputs)
        arrive_lanes(released, args.config.num_m_cta)
    return stage, phase, in_stage, in_phase


def _sources(args: MathArgs, rows: LaneRows) -> LaneRows:
    """Shared addresses in stage 0 instead of offsets in a stage."""
    scale = args.sfb_address + rows.scale
    if not args.format.has_powers:
        # A lane's unit has two of the four scales that an atom has of a row.
        unit = cute.arch.thread_idx()[0] % 4
        scale = scale + unit // 2 * SF_ATOM_BYTES + unit % 2 * 2
    return replace(rows, data=opaque(args.b_address + rows.data), scale=opaque(scale))


@cute.jit
def _load_stage(args: MathArgs, weights: Weights, rows: LaneRows, stage: Int32, phase: Int32):
    """Wait for the packed stage and read of its first slab; the stage after it."""
    cute.arch.mbarrier_wait(args.packed.full(stage), phase)
    _load_weights(args, weights, rows, stage, 0)
    return next_stage(args.packed, stage, phase)


@cute.jit
def _load_weights(args: MathArgs, weights: Weights, rows: LaneRows, stage: Int32, slab: cutlass.Constexpr):
    """Read the lane's unit that begins with a slab of a stage, and with a K tile its scales. rows: ``_sources``."""
    k_tiles, k_tile = k_tiles_of_stage(args.config), slab // SLABS
    data = rows.data + stage * args.b_stage_bytes + k_tile * (args.b_stage_bytes // k_tiles)
    scale = rows.scale + stage * args.sfb_stage_bytes + k_tile * (args.sfb_stage_bytes // k_tiles)
    if cutlass.const_expr(slab % SLABS > 0):
        # The block's second unit. Stages begin with whole swizzle spans.
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


def behind_reads(words: list, outputs: OutputTable) -> Int32:
    """0: an address that it is added to is known when ``words`` have been read. An arrival does not wait for that otherwise."""
    read = words[0]
    for word in words[1:]:
        read = read | word
    return Int32(read & Uint32(unknown_zero(outputs)))


def unknown_zero(outputs: OutputTable) -> Int64:
    """0. No address has bits there, which the compiler does not know."""
    return outputs.addresses[0] >> UNUSED_ADDRESS_BITS


def _unit_scales(format: Packed, codes: Uint32) -> Uint32:
    """Scales of the lane's unit in either slab, as a pair of floats."""
    if not format.has_powers:
        return decode_scales(codes)
    unit = Uint32(cute.arch.thread_idx()[0] % 4)
    return ue8m0.powers(ptx.prmt(codes, Uint32(0), ue8m0.BOTH_UPPER + unit * ue8m0.BOTH_UPPER_STEP))


def _decode_slab(format: Packed, words: cute.Tensor, scales: list, slab: int, sign_bits: Uint32) -> list:
    """Weights of a slab's MMAs, as ``multiply_slab`` takes them."""
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
