"""Executes a few clusters for many equal ones: their traces serve for the others with other addresses.

Clusters of a persistent kernel differ in the tiles that they compute, and tiles of one shape differ only in addresses.
The launching code knows the tiles (``LaunchWork``). Clusters are of one kind if they have equally many tiles with
equal numbers of K tiles and columns, because they read equally many weights. One cluster per shape is executed. If there are too
many shapes, as with experts with individual numbers of tokens, a few clusters from the fewest to the most results stand
for those closest to them.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from nvfp4_cute.emulator.record.events import LINE, ClusterTrace, Event, Op, Origin, Piece
from nvfp4_cute.emulator.record.placement import Placement
from nvfp4_cute.errors import EmulatorError

MOST_OF_A_KIND = 4
"""Number of executed clusters of a kind if their shapes differ."""
FEW_EVENTS = 64
"""Number of events of a warp below which all of them are replayed."""
WORK = frozenset({Op.LOAD, Op.ASYNC_READ, Op.MMA, Op.WGMMA, Op.MATRIX})
"""Events of warps that load operands or multiply: equally many in every step of the main loop."""
OF_TILES = WORK | {Op.WAIT}
"""Events that can begin a tile. The first of them begins a warp's first tile."""
MORE_EVENTS = 1.5
"""Factor of the share for warps that do not load or multiply, such as the epilogue's, so that they serve all replayed tiles."""
MOVING = frozenset({Op.LOAD, Op.PREFETCH, Op.STORE, Op.WRITE, Op.READ})
"""Events with addresses of operands."""


class NotAlike(EmulatorError):
    """Raised when clusters cannot stand for others, because they do not do what their tiles say."""


@dataclass(frozen=True)
class TileWork:
    """One tile of a cluster.

    Attributes:
        k_tiles: steps of its main loop. For launches without a main loop, a number that distinguishes kinds of
            clusters.
        rows, columns: shape of its results.
        inputs: address of its part of every input, in the launch's order of inputs.
        out: address of its first result.
    """

    k_tiles: int
    rows: int
    columns: int
    inputs: tuple[int, ...]
    out: int


@dataclass(frozen=True)
class LaunchWork:
    """Work of the clusters of a launch.

    Attributes:
        clusters: the tiles of each cluster in order; clusters are counted along x, then along y.
        inputs: (address, bytes, input) of every tensor that is read, by address, including scales of results.
        row_bytes, column_bytes: bytes from a result to that of the next row, and of the next column.
        split: CTAs of a cluster that share the steps of a tile, in order; each has at least one.
        most_tiles: number of replayed tiles per cluster; the time of further tiles follows from the later half of
            these.
        scatters: threads store parts of inputs in any order; otherwise a warp does its tiles in order.
    """

    clusters: tuple[tuple[TileWork, ...], ...]
    inputs: tuple[tuple[int, int, int], ...]
    row_bytes: float
    column_bytes: float
    split: int = 1
    most_tiles: int | None = None
    scatters: bool = False

    def placed(self, placement: Placement) -> "LaunchWork":
        """Returns the work with device addresses."""
        place = placement.of
        clusters = tuple(
            tuple(replace(tile, inputs=tuple(map(place, tile.inputs)), out=place(tile.out)) for tile in tiles)
            for tiles in self.clusters
        )
        inputs = sorted((place(address), nbytes, which) for address, nbytes, which in self.inputs)
        return replace(self, clusters=clusters, inputs=tuple(inputs))


def choose(work: LaunchWork) -> list[int]:
    """Returns the executed cluster that stands for each cluster; a cluster that is executed stands for itself."""
    kinds: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for number, tiles in enumerate(work.clusters):
        kinds[tuple((tile.k_tiles, tile.columns) for tile in tiles)].append(number)
    chosen = [0] * len(work.clusters)
    for members in kinds.values():
        shapes: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
        for number in members:
            shapes[tuple((tile.rows, tile.columns) for tile in work.clusters[number])].append(number)
        if len(shapes) <= MOST_OF_A_KIND:
            for alike in shapes.values():
                for number in alike:
                    chosen[number] = alike[0]
            continue
        ranked = sorted(members, key=lambda number: _results(work.clusters[number]))
        step = (len(ranked) - 1) / (MOST_OF_A_KIND - 1)
        executed = [ranked[round(i * step)] for i in range(MOST_OF_A_KIND)]
        for number in ranked:
            chosen[number] = min(executed, key=lambda other: _distance(work, number, other))
    return chosen


