"""The tensors of a launch over groups: their names, and the places of their addresses in the launch table."""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header
from nvfp4_cute.operands.grouped import GroupedOperands
from nvfp4_cute.problem import GroupedProblem


class Entry(NamedTuple):
    """A tensor of a launch: its name in messages, whether it is written, and the place of its address.

    ``column`` is a column of the header, or of the row of ``group``.
    """

    name: str
    tensor: torch.Tensor
    is_written: bool
    column: IntEnum
    group: int | None = None


def entries(operands: GroupedOperands, problem: GroupedProblem) -> Iterator[Entry]:
    """Iterates over all tensors: inputs in the order of the operation's arguments, then outputs."""
    is_listed = problem.form == "list"

    def side(
        name: str, column: Group, tensors: list[torch.Tensor], is_written: bool = False
    ) -> Iterator[Entry]:
        for g, tensor in enumerate(tensors):
            yield Entry(f"{name}[{g}]" if is_listed else name, tensor, is_written, column, g)

    def one(
        name: str, column: Header, tensor: torch.Tensor | None, is_written: bool = False
    ) -> Iterator[Entry]:
        if tensor is not None:
            yield Entry(name, tensor, is_written, column)

    yield from side("a", Group.A, [x.data for x in operands.a])
    yield from side("b", Group.B, [x.data for x in operands.b])
    yield from side("a_scale", Group.SFA, [x.scale for x in operands.a if x.format.has_scales])
    yield from side("b_scale", Group.SFB, [x.scale for x in operands.b])
    row_scales = [x.row_scale for x in operands.a if x.row_scale is not None]
    yield from side("global_scale of a", Group.ROW_SCALE, row_scales)
    yield from one("sizes", Header.GROUP_SIZES, operands.sizes)
    yield from one("alpha", Header.ALPHA, operands.alpha)
    yield from side("b2", Group.B2, [x.data for x in operands.b2])
    yield from side("b2_scale", Group.SFB2, [x.scale for x in operands.b2])
    yield from one("alpha2", Header.ALPHA2, operands.alpha2)
    yield from one("bias", Header.BIAS, operands.bias)
    yield from one("out_global_scale", Header.OUT_GLOBAL_SCALE, operands.out_global_scale)
    yield from one("counters of the chain", Header.CHAIN, operands.chain, is_written=True)
    yield from side("out", Group.OUT, list(operands.out), is_written=True)
    yield from side("scale of out", Group.OUT_SCALE, list(operands.out_scale), is_written=True)


def address_places(operands: GroupedOperands, problem: GroupedProblem, described: Sequence[int]) -> list[int]:
    """Returns the places of addresses in the flat launch table, in the order of :func:`entries`.

    Args:
        operands, problem: the checked operands.
        described: the groups with a row of the table each, in the order of rows: all groups of a list, or the one entry for
            all.
    """
    row_of = {g: 1 + slot for slot, g in enumerate(described)}
    return [
        int(entry.column) + (0 if entry.group is None else row_of[entry.group] * NUM_COLUMNS)
        for entry in entries(operands, problem)
    ]
