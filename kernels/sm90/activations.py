"""ACTIVATIONS role: warps that decode each K tile of the tokens once, from packed NVFP4 to fp16.

Order of K. Lane t of a quad holds, of an MMA's 16 values of K, those at 2t, 2t+1, 2t+8 and 2t+9. A lane of a MATH warp
reads one 16-byte unit of a row of weights, unit t: 32 consecutive values, four words. ``decode_word`` makes of word w the
pairs (0, 2) and (4, 6), which serve MMA 2w, and (1, 3) and (5, 7), which serve MMA 2w + 1. So MMA 2w + u takes at 2t, 2t+1
the values 8w + u, 8w + u + 2 of unit t, and at 2t+8, 2t+9 the values 8w + u + 4, 8w + u + 6: the order written here.
A slab is what four MMAs read: words 0 and 1, or 2 and 3, of every unit, and so one scale of each.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from nvfp4_cute.arch.sm90 import SF_BLOCK_ROWS

from ..common.ring import CONSUMER_PHASE, PRODUCER_PHASE, Ring, arrive_warp, next_stage
from ..common.split_k import k_tiles_of_cta
from .decode import decode_scales, decode_word
from .operands import (
    ROW_BYTES,
    SF_ATOM_BYTES,
    UNIT_BYTES,
    load_shared,
    scale_offset,
    store_shared,
    tokens_multiplied,
    unit_offset,
)
from .tile_walk import start_walk
from .warp_schedule import MAX_ACTIVATION_WARPS, NUM_SCHEDULERS, STEP_TOKENS, WarpSchedule

# 64 values of K: 128 bytes a token in fp16, the span of the swizzle that wgmma reads.
SLABS = 2
SLAB_ROW_BYTES = 128
# In a step, a lane takes a word of every unit of one token.
UNITS = 4
# Reads do not wait for each other, nor for the writes of a step before: so many steps' results are in registers.
STEPS_AT_ONCE = 2


@dataclass(frozen=True)
class ActivationArgs:
    """What the warps read.

    Attributes:
        a_address, sfa_address: shared addresses of the packed tokens and of their scales, stage 0.
        decoded_address: shared address of the decoded tokens: (STAGE, SLAB, TOKEN, 128 bytes).
        sfa_stage_bytes: of the scales of one stage.
        groups: ``GroupTable`` or ``DeviceGroups``.
        split_k: CTAs that share the K tiles.
    """

    a_address: Int32
    sfa_address: Int32
    decoded_address: Int32
    sfa_stage_bytes: int
    groups: object
    work_tile_mnk: tuple
    split_k: int
    packed: Ring
    decoded: Ring


@dataclass(frozen=True)
class Lane:
    """Where one lane reads and writes in a step whose tokens are the stage's first.

    Attributes:
        sources: byte offsets of its word of every unit in a packed stage.
        scales: of its token's scales in a stage of scales.
        selector: of the slab's scale of every unit among the eight of a token.
        targets: of its four 16-byte results in a decoded stage.
    """

    sources: list
    scales: Int32
    selector: Int32
    targets: list


def _make_lane(tile_m: int) -> Lane:
    # Eight consecutive lanes have eight tokens: no two of them share a bank.
    lane = cute.arch.lane_idx()
    token, word = lane % STEP_TOKENS, lane // STEP_TOKENS
    slab, first_chunk = word // 2, word % 2 * 4
    target = slab * (tile_m * SLAB_ROW_BYTES) + token * SLAB_ROW_BYTES
    return Lane(
        sources=[unit_offset(token, Int32(unit)) + word * 4 for unit in range(UNITS)],
        scales=scale_offset(token),
        selector=0x6420 + slab * 0x1111,
        targets=[target + ((first_chunk + i) ^ token) * UNIT_BYTES for i in range(4)],
    )


@cute.jit
def run_activations(args: ActivationArgs):
    """Decode the tokens of every K tile, each warp its share of the steps.

    Where a multiple of four steps does not fit the warps, each scheduler of the SM decodes as much: the one of LOAD, with
    one warp less, has its warp decode twice as much.
    """
    num_steps, num_warps = -(-args.work_tile_mnk[0] // STEP_TOKENS), MAX_ACTIVATION_WARPS
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - WarpSchedule.num_math_warps
    if cutlass.const_expr(num_steps > num_warps and num_steps % NUM_SCHEDULERS == 0):
        if warp == num_warps - NUM_SCHEDULERS:
            _decode_columns(args, [warp, warp + NUM_SCHEDULERS], num_warps + 1)
        else:
            _decode_columns(args, [warp], num_warps + 1)
    else:
        _decode_columns(args, [warp], num_warps)


@cute.jit
def _decode_columns(args: ActivationArgs, columns: list, num_columns: cutlass.Constexpr):
    """For each K tile: wait for packed tokens, decode them into an empty stage, publish it to wgmma.

    Args:
        columns: this warp's, of ``num_columns`` that steps are dealt to.
    """
    groups, tiler = args.groups, args.work_tile_mnk
    tile_m = tiler[0]
    lane = _make_lane(tile_m)
    # The warp's steps, read together as many as registers hold.
    first_steps = range(0, -(-tile_m // STEP_TOKENS), num_columns)
    most_steps = len(first_steps) * len(columns)
    stage, phase = Int32(0), Int32(CONSUMER_PHASE)
    out_stage, out_phase = Int32(0), Int32(PRODUCER_PHASE)
    cursor, walk = start_walk(groups, tiler, args.split_k)
    while groups.has_tile(cursor):
        tile = groups.tile(cursor, tiler)
        num_tokens = tokens_multiplied(tile, tile_m)
        # The tile's first token need not be the first of a scale block. In place of tokens beyond the tile its last.
        sf_row = tile.tile_m_idx * tile_m % SF_BLOCK_ROWS
        tokens = [(first + column) * STEP_TOKENS for first in first_steps for column in columns]
        sources = [cutlass.min(token, num_tokens - STEP_TOKENS) for token in tokens]
        scales = [lane.scales + scale_offset(sf_row + source) for source in sources]
        _, k_tile_cnt = k_tiles_of_cta(tile.k_tile_cnt, args.split_k)
        for _ in cutlass.range(k_tile_cnt, unroll=1):
            cute.arch.mbarrier_wait(args.packed.full(stage), phase)
            source = args.a_address + stage * (tile_m * ROW_BYTES)
            scale = args.sfa_address + stage * args.sfa_stage_bytes
            target = args.decoded_address + out_stage * (SLABS * tile_m * SLAB_ROW_BYTES)
            for first in cutlass.range_constexpr(0, most_steps, STEPS_AT_ONCE):
                last = min(first + STEPS_AT_ONCE, most_steps)
                packed = []
                for i in cutlass.range_constexpr(first, last):
                    packed.append(_load_step(lane, source + sources[i] * ROW_BYTES, scale + scales[i]))
                if cutlass.const_expr(last == most_steps):
                    arrive_warp(args.packed.empty(stage))
                if cutlass.const_expr(first == 0):
                    cute.arch.mbarrier_wait(args.decoded.empty(out_stage), out_phase)
                for i in cutlass.range_constexpr(first, last):
                    if tokens[i] < num_tokens:
                        _decode_step(lane, packed[i - first], target + tokens[i] * SLAB_ROW_BYTES)
            cute.arch.fence_view_async_shared()
            arrive_warp(args.decoded.full(out_stage))
            stage, phase = next_stage(args.packed, stage, phase)
            out_stage, out_phase = next_stage(args.decoded, out_stage, out_phase)
        cursor = groups.next_cursor(cursor, walk.step, tiler)
        walk = walk.turned()


@cute.jit
def _load_step(lane: Lane, source: Int32, scales: Int32) -> list:
    """Of eight tokens: a lane's four words, and two words with the scale of each in both."""
    words = [load_shared(source + lane.sources[t], 1)[0] for t in range(UNITS)]
    return words + [load_shared(scales + atom * SF_ATOM_BYTES, 1)[0] for atom in range(2)]


@cute.jit
def _decode_step(lane: Lane, packed: list, target: Int32):
    """A lane's four words make four times four words: halves of two MMAs' K."""
    codes = Uint32(cute.arch.prmt(packed[UNITS], packed[UNITS + 1], lane.selector))
    scales = [decode_scales(codes), decode_scales(codes >> 16)]
    pairs = [decode_word(packed[t], scales[t // 2], t % 2 == 1) for t in range(UNITS)]
    for i in cutlass.range_constexpr(4):
        store_shared(target + lane.targets[i], [pairs[t][i] for t in range(UNITS)])
