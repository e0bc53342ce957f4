"""roofline.modelled: launches of many tiles, of which only some are replayed."""

from dataclasses import replace

import pytest

from nvfp4_cute.bench import cases, ours
from nvfp4_cute.bench.operands import empty_operands
from nvfp4_cute.emulator.record.events import ClusterTrace, LaunchTrace, Op
from nvfp4_cute.emulator.record.representatives import LaunchWork, TileWork, begun, in_the_middle
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.timing_figures import constants_of
from nvfp4_cute.roofline import modelled
from nvfp4_cute.timing.replay import replay, replay_chain

B200 = constants_of(targets.B200)


def test_a_warp_that_does_nothing_for_tiles_is_there_whole():
    short, long = [(Op.COMPUTE, i, 0, 0, 0, 0) for i in range(40)], [(Op.ARRIVE, 8, i) for i in range(1000)]
    (cta,) = begun(ClusterTrace((0, 0, 0), [[short, long]]), 0.1).warps
    assert [event for event in cta[0] if event != (Op.MARK,)] == short
    assert [event for event in cta[1] if event != (Op.MARK,)] == long[:100]


def test_what_a_warp_does_before_its_first_tile_is_not_part_of_its_tiles():
    """An epilogue warp has 80 events of setup and 10 per tile. 30 % of tiles are kept: 12 of 40, and 6 of them before the mark."""
    setup = [(Op.READ, i, ()) for i in range(80)]
    tile = lambda i: [(Op.WAIT, 8, i), *((Op.WRITE, (i, j)) for j in range(9))]
    (((warp,),),) = [begun(ClusterTrace((0, 0, 0), [[[*setup, *sum(map(tile, range(40)), [])]]]), 0.3).warps]
    mark = warp.index((Op.MARK,))
    assert [sum(event[0] is Op.WAIT for event in part) for part in (warp[:mark], warp[mark:])] == [6, 6]


def pair(tiles: int, number: int, pause: float) -> ClusterTrace:
    """A CTA of two warps: one produces a tile in ``pause`` cycles, and the other one consumes it in a third of that."""
    sleep = lambda cycles: (Op.SLEEP, cycles / B200.clock_hz * 1e9)
    producer = [event for _ in range(tiles) for event in (sleep(pause), (Op.ARRIVE, 8, 1))]
    consumer = [event for i in range(tiles) for event in ((Op.WAIT, 8, i + 1), sleep(pause / 3))]
    return ClusterTrace((number, 0, 0), [[[(Op.INIT, 8, 1), *producer], consumer]])


@pytest.mark.parametrize("kept", [40, 60])
def test_clusters_that_are_there_for_some_tiles_take_the_time_of_the_whole(kept):
    tiles = [100 + 20 * (i % 2) for i in range(20)]
    whole = [pair(count, i, 900.0) for i, count in enumerate(tiles)]
    cut = [begun(cluster, kept / count) for cluster, count in zip(whole, tiles, strict=True)]
    times = [replay(B200, LaunchTrace("k", 1, clusters)).cycles for clusters in (whole, cut)]
    assert times[1] == pytest.approx(times[0], rel=0.02)


def test_a_warp_with_a_long_setup_does_not_change_the_time_of_the_other_tiles():
    """The consumer does as much before its first tile as for 40 tiles. It has no mark, because the producer loads."""
    whole = pair(100, 0, 900.0)
    producer, consumer = whole.warps[0]
    loads = [one for event in producer for one in ((Op.ASYNC_READ, ()), event)[event[0] is not Op.SLEEP :]]
    setup = [(Op.READ, i, ()) for i in range(80)]
    whole = replace(whole, warps=[[loads, [*setup, *consumer]]])
    cut = begun(whole, 0.3)
    assert [(Op.MARK,) in warp for warp in cut.warps[0]] == [True, False]
    times = [replay(B200, LaunchTrace("k", 1, [cluster])).cycles for cluster in (whole, cut)]
    assert times[1] == pytest.approx(times[0], rel=0.02)


