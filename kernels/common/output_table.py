"""Destinations of the groups' results, as kernel parameters."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from nvfp4_cute.launch_table import INTERLEAVE

from .group_table import WorkTile, select_slot


@dataclass(frozen=True)
class ScaleTable:
    """Destination of the scales of quantized results.

    Attributes:
        addresses: global address of the first scale block, one Int64 per slot or one for all groups.
        row_blocks: 128-row blocks of scales per batch of an output that groups share.
        global_scales: address of float32 factors [G] in the caller's order, or 0 for none.
    """

    addresses: list
    row_blocks: Int32
    global_scales: Int64


@dataclass(frozen=True)
class OutputTable:
    """Destination of the results and factors applied to them.

    Attributes:
        addresses: global address of element (0, 0), one Int64 per slot or one for all groups.
        pitches: elements between rows (N-major output) or columns (M-major), one Int64 per address; bytes for quantized results.
        batch_pitch: pitch between the batches of an output that groups share.
        group_indices: the caller's index of each slot's group, by which its alpha is found; None if it equals the slot.
        alphas: pointers to float32 factors [G] in global memory, one per product, or None.
        scales: scales of quantized results, or None.
        limit: bits of the float32 clamp of a dual GEMM's products, or None.
        bias: pointer to one number per column in global memory, shared by all groups; or None. In a dual GEMM, each group has
            its own, with one number per row of both products' weights, in the order of the caller's groups.
        row_scales: global scales per row of ``a`` (``row_scales.Scales``), which multiply results after the alphas, or None.
    """

    addresses: list
    pitches: list
    batch_pitch: Int64
    group_indices: list | None
    alphas: list | None
    scales: ScaleTable | None = None
    limit: Int32 | None = None
    bias: cute.Pointer | None = None
    row_scales: object | None = None


@cute.jit
def group_output(
    outputs: OutputTable, tile: WorkTile, dtype: cutlass.Constexpr, out_m_major: cutlass.Constexpr
) -> tuple[Int64, Int64, Int64]:
    """Returns the address of the group's first element, and the elements between its rows and between its columns."""
    pitch = select_slot(outputs.pitches, tile.slot)
    row_pitch, column_pitch = (Int64(1), pitch) if out_m_major else (pitch, Int64(1))
    offset = outputs.batch_pitch * tile.a_batch + Int64(tile.a_row) * row_pitch
    address = select_slot(outputs.addresses, tile.slot) + offset * (dtype.width // 8)
    return address, row_pitch, column_pitch


def caller_index(outputs: OutputTable, slot: Int32) -> Int32:
    """Returns the caller's index of the group at ``slot``."""
    return slot if outputs.group_indices is None else select_slot(outputs.group_indices, slot)


@cute.jit
def load_alphas(outputs: OutputTable, tile: WorkTile, num_products: cutlass.Constexpr) -> list:
    """Returns the factor of every product of the tile's group; 1 without factors."""
    alphas = [Float32(1.0)] * num_products
    if cutlass.const_expr(len(tile.factors) > 0):
        alphas = list(tile.factors)
    elif cutlass.const_expr(outputs.alphas is not None):
        idx = caller_index(outputs, tile.slot)
        alphas = [cute.make_tensor(alpha + idx, cute.make_layout(1))[0] for alpha in outputs.alphas]
    return alphas


def group_bias(outputs: OutputTable, group: Int32, num_columns: Int32) -> cute.Pointer:
    """Returns the pointer to a group's bias in a dual GEMM, which has two numbers per output column.

    group: the caller's index of the group.
    """
    return outputs.bias + Int64(group) * (2 * num_columns)


def load_dual_bias(bias: cute.Pointer, columns: list, num_columns: Int32, weight_layout: str) -> list:
    """Issues the loads of the bias of output columns. Returns the gate's and the up projection's numbers, in their own dtype.

    Args:
        bias: result of :func:`group_bias`, in the order of the weights' rows; of separate weights the gate's, then up's.
        columns: output columns. Columns after the group's last one read the last one's bias; nobody uses their results.
        num_columns: output columns of the group.
        weight_layout: layout of the weights.
    """
    own = [cutlass.min(column, num_columns - 1) for column in columns]
    width = INTERLEAVE.get(weight_layout)
    if width is None:
        rows = [own, [column + num_columns for column in own]]
    else:
        first = [column // width * (2 * width) + column % width for column in own]
        rows = [first, [row + width for row in first]]
    if weight_layout == "interleaved_64_up_first":
        rows.reverse()
    return [[cute.make_tensor(bias + row, cute.make_layout(1))[0] for row in side] for side in rows]
