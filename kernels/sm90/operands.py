"""Shared-memory layout of packed operands and scales, and the offsets with which roles access it."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.formats.block_format import NVFP4, BlockFormat, Formats
from nvfp4_cute.planning.arch.sm90 import LEAST_TOKENS, TILE_K, TOKEN_STEP, sf_blocks
from nvfp4_cute.planning.config import KernelConfig

from ..common.group_table import WorkTile
from ..common.operand_maps import Boxes, MapElement
from .token_tiles import tokens_of_tile

# TMA swizzles the 16-byte units of a row of a K tile (64 or 128 bytes) by address bits 7 and up, that is by the row's number in
# a span of 512 or 1024 bytes.
UNIT_BYTES = 16
SWIZZLE_SPAN = 128
# Scales of a K tile and a block of 128 rows: atoms of 32 x 4 words. A word holds four scales of a row. NVFP4 has two atoms per
# K tile.
SF_ATOM_BYTES = 512
SF_ATOMS = TILE_K // NVFP4.atom_k


def sf_atoms(format: BlockFormat) -> int:
    """Returns the scale atoms along a K tile; 1 where a K tile uses part of an atom (:func:`tiles_of_sf_atom`)."""
    return format.scale_atoms(1, TILE_K)[1]


def tiles_of_sf_atom(format: BlockFormat) -> int:
    """Returns the number of K tiles whose scales share an atom."""
    return max(format.atom_k // TILE_K, 1)


def tile_row_bytes(format: BlockFormat) -> int:
    """Returns the bytes of a row of a K tile: 64 or 128."""
    return format.row_bytes(TILE_K)


def make_boxes(config: KernelConfig, sides: Formats) -> Boxes:
    """Returns the TMA boxes of one stage: weights on the M side, tokens on the N side. sides: formats with scales of one kind."""
    weights, tokens, k = config.cta_tile_shape_mnk
    atoms = sf_atoms(sides[0])
    has_atoms = sides[0].scale_layout == "blocked"
    return Boxes(
        k,
        weights,
        tokens,
        (atoms, sf_blocks(weights)) if has_atoms else None,
        (atoms, sf_blocks(tokens)) if has_atoms else None,
        values_per_element=2,
        sf_block_k=sides[0].atom_k,
        elements=tuple(MapElement.of(format, format.element.bits) for format in sides),
    )


def unit_offset(row: Int32, unit: Int32, row_bytes: int) -> Int32:
    """Returns the swizzled offset of a row's 16-byte unit in a packed stage.

    Args:
        row: row of the stage.
        unit: 32 values of K in 4 bits, or 16 values in 8 bits.
        row_bytes: bytes per row of a K tile.
    """
    rows_of_span, units = SWIZZLE_SPAN // row_bytes, row_bytes // UNIT_BYTES
    place = row >> 1 if rows_of_span == 2 else row
    return row * row_bytes + (unit ^ (place & units - 1)) * UNIT_BYTES


def scale_offset(row: Int32, atoms: int = SF_ATOMS) -> Int32:
    """Returns the offset of a row's first four scales in a stage of scales. atoms: scale atoms per K tile."""
    return (row >> 7) * (atoms * SF_ATOM_BYTES) + (row & 31) * 16 + (row >> 5 & 3) * 4


@cute.jit
def tokens_multiplied(tile: WorkTile, config: cutlass.Constexpr[KernelConfig]) -> Int32:
    """Returns the smallest of ``token_counts`` that holds the tile's tokens."""
    tile_m = config.work_tile_mnk[0]
    rounded = cute.ceil_div(tokens_of_tile(tile, config), TOKEN_STEP) * TOKEN_STEP
    return cutlass.min(cutlass.max(rounded, LEAST_TOKENS), tile_m)
