"""Host scheduler: linearizes the output tiles of all groups and assigns them to persistent CTAs.

``kernels/common/group_table.py`` is the device half. Both compute a work tile from its linear index equally:

- slots are the groups by descending M (for equal M, in the caller's order), so that the longest work starts first;
- the slot of an index is the last one whose ``tile_offsets`` entry is not above it: comparisons with the prefix
  sums; a slot without tiles shares its entry with the next slot and is therefore never found;
- inside a slot M is the fast axis, ``tile_n_idx, tile_m_idx = divmod(index - tile_offsets[slot], tiles_m[slot])``:
  tiles that share a weight tile run at the same time, and the weight tile is read from HBM once;
- CTA c computes the tiles c, c + num_cta, c + 2 * num_cta, ...
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.problem import INT32_MAX

GROUP_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class WorkTile:
    """One output tile of one CTA.

    Attributes:
        group_idx: index of the group in the caller's lists.
        slot: position of the group in launch order.
        tile_m_idx, tile_n_idx: tile coordinates inside the group.
        k_tile_cnt: K tiles to accumulate.
    """

    group_idx: int
    slot: int
    tile_m_idx: int
    tile_n_idx: int
    k_tile_cnt: int


@dataclass(frozen=True)
class TileSchedule:
    """Assignment of tiles to CTAs, made by :func:`make_schedule`; ``print`` shows a table.

    Attributes:
        sizes: (m, n, k) of every group, in the caller's order.
        cta_tile_shape_mnk: extents of a work tile, and of one K tile.
        num_cta: persistent CTAs with at least one tile; with split-K, clusters of ``split_k`` CTAs.
        order: the group at each slot.
        tiles_m: tiles along M at each slot.
        k_tile_cnts: K tiles of a work tile at each slot.
        tile_offsets: number of tiles of all earlier slots, and the total: one entry more than slots.
        split_k: CTAs that share a tile's K tiles.
    """

    sizes: tuple[tuple[int, int, int], ...]
    cta_tile_shape_mnk: tuple[int, int, int]
    num_cta: int
    order: tuple[int, ...]
    tiles_m: tuple[int, ...]
    k_tile_cnts: tuple[int, ...]
    tile_offsets: tuple[int, ...]
    split_k: int = 1

    @property
    def num_tiles(self) -> int:
        """Work tiles of all groups."""
        return self.tile_offsets[-1]

    @property
    def waves(self) -> int:
        """Largest number of tiles of any CTA."""
        return _ceil_div(self.num_tiles, self.num_cta) if self.num_cta else 0

    @property
    def cta_k_tiles(self) -> tuple[int, ...]:
        """K tiles per CTA; with split-K, of the busiest CTA of each cluster."""
        return tuple(
            sum(_ceil_div(tile.k_tile_cnt, self.split_k) for tile in self.tiles_of_cta(cta))
            for cta in range(self.num_cta)
        )

    @property
    def imbalance(self) -> float:
        """K tiles of the busiest CTA over the mean of all CTAs; 1.0 is perfect, and the value without work."""
        shares = self.cta_k_tiles
        total = sum(self.work_tile(tile).k_tile_cnt for tile in range(self.num_tiles))
        return max(shares) * len(shares) * self.split_k / total if total else 1.0

    @property
    def hbm_bytes(self) -> int:
        """Bytes read from HBM if L2 serves every reuse: A and B once, scales once in whole 128x4 atoms."""
        return sum(_read_bytes(m, n, k) for m, n, k in self.sizes if m and n)

    def work_tile(self, tile_idx: int) -> WorkTile:
        """Returns the tile of linear index ``tile_idx``. Raises IndexError outside 0 <= tile_idx < num_tiles."""
        if not 0 <= tile_idx < self.num_tiles:
            raise IndexError(f"tile_idx={tile_idx} is outside the schedule's {self.num_tiles} tiles")
        slot = bisect_right(self.tile_offsets, tile_idx) - 1
        tile_n_idx, tile_m_idx = divmod(tile_idx - self.tile_offsets[slot], self.tiles_m[slot])
        return WorkTile(self.order[slot], slot, tile_m_idx, tile_n_idx, self.k_tile_cnts[slot])

    def tiles_of_cta(self, cta: int, *, to_and_fro: bool = False) -> Iterator[WorkTile]:
        """Yields the tiles of CTA ``cta`` in order.

        Args:
            to_and_fro: whether every other wave is assigned from the last CTA to the first (``arch.base.Family.TO_AND_FRO``).
        """
        for wave in range(self.waves):
            place = self.num_cta - 1 - cta if to_and_fro and wave % 2 else cta
            if (tile_idx := wave * self.num_cta + place) < self.num_tiles:
                yield self.work_tile(tile_idx)

    def __str__(self) -> str:
        """Returns one row per slot and a line of totals."""
        lines = [
            f"{'slot':>4} {'group':>5} {'M':>6} {'N':>6} {'K':>6} {'tiles MxN':>10} {'K tiles':>7} {'first':>5}"
        ]
        for slot, group in enumerate(self.order):
            m, n, k = self.sizes[group]
            num_tiles = self.tile_offsets[slot + 1] - self.tile_offsets[slot]
            tiles = f"{self.tiles_m[slot]}x{num_tiles // self.tiles_m[slot]}" if num_tiles else "-"
            lines.append(
                f"{slot:>4} {group:>5} {m:>6} {n:>6} {k:>6} {tiles:>10} {self.k_tile_cnts[slot]:>7} "
                f"{self.tile_offsets[slot]:>5}"
            )
        tile = "x".join(map(str, self.cta_tile_shape_mnk))
        workers = f"{self.num_cta} clusters of {self.split_k}" if self.split_k > 1 else f"{self.num_cta}"
        lines.append(
            f"{self.num_tiles} tiles of {tile} on {workers} CTAs: {self.waves} waves, "
            f"imbalance {self.imbalance:.3f}, {self.hbm_bytes / 1e6:.2f} MB read"
        )
        return "\n".join(lines)

    def picture(self, width: int = 64, max_rows: int = 16) -> str:
        """Draws time from left to right, one row per run of CTAs with equal work, one letter per group.

        A ``|`` ends a work tile; the number of letters is proportional to its K tiles. Draws at most ``max_rows`` rows.
        """
        if not self.num_tiles:
            return "no tiles"
        longest = max(self.cta_k_tiles)
        rows: list[tuple[int, str]] = []
        for cta in range(self.num_cta):
            drawing = self._draw_cta(cta, min(1.0, width / longest))
            if not rows or rows[-1][1] != drawing:
                rows.append((cta, drawing))
        ends = [*(first for first, _ in rows[1:]), self.num_cta]
        lines = [
            f"CTA {first:>3}-{end - 1:<3} {drawing}" for (first, drawing), end in zip(rows, ends, strict=True)
        ]
        if len(lines) > max_rows:
            lines[max_rows:] = [f"... {len(lines) - max_rows} more rows"]
        return "\n".join(lines)

    def _draw_cta(self, cta: int, letters_per_k_tile: float) -> str:
        return "".join(
            GROUP_LETTERS[tile.group_idx % len(GROUP_LETTERS)]
            * max(1, round(tile.k_tile_cnt * letters_per_k_tile))
            + "|"
            for tile in self.tiles_of_cta(cta)
        )


def make_schedule(
    sizes: Iterable[tuple[int, int, int]],
    cta_tile_shape_mnk: tuple[int, int, int],
    num_cta_max: int,
    split_k: int = 1,
) -> TileSchedule:
    """Linearizes the tiles of all groups.

    Args:
        sizes: (m, n, k) of every group, in elements; groups with m = 0 or n = 0 get no tile.
        cta_tile_shape_mnk: extents of the tile that one CTA computes, in elements.
        num_cta_max: CTAs or clusters that are resident at once (the SM count if one CTA fills an SM).
        split_k: CTAs of a cluster that share the K tiles of each of its tiles.

    Raises:
        ValueError: a negative size, a tile extent or CTA count below 1, or more tiles than 32 bits count.
    """
    sizes = tuple((m, n, k) for m, n, k in sizes)
    for group, size in enumerate(sizes):
        if min(size) < 0:
            raise ValueError(f"group {group}: (m, n, k)={size} has a negative extent; sizes are 0 or more")
    if min(cta_tile_shape_mnk) < 1:
        raise ValueError(
            f"cta_tile_shape_mnk={cta_tile_shape_mnk} has an extent below 1; use for example (128, 128, 256)"
        )
    if num_cta_max < 1:
        raise ValueError(f"num_cta_max={num_cta_max} is below 1; pass the number of SMs")
    tile_m, tile_n, tile_k = cta_tile_shape_mnk
    order = tuple(sorted(range(len(sizes)), key=lambda group: -sizes[group][0]))
    slots = [sizes[group] for group in order]
    tile_offsets = tuple(
        accumulate((_ceil_div(m, tile_m) * _ceil_div(n, tile_n) for m, n, _ in slots), initial=0)
    )
    if tile_offsets[-1] > INT32_MAX:
        raise ValueError(f"{tile_offsets[-1]} tiles exceed the 32-bit limit {INT32_MAX}; use larger tiles")
    return TileSchedule(
        sizes=sizes,
        cta_tile_shape_mnk=cta_tile_shape_mnk,
        num_cta=min(tile_offsets[-1], num_cta_max),
        order=order,
        tiles_m=tuple(_ceil_div(m, tile_m) for m, _, _ in slots),
        k_tile_cnts=tuple(_ceil_div(k, tile_k) for _, _, k in slots),
        tile_offsets=tile_offsets,
        split_k=split_k,
    )


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _read_bytes(m: int, n: int, k: int) -> int:
    return sum(rows * NVFP4.row_bytes(k) + NVFP4.scale_bytes(rows, k) for rows in (m, n))
