"""Clusters that represent others: how they are chosen, how addresses move, and the error of the modelled time."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from flat_parts import gemv, grouped_gemm
from list_checks import check_list_operands

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.operands import empty_operands
from nvfp4_cute.emulator.record.events import ClusterTrace, Op
from nvfp4_cute.emulator.record.representatives import MOST_OF_A_KIND, LaunchWork, TileWork, choose, moved
from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.planning.arch.sm100 import limits as sm100
from nvfp4_cute.planning.arch.sm100.choosing import config_for_rows
from nvfp4_cute.planning.choose import choose_config
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.planning.schedule import make_schedule
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.roofline import tile_work
from nvfp4_cute.roofline.modelled import modelled_times

INPUT, OUT = 1 << 20, 1 << 30


def tile(number: int, *, k_tiles: int = 4, rows: int = 128, columns: int = 64) -> TileWork:
    """Tile `number` of a column of tiles: 64 KiB of the only input, rows of 64 two-byte results."""
    return TileWork(k_tiles, rows, columns, (INPUT + number * 65536,), OUT + number * 128 * 128)


def work(*clusters: tuple[TileWork, ...]) -> LaunchWork:
    return LaunchWork(clusters, ((INPUT, 1 << 24, 0),), 128, 2)


def test_one_cluster_of_each_shape_stands_for_all_that_have_it():
    short, long, empty = (tile(0, k_tiles=2),), (tile(1), tile(2)), ()
    narrow = (tile(3), tile(4, rows=3))
    assert choose(work(short, long, long, narrow, short, empty, empty)) == [0, 1, 1, 3, 0, 5, 5]


def test_of_too_many_shapes_some_from_smallest_to_largest_are_executed():
    clusters = [(tile(i, rows=1 + 7 * i % 100),) for i in range(40)]
    chosen = choose(work(*clusters))
    executed = set(chosen)
    assert len(executed) == MOST_OF_A_KIND
    rows = [cluster[0].rows for cluster in clusters]
    assert {min(rows), max(rows)} <= {rows[number] for number in executed}
    for number, source in enumerate(chosen):
        assert abs(rows[number] - rows[source]) == min(abs(rows[number] - rows[other]) for other in executed)


def test_addresses_move_with_the_tile_that_they_belong_to():
    launch = work((tile(0), tile(1)), (tile(8), tile(3)))
    loads = [
        (Op.LOAD, ((INPUT + t * 65536 + 64 * k, 4096), (77, 32)), 4096, (0,), (0,), 0, 0)
        for t in (0, 1)
        for k in range(4)
    ]
    # A prefetch from the last loaded tile.
    loads.insert(2, (Op.PREFETCH, ((INPUT + 64 * 3, 4096),), 4096, 0))
    stores = [
        (Op.STORE, ((OUT + 32, 256),), 256),
        (Op.COMMIT_STORES,),
        (Op.WRITE, ((OUT + 128 * 128 - 64, 128),)),
    ]
    computing = [(Op.COMPUTE, 1.0, 2.0, 0.0, 3.0, 1)]
    trace = ClusterTrace((0, 0, 0), [[loads, stores, computing]], 5, 6)
    other = moved(trace, launch, 0, 1)
    assert (other.loaded, other.stored) == (5, 6)
    prefetch = other.warps[0][0].pop(2)
    assert prefetch == (Op.PREFETCH, ((INPUT + 8 * 65536 + 64 * 3, 4096),), 4096, 0)
    places = [event[1][0][0] - INPUT for event in other.warps[0][0]]
    assert places == [t * 65536 + 64 * k for t in (8, 3) for k in range(4)]
    assert all(event[1][1] == (77, 32) for event in other.warps[0][0]), "no input's address stays"
    moved_stores = [event[1][0][0] - OUT for event in other.warps[0][1] if len(event) > 1]
    assert moved_stores == [8 * 128 * 128 + 32, 9 * 128 * 128 - 64]
    assert other.warps[0][2] is computing


def test_lines_that_threads_read_move_with_the_tile_that_begins_last_before_them():
    launch = work((tile(0), tile(2)), (tile(8), tile(3)))
    read = lambda *places: (Op.READ, 1, tuple((INPUT + place, 128) for place in places))
    trace = ClusterTrace(
        (0, 0, 0), [[[read(256, 65536), read(2 * 65536, 3 * 65536 - 128), (Op.READ, 2, ((77, 32),))]]]
    )
    (events,) = moved(trace, launch, 0, 1).warps[0]
    assert events[:2] == [read(8 * 65536 + 256, 9 * 65536), read(3 * 65536, 4 * 65536 - 128)]
    assert events[2] == (Op.READ, 2, ((77, 32),)), "no input's address stays"


def test_ctas_that_share_the_steps_of_a_tile_load_as_often_as_they_have_steps():
    """Two CTAs share 5 steps as 2 and 3. The next tile has 1 step, so the first CTA loads something useless once."""
    launch = replace(
        work((tile(0, k_tiles=5), tile(1, k_tiles=1)), (tile(8, k_tiles=5), tile(3, k_tiles=1))), split=2
    )
    steps = [[0, 0, 1], [0, 0, 0, 1]]
    warps = [[[(Op.LOAD, ((INPUT + t * 65536, 64),), 64, (), (), 0, 0) for t in cta]] for cta in steps]
    other = moved(ClusterTrace((0, 0, 0), warps), launch, 0, 1)
    assert [[(event[1][0][0] - INPUT) // 65536 for event in cta[0]] for cta in other.warps] == [
        [8, 8, 3],
        [8, 8, 8, 3],
    ]


def test_weights_that_come_early_move_with_their_own_tile():
    """Weights of three steps, of two tiles, come before the first tokens; the last tokens are out of bounds."""
    weights, tokens = INPUT, INPUT + (1 << 24)
    place = lambda n: TileWork(2, 128, 64, (weights + n * 65536, tokens + n * 65536), OUT)
    launch = LaunchWork(
        ((place(0), place(1)), (place(8), place(3))), ((weights, 1 << 24, 0), (tokens, 1 << 24, 1)), 128, 2
    )
    order = [(0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (0, 1), (1, 1)]  # (input, tile)
    load = lambda which, t: (Op.LOAD, (((weights, tokens)[which] + t * 65536, 64),), 64, (), (), which, 0)
    loads = [*(load(*one) for one in order), (Op.LOAD, (), 64, (), (), 1, 0)]
    ((events,),) = moved(ClusterTrace((0, 0, 0), [[loads]]), launch, 0, 1).warps
    assert events[:-1] == [load(which, (8, 3)[t]) for which, t in order] and events[-1] == loads[-1]


def test_no_cluster_stands_for_one_that_reads_less_of_the_weights():
    """Experts with different numbers of tokens, and some tiles at the end of the weights' rows."""
    clusters = [(tile(i, rows=1 + 7 * i), tile(i, rows=9, columns=64 if i % 3 else 32)) for i in range(24)]
    launch = work(*clusters)
    columns = [[one.columns for one in tiles] for tiles in launch.clusters]
    assert all(columns[i] == columns[other] for i, other in enumerate(choose(launch)))
    assert len(set(choose(launch))) == 8


