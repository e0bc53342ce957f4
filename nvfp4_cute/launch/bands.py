"""Divides large groups of a list into bands of rows, each a group to the kernel, so that a band's part of ``a`` stays in L2.

Tiles along M follow each other (``planning.schedule``), so a tile of ``b`` crosses device memory once, and ``a`` is read again
for every column of tiles. If ``a`` does not fit in L2, it is read from device memory each time; 16384^3 then takes 19 % of its
speed of light on a GB10. With bands, ``b`` is read once per band instead.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.operands.grouped import GroupedOperands
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.planning.arch import base
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem

COUNTS = (2, 4, 8, 16)
"""Possible numbers of bands per group; few, because a kernel is compiled for each number of groups."""
ROWS = 512
"""Rows per band are a multiple of this: whole tiles of every config, and whole scale blocks."""
L2_SHARE = 0.5
"""Largest fraction of L2 for a band's rows; tiles of ``b`` and results need the rest."""
LEAST_GAIN = 1.25
"""Smallest factor by which bands must reduce the traffic."""
NEVER = ("sm_90a",)
"""Architectures without bands: measurements there did not use them, and dequantization bounds large groups."""


def divided(
    problem: GroupedProblem, operands: GroupedOperands, config: KernelConfig, gpu: Gpu
) -> tuple[GroupedProblem, GroupedOperands]:
    """Returns the problem and its operands as views in bands, with ``owners``; unchanged if bands gain nothing."""
    rows = _rows_of_bands(problem, operands, config, gpu)
    if all(one >= m for one, (m, _, _) in zip(rows, problem.sizes, strict=True)):
        return problem, operands
    parts = [(g, *part) for g, one in enumerate(rows) for part in _parts(problem.sizes[g][0], one)]
    out_format = problem.out_format
    whole = operands.a[0].format.atom_rows
    bands = replace(
        operands,
        a=tuple(_rows_of(operands.a[g], start, count) for g, start, count in parts),
        b=tuple(operands.b[g] for g, _, _ in parts),
        b2=tuple(operands.b2[g] for g, _, _ in parts) if operands.b2 else (),
        out=tuple(operands.out[g].narrow(-2, start, count) for g, start, count in parts),
        out_scale=tuple(
            _blocks_of(
                operands.out_scale[g], out_format, problem.sizes[g][1], start // whole, -(-count // whole)
            )
            for g, start, count in parts
            if out_format is not None
        ),
        owners=tuple(g for g, _, _ in parts),
    )
    sizes = tuple((count, *problem.sizes[g][1:]) for g, _, count in parts)
    return replace(problem, sizes=sizes), bands


def _rows_of_bands(
    problem: GroupedProblem, operands: GroupedOperands, config: KernelConfig, gpu: Gpu
) -> list[int]:
    """Returns the rows per band for every group; all of its rows if it is not divided."""
    all_rows = [m for m, _, _ in problem.sizes]
    l2_bytes = next((target.l2_bytes for target in targets.TARGETS if target.name == gpu.name), None)
    if (
        l2_bytes is None
        or gpu.arch in NEVER
        or problem.form != "list"
        or problem.is_chain
        or not operands.a
        or operands.a[0].format.scale_layout != "blocked"
        or config.stream_k
        or config.split_k > 1
    ):
        return all_rows
    rows = [_rows(size, problem, config, gpu.num_sms, L2_SHARE * l2_bytes) for size in problem.sizes]
    groups = sum(len(list(_parts(m, one))) for m, one in zip(all_rows, rows, strict=True))
    fits = groups <= base.max_list_groups(problem.num_b, problem.num_more_addresses)
    return rows if fits else all_rows


def _rows(
    size: tuple[int, int, int], problem: GroupedProblem, config: KernelConfig, num_sms: int, room: float
) -> int:
    m, n, k = size
    a_bytes, b_bytes = problem.a_format.nbytes(m, k), problem.num_b * problem.b_format.nbytes(n, k)
    if a_bytes <= room:
        return m
    tile_m, tile_n, _ = config.work_tile_mnk
    columns = -(-n // tile_n)
    waves = -(-(-(-m // tile_m) * columns) // num_sms)
    for count in COUNTS:
        rows = -(-m // (count * ROWS)) * ROWS
        if problem.a_format.nbytes(rows, k) <= room:
            break
    in_bands = a_bytes + -(-m // rows) * b_bytes
    return rows if LEAST_GAIN * in_bands <= min(columns, waves) * a_bytes + b_bytes else m


def _parts(m: int, rows: int) -> Iterator[tuple[int, int]]:
    """Iterates over first row and number of rows of every band; a group without rows has one band without rows."""
    for start in range(0, max(m, 1), max(rows, 1)):
        yield start, min(rows, m - start)


def _rows_of(x: Operand, start: int, count: int) -> Operand:
    atom = x.format.atom_rows
    scale = _blocks_of(x.scale, x.format, x.k, start // atom, -(-count // atom))
    row_scale = None if x.row_scale is None else x.row_scale.narrow(-1, start, count)
    return replace(x, data=x.data.narrow(-2, start, count), scale=scale, rows=count, row_scale=row_scale)


def _blocks_of(scale: torch.Tensor, fmt: BlockFormat, k: int, first: int, count: int) -> torch.Tensor:
    """Returns rows of atoms of blocked scales."""
    return scale.narrow(-1, first * fmt.atom_row_bytes(k), count * fmt.atom_row_bytes(k))
