"""Grouped GEMM on sm_100a and sm_110a: INT8 x INT8 with fp32 scales -> fp16, bf16 or fp32, or int32 sums.

For every group g:  C = alpha[g] * (A @ B^T) * SFA * SFB^T  with A (M_g, K_g), B (N_g, K_g) int8, K-major; SFA (M_g, 1), SFB
(N_g, 1) float32; C (M_g, N_g), N-major or M-major. Forms, roles, pipelines and timeline are those of ``..grouped_gemm``, but
stages have
no scales: EPILOGUE loads the scales of a tile's rows and columns before its sums are complete.

Tensor memory: neighbouring accumulators. Shared memory: ``planning.arch.sm100_int8.smem_plan``.
"""

from dataclasses import replace

from cutlass import Int32

from nvfp4_cute.formats.block_format import INT8
from nvfp4_cute.planning.arch.sm100.limits import SmemPlan, TmemMap
from nvfp4_cute.planning.arch.sm100_int8 import MMA, MMA_TYPES, PAIR, smem_plan, tmem_map

from ...common.fp32_scales import ScalePair, Scales
from ...common.operand_maps import Boxes, MapElement
from ..dense_mma import run_dense_mma
from ..epilogue import EpilogueArgs, run_epilogue
from ..grouped_gemm import GroupedGemmSm100
from ..mma import MmaArgs
from .results import IntegerResults


class Int8GemmSm100(GroupedGemmSm100):
    """One compiled variant.

    Args:
        options: arguments of ``GroupedGemmSm100``, with one product, results other than NVFP4, and a config that
            ``planning.arch.sm100_int8.unsupported_reason`` accepts. out_dtype may also be cutlass.Int32, the unscaled sums.
    """

    def _plans(self) -> tuple[SmemPlan, TmemMap, Boxes]:
        m, n, k = self.config.cta_tile_shape_mnk
        element = MapElement.of(INT8, MMA[PAIR].element_bits)
        rows_n = n // self.config.num_mma_cta
        boxes = Boxes(k, m, rows_n, None, None, elements=(element, element), splits_sf_n=False)
        return smem_plan(self.config), tmem_map(self.config), boxes

    def _scales(self, views_m: list, views_n: list) -> ScalePair | None:
        """Returns the scales in global memory, M side and N side."""
        if self.out_dtype is Int32:
            return None
        return ScalePair(*(Scales.of(views) for (views,) in (views_m, views_n)))

    def _staged_scales(self, scales: ScalePair | None, smem) -> ScalePair | None:
        return scales

    def _run_mma(self, args: MmaArgs, first_tile: Int32, stride: Int32):
        run_dense_mma(args, MMA[PAIR], MMA_TYPES, False, first_tile, stride)

    def _run_epilogue(self, args: EpilogueArgs, scales: ScalePair | None, first_tile: Int32, stride: Int32):
        integers = IntegerResults(scales, self.config.cta_tile_shape_mnk[1], self.config.swap_ab)
        run_epilogue(replace(args, integers=integers), first_tile, stride)
