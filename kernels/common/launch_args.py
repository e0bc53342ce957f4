"""Host half of a kernel: reads the launch table (``nvfp4_cute.launch_table``) and passes operands to the device."""

from dataclasses import dataclass, replace
from typing import Literal

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from nvfp4_cute.launch_table import Group, Header

from .bias import bias_pointer
from .device_groups import DeviceGroups
from .group_table import GroupTable
from .output_table import OutputTable, ScaleTable
from .row_scales import Scales


@dataclass(frozen=True)
class OperandView:
    """One operand of a group, or of all groups if they share memory.

    Attributes:
        data: address of element (0, 0).
        scale: address of the first scale block.
        rows, batch, k: extents in elements. batch is 1 if groups have operands of their own or are consecutive rows.
        pitch, batch_pitch: elements between rows and between batches.
        sf_row_blocks: 128-row blocks of scales in one batch.
        sf_batch_blocks: 128-row blocks between the scales of neighbouring batches.
    """

    data: Int64
    scale: Int64
    rows: Int32
    batch: Int32
    k: Int32
    pitch: Int64
    batch_pitch: Int64
    sf_row_blocks: Int32
    sf_batch_blocks: Int32


def read_operands(values: cute.Tensor, rows: range, num_b: int, swap_ab: bool) -> tuple[list, list]:
    """Returns the operands on the MMA's M side and on its N side: per operand, one view per row of the table.

    Args:
        values: (COLUMN, ROW) of the launch table.
        rows: rows of the table that describe groups, or the one row that describes the operands of all groups.
        num_b: 2 for a dual GEMM.
        swap_ab: whether ``b`` is on the M side.
    """
    views_a = [[_view(values, row, "A", Group.M) for row in rows]]
    views_b = [[_view(values, row, "B", Group.N) for row in rows]]
    if num_b == 2:
        views_b.append([_second_b(values, row, view) for row, view in zip(rows, views_b[0], strict=True)])
    return (views_b, views_a) if swap_ab else (views_a, views_b)


def read_groups(
    values: cute.Tensor, rows: range, form: Literal["list", "ragged", "masked", "batched"], tile_m: int
) -> GroupTable | DeviceGroups:
    """Returns the sizes of the groups, or where the device finds them.

    tile_m: rows of ``a`` per work tile. See ``read_operands`` for the other arguments.
    """
    m, n, k = ([Int32(values[column, row]) for row in rows] for column in (Group.M, Group.N, Group.K))
    if form == "list":
        offsets = [Int32(values[Group.TILE_OFFSET, row]) for row in rows]
        return GroupTable.of(m, n, k, offsets, Int32(values[Header.NUM_TILES, 0]), tile_m)
    return DeviceGroups(
        form=form,
        sizes=cute.make_ptr(Int32, values[Header.GROUP_SIZES, 0], cute.AddressSpace.gmem, assumed_align=4),
        num_groups=Int32(values[Header.NUM_GROUPS, 0]),
        m_max=m[0],
        n=n[0],
        k=k[0],
    )


def read_outputs(
    values: cute.Tensor,
    rows: range,
    form: Literal["list", "ragged", "masked", "batched", "routed"],
    num_alphas: int,
    is_quantized: bool = False,
    has_limit: bool = False,
    bias_dtype: type | None = None,
    has_row_scales: bool = False,
) -> OutputTable:
    """Returns the destination of the results.

    Args:
        values, rows, form: see :func:`read_operands`.
        num_alphas: factors per group, one per product, or 0.
        is_quantized: whether results have scales.
        has_limit: whether a dual GEMM's products are clamped.
        bias_dtype: dtype of the bias; None without one.
        has_row_scales: whether ``a`` has a global scale per row.
    """
    columns = (Header.ALPHA, Header.ALPHA2)[:num_alphas]
    return OutputTable(
        addresses=[values[Group.OUT, row] for row in rows],
        pitches=[values[Group.OUT_PITCH, row] for row in rows],
        batch_pitch=values[Group.OUT_BATCH_PITCH, 1],
        group_indices=[Int32(values[Group.GROUP_IDX, row]) for row in rows] if form == "list" else None,
        alphas=[
            cute.make_ptr(Float32, values[column, 0], cute.AddressSpace.gmem, assumed_align=4)
            for column in columns
        ]
        or None,
        scales=ScaleTable(
            addresses=[values[Group.OUT_SCALE, row] for row in rows],
            row_blocks=Int32(values[Group.SFA_ROW_BLOCKS, 1]),
            global_scales=values[Header.OUT_GLOBAL_SCALE, 0],
        )
        if is_quantized
        else None,
        limit=Int32(values[Header.LIMIT, 0]) if has_limit else None,
        bias=None if bias_dtype is None else bias_pointer(values[Header.BIAS, 0], bias_dtype),
        row_scales=Scales([values[Group.ROW_SCALE, row] for row in rows], Int32(values[Group.M, 1]))
        if has_row_scales
        else None,
    )


def _view(values: cute.Tensor, row: int, letter: str, rows: Group) -> OperandView:
    """Returns the operand that row ``row`` of the launch table describes."""

    def column(name: str):
        return values[Group[name], row]

    return OperandView(
        data=column(letter),
        scale=column(f"SF{letter}"),
        rows=Int32(values[rows, row]),
        batch=Int32(column(f"{letter}_BATCH")),
        k=Int32(column("K")),
        pitch=column(f"{letter}_PITCH"),
        batch_pitch=column(f"{letter}_BATCH_PITCH"),
        sf_row_blocks=Int32(column(f"SF{letter}_ROW_BLOCKS")),
        sf_batch_blocks=Int32(column("SFA_ROW_BLOCKS" if letter == "A" else "SFB_BATCH_BLOCKS")),
    )


def _second_b(values: cute.Tensor, row: int, first: OperandView) -> OperandView:
    """Returns a dual GEMM's second operand, which has the shape of the first."""
    return replace(
        first,
        data=values[Group.B2, row],
        scale=values[Group.SFB2, row],
        pitch=values[Group.B2_PITCH, row],
        batch_pitch=values[Group.B2_BATCH_PITCH, row],
    )
