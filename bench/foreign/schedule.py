"""Tiles of a foreign persistent kernel, with which the emulator lets one cluster stand for others."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from nvfp4_cute.bench.foreign.operands import GroupedOperands
from nvfp4_cute.emulator.record.representatives import LaunchWork
from nvfp4_cute.planning.schedule import TileSchedule, WorkTile
from nvfp4_cute.roofline.tile_work import GroupPlaces, launch_work

Fast = Literal["m", "n", "shorter", "n in eights"]
"""Axis along which consecutive tiles advance: M, N, or the one with fewer tiles in the group (M if both have as many).

"n in eights": blocks of eight tiles along N. Within a block, N advances first, then M, in alternating direction.
"""
EIGHT = 8


@dataclass(frozen=True)
class StaticSchedule(TileSchedule):
    """Tiles of all groups in order; cluster c computes the tiles c, c + clusters, c + 2 * clusters, ...

    Attributes:
        fast: axis along which consecutive tiles of a group advance; see ``Fast``.
    """

    fast: Fast = "shorter"

    def work_tile(self, tile_idx: int) -> WorkTile:
        """Returns the tile of a linear index."""
        found = super().work_tile(tile_idx)
        first, end = self.tile_offsets[found.slot], self.tile_offsets[found.slot + 1]
        tiles_m = self.tiles_m[found.slot]
        tiles_n = (end - first) // tiles_m
        if self.fast == "m" or (self.fast == "shorter" and tiles_m <= tiles_n):
            return found
        m, n = divmod(tile_idx - first, tiles_n)
        if self.fast == "n in eights":
            block, inside = divmod(tile_idx - first, EIGHT * tiles_m)
            m, n = divmod(inside, min(EIGHT, tiles_n - EIGHT * block))
            m, n = tiles_m - 1 - m if block % 2 else m, n + EIGHT * block
        return WorkTile(found.group_idx, found.slot, m, n, found.k_tile_cnt)


def static_work(
    operands: GroupedOperands,
    tile_mnk: tuple[int, int, int],
    clusters: int,
    fast: Fast,
    a_scale: tuple[torch.Tensor, Sequence[int]] | None = None,
    out_scale: tuple[torch.Tensor, Sequence[int], int] | None = None,
) -> LaunchWork:
    """Returns the work of the clusters of a launch.

    Args:
        operands: operands of the launch.
        tile_mnk: tile of a cluster: rows, columns of results, and values along K per step.
        clusters: number of launched clusters. The GPU holds all of them at once.
        fast: see `StaticSchedule`.
        a_scale: scales of ``a`` in another order of atoms, and the first atom of every group.
        out_scale: scales of quantized results, the first atom of every group, and columns per atom.
    """
    tile_m, tile_n, tile_k = tile_mnk
    sizes = operands.sizes
    tiles_m = tuple(-(-m // tile_m) for m, _, _ in sizes)
    offsets = tuple(
        accumulate((t * -(-n // tile_n) for t, (_, n, _) in zip(tiles_m, sizes, strict=True)), initial=0)
    )
    schedule = StaticSchedule(
        sizes=sizes,
        cta_tile_shape_mnk=tile_mnk,
        num_cta=min(offsets[-1], clusters),
        order=tuple(range(len(sizes))),
        tiles_m=tiles_m,
        k_tile_cnts=tuple(-(-k // tile_k) for _, _, k in sizes),
        tile_offsets=offsets,
        fast=fast,
    )
    scales, scale_places = a_scale or (operands.a_scale, operands.atoms)
    tensors = [operands.a, operands.b, scales, operands.b_scale]
    atom_row = operands.a_scale[:1].numel()
    pitch, out_row = operands.a.stride(0), operands.out.stride(0) * operands.out.element_size()
    out_atoms, out_places, out_columns = out_scale or (None, (), 0)
    if out_atoms is not None:
        tensors.append(out_atoms)
    places = []
    for group, start in enumerate(operands.starts):
        places.append(
            GroupPlaces(
                rows=(
                    (operands.a.data_ptr() + start * pitch, pitch),
                    (operands.b[group].data_ptr(), operands.b.stride(1)),
                ),
                scales=(
                    scales.data_ptr() + scale_places[group] * atom_row,
                    operands.b_scale[group].data_ptr(),
                ),
                out=(operands.out.data_ptr() + start * out_row, out_row, out_row / operands.b.shape[1]),
                out_scale=None
                if out_atoms is None
                else (
                    out_atoms.data_ptr() + out_places[group] * out_atoms[:1].numel(),
                    out_atoms[:1].numel(),
                    out_columns,
                ),
            )
        )
    return launch_work(schedule, places, [[tensor] for tensor in tensors], clusters, 1)
