"""Modelled times of kernels on a GPU that need not be there: their launches, recorded on the emulator and replayed."""

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
from nvfp4_cute.operands.grouped import GroupedOperands
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.roofline import row_work, tile_work
from nvfp4_cute.timing.clock import Chain
from nvfp4_cute.timing.replay import replay_chain
from nvfp4_cute.timing.result import ChainTiming, Timing

REPLAYED_STEPS, REPLAYED_TILES = 320, range(4, 11)
"""Of a grouped GEMM whose clusters have many tiles, the first ones of each are replayed, and as many in the middle, when L2 has
what was loaded before: so many steps of the main loop, and so many tiles. Those behind the first ones take what half of those in
the middle took. Full replays say 1 to 3 % more (``tests/roofline/test_modelled.py``)."""


OTHER_INPUTS = 0.05
"""By how much the parts of inputs that a tile takes may differ between the tiles in the middle and all: tiles of larger groups
share more of them, so that their bytes cannot stand for those of all."""


def modelled_times(
    call: Callable[[str], object],
    target: Target = B200,
    *,
    progress: Callable[[int, int], None] | None = None,
    timeline: bool = False,
    all_layouts: bool = False,
    by_representatives: bool = False,
) -> list[Timing]:
    """Model the times of the launches that a call of public operations makes. Their results are not computed.

    Args:
        call: gets the name of a backend to pass on, and uses CPU tensors.
        target: the GPU.
        progress: called with (CTAs finished, CTAs launched) as a launch is recorded.
        timeline: keep what every warp did when, for ``timing.trace``.
        all_layouts: replay each launch in every layout of memory (``Timing.us_by_layout``), not only in the first.
        by_representatives: execute of clusters that do alike work one (``emulator.record.representatives``): for launches so
            large that executing all takes too long. Their times differ from those of a full execution by a percent or two.
            Where clusters do not stand for each other, such as with MMAs of 96 elements, all are executed.

    Raises:
        EmulatorError: the kernel broke a rule of the machine. UnsupportedTarget: there is no kernel for the GPU.
    """
    options: Any = {"timing": True, "timeline": timeline, "all_layouts": all_layouts}
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
    """Model the time of all launches that a call of public operations makes, as a CUDA graph of them would take on a cold L2.

    What one launch wrote, the next ones find in L2. Of clusters that do alike work one is executed. Results are not computed,
    but for indices that kernels compute: where rows of experts lie follows the ids that are passed. Work that the call has
    done by torch's own kernels is not in the time.

    Args:
        call: gets the name of a backend to pass on, and uses CPU tensors.
        target, progress, timeline: as of `modelled_times`.

    Raises:
        EmulatorError: a kernel broke a rule of the machine. UnsupportedTarget: there is no kernel for the GPU.
        ValueError: the call launches nothing.
    """
    return modelled_launches(recorded_chain(call, target, progress), target, timeline=timeline)


def modelled_launches(
    traces: Sequence[LaunchTrace], target: Target, *, timeline: bool = False, explained: bool = True
) -> ChainTiming:
    """Model the time of launches that were recorded: see `modelled_chain`. `explained`: with what warps waited for."""
    constants = constants_of(target, multiplies=any(trace.multiplies for trace in traces))
    return replay_chain(constants, traces, timeline=timeline, explained=explained)


def recorded_chain(
    call: Callable[[str], object], target: Target, progress: Callable[[int, int], None] | None = None
) -> list[LaunchTrace]:
    """What `modelled_chain` replays: the traces of all launches of a call. Raises as it does."""
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
        task.reference()  # what later launches do follows from the choices of all tokens
    if work is not None and isinstance(task, GroupedTask):
        work = replace(work, most_tiles=replayed_tiles(work))
    decodes_first = launch.plan is not None and launch.plan.kernel.key.config.decode_first
    return [None, work] if decodes_first else [work]


def replayed_tiles(work: LaunchWork) -> int | None:
    """Tiles of a cluster that are replayed at the beginning and in the middle; None for all: where those are not half of them, or
    where the middle is not like the rest."""
    steps = max((tile.k_tiles for tiles in work.clusters for tile in tiles), default=1)
    count = min(max(-(-REPLAYED_STEPS // steps), REPLAYED_TILES[0]), REPLAYED_TILES[-1])
    if max(map(len, work.clusters)) < 2 * count:
        return None
    middle = [tiles[max(len(tiles) - count, 0) // 2 :][:count] for tiles in work.clusters]
    change = _parts_of_a_tile(middle) / _parts_of_a_tile(work.clusters) - 1
    return count if abs(change) <= OTHER_INPUTS else None


def _parts_of_a_tile(clusters: Sequence[Sequence[TileWork]]) -> float:
    """Different parts of inputs, for a tile."""
    tiles = [tile for cluster in clusters for tile in cluster]
    return len({part for tile in tiles for part in enumerate(tile.inputs)}) / len(tiles)


def modelled_time(
    problem: GroupedProblem,
    operands: GroupedOperands,
    config: KernelConfig | None = None,
    target: Target = B200,
) -> Timing:
    """Model the time of a grouped GEMM with a configuration of one's own.

    Args:
        problem, operands: as the operation checked them; on the CPU. The result is not computed: ``out`` holds zeros
            and rubbish afterwards.
        config: how; None takes what a call without one does.
        target: the GPU.

    Raises:
        ValueError: CUDA operands. EmulatorError: the kernel broke a rule of the machine.
    """
    return modelled_times(lambda _: emulator.run(GroupedTask(problem, operands, config), target), target)[-1]
