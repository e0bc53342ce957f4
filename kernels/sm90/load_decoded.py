"""LOAD role for tokens that ``decode_tokens`` has dequantized: fills their ring from global memory with TMA.

The two CTAs of a cluster multiply the same tokens by neighbouring weights. They alternate in loading a box of tokens for both.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from nvfp4_cute.planning.arch.sm90 import SLABS, k_tiles_of_stage, stages_of_k_tile, token_box

from ..common.group_table import ceil_div
from ..common.operand_maps import descriptor_addresses
from ..common.ring import PRODUCER_PHASE, Ring, next_stage
from ..common.shared_access import store_shared
from ..common.tma_load import EVICT_LAST, tma_load
from .activations import SLAB_ROW_BYTES
from .load import TOKENS, LoadArgs
from .tile_walk import sides_of_cta
from .token_tiles import first_token, tokens_of_tile

CLEARED_BYTES = 16


@dataclass(frozen=True)
class DecodedArgs:
    """Inputs of the warp that loads dequantized tokens.

    Attributes:
        load: inputs shared with the warp that loads weights.
        decoded: ring of the tokens. full: 1 + bytes of both CTAs' loads. empty: one per MATH warp of both CTAs.
        decoded_address: shared address of the tokens: (STAGE, SLAB, TOKEN, 128 bytes), or one slab per stage.
    """

    load: LoadArgs
    decoded: Ring
    decoded_address: Int32


@cute.jit
def clear(address: Int32, nbytes: cutlass.Constexpr, num_threads: cutlass.Constexpr):
    """Zeroes the token buffer with all threads of the CTA, because MMAs may read more tokens than were loaded."""
    at = cute.arch.thread_idx()[0] * CLEARED_BYTES
    for offset in cutlass.range(at, nbytes, num_threads * CLEARED_BYTES, unroll=4):
        store_shared(address + offset, [Uint32(0)] * (CLEARED_BYTES // 4))
    cute.arch.fence_view_async_shared()


@cute.jit
def run_load_decoded(args: DecodedArgs):
    """Loads this CTA's boxes of tokens into both CTAs, for every stage as soon as it is empty in both."""
    tiles, config, decoded = args.load.tiles, args.load.config, args.decoded
    tokens, stage_bytes = config.work_tile_mnk[0], args.load.smem.decoded_stage_bytes
    num_cta, box = config.num_m_cta, token_box(config)
    slabs_of_stage = k_tiles_of_stage(config) * SLABS // stages_of_k_tile(config)
    rank, both = cute.arch.block_idx_in_cluster(), Int32((1 << num_cta) - 1)
    # Wait for the tokens of the preceding launch. Every CTA waits, also without a tile, so that this launch cannot end before
    # that one.
    cute.arch.griddepcontrol_wait()
    stage, phase = Int32(0), Int32(PRODUCER_PHASE)
    place = tiles.first()
    while tiles.has_tile(place):
        k_part = tiles.part(place)
        tile = k_part.tile
        origin = sides_of_cta(config, tile)[TOKENS].origin
        row, batch = Int32(origin.row + first_token(tile, config)), Int32(origin.batch)
        # Tokens after the group's last one may be stale, because columns of an MMA do not mix. So load no empty boxes, which
        # are slow: 8 tokens in boxes for 32 took 58 us instead of 50 on an H200.
        num_boxes = ceil_div(tokens_of_tile(tile, config), box)
        (descriptor,) = descriptor_addresses(args.load.descriptors.n, tile.slot)
        first_slab = k_part.first * SLABS
        for first_of_stage in cutlass.range(
            first_slab, first_slab + k_part.count * SLABS, slabs_of_stage, unroll=1
        ):
            cute.arch.mbarrier_wait(decoded.empty(stage), phase)
            full = decoded.full(stage)
            at = args.decoded_address + stage * stage_bytes
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(
                    full, num_boxes * (slabs_of_stage * box * SLAB_ROW_BYTES)
                )
                for first in cutlass.range(rank, num_boxes, num_cta, unroll=1):
                    for slab in cutlass.range_constexpr(slabs_of_stage):
                        k = (first_of_stage + slab) * (SLAB_ROW_BYTES // 2)
                        target = at + (slab * tokens + first * box) * SLAB_ROW_BYTES
                        where = (k, row + first * box, batch)
                        tma_load(target, descriptor, where, full.toint(), EVICT_LAST, 1, both)
            stage, phase = next_stage(decoded, stage, phase)
        place = tiles.next(place)
