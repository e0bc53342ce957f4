"""Compares the device half of the schedule with the host half, field by field, on random problems."""

import numpy as np
import pytest
import tile_table
from cutlass import Int32
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_cute.backends.emulator import on_emulator
from nvfp4_cute.planning.schedule import make_schedule

TILE = (128, 128, 256)


def device_tiles(schedule):
    """Records [num_tiles, 6] as the device computes them."""
    out = np.full((schedule.num_tiles, len(tile_table.FIELDS)), -1, np.int32)
    with on_emulator() as emulator:
        function, ptx = tile_table.compile_tile_table(len(schedule.order), TILE)
        emulator.register(ptx)
        emulator.add_range("table", out.ctypes.data, out.nbytes)
        slots = [schedule.sizes[group] for group in schedule.order]
        function(
            [tuple(Int32(max(extent, 1)) for extent in size) for size in slots],
            [Int32(offset) for offset in schedule.tile_offsets[:-1]],
            Int32(schedule.num_tiles),
            tile_table.pointer(out.ctypes.data),
        )
    return out


def host_tiles(schedule):
    tiles = [schedule.work_tile(idx) for idx in range(schedule.num_tiles)]
    rows = [
        (t.slot, t.tile_m_idx, t.tile_n_idx, t.k_tile_cnt, *schedule.sizes[t.group_idx][:2]) for t in tiles
    ]
    return np.array(rows, np.int32).reshape(-1, len(tile_table.FIELDS))


sizes = st.tuples(st.integers(0, 700), st.integers(0, 900), st.integers(1, 200).map(lambda k: 32 * k))


@pytest.mark.parametrize("num_groups", [1, 2, 3, 8])
def test_host_equals_device(num_groups):
    @settings(max_examples=25, deadline=None)
    @given(st.lists(sizes, min_size=num_groups, max_size=num_groups))
    def check(problem):
        schedule = make_schedule(problem, TILE, 148)
        if schedule.num_tiles:
            np.testing.assert_array_equal(device_tiles(schedule), host_tiles(schedule))

    check()


def test_empty_groups_between_full_ones():
    schedule = make_schedule([(0, 256, 256), (130, 128, 512), (64, 0, 256), (1, 300, 32)], TILE, 148)
    np.testing.assert_array_equal(device_tiles(schedule), host_tiles(schedule))
