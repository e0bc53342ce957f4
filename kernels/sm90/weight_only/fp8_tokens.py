"""Converts MXFP4 weights to e4m3 for FP8 tokens, by tables, and scales the sums by row and by token.

Weights are in the order of ``formats.fp8_order``. A word holds eight e2m1 codes of a block of 32: values 4t to 4t+3 and 16+4t to
16+4t+3, which lane t of a quad multiplies in one MMA. ldmatrix distributes the words of rows. Three bits of a code select a byte
of a table by prmt. A table has the e4m3 codes of all magnitudes times one power of two, from 2^-8 to 2^6, so every weight is
exact relative to its row's largest scale. Signs of the lower four codes are in place; those of the upper four are four bits
lower.

A word of scales covers four blocks. Bits 3 to 6 of each byte select the table of its block, and the low two bits of the four
bytes together are the exponent of the row's largest scale. The epilogue multiplies sums by that power of two, exactly, and by the
scale of the token.
"""

import math
from dataclasses import replace

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from nvfp4_cute.formats.block_format import E4M3_POWERS, ROW_EXPONENT
from nvfp4_cute.planning.config import KernelConfig

from ...common import ptx
from ...common.fp32_scales import Scales
from ...common.group_table import WorkTile
from ...common.row_scales import load_row_scales
from ...common.shared_access import load_shared, store_shared
from ...common.versions import inline_ptx
from ..operands import UNIT_BYTES
from ..tile_walk import sides_of_cta
from ..token_tiles import first_token

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TABLE_WORDS = 2
# A table's address differs from that of the first table in the lowest byte alone.
TABLES_BYTES, TABLES_ALIGN_BYTES = 16 * 4 * TABLE_WORDS, 256
# Bits of a word of scales that select tables; and the prmt selector that replaces the low byte of an address by a byte of a word.
TABLE_BITS, ADDRESS_BYTES = Uint32(0x78787878), 0x7650
# Distance of units of the second ldmatrix of a K tile.
SECOND_UNITS = 2 * UNIT_BYTES


def _e4m3(value: float) -> int:
    """Returns the code of a magnitude that e4m3 holds exactly."""
    fraction, exponent = math.frexp(value)
    if exponent <= -6 or not value:
        return int(value * 2**9)
    return (exponent + 6) << 3 | int((2 * fraction - 1) * 8)


def _table(index: int) -> list:
    """Returns the two words of a table: e4m3 of all magnitudes times ``2 ** (index - 8)``."""
    codes = [_e4m3(value * 2.0 ** (index - 8)) for value in E2M1_MAGNITUDES]
    return [Uint32(int.from_bytes(codes[first : first + 4], "little")) for first in (0, 4)]


def store_tables(address: Int32) -> None:
    """Stores all tables; called by one thread."""
    for index in range(E4M3_POWERS):
        store_shared(address + index * 4 * TABLE_WORDS, _table(index))


def load_tile_words(address: Int32) -> list:
    """Loads a lane's words of a K tile: per block of 32 values, those of both rows. All lanes must call it.

    address: shared address of the 16 bytes that this lane addresses (``weight_rows.matrix_rows``).
    """
    words = _load_matrices(address) + _load_matrices(address ^ SECOND_UNITS)
    return [words[2 * block : 2 * block + 2] for block in range(4)]


def _load_matrices(address: Int32) -> list:
    """Loads four 8 x 8 matrices of 16-bit values; lane 4g + t gets word t of row g of each (PTX ISA 9.7.14.5.15)."""
    return list(
        inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address],
        )
    )


def row_steps(words: list, codes: Uint32, first_block: int, tables: Int32) -> list:
    """Converts one row: per word, the e4m3 of both halves of an MMA's K.

    Args:
        words: words of consecutive blocks.
        codes: the row's scales of the K tile.
        first_block: block of the first word.
        tables: shared address of the tables.
    """
    places = codes & TABLE_BITS
    return [
        _halves(word, *load_shared(_table_address(places, first_block + i, tables), TABLE_WORDS))
        for i, word in enumerate(words)
    ]


def _table_address(places: Uint32, block: int, tables: Int32) -> Int32:
    """Returns the shared address of a block's table."""
    return Int32(ptx.prmt(places, tables.to(Uint32), Uint32(ADDRESS_BYTES + block)))


def _halves(word: Uint32, low: Uint32, high: Uint32) -> list:
    """Converts the lower four codes of a word, and the upper four. low, high: both words of the block's table."""
    return list(
        inline_ptx(
            "{ .reg .b32 codes, upper, first, second, signs; and.b32 codes, {$r0}, 0x77777777; shr.u32 upper, codes, 16; "
            "shl.b32 signs, {$r0}, 4; prmt.b32 first, {$r1}, {$r2}, codes; prmt.b32 second, {$r1}, {$r2}, upper; "
            "lop3.b32 {$w0}, {$r0}, 0x80808080, first, 0xEA; lop3.b32 {$w1}, signs, 0x80808080, second, 0xEA; }",
            write_only_types=[Uint32] * 2,
            read_only_args=[word, low, high],
        )
    )


def row_factor(codes: Uint32) -> Uint32:
    """Returns the power of two of a row as the word of a float32, from its scales of the first K tile."""
    exponent = codes & 0x03 | codes >> 6 & 0x0C | codes >> 12 & 0x30 | codes >> 18 & 0xC0
    return exponent - ROW_EXPONENT << 23


def load_token_scales(scales: Scales, config: KernelConfig, tile: WorkTile) -> list:
    """Issues the loads of the scales of the lane's tokens, two of every eight; returns their words."""
    _, tokens = sides_of_cta(config, tile)
    # With stream-K, tiles need not be full.
    tokens = replace(tokens, first_row=first_token(tile, config))
    first = cute.arch.thread_idx()[0] % 4 * 2
    places = [first + block + i for block in range(0, config.work_tile_mnk[0], 8) for i in range(2)]
    return load_row_scales(scales, tile, tokens, places)


def scale_sums(sums: cute.Tensor, of_rows: list, of_tokens: list) -> None:
    """Multiplies sum 4i + 2h + e by the factor of row h, exactly, then by the scale of token 2i + e."""
    rows, tokens = ([ptx.float_of(word) for word in words] for words in (of_rows, of_tokens))
    for i in range(cute.size(sums)):
        sums[i] = Float32(sums[i] * rows[i // 2 % 2] * tokens[i // 4 * 2 + i % 2])
