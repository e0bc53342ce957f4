"""Grouped GEMM on sm_90a: NVFP4 x NVFP4 -> fp16, bf16 or fp32, list form.

For every group g:  C = alpha[g] * (A * SFA) @ (B * SFB)^T  with A (M_g, K_g), B (N_g, K_g) e2m1, two values a byte,
K-major; SFA (M_g, K_g / 16), SFB (N_g, K_g / 16) e4m3 in the 128x4 blocked layout; C (M_g, N_g), N-major.

Hopper has no FP4 arithmetic: operands travel as NVFP4 and are decoded, exactly, to fp16 (``decode``). Weights (B) are
on MMA-M and go from shared memory to the registers that wgmma reads; tokens (A) are on MMA-N and are decoded once a
tile into shared memory.

Roles (warps):  MATH 0-7 | ACTIVATIONS 8-15 | LOAD 15, besides.

Rings (producer -> consumer), full arrivals / empty arrivals:
  packed   LOAD -> MATH, ACTIVATIONS   num_ab_stage   full: 1 + bytes of A, B, SFA, SFB   empty: 16 (one a warp)
  decoded  ACTIVATIONS -> MATH         as many as fit full: 8 (one a warp)                empty: 8 (one a warp)

Shared memory: ``arch.sm90.SmemPlan``. Tensor maps of all groups: kernel parameters, encoded by the host code.

Source: PTX ISA 9.1, 9.7.15 (wgmma), 9.7.13.15 (mbarrier), 5.5.7 and 9.7.9.27 (tensor maps), 9.7.19.5 (setmaxnreg).
"""

import cutlass.cute as cute
from cutlass import Float16, Int32, Int64, Uint8, Uint32
from cutlass.memory import SmemAllocator

from nvfp4_cute.arch.sm90 import sf_blocks, smem_plan
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header

from ..common.group_table import GroupTable
from ..common.launch_args import read_groups, read_outputs
from ..common.output_table import OutputTable
from ..common.ring import Ring, init_ring
from ..common.tma_operand import TmaOperand, make_tma_operand
from .activations import ActivationArgs, run_activations
from .epilogue import STAGING_BYTES
from .load import LoadArgs
from .math import MathArgs, run_math
from .operands import (
    ROW_BYTES,
    SF_BLOCK_WORDS,
    packed_layout,
    packed_tensor,
    partition_operand,
    scale_layout,
    scale_tensor,
)
from .warp_schedule import WarpSchedule

# The 128-byte swizzle repeats every 1024 bytes.
OPERAND_ALIGN_BYTES = 1024
# Of decoded tokens, as wgmma reads them: 16-byte units within 128 bytes, by the row.
DECODED_SWIZZLE = (3, 4, 3)


