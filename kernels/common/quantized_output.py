"""Block-scaled output of an epilogue: elements and scales in the layout in which the next GEMM reads ``a``.

The epilogue's ``Encoding`` names the format: NVFP4, MXFP4 or MXFP8 with one-byte scales in the blocked layout, or FP8_1x128
with rows of float32 scales, one per block of columns. In the blocked layout, every group starts a new 128-row scale block.
Where a row's blocks are not a multiple of four, the padding columns of the scales are written as zeros, because the next MMA
reads them. Padding rows are not written, because nobody reads them.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, BlockFormat

from . import ptx
from .encode import Encoding
from .global_access import global_scalar, store_byte, store_half, store_word, store_words
from .group_table import WorkTile, select_slot
from .output_table import OutputTable, caller_index
from .quantize_block import BlockScale, encode_block, encode_part

# Columns of a row that are stored together: one block or two.
RUN_COLUMNS = 32
# Bytes of a memory sector.
SECTOR_BYTES = 32
# Bytes of a float32 scale.
SCALE_BYTES = 4
# Words of data and scales in a run of 4-bit elements.
HELD_WORDS = RUN_COLUMNS // 8 + 1


def sector_columns(format: BlockFormat) -> int:
    """Returns the columns whose elements fill a sector."""
    return format.elements(SECTOR_BYTES)


@dataclass(frozen=True)
class QuantizedGroup:
    """One group's part of the output.

    Attributes:
        data: address of the group's first row.
        pitch: bytes between rows.
        scale: address of the group's first scale.
        rows: rows of the group.
        blocks: blocks of columns per row.
        global_scale: the factor that dequantizing multiplies by; 1 if the format has none.
    """

    data: Int64
    pitch: Int64
    scale: Int64
    rows: Int32
    blocks: Int32
    global_scale: Float32


@cute.jit
def quantized_group(
    outputs: OutputTable, tile: WorkTile, columns: Int32, format: cutlass.Constexpr[BlockFormat]
) -> QuantizedGroup:
    """Returns the tile's group. columns: columns of the output, whole blocks of ``format``."""
    scales = outputs.scales
    pitch = select_slot(outputs.pitches, tile.slot)
    blocks = columns // format.block_k
    if cutlass.const_expr(format.scale_layout == "rowmajor"):
        row_block = Int64(scales.row_blocks) * tile.a_batch + tile.a_row
        block_row_bytes = blocks * SCALE_BYTES
    else:
        row_block = Int64(scales.row_blocks) * tile.a_batch + tile.a_sf_block
        block_row_bytes = cute.ceil_div(blocks, ATOM_COLS) * ATOM_BYTES
    global_scale = Float32(1.0)
    if scales.global_scales != 0:
        global_scale = global_scalar(Float32, scales.global_scales + 4 * caller_index(outputs, tile.slot))[0]
    return QuantizedGroup(
        data=select_slot(outputs.addresses, tile.slot)
        + outputs.batch_pitch * tile.a_batch
        + pitch * tile.a_row,
        pitch=pitch,
        scale=select_slot(scales.addresses, tile.slot) + row_block * block_row_bytes,
        rows=tile.m,
        blocks=blocks,
        global_scale=global_scale,
    )


@cute.jit
def store_quantized_run(
    values: cute.Tensor,
    group: QuantizedGroup,
    row: Int32,
    column: Int32,
    encode: cutlass.Constexpr[Encoding],
):
    """Quantizes and stores a run of a row from ``column`` on, a multiple of RUN_COLUMNS, clipped to the row.

    Args:
        values: RUN_COLUMNS float32 results.
        group: destination.
        row: row within the group. Rows beyond the group are not stored.
        encode: encoding of the format.
    """
    block = column // encode.format.block_k
    if row < group.rows and block < group.blocks:
        words, codes = _quantize_run(values, group, block, encode)
        _store_run(words, codes, group, row, block, encode.format)


