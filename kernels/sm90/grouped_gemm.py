"""Grouped GEMM on sm_90a: NVFP4 x NVFP4, MXFP4 x MXFP4, MXFP8 x MXFP8 or both MX formats -> fp16, bf16, fp32 or NVFP4.

For every group g:  C = alpha[g] * (A * SFA) @ (B * SFB)^T  with A (M_g, K_g), B (N_g, K_g) e2m1, two values per byte,
K-major; SFA (M_g, K_g / 16), SFB (N_g, K_g / 16) e4m3 in the 128x4 blocked layout; C (M_g, N_g), N-major.
An optional bias (N) is added to every row of C.
Dual:  C = activation(alpha1[g] * A @ B1^T) * (alpha2[g] * A @ B2^T), with B1 and B2 of one shape, or interleaved in one.
MX formats: e2m1, or one byte of e4m3 or e5m2; ue8m0 scales of 32 values. Operands are dequantized to bf16 instead of fp16.
List form: every group has operands and sizes of its own, known to the host. Ragged and masked form: groups are parts of shared
operands, and the device holds the number of rows of A per group. Batched form: every group has all of its rows.

Hopper has no FP4 arithmetic: operands travel as NVFP4 and are dequantized, exactly, to fp16 (``decode``). Weights (B) are on
MMA-M and go from shared memory to the registers that wgmma reads. Tokens (A) are on MMA-N and are dequantized once per tile
into shared memory.

Roles (warps):  MATH 0-7 | ACTIVATIONS 8-15, or fewer | LOAD, the last two warps, or two warps of ACTIVATIONS.

Rings (producer -> consumer), full arrivals / empty arrivals:
  packed   LOAD -> MATH, ACTIVATIONS   num_ab_stage   full: 2 + bytes of A, B, SFA, SFB   empty: one per warp
  decoded  ACTIVATIONS -> MATH         2 to 6         full: one per warp of the stage    empty: 8 (one per warp)

``KernelConfig.decode_first`` pays where many tiles of weights use the same tokens. A preceding launch writes the tokens in fp16
to global memory (``decode_tokens``). This launch then has 12 warps and no ACTIVATIONS, ``packed`` holds weights only, and LOAD
fills ``decoded`` (``load_decoded``). The two CTAs of a cluster have neighbouring tiles of weights and the same tokens; they
alternate in loading tokens for both:
  packed   LOAD -> MATH                num_ab_stage   full: 1 + bytes of B, SFB           empty: 8 (one per warp)
  decoded  LOAD -> MATH of both CTAs   2 to 12        full: 1 + bytes of both loads       empty: 16 (one per warp)
Where a K tile is one stage of ``decoded``, one ring holds both; its stages have two K tiles where tiles are small:
  packed   LOAD -> MATH of both CTAs   num_ab_stage   full: 2 + bytes of B, SFB, both loads   empty: 16 (one per warp)
Stream-K: all clusters get equal work, whole tiles first and then K tiles (``stream_k``). Partial sums of a tile that several
clusters share travel through global memory (``fixup``; role FIXUP, warp 8). The SCHEDULER role, warp 9, finds the parts of
tiles for all other roles (``scheduler``):
  records  SCHEDULER -> MATH, LOAD     8              full: 1                             empty: 8 (one per MATH warp)

Split-K: the CTAs of a cluster share a tile's K tiles; the first CTA adds the partial sums (``common.split_k``).

Shared memory: ``planning.arch.sm90.SmemPlan``. Tensor maps: kernel parameters, encoded by the host code.

Source: PTX ISA 9.1, 9.7.15 (wgmma), 9.7.13.15 (mbarrier), 5.5.7 and 9.7.9.27 (tensor maps), 9.7.19.5 (setmaxnreg).
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32, Int64, Uint8

from nvfp4_cute.launch_table import NUM_COLUMNS, Header
from nvfp4_cute.planning.arch.sm90 import (
    ctas_per_sm,
    fixup_bytes,
    leaves_tokens_out,
    shares_stages,
    smem_plan,
    stages_of_k_tile,
    token_box,
)

from ..common.launch_args import read_groups, read_operands, read_outputs
from ..common.operand_maps import Descriptors, prefetch_descriptors
from ..common.output_kind import OutputKind
from ..common.output_table import OutputTable
from ..common.ring import Ring, init_ring
from ..common.variant import GroupedGemmVariant
from ..common.versions import SmemAllocator
from .activations import ActivationArgs, run_activations
from .cta import OPERAND_ALIGN_BYTES, exchange_of_sums, launch_settings, leave, meet
from .decode_tokens import FLAG_BYTES, DecodeTokens, Flags, decoded_atom, decoded_views
from .epilogue import STAGING_BYTES
from .fixup import Fixup, run_fixup
from .load import TOKENS, WEIGHTS, Buffers, LoadArgs, run_load
from .load_decoded import DecodedArgs, clear, run_load_decoded
from .math import MathArgs, run_math
from .operands import make_boxes
from .packed import Packed
from .scheduler import NUM_RECORDS, RECORD_BYTES, ScheduledTiles, run_scheduler
from .stream_k import groups_by_work
from .tile_walk import WalkedTiles
from .warp_schedule import NUM_LOAD_WARPS, WarpSchedule

# Swizzle of dequantized tokens, as wgmma reads them: 16-byte units within 128 bytes, by the row.
DECODED_SWIZZLE = (3, 4, 3)


class GroupedGemmSm90(GroupedGemmVariant):
    """One compiled variant, of a config and a pair of formats that ``planning.arch.sm90`` accepts."""

    def __init__(self, **options):
        super().__init__(**options)
        self.kind = OutputKind(self.out_dtype, False, self.activation, self.weight_layout)
        self.schedule = WarpSchedule.of(self.config)
        self.smem = smem_plan(self.config, self.kind.num_b, self.formats)
        self.tokens, self.weights = map(Packed, self.formats)

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
        views_m, views_n = read_operands(values, rows, self.kind.num_b, self.config.swap_ab)
        groups = read_groups(values, rows, self.form, self.config.work_tile_mnk[0])
        boxes = make_boxes(self.config, (self.weights.format, self.tokens.format))
        if cutlass.const_expr(self.config.decode_first):
            workspace = values[Header.WORKSPACE, 0]
            flag_bytes, sum_bytes = fixup_bytes(self.config, values[Header.NUM_CTA, 0])
            fixup = Fixup(flags=workspace, sums=workspace + flag_bytes)
            decoded = decoded_views(views_n[0], workspace + flag_bytes + sum_bytes)
            flags = Flags(workspace, Int32(flag_bytes // FLAG_BYTES))
            decode_tokens = DecodeTokens(self.form, f"decode_tokens_{self.name}", self.tokens)
            decode_tokens(groups, views_n[0], decoded, flags, stream)
            if cutlass.const_expr(self.config.stream_k):
                groups = groups_by_work(groups, self.config)
            descriptors = replace(
                Descriptors.encode(views_m, [], boxes),
                n=[[decoded_atom(view, token_box(self.config)) for view in decoded]],
            )
        else:
            descriptors, fixup = Descriptors.encode(views_m, views_n, boxes), None
        self.kernel.set_name_prefix(self.name)
        self.kernel(
            descriptors,
            groups,
            read_outputs(
                values,
                rows,
                self.form,
                self.kind.num_products if self.has_alpha else 0,
                self.kind.is_quantized,
                self.has_limit,
                self.bias_dtype,
                self.has_row_scales,
            ),
            fixup,
        ).launch(
            **launch_settings(
                self.config, self.schedule, values[Header.NUM_CTA, 0], ctas_per_sm(self.config)
            ),
            stream=stream,
            use_pdl=self.config.decode_first,
        )

    @cute.kernel
    def kernel(self, descriptors: Descriptors, groups, outputs: OutputTable, fixup: Fixup | None):
        """Allocates shared memory, initializes barriers, and dispatches warps to roles."""
        config, schedule, plan = self.config, self.schedule, self.smem
        num_stage, num_decoded = plan.num_ab_stage, plan.num_decoded_stage
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == schedule.num_math_warps:
            prefetch_descriptors(descriptors)

        # Storage
        smem = SmemAllocator()
        # (VALUES, STAGE)
        sDecoded = smem.allocate_tensor(
            Float16,
            cute.make_layout((plan.decoded_stage_bytes // 2, num_decoded)),
            OPERAND_ALIGN_BYTES,
            swizzle=cute.make_swizzle(*DECODED_SWIZZLE),
        )
        buffers = Buffers(
            *(
                smem.allocate_array(
                    Uint8, max(num_stage * stage_bytes, 16), byte_alignment=OPERAND_ALIGN_BYTES
                ).toint()
                for stage_bytes in (
                    plan.num_b * plan.b_stage_bytes,
                    plan.a_stage_bytes,
                    plan.num_b * plan.sfb_stage_bytes,
                    plan.sfa_stage_bytes,
                )
            )
        )
        # One spare barrier per ring of tokens: MATH arrives there when it has no stage to release.
        packed = Ring(smem.allocate_array(Int64, 2 * num_stage + 1), num_stage)
        decoded = packed
        if cutlass.const_expr(not shares_stages(config)):
            decoded = Ring(smem.allocate_array(Int64, 2 * num_decoded + 1), num_decoded)
        partial, exchange = exchange_of_sums(smem, plan.partial_bytes, schedule, config.split_k)
        staging = smem.allocate(schedule.num_math_groups * STAGING_BYTES, OPERAND_ALIGN_BYTES)
        tiles = WalkedTiles(groups, config)
        if cutlass.const_expr(config.stream_k):
            records = smem.allocate_array(Uint8, NUM_RECORDS * RECORD_BYTES, byte_alignment=16).toint()
            scheduled = Ring(smem.allocate_array(Int64, 2 * NUM_RECORDS), NUM_RECORDS)
            tiles = ScheduledTiles(records, scheduled, groups)

        # Barriers
        if warp_idx == 0:
            with cute.arch.elect_one():
                if cutlass.const_expr(shares_stages(config)):
                    init_ring(packed, NUM_LOAD_WARPS, schedule.num_math_warps * config.num_m_cta)
                elif cutlass.const_expr(config.decode_first):
                    init_ring(packed, 1, schedule.num_math_warps)
                    init_ring(decoded, 1, schedule.num_math_warps * config.num_m_cta)
                else:
                    init_ring(packed, NUM_LOAD_WARPS, schedule.num_math_warps + schedule.num_activation_warps)
                    writers = schedule.num_activation_warps // stages_of_k_tile(config)
                    init_ring(decoded, writers, schedule.num_math_warps)
                if cutlass.const_expr(config.stream_k):
                    init_ring(tiles.ring, 1, schedule.num_math_warps)
                init_ring(exchange, 1, schedule.num_math_warps)
                cute.arch.mbarrier_init(decoded.empty(decoded.num_stages), 1)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(leaves_tokens_out(config)):
            nbytes = plan.decoded_stage_bytes * num_decoded
            clear(sDecoded.iterator.toint(), nbytes, schedule.threads_per_cta)
        meet(config)

        # ---- MATH --------------------------------------------------------------------------------------
        if warp_idx < schedule.num_math_warps:
            cute.arch.setmaxregister_increase(schedule.math_registers)
            run_math(
                MathArgs(
                    b_address=buffers.weights,
                    sfb_address=buffers.weight_scales,
                    b_stage_bytes=plan.num_b * plan.b_stage_bytes,
                    sfb_stage_bytes=plan.num_b * plan.sfb_stage_bytes,
                    decoded_address=sDecoded.iterator.toint(),
                    staging_address=staging.toint(),
                    tiles=tiles,
                    outputs=outputs,
                    kind=self.kind,
                    config=config,
                    schedule=schedule,
                    partial=partial,
                    packed=packed,
                    decoded=decoded,
                    stages_of_k_tile=stages_of_k_tile(config),
                    format=self.weights,
                    exponent=self.tokens.exponent + self.weights.exponent,
                    fixup=fixup,
                    sent=exchange.empty(0),
                )
            )

        # ---- ACTIVATIONS and LOAD ----------------------------------------------------------------------
        else:
            cute.arch.setmaxregister_decrease(schedule.other_registers)
            k_extents = (self.weights.row_bytes, self.tokens.row_bytes)
            load = LoadArgs(descriptors, buffers, plan, config, tiles, packed, self.weights.atoms, k_extents)
            if cutlass.const_expr(config.decode_first):
                if warp_idx == schedule.first_load_warp_id + WEIGHTS:
                    run_load(load, Int32(WEIGHTS))
                if warp_idx == schedule.first_load_warp_id + TOKENS:
                    run_load_decoded(DecodedArgs(load, decoded, sDecoded.iterator.toint()))
                if cutlass.const_expr(config.stream_k):
                    if warp_idx == schedule.fixup_warp_id:
                        run_fixup(fixup, exchange.empty(0), True)
                    if warp_idx == schedule.scheduler_warp_id:
                        run_scheduler(tiles, config)
            else:
                if warp_idx < schedule.num_math_warps + schedule.num_activation_warps:
                    run_activations(
                        ActivationArgs(
                            a_address=buffers.tokens,
                            sfa_address=buffers.token_scales,
                            decoded_address=sDecoded.iterator.toint(),
                            sfa_stage_bytes=plan.sfa_stage_bytes,
                            tiles=tiles,
                            config=config,
                            schedule=schedule,
                            packed=packed,
                            decoded=decoded,
                            load=load if schedule.shares_load else None,
                            format=self.tokens,
                        )
                    )
                elif cutlass.const_expr(not schedule.shares_load):
                    if warp_idx >= schedule.first_load_warp_id:
                        run_load(load, warp_idx - schedule.first_load_warp_id)
        leave(config)
