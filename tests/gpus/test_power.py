"""The power limit: what was measured on an H100, and published of Blackwell, follows from the figures."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from nvfp4_cute.bench import report
from nvfp4_cute.bench.cases import select
from nvfp4_cute.bench.report import MODELLED, Report, Row, Time
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.power import POWER, PROBE, sustained_us
from nvfp4_cute.gpus.timing_figures import constants_of
from nvfp4_cute.roofline import speed_of_light as light
from nvfp4_cute.timing.result import Timing

RATES = {"bf16": 4096, "fp8": 8192}
PRINTED = Path(report.__file__).parents[1] / PROBE


def launch(target, flops, rate, cycles):
    """A launch whose matrix pipes compute so much."""
    constants = constants_of(target)
    busy = flops / rate / target.num_sms
    return Timing("k", constants, cycles, 0, 0, 0, 0, 0.0, [], [busy] * target.num_sms, {}, {})


def measured():
    """Kind, extent, data, sustained us and watts of the probe's lines."""
    pattern = r"^(bf16|fp8) (\d+) (\w+): .*sustained ([\d.]+) us at (\d+) MHz, ([\d.]+) W"
    return re.findall(pattern, PRINTED.read_text(), re.M)


def test_sustained_times_on_an_h100():
    """Where the limit of 700 W was met, random data: each within 10 %."""
    lines = [line for line in measured() if line[2] == "random" and float(line[5]) > 699]
    assert len(lines) == 4
    for kind, extent, _, us, *_ in lines:
        timing = launch(targets.H100_SXM, 2 * int(extent) ** 3, RATES[kind], 1.0)
        assert sustained_us(timing, targets.H100_SXM) == pytest.approx(float(us), rel=0.1), (kind, extent)


def test_the_best_published_dense_rate_of_a_b200():
    """About 5.7 PFLOP/s of NVFP4 at 8192^3, from which no figure was taken."""
    timing = launch(targets.B200, 2 * 8192**3, 32768, 1.0)
    us = sustained_us(timing, targets.B200)
    assert 2 * 8192**3 / us / 1e9 == pytest.approx(5.7, rel=0.03)


def test_launches_that_do_not_meet_the_limit_keep_their_time():
    timing = launch(targets.B200, 1e9, 32768, 20_000.0)
    assert sustained_us(timing, targets.B200) == timing.us
    assert sustained_us(replace(timing, cycles=1.0), targets.B200) > 0.01
    assert sustained_us(timing, targets.RTX_5090) is None


def test_every_figure_says_where_it_comes_from():
    for name, power in POWER.items():
        assert targets.lookup(name).name == name
        assert 0 < power.base < power.limit and power.source


def test_pages_tell_rows_that_the_limit_slows():
    case = select(("dense",), "8192")[0]
    floor = light.physical_floor(case.work, targets.B200)
    rows = [Row(case, floor, Time(140.0, MODELLED, sustained_us=us)) for us in (193.0, 140.5, None)]
    text = Report(targets.B200, rows, "heading").text()
    assert text.count("where it is repeated for seconds") == 1 and "193.00 us, 5697 TFLOP/s" in text