def test_loads_that_are_not_those_of_the_main_loop_are_refused():
    trace = ClusterTrace((0, 0, 0), [[[(Op.LOAD, (), 0, (), (), 0, 0)]]])
    with pytest.raises(EmulatorError, match="1 loads in 4 steps"):
        moved(trace, work((tile(0),), (tile(1),)), 0, 1)


LISTS = ((256, 512, 256), (200, 384, 512), (130, 256, 256))
UNEVEN = tuple((20 + 31 * i % 110, 512, 256) for i in range(12))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "target, sizes, form",
    [
        ("B200", LISTS, "list"),
        ("B200", UNEVEN, "ragged"),
        ("RTX 5090", LISTS, "list"),
        pytest.param("H200", LISTS, "list", marks=pytest.mark.slow),
    ],
)
def test_times_are_those_of_a_full_run(target, sizes, form):
    """Few CTAs that compute several tiles each: bytes and time differ by at most 3 %."""
    operands = empty_operands(Case("x", "x", "x", "grouped_gemm", sizes, form=form))
    gpu = lookup(target)
    if form == "list":
        config = choose_config(GroupedProblem(sizes), gpu.arch, gpu.num_sms)
        a, b, a_scale, b_scale, out = map(
            list, (operands.a, operands.b, operands.a_scale, operands.b_scale, operands.out)
        )
        offs = None
    else:
        config = config_for_rows(64, sizes[0][1])
        a, b, out = torch.cat(operands.a), torch.stack(operands.b), torch.cat(operands.out)
        a_scale, b_scale = (
            torch.cat([s.flatten() for s in side]) for side in (operands.a_scale, operands.b_scale)
        )
        offs = torch.tensor([m for m, _, _ in sizes]).cumsum(0).to(torch.int32)
    keywords = {"out": out, "out_dtype": torch.float16, "config": replace(config, num_cta=8)}
    full, few = (
        modelled_times(
            lambda backend: grouped_gemm(a, b, a_scale, b_scale, offs, **keywords, backend=backend),
            target=gpu,
            by_representatives=by_representatives,
        )[-1]
        for by_representatives in (False, True)
    )
    assert few.us == pytest.approx(full.us, rel=0.03)
    assert few.hbm_bytes == pytest.approx(full.hbm_bytes, rel=0.03)
    assert few.requested_bytes == pytest.approx(full.requested_bytes, rel=0.03)


