"""Grouped GEMM on sm_90a: FP8 x FP8 and INT8 x INT8 with fp32 scales -> fp16, bf16, fp32 or FP8_1x128, or int32 sums.

For every group g:  C = alpha[g] * (A * SFA) @ (B * SFB)^T  with A (M_g, K_g), B (N_g, K_g) e4m3, K-major; SFA (M_g, K_g / 128)
float32, one scale per 1 x 128 values, SFB (N_g / 128, K_g / 128) float32, one per 128 x 128; C (M_g, N_g), N-major. See
``..grouped_gemm`` for the forms. Because scales cover 128 values of K, tensor cores accumulate no more than those; both scales
then promote their sums to float32 accumulators (DeepSeek-V3 report, section 3.3.2).

Dual (FP8):  C = activation(alpha1[g] * A @ B1^T) * (alpha2[g] * A @ B2^T), with B1 and B2 of one shape. A tile has 128 rows of
B1 and 128 rows of B2, so that a lane has both sums of a result.

INT8: SFA (M_g, 1) and SFB (N_g, 1) are row scales. Tensor cores accumulate all of K in int32, and no warp loads scales.

Roles (warps):  MATH 0-7 | LOAD of scales 8 | LOAD of the M side 10 | LOAD of the N side 11; 9 idles.

One ring (producer -> consumer), full arrivals / empty arrivals:
  stages  LOAD -> MATH  num_ab_stage  full: 2 + bytes of B and A; FP8 also 32 (one per lane of the scale warp)  empty: 8 (one
  per MATH warp), 16 in a pair

MMA-M has the weights (``math``) or the tokens (``token_rows``). A pair (``multicast_n=2``) has neighbouring tiles of the M side
and shares the N side. Split-K: the CTAs of a cluster share a tile's K tiles; the first CTA adds the partial sums
(``common.split_k``). CTAs are persistent.

Shared memory: ``planning.arch.sm90_fp8.Fp8Smem``. Tensor maps: kernel parameters, encoded by the host code.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8

from nvfp4_cute.launch_table import NUM_COLUMNS, Header
from nvfp4_cute.planning.arch.sm90 import TILE_K
from nvfp4_cute.planning.arch.sm90_fp8 import ctas_per_sm, promotes, smem_plan

from ...common.fp32_scales import ScalePair, Scales
from ...common.launch_args import read_groups, read_operands, read_outputs
from ...common.operand_maps import Descriptors, prefetch_descriptors, rows_atom
from ...common.output_kind import OutputKind
from ...common.output_table import OutputTable
from ...common.ring import Ring, init_ring
from ...common.variant import GroupedGemmVariant
from ...common.versions import SmemAllocator
from ..cta import OPERAND_ALIGN_BYTES, exchange_of_sums, launch_settings, leave, meet
from ..epilogue import EXCHANGE_BYTES, STAGING_BYTES
from ..tile_walk import WalkedTiles
from ..warp_schedule import NUM_LOAD_WARPS, WARP_SIZE, WarpSchedule
from .load import LoadArgs, run_load_m_side, run_load_n_side, run_load_scales
from .math import MathArgs, run_math
from .token_rows import run_math_of_rows

# Pitches are multiples of 16 bytes, which are 16 values.
PITCH_STEP = 16


class Fp8GemmSm90(GroupedGemmVariant):
    """One compiled variant, of a config and a pair of formats that ``planning.arch.sm90_fp8`` accepts."""

    def __init__(self, **options):
        super().__init__(**options)
        self.kind = OutputKind(self.out_dtype, False, self.activation, self.weight_layout)
        self.schedule = WarpSchedule.of_weight_only(ctas_per_sm(self.config))
        self.promotes = promotes(self.formats)
        self.smem = smem_plan(self.config, self.kind.num_b, self.formats)

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Encode the tensor maps and launch.

        Args:
            table: Int64 in host memory, a header row and one row per slot: ``launch_table``.
            stream: CUstream.
        """
        # (COLUMN, ROW)
        values = cute.make_tensor(table, cute.make_layout((NUM_COLUMNS, 1 + self.num_groups)))
        rows = range(1, 1 + self.num_groups)
        views_m, views_n = read_operands(values, rows, self.kind.num_b, self.config.swap_ab)
        groups = read_groups(values, rows, self.form, self.config.work_tile_mnk[0])
        tile_m, tile_n, _ = self.config.cta_tile_shape_mnk
        boxes = (views_m, tile_m), (views_n, tile_n // self.config.multicast_n)
        of_m, of_n = (
            [[rows_atom(view, Uint8, 1, TILE_K, box, PITCH_STEP) for view in views] for views in operands]
            for operands, box in boxes
        )
        descriptors = Descriptors(m=of_m, n=of_n, sf_m=[], sf_n=[])
        num_alphas = self.kind.num_products if self.has_alpha else 0
        outputs = read_outputs(
            values, rows, self.form, num_alphas, self.kind.is_quantized, self.has_limit, self.bias_dtype
        )
        self.kernel.set_name_prefix(self.name)
        weights, tokens = (views_m, views_n) if self.config.swap_ab else (views_n, views_m)
        of_weights = [Scales.of(views) for views in weights]
        scales = ScalePair(of_weights[0], Scales.of(tokens[0]), *of_weights[1:])
        self.kernel(descriptors, scales, groups, outputs).launch(
            **launch_settings(
                self.config, self.schedule, values[Header.NUM_CTA, 0], ctas_per_sm(self.config)
            ),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        descriptors: Descriptors,
        scale_pair: ScalePair,
        groups,
        outputs: OutputTable,
    ):
        """Allocate, connect, dispatch."""
        config, schedule, plan, num_stage = self.config, self.schedule, self.smem, self.smem.num_ab_stage
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == schedule.num_math_warps:
            prefetch_descriptors(descriptors)

        # Storage
        smem = SmemAllocator()
        weights, tokens, scales = (
            smem.allocate_array(Uint8, num_stage * nbytes, byte_alignment=OPERAND_ALIGN_BYTES).toint()
            if nbytes
            else None
            for nbytes in (plan.b_stage_bytes, plan.a_stage_bytes, plan.scale_stage_bytes)
        )
        ring = Ring(smem.allocate_array(Int64, 2 * num_stage), num_stage)
        partial, exchange = exchange_of_sums(smem, plan.partial_bytes, schedule, config.split_k)
        staging_bytes = schedule.num_math_groups * STAGING_BYTES + EXCHANGE_BYTES * self.kind.is_quantized
        staging = smem.allocate(staging_bytes, OPERAND_ALIGN_BYTES)
        tiles = WalkedTiles(groups, config)

        # Barriers
        if warp_idx == 0:
            with cute.arch.elect_one():
                arrivals = NUM_LOAD_WARPS + (WARP_SIZE if self.promotes else 0)
                init_ring(ring, arrivals, schedule.num_math_warps * config.multicast_n)
                init_ring(exchange, 1, schedule.num_math_warps)
        cute.arch.mbarrier_init_fence()
        meet(config)

        # ---- MATH --------------------------------------------------------------------------------------
        if warp_idx < schedule.num_math_warps:
            cute.arch.setmaxregister_increase(schedule.math_registers)
            (run_math if config.swap_ab else run_math_of_rows)(
                MathArgs(
                    weights=weights,
                    tokens=tokens,
                    scales=scales,
                    staging_address=staging.toint(),
                    smem=plan,
                    tiles=tiles,
                    outputs=outputs,
                    kind=replace(self.kind, activation=None),
                    activation=self.kind.activation,
                    config=config,
                    partial=partial,
                    ring=ring,
                    row_scales=None if self.promotes or self.kind.dtype is Int32 else scale_pair,
                    promotes=self.promotes,
                )
            )

        # ---- LOAD --------------------------------------------------------------------------------------
        else:
            cute.arch.setmaxregister_decrease(schedule.other_registers)
            load = LoadArgs(descriptors, scale_pair, weights, tokens, scales, plan, config, tiles, ring)
            if cutlass.const_expr(self.promotes):
                if warp_idx == schedule.num_math_warps:
                    run_load_scales(load)
            if warp_idx == schedule.first_load_warp_id:
                run_load_m_side(load)
            if warp_idx == schedule.first_load_warp_id + 1:
                run_load_n_side(load)
        leave(config)
