"""schedule: every tile exactly once, in the stated order, assigned to the stated CTAs."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvfp4_cute.planning.schedule import make_schedule
from nvfp4_cute.problem import INT32_MAX

# The time of an example depends on other processes.
AT_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

TILE = (128, 128, 256)

extents = st.tuples(
    st.integers(0, 700), st.integers(0, 700), st.integers(1, 90).map(lambda blocks: 16 * blocks)
)
problems = st.lists(extents, min_size=1, max_size=9)
tiles = st.tuples(*[st.sampled_from([64, 128, 256])] * 3)
num_ctas = st.integers(1, 160)


def all_tiles(schedule):
    return [schedule.work_tile(i) for i in range(schedule.num_tiles)]


@AT_ANY_SPEED
@given(problems, tiles, num_ctas)
def test_each_output_tile_is_computed_once(sizes, tile, num_cta):
    schedule = make_schedule(sizes, tile, num_cta)
    found = [(t.group_idx, t.tile_m_idx, t.tile_n_idx) for t in all_tiles(schedule)]
    expected = {
        (group, i, j)
        for group, (m, n, _) in enumerate(sizes)
        for i in range(math.ceil(m / tile[0]))
        for j in range(math.ceil(n / tile[1]))
    }
    assert len(found) == len(expected) and set(found) == expected


@AT_ANY_SPEED
@given(problems, tiles, num_ctas)
def test_ctas_share_the_tiles_round_robin(sizes, tile, num_cta):
    schedule = make_schedule(sizes, tile, num_cta)
    assert schedule.num_cta == min(num_cta, schedule.num_tiles)
    dealt = [list(schedule.tiles_of_cta(cta)) for cta in range(schedule.num_cta)]
    assert all(dealt), "a CTA without work"
    assert schedule.waves == max(map(len, dealt), default=0)
    in_rounds = [work[wave] for wave in range(schedule.waves) for work in dealt if wave < len(work)]
    assert in_rounds == all_tiles(schedule)


@AT_ANY_SPEED
@given(problems, tiles)
def test_slots_are_groups_by_descending_m(sizes, tile):
    schedule = make_schedule(sizes, tile, 148)
    assert sorted(schedule.order) == list(range(len(sizes)))
    for first, second in zip(schedule.order, schedule.order[1:], strict=False):
        assert (-sizes[first][0], first) < (-sizes[second][0], second)


@AT_ANY_SPEED
@given(problems, tiles)
def test_offsets_are_prefix_sums_of_tiles(sizes, tile):
    schedule = make_schedule(sizes, tile, 148)
    assert schedule.tile_offsets[0] == 0 and len(schedule.tile_offsets) == len(sizes) + 1
    for slot, group in enumerate(schedule.order):
        m, n, k = sizes[group]
        assert schedule.tiles_m[slot] == math.ceil(m / tile[0])
        assert schedule.k_tile_cnts[slot] == math.ceil(k / tile[2])
        num_tiles = schedule.tile_offsets[slot + 1] - schedule.tile_offsets[slot]
        assert num_tiles == math.ceil(m / tile[0]) * math.ceil(n / tile[1])


@AT_ANY_SPEED
@given(problems, tiles)
def test_m_is_the_fast_axis_inside_a_group(sizes, tile):
    found = all_tiles(make_schedule(sizes, tile, 148))
    order = [(t.slot, t.tile_n_idx, t.tile_m_idx) for t in found]
    assert order == sorted(order)


@AT_ANY_SPEED
@given(problems, num_ctas)
def test_work_and_imbalance(sizes, num_cta):
    schedule = make_schedule(sizes, TILE, num_cta)
    shares = schedule.cta_k_tiles
    assert sum(shares) == sum(t.k_tile_cnt for t in all_tiles(schedule))
    if shares:
        assert schedule.imbalance == pytest.approx(max(shares) / (sum(shares) / len(shares)))
        assert schedule.imbalance >= 1 - 1e-9


def test_a_schedule_by_hand():
    schedule = make_schedule([(40, 256, 512), (0, 999, 256), (300, 130, 257)], TILE, 3)
    assert schedule.order == (2, 0, 1)
    assert schedule.tile_offsets == (0, 6, 8, 8)
    assert (schedule.num_tiles, schedule.num_cta, schedule.waves) == (8, 3, 3)
    found = [
        (t.group_idx, t.slot, t.tile_m_idx, t.tile_n_idx, t.k_tile_cnt) for t in schedule.tiles_of_cta(1)
    ]
    assert found == [(2, 0, 1, 0, 2), (2, 0, 1, 1, 2), (0, 1, 0, 1, 2)]
    assert schedule.cta_k_tiles == (6, 6, 4)
    assert schedule.imbalance == pytest.approx(6 / (16 / 3))


def test_bytes_read_count_whole_scale_atoms_and_no_empty_group():
    schedule = make_schedule([(40, 256, 512), (0, 999, 256)], TILE, 148)
    assert schedule.hbm_bytes == (40 + 256) * 256 + (128 + 256) * 32


def test_nothing_to_do():
    schedule = make_schedule([(0, 128, 256)], TILE, 148)
    assert (schedule.num_tiles, schedule.num_cta, schedule.waves) == (0, 0, 0)
    assert (schedule.imbalance, schedule.hbm_bytes) == (1.0, 0)
    assert schedule.picture() == "no tiles"
    with pytest.raises(IndexError, match="tile_idx=0 .* 0 tiles"):
        schedule.work_tile(0)


@pytest.mark.parametrize("tile_idx", [-1, 8])
def test_tile_index_is_checked(tile_idx):
    schedule = make_schedule([(128, 1024, 256)], TILE, 148)
    with pytest.raises(IndexError, match=f"tile_idx={tile_idx} .* 8 tiles"):
        schedule.work_tile(tile_idx)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ([(8, 8, 16), (8, -1, 16)], TILE, 1),
            r"group 1: .*\(8, -1, 16\) has a negative extent; sizes are 0 or more",
        ),
        (([(8, 8, 16)], (128, 0, 256), 1), r"\(128, 0, 256\) has an extent below 1; use .*\(128, 128, 256\)"),
        (([(8, 8, 16)], TILE, 0), "num_cta_max=0 is below 1; pass the number of SMs"),
        (
            ([(INT32_MAX, 1024, 16)], (1, 1, 16), 1),
            f"tiles exceed the 32-bit limit {INT32_MAX}; use larger tiles",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)


def test_table_has_a_row_for_every_slot():
    lines = str(make_schedule([(40, 256, 512), (0, 999, 256), (300, 130, 257)], TILE, 3)).splitlines()
    assert len(lines) == 1 + 3 + 1
    assert lines[1].split() == ["0", "2", "300", "130", "257", "3x2", "2", "0"]
    assert lines[3].split() == ["2", "1", "0", "999", "256", "-", "1", "8"]
    assert "8 tiles of 128x128x256 on 3 CTAs: 3 waves, imbalance 1.125" in lines[4]


def test_ctas_of_a_cluster_share_the_k_tiles_of_its_tiles():
    """Two tiles of 5 K tiles on 4 CTAs instead of 2: the busiest CTA has 3 of the 10 and waits for no other."""
    whole, shared = (make_schedule([(128, 256, 1280)], TILE, 2, split) for split in (1, 2))
    assert whole.cta_k_tiles == (5, 5) and shared.cta_k_tiles == (3, 3)
    assert (whole.imbalance, shared.imbalance) == (1.0, 1.2)
    assert "on 2 clusters of 2 CTAs" in str(shared)


def test_picture_draws_work_to_scale():
    picture = make_schedule([(128, 256, 512), (128, 256, 1024)], TILE, 2).picture()
    assert picture == "CTA   0-1   00|1111|"


def test_picture_fits():
    schedule = make_schedule([(128 * g, 512, 40 * 256) for g in range(1, 9)], TILE, 30)
    lines = schedule.picture(width=20, max_rows=4).splitlines()
    assert len(lines) == 5 and lines[-1].startswith("...")
    longest = max(len(list(schedule.tiles_of_cta(cta))) for cta in range(30))
    assert all(len(line.split()[-1]) <= 20 + 2 * longest for line in lines[:-1])
