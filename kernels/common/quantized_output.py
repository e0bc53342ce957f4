"""NVFP4 output of an epilogue: e2m1 data and blocked e4m3 scales, as the next layer reads its ``a`` and ``a_scale``.

Rows of a group begin a new 128-row scale block, as in ``a_scale``. Padding columns of the scales (N % 64 != 0) are
written as zeros, which the next layer's MMA needs; padding rows, which nobody reads, are left as they are.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from nvfp4_cute.scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, SF_VEC_SIZE

from .global_access import global_scalar, store_byte, store_half, store_word, store_words
from .group_table import WorkTile, select_slot
from .output_table import OutputTable, caller_index
from .quantize_block import encode_block

# Columns of a row that are stored at once: two blocks.
RUN_COLUMNS = 2 * SF_VEC_SIZE


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
        encode: ``encode.ConvertE2M1`` or ``RoundE2M1``.
    """
    block = column // SF_VEC_SIZE
    if row < group.rows and block < group.blocks:
        low, low_code = encode_block([values[i] for i in range(SF_VEC_SIZE)], group.global_scale, encode)
        high, high_code = encode_block(
            [values[i] for i in range(SF_VEC_SIZE, RUN_COLUMNS)], group.global_scale, encode
        )
        data = group.data + Int64(row) * group.pitch + column // 2
        codes = low_code
        if block + 1 < group.blocks:
            codes = low_code | high_code << 8
            store_words(data, [*low, *high])
        else:
            store_words(data, low)
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