@pytest.mark.parametrize(
    ("most", "shared", "expected"), [(0, 2, modelled.REPLAYED_TILES[-1]), (0, 5, None), (60 * 16, 2, None)]
)
def test_all_tiles_are_replayed_if_the_middle_shares_more_or_steps_are_few(
    most, shared, expected, monkeypatch
):
    """Pairs of 60 tiles share weights. In the middle, ``shared`` of ten tiles do."""
    pairs = [i // 2 for i in range(25)]
    weights = [*pairs, *(100 + i // shared for i in range(10)), *(200 + i for i in pairs)]
    tiles = tuple(TileWork(16, 128, 128, (1 << 20 | which,), 0) for which in weights)
    monkeypatch.setattr(modelled, "MOST_STEPS", most)
    assert modelled.replayed_tiles(LaunchWork((tiles,), (), 256, 2)) == expected


def test_all_that_tiles_load_is_known_where_some_are_replayed():
    """Sixteen tiles of a cluster, of which four are replayed. Pairs of tiles load the same weights."""
    weights = [4096 + 512 * (i // 2) for i in range(16)]
    tiles = tuple(TileWork(1, 128, 128, (address,), 0) for address in weights)
    work = LaunchWork((tiles,), ((4096, 4096, 0),), 256, 2, most_tiles=4)
    loads = [(Op.LOAD, ((address, 512),), 512, (), (), 0, 0) for address in weights]
    middle = in_the_middle([ClusterTrace((0, 0, 0), [[loads]])], work, [(0, 0, 0)])
    assert middle is not None
    assert sorted(middle.reads) == [(4096 + 512 * i, 512) for i in range(8)]
    assert middle.before == tuple((address, 512) for address in weights[:6])


@pytest.mark.parametrize("is_written", [False, True])
def test_a_launch_is_no_faster_than_device_memory_sends_what_tiles_load(is_written):
    """The replayed tiles load nothing. Data written by a launch comes from L2."""
    cut = [begun(pair(100, 0, 60.0), 0.5)]
    reads = ((1 << 20, 64 << 20),)
    timing = replay(B200, LaunchTrace("k", 1, cut, reads=reads, writable=reads if is_written else ()))
    us = (64 << 20) / targets.B200.floor_bandwidth_bytes_per_s * 1e6
    assert (timing.us > us) is not is_written
    assert timing.hbm_bytes == (0 if is_written else 64 << 20)


@pytest.mark.parametrize("waits", [False, True])
def test_device_memory_sends_what_two_launches_read_one_after_the_other(waits):
    """The second launch may start with the first one.

    Whether it waits or has ended, each launch ends once, with all its bytes.
    """
    launches = []
    for place, event in ((1, Op.GRID_TRIGGER), (2, Op.GRID_WAIT if waits else Op.GRID_TRIGGER)):
        cluster = begun(pair(100, 0, 6.0), 0.5)
        for warp in cluster.warps[0]:
            warp.insert(int(warp[0][0] == Op.INIT), (event,))
        launches.append(LaunchTrace("k", 1, [cluster], True, reads=((place << 30, 64 << 20),)))
    first, second = replay_chain(B200, launches).launches
    assert first.hbm_bytes == second.hbm_bytes == 64 << 20
    assert min(first.cycles, second.cycles) > (64 << 20) / B200.hbm_bandwidth


def test_a_share_of_one_is_the_trace():
    cluster = pair(4, 0, 10.0)
    assert begun(cluster, 1.0) is cluster


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "sms", "mnk"),
    [
        ("B200", 8, (4096, 4096, 1024)),
        ("B200", 16, (8192, 4096, 2048)),
        ("RTX 5090", 8, (2048, 3072, 2048)),
        ("RTX 5090", 8, (1024, 1024, 16384)),
    ],
)
def test_some_tiles_tell_the_time_of_all(name, sms, mnk, monkeypatch):
    """Uses a part of a GPU so that a full replay is affordable: a CTA has 8 to 64 times the work of one wave."""
    whole = targets.lookup(name)
    part = replace(
        whole,
        name=f"{name}, a part",
        num_sms=sms,
        l2_bytes=whole.l2_bytes * sms // whole.num_sms,
        bandwidth_bytes_per_s=whole.bandwidth_bytes_per_s * sms / whole.num_sms,
        reached_bandwidth_bytes_per_s=whole.floor_bandwidth_bytes_per_s * sms / whole.num_sms,
    )
    monkeypatch.setattr(targets, "TARGETS", (*targets.TARGETS, part))
    monkeypatch.setattr(modelled, "MOST_STEPS", 0)
    case = cases.Case("dense", "gemm", "x", "gemm", (mnk,))
    found = []
    for choose in (modelled.replayed_tiles, lambda work: None):
        monkeypatch.setattr(modelled, "replayed_tiles", choose)
        run = lambda backend: ours.prepare(case, empty_operands(case), backend).run()
        (timing,) = modelled.modelled_times(run, part, by_representatives=True)
        found.append(timing)
    some, all_tiles = found
    assert some.us == pytest.approx(all_tiles.us, rel=0.035)
    assert some.l2_bytes == pytest.approx(all_tiles.l2_bytes, rel=0.05)
