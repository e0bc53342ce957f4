"""Compares results of executed clusters with exact sums."""

from dataclasses import dataclass

import numpy as np
import torch

from nvfp4_cute.bench.foreign.operands import GroupedOperands, bytes_of
from nvfp4_cute.emulator.record.representatives import LaunchWork, choose

MOST_GROUPS = 12
"""Most groups whose results are compared, including the first and the last."""
NAN_BITS = 0x7FC0
"""Result that no kernel has written: NaN in bf16."""


@dataclass(frozen=True)
class Found:
    """Results of a launch compared with exact sums.

    Attributes:
        compared, differing: number of compared results, and of those with wrong bits.
        outside: number of results that executed clusters should have written but did not, or wrote outside of their tiles.
    """

    compared: int
    differing: int
    outside: int


def compare(operands: GroupedOperands, work: LaunchWork | None) -> Found:
    """Compares results of some groups that the executed clusters computed. ``out`` must have held NaN before the launch."""
    compared = differing = outside = 0
    columns = operands.out.shape[1]
    out, starts = bytes_of(operands.out).view(np.uint16).reshape(-1, columns), operands.starts
    computed = out != NAN_BITS
    if work is not None:
        executed = np.zeros_like(computed)
        for cluster in set(choose(work)):
            for tile in work.clusters[cluster]:
                row, column = divmod((tile.out - operands.out.data_ptr()) // 2, columns)
                executed[row : row + tile.rows, column : column + tile.columns] = True
        for start, m in zip(starts, operands.rows, strict=True):
            mine = slice(start, start + m)  # rows of no group may hold anything
            outside += int((executed[mine] != computed[mine]).sum())
    groups = [
        group
        for group, (m, _, _) in enumerate(operands.sizes)
        if computed[starts[group] : starts[group] + m].any()
    ]
    for index in (
        np.unique(np.linspace(0, len(groups) - 1, MOST_GROUPS).round().astype(int)) if groups else ()
    ):
        group = groups[index]
        m = operands.sizes[group][0]
        mine = computed[starts[group] : starts[group] + m]
        rows, columns_of_group = np.flatnonzero(mine.any(1)), np.flatnonzero(mine.any(0))
        expected = torch.from_numpy(operands.expected(group, rows, columns_of_group)).to(torch.bfloat16)
        bits = bytes_of(expected.contiguous()).view(np.uint16).reshape(len(rows), -1)
        picked = np.ix_(rows, columns_of_group)
        compared += int(mine[picked].sum())
        differing += int(((out[starts[group] : starts[group] + m][picked] != bits) & mine[picked]).sum())
    return Found(compared, differing, outside)
