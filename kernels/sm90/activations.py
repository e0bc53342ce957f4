"""ACTIVATIONS role: warps dequantize each K tile of the tokens once, from packed NVFP4 to fp16 or from MX formats to bf16.

Order of K: lane t of a quad holds the values of K at 2t, 2t+1, 2t+8 and 2t+9 of an MMA's 16. A lane of a MATH warp reads block
t of a row of weights, 32 consecutive values, as four eights. ``decode_halves`` turns eight w into the pairs (0, 2) and (4, 6)
for MMA 2w, and (1, 3) and (5, 7) for MMA 2w + 1. So MMA 2w + u takes the values 8w + u and 8w + u + 2 of block t at 2t and
2t+1, and the values 8w + u + 4 and 8w + u + 6 at 2t+8 and 2t+9. Tokens are written in this order.

A slab is the part of K that four MMAs read: eights 0 and 1 of every block, or eights 2 and 3, with one scale per block. In
large tiles half of the warps dequantize one slab and half the other.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from nvfp4_cute.planning.arch.sm90 import SF_BLOCK_ROWS, SLABS
from nvfp4_cute.planning.config import KernelConfig

from ..common.decode import SIGN_BITS
from ..common.ring import CONSUMER_PHASE, PRODUCER_PHASE, Ring, arrive_warp, next_stage
from ..common.select import select
from ..common.shared_access import load_shared, store_shared
from .load import NOTHING, TOKENS, WEIGHTS, LoadArgs, first_place, load_k_tile
from .one_of import one_of
from .operands import SF_ATOM_BYTES, UNIT_BYTES, scale_offset, tokens_multiplied, unit_offset
from .packed import BLOCKS, NEXT_SLAB, SLAB_SCALES, Packed
from .tile_walk import WalkedTiles
from .warp_schedule import LANES_OF_EIGHT, WARP_SIZE, WARPS_PER_GROUP, WarpSchedule

# 64 values of K: 128 bytes per token in fp16, the span of wgmma's swizzle.
SLAB_ROW_BYTES = 128
# Words of a block's eights in registers at a time: enough that reads wait neither for each other nor for the previous step's
# writes.
WORDS_AT_ONCE = 2


@dataclass(frozen=True)
class ActivationArgs:
    """Inputs of the ACTIVATIONS role.

    Attributes:
        a_address, sfa_address: shared addresses of the packed tokens and of their scales, stage 0.
        decoded_address: shared address of the dequantized tokens: (STAGE, SLAB, TOKEN, 128 bytes), or one slab per stage.
        sfa_stage_bytes: bytes of scales per stage.
        tiles: work tiles of this CTA.
        load: inputs of LOAD if the last two warps also play it, otherwise None.
        format: format of the packed tokens.
    """

    a_address: Int32
    sfa_address: Int32
    decoded_address: Int32
    sfa_stage_bytes: int
    tiles: WalkedTiles
    config: KernelConfig
    schedule: WarpSchedule
    packed: Ring
    decoded: Ring
    load: LoadArgs | None
    format: Packed


@dataclass(frozen=True)
class Lane:
    """Byte offsets of one lane in the first step of a stage.

    Attributes:
        sources: offsets of the lane's eight values of every block in a packed stage.
        scales: offset of its token's scales in a stage of scales.
        selector: prmt selector of the slab's scales among the eight of a token.
        targets: offsets of its four 16-byte results in a dequantized stage.
    """

    sources: list
    scales: Int32
    selector: Int32
    targets: list


def _make_lane(first_slab: Int32, tile_m: int, step_tokens: int, format: Packed) -> Lane:
    # Eight consecutive lanes write eight tokens, so that no two of them share a bank.
    lane, eights = cute.arch.lane_idx(), WARP_SIZE // step_tokens
    token = lane // (eights * LANES_OF_EIGHT) * LANES_OF_EIGHT + lane % LANES_OF_EIGHT
    eight = lane // LANES_OF_EIGHT % eights
    slab, first_chunk = eight // 2, eight % 2 * 4
    target = slab * (tile_m * SLAB_ROW_BYTES) + token * SLAB_ROW_BYTES
    return Lane(
        sources=[_source(token, block, first_slab * 2 + eight, format) for block in range(BLOCKS)],
        scales=scale_offset(token, format.atoms),
        selector=SLAB_SCALES + (first_slab + slab) * NEXT_SLAB,
        targets=[target + ((first_chunk + i) ^ (token % LANES_OF_EIGHT)) * UNIT_BYTES for i in range(4)],
    )


def _source(token: Int32, block: int, eight: Int32, format: Packed) -> Int32:
    """Returns the offset in a packed stage of eight values of a token: number ``eight`` of a block."""
    unit, nbytes = Int32(block * format.block_bytes // UNIT_BYTES), 4 * format.words
    if format.block_bytes > UNIT_BYTES:
        unit, eight = unit + eight // 2, eight % 2
    return unit_offset(token, unit, format.row_bytes) + eight * nbytes


@dataclass(frozen=True)
class Steps:
    """Token steps of a warp in every K tile of a work tile.

    Attributes:
        lane: offsets of a lane in a step.
        tokens: first token of each step in the tile.
        scales: offset of a lane's scales in a stage, per step.
    """

    lane: Lane
    tokens: list
    scales: list


@cute.jit
def run_activations(args: ActivationArgs):
    """Dequantizes the tokens of every K tile, each warp its share of the steps.

    Two warps also load if LOAD has none of its own.
    """
    tiles, tile_m, schedule = args.tiles, args.config.work_tile_mnk[0], args.schedule
    step_tokens = schedule.step_tokens
    stages_of_k_tile = step_tokens // LANES_OF_EIGHT
    out_turns, warps_of_stage = (
        count // stages_of_k_tile for count in (args.decoded.num_stages, schedule.num_activation_warps)
    )
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - schedule.num_math_warps
    # Stage of a K tile that the warp writes, and its rank among the warps of that stage.
    part, rank = warp // warps_of_stage, warp % warps_of_stage
    lane = _make_lane(part, tile_m, step_tokens, args.format)
    tokens = [(first + rank) * step_tokens for first in range(0, -(-tile_m // step_tokens), warps_of_stage)]
    stage, phase = Int32(0), Int32(CONSUMER_PHASE)
    out_turn, out_phase = Int32(0), Int32(PRODUCER_PHASE)
    tile_place, place = tiles.first(), None
    if cutlass.const_expr(args.load is not None):
        last = schedule.num_activation_warps - 1
        # Pick the second loading warp from another slab and another SM sub-partition.
        others = select(warp == last - WARPS_PER_GROUP - 1, Int32(TOKENS), Int32(NOTHING))
        place = first_place(args.load, select(warp == last, Int32(WEIGHTS), others))
        # When a dequantized stage becomes empty, MATH has already read the packed weights of the K tile after the one in that
        # stage. Run ahead by the stages that are free at that moment.
        for _ in cutlass.range(max(args.packed.num_stages - out_turns + 1, 1), unroll=1):
            place = load_k_tile(args.load, place)
    while tiles.has_tile(tile_place):
        k_part = tiles.part(tile_place)
        tile = k_part.tile
        num_tokens = tokens_multiplied(tile, args.config)
        # The tile's first token need not be the first of a scale block.
        sf_row = tile.tile_m_idx * tile_m % SF_BLOCK_ROWS
        atoms = args.format.atoms
        scales = [lane.scales + scale_offset(sf_row + token, atoms) for token in tokens]
        steps = Steps(lane, tokens, scales)
        num_steps = cute.ceil_div(cutlass.max(num_tokens - tokens[0], 0), warps_of_stage * step_tokens)
        for _ in cutlass.range(k_part.count, unroll=1):
            cute.arch.mbarrier_wait(args.packed.full(stage), phase)
            out_stage = out_turn * stages_of_k_tile + part
            one_of(
                num_steps,
                len(tokens) + 1,
                lambda count: _decode_steps(args, steps, count, stage, out_stage, out_phase),
            )
            cute.arch.fence_view_async_shared()
            arrive_warp(args.decoded.full(out_stage))
            # Release only now, when what was read has been stored: on an H200 an arrival right after the reads does not wait
            # for them.
            arrive_warp(args.packed.empty(stage))
            if cutlass.const_expr(args.load is not None):
                place = load_k_tile(args.load, place)
            stage, phase = next_stage(args.packed, stage, phase)
            out_turn += 1
            if out_turn == out_turns:
                out_turn = Int32(0)
                out_phase ^= 1
        tile_place = tiles.next(tile_place)


@cute.jit
def _decode_steps(
    args: ActivationArgs,
    steps: Steps,
    count: cutlass.Constexpr,
    stage: Int32,
    out_stage: Int32,
    out_phase: Int32,
):
    """Dequantizes ``count`` steps of a K tile into a stage once it is empty, without branches between the steps."""
    tile_m = args.config.work_tile_mnk[0]
    source = args.a_address + stage * (tile_m * args.format.row_bytes)
    scale = args.sfa_address + stage * args.sfa_stage_bytes
    stages_of_k_tile = args.schedule.step_tokens // LANES_OF_EIGHT
    target = args.decoded_address + out_stage * (SLABS // stages_of_k_tile * tile_m * SLAB_ROW_BYTES)
    at_once = WORDS_AT_ONCE // args.format.words
    for first in cutlass.range_constexpr(0, max(count, 1), at_once):
        last = min(first + at_once, count)
        packed = []
        for i in cutlass.range_constexpr(first, last):
            token = source + steps.tokens[i] * args.format.row_bytes
            packed.append(_load_step(args.format, steps.lane, token, scale + steps.scales[i]))
        if cutlass.const_expr(first == 0):
            cute.arch.mbarrier_wait(args.decoded.empty(out_stage), out_phase)
        for i in cutlass.range_constexpr(first, last):
            to = target + steps.tokens[i] * SLAB_ROW_BYTES
            _decode_step(args.format, steps.lane, packed[i - first], to)


@cute.jit
def _load_step(format: cutlass.Constexpr, lane: Lane, source: Int32, scales: Int32) -> tuple:
    """Returns a lane's words of each block and the words with the scales of all blocks."""
    words = [load_shared(source + lane.sources[t], format.words) for t in range(BLOCKS)]
    return words, [load_shared(scales + atom * SF_ATOM_BYTES, 1)[0] for atom in range(format.atoms)]


@cute.jit
def _decode_step(format: cutlass.Constexpr, lane: Lane, packed: tuple, target: Int32):
    """Dequantizes a lane's eight values of each block into four 16-byte stores, each a half of K of one MMA."""
    words, codes = packed
    scales = format.slab_scales(codes, lane.selector)
    pairs = [
        format.decode_halves(words[t], scales[t // 2], (t % 2 == 1,) * 2, Uint32(SIGN_BITS))
        for t in range(BLOCKS)
    ]
    for i in cutlass.range_constexpr(4):
        store_shared(target + lane.targets[i], [pairs[t][i] for t in range(BLOCKS)])
