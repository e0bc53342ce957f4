"""Where the bytes of packed operands and scales lie in shared memory, and how the roles reach them."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.formats.block_format import NVFP4, BlockFormat
from nvfp4_cute.planning.arch.sm90 import LEAST_TOKENS, TILE_K, TOKEN_STEP, sf_blocks
from nvfp4_cute.planning.config import KernelConfig

from ..common.group_table import WorkTile
from ..common.operand_maps import Boxes
from .token_tiles import tokens_of_tile

# One K tile of 128 values: 64 bytes a row, swizzled by TMA in 16-byte units within 64 bytes: unit ^= row / 2 % 4.
ROW_BYTES = TILE_K // 2
UNIT_BYTES = 16
# Scales of one K tile and a block of 128 rows: atoms of 32 x 4 words, a word the four scales of a row; two of NVFP4.
SF_ATOM_BYTES = 512
SF_ATOMS = TILE_K // NVFP4.atom_k


def sf_atoms(format: BlockFormat) -> int:
    """Atoms of scales along a K tile."""
    return TILE_K // format.atom_k


def make_boxes(config: KernelConfig, format: BlockFormat = NVFP4) -> Boxes:
    """What TMA brings in for one stage, of both sides in a format: weights on the M side, tokens on the N side."""
    weights, tokens, k = config.cta_tile_shape_mnk
    return Boxes(
        k,
        weights,
        tokens,
        (sf_atoms(format), sf_blocks(weights)),
        (sf_atoms(format), sf_blocks(tokens)),
        values_per_element=2,
        sf_block_k=format.atom_k,
    )


def scale_coordinates(box: tuple[int, int], k_block: Int32, row_block: Int32, batch: Int32) -> tuple:
    """Of a copy of scales, whose box has so many blocks along K and along rows: CuTe moves extents of 1 behind others."""
    blocks = (row_block, k_block) if box[0] == 1 < box[1] else (k_block, row_block)
    return 0, *blocks, batch


def unit_offset(row: Int32, unit: Int32) -> Int32:
    """Offset in a packed stage of a row's 16-byte unit: 32 values of K."""
    return row * ROW_BYTES + (unit ^ (row >> 1 & 3)) * UNIT_BYTES


def scale_offset(row: Int32, atoms: int = SF_ATOMS) -> Int32:
    """Offset in a stage of scales of the first four of a row, counted from the first row of the stage's first block.

    atoms: of a K tile.
    """
    return (row >> 7) * (atoms * SF_ATOM_BYTES) + (row & 31) * 16 + (row >> 5 & 3) * 4


@cute.jit
def tokens_multiplied(tile: WorkTile, config: cutlass.Constexpr[KernelConfig]) -> Int32:
    """The least of ``token_counts`` that holds the tile's tokens."""
    tile_m = config.work_tile_mnk[0]
    rounded = cute.ceil_div(tokens_of_tile(tile, config), TOKEN_STEP) * TOKEN_STEP
    return cutlass.min(cutlass.max(rounded, LEAST_TOKENS), tile_m)
