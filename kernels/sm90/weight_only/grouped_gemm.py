"""Grouped GEMM on sm_90a whose tokens go from memory to wgmma unchanged -> fp16, bf16 or fp32.

16-bit tokens x NVFP4, int4, FP8 or INT8, bf16 tokens x MXFP4 or MXFP8, and FP8 tokens x MXFP4.

For every group g:  C = alpha[g] * A @ (B * SFB)^T  with A (M_g, K_g), K-major; see ``..grouped_gemm`` for B, SFB, C, the dual
GEMM and the four forms. Weights are converted to the dtype of the tokens in the registers that wgmma reads: exactly, int4 with
one rounding (``decode``). Float32 scales of weights (FP8, INT8) multiply sums (``scales``); such weights have no dual GEMM. FP8
tokens have one float32 scale each, which multiplies sums (``fp8_tokens``).

Roles (warps):  MATH 0-7 | SCHEDULER 9, with stream-K | LOAD of weights 10 | LOAD of tokens 11.

One ring (producer -> consumer), full arrivals / empty arrivals:
  stages   LOAD -> MATH   num_ab_stage   full: 2 + bytes of B, SFB and A   empty: one per MATH warp of both CTAs of a pair

A pair (``multicast_n=2``) has neighbouring tiles of weights and the same tokens. Split-K: the CTAs of a cluster share a tile's
K tiles; the first CTA adds the partial sums (``common.split_k``). Stream-K: as in ``..grouped_gemm``. No earlier launch
resets flags. Therefore the reader of a flag resets it, and a CTA sets a flag only if another one reads it: SCHEDULER, which knows
this, is also FIXUP. CTAs are persistent.

Shared memory: ``planning.arch.sm90_weight_only.WeightOnlySmem``. Tensor maps: kernel parameters, encoded by the host code.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Int64, Uint8

from nvfp4_cute.formats.block_format import BFLOAT16
from nvfp4_cute.launch_table import NUM_COLUMNS, Header
from nvfp4_cute.planning.arch.sm90_weight_only import (
    ctas_per_sm,
    leaves_tokens_out,
    slab_k,
    smem_plan,
    token_box,
    token_bytes,
)

from ...common.fp32_scales import Scales
from ...common.launch_args import read_groups, read_operands, read_outputs
from ...common.operand_maps import Descriptors, prefetch_descriptors, rows_atom
from ...common.output_kind import OutputKind
from ...common.output_table import OutputTable
from ...common.ring import Ring, init_ring
from ...common.variant import GroupedGemmVariant
from ...common.versions import SmemAllocator
from ..cta import OPERAND_ALIGN_BYTES, exchange_of_sums, launch_settings, leave, meet
from ..epilogue import STAGING_BYTES
from ..fixup import Fixup, run_fixup
from ..operands import make_boxes, tiles_of_sf_atom
from ..scheduler import NUM_RECORDS, RECORD_BYTES, ScheduledTiles, run_scheduler
from ..stream_k import groups_by_work
from ..tile_walk import WalkedTiles
from ..warp_schedule import NUM_LOAD_WARPS, WarpSchedule
from . import fp8_tokens
from .decode import Decoding
from .load import LoadArgs, clear, run_load_tokens, run_load_weights
from .math import MathArgs, run_math

# Pitches are multiples of 16 bytes.
PITCH_BYTES = 16


class WeightOnlyGemmSm90(GroupedGemmVariant):
    """One compiled variant, of a config that ``planning.arch.sm90_weight_only`` accepts."""

    def __init__(self, **options):
        super().__init__(**options)
        a_format, b_format = self.formats
        self.decoding = Decoding(b_format, a_format == BFLOAT16, slab_k(self.config, b_format))
        # Values of a row of weights per TMA copy.
        self.box_k = b_format.elements(self.decoding.row_bytes)
        self.kind = OutputKind(self.out_dtype, False, self.activation, self.weight_layout)
        self.schedule = WarpSchedule.of_weight_only(ctas_per_sm(self.config))
        self.smem = smem_plan(self.config, self.kind.num_b, self.formats)

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Encodes the tensor maps and launches.

        Args:
            table: Int64 in host memory, a header row and one row per slot: ``launch_table``.
            stream: CUstream.
        """
        # (COLUMN, ROW)
        values = cute.make_tensor(table, cute.make_layout((NUM_COLUMNS, 1 + self.num_groups)))
        rows = range(1, 1 + self.num_groups)
        weights, (tokens,) = read_operands(values, rows, self.kind.num_b, self.config.swap_ab)
        groups = read_groups(values, rows, self.form, self.config.work_tile_mnk[0])
        cta_tile = (*self.config.cta_tile_shape_mnk[:2], self.box_k)
        boxes = make_boxes(replace(self.config, cta_tile_shape_mnk=cta_tile), (self.decoding.format,) * 2)
        dtype = Uint8 if self.decoding.has_fp8_tokens else BFloat16 if self.decoding.is_bf16 else Float16
        row = self.decoding.row_k, token_box(self.config), PITCH_BYTES // token_bytes(self.decoding.format)
        descriptors = replace(
            Descriptors.encode(weights, [], boxes),
            n=[[rows_atom(view, dtype, 1, *row) for view in tokens]],
        )
        num_alphas = self.kind.num_products if self.has_alpha else 0
        outputs = read_outputs(
            values, rows, self.form, num_alphas, has_limit=self.has_limit, bias_dtype=self.bias_dtype
        )
        fixup = None
        if cutlass.const_expr(self.config.stream_k):
            groups = groups_by_work(groups, self.config)
            fixup = Fixup(values[Header.COUNTERS, 0], values[Header.WORKSPACE, 0])
        self.kernel.set_name_prefix(self.name)
        sum_scales = Scales.of(weights[0]) if self.decoding.has_scales_of_sums else None
        if cutlass.const_expr(self.decoding.has_fp8_tokens):
            sum_scales = Scales.of(tokens)
        self.kernel(descriptors, groups, outputs, sum_scales, fixup).launch(
            **launch_settings(
                self.config, self.schedule, values[Header.NUM_CTA, 0], ctas_per_sm(self.config)
            ),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        descriptors: Descriptors,
        groups,
        outputs: OutputTable,
        sum_scales: Scales | None,
        fixup: Fixup | None,
    ):
        """Allocate, connect, dispatch."""
        config, schedule, plan, num_stage = self.config, self.schedule, self.smem, self.smem.num_ab_stage
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == schedule.num_math_warps:
            prefetch_descriptors(descriptors)

        # Storage
        smem = SmemAllocator()
        stage_bytes = (
            plan.a_stage_bytes,
            plan.num_b * plan.b_stage_bytes,
            plan.num_b * plan.sfb_stage_bytes,
        )
        tokens, weights, scales = (
            smem.allocate_array(Uint8, num_stage * nbytes, byte_alignment=OPERAND_ALIGN_BYTES).toint()
            if nbytes
            else None
            for nbytes in stage_bytes
        )
        tables = None
        if cutlass.const_expr(self.decoding.has_fp8_tokens):
            tables = smem.allocate(fp8_tokens.TABLES_BYTES, fp8_tokens.TABLES_ALIGN_BYTES).toint()
        # One additional barrier, at which MATH arrives when it has no stage to release.
        ring = Ring(smem.allocate_array(Int64, 2 * num_stage + 1), num_stage)
        partial, exchange = exchange_of_sums(smem, plan.partial_bytes, schedule, config.split_k)
        staging = smem.allocate(schedule.num_math_groups * STAGING_BYTES, OPERAND_ALIGN_BYTES)
        # The CTA that stores results knows the factors of rows from the scales of its first K tile.
        tiles = WalkedTiles(groups, config, self.decoding.has_fp8_tokens)
        if cutlass.const_expr(config.stream_k):
            records = smem.allocate_array(Uint8, NUM_RECORDS * RECORD_BYTES, byte_alignment=16).toint()
            scheduled = Ring(smem.allocate_array(Int64, 2 * NUM_RECORDS), NUM_RECORDS)
            tiles = ScheduledTiles(records, scheduled, groups)

        # Barriers
        if warp_idx == 0:
            with cute.arch.elect_one():
                init_ring(ring, NUM_LOAD_WARPS, schedule.num_math_warps * config.multicast_n)
                if cutlass.const_expr(config.stream_k):
                    init_ring(tiles.ring, 1, schedule.num_math_warps)
                init_ring(exchange, 1, schedule.num_math_warps)
                cute.arch.mbarrier_init(ring.empty(num_stage), 1)
                if cutlass.const_expr(self.decoding.has_fp8_tokens):
                    fp8_tokens.store_tables(tables)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(leaves_tokens_out(config)):
            clear(tokens, num_stage * plan.a_stage_bytes, schedule.threads_per_cta)
        meet(config)

        # ---- MATH --------------------------------------------------------------------------------------
        if warp_idx < schedule.num_math_warps:
            cute.arch.setmaxregister_increase(schedule.math_registers)
            run_math(
                MathArgs(
                    weights=weights,
                    scales=scales,
                    tokens=tokens,
                    staging_address=staging.toint(),
                    smem=plan,
                    tiles=tiles,
                    outputs=outputs,
                    kind=self.kind,
                    config=config,
                    schedule=schedule,
                    partial=partial,
                    ring=ring,
                    decoding=self.decoding,
                    sum_scales=sum_scales,
                    fixup=fixup,
                    sent=exchange.empty(0),
                    tables=tables,
                )
            )

        # ---- LOAD and SCHEDULER ------------------------------------------------------------------------
        else:
            cute.arch.setmaxregister_decrease(schedule.other_registers)
            atom_tiles = tiles_of_sf_atom(self.decoding.format)
            boxes = config.work_tile_mnk[2] // self.box_k
            row = self.decoding.row_bytes, boxes, self.decoding.row_k
            extents = (self.decoding.atoms, atom_tiles, *row)
            load = LoadArgs(descriptors, weights, scales, tokens, plan, config, tiles, ring, *extents)
            if warp_idx == schedule.first_load_warp_id:
                run_load_weights(load)
            if warp_idx == schedule.first_load_warp_id + 1:
                run_load_tokens(load)
            if cutlass.const_expr(config.stream_k):
                if warp_idx == schedule.scheduler_warp_id:
                    if run_scheduler(tiles, config):
                        run_fixup(fixup, exchange.empty(0), False)
        leave(config)