@pytest.mark.parametrize(
    ("name", "stands_for_others"), [("t128x64x256_s0a2_swap", True), ("t128x128x256_s0a2_swap", False)]
)
def test_no_cluster_stands_for_others_where_they_take_turns_in_fetching_ahead(name, stands_for_others):
    """Launches that are too large are the exception. Copies of the wider tile take longer than its MMAs."""
    operands = empty_operands(Case("x", "x", "x", "grouped_gemm", LISTS))
    lists = map(list, (operands.a, operands.b, operands.a_scale, operands.b_scale))
    problem, checked = check_list_operands(*lists, None, list(operands.out), out_dtype=torch.float16)
    config = KernelConfig.from_name(name)
    smem = sm100.smem_plan(config)
    assert sm100.fetches_ahead(config, smem) != stands_for_others
    assert sm100.k_tile_mma_cycles(config, smem) < sum(sm100.k_tile_copy_cycles(config, smem))
    schedule = make_schedule(problem.sizes, config.work_tile_mnk, 8)
    formats = {"a_format": problem.a_format, "b_format": problem.b_format}
    key = SimpleNamespace(arch="sm_100a", config=config, **formats)
    plan = SimpleNamespace(problem=problem, schedule=schedule, kernel=SimpleNamespace(key=key))
    assert (tile_work.of_plan(plan, checked) is not None) == stands_for_others


def test_batches_of_a_gemv_take_the_time_of_a_full_run():
    """CTAs along M and along L whose threads load: one CTA represents all."""
    m, k, batches = 128, 1024, 2
    a, b = torch.empty(batches, m, k // 2, dtype=torch.uint8), torch.empty(batches, k // 2, dtype=torch.uint8)
    a_scale, b_scale = (
        torch.empty(batches, rows // 128, k // 64, 32, 4, 4, dtype=torch.uint8) for rows in (m, 128)
    )
    full, few = (
        modelled_times(
            lambda backend: gemv(a.permute(1, 2, 0), b.T, a_scale, b_scale, backend=backend),
            by_representatives=by_representatives,
        )[-1]
        for by_representatives in (False, True)
    )
    assert few.us == pytest.approx(full.us, rel=0.05)
    assert few.hbm_bytes == pytest.approx(full.hbm_bytes, rel=0.03)
    assert few.requested_bytes == full.requested_bytes and few.stored_bytes == full.stored_bytes
