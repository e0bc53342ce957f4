"""Addresses of the tiles of a launch, with which the emulator lets one cluster stand for others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from nvfp4_cute.emulator.record.representatives import LaunchWork, TileWork
from nvfp4_cute.formats.block_format import ATOM_ROWS
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.launch.plan import Plan
from nvfp4_cute.launch.simt import GemvTask
from nvfp4_cute.launch.task import Launch, Task
from nvfp4_cute.launch_table import Gemv, Header
from nvfp4_cute.operands.grouped import GroupedOperands
from nvfp4_cute.operands.overlap import span_bytes
from nvfp4_cute.planning.arch import family_of
from nvfp4_cute.planning.arch.simt import gemv_spread
from nvfp4_cute.planning.schedule import TileSchedule

GEMV_ROW_GROUPS = 4
"""Rows per CTA that follow each other: a quarter of its rows. The others are 32, 64, and 96 below."""
ATOM_BYTES = 512
"""Bytes of an atom of scales."""
SCALE_ROW_BYTES = 16
"""Bytes from a row of a scale atom to the next."""
# Number of K tiles of a launch up to which all are executed, in a few seconds.
FEW_K_TILES = 2000


@dataclass(frozen=True)
class GroupPlaces:
    """Addresses of one group, in bytes.

    Attributes:
        rows: (address, pitch) of ``a``, and then of every ``b``.
        scales: address of ``a_scale``, and then of every ``b_scale``.
        out: address, bytes from a row to the next, bytes from a column to the next.
        out_scale: for quantized results: address of their scales, bytes per row of atoms, and columns per atom.
    """

    rows: tuple[tuple[int, int], ...]
    scales: tuple[int, ...]
    out: tuple[int, float, float]
    out_scale: tuple[int, int, int] | None = None


def launch_work(
    schedule: TileSchedule, groups: Sequence[GroupPlaces], tensors: Sequence[Sequence[torch.Tensor]], num_clusters: int,
    split: int, to_and_fro: bool = False,
) -> LaunchWork:  # fmt: skip
    """Returns the tiles of every cluster of a launch.

    Args:
        schedule: its CTAs are the clusters of the launch.
        groups: in the caller's order.
        tensors: for each input, over all groups: ``rows`` of ``GroupPlaces``, then ``scales``, then ``out_scale``.
        num_clusters: number of launched clusters; those outside the schedule have no tile.
        split: CTAs of a cluster that share K tiles.
        to_and_fro: see ``TileSchedule.tiles_of_cta``.
    """
    tile_m, tile_n, _ = schedule.cta_tile_shape_mnk

    def place(tile_m_idx: int, tile_n_idx: int, group: int, k_tiles: int) -> TileWork:
        m, n, k = schedule.sizes[group]
        first_m, first_n = tile_m_idx * tile_m, tile_n_idx * tile_n
        here = groups[group]
        firsts = [first_m, *[first_n] * (len(here.rows) - 1)]
        block_bytes = NVFP4_FORMAT.atom_row_bytes(k)
        data = [address + first * pitch for (address, pitch), first in zip(here.rows, firsts, strict=True)]
        scales = [
            address + first // ATOM_ROWS * block_bytes
            for address, first in zip(here.scales, firsts, strict=True)
        ]
        if here.out_scale is not None:
            address, atom_row_bytes, columns = here.out_scale
            atoms = first_n // columns * ATOM_BYTES
            scales.append(address + first_m // ATOM_ROWS * atom_row_bytes + atoms)
        out, row_bytes, column_bytes = here.out
        where = out + int(first_m * row_bytes + first_n * column_bytes)
        return TileWork(k_tiles, min(tile_m, m - first_m), min(tile_n, n - first_n), (*data, *scales), where)

    clusters = tuple(
        tuple(
            place(tile.tile_m_idx, tile.tile_n_idx, tile.group_idx, tile.k_tile_cnt)
            for tile in schedule.tiles_of_cta(cluster, to_and_fro=to_and_fro)
        )
        if cluster < schedule.num_cta
        else ()
        for cluster in range(num_clusters)
    )
    ranges = sorted(_ranges(tensors))
    _, row_bytes, column_bytes = groups[0].out
    return LaunchWork(clusters, tuple(ranges), row_bytes, column_bytes, split)


def _ranges(tensors: Sequence[Sequence[torch.Tensor]]) -> Iterator[tuple[int, int, int]]:
    for which, group in enumerate(tensors):
        for tensor in group:
            if tensor.numel():
                yield tensor.data_ptr(), span_bytes(tensor), which


def of_task(task: Task, launch: Launch, arch: str) -> LaunchWork | None:
    """Returns the tiles of a launch by a kernel for ``arch``: of a gemv, or of a grouped GEMM.

    Returns None for other tasks, 16-bit rows, divided K tiles (stream-K), batches, lists with quantized results, dual GEMMs of
    weights that are interleaved in one operand, and a gemv whose last rows do not fill a scale atom.
    """
    if isinstance(task, GemvTask):
        return None if task.operands[0].rows % ATOM_ROWS else _of_gemv(task, launch, arch)
    if not isinstance(task, GroupedTask):
        return None
    problem = launch.plan.problem
    if launch.plan.kernel.key.config.stream_k or not problem.a_format.has_scales:
        return None
    if problem.form == "list":
        return None if problem.out_format is not None else of_plan(launch.plan, launch.operands)
    if problem.form == "batched":
        return None
    if problem.activation is not None and not task.operands.b2:
        return None
    return _of_device_groups(task, launch, arch)


def of_plan(plan: Plan, operands: GroupedOperands) -> LaunchWork | None:
    """Returns None for weights of two products in one operand, and for small launches whose clusters alternate in prefetching.

    In such launches clusters do not do equal work.
    """
    schedule, key = plan.schedule, plan.kernel.key
    if schedule is None or (plan.problem.activation is not None and not operands.b2):
        return None
    formats = key.a_format, key.b_format
    takes_turns = family_of(key.arch, formats).prefetches_in_turns(key.config, plan.problem.num_b, formats)
    k_tiles = sum(schedule.work_tile(i).k_tile_cnt for i in range(schedule.num_tiles))
    if takes_turns and k_tiles <= FEW_K_TILES:
        return None
    return of_lists(schedule, operands, key.arch, plan.problem.out_m_major, key.config.split_k)


def of_lists(
    schedule: TileSchedule, operands: GroupedOperands, arch: str, out_m_major: bool = False, split: int = 1
) -> LaunchWork:
    """Returns the tiles of a launch in list form, in which every CTA of the schedule is a cluster."""
    sides = [operands.a, operands.b, *([operands.b2] if operands.b2 else [])]
    places = [
        GroupPlaces(
            rows=tuple((side[g].data.data_ptr(), side[g].data.stride(-2)) for side in sides),
            scales=tuple(side[g].scale.data_ptr() for side in sides),
            out=(
                out.data_ptr(),
                out.element_size() * (1 if out_m_major else out.stride(0)),
                out.element_size() * (out.stride(1) if out_m_major else 1),
            ),
        )
        for g, out in enumerate(operands.out)
    ]
    tensors = [[x.data for x in side] for side in sides] + [[x.scale for x in side] for side in sides]
    return launch_work(schedule, places, tensors, schedule.num_cta, split, family_of(arch).TO_AND_FRO)


def _of_device_groups(task: GroupedTask, launch: Launch, arch: str) -> LaunchWork:
    """Returns the tiles of a task with device groups. Halves of one weight tensor alternate: one range for every group's."""
    (a,), (out,) = task.operands.a, task.operands.out
    weights = [*task.operands.b, *task.operands.b2]
    config, problem = launch.plan.kernel.key.config, launch.plan.problem
    n, k = weights[0].rows, weights[0].k
    out_batch, out_row, out_column = (stride * out.element_size() for stride in out.stride())
    out_format, out_scale, out_atoms = problem.out_format, None, (0, 0)
    if out_format is not None:
        out_scale, out_atoms = task.operands.out_scale[0], (out_format.atom_row_bytes(n), out_format.atom_k)
        out_column /= out_format.elements(1)
    places, sizes = [], []
    for group, rows in enumerate(task.groups()):
        sizes.append((rows.end - rows.start, n, k))
        out_address = out.data_ptr() + rows.batch * out_batch + rows.start * out_row
        places.append(
            GroupPlaces(
                rows=(
                    (a.data[rows.batch, rows.start :].data_ptr(), a.data.stride(1)),
                    *((b.data[group].data_ptr(), b.data.stride(1)) for b in weights),
                ),
                scales=(
                    a.scale.data_ptr() + rows.block * a.atom_row_bytes,
                    *(b.scale[group].data_ptr() for b in weights),
                ),
                out=(out_address, out_row, out_column),
                out_scale=None
                if out_scale is None
                else (out_scale.data_ptr() + rows.block * out_atoms[0], *out_atoms),
            )
        )
    num_clusters = int(launch.table[0, Header.NUM_CTA]) // config.cluster_size
    schedule = _in_order(sizes, config.work_tile_mnk, num_clusters)
    tensors = [[a.data], *(list(b.data) for b in weights), [a.scale], *(list(b.scale) for b in weights)]
    tensors += [] if out_scale is None else [[out_scale]]
    to_and_fro = family_of(arch).TO_AND_FRO
    return launch_work(schedule, places, tensors, num_clusters, config.split_k, to_and_fro)


