"""How the weight-only kernel's config is chosen, compared with times measured on an H100."""

import json
from functools import partial
from pathlib import Path

import pytest

from nvfp4_cute.planning.arch import base
from nvfp4_cute.planning.arch import sm90_weight_only as planning

H100_SMS = 132
MEASURED = json.loads((Path(__file__).parents[1] / "data" / "w4a16_h100.json").read_text())
# A repeated measurement differs by some 2 %.
MOST_LOST = 1.055


def sizes_of(point):
    """Sizes that a launch knows: ragged groups around the mean."""
    rows, n, k = point["rows"], point["n"], point["k"]
    mean, over = divmod(sum(rows), len(rows))
    return ((mean + 1, n, k),) * over + ((mean, n, k),) * (len(rows) - over)


def choose(point):
    """Stream-K, which was not measured there, left out."""
    num_b, is_ragged = 1 + point["is_dual"], len(point["rows"]) > 1
    us = partial(planning.estimate_us, sizes_of(point), num_sms=H100_SMS, num_b=num_b, is_ragged=is_ragged)
    return min((c for c in planning.candidates(num_b) if not c.stream_k), key=us)


# Groups with fewer rows than groups were measured with more CTAs than such launches use now.
@pytest.mark.parametrize(
    "point", [p for p in MEASURED if sum(p["rows"]) >= len(p["rows"])], ids=lambda point: point["point"]
)
def test_chosen_is_among_the_fastest(point):
    us = point["us"]
    assert us[choose(point).to_name()] <= MOST_LOST * min(us.values())


def test_model_meets_the_times():
    """The average error of all configs is at most 6 %, including the worst ones."""
    errors = []
    for point in MEASURED:
        rows, sizes = point["rows"], sizes_of(point)
        if sum(rows) < len(rows):
            continue
        num_b, is_ragged = 1 + point["is_dual"], len(rows) > 1
        configs = {config.to_name(): config for config in planning.candidates(num_b)}
        for name, us in point["us"].items():
            modelled = planning.estimate_us(sizes, configs[name], H100_SMS, is_ragged=is_ragged)
            errors.append(abs(modelled / us - 1))
    assert len(errors) > 800
    assert sum(errors) / len(errors) < 0.06


def config(tokens):
    return next(
        c for c in planning.candidates() if c.work_tile_mnk[0] == tokens and c.multicast_n == c.split_k == 1
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 33, 70])
def test_most_clusters(rows):
    """Some distribution of rows over groups has this number of tiles, and none has more."""
    groups, n, chosen = 3, 300, config(16)
    dealt = [
        (first, second, rows - first - second)
        for first in range(rows + 1)
        for second in range(rows + 1 - first)
    ]
    columns = -(-n // chosen.work_tile_mnk[1])
    worst = max(sum(-(-m // 16) for m in each) for each in dealt) * columns
    mean, over = divmod(rows, groups)
    sizes = ((mean + 1, n, 512),) * over + ((mean, n, 512),) * (groups - over)
    assert planning.most_clusters(sizes, chosen, True) == worst


@pytest.mark.parametrize(("rows", "groups"), [(8, 128), (64, 64), (5000, 8)])
def test_spread(rows, groups):
    """The total is about the number of rows. If rows are few, some groups have none."""
    mean, over = divmod(rows, groups)
    found = base.spread(((mean + 1, 1, 1),) * over + ((mean, 1, 1),) * (groups - over))
    assert abs(sum(m for m, _, _ in found) - rows) <= max(0.05 * rows, 1)
    assert len(found) == groups and (min(found)[0] == 0) == (rows <= groups)
