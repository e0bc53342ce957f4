"""SCALES role for FP8: one warp copies the float32 scales of K tiles to shared memory, far ahead of the epilogue."""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.planning.arch.sm100.limits import MMA_CTA_M
from nvfp4_cute.planning.arch.sm100_fp8 import scale_counts, scale_stage_bytes
from nvfp4_cute.planning.config import KernelConfig

from ...common.fp32_scales import SCALE_BYTES, ScalePair, scales_of_tile
from ...common.ring import PRODUCER_PHASE, Ring, next_stage
from ...common.sides import mma_sides
from ...common.split_k import k_share


@dataclass(frozen=True)
class StagedScales:
    """Scales of both operands and their shared-memory ring.

    Attributes:
        pair: scales in global memory.
        address: shared address of stage 0: scales of the tokens, then of the blocks of weights, product by product.
        ring: full: one arrival per copying lane. empty: one arrival per epilogue warp.
    """

    pair: ScalePair
    address: Int32
    ring: Ring

    def at(self, stage: Int32, config: KernelConfig) -> Int32:
        """Returns the shared address of a stage."""
        num_b = 1 if self.pair.up is None else 2
        return self.address + stage * scale_stage_bytes(config, num_b)


@cute.jit
def run_scales(
    scales: StagedScales, config: cutlass.Constexpr, groups, m_rank: Int32, first_tile: Int32, stride: Int32
):
    """Copies the scales of every K tile as soon as a stage is empty."""
    ring, (num_tokens, num_blocks) = scales.ring, scale_counts(config)
    stage, phase = Int32(0), Int32(PRODUCER_PHASE)
    cursor = groups.first_cursor(first_tile, config.work_tile_mnk)
    while groups.has_tile(cursor):
        tile = groups.tile(cursor, config.work_tile_mnk)
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)
        m_side, n_side = mma_sides(config, tile)
        m_side = replace(m_side, first_row=m_side.first_row + m_rank * MMA_CTA_M)
        weights, tokens = (m_side, n_side) if config.swap_ab else (n_side, m_side)
        sources = scales_of_tile(scales.pair, tile, weights, tokens, num_tokens, num_blocks)
        first, count = k_share(tile.k_tile_cnt, config.split_k)
        for i in cutlass.range(count, unroll=1):
            cute.arch.mbarrier_wait(ring.empty(stage), phase)
            at = scales.at(stage, config)
            # A K tile beyond the last one has no scales; copy the last one's.
            k_tile = cutlass.min(first + i, tile.k_tile_cnt - 1)
            sources.copy(k_tile, at, at + num_tokens * SCALE_BYTES)
            cute.arch.cp_async_mbarrier_arrive_noinc(ring.full(stage))
            stage, phase = next_stage(ring, stage, phase)
