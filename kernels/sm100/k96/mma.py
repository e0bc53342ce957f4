"""MMA role with MMAs of 96 elements of K. Consumes ``ab``, produces ``acc``.

Three K tiles are eight MMAs of 48 bytes per row. An MMA that starts in the last 32 bytes of a stage's rows continues at the
start of the next stage's rows, whose address its descriptors hold (PTX ISA 9.7.16.4.1, absolute leading dimension). A stage is
released after the last MMA that reads it:

  stage     0                 1                     2
  MMAs      0  1  2 (two thirds)  2  3  4  5 (one third)  5  6  7

If the number of K tiles is not a multiple of three, one K tile remains, for which three MMAs are issued, or two, with six MMAs.
The last MMA then continues in a K tile beyond the end of K, which TMA has filled with zeros (``limits.loaded_k_tiles``).

Scales: three atoms of four scales per row belong to two MMAs, or to four with blocks of 32. They have a single buffer in tensor
memory, because tcgen05.cp and tcgen05.mma of one thread execute in order (PTX ISA 9.7.16.6.2). An MMA's scales start at any
byte of a word that its format allows and continue in the word of the next atom.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.planning.arch.sm100.limits import (
    K96_ATOMS,
    K96_K_TILES,
    K_TILE_BYTES,
    SF_ATOM_COLS,
    SF_ATOM_ROWS,
    formats_on_sides,
    mma_of,
    mma_types,
)

from ...common.group_table import ceil_div
from ...common.operand_maps import SF_BLOCK_BYTES
from ...common.ring import CONSUMER_PHASE, PRODUCER_PHASE, next_stage
from ...common.sides import mma_sides
from ..columns import mma_columns
from ..instructions import (
    DESCRIPTOR_LEADING_SHIFT,
    DESCRIPTOR_UNIT_BYTES,
    K96_DESCRIPTOR,
    SCALE_DESCRIPTOR,
    at_scale,
    block_scaled_mma,
    commit_mma,
    copy_scale_block,
    mma_descriptor,
    order_after_wait,
    smem_descriptor,
)
from ..mma import SF_COLUMN_ROWS, MmaArgs, accumulator_mask, sharing_mask


@dataclass(frozen=True)
class ScaleAtoms:
    """Scale atoms, counted over three K tiles, that each MMA reads. All values are compile-time.

    Attributes:
        per_k_tile: atoms per K tile.
        per_mma: scales per row that an MMA reads.
    """

    per_k_tile: int
    per_mma: int

    def first(self, step: int) -> int:
        """Returns the atom in which the scales of MMA ``step`` start."""
        return step * self.per_mma // SF_ATOM_COLS

    def place(self, step: int) -> int:
        """Returns the index of the first scale within that atom."""
        return step * self.per_mma % SF_ATOM_COLS

    def copied(self, step: int, row_bytes: int) -> int:
        """Returns the number of atoms that have been copied when MMA ``step`` is issued."""
        of_group = K96_ATOMS * (self.first(step) // K96_ATOMS + 1)
        k_tiles = ((step + 1) * row_bytes - 1) // K_TILE_BYTES + 1
        return min(of_group, k_tiles * self.per_k_tile)


@dataclass(frozen=True)
class Operands:
    """Low descriptor words of the first stage, one per operand, and first columns of their scales.

    Attributes:
        atoms: scale atoms of the MMAs.
        blocks_n: row blocks of the N side's scales.
        row_bytes: bytes per row that an MMA reads.
    """

    m: list
    n: list
    sf_m: list
    sf_n: list
    sfa: list
    sfb: list
    atoms: ScaleAtoms
    blocks_n: int
    row_bytes: int


@dataclass(frozen=True)
class Tile:
    """Values shared by the MMAs of a tile: tensor-memory address, instruction descriptor, column offset within a scale block."""

    accumulator: Int32
    instruction: Int32
    sfb_offset: Int32


@cute.jit
def run_k96_mma(args: MmaArgs, first_tile: Int32, stride: Int32):
    """Acquires an accumulator per tile, copies scales and issues MMAs three K tiles at a time, and commits."""
    ab, acc, config, groups = args.ab, args.acc, args.config, args.groups
    tmem, num_cta = args.tmem, config.num_mma_cta
    operands, types = _operands(args), mma_types(config, args.formats)
    shared, own = sharing_mask(config), accumulator_mask(config, args.leader_rank)
    stage, phase = Int32(0), Int32(CONSUMER_PHASE)
    acc_stage, acc_phase, acc_idx = Int32(0), Int32(PRODUCER_PHASE), Int32(0)
    cursor = groups.first_cursor(first_tile, config.work_tile_mnk)
    while groups.has_tile(cursor):
        tile = groups.tile(cursor, config.work_tile_mnk)
        _, n_side = mma_sides(config, tile)
        multiplied = Tile(
            args.tmem_base + acc_idx * tmem.acc_stride,
            mma_descriptor(mma_columns(config, n_side), types, num_cta),
            n_side.first_row % SF_ATOM_ROWS // SF_COLUMN_ROWS,
        )
        cute.arch.mbarrier_wait(acc.empty(acc_stage), acc_phase)
        for i in cutlass.range(ceil_div(tile.k_tile_cnt, K96_K_TILES), unroll=1):
            left = tile.k_tile_cnt - i * K96_K_TILES
            second, second_phase = next_stage(ab, stage, phase)
            third, third_phase = next_stage(ab, second, second_phase)
            following, following_phase = next_stage(ab, third, third_phase)
            stages = stage, second, third
            cute.arch.mbarrier_wait(ab.full(stage), phase)
            order_after_wait()
            with cute.arch.elect_one():
                _multiply(args, operands, multiplied, stages, 0, i)
                _multiply(args, operands, multiplied, stages, 1)
            cute.arch.mbarrier_wait(ab.full(second), second_phase)
            order_after_wait()
            with cute.arch.elect_one():
                _multiply(args, operands, multiplied, stages, 2)
                commit_mma(ab.empty(stage), num_cta, shared)
            if left == 1:
                with cute.arch.elect_one():
                    commit_mma(ab.empty(second), num_cta, shared)
                following, following_phase = third, third_phase
            else:
                with cute.arch.elect_one():
                    _multiply(args, operands, multiplied, stages, 3)
                    _multiply(args, operands, multiplied, stages, 4)
                cute.arch.mbarrier_wait(ab.full(third), third_phase)
                order_after_wait()
                with cute.arch.elect_one():
                    _multiply(args, operands, multiplied, stages, 5)
                    commit_mma(ab.empty(second), num_cta, shared)
                    if left > 2:
                        _multiply(args, operands, multiplied, stages, 6)
                        _multiply(args, operands, multiplied, stages, 7)
                    commit_mma(ab.empty(third), num_cta, shared)
            stage, phase = following, following_phase
        with cute.arch.elect_one():
            commit_mma(acc.full(acc_stage), num_cta, own)
        acc_stage, acc_phase = next_stage(acc, acc_stage, acc_phase)
        acc_idx = acc_idx + 1 if acc_idx + 1 < tmem.num_acc_stage else Int32(0)
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)


def _operands(args: MmaArgs) -> Operands:
    config, smem, tmem, buffers = args.config, args.smem, args.tmem, args.buffers
    (m_format, _), mma = formats_on_sides(config, args.formats), mma_of(config, args.formats)
    per_k_tile = config.cta_tile_shape_mnk[2] // m_format.atom_k
    blocks_n = smem.sfb_stage_bytes // (SF_BLOCK_BYTES * per_k_tile)
    cols = SF_ATOM_COLS * K96_ATOMS
    return Operands(
        *([smem_descriptor(K96_DESCRIPTOR, address) for address in side] for side in (buffers.m, buffers.n)),
        *([smem_descriptor(SCALE_DESCRIPTOR, at) for at in side] for side in (buffers.sf_m, buffers.sf_n)),
        sfa=[args.tmem_base + tmem.sfa_col + i * cols for i in range(smem.num_m)],
        sfb=[args.tmem_base + tmem.sfb_col + i * cols * blocks_n for i in range(smem.num_n)],
        atoms=ScaleAtoms(per_k_tile, mma.k // m_format.block_k),
        blocks_n=blocks_n,
        row_bytes=mma.row_bytes(mma.k),
    )


@cute.jit
def _multiply(
    args: MmaArgs,
    operands: Operands,
    tile: Tile,
    stages: tuple,
    step: cutlass.Constexpr[int],
    accumulate: Int32 | int = 1,
):
    """Copies the missing scales and issues MMA ``step`` of the eight of three K tiles. Exactly one thread calls it.

    Args:
        stages: stages of the three K tiles.
    """
    config, smem, mma = args.config, args.smem, mma_of(args.config, args.formats)
    (m_format, _), atoms = formats_on_sides(config, args.formats), operands.atoms
    _copy_scales(args, operands, stages, step)
    k_tile, first_byte = divmod(step * operands.row_bytes, K_TILE_BYTES)
    goes_on = k_tile + (first_byte + operands.row_bytes > K_TILE_BYTES)
    of_m, of_n = (
        [_rows(base, stages[k_tile], stages[goes_on], nbytes, first_byte) for base in side]
        for side, nbytes in ((operands.m, smem.a_stage_bytes), (operands.n, smem.b_stage_bytes))
    )
    atom = atoms.first(step) % K96_ATOMS * SF_ATOM_COLS
    for product in cutlass.range_constexpr(smem.num_m * smem.num_n):
        m_idx, n_idx = product % smem.num_m, product % smem.num_n
        block_scaled_mma(
            tile.accumulator + product * config.cta_tile_shape_mnk[1],
            of_m[m_idx],
            of_n[n_idx],
            at_scale(tile.instruction, atoms.place(step)),
            operands.sfa[m_idx] + atom,
            operands.sfb[n_idx] + tile.sfb_offset + atom * operands.blocks_n,
            Int32(accumulate),
            mma.kind,
            m_format.block_k,
            config.num_mma_cta,
            K96_DESCRIPTOR[1],
        )


@cute.jit
def _copy_scales(args: MmaArgs, operands: Operands, stages: tuple, step: cutlass.Constexpr[int]):
    """Copies the scale atoms that MMA ``step`` is the first to read."""
    smem, atoms, num_cta = args.smem, operands.atoms, args.config.num_mma_cta
    begin = atoms.copied(step - 1, operands.row_bytes) if step > 0 else 0
    for atom in cutlass.range_constexpr(begin, atoms.copied(step, operands.row_bytes)):
        k_tile, within = divmod(atom, atoms.per_k_tile)
        column = atom % K96_ATOMS * SF_ATOM_COLS
        for i in cutlass.range_constexpr(smem.num_m):
            source = operands.sf_m[i] + stages[k_tile] * (smem.sfa_stage_bytes // DESCRIPTOR_UNIT_BYTES)
            copy_scale_block(
                operands.sfa[i] + column, source + within * SF_BLOCK_BYTES // DESCRIPTOR_UNIT_BYTES, num_cta
            )
        for i in cutlass.range_constexpr(smem.num_n):
            source = operands.sf_n[i] + stages[k_tile] * (smem.sfb_stage_bytes // DESCRIPTOR_UNIT_BYTES)
            for row_block in cutlass.range_constexpr(operands.blocks_n):
                block = row_block * atoms.per_k_tile + within
                copy_scale_block(
                    operands.sfb[i] + column * operands.blocks_n + row_block * SF_ATOM_COLS,
                    source + block * SF_BLOCK_BYTES // DESCRIPTOR_UNIT_BYTES,
                    num_cta,
                )


def _rows(base: Int32, stage: Int32, goes_on: Int32, stage_bytes: int, first_byte: int) -> Int32:
    """Returns the low descriptor word of 48 bytes per row from ``first_byte`` on, which continue in stage ``goes_on``."""
    units = stage_bytes // DESCRIPTOR_UNIT_BYTES
    start = base + stage * units + first_byte // DESCRIPTOR_UNIT_BYTES
    return start | (base + goes_on * units) << DESCRIPTOR_LEADING_SHIFT
