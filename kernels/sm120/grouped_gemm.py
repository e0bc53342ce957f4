"""Grouped GEMM on sm_120a and sm_121a: block-scaled operands -> fp16, bf16, fp32 or block-scaled, or int32.

For every group g:  C = alpha[g] * (A * SFA) @ (B * SFB)^T  with A (M_g, K_g), B (N_g, K_g) of a pair of formats in ``MMA``,
K-major; SFA, SFB one scale per block of a row, in the 128x4 blocked layout; C (M_g, N_g), N-major or M-major. FP8 scales are
float32, one per 1 x 128 values of A and per 128 x 128 of B, in rows; sums are promoted by them every 128 values of K
(``promoted_scales``). INT8 scales are float32, one per row; sums are int32, and C is the scaled sums (``integer_sums``) or the
sums themselves. An optional bias (N) is added to every row of C. Dual:  C = activation(alpha1[g] * A @ B1^T) * (alpha2[g] * A @
B2^T), with B1 and B2 of one shape, or in one operand. List form: every group has operands and sizes of its own, known to the
host. Ragged and masked form: groups are parts of shared operands, and the device holds the number of rows of A per group.
Batched form: every group has all of its rows.

Roles (warps):  MMA 0-7, one team or two (0-3 where one team has a tile of 8 columns) | LOAD, the next warp | LOAD of float32
scales, the one after. The other warps of their warpgroup only give their registers to the MMA warps.

Pipelines (producer -> consumer), full arrivals / empty arrivals:
  ab   LOAD -> MMA   num_ab_stage    full: 1 + bytes of all operands + 32 (one per lane, float32 scales)    empty: one per warp
  of the team turn  team -> team   two named barriers: a team multiplies after the other has read its last stage

Timeline of a tile: LOAD fills one stage per K tile and runs ahead over the tiles of a persistent CTA. Every MMA warp of the
tile's team reads its rows and columns with ldmatrix, and its scales (``block_scales``), one K block ahead of the block that it
multiplies. It releases a stage when MMAs have consumed the last block, while it reads the next stage. After the last K tile it
scales, converts and stores its sums from registers, while the other team, if there is one, multiplies.

Split-K: the CTAs of a cluster share a tile's K tiles and send each other partial sums (``split_k``).

Shared memory: ``planning.arch.sm120.SmemPlan``. Tensor maps: kernel parameters, encoded by the host code.

Source: PTX ISA 9.1, 9.7.14.5 (mma with block scaling), 9.7.14.5.15 (ldmatrix), 9.7.13.15 (mbarrier), 5.5.7 (swizzle).
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64, Uint8

from nvfp4_cute.launch_table import NUM_COLUMNS, Header
from nvfp4_cute.planning.arch.sm120 import (
    BUFFER_ALIGN_BYTES,
    WARP_COLUMNS,
    formats_on_sides,
    num_teams,
    promotes,
    smem_plan,
)

from ..common.fp32_scales import ScalePair, Scales
from ..common.launch_args import read_groups, read_operands, read_outputs
from ..common.operand_maps import Descriptors, prefetch_descriptors
from ..common.output_kind import OutputKind
from ..common.output_table import OutputTable
from ..common.ring import Ring, init_ring
from ..common.variant import GroupedGemmVariant
from ..common.versions import SmemAllocator
from ..common.warp_schedule import WARP_SIZE
from .load import LoadArgs, run_load, run_load_scales
from .mma import MmaArgs, run_mma
from .operands import StageBuffers, make_boxes
from .shared_codes import CODES_BYTES
from .split_k import Exchange
from .warp_tile import WarpTile

WARPGROUP_WARPS = 4
# Registers per thread. A budget belongs to a warpgroup; two MMA warpgroups and one LOAD warpgroup share the launch's 384 x 168.
LOAD_REGISTERS, MMA_REGISTERS = 56, 224


class GroupedGemmSm120(GroupedGemmVariant):
    """One compiled variant, of a config and a pair of formats that ``planning.arch.sm120`` accepts."""

    def __init__(self, **options):
        super().__init__(**options)
        config = self.config
        self.output_kind = OutputKind(self.out_dtype, self.out_m_major, self.activation, self.weight_layout)
        self.smem = smem_plan(config, self.output_kind.num_b, self.formats)
        self.promotes = promotes(self.formats)
        # Unscaled integer sums need no scales.
        self.scales_integers = self.formats[0].is_1xk and self.out_dtype is not Int32
        self.boxes = make_boxes(config, self.formats)
        self.side_formats = formats_on_sides(config, self.formats)
        self.warp_tile = WarpTile(
            config.cta_tile_shape_mnk[1],
            num_teams(config),
            self.smem.num_m,
            self.smem.num_n,
            self.out_m_major != config.swap_ab,
            config.cta_tile_shape_mnk[0],
        )

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
        kind = self.output_kind
        views_m, views_n = read_operands(values, rows, kind.num_b, self.config.swap_ab)
        scales = None
        if cutlass.const_expr(self.promotes or self.scales_integers):
            of_m, of_n = ([Scales.of(views) for views in side] for side in (views_m, views_n))
            scales = ScalePair(of_m[0], of_n[0], *of_m[1:])
        self.kernel.set_name_prefix(self.name)
        self.kernel(
            Descriptors.encode(views_m, views_n, self.boxes),
            read_groups(values, rows, self.form, self.config.work_tile_mnk[0]),
            read_outputs(
                values,
                rows,
                self.form,
                kind.num_products if self.has_alpha else 0,
                kind.is_quantized,
                self.has_limit,
                self.bias_dtype,
                self.has_row_scales,
            ),
            scales,
        ).launch(
            grid=(Int32(values[Header.NUM_CTA, 0]), 1, 1),
            cluster=(self.config.split_k, 1, 1) if self.config.split_k > 1 else None,
            block=(WARP_SIZE * (self.warp_tile.num_warps + WARPGROUP_WARPS), 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, descriptors: Descriptors, groups, outputs: OutputTable, scales: ScalePair | None):
        """Allocates shared memory, initializes barriers, and dispatches warps to roles."""
        config, warp_tile, plan = self.config, self.warp_tile, self.smem
        # Ids
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        load_warp_id = warp_tile.num_warps
        if warp_idx == load_warp_id:
            prefetch_descriptors(descriptors)

        # Storage
        smem = SmemAllocator()
        buffers = StageBuffers(
            *[
                smem.allocate_array(Uint8, num_bytes, byte_alignment=BUFFER_ALIGN_BYTES).toint()
                if num_bytes
                else Int32(0)
                for num_bytes in plan.buffer_bytes
            ]
        )

        if cutlass.const_expr(config.split_k > 1):
            sums = smem.allocate_array(Uint8, plan.exchange_bytes, byte_alignment=BUFFER_ALIGN_BYTES)

        # Pipelines
        ab_ring = Ring(smem.allocate_array(Int64, 2 * config.num_ab_stage), config.num_ab_stage)
        # One thread issues TMA; 32 lanes copy scales.
        num_producers = 1 + (WARP_SIZE if self.promotes else 0)
        ab_producer, ab_consumer = pipeline.PipelineTmaAsync.create(
            barrier_storage=ab_ring.barriers,
            num_stages=config.num_ab_stage,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, num_producers),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, warp_tile.team_warps),
            tx_count=plan.loaded_bytes,
            defer_sync=True,
        ).make_participants()
        exchange = None
        if cutlass.const_expr(config.split_k > 1):
            exchange = Exchange(
                sums.toint(),
                Ring(smem.allocate_array(Int64, 2 * warp_tile.num_warps), warp_tile.num_warps),
                config.split_k,
                warp_tile,
            )
            if warp_idx == 0:
                with cute.arch.elect_one():
                    init_ring(exchange.ring, 1, 1)
        codes_address = None
        if cutlass.const_expr(
            self.output_kind.is_quantized and self.output_kind.dtype.block_k > WARP_COLUMNS
        ):
            codes_address = smem.allocate_array(Uint8, CODES_BYTES).toint()
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(config.split_k > 1):
            cute.arch.cluster_arrive_relaxed()
        cute.arch.sync_threads()

        # Everything above may overlap the end of the previous kernel, whose results are visible from here on. The next kernel may
        # start its own setup as soon as SMs have room.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        # ---- LOAD --------------------------------------------------------------------------------------
        if warp_idx >= load_warp_id:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
        load = LoadArgs(
            descriptors=descriptors,
            boxes=self.boxes,
            buffers=buffers,
            smem=plan,
            config=config,
            groups=groups,
            ab_producer=ab_producer,
            ring=ab_ring,
            scales=scales,
        )
        if warp_idx == load_warp_id:
            run_load(load)
        if cutlass.const_expr(self.promotes):
            if warp_idx == load_warp_id + 1:
                run_load_scales(load)
        if cutlass.const_expr(config.split_k > 1):
            # This role does not need the other CTAs, but every thread that arrives at a cluster barrier must wait there.
            if warp_idx >= load_warp_id:
                cute.arch.cluster_wait()

        # ---- MMA ---------------------------------------------------------------------------------------
        if warp_idx < load_warp_id:
            cute.arch.setmaxregister_increase(MMA_REGISTERS)
            run_mma(
                MmaArgs(
                    buffers=buffers,
                    smem=plan,
                    warp_tile=warp_tile,
                    formats=self.side_formats,
                    groups=groups,
                    outputs=outputs,
                    output_kind=self.output_kind,
                    config=config,
                    exchange=exchange,
                    codes_address=codes_address,
                    row_scales=scales if self.scales_integers else None,
                    ab_consumer=ab_consumer,
                )
            )
