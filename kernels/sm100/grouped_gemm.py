"""Grouped GEMM on sm_100a, sm_103a and sm_110a: block-scaled operands -> fp16, bf16, fp32 or NVFP4.

For every group g:  C = alpha[g] * (A * SFA) @ (B * SFB)^T  with A (M_g, K_g), B (N_g, K_g) of a pair of formats in ``MMA``,
K-major; SFA, SFB one scale per block of a row, in the 128x4 blocked layout; C (M_g, N_g), N-major or M-major. Dual:  C =
activation(alpha1[g] * A @ B1^T) * (alpha2[g] * A @ B2^T), with B1 and B2 of one shape. List form: every group has operands and
sizes of its own, known to the host. Ragged and masked form: groups are parts of shared operands, and the device holds the
number of rows of A per group. Batched form: every group has all of its rows.

Roles (warps):  EPILOGUE 0-3 | MMA 4 | LOAD 5.

Pipelines (producer -> consumer), full arrivals / empty arrivals. In a pair, the leader's full ab and empty acc barriers count
for both CTAs, and commits arrive at both:
  ab   LOAD -> MMA       num_ab_stage    full: 1 + bytes of all operands     empty: 1 (tcgen05.commit) per MMA that shares loads
  acc  MMA  -> EPILOGUE  num_acc_stage   full: 1 (tcgen05.commit)            empty: 4 per CTA (one per warp)

Timeline of a tile: LOAD fills one stage per K tile. MMA copies the stage's scales to tensor memory, issues its MMAs and commits
the stage back; after the last K tile it commits the accumulator. EPILOGUE reads the accumulator in slices of 32 columns, ahead
of the slices that it stores (two at a time for 16-bit results), and releases it once the MMA may overwrite it. The three roles
run ahead of each other over the tiles of a persistent CTA or pair.

Multicast: neighbouring MMAs of a cluster along M share the N side. Each loads every n-th K tile of it for all n of them. A
stage is empty when all of them have released it.

Split-K: the CTAs of a cluster share a tile's K tiles and send each other partial sums (``split_k``).

Tensor memory: accumulators, next to each other or sharing columns, then the scales of one K tile (``arch.sm100.limits.TmemMap``).
Shared memory: ``arch.sm100.limits.SmemPlan``. Tensor maps: kernel parameters, encoded by the host code.

Source: PTX ISA 9.1, 9.7.16 (tcgen05), 9.7.13.15 (mbarrier), 5.5.7 and 9.7.9.27 (tensor maps).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.launch_table import INTERLEAVE, NUM_COLUMNS, Header
from nvfp4_cute.planning.arch.sm100.limits import SmemPlan, TmemMap, smem_plan, tmem_map

from ..common.launch_args import read_groups, read_operands, read_outputs
from ..common.operand_maps import Boxes, Descriptors, prefetch_descriptors
from ..common.output_table import OutputTable
from ..common.ring import CONSUMER_PHASE, Ring, init_ring, init_ring_by_lanes
from ..common.variant import GroupedGemmVariant
from ..common.versions import SmemAllocator
from ..common.warp_schedule import WARP_SIZE, WarpSchedule
from .epilogue import TMEM_ALIGN, EpilogueArgs, run_epilogue
from .load import run_load
from .mma import MmaArgs, run_mma
from .operands import make_boxes
from .places import Buffers, LoadArgs
from .split_k import Exchange
from .staging import WARP_BYTES

# Named barrier 0 is __syncthreads.
START_BARRIER_ID = 1
# Named barrier at which LOAD waits for the barriers of its ring.
RING_BARRIER_ID = 2
# Named barrier at which the epilogue waits until LOAD has issued its first loads, so that it does not compete for issue slots.
BEGUN_BARRIER_ID = 3
# The 128-byte swizzle repeats every 1024 bytes.
OPERAND_ALIGN_BYTES = 1024
# Chunks of a warp's partial sums fill whole rows of banks.
EXCHANGE_ALIGN_BYTES = 128


class GroupedGemmSm100(GroupedGemmVariant):
    """One compiled variant, of a config and a pair of formats that ``planning.arch.sm100.limits`` accepts.

    Kernels with other roles override methods (``fp8.grouped_gemm``).
    """

    SCHEDULE = WarpSchedule()
    # Whether MMAs compute all columns of a tile even if the group has fewer.
    ALL_COLUMNS = False

    def __init__(self, **options):
        super().__init__(**options)
        self.schedule = self.SCHEDULE
        self.num_products = 1 if self.activation is None else 2
        self.num_b = 1 if self.weight_layout in INTERLEAVE else self.num_products
        self.smem, self.tmem, self.boxes = self._plans()

    def _plans(self) -> tuple[SmemPlan, TmemMap, Boxes]:
        """Returns the maps of shared and tensor memory and the TMA boxes."""
        return (
            smem_plan(self.config, self.num_b, self.formats),
            tmem_map(self.config, self.num_b, self.formats),
            make_boxes(self.config, self.formats),
        )

    def _scales(self, views_m: list, views_n: list):
        """Returns the scales that are applied outside the tensor cores, or None."""
        return None

    def _staged_scales(self, scales, smem):
        """Returns the scales of ``_scales`` with their shared-memory ring."""
        return None

    def _run_scales(self, scales, groups, m_rank: Int32, first_tile: Int32, stride: Int32):
        """Runs the SCALES role, if the schedule has one."""
        raise NotImplementedError

    def _run_mma(self, args: MmaArgs, first_tile: Int32, stride: Int32):
        """Runs the MMA role."""
        run_mma(args, first_tile, stride)

    def _run_epilogue(self, args: EpilogueArgs, scales, first_tile: Int32, stride: Int32):
        """Runs the EPILOGUE role."""
        run_epilogue(args, first_tile, stride)

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
        views_m, views_n = read_operands(values, rows, self.num_b, self.config.swap_ab)
        cluster_size = self.config.cluster_size
        self.kernel.set_name_prefix(self.name)
        self.kernel(
            Descriptors.encode(views_m, views_n, self.boxes),
            read_groups(values, rows, self.form, self.config.work_tile_mnk[0]),
            read_outputs(
                values,
                rows,
                self.form,
                self.num_products if self.has_alpha else 0,
                isinstance(self.out_dtype, BlockFormat),
                self.has_limit,
                self.bias_dtype,
                self.has_row_scales,
            ),
            None if self.chain is None else self._layers(values),
            self._scales(views_m, views_n),
        ).launch(
            grid=(Int32(values[Header.NUM_CTA, 0]), 1, 1),
            cluster=(cluster_size, 1, 1) if cluster_size > 1 else None,
            block=(self.schedule.threads_per_cta, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            **self._start(),
        )

    def _start(self) -> dict[str, bool]:
        """Returns the launch attributes:

        programmatic dependent launch, or a cooperative launch for chains, whose CTAs wait for each other.

        CuTe DSL 4.3.5 has no cooperative launches; exports for it have no chains.
        """
        return {"use_pdl": True} if self.chain is None else {"cooperative": True}

    def _layers(self, values: cute.Tensor):
        warps = self.config.cluster_size * len(self.schedule.epilogue_warp_ids)
        tiles = Int32(values[Header.NUM_TILES, 0]) // self.num_groups
        return self.chain(values[Header.CHAIN, 0], self.num_groups, tiles * warps)

    @cute.kernel
    def kernel(self, descriptors: Descriptors, groups, outputs: OutputTable, chain, scales):
        """Allocates shared memory, initializes barriers, and dispatches warps to roles."""
        config, schedule, num_cta = self.config, self.schedule, self.config.num_mma_cta
        # Ids
        warp_idx = cute.arch.warp_idx()
        block_idx, _, _ = cute.arch.block_idx()
        num_blocks, _, _ = cute.arch.grid_dim()
        first_tile, stride = block_idx, num_blocks
        # Rank of this CTA along a work tile's M side, its rank within its MMA, and the cluster rank of that MMA's first CTA.
        m_rank, cta_rank, leader_rank = Int32(0), Int32(0), 0
        if cutlass.const_expr(config.cluster_size > 1):
            cluster_bits = config.cluster_size.bit_length() - 1
            first_tile, stride = block_idx >> cluster_bits, num_blocks >> cluster_bits
        if cutlass.const_expr(config.num_m_cta > 1):
            m_rank = block_idx & (config.num_m_cta - 1)
        if cutlass.const_expr(num_cta == 2):
            cta_rank = block_idx & 1
        if cutlass.const_expr(config.multicast_n > 1):
            leader_rank = m_rank - cta_rank

        # Storage
        smem = SmemAllocator()
        plan, num_stage = self.smem, config.num_ab_stage
        buffers = Buffers(
            *(
                [
                    smem.allocate_array(
                        Uint8, num_stage * stage_bytes, byte_alignment=OPERAND_ALIGN_BYTES
                    ).toint()
                    for _ in range(num_operands)
                ]
                for num_operands, stage_bytes in (
                    (plan.num_m, plan.a_stage_bytes),
                    (plan.num_n, plan.b_stage_bytes),
                    (len(descriptors.sf_m), plan.sfa_stage_bytes),
                    (len(descriptors.sf_n), plan.sfb_stage_bytes),
                )
            )
        )

        staging_bytes = len(schedule.epilogue_warp_ids) * WARP_BYTES
        staging = smem.allocate_array(Uint8, staging_bytes, byte_alignment=OPERAND_ALIGN_BYTES).toint()
        exchange = None
        if cutlass.const_expr(config.split_k > 1):
            exchange = Exchange(
                smem.allocate_array(Uint8, plan.exchange_bytes, byte_alignment=EXCHANGE_ALIGN_BYTES).toint(),
                Ring(smem.allocate_array(Int64, 2), 1),
                config.split_k,
                self.num_products,
            )
        scales = self._staged_scales(scales, smem)
        ab = Ring(smem.allocate_array(Int64, 2 * num_stage), num_stage)
        num_epilogue_warps = num_cta * len(schedule.epilogue_warp_ids)
        num_acc_stage = self.tmem.num_acc_barrier_stage
        acc = Ring(smem.allocate_array(Int64, 2 * num_acc_stage), num_acc_stage)
        # Completes when the epilogues of both CTAs of a pair have read their last accumulator. Tensor memory may then be freed,
        # and no arrival is in flight.
        tmem_unused = smem.allocate(Int64, byte_alignment=8)
        tmem_address = smem.allocate(Int32, byte_alignment=8)

        # Other warps initialize LOAD's barriers and prefetch its tensor maps, while LOAD finds its first tile.
        ring_warp_id, maps_warp_id = schedule.epilogue_warp_ids[2:4]
        if warp_idx == maps_warp_id:
            prefetch_descriptors(descriptors)
        if warp_idx == ring_warp_id:
            init_ring_by_lanes(ab, 1, config.multicast_n)
            if cutlass.const_expr(config.num_mma_cta == 1):
                cute.arch.barrier_arrive(barrier_id=RING_BARRIER_ID, number_of_threads=2 * WARP_SIZE)
        if warp_idx == schedule.mma_warp_id:
            init_ring_by_lanes(acc, 1, num_epilogue_warps)
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(tmem_unused, num_epilogue_warps)
                cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(schedule.scale_warp_id is not None):
            if warp_idx == schedule.scale_warp_id:
                init_ring_by_lanes(scales.ring, WARP_SIZE, len(schedule.epilogue_warp_ids))
        if cutlass.const_expr(config.split_k > 1):
            if warp_idx == 0:
                with cute.arch.elect_one():
                    init_ring(exchange.ring, 1, config.split_k * len(schedule.epilogue_warp_ids))
                    cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(config.cluster_size > 1):
            cute.arch.cluster_arrive_relaxed()
        if cutlass.const_expr(self.form != "list" and not self.early_weights):
            # Wait for the previous kernel, which may have written the groups' sizes.
            cute.arch.griddepcontrol_wait()

        # A dual GEMM's epilogue does not wait: with the wait, its own start costs 2 to 3 % of the whole (modelled).
        begun_barrier_id = BEGUN_BARRIER_ID if self.activation is None else None
        begun_threads = WARP_SIZE * (1 + len(schedule.epilogue_warp_ids))

        # ---- LOAD --------------------------------------------------------------------------------------
        if warp_idx == schedule.load_warp_id:
            if cutlass.const_expr(config.num_m_cta == 1):
                cute.arch.barrier_arrive(
                    barrier_id=START_BARRIER_ID, number_of_threads=schedule.threads_per_cta
                )
            run_load(
                LoadArgs(
                    descriptors=descriptors,
                    boxes=self.boxes,
                    buffers=buffers,
                    smem=plan,
                    config=config,
                    groups=groups,
                    m_rank=m_rank,
                    cta_rank=cta_rank,
                    ab=ab,
                    chain=chain,
                    all_columns=self.ALL_COLUMNS,
                    early_weights=self.early_weights,
                    ring_barrier_id=RING_BARRIER_ID,
                    begun_barrier_id=begun_barrier_id,
                    begun_threads=begun_threads,
                ),
                first_tile,
                stride,
            )

        # ---- SCALES ------------------------------------------------------------------------------------
        if cutlass.const_expr(schedule.scale_warp_id is not None):
            if warp_idx == schedule.scale_warp_id:
                if cutlass.const_expr(config.num_m_cta == 1):
                    self._wait_for_tensor_memory()
                if cutlass.const_expr(config.cluster_size > 1):
                    cute.arch.cluster_wait()
                cute.arch.griddepcontrol_wait()
                self._run_scales(scales, groups, m_rank, first_tile, stride)

        # ---- MMA ---------------------------------------------------------------------------------------
        if warp_idx == schedule.mma_warp_id:
            if cutlass.const_expr(config.cluster_size > 1):
                # In a pair both CTAs allocate, so the other CTA must be running (PTX ISA 9.7.16.7).
                cute.arch.cluster_wait()
            cute.arch.alloc_tmem(self.tmem.alloc_cols, tmem_address, is_two_cta=config.use_2cta_instrs)
            self._wait_for_tensor_memory()
            tmem_ptr = cute.arch.retrieve_tmem_ptr(Float32, TMEM_ALIGN, tmem_address)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=config.use_2cta_instrs)
            if cta_rank == 0:
                self._run_mma(
                    MmaArgs(
                        tmem_base=tmem_ptr.toint(),
                        tmem=self.tmem,
                        buffers=buffers,
                        smem=plan,
                        config=config,
                        groups=groups,
                        leader_rank=leader_rank,
                        ab=ab,
                        acc=acc,
                        formats=self.formats,
                    ),
                    first_tile,
                    stride,
                )
            cute.arch.mbarrier_wait(tmem_unused, CONSUMER_PHASE)
            cute.arch.dealloc_tmem(tmem_ptr, self.tmem.alloc_cols, is_two_cta=config.use_2cta_instrs)

        # ---- EPILOGUE ----------------------------------------------------------------------------------
        if warp_idx < schedule.mma_warp_id:
            if cutlass.const_expr(config.num_m_cta > 1):
                cute.arch.cluster_wait()
            self._wait_for_tensor_memory()
            cute.arch.griddepcontrol_wait()
            self._run_epilogue(
                EpilogueArgs(
                    tmem_address=tmem_address,
                    tmem=self.tmem,
                    outputs=outputs,
                    out_dtype=self.out_dtype,
                    out_m_major=self.out_m_major,
                    config=config,
                    groups=groups,
                    m_rank=m_rank,
                    leader_rank=leader_rank,
                    acc=acc,
                    tmem_unused=tmem_unused,
                    staging=staging,
                    exchange=exchange,
                    activation=self.activation,
                    weight_layout=self.weight_layout,
                    chain=chain,
                    begun_barrier_id=begun_barrier_id,
                    begun_threads=begun_threads,
                ),
                scales,
                first_tile,
                stride,
            )

    @cute.jit
    def _wait_for_tensor_memory(self):
        """Waits until tensor memory is allocated and, in CTAs that load for themselves, until all barriers are initialized."""
        schedule = self.schedule
        num_threads = schedule.threads_per_cta if self.config.num_m_cta == 1 else schedule.num_tmem_threads
        cute.arch.barrier(barrier_id=START_BARRIER_ID, number_of_threads=num_threads)