@cute.jit
def store_quantized_half(
    values: cute.Tensor,
    held: cute.Tensor,
    group: QuantizedGroup,
    row: Int32,
    column: Int32,
    is_paired: Boolean,
    is_first: Boolean,
    encode: cutlass.Constexpr[Encoding],
):
    """Quantizes and stores half of a sector. If one thread has both halves, the second call stores both together.

    Args:
        held: HELD_WORDS Uint32 of the thread, which keep the first half until the second call.
        is_paired: whether the neighbouring call of this thread stores the other half of the sector (``sector_columns``).
        is_first: whether this call is the first of such a pair.
    """
    format = encode.format
    sector_blocks = sector_columns(format) // format.block_k
    block = column // format.block_k
    first_block = column // sector_columns(format) * sector_blocks
    if row < group.rows and block < group.blocks:
        words, codes = _quantize_run(values, group, block, encode)
        if not is_paired or first_block + sector_blocks > group.blocks:
            _store_run(words, codes, group, row, block, format)
        elif is_first:
            for i in cutlass.range_constexpr(len(words)):
                held[i] = words[i]
            held[len(words)] = codes
        else:
            is_upper = block > first_block
            *others, other_codes = [held[i] for i in range(HELD_WORDS)]
            lower = [other if is_upper else word for word, other in zip(words, others, strict=True)]
            upper = [word if is_upper else other for word, other in zip(words, others, strict=True)]
            data = group.data + Int64(row) * group.pitch + first_block * format.row_bytes(format.block_k)
            _store_sector(data, lower, upper)
            low_codes = other_codes if is_upper else codes
            high_codes = codes if is_upper else other_codes
            address = _scale_address(group, row, first_block)
            run_bits = 8 * (sector_blocks // 2)
            _store_codes(address, low_codes | high_codes << run_bits, sector_blocks, group, first_block)


@cute.jit
def _quantize_run(
    values: cute.Tensor, group: QuantizedGroup, block: Int32, encode: cutlass.Constexpr[Encoding]
) -> tuple[list, Uint32]:
    """Returns words of elements and the codes of the run's scales; only one code if the row ends after the first block."""
    size = encode.format.block_k
    low, low_code = encode_block([values[i] for i in range(size)], group.global_scale, encode)
    words, codes = low, low_code
    if cutlass.const_expr(size < RUN_COLUMNS):
        high, high_code = encode_block(
            [values[i] for i in range(size, RUN_COLUMNS)], group.global_scale, encode
        )
        words, codes = [*low, *high], low_code | high_code << 8 if block + 1 < group.blocks else low_code
    return words, codes


@cute.jit
def _store_run(
    words: list,
    codes: Uint32,
    group: QuantizedGroup,
    row: Int32,
    block: Int32,
    format: cutlass.Constexpr[BlockFormat],
):
    """Stores a run, clipped to the row. The last run of a row also writes the padding columns of the scales."""
    data = group.data + Int64(row) * group.pitch + block * format.row_bytes(format.block_k)
    if cutlass.const_expr(sector_columns(format) == RUN_COLUMNS):
        _store_sector(data, words[: len(words) // 2], words[len(words) // 2 :])
    elif cutlass.const_expr(format.block_k == RUN_COLUMNS):
        store_words(data, words)
    elif block + 1 < group.blocks:
        store_words(data, words)
    else:
        store_words(data, words[: len(words) // 2])
    address = _scale_address(group, row, block)
    _store_codes(address, codes, RUN_COLUMNS // format.block_k, group, block)


@cute.jit
def _store_sector(data: Int64, lower: list, upper: list):
    """Stores both halves, in one instruction if they form an aligned sector."""
    if data % SECTOR_BYTES == 0:
        store_words(data, [*lower, *upper])
    else:
        store_words(data, lower)
        store_words(data + SECTOR_BYTES // 2, upper)


@cute.jit
def _store_codes(
    address: Int64, codes: Uint32, count: cutlass.Constexpr, group: QuantizedGroup, block: Int32
):
    """Stores ``count`` scale codes (1, 2 or 4) from ``block`` on, and the padding columns if the row ends with them."""
    if cutlass.const_expr(count == ATOM_COLS):
        store_word(address, codes)
    elif cutlass.const_expr(count == 2):
        if block % ATOM_COLS == 0 and block + 2 >= group.blocks:
            store_word(address, codes)
        else:
            store_half(address, codes)
    else:
        store_byte(address, codes)
        if block + 1 == group.blocks:
            for padding in cutlass.range_constexpr(1, ATOM_COLS):
                if block % ATOM_COLS + padding < ATOM_COLS:
                    store_byte(address + padding, Uint32(0))


@cute.jit
def store_quantized_part(
    values: cute.Tensor,
    scale: BlockScale | None,
    group: QuantizedGroup,
    row: Int32,
    column: Int32,
    encode: cutlass.Constexpr[Encoding],
):
    """Quantizes and stores the columns of a block, or of a part of one whose other parts other threads have.

    Args:
        values: float32 results from ``column`` on.
        scale: scale of the whole block, which the thread with the block's first columns stores; None if ``values`` are the block.
    """
    format = encode.format
    block = column // format.block_k
    if row < group.rows and block < group.blocks:
        part = [values[i] for i in range(cute.size(values))]
        if cutlass.const_expr(scale is not None):
            magnitudes = [ptx.abs_f32(value) for value in part]
            _store_part_words(encode_part(part, magnitudes, scale, encode), group, row, column, format)
            if column % format.block_k == 0:
                store_scale(scale.code, group, row, block, format)
        else:
            words, own_code = encode_block(part, group.global_scale, encode)
            _store_part_words(words, group, row, column, format)
            _store_codes(_scale_address(group, row, block), own_code, 1, group, block)


@cute.jit
def store_scale(
    code: Uint32, group: QuantizedGroup, row: Int32, block: Int32, format: cutlass.Constexpr[BlockFormat]
):
    """Stores the scale of a block."""
    if cutlass.const_expr(format.scale_layout == "rowmajor"):
        store_word(group.scale + (Int64(row) * group.blocks + block) * SCALE_BYTES, code)
    else:
        _store_codes(_scale_address(group, row, block), code, 1, group, block)


def _store_part_words(words: list, group: QuantizedGroup, row: Int32, column: Int32, format: BlockFormat):
    """Stores words of elements of a row from ``column`` on."""
    store_words(group.data + Int64(row) * group.pitch + column // format.elements(1), words)


@cute.jit
def _scale_address(group: QuantizedGroup, row: Int32, block: Int32) -> Int64:
    """Returns the address of the scale of a block of columns."""
    atom = Int64(row // ATOM_ROWS) * cute.ceil_div(group.blocks, ATOM_COLS) + block // ATOM_COLS
    place = row % 32 * 16 + row % ATOM_ROWS // 32 * ATOM_COLS + block % ATOM_COLS
    return group.scale + atom * ATOM_BYTES + place