def _results(tiles: Sequence[TileWork]) -> int:
    return sum(tile.rows * tile.columns for tile in tiles)


def _distance(work: LaunchWork, one: int, other: int) -> int:
    return abs(_results(work.clusters[one]) - _results(work.clusters[other]))


def everyone(
    executed: Sequence[ClusterTrace], work: LaunchWork, origins: Sequence[Origin]
) -> list[ClusterTrace]:
    """Returns traces of all clusters at `origins`, from those of the executed ones in grid order.

    Raises:
        NotAlike: a warp does not make equally many loads in every step of the main loop.
    """
    chosen = choose(work)
    whole = dict(zip(sorted(set(chosen)), executed, strict=True))
    traces = {source: begun(trace, _share(work, source)) for source, trace in whole.items()}
    movers = {
        source: _Mover(work, work.clusters[source], trace, whole[source]) for source, trace in traces.items()
    }
    return [
        replace(
            traces[source] if source == target else movers[source].moved(work.clusters[target]),
            origin=origins[target],
        )
        for target, source in enumerate(chosen)
    ]


@dataclass(frozen=True)
class Middle:
    """Traces from the middle of a launch of which only some tiles are replayed.

    Attributes:
        clusters: traces of tiles in the middle.
        before: pieces that were loaded before these tiles.
        reads: pieces that all tiles load, each once.
    """

    clusters: list[ClusterTrace]
    before: tuple[Piece, ...]
    reads: tuple[Piece, ...]


def in_the_middle(
    executed: Sequence[ClusterTrace], work: LaunchWork, origins: Sequence[Origin]
) -> Middle | None:
    """Returns None if all tiles are replayed. Arguments: see `everyone`."""
    chosen = choose(work)
    traces = dict(zip(sorted(set(chosen)), executed, strict=True))
    if all(_share(work, source) == 1 for source in traces):
        return None
    whole = {source: _Mover(work, work.clusters[source], trace) for source, trace in traces.items()}
    parts = {
        source: _Mover(work, work.clusters[source], begun(trace, _share(work, source)), trace)
        for source, trace in traces.items()
    }
    clusters, loads = [], []
    reads: dict[int, Piece] = {}
    for target, source in enumerate(chosen):
        tiles, share = work.clusters[target], _share(work, source)
        first = 0 if share == 1 else (len(tiles) - round(share * len(tiles))) // 2
        trace = parts[source].moved((*tiles[first:], *tiles[:first]))
        clusters.append(replace(trace, origin=origins[target]))
        of_warps = whole[source].loads_by_tile(tiles)
        loads.append([by_tile[:first] for by_tile in of_warps])
        for by_tile in of_warps:
            for pieces in by_tile:
                reads.update((piece[0], piece) for piece in pieces)
    waves = max((len(by_tile) for cluster in loads for by_tile in cluster), default=0)
    before = [
        piece
        for wave in range(waves)
        for cluster in loads
        for by_tile in cluster
        if wave < len(by_tile)
        for piece in by_tile[wave]
    ]
    return Middle(clusters, tuple(before), tuple(reads.values()))


def _share(work: LaunchWork, cluster: int) -> float:
    """Returns the replayed part of a cluster's events."""
    tiles = len(work.clusters[cluster])
    return 1.0 if work.most_tiles is None or tiles <= work.most_tiles else work.most_tiles / tiles


def begun(trace: ClusterTrace, share: float) -> ClusterTrace:
    """Returns the first share of every warp's tiles, with a mark at half of it.

    Warps with few events are independent of tiles, and so are the events of a warp before its first tile; all of these
    are included. An epilogue warp can have more events before its first tile than in ten tiles. Its events differ from tile to
    tile, so it has no mark and a larger share, if other warps of the cluster load or multiply.
    """
    if share == 1:
        return trace
    works = {id(events): any(event[0] in WORK for event in events) for cta in trace.warps for events in cta}
    some_work = any(works.values())

    def first(events: list[Event]) -> list[Event]:
        if len(events) <= FEW_EVENTS:
            return events
        start = next((place for place, event in enumerate(events) if event[0] in OF_TILES), 0)
        of_tiles = ceil(share * (len(events) - start))
        if some_work and not works[id(events)]:
            return events[: start + ceil(MORE_EVENTS * of_tiles)]
        half, end = start + of_tiles // 2, start + of_tiles
        return [*events[:half], (Op.MARK,), *events[half:end]]

    return replace(trace, warps=[[first(events) for events in cta] for cta in trace.warps], share=share)


