"""The timing model of launches in a CUDA graph: gaps, programmatic launches, contents of L2, and placement of memory."""

from dataclasses import replace

import pytest

from nvfp4_cute.bench import cases, ours
from nvfp4_cute.bench.operands import empty_operands
from nvfp4_cute.emulator.memory import Range
from nvfp4_cute.emulator.record.events import ClusterTrace, LaunchTrace, Op, Pace
from nvfp4_cute.emulator.record.placement import Placement
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.timing_figures import constants_of
from nvfp4_cute.roofline.modelled import modelled_times
from nvfp4_cute.roofline.speed_of_light import physical_floor
from nvfp4_cute.timing.replay import replay, replay_chain

B200 = constants_of(targets.B200)
TENSOR, NBYTES = 1 << 22, 64 << 10
WAIT, TRIGGER = (Op.GRID_WAIT,), (Op.GRID_TRIGGER,)


def sleep(cycles: float) -> tuple:
    """A warp that does nothing for `cycles`."""
    return (Op.SLEEP, cycles / B200.clock_hz * 1e9)


def launch(*events: tuple, ctas: int = 1, per_sm: int = 1, programmatic: bool = False) -> LaunchTrace:
    """CTAs with one warp each, all with the same events."""
    clusters = [ClusterTrace((i, 0, 0), [[list(events)]]) for i in range(ctas)]
    return LaunchTrace("k", per_sm, clusters, programmatic, ((TENSOR, NBYTES),))


def lines(first: int, count: int, nbytes: int = 128) -> tuple:
    """Consecutive pieces of a tensor."""
    return tuple((TENSOR + first + i * nbytes, nbytes) for i in range(count))


def read(pieces: tuple, number: int = 1) -> tuple[tuple, tuple]:
    """A load and a wait for it."""
    return (Op.READ, number, pieces), (Op.USE, number)


def test_a_chain_of_one_takes_what_a_launch_takes():
    trace = launch(sleep(3000), *read(lines(0, 4)), ctas=200)
    chain, alone = replay_chain(B200, [trace]), replay(B200, trace)
    assert chain.cycles == alone.cycles and chain.launches[0].sm_busy == alone.sm_busy


def test_a_launch_waits_for_the_one_before_and_their_times_add_up():
    chain = replay_chain(B200, [launch(sleep(3000)), launch(sleep(5000), ctas=2), launch(sleep(1000))])
    assert chain.cycles == pytest.approx(B200.launch + 9000 + 2 * B200.next_launch)
    assert [timing.cycles for timing in chain.launches] == pytest.approx(
        [B200.launch / 2 + 3000, B200.next_launch + 5000, B200.next_launch + 1000 + B200.launch / 2]
    )


def test_a_programmatic_launch_overlaps_until_it_waits():
    first = launch(TRIGGER, sleep(9000), ctas=2)
    second = launch(sleep(2000), WAIT, sleep(500), programmatic=True)
    ended = B200.launch / 2 + 9000
    assert replay_chain(B200, [first, second]).cycles == pytest.approx(
        ended + B200.next_launch + 500 + B200.launch / 2
    )
    serial = replay_chain(B200, [first, replace(second, programmatic=False)]).cycles
    assert serial == pytest.approx(ended + B200.next_launch + 2500 + B200.launch / 2)


def test_a_programmatic_launch_has_gaps_of_its_own():
    quick = replace(B200, next_programmatic=100.0, released=50.0)
    waits = launch(sleep(2000), WAIT, programmatic=True)
    assert replay_chain(quick, [launch(TRIGGER, sleep(9000)), waits]).cycles == pytest.approx(
        quick.launch + 9050
    )
    assert replay_chain(quick, [launch(sleep(9000)), waits]).cycles == pytest.approx(quick.launch + 11100)
    plain = replace(waits, programmatic=False)
    assert replay_chain(quick, [launch(sleep(9000)), plain]).cycles == pytest.approx(
        quick.launch + 9000 + quick.next_launch + 2000
    )


def test_a_warp_issues_no_faster_than_its_machine_code_says():
    computes = launch((Op.COMPUTE, 1000.0, 0.0, 0.0, 10.0, 0, 400.0))
    once, slow, many = Pace(), Pace(issue=1, cycles=3), Pace(issue=2, cycles=1)
    cycles = [
        replay(replace(B200, follows_stalls=follows), replace(computes, main=main, rest=rest)).cycles - B200.launch
        for follows, main, rest in (
            (True, once, once), (True, many, many), (True, slow, slow), (True, slow, once), (True, once, slow), (False, slow, slow),
        )
    ]  # fmt: skip
    assert cycles == pytest.approx([1000, 2000, 3000, 1800, 2200, 1000])


def test_without_a_trigger_the_end_of_the_first_starts_the_second():
    second = launch(sleep(2000), WAIT, programmatic=True)
    cycles = replay_chain(B200, [launch(sleep(9000)), second]).cycles
    assert cycles == pytest.approx(B200.launch + 9000 + B200.next_launch + 2000)


def test_a_programmatic_launch_starts_only_where_there_is_room():
    full = launch(TRIGGER, sleep(9000), ctas=B200.num_sms)
    second = launch(sleep(2000), WAIT, programmatic=True)
    crowded, roomy = (
        replay_chain(B200, [replace(full, ctas_per_sm=per_sm), replace(second, ctas_per_sm=per_sm)]).cycles
        for per_sm in (1, 2)
    )
    assert roomy == pytest.approx(B200.launch + 9000 + B200.next_launch)
    assert crowded == pytest.approx(B200.launch + 9000 + B200.cta_start + 2000)