def _of_gemv(task: GemvTask, launch: Launch, arch: str) -> LaunchWork:
    """Returns the tiles of a gemv: CTAs along M, batches along y, and rows that begin together and are 32 apart."""
    (matrix, vector), out = task.operands, task.out
    spread = gemv_spread(arch)
    rows_per_cta = spread.rows_per_cta
    pairs_per_atom = ATOM_ROWS // rows_per_cta
    element = out.element_size()

    def tile(batch: int, index: int) -> TileWork:
        atom, place = divmod(index, pairs_per_atom)
        first = place * rows_per_cta // GEMV_ROW_GROUPS
        row = atom * ATOM_ROWS + first
        inputs = (
            matrix.data[batch, row].data_ptr(),
            vector.data[batch].data_ptr(),
            matrix.scale[batch].data_ptr() + atom * matrix.atom_row_bytes + first * SCALE_ROW_BYTES,
            vector.scale[batch].data_ptr(),
        )
        return TileWork(1, rows_per_cta, 1, inputs, out[batch, row].data_ptr())

    num_cta = spread.num_cta(matrix.rows, matrix.batches, int(launch.table[Gemv.NUM_SMS]))
    clusters = tuple(
        tuple(tile(batch, index) for index in range(cta, matrix.rows // rows_per_cta, num_cta))
        for batch in range(matrix.batches)
        for cta in range(num_cta)
    )
    ranges = _ranges([[tensor] for tensor in (matrix.data, vector.data, matrix.scale, vector.scale)])
    out_batch, out_row = (stride * element for stride in out.stride())
    return LaunchWork(clusters, tuple(sorted(ranges)), out_row, out_batch)


def _in_order(
    sizes: Sequence[tuple[int, int, int]], tile_mnk: tuple[int, int, int], num_clusters: int
) -> TileSchedule:
    """Returns the schedule of kernels that read sizes themselves: groups stay in the caller's order."""
    tile_m, tile_n, tile_k = tile_mnk
    tiles_m = tuple(-(-m // tile_m) for m, _, _ in sizes)
    offsets = tuple(
        accumulate(
            (count * -(-n // tile_n) for count, (_, n, _) in zip(tiles_m, sizes, strict=True)), initial=0
        )
    )
    return TileSchedule(
        sizes=tuple(sizes),
        cta_tile_shape_mnk=tile_mnk,
        num_cta=min(offsets[-1], num_clusters),
        order=tuple(range(len(sizes))),
        tiles_m=tiles_m,
        k_tile_cnts=tuple(-(-k // tile_k) for _, _, k in sizes),
        tile_offsets=offsets,
    )
