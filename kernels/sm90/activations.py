"""ACTIVATIONS role: warps that decode each K tile of the tokens once, from packed NVFP4 to fp16.

Order of K. Lane t of a quad holds, of an MMA's 16 values of K, those at 2t, 2t+1, 2t+8 and 2t+9. A quad of a MATH warp
reads 16-byte unit j of a row of weights (32 values), a word a lane; ``decode_word`` makes of it the pairs (0, 2) and
(4, 6), which serve MMA 2j, and (1, 3) and (5, 7), which serve MMA 2j + 1. So MMA 2j + u takes at 2t, 2t+1 the values
8t + u, 8t + u + 2 of unit j, and at 2t+8, 2t+9 the values 8t + u + 4, 8t + u + 6: the order written here.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from nvfp4_cute.arch.sm90 import SF_BLOCK_ROWS

from ..common.group_table import GroupTable, locate_tile
from ..common.ring import CONSUMER_PHASE, PRODUCER_PHASE, Ring, arrive_warp, next_stage
from .decode import decode_scales, decode_word
from .load import first_load, load_next
from .operands import (
    CHUNK_BYTES,
    ROW_BYTES,
    SF_ATOM_WORDS,
    SF_BLOCK_WORDS,
    chunk_address,
    load_shared,
    scale_word_address,
    store_shared,
    tokens_of_tile,
)
from .warp_schedule import WARP_SIZE, WarpSchedule

# One slab is 64 values of K, half a K tile: 128 bytes a token in fp16, the span of the swizzle that wgmma reads.
SLABS = 2
SLAB_ROW_BYTES = 128
# Two 16-byte units of packed data a token and slab; a warp takes sixteen tokens at a time.
UNITS = 2
TOKENS_PER_WARP = WARP_SIZE // UNITS
ACTIVATION_THREADS = WARP_SIZE * WarpSchedule().num_activation_warps
TOKENS_PER_STEP = ACTIVATION_THREADS // UNITS
SF_BLOCK_BYTES = 4 * SF_BLOCK_WORDS
# Packed stages that MATH may still read when a K tile is about to be decoded.
LOAD_MARGIN = 3


@dataclass(frozen=True)
class ActivationArgs:
    """What the warps read.

    Attributes:
        a_address, sfa_address: shared addresses of the packed tokens and of their scales, stage 0.
        decoded_address: shared address of the decoded tokens: (STAGE, TOKEN, 128 bytes), a slab a stage.
        num_sfa_blocks: scale blocks of a stage.
    """

    a_address: Int32
    sfa_address: Int32
    decoded_address: Int32
    num_sfa_blocks: int
    groups: GroupTable
    work_tile_mnk: tuple
    packed: Ring
    decoded: Ring


@dataclass(frozen=True)
class Lane:
    """What one thread decodes: a unit of every 128th token of each slab.

    Attributes:
        token: its first token.
        unit: 0 or 1.
        sources: the tokens that it reads; in place of those beyond the tile, the tile's last.
        packed: byte offsets of its unit of each of these in a packed stage, one a slab.
        decoded: byte offsets of its four 16-byte results in a decoded stage.
    """

    token: Int32
    unit: Int32
    sources: list
    packed: list
    decoded: list


@cute.jit
def _make_lane(tile_m: cutlass.Constexpr, num_steps: cutlass.Constexpr) -> Lane:
    tidx = cute.arch.thread_idx()[0] - WARP_SIZE * WarpSchedule().num_math_warps
    lane = tidx % WARP_SIZE
    # Eight consecutive lanes have one unit of eight tokens: no two of them share a bank.
    unit = lane // 8 % UNITS
    token = tidx // WARP_SIZE * TOKENS_PER_WARP + lane // 16 * 8 + lane % 8
    sources = [cutlass.min(token + step * TOKENS_PER_STEP, tile_m - 1) for step in range(num_steps)]
    return Lane(
        token=token,
        unit=unit,
        sources=sources,
        packed=[
            [chunk_address(Int32(0), source, slab * UNITS + unit) for slab in range(SLABS)]
            for source in sources
        ],
        decoded=[token * SLAB_ROW_BYTES + ((unit * 4 + i) ^ (token % 8)) * CHUNK_BYTES for i in range(4)],
    )


@cute.jit
def run_activations(args: ActivationArgs, load: object):
    """For each K tile: wait for packed tokens, decode a slab at a time into an empty stage, publish it to wgmma.

    Args:
        load: LoadArgs in the warp that also loads, else None. It runs as many K tiles ahead of what it decodes as there
            are stages, less ``LOAD_MARGIN``: it refills a stage that MATH has left, or it would not be here.
    """
    tile_m = args.work_tile_mnk[0]
    num_steps = (tile_m + TOKENS_PER_STEP - 1) // TOKENS_PER_STEP
    lane = _make_lane(tile_m, num_steps)
    cursor = None
    if cutlass.const_expr(load is not None):
        cursor = first_load(load)
        for _ in cutlass.range_constexpr(max(args.packed.num_stages - LOAD_MARGIN, 0)):
            cursor = load_next(load, cursor)
    stage, phase = Int32(0), Int32(CONSUMER_PHASE)
    out_stage, out_phase = Int32(0), Int32(PRODUCER_PHASE)
    tile_idx, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    while tile_idx < args.groups.num_tiles:
        tile = locate_tile(args.groups, args.work_tile_mnk, tile_idx)
        num_tokens = tokens_of_tile(tile, tile_m)
        # The tile's first token need not be the first of a scale block.
        sf_row = tile.tile_m_idx * tile_m % SF_BLOCK_ROWS
        scale_offsets = [_scale_offset(sf_row + source) for source in lane.sources]
        for _ in cutlass.range(tile.k_tile_cnt, unroll=1):
            if cutlass.const_expr(load is not None):
                cursor = load_next(load, cursor)
            cute.arch.mbarrier_wait(args.packed.full(stage), phase)
            packed_address = args.a_address + stage * tile_m * ROW_BYTES
            scale_address = args.sfa_address + stage * args.num_sfa_blocks * SF_BLOCK_BYTES
            for slab in cutlass.range_constexpr(SLABS):
                # Every load before the first store: they do not wait for each other.
                words, scales = [], []
                for step in cutlass.range_constexpr(num_steps):
                    source = packed_address + lane.packed[step][slab]
                    words.append(load_shared(source, 4))
                    scales.append(
                        load_shared(scale_address + scale_offsets[step] + slab * SF_ATOM_WORDS * 4, 1)[0]
                    )
                if cutlass.const_expr(slab == SLABS - 1):
                    arrive_warp(args.packed.empty(stage))
                cute.arch.mbarrier_wait(args.decoded.empty(out_stage), out_phase)
                out_address = args.decoded_address + out_stage * tile_m * SLAB_ROW_BYTES
                for step in cutlass.range_constexpr(num_steps):
                    if step * TOKENS_PER_STEP + lane.token < tile_m and step * TOKENS_PER_STEP < num_tokens:
                        results = _decode_unit(words[step], scales[step], lane.unit)
                        for i in cutlass.range_constexpr(4):
                            target = lane.decoded[i] + step * TOKENS_PER_STEP * SLAB_ROW_BYTES
                            store_shared(out_address + target, results[i])
                cute.arch.fence_view_async_shared()
                arrive_warp(args.decoded.full(out_stage))
                out_stage, out_phase = next_stage(args.decoded, out_stage, out_phase)
            stage, phase = next_stage(args.packed, stage, phase)
        tile_idx += stride


@cute.jit
def _scale_offset(row: Int32) -> Int32:
    """Offset of the scales of ``row``, counted from the start of the stage's first block."""
    return scale_word_address(row // SF_BLOCK_ROWS * SF_BLOCK_BYTES, row % SF_BLOCK_ROWS, 0)


@cute.jit
def _decode_unit(words: list, scales: Uint32, unit: Int32) -> list:
    """32 values of one token: four words in, four times four words out, each half of an MMA's K."""
    two_scales = decode_scales(scales >> (unit * 16).to(Uint32))
    pairs = [decode_word(words[t], two_scales, t >= 2) for t in range(4)]
    return [[pairs[t][i] for t in range(4)] for i in range(4)]