def test_a_launch_starts_in_the_room_of_one_whose_first_tiles_were_replayed():
    """Half of the first launch's events are known: one warp needs no others, another one waits for an unknown event."""
    half = [(Op.SLEEP, 100 / B200.clock_hz * 1e9)] * 40
    waits = [(Op.INIT, 0, 1), TRIGGER, (Op.MARK,), (Op.WAIT, 0, 1)]
    warps = [[TRIGGER, *half, (Op.MARK,), *half], waits]
    clusters = [ClusterTrace((i, 0, 0), [warps], share=0.5) for i in range(B200.num_sms)]
    first = LaunchTrace("k", 1, clusters, False, ((TENSOR, NBYTES),))
    second = launch(sleep(2000), WAIT, programmatic=True)
    cycles = replay_chain(B200, [first, second]).cycles
    assert cycles == pytest.approx(B200.launch + 16000 + B200.cta_start + 2000)


def test_a_launch_that_ends_early_has_not_ended_before_the_one_it_overlaps():
    first = launch(TRIGGER, sleep(9000))
    chain = replay_chain(B200, [first, launch(sleep(100), programmatic=True), launch(sleep(100))])
    assert chain.cycles == pytest.approx(B200.launch + 9000 + B200.next_launch + 100)


def test_what_a_launch_wrote_the_next_one_finds_in_l2_in_other_pieces():
    writer = launch((Op.WRITE, lines(0, 512)))
    reader = launch(*read(((TENSOR + 1056, 4096),)))
    found, missed = (replay_chain(B200, [first, reader]).launches[1] for first in (writer, launch(sleep(10))))
    assert found.hbm_bytes == 0 and missed.hbm_bytes == 4096
    assert found.cycles < missed.cycles


def test_what_had_to_make_room_is_read_again():
    small = replace(B200, l2_bytes=NBYTES // 2)
    writer = launch((Op.WRITE, lines(0, 512)))
    start, end = (launch(*read(((TENSOR + place, 4096),))) for place in (0, NBYTES - 4096))
    assert replay_chain(small, [writer, start]).hbm_bytes == 4096
    assert replay_chain(small, [writer, end]).hbm_bytes == 0


def test_l1_and_tensor_maps_are_of_one_launch():
    reader = launch(*read(lines(0, 4)), *read(lines(0, 4), 2))
    chain = replay_chain(B200, [reader, reader])
    assert [timing.l2_bytes for timing in chain.launches] == [512, 512]
    assert [timing.hbm_bytes for timing in chain.launches] == [512, 0]


def test_memory_stays_where_it_is_when_more_is_allocated():
    first, second = Range(1000, 100, "x", True), Range(5000, 600, "y", True)
    placement = Placement([first, second])
    before = placement.of(1010), placement.of(5599)
    placement.add([Range(4900, 800, "z", True), first])
    assert (placement.of(1010), placement.of(5599)) == before
    parts = [(1000, 1100), (4900, 5000), (5000, 5600), (5600, 5700)]
    moved = sorted((placement.of(start), placement.of(start) + end - start) for start, end in parts)
    assert all(end <= start for (_, end), (start, _) in zip(moved, moved[1:], strict=False))


# ---- conservation ----------------------------------------------------------------------------------------------------
@pytest.mark.sampled(10)
@pytest.mark.parametrize("target", targets.TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize(("loaded", "stored"), [(4000, 0), (0, 4000), (2000, 2000), (3000, 300)])
def test_traffic_is_never_faster_than_memory_was_measured(target, loaded, stored):
    """Every CTA loads and stores its own KB all at once, far more than L2 can transfer in that time."""
    constants = constants_of(target)
    ctas = constants.num_sms
    piece = 16 << 10

    def cluster(i: int) -> ClusterTrace:
        places = lambda first, count: [
            (((first + (i * count + j)) << 14) + TENSOR, piece) for j in range(count)
        ]
        loads, stores = places(0, loaded // 16), places(ctas * loaded // 16, stored // 16)
        return ClusterTrace((i, 0, 0), [[[(Op.ASYNC_READ, tuple(loads)), (Op.STORE, tuple(stores), 0)]]])

    trace = LaunchTrace("k", 1, [cluster(i) for i in range(ctas)])
    timing = replay(constants, trace)
    nbytes = ctas * (loaded // 16 + stored // 16) * piece
    rate = nbytes / ((timing.cycles - constants.launch) / constants.clock_hz)
    assert rate <= 1.000001 * target.floor_bandwidth_bytes_per_s


def test_results_that_the_next_launch_uses_may_stay_in_l2():
    nbytes = 32 << 20
    tensor = ((TENSOR, nbytes),)
    write = (Op.STORE, tuple((TENSOR + i, 1 << 14) for i in range(0, nbytes, 1 << 14)), 0)
    writer = LaunchTrace("w", 1, [ClusterTrace((0, 0, 0), [[[write]]])], False, tensor)
    alone = replay_chain(B200, [writer]).cycles
    assert alone >= B200.launch + nbytes / B200.hbm_peak
    fast = replace(B200, l2_write_bandwidth=1e6, sm_bandwidth=1e6)
    short = launch(sleep(10))
    assert replay_chain(fast, [writer, short]).cycles < replay_chain(fast, [writer]).cycles


CAUGHT = (
    ("RTX 5090", "nvfp4_group_gemm case 1"),
    ("B200", "Qwen3-30B-A3B down prefill"),
)
"""Cases that were modelled at 103.7 % of the speed of light, and at 8.04 TB/s."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "containing"), CAUGHT, ids=[name for name, _ in CAUGHT])
def test_cases_that_were_faster_than_light_are_not(name, containing):
    (case,), target = cases.select(containing=containing), targets.lookup(name)
    run = lambda backend: ours.prepare(case, empty_operands(case), backend).run()
    (timing,) = modelled_times(run, target, by_representatives=True)
    assert timing.us >= physical_floor(case.work, target).us
