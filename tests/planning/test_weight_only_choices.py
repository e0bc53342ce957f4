"""Which kernel multiplies 16-bit rows by quantized weights, next to the times of all kernels on an H200."""

import json
from pathlib import Path

import pytest

from nvfp4_cute.formats.block_format import BFLOAT16, format_named
from nvfp4_cute.planning.arch import choose_weight_only, is_faster_than_few_rows
from nvfp4_cute.planning.rows import rounded_rows
from nvfp4_cute.problem import GroupedProblem

ARCH, SMS = "sm_90a", 132
CELLS = json.loads((Path(__file__).parents[2] / "bench" / "results" / "h200_weight_only.json").read_text())[
    "cells"
]
# Ratio to the fastest time. Some times contain 1.5 us in which counters were cleared, as launches no longer do.
MOST_LOST = 1.105
TORCH = ("torch_bf16", "dequantize_torch")


def chosen_name(cell):
    """Name of the config that a call takes, or "few_rows"."""
    n, k, b_format = cell["n"], cell["k"], format_named(cell["format"])
    if "rows" in cell:
        m = rounded_rows(cell["rows"])
        if not is_faster_than_few_rows(ARCH, SMS, m, n, k, 1, b_format):
            return "few_rows"
        problem = GroupedProblem(((m, n, k),), a_format=BFLOAT16, b_format=b_format)
        return choose_weight_only(ARCH, problem, SMS).to_name()
    groups = cell["groups"]
    mean, over = divmod(rounded_rows(groups * cell["mean_rows"]), groups)
    sizes = ((mean + 1, n, k),) * over + ((mean, n, k),) * (groups - over)
    activation = "silu" if cell["weights"] == 2 else None
    problem = GroupedProblem(sizes, "ragged", activation=activation, a_format=BFLOAT16, b_format=b_format)
    return choose_weight_only(ARCH, problem, SMS).to_name()


@pytest.mark.parametrize("format", sorted({cell["format"] for cell in CELLS}))
def test_no_choice_loses_much(format):
    """Also of ragged groups, whose sizes only the device knows."""
    lost = {}
    for cell in CELLS:
        us = {name: time for name, time in cell["us"].items() if name not in TORCH}
        chosen = chosen_name(cell)
        if cell["format"] == format and chosen in us:
            lost[str({**cell, "us": chosen})] = us[chosen] / min(us.values())
    assert len(lost) > 15
    assert {where: loss for where, loss in lost.items() if loss > MOST_LOST} == {}


def test_chosen_kernels_were_measured():
    """All but a few."""
    missing = [cell for cell in CELLS if chosen_name(cell) not in cell["us"]]
    assert len(missing) <= 5
