"""NVFP4 output of an epilogue: e2m1 data and blocked e4m3 scales, as the next layer reads its ``a`` and ``a_scale``.

Rows of a group begin a new 128-row scale block, as in ``a_scale``. Padding columns of the scales (N % 64 != 0) are
written as zeros, which the next layer's MMA needs; padding rows, which nobody reads, are left as they are.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from nvfp4_cute.formats.scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, SF_VEC_SIZE

from .global_access import global_scalar, store_byte, store_half, store_word, store_words
from .group_table import WorkTile, select_slot
from .output_table import OutputTable, caller_index
from .quantize_block import encode_block

# Columns of a row that are stored at once: two blocks.
RUN_COLUMNS = 2 * SF_VEC_SIZE
# Bytes that memory writes at once, the columns that fill them with data, and whose scales fill a word.
SECTOR_BYTES = 32
SECTOR_COLUMNS = 2 * SECTOR_BYTES
# Words of data and of scales of a run.
HELD_WORDS = RUN_COLUMNS // 8 + 1


@dataclass(frozen=True)
class QuantizedGroup:
    """One group's part of the output.

    Attributes:
        data: address of its first row. pitch: bytes between rows.
        scale: address of its first scale block.
        rows: rows of the group.
        blocks: blocks of 16 columns in a row.
        global_scale: the factor one multiplies by to dequantize.
    """

    data: Int64
    pitch: Int64
    scale: Int64
    rows: Int32
    blocks: Int32
    global_scale: Float32


@cute.jit
def quantized_group(outputs: OutputTable, tile: WorkTile, columns: Int32) -> QuantizedGroup:
    """The tile's group; ``columns``: of the output."""
    scales = outputs.scales
    pitch = select_slot(outputs.pitches, tile.slot)
    row_block = Int64(scales.row_blocks) * tile.a_batch + tile.a_sf_block
    blocks = columns // SF_VEC_SIZE
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
    values: cute.Tensor, group: QuantizedGroup, row: Int32, column: Int32, encode: cutlass.Constexpr
):
    """Quantize and store a run of a row that starts at ``column``, a multiple of RUN_COLUMNS; as much as the row has.

    Args:
        values: RUN_COLUMNS fp32 results.
        group: where the row lies.
        row: of the group. Nothing is stored where the group has none.
        encode: of NVFP4.
    """
    block = column // SF_VEC_SIZE
    if row < group.rows and block < group.blocks:
        words, codes = _quantize_run(values, group, block, encode)
        _store_run(words, codes, group, row, block)


@cute.jit
def store_quantized_half(
    values: cute.Tensor,
    held: cute.Tensor,
    group: QuantizedGroup,
    row: Int32,
    column: Int32,
    is_paired: Boolean,
    is_first: Boolean,
    encode: cutlass.Constexpr,
):
    """The same of half of a sector: where both halves are stored by the same thread, the second stores both at once.

    Args:
        held: HELD_WORDS Uint32 of the thread, which keep the first half until the second comes.
        is_paired: whether the other half of the sector, of SECTOR_COLUMNS, is stored by the call before or after this.
        is_first: then, whether by the call after this.
    """
    block = column // SF_VEC_SIZE
    first_block = column // SECTOR_COLUMNS * ATOM_COLS
    if row < group.rows and block < group.blocks:
        words, codes = _quantize_run(values, group, block, encode)
        if not is_paired or first_block + ATOM_COLS > group.blocks:
            _store_run(words, codes, group, row, block)
        elif is_first:
            for i in cutlass.range_constexpr(len(words)):
                held[i] = words[i]
            held[len(words)] = codes
        else:
            is_upper = block > first_block
            *others, other_codes = [held[i] for i in range(HELD_WORDS)]
            lower = [other if is_upper else word for word, other in zip(words, others, strict=True)]
            upper = [word if is_upper else other for word, other in zip(words, others, strict=True)]
            data = group.data + Int64(row) * group.pitch + first_block * (SF_VEC_SIZE // 2)
            if data % SECTOR_BYTES == 0:
                store_words(data, [*lower, *upper])
            else:
                store_words(data, lower)
                store_words(data + SECTOR_BYTES // 2, upper)
            low_codes = other_codes if is_upper else codes
            high_codes = codes if is_upper else other_codes
            store_word(_scale_address(group, row, first_block), low_codes | high_codes << 16)


@cute.jit
def _quantize_run(
    values: cute.Tensor, group: QuantizedGroup, block: Int32, encode: cutlass.Constexpr
) -> tuple[list, Uint32]:
    """Four words of e2m1, and the codes of the run's scales; one where the row ends with the first of its blocks."""
    low, low_code = encode_block([values[i] for i in range(SF_VEC_SIZE)], group.global_scale, encode)
    high, high_code = encode_block(
        [values[i] for i in range(SF_VEC_SIZE, RUN_COLUMNS)], group.global_scale, encode
    )
    return [*low, *high], low_code | high_code << 8 if block + 1 < group.blocks else low_code


@cute.jit
def _store_run(words: list, codes: Uint32, group: QuantizedGroup, row: Int32, block: Int32):
    """Store what the row has of a run, with the padding columns of the scales where it is the row's last."""
    data = group.data + Int64(row) * group.pitch + block * (SF_VEC_SIZE // 2)
    if block + 1 < group.blocks:
        store_words(data, words)
    else:
        store_words(data, words[: len(words) // 2])
    address = _scale_address(group, row, block)
    if block % ATOM_COLS == 0 and block + 2 >= group.blocks:
        store_word(address, codes)
    else:
        store_half(address, codes)


@cute.jit
def store_quantized_block(
    values: cute.Tensor, group: QuantizedGroup, row: Int32, column: Int32, encode: cutlass.Constexpr
):
    """The same of one block of SF_VEC_SIZE columns, with the padding columns of the scales where it is the row's last."""
    block = column // SF_VEC_SIZE
    if row < group.rows and block < group.blocks:
        words, code = encode_block([values[i] for i in range(SF_VEC_SIZE)], group.global_scale, encode)
        store_words(group.data + Int64(row) * group.pitch + column // 2, words)
        address = _scale_address(group, row, block)
        store_byte(address, code)
        if block + 1 == group.blocks:
            for padding in cutlass.range_constexpr(1, ATOM_COLS):
                if block % ATOM_COLS + padding < ATOM_COLS:
                    store_byte(address + padding, Uint32(0))


@cute.jit
def _scale_address(group: QuantizedGroup, row: Int32, block: Int32) -> Int64:
    """Where the scale of a block of 16 columns lies."""
    atom = Int64(row // ATOM_ROWS) * cute.ceil_div(group.blocks, ATOM_COLS) + block // ATOM_COLS
    place = row % 32 * 16 + row % ATOM_ROWS // 32 * ATOM_COLS + block % ATOM_COLS
    return group.scale + atom * ATOM_BYTES + place