def moved(trace: ClusterTrace, work: LaunchWork, source: int, target: int) -> ClusterTrace:
    """Returns the trace of cluster `source` as that of `target`, a cluster of the same kind: only addresses change.

    Raises:
        NotAlike: a warp does not make equally many loads in every step of the main loop.
    """
    return (
        trace if source == target else _Mover(work, work.clusters[source], trace).moved(work.clusters[target])
    )


class _Mover:
    """Moves the events of a cluster to the tiles of other clusters."""

    def __init__(
        self,
        work: LaunchWork,
        source: Sequence[TileWork],
        trace: ClusterTrace,
        whole: ClusterTrace | None = None,
    ):
        """`whole`: the cluster with all of its tiles, if the trace has only the first ones."""
        self._work, self._source, self._trace, self._whole = work, source, trace, whole or trace
        self._target = source
        self._starts = [address for address, _, _ in work.inputs]
        self._order: dict[
            int, tuple[list[int], list[int]]
        ] = {}  # input -> first addresses of tiles in it, and tile numbers

    @cached_property
    def _plan(self) -> list[list[tuple[list[Event], list[int], list[int]]]]:
        """For every warp: its events, the positions of events with addresses, and the tile of each load."""
        return [
            [
                (
                    events,
                    [place for place, event in enumerate(events) if event[0] in MOVING],
                    self._of_loads(whole, rank),
                )
                for events, whole in zip(cta, self._whole.warps[rank], strict=True)
            ]
            for rank, cta in enumerate(self._trace.warps)
        ]

    def moved(self, target: Sequence[TileWork]) -> ClusterTrace:
        """Returns the trace of a cluster with these tiles.

        Raises:
            NotAlike: a warp does not make equally many loads in every step of the main loop.
        """
        self._target = target
        return replace(self._trace, warps=[[self._warp(*warp) for warp in cta] for cta in self._plan])

    def _steps(self, rank: int) -> list[int]:
        """Returns the steps of each tile's main loop that CTA ``rank`` of the cluster executes."""
        split = self._work.split
        if split == 1:
            return [tile.k_tiles for tile in self._source]
        ends = [[i * tile.k_tiles // split for i in (rank, rank + 1)] for tile in self._source]
        return [max(end - first, 1) for first, end in ends]

    def _loads_of_tiles(self, events: list[Event], rank: int) -> list[int]:
        """Returns the number of loads per tile of a warp of CTA ``rank``: equally many in every step."""
        loads = sum(event[0] is Op.LOAD for event in events)
        if not loads:
            return []
        steps = self._steps(rank)
        of_step, rest = divmod(loads, sum(steps))
        if rest:
            raise NotAlike(
                f"a warp makes {loads} loads in {sum(steps)} steps of its main loops: clusters cannot stand for others"
            )
        return [of_step * count for count in steps]

    def _of_loads(self, events: list[Event], rank: int) -> list[int]:
        """Returns the tile of every load of a warp of CTA ``rank`` of the cluster.

        Each input's loads go from tile to tile. Different inputs may be at different tiles: weights of several tiles
        are loaded early if the previous launch computes the tokens.
        """
        counts = self._loads_of_tiles(events, rank)
        in_order = [tile for tile, count in enumerate(counts) for _ in range(count)]
        inputs, steps = self._inputs_of_loads(events), self._steps(rank)
        loads = Counter(inputs)
        if None in loads or any(count % sum(steps) for count in loads.values()):
            return in_order
        tiles = {
            which: iter([tile for tile, k in enumerate(steps) for _ in range(count // sum(steps) * k)])
            for which, count in loads.items()
        }
        return [next(tiles[which]) for which in inputs]

    def _inputs_of_loads(self, events: list[Event]) -> list[int | None]:
        """Returns the input of every load.

        A load out of bounds, without pieces, reads the input of its tensor map's other loads.
        """
        loads = [event for event in events if event[0] is Op.LOAD]
        found = [self._input_of(event[1][0][0]) if event[1] else None for event in loads]
        known = {event[5]: which for event, which in zip(loads, found, strict=True) if which is not None}
        return [
            known.get(event[5]) if which is None else which for event, which in zip(loads, found, strict=True)
        ]

    def _warp(self, events: list[Event], places: list[int], tile_of_load: list[int]) -> list[Event]:
        result, load, tile = events.copy() if places else events, 0, 0
        for place in places:
            event = events[place]
            op, pieces = event[0], event[1]
            if op is Op.LOAD:
                event = (op, self._inputs(pieces, tile_of_load[load]), *event[2:])
                load += 1
            elif op is Op.READ:
                event = (op, pieces, self._lines(event[2]))
            elif op is Op.PREFETCH:
                event = (op, self._inputs(pieces, tile_of_load[load - 1]), *event[2:])
            elif not self._is_input(pieces):
                tile = self._tile_of_result(pieces, tile)
                shift = self._target[tile].out - self._source[tile].out
                event = (op, tuple((address + shift, *size) for address, *size in pieces), *event[2:])
            elif self._work.scatters:
                event = (op, self._lines(pieces), *event[2:])
            else:
                event = (op, self._inputs(pieces, tile), *event[2:])
            result[place] = event
        return result

    def loads_by_tile(self, target: Sequence[TileWork]) -> list[list[list[Piece]]]:
        """Returns, for each warp, its loads for each tile of a target; empty if it does not load."""
        self._target = target
        return [
            self._loads_of_warp(events, rank) for rank, cta in enumerate(self._trace.warps) for events in cta
        ]

    def _loads_of_warp(self, events: list[Event], rank: int) -> list[list[Piece]]:
        loads = [event[1] for event in events if event[0] is Op.LOAD]
        found: list[list[Piece]] = [[] for _ in self._source] if loads else []
        for pieces, tile in zip(loads, self._of_loads(events, rank), strict=True):
            found[tile] += self._inputs(pieces, tile)
        return found

    def _inputs(self, pieces: tuple[Piece, ...], tile: int) -> tuple[Piece, ...]:
        source, target = self._source[tile].inputs, self._target[tile].inputs
        result = []
        for address, *size in pieces:
            which = self._input_of(address)
            shift = 0 if which is None else target[which] - source[which]
            result.append((address + shift, *size))
        return tuple(result)

    def _lines(self, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """Returns the lines that threads read, each moved with the last tile that starts at or before it."""
        result = []
        for address, *size in pieces:
            which = self._input_of(address) if self._source else None
            if which is not None:
                tile = self._tile_of_line(which, address)
                address += self._target[tile].inputs[which] - self._source[tile].inputs[which]
            result.append((address, *size))
        return tuple(result)

    def _tile_of_line(self, which: int, address: int) -> int:
        if which not in self._order:
            begins = sorted((tile.inputs[which], number) for number, tile in enumerate(self._source))
            self._order[which] = [begin for begin, _ in begins], [number for _, number in begins]
        starts, numbers = self._order[which]
        end = address if self._work.scatters else address + LINE - 1
        return numbers[max(0, bisect_right(starts, end) - 1)]

    def _input_of(self, address: int) -> int | None:
        """Returns the input that contains an address."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        start, size, which = self._work.inputs[index]
        return which if address < start + size else None

    def _is_input(self, pieces: tuple[Piece, ...]) -> bool:
        """Whether the first piece belongs to an input."""
        return bool(pieces) and self._input_of(pieces[0][0]) is not None

    def _tile_of_result(self, pieces: tuple[Piece, ...], first: int) -> int:
        """Returns the tile that a warp stores; it stores its tiles in order."""
        if not pieces:
            return first
        for index in range(first, len(self._source)):
            if self._contains(self._source[index], pieces[0][0]):
                return index
        return first

    def _contains(self, tile: TileWork, address: int) -> bool:
        """Whether a line at an address holds results of a tile."""
        offset = address - tile.out + LINE
        far, near = self._work.row_bytes, self._work.column_bytes
        counts = (tile.rows, tile.columns)
        if far < near:
            far, near, counts = near, far, counts[::-1]
        line, place = divmod(offset, far)
        inside = 0 <= line < counts[0] and place < counts[1] * near + LINE
        return inside or (line == counts[0] and place < LINE)
