"""Modelled times of kernels on a GPU that need not be present: launches are recorded on the emulator and replayed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nvfp4_cute.backends import emulator
from nvfp4_cute.emulator.record.events import LaunchTrace
from nvfp4_cute.emulator.record.representatives import LaunchWork, NotAlike, TileWork
from nvfp4_cute.experts.routing import RouteTask
from nvfp4_cute.gpus.targets import B200, Target
from nvfp4_cute.gpus.timing_figures import constants_of
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.launch.task import Launch, Task
from nvfp4_cute.roofline import row_work, tile_work
from nvfp4_cute.timing.clock import Chain
from nvfp4_cute.timing.replay import replay_chain
from nvfp4_cute.timing.result import ChainTiming, Timing

REPLAYED_STEPS, REPLAYED_TILES = 320, range(4, 11)
"""Of a grouped GEMM whose clusters have many tiles, only some are replayed.

These are the first tiles of each cluster, and equally many in the middle, when L2 holds the data loaded before: this
number of steps of the main loop, and this number of tiles. Tiles after the first ones take the time of half of those in
the middle. Full replays differ by 1 to 3 % (``tests/roofline/test_modelled.py``), and most where device memory bounds a
launch: clusters with a tile more than others finish it faster than the tiles before.
"""
MOST_STEPS = 200_000
"""Steps of all clusters up to which all tiles are replayed. That takes about a minute."""
OTHER_INPUTS = 0.05
"""Largest relative difference between the input parts per tile in the middle and over all tiles.

Tiles of larger groups share more parts, so above this difference the middle cannot stand for all.
"""


def modelled_times(
    call: Callable[[str], object],
    target: Target = B200,
    *,
    progress: Callable[[int, int], None] | None = None,
    timeline: bool = False,
    all_layouts: bool = False,
    by_representatives: bool = False,
    with_data: bool = False,
) -> list[Timing]:
    """Models the times of the launches of a call of public operations.

    Args:
        call: gets the name of a backend to pass on, and uses CPU tensors.
        target: the GPU.
        progress: called with (CTAs finished, CTAs launched) as a launch is recorded.
        timeline: keep the actions of every warp, for ``timing.trace``.
        all_layouts: replay each launch in every layout of memory (``Timing.us_by_layout``), not only in the first.
        by_representatives: execute only one of several equal clusters (``emulator.record.representatives``), for
            launches that are too large to execute completely. Their times differ from those of a full execution by one
            or two percent. If clusters cannot stand for each other, as with MMAs of 96 elements, all are executed.
        with_data: also compute the results of the executed clusters.

    Raises:
        EmulatorError: the kernel broke a rule of the machine.
        UnsupportedTarget: there is no kernel for the GPU.
    """
    options: Any = {"timing": True, "timeline": timeline, "all_layouts": all_layouts, "with_data": with_data}
    if by_representatives:
        try:
            with emulator.observe(progress, work_of=_work_of, **options) as observer:
                call(f"emulator:{target.name}")
            return observer.timings
        except NotAlike:
            pass
    with emulator.observe(progress, **options) as observer:
        call(f"emulator:{target.name}")
    return observer.timings


def modelled_chain(
    call: Callable[[str], object],
    target: Target = B200,
    *,
    progress: Callable[[int, int], None] | None = None,
    timeline: bool = False,
) -> ChainTiming:
    """Models the time of all launches of a call of public operations, as in a CUDA graph with a cold L2.

    Later launches find the results of earlier ones in L2. Only one of several equal clusters is executed. Results are
    not computed, except for indices that kernels compute, so the rows of experts follow the passed ids. Work of torch's
    own kernels in the call is not in the time.

    Args:
        call: gets the name of a backend to pass on, and uses CPU tensors.
        target, progress, timeline: see `modelled_times`.

    Raises:
        EmulatorError: a kernel broke a rule of the machine.
        UnsupportedTarget: there is no kernel for the GPU.
        ValueError: the call launches nothing.
    """
    return modelled_launches(recorded_chain(call, target, progress), target, timeline=timeline)


def modelled_launches(
    traces: Sequence[LaunchTrace], target: Target, *, timeline: bool = False, explained: bool = True
) -> ChainTiming:
    """Models the time of recorded launches, see `modelled_chain`. `explained`: also returns the causes of waits."""
    constants = constants_of(target, multiplies=any(trace.multiplies for trace in traces))
    return replay_chain(constants, traces, timeline=timeline, explained=explained)


def recorded_chain(
    call: Callable[[str], object], target: Target, progress: Callable[[int, int], None] | None = None
) -> list[LaunchTrace]:
    """Returns the traces of all launches of a call, which `modelled_chain` replays. Raises its errors."""
    chain = Chain()
    try:
        with emulator.observe(progress, timing=True, work_of=_work_of, chain=chain):
            call(f"emulator:{target.name}")
    except NotAlike:
        chain = Chain()
        with emulator.observe(progress, timing=True, chain=chain):
            call(f"emulator:{target.name}")
    if not chain.traces:
        raise ValueError("the call launches nothing whose time could be modelled")
    return chain.traces


def _work_of(task: Task, launch: Launch, arch: str) -> list[LaunchWork | None]:
    work = tile_work.of_task(task, launch, arch) or row_work.of_rows(task)
    if isinstance(task, RouteTask):
        task.reference()  # later launches depend on the choices of all tokens
    if work is not None and isinstance(task, GroupedTask):
        work = replace(work, most_tiles=replayed_tiles(work))
    decodes_first = launch.plan is not None and launch.plan.kernel.key.config.decode_first
    return [None, work] if decodes_first else [work]


def replayed_tiles(work: LaunchWork) -> int | None:
    """Returns how many tiles of a cluster are replayed at its beginning and in its middle; None for all tiles.

    All are replayed if there are few steps, if these would be all of them, or if the middle differs from the rest.
    """
    if sum(tile.k_tiles for tiles in work.clusters for tile in tiles) <= MOST_STEPS:
        return None
    steps = max((tile.k_tiles for tiles in work.clusters for tile in tiles), default=1)
    count = min(max(-(-REPLAYED_STEPS // steps), REPLAYED_TILES[0]), REPLAYED_TILES[-1])
    if max(map(len, work.clusters)) < 2 * count:
        return None
    middle = [tiles[max(len(tiles) - count, 0) // 2 :][:count] for tiles in work.clusters]
    change = _parts_of_a_tile(middle) / _parts_of_a_tile(work.clusters) - 1
    return count if abs(change) <= OTHER_INPUTS else None


def _parts_of_a_tile(clusters: Sequence[Sequence[TileWork]]) -> float:
    """Returns the number of distinct input parts per tile."""
    tiles = [tile for cluster in clusters for tile in cluster]
    return len({part for tile in tiles for part in enumerate(tile.inputs)}) / len(tiles)