class GroupedGemmSm90:
    """One compiled variant: a config, an output type, a number of groups, with or without alpha.

    Args:
        config: resolved KernelConfig (``arch.sm90.resolve``) that ``arch.sm90.unsupported_reason`` accepts.
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
        self.num_sfa_blocks = sf_blocks(config.work_tile_mnk[0])

    @cute.jit
    def __call__(self, table: cute.Pointer, queue):
        """Encode the tensor maps and launch.

        Args:
            table: Int64 in host memory, a header row and one row a slot: ``launch_table``.
            queue: CUstream.
        """
        # (COLUMN, ROW)
        values = cute.make_tensor(table, cute.make_layout((NUM_COLUMNS, 1 + self.num_groups)))
        rows = range(1, 1 + self.num_groups)
        m, n, k = ([Int32(values[column, row]) for row in rows] for column in (Group.M, Group.N, Group.K))
        tensors_a = [
            packed_tensor(values[Group.A, r], m[r - 1], k[r - 1], values[Group.A_PITCH, r]) for r in rows
        ]
        tensors_b = [
            packed_tensor(values[Group.B, r], n[r - 1], k[r - 1], values[Group.B_PITCH, r]) for r in rows
        ]
        tensors_sfa = [scale_tensor(values[Group.SFA, r], m[r - 1], k[r - 1]) for r in rows]
        tensors_sfb = [scale_tensor(values[Group.SFB, r], n[r - 1], k[r - 1]) for r in rows]
        tile_m, tile_n, _ = self.config.work_tile_mnk
        self.kernel.set_name_prefix(self.name)
        self.kernel(
            make_tma_operand(tensors_a, packed_layout(tile_m, 1), (tile_m, ROW_BYTES)),
            make_tma_operand(tensors_b, packed_layout(tile_n, 1), (tile_n, ROW_BYTES)),
            make_tma_operand(tensors_sfa, scale_layout(1, 1), (1, SF_BLOCK_WORDS)),
            make_tma_operand(tensors_sfb, scale_layout(1, 1), (1, SF_BLOCK_WORDS)),
            read_groups(values, rows, "list"),
            read_outputs(values, rows, "list", 1 if self.has_alpha else 0),
        ).launch(
            grid=(Int32(values[Header.NUM_CTA, 0]), 1, 1),
            block=(self.schedule.threads_per_cta, 1, 1),
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
        """Allocate, connect, dispatch."""
        config, schedule = self.config, self.schedule
        tiler, num_stage = config.work_tile_mnk, config.num_ab_stage
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # Storage
        smem = SmemAllocator()
        layout_a, layout_b = packed_layout(tiler[0], num_stage), packed_layout(tiler[1], num_stage)
        num_decoded = self.smem.num_decoded_stage
        # (VALUES of a slab, STAGE)
        sDecoded = smem.allocate_tensor(
            Float16,
            cute.make_layout((self.smem.decoded_stage_bytes // 2, num_decoded)),
            OPERAND_ALIGN_BYTES,
            swizzle=cute.make_swizzle(*DECODED_SWIZZLE),
        )
        sA = smem.allocate_tensor(Uint8, layout_a.outer, OPERAND_ALIGN_BYTES, swizzle=layout_a.inner)
        sB = smem.allocate_tensor(Uint8, layout_b.outer, OPERAND_ALIGN_BYTES, swizzle=layout_b.inner)
        sSFA = smem.allocate_tensor(Uint32, scale_layout(self.num_sfa_blocks, num_stage), OPERAND_ALIGN_BYTES)
        sSFB = smem.allocate_tensor(Uint32, scale_layout(1, num_stage), OPERAND_ALIGN_BYTES)
        packed = Ring(smem.allocate_array(Int64, 2 * num_stage), num_stage)
        decoded = Ring(smem.allocate_array(Int64, 2 * num_decoded), num_decoded)
        staging = smem.allocate(schedule.num_math_groups * STAGING_BYTES, OPERAND_ALIGN_BYTES)

        # Barriers
        if warp_idx == 0:
            with cute.arch.elect_one():
                init_ring(packed, 1, schedule.num_math_warps + schedule.num_activation_warps)
                init_ring(decoded, schedule.num_activation_warps, schedule.num_math_warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        # ---- MATH --------------------------------------------------------------------------------------
        if warp_idx < schedule.num_math_warps:
            cute.arch.setmaxregister_increase(schedule.math_registers)
            run_math(
                MathArgs(
                    b_address=sB.iterator.toint(),
                    sfb_address=sSFB.iterator.toint(),
                    decoded_ptr=sDecoded.iterator,
                    staging_address=staging.toint(),
                    groups=groups,
                    outputs=outputs,
                    out_dtype=self.out_dtype,
                    work_tile_mnk=tiler,
                    packed=packed,
                    decoded=decoded,
                )
            )

        # ---- ACTIVATIONS and LOAD ----------------------------------------------------------------------
        else:
            cute.arch.setmaxregister_decrease(schedule.activation_registers)
            activations = ActivationArgs(
                a_address=sA.iterator.toint(),
                sfa_address=sSFA.iterator.toint(),
                decoded_address=sDecoded.iterator.toint(),
                num_sfa_blocks=self.num_sfa_blocks,
                groups=groups,
                work_tile_mnk=tiler,
                packed=packed,
                decoded=decoded,
            )
            if warp_idx == schedule.load_warp_id:
                load = LoadArgs(
                    a=partition_operand(tma_a, sA),
                    b=partition_operand(tma_b, sB),
                    sfa=partition_operand(tma_sfa, sSFA),
                    sfb=partition_operand(tma_sfb, sSFB),
                    num_sfa_blocks=self.num_sfa_blocks,
                    stage_bytes=self.smem.stage_bytes,
                    groups=groups,
                    work_tile_mnk=tiler,
                    packed=packed,
                )
                run_activations(activations, load)
            else:
                run_activations(activations, None)
