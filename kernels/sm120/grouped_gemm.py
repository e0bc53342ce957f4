"""Grouped GEMM on sm_120a and sm_121a: NVFP4 x NVFP4 -> fp16, bf16 or fp32, list form.

For every group g:  C = alpha[g] * (A * SFA) @ (B * SFB)^T  with A (M_g, K_g), B (N_g, K_g) e2m1, two values a byte,
K-major; SFA (M_g, K_g / 16), SFB (N_g, K_g / 16) e4m3 in the 128x4 blocked layout; C (M_g, N_g), N-major.

Roles (warps):  MMA 0-7, one team or two (0-3 where one team has a tile of 8 columns) | LOAD, the warp after
them; the other three of its warpgroup only give their registers to the MMA warps.

Pipelines (producer -> consumer), full arrivals / empty arrivals:
  ab   LOAD -> MMA   num_ab_stage    full: 1 + bytes of A, B, SFA, SFB    empty: one a warp of the team
  turn  team -> team   two named barriers: a team multiplies after the other has read its last stage

Timeline, a tile: LOAD fills one stage a K tile and runs ahead over the tiles of a persistent CTA -> every MMA warp of
the tile's team reads its rows and columns with ldmatrix and its scales with 32-bit loads (``warp_tile``), a K block
ahead of the one that it multiplies, and releases the stage; after the last K tile it scales, converts and stores its
sums from registers, while the other team, if there is one, multiplies.

Shared memory: ``arch.sm120.SmemPlan``. Tensor maps of all groups: kernel parameters, encoded by the host code.

Source: PTX ISA 9.1, 9.7.14.5 (mma with block scaling), 9.7.14.5.15 (ldmatrix), 9.7.13.15 (mbarrier), 5.5.7 (swizzle).
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from nvfp4_cute.arch.sm120 import BUFFER_ALIGN_BYTES, smem_plan
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header

from ..common.group_table import GroupTable
from ..common.launch_args import read_groups, read_outputs
from ..common.output_table import OutputTable
from ..common.tma_operand import TmaOperand, make_tma_operand
from ..common.warp_schedule import WARP_SIZE
from .load import LoadArgs, prefetch_first_descriptors, run_load
from .mma import MmaArgs, StageBuffers, run_mma
from .operands import (
    AB_DTYPE,
    partition_scales,
    partition_values,
    scales_box,
    scales_layout,
    scales_tensor,
    values_layout,
    values_tensor,
)
from .warp_tile import WarpTile

WARPGROUP_WARPS = 4
# Registers a thread: a budget belongs to a warpgroup, and two of MMA and one of LOAD share the SM's 65536.
LOAD_REGISTERS, MMA_REGISTERS = 40, 232


class GroupedGemmSm120:
    """One compiled variant: a config, an output type, a number of groups, with or without alpha.

    Args:
        config: resolved KernelConfig (``arch.sm120.resolve``) that ``arch.sm120.unsupported_reason`` accepts.
        num_groups: slots of the launch.
        out_dtype: cutlass.Float16, BFloat16 or Float32.
        has_alpha: whether every group's result is multiplied by a factor.
        name: what the kernel is called in profilers and in the emulator's reports.
    """

    def __init__(self, config: KernelConfig, num_groups: int, out_dtype: type, has_alpha: bool, name: str):
        self.config = config
        self.num_groups = num_groups
        self.out_dtype = out_dtype
        self.has_alpha = has_alpha
        self.name = name
        self.smem = smem_plan(config)
        self.warp_tile = WarpTile(config.cta_tile_shape_mnk[1], config.num_acc_stage)

    @cute.jit
    def __call__(self, table: cute.Pointer, queue):
        """Encode the tensor maps and launch.

        Args:
            table: Int64 in host memory, a header row and one row a slot: ``launch_table``.
            queue: CUstream.
        """
        tile_m, tile_n, tile_k = self.config.cta_tile_shape_mnk
        # (COLUMN, ROW)
        values = cute.make_tensor(table, cute.make_layout((NUM_COLUMNS, 1 + self.num_groups)))
        rows = range(1, 1 + self.num_groups)
        extents = [[Int32(values[column, row]) for row in rows] for column in (Group.M, Group.N, Group.K)]
        m, n, k = extents
        tensors_a = [
            values_tensor(values[Group.A, row], m[row - 1], k[row - 1], values[Group.A_PITCH, row])
            for row in rows
        ]
        tensors_b = [
            values_tensor(values[Group.B, row], n[row - 1], k[row - 1], values[Group.B_PITCH, row])
            for row in rows
        ]
        tensors_sfa = [scales_tensor(values[Group.SFA, row], m[row - 1], k[row - 1]) for row in rows]
        tensors_sfb = [scales_tensor(values[Group.SFB, row], n[row - 1], k[row - 1]) for row in rows]
        num_stage = self.config.num_ab_stage
        scales = scales_layout(tile_k, num_stage)
        if cutlass.const_expr(self.config.swap_ab):
            tensors_a, tensors_b, tensors_sfa, tensors_sfb = tensors_b, tensors_a, tensors_sfb, tensors_sfa
        self.kernel.set_name_prefix(self.name)
        self.kernel(
            make_tma_operand(tensors_a, values_layout(tile_m, tile_k, num_stage), (tile_m, tile_k)),
            make_tma_operand(tensors_b, values_layout(tile_n, tile_k, num_stage), (tile_n, tile_k)),
            make_tma_operand(tensors_sfa, scales, scales_box(tile_k)),
            make_tma_operand(tensors_sfb, scales, scales_box(tile_k)),
            read_groups(values, rows, "list"),
            read_outputs(values, rows, "list", 1 if self.has_alpha else 0),
        ).launch(
            grid=(Int32(values[Header.NUM_CTA, 0]), 1, 1),
            block=(WARP_SIZE * (self.warp_tile.num_warps + WARPGROUP_WARPS), 1, 1),
            min_blocks_per_mp=1,
            stream=queue,
        )

    @cute.kernel
    def kernel(
        self,
        tma_a: TmaOperand,
        tma_b: TmaOperand,
        tma_sfa: TmaOperand,
        tma_sfb: TmaOperand,
        groups: GroupTable,
        outputs: OutputTable,
    ):
        """Allocate, connect, dispatch. A is the MMA's M side here, and B its N side: of the other with ``swap_ab``."""
        config, warp_tile = self.config, self.warp_tile
        tile_m, tile_n, tile_k = config.cta_tile_shape_mnk
        # Ids
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        load_warp_id = warp_tile.num_warps
        if warp_idx == load_warp_id:
            prefetch_first_descriptors([tma_a, tma_b, tma_sfa, tma_sfb], groups, config.work_tile_mnk)

        # Storage
        smem = SmemAllocator()
        layout_a = values_layout(tile_m, tile_k, config.num_ab_stage)
        layout_b = values_layout(tile_n, tile_k, config.num_ab_stage)
        layout_sf = scales_layout(tile_k, config.num_ab_stage)
        # (rows, K, STAGE)
        sA = smem.allocate_tensor(AB_DTYPE, layout_a.outer, BUFFER_ALIGN_BYTES, swizzle=layout_a.inner)
        sB = smem.allocate_tensor(AB_DTYPE, layout_b.outer, BUFFER_ALIGN_BYTES, swizzle=layout_b.inner)
        # (WORD, 1, K_BLOCK, STAGE)
        sSFA = smem.allocate_tensor(Int32, layout_sf, BUFFER_ALIGN_BYTES)
        sSFB = smem.allocate_tensor(Int32, layout_sf, BUFFER_ALIGN_BYTES)

        # Pipelines
        ab_producer, ab_consumer = pipeline.PipelineTmaAsync.create(
            barrier_storage=smem.allocate_array(Int64, 2 * config.num_ab_stage),
            num_stages=config.num_ab_stage,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, warp_tile.team_warps),
            tx_count=self.smem.stage_bytes,
            defer_sync=True,
        ).make_participants()
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        # ---- LOAD --------------------------------------------------------------------------------------
        if warp_idx >= load_warp_id:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
        if warp_idx == load_warp_id:
            run_load(
                LoadArgs(
                    m=partition_values(tma_a, sA, tile_m, tile_k),
                    n=partition_values(tma_b, sB, tile_n, tile_k),
                    sf_m=partition_scales(tma_sfa, sSFA, tile_k),
                    sf_n=partition_scales(tma_sfb, sSFB, tile_k),
                    groups=groups,
                    config=config,
                    ab_producer=ab_producer,
                )
            )

        # ---- MMA ---------------------------------------------------------------------------------------
        if warp_idx < load_warp_id:
            cute.arch.setmaxregister_increase(MMA_REGISTERS)
            run_mma(
                MmaArgs(
                    buffers=StageBuffers(*[tensor.iterator.toint() for tensor in (sA, sB, sSFA, sSFB)]),
                    smem=self.smem,
                    warp_tile=warp_tile,
                    groups=groups,
                    outputs=outputs,
                    out_dtype=self.out_dtype,
                    config=config,
                    ab_consumer=ab_consumer,
                )
            )
