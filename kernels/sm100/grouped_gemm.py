"""Grouped GEMM on sm_100a, sm_103a and sm_110a: NVFP4 x NVFP4 -> fp16, bf16 or fp32, list form.

For every group g:  C = alpha[g] * (A * SFA) @ (B * SFB)^T  with A (M_g, K_g), B (N_g, K_g) e2m1, two values a byte,
K-major; SFA (M_g, K_g / 16), SFB (N_g, K_g / 16) e4m3 in the 128x4 blocked layout; C (M_g, N_g), N-major.

Roles (warps):  EPILOGUE 0-3 | MMA 4 | LOAD 5.

Pipelines (producer -> consumer), full arrivals / empty arrivals:
  ab   LOAD -> MMA       num_ab_stage    full: 1 + bytes of A, B, SFA, SFB    empty: 1 (tcgen05.commit)
  acc  MMA  -> EPILOGUE  num_acc_stage   full: 1 (tcgen05.commit)             empty: 4 (one a warp)

Timeline, a tile: LOAD fills one stage a K tile -> MMA copies the stage's scales to tensor memory, issues K/64 MMAs,
commits the stage back; after the last K tile commits the accumulator -> EPILOGUE reads it in slices of 32 columns,
one ahead of the one that it scales, converts and stores, and releases it with the last slice. The three roles run ahead of each other over the tiles of a persistent CTA.

Tensor memory: accumulator stages side by side, then the scales of one K tile (``arch.sm100.TmemMap``).
Shared memory: ``arch.sm100.SmemPlan``. Tensor maps of all groups: kernel parameters, encoded by the host code.

Source: PTX ISA 9.1, 9.7.16 (tcgen05), 9.7.13.15 (mbarrier), 5.5.7 and 9.7.9.27 (tensor maps).
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator, TmemAllocator

from nvfp4_cute.arch.sm100 import smem_plan, tmem_map
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header
from nvfp4_cute.scale_layout import SF_VEC_SIZE

from ..common.group_table import GroupTable
from ..common.warp_schedule import WarpSchedule
from .epilogue import EpilogueArgs, OutputTable, run_epilogue
from .load import LoadArgs, prefetch_first_descriptors, run_load
from .mma import MmaArgs, make_scale_copy, run_mma
from .operands import (
    AB_DTYPE,
    SF_DTYPE,
    TmaOperand,
    make_smem_layouts,
    make_tiled_mma,
    make_tma_operand,
    partition_operand,
)

# Named barrier 0 is __syncthreads.
TMEM_ALLOC_BARRIER_ID = 1
# A tile in the 128-byte swizzle repeats every 1024 bytes.
OPERAND_ALIGN_BYTES = 1024
# Of global addresses in tensor maps.
TMA_ALIGN_BYTES = 16


class GroupedGemmSm100:
    """One compiled variant: a config, an output type, a number of groups, with or without alpha.

    Args:
        config: resolved KernelConfig (``arch.sm100.resolve``) that ``arch.sm100.unsupported_reason`` accepts.
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
        self.schedule = WarpSchedule()
        self.smem = smem_plan(config)
        self.tmem = tmem_map(config)

    @cute.jit
    def __call__(self, table: cute.Pointer, queue):
        """Encode the tensor maps and launch.

        Args:
            table: Int64 in host memory, a header row and one row a slot: ``launch_table``.
            queue: CUstream.
        """
        tiled_mma = make_tiled_mma(self.config)
        layouts = make_smem_layouts(tiled_mma, self.config)
        # (COLUMN, ROW)
        values = cute.make_tensor(table, cute.make_layout((NUM_COLUMNS, 1 + self.num_groups)))
        rows = range(1, 1 + self.num_groups)
        extents = [[Int32(values[column, row]) for row in rows] for column in (Group.M, Group.N, Group.K)]
        m, n, k = extents
        make_a, make_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        tensors_a = [
            _k_major(values[Group.A, row], m[row - 1], k[row - 1], values[Group.A_PITCH, row]) for row in rows
        ]
        tensors_b = [
            _k_major(values[Group.B, row], n[row - 1], k[row - 1], values[Group.B_PITCH, row]) for row in rows
        ]
        tensors_sfa = [_blocked_scales(values[Group.SFA, row], m[row - 1], k[row - 1]) for row in rows]
        tensors_sfb = [_blocked_scales(values[Group.SFB, row], n[row - 1], k[row - 1]) for row in rows]
        alpha = None
        if cutlass.const_expr(self.has_alpha):
            alpha = cute.make_ptr(Float32, values[Header.ALPHA, 0], cute.AddressSpace.gmem, assumed_align=4)
        self.kernel.set_name_prefix(self.name)
        self.kernel(
            tiled_mma,
            make_tma_operand(tensors_a, layouts.a, make_a, tiled_mma, self.config),
            make_tma_operand(tensors_b, layouts.b, make_b, tiled_mma, self.config),
            make_tma_operand(tensors_sfa, layouts.sfa, make_a, tiled_mma, self.config, cutlass.Int16),
            make_tma_operand(tensors_sfb, layouts.sfb, make_b, tiled_mma, self.config, cutlass.Int16),
            GroupTable(
                m=m,
                n=n,
                k=k,
                tile_offsets=[Int32(values[Group.TILE_OFFSET, row]) for row in rows],
                num_tiles=Int32(values[Header.NUM_TILES, 0]),
            ),
            OutputTable(
                addresses=[values[Group.OUT, row] for row in rows],
                pitches=[values[Group.OUT_PITCH, row] for row in rows],
                group_indices=[Int32(values[Group.GROUP_IDX, row]) for row in rows],
                alpha=alpha,
            ),
        ).launch(
            grid=(Int32(values[Header.NUM_CTA, 0]), 1, 1),
            block=(self.schedule.threads_per_cta, 1, 1),
            min_blocks_per_mp=1,
            stream=queue,
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        tma_a: TmaOperand,
        tma_b: TmaOperand,
        tma_sfa: TmaOperand,
        tma_sfb: TmaOperand,
        groups: GroupTable,
        outputs: OutputTable,
    ):
        """Allocate, connect, dispatch."""
        config, schedule = self.config, self.schedule
        # Ids
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == schedule.load_warp_id:
            prefetch_first_descriptors([tma_a, tma_b, tma_sfa, tma_sfb], groups, config.cta_tile_shape_mnk)

        # Storage
        layouts = make_smem_layouts(tiled_mma, config)
        smem = SmemAllocator()
        # (MMA, MMA_MN, MMA_K, STAGE)
        sA = smem.allocate_tensor(AB_DTYPE, layouts.a.outer, OPERAND_ALIGN_BYTES, swizzle=layouts.a.inner)
        sB = smem.allocate_tensor(AB_DTYPE, layouts.b.outer, OPERAND_ALIGN_BYTES, swizzle=layouts.b.inner)
        sSFA = smem.allocate_tensor(SF_DTYPE, layouts.sfa, OPERAND_ALIGN_BYTES)
        sSFB = smem.allocate_tensor(SF_DTYPE, layouts.sfb, OPERAND_ALIGN_BYTES)

        # Pipelines
        one_thread = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        ab_producer, ab_consumer = pipeline.PipelineTmaUmma.create(
            barrier_storage=smem.allocate_array(Int64, 2 * config.num_ab_stage),
            num_stages=config.num_ab_stage,
            producer_group=one_thread,
            consumer_group=one_thread,
            tx_count=self.smem.stage_bytes,
            defer_sync=True,
        ).make_participants()
        acc_producer, acc_consumer = pipeline.PipelineUmmaAsync.create(
            barrier_storage=smem.allocate_array(Int64, 2 * config.num_acc_stage),
            num_stages=config.num_acc_stage,
            producer_group=one_thread,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, len(schedule.epilogue_warp_ids)),
            defer_sync=True,
        ).make_participants()
        tmem = TmemAllocator(
            smem.allocate(Int32, byte_alignment=8),
            barrier_for_retrieve=pipeline.NamedBarrier(TMEM_ALLOC_BARRIER_ID, schedule.num_tmem_threads),
            allocator_warp_id=schedule.mma_warp_id,
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        # Partitions
        tiler = config.cta_tile_shape_mnk
        thr_mma = tiled_mma.get_slice(0)
        # (MMA, MMA_M, MMA_N, ACC_STAGE)
        acc_shape = cute.append(tiled_mma.partition_shape_C(tiler[:2]), config.num_acc_stage)
        acc_layout = tiled_mma.make_fragment_C(acc_shape).layout

        # ---- LOAD --------------------------------------------------------------------------------------
        if warp_idx == schedule.load_warp_id:
            tiler_a, tiler_b = (tiler[0], tiler[2]), (tiler[1], tiler[2])
            run_load(
                LoadArgs(
                    a=partition_operand(tma_a, sA, tiler_a, thr_mma.partition_A),
                    b=partition_operand(tma_b, sB, tiler_b, thr_mma.partition_B),
                    sfa=partition_operand(tma_sfa, sSFA, tiler_a, thr_mma.partition_A),
                    sfb=partition_operand(tma_sfb, sSFB, tiler_b, thr_mma.partition_B),
                    groups=groups,
                    cta_tile_shape_mnk=tiler,
                    ab_producer=ab_producer,
                )
            )

        # ---- MMA ---------------------------------------------------------------------------------------
        if warp_idx == schedule.mma_warp_id:
            tmem.allocate(self.tmem.alloc_cols)
            tmem.wait_for_alloc()
            tmem_ptr = tmem.retrieve_ptr(Float32)
            sfa_tmem_layout = blockscaled.make_tmem_layout_sfa(
                tiled_mma, tiler, SF_VEC_SIZE, cute.slice_(layouts.sfa, (None, None, None, 0))
            )
            sfb_tmem_layout = blockscaled.make_tmem_layout_sfb(
                tiled_mma, tiler, SF_VEC_SIZE, cute.slice_(layouts.sfb, (None, None, None, 0))
            )
            run_mma(
                MmaArgs(
                    tiled_mma=tiled_mma,
                    tCrA=tiled_mma.make_fragment_A(sA),
                    tCrB=tiled_mma.make_fragment_B(sB),
                    tCtAcc=cute.make_tensor(tmem_ptr, acc_layout),
                    sfa=make_scale_copy(sSFA, sfa_tmem_layout, tmem_ptr + self.tmem.sfa_col),
                    sfb=make_scale_copy(sSFB, sfb_tmem_layout, tmem_ptr + self.tmem.sfb_col),
                    groups=groups,
                    cta_tile_shape_mnk=tiler,
                    ab_consumer=ab_consumer,
                    acc_producer=acc_producer,
                )
            )
            tmem.relinquish_alloc_permit()
            tmem.free(tmem_ptr)

        # ---- EPILOGUE ----------------------------------------------------------------------------------
        if warp_idx < schedule.mma_warp_id:
            tmem.wait_for_alloc()
            run_epilogue(
                EpilogueArgs(
                    tCtAcc=cute.make_tensor(tmem.retrieve_ptr(Float32), acc_layout),
                    outputs=outputs,
                    out_dtype=self.out_dtype,
                    groups=groups,
                    cta_tile_shape_mnk=tiler,
                    acc_consumer=acc_consumer,
                )
            )


def _k_major(address: Int64, rows: Int32, k: Int32, pitch: Int64) -> cute.Tensor:
    """(rows, K, 1) view of packed e2m1; a TMA row pitch is a multiple of 16 bytes, that is 32 elements."""
    layout = cute.make_layout((rows, k, 1), stride=(cute.assume(pitch, 32), 1, 0))
    return cute.make_tensor(_global_ptr(AB_DTYPE, address), layout)


def _blocked_scales(address: Int64, rows: Int32, k: Int32) -> cute.Tensor:
    """(rows, K, 1) view of e4m3 scales in the 128x4 blocked layout, stride 0 inside a block of 16."""
    layout = blockscaled.tile_atom_to_shape_SF((rows, k, 1), SF_VEC_SIZE)
    return cute.make_tensor(_global_ptr(SF_DTYPE, address), layout)


def _global_ptr(dtype: type, address: Int64) -> cute.Pointer:
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=TMA_ALIGN_BYTES)
