"""MMA role: one warp owns tensor memory and issues every tcgen05 copy and MMA.

Consumes ``ab``, produces ``acc``. In a pair only the leader's warp issues MMAs; both warps allocate and free tensor memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.planning.arch.sm100.limits import (
    MMA,
    SF_ATOM_COLS,
    SF_ATOM_ROWS,
    SmemPlan,
    TmemMap,
    formats_on_sides,
    mma_types,
)
from nvfp4_cute.planning.config import KernelConfig

from ..common.operand_maps import SF_BLOCK_BYTES
from ..common.ptx import keep_before
from ..common.ring import CONSUMER_PHASE, PRODUCER_PHASE, Ring, next_stage
from ..common.sides import mma_sides
from ..common.split_k import k_share
from .columns import mma_columns
from .instructions import (
    DESCRIPTOR_UNIT_BYTES,
    OPERAND_DESCRIPTOR,
    PAIR_MASK,
    SCALE_DESCRIPTOR,
    at_scale,
    block_scaled_mma,
    commit_mma,
    copy_scale_block,
    mma_descriptor,
    order_after_wait,
    smem_descriptor,
)
from .places import Buffers

# Rows that one column of scales in tensor memory covers.
SF_COLUMN_ROWS = 32


@dataclass(frozen=True)
class MmaArgs:
    """Inputs of the MMA role.

    Attributes:
        tmem_base: tensor-memory address of the allocation.
        groups: ``GroupTable`` or ``DeviceGroups``.
        leader_rank: rank, in the cluster, of the CTA that issues this MMA.
        formats: formats of ``a`` and of ``b``.
    """

    tmem_base: Int32
    tmem: TmemMap
    buffers: Buffers
    smem: SmemPlan
    config: KernelConfig
    groups: object
    leader_rank: Int32 | int
    ab: Ring
    acc: Ring
    formats: tuple[BlockFormat, BlockFormat]


@cute.jit
def run_mma(args: MmaArgs, first_tile: Int32, stride: Int32):
    """Acquires an accumulator per tile, copies the scales and issues the MMAs of each K tile, and commits.

    A scale atom holds four scales of a row, which 1, 2 or 4 MMAs read, depending on their kind and the formats' block length.
    In a dual GEMM one operand is multiplied by two of the other side, into two neighbouring accumulators. Scales have a single
    buffer in tensor memory: tcgen05.cp and tcgen05.mma of one thread execute in order (PTX ISA 9.7.16.6.2), so a copy
    of the next K tile, or of the next scale atom in the same columns, cannot overtake the MMAs that still read the previous
    scales.
    """
    ab, acc, config, groups = args.ab, args.acc, args.config, args.groups
    tmem, smem, num_cta = args.tmem, args.smem, config.num_mma_cta
    (m_format, _), mma = formats_on_sides(config, args.formats), MMA[args.formats]
    mma_bytes, types = mma.row_bytes(mma.k), mma_types(config, args.formats)
    num_atom, mmas_per_atom = config.cta_tile_shape_mnk[2] // m_format.atom_k, mma.per_atom(m_format)
    blocks_n = smem.sfb_stage_bytes // (SF_BLOCK_BYTES * num_atom)
    desc_m = [smem_descriptor(OPERAND_DESCRIPTOR, address) for address in args.buffers.m]
    desc_n = [smem_descriptor(OPERAND_DESCRIPTOR, address) for address in args.buffers.n]
    desc_sf_m = [smem_descriptor(SCALE_DESCRIPTOR, address) for address in args.buffers.sf_m]
    desc_sf_n = [smem_descriptor(SCALE_DESCRIPTOR, address) for address in args.buffers.sf_n]
    # First columns of every operand's scales.
    sfa_cols, sfb_cols = SF_ATOM_COLS * tmem.sf_atoms, SF_ATOM_COLS * tmem.sf_atoms * blocks_n
    sfa = [args.tmem_base + tmem.sfa_col + i * sfa_cols for i in range(smem.num_m)]
    sfb = [args.tmem_base + tmem.sfb_col + i * sfb_cols for i in range(smem.num_n)]
    shared, own = sharing_mask(config), accumulator_mask(config, args.leader_rank)
    stage, phase = Int32(0), Int32(CONSUMER_PHASE)
    acc_stage, acc_phase, acc_idx = Int32(0), Int32(PRODUCER_PHASE), Int32(0)
    cursor = groups.first_cursor(first_tile, config.work_tile_mnk)
    while groups.has_tile(cursor):
        tile = groups.tile(cursor, config.work_tile_mnk)
        _, n_side = mma_sides(config, tile)
        instruction = mma_descriptor(mma_columns(config, n_side), types, num_cta)
        # A tile that starts within a scale block finds its scales this many columns further.
        sfb_tile_offset = n_side.first_row % SF_ATOM_ROWS // SF_COLUMN_ROWS
        accumulator = args.tmem_base + acc_idx * tmem.acc_stride
        cute.arch.mbarrier_wait(acc.empty(acc_stage), acc_phase)
        _, k_tile_cnt = k_share(tile.k_tile_cnt, config.split_k)
        for k_tile_idx in cutlass.range(k_tile_cnt, unroll=1):
            at_m = _at_stage(desc_m, stage, smem.a_stage_bytes)
            at_n = _at_stage(desc_n, stage, smem.b_stage_bytes)
            at_sf_m = _at_stage(desc_sf_m, stage, smem.sfa_stage_bytes)
            at_sf_n = _at_stage(desc_sf_n, stage, smem.sfb_stage_bytes)
            cute.arch.mbarrier_wait(ab.full(stage), phase)
            order_after_wait()
            following = next_stage(ab, stage, phase)
            # Compute the next tile here: after the MMAs, the next wait would wait for it as well.
            keep_before(following)
            with cute.arch.elect_one():
                for atom in cutlass.range_constexpr(num_atom):
                    sfa_atom = atom % tmem.sf_atoms * SF_ATOM_COLS
                    sfb_atom = sfa_atom * blocks_n
                    for i in cutlass.range_constexpr(smem.num_m):
                        source = atom * SF_BLOCK_BYTES // DESCRIPTOR_UNIT_BYTES
                        copy_scale_block(sfa[i] + sfa_atom, at_sf_m[i] + source, num_cta)
                    for i in cutlass.range_constexpr(smem.num_n):
                        for row_block in cutlass.range_constexpr(blocks_n):
                            block = row_block * num_atom + atom
                            source = block * SF_BLOCK_BYTES // DESCRIPTOR_UNIT_BYTES
                            column = sfb_atom + row_block * SF_ATOM_COLS
                            copy_scale_block(sfb[i] + column, at_sf_n[i] + source, num_cta)
                    for part in cutlass.range_constexpr(mmas_per_atom):
                        step = atom * mmas_per_atom + part
                        accumulate = k_tile_idx
                        if cutlass.const_expr(step > 0):
                            accumulate = Int32(1)
                        for product in cutlass.range_constexpr(smem.num_m * smem.num_n):
                            m_idx, n_idx = product % smem.num_m, product % smem.num_n
                            block_scaled_mma(
                                accumulator + product * config.cta_tile_shape_mnk[1],
                                at_m[m_idx] + step * mma_bytes // DESCRIPTOR_UNIT_BYTES,
                                at_n[n_idx] + step * mma_bytes // DESCRIPTOR_UNIT_BYTES,
                                at_scale(instruction, part * SF_ATOM_COLS // mmas_per_atom),
                                sfa[m_idx] + sfa_atom,
                                sfb[n_idx] + sfb_tile_offset + sfb_atom,
                                accumulate,
                                mma.kind,
                                m_format.block_k,
                                num_cta,
                            )
                commit_mma(ab.empty(stage), num_cta, shared)
            stage, phase = following
        with cute.arch.elect_one():
            commit_mma(acc.full(acc_stage), num_cta, own)
        acc_stage, acc_phase = next_stage(acc, acc_stage, acc_phase)
        acc_idx = acc_idx + 1 if acc_idx + 1 < tmem.num_acc_stage else Int32(0)
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)


def sharing_mask(config: KernelConfig) -> int | None:
    """Returns the CTAs in which a stage must be empty before it is loaded: those that share loads; None for this CTA only."""
    return (1 << config.num_m_cta) - 1 if config.num_m_cta > 1 else None


def accumulator_mask(config: KernelConfig, leader_rank: Int32 | int) -> Int32 | int | None:
    """Returns the CTAs that hold parts of an MMA's accumulator; None for this CTA only."""
    return PAIR_MASK << leader_rank if config.num_mma_cta == 2 else None


def _at_stage(descriptors: list, stage: Int32, stage_bytes: int) -> list:
    """Returns the shared-memory descriptors of every operand in a stage."""
    offset = stage * (stage_bytes // DESCRIPTOR_UNIT_BYTES)
    return [descriptor + offset for descriptor in descriptors]
