"""Grouped GEMM on sm_100a, sm_103a and sm_110a: FP8 x FP8 with fp32 scales -> fp16, bf16 or fp32.

For every group g:  C = alpha[g] * (A * SFA) @ (B * SFB)^T  with A (M_g, K_g), B (N_g, K_g) e4m3, K-major; SFA (M_g, K_g / 128)
float32, one scale per 1 x 128 values, SFB (N_g / 128, K_g / 128) float32, one per 128 x 128; C (M_g, N_g), N-major or M-major.
See ``..grouped_gemm`` for the forms. Because scales cover 128 values of K, tensor cores accumulate no more than those; both
scales then promote their sums to float32 accumulators (DeepSeek-V3 report, section 3.3.2).
Dual:  C = activation(alpha1[g] * A @ B1^T) * (alpha2[g] * A @ B2^T), with B1 and B2 of one shape.

Roles (warps):  EPILOGUE 0-7 | MMA 8 | LOAD 9 | SCALES 10.

Pipelines of ``..grouped_gemm``, except for accumulators, which hold one K tile each, and scales:
  acc     MMA    -> EPILOGUE  num_acc_stage   full: 1 (tcgen05.commit)           empty: 8 per CTA (one per warp)
  scales  SCALES -> EPILOGUE  SCALE_STAGES    full: 32 (one per copying lane)   empty: 8 (one per warp)

Timeline of a K tile: LOAD fills a stage. MMA issues its MMAs and commits the stage back and the accumulator. EPILOGUE adds it,
times the scales, to the tile's sums in registers and releases it; after the last K tile it stores the sums.

Tensor memory: neighbouring accumulators; in a dual GEMM each holds both products. Shared memory:
``planning.arch.sm100_fp8.Fp8SmemPlan``.
"""

from cutlass import Int32, Int64, Uint8

from nvfp4_cute.formats.block_format import FP8_1x128, FP8_128x128
from nvfp4_cute.planning.arch.sm100.limits import SmemPlan, TmemMap
from nvfp4_cute.planning.arch.sm100_fp8 import (
    MMA,
    MMA_TYPES,
    PAIR,
    PROMOTING_WARPS,
    SCALE_ALIGN_BYTES,
    SCALE_STAGES,
    scale_stage_bytes,
    smem_plan,
    tmem_map,
)

from ...common.fp32_scales import ScalePair, Scales
from ...common.operand_maps import Boxes, MapElement
from ...common.ring import Ring
from ...common.warp_schedule import WarpSchedule
from ..dense_mma import run_dense_mma
from ..epilogue import EpilogueArgs
from ..grouped_gemm import GroupedGemmSm100
from ..mma import MmaArgs
from .promotion import run_promotion
from .scales import StagedScales, run_scales


class Fp8GemmSm100(GroupedGemmSm100):
    """One compiled variant.

    Args:
        options: arguments of ``GroupedGemmSm100``, with separate weights, results other than NVFP4, and a config that
            ``planning.arch.sm100_fp8.unsupported_reason`` accepts.
    """

    SCHEDULE = WarpSchedule(
        tuple(range(PROMOTING_WARPS)), PROMOTING_WARPS, PROMOTING_WARPS + 1, PROMOTING_WARPS + 2
    )

    # The epilogue then promotes without branches.
    ALL_COLUMNS = True

    def _plans(self) -> tuple[SmemPlan, TmemMap, Boxes]:
        config, bits = self.config, MMA[PAIR].element_bits
        m, n, k = config.cta_tile_shape_mnk
        boxes = Boxes(
            k,
            m,
            n // config.num_mma_cta,
            sf_m=None,
            sf_n=None,
            elements=(MapElement.of(FP8_1x128, bits), MapElement.of(FP8_128x128, bits)),
            splits_sf_n=False,
        )
        return smem_plan(config, self.num_b), tmem_map(config, self.num_b), boxes

    def _scales(self, views_m: list, views_n: list) -> ScalePair:
        """Returns the scales in global memory."""
        of_m, of_n = ([Scales.of(views) for views in side] for side in (views_m, views_n))
        (weights, *up), (tokens,) = (of_m, of_n) if self.config.swap_ab else (of_n, of_m)
        return ScalePair(weights, tokens, *up)

    def _staged_scales(self, scales: ScalePair, smem) -> StagedScales:
        stage_bytes = scale_stage_bytes(self.config, self.num_b)
        buffer = smem.allocate_array(Uint8, SCALE_STAGES * stage_bytes, byte_alignment=SCALE_ALIGN_BYTES)
        ring = Ring(smem.allocate_array(Int64, 2 * SCALE_STAGES), SCALE_STAGES)
        return StagedScales(scales, buffer.toint(), ring)

    def _run_scales(self, scales: StagedScales, groups, m_rank: Int32, first_tile: Int32, stride: Int32):
        run_scales(scales, self.config, groups, m_rank, first_tile, stride)

    def _run_mma(self, args: MmaArgs, first_tile: Int32, stride: Int32):
        run_dense_mma(args, MMA[PAIR], MMA_TYPES, True, first_tile, stride)

    def _run_epilogue(self, args: EpilogueArgs, scales: StagedScales, first_tile: Int32, stride: Int32):
        run_promotion(args, scales, first_tile, stride)
