"""Addresses of the rows in launches of a layer of experts: routing, tokens to rows, and rows back to tokens.

All CTAs do equal work on a few tokens, or on a few parts of one token. The rows of experts follow from the choices, so
every choice of a token is a tile here. Its inputs are the tensors of which it has a part.
"""

from collections.abc import Callable, Sequence

import torch

from nvfp4_cute.emulator.record.events import SECTOR
from nvfp4_cute.emulator.record.representatives import LaunchWork, TileWork
from nvfp4_cute.experts.combine import FinalizeTask
from nvfp4_cute.experts.gather import GatherQuantizeTask
from nvfp4_cute.experts.routing import RouteTask
from nvfp4_cute.formats.block_format import ATOM_ROWS, NVFP4
from nvfp4_cute.launch.task import Task
from nvfp4_cute.operands.overlap import span_bytes
from nvfp4_cute.planning.arch.simt import ROUTE_WARPS, ROW_WARPS, WARP_SIZE

ROW_QUADS, QUAD_BYTES, ROW_BYTES = 32, 4, 16
"""Rows of a scale atom whose bytes are ``ROW_BYTES`` apart. The rows after them begin ``QUAD_BYTES`` later."""
FINALIZE_COLUMNS = 256
"""Columns per warp."""

Places = Callable[[int, int], Sequence[int]]
"""Maps a token and one of its choices to the addresses of their part in every tensor."""


def of_rows(task: Task) -> LaunchWork | None:
    """Returns the work of the CTAs of ``route``, of ``gather`` after ``permute``, and of ``finalize``.

    Returns None for other tasks, for tasks whose CTAs each find a part of the order of rows, and for tasks that wait.
    """
    if isinstance(task, RouteTask):
        return _of_route(task)
    if isinstance(task, GatherQuantizeTask):
        return None if task.finds_order else _of_gather(task)
    if isinstance(task, FinalizeTask):
        return None if task.wait is not None else _of_finalize(task)
    return None


def _of_route(task: RouteTask) -> LaunchWork:
    tensors, tokens = [task.logits, task.ids, task.weights], len(task.ids)
    tensors += [] if task.given is None else [task.given]
    clusters = tuple(
        (part_of_row(min(ROUTE_WARPS, tokens - first), [row_place(x, first) for x in tensors]),)
        for first in range(0, tokens, ROUTE_WARPS)
    )
    return launch_of_rows(clusters, tensors)


def _of_gather(task: GatherQuantizeTask) -> LaunchWork:
    rows, blocked_rows = task.rows.tolist(), task.places.tolist()
    k_blocks = NVFP4.num_k_blocks(task.x.shape[1])
    tensors = [task.x, task.rows, task.places, task.data, *([] if task.scale is None else [task.scale])]

    def places(token: int, choice: int) -> list[int]:
        found = [row_place(x, token) for x in tensors[:3]] + [row_place(task.data, rows[token][choice])]
        if task.scale is not None:
            found.append(scale_place(task.scale, task.x.shape[1], max(blocked_rows[token][choice], 0)))
        return found

    return _by_choices(task.ids.shape, -(-k_blocks // WARP_SIZE), places, tensors)


def _of_finalize(task: FinalizeTask) -> LaunchWork:
    rows = task.rows_of_choices().tolist()
    of_token = [x for x in (task.rows, task.weights, task.shared, task.y) if x is not None]

    def places(token: int, choice: int) -> list[int]:
        return [row_place(x, token) for x in of_token] + [row_place(task.h, rows[token][choice])]

    return _by_choices(
        task.weights.shape, -(-task.y.shape[1] // FINALIZE_COLUMNS), places, [*of_token, task.h]
    )


def row_place(tensor: torch.Tensor, index: int) -> int:
    """Returns the address of a row; of the first one if there is none."""
    return tensor.data_ptr() + max(index, 0) * tensor.stride(0) * tensor.element_size()


def scale_place(scale: torch.Tensor, k: int, row: int) -> int:
    """Returns the address of the first scale of a row of K values; rows are counted through all atoms."""
    atom, row = divmod(row, ATOM_ROWS)
    within = row % ROW_QUADS * ROW_BYTES + row // ROW_QUADS * QUAD_BYTES
    return scale.data_ptr() + atom * NVFP4.atom_row_bytes(k) + within


def _by_choices(
    shape: Sequence[int], parts_of_token: int, places: Places, tensors: Sequence[torch.Tensor]
) -> LaunchWork:
    """Returns the work of CTAs whose warps take parts of tokens in order. CTAs that begin with the same part are equal."""
    tokens, top_k = shape
    clusters = []
    for first in range(0, tokens * parts_of_token, ROW_WARPS):
        end = min(first + ROW_WARPS, tokens * parts_of_token)
        kind = 1 + first % parts_of_token * ROW_WARPS + (end - first) % ROW_WARPS
        touched = range(first // parts_of_token, (end - 1) // parts_of_token + 1)
        clusters.append(
            tuple(part_of_row(kind, places(token, choice)) for token in touched for choice in range(top_k))
        )
    return launch_of_rows(tuple(clusters), tensors)


def part_of_row(kind: int, places: Sequence[int], rows: int = 1) -> TileWork:
    """Returns a tile whose parts begin with the sectors of these places."""
    return TileWork(kind, rows, 1, tuple(place // SECTOR * SECTOR for place in places), 0)


def launch_of_rows(clusters: tuple[tuple[TileWork, ...], ...], tensors: Sequence[torch.Tensor]) -> LaunchWork:
    """Returns the work of CTAs whose tiles are `part_of_row` of the tensors, in their order."""
    ranges = sorted((x.data_ptr(), span_bytes(x), which) for which, x in enumerate(tensors))
    return LaunchWork(clusters, tuple(ranges), 1, 1, scatters=True)
