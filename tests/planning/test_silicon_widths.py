"""Limits of MMAs of the sm_100 family: even columns of scales, and widths with which public kernels run."""

from dataclasses import replace
from itertools import product

import pytest

from nvfp4_cute.planning.arch.sm100 import limits as sm100
from nvfp4_cute.planning.choose import candidates
from nvfp4_cute.problem import Gate

LAYOUTS = ("separate", "interleaved_64_up_first", "interleaved_32_gate_first")
FORMS = ("list", "ragged", "masked", "batched")
# (columns of an MMA, row of the first one in a block of 128 scale rows) in CUTLASS's kernels with tiles of 64 to 256.
PROVEN = {(64, 0), (64, 64), (128, 0), (192, 0), (192, 64), (256, 0)}
ROWS_OF_A_COLUMN = 32


def every_config():
    """Yields (config, number of operands ``b``) that are chosen, tuned or exported for one product and two, in any form."""
    plain = {(config, 1) for form in FORMS for config in candidates("sm_100a", form)}
    dual = {
        (config, 1 if layout != "separate" else 2)
        for form, layout in product(FORMS, LAYOUTS)
        for config in candidates("sm_100a", form, gate=Gate("silu", None, layout))
    }
    return sorted(plain | dual, key=str)


@pytest.mark.parametrize(("config", "num_b"), every_config(), ids=str)
def test_scales_of_every_tile_start_at_an_even_column(config, num_b):
    config = sm100.resolve(config, num_b)
    tmem = sm100.tmem_map(config, num_b)
    assert sm100.unsupported_reason(config, num_b) is None
    assert tmem.sfa_col % 2 == tmem.sfb_col % 2 == sm100.SF_ATOM_COLS % 2 == 0
    tile_n = config.cta_tile_shape_mnk[1]
    for first_row in range(0, 8 * tile_n, tile_n):
        offset = first_row % sm100.SF_ATOM_ROWS
        assert offset // ROWS_OF_A_COLUMN % 2 == 0
        for rows in range(1, 2 * tile_n + 1):
            columns = sm100.mma_columns(rows, first_row, tile_n)
            assert (columns, offset) in PROVEN and min(rows, tile_n) <= columns <= tile_n


def test_every_width_that_is_built_has_those_columns():
    for tile_n in sm100.TILES_N:
        assert {offset % 128 for offset in range(0, 8 * tile_n, tile_n)} <= {0, 64}
    for tile_n in (32, 96, 160, 224):
        config = replace(sm100.DEFAULT_CONFIG, cta_tile_shape_mnk=(128, tile_n, 256))
        assert f"N tile {tile_n} is not built" in sm100.unsupported_reason(config)
