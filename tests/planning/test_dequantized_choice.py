"""When weights are dequantized before a product of 16-bit rows: modelled times next to measured ones."""

import json
from pathlib import Path

import pytest

from nvfp4_cute.formats.block_format import NVFP4, FP8_128x128
from nvfp4_cute.planning.arch import dequantized, dequantizes_first, grouped_weight_only_us

RESULTS = Path(__file__).parents[2] / "bench" / "results"
CELLS = json.loads((RESULTS / "h200_weight_only.json").read_text())["cells"]
SMS = {"sm_80": 108, "sm_89": 142, "sm_90a": 132, "sm_100a": 148, "sm_110a": 20, "sm_121a": 48}
# us of the weight-only kernel and of both launches on an H100, by N, K and rows: bench/notes/2026-11-25-h100.md.
H100 = {
    (6144, 4096, 2048): (151.3, 155.9),
    (4096, 4096, 512): (33.1, 38.7),
    (4096, 4096, 2048): (101.9, 105.8),
    (4096, 4096, 4096): (228.4, 201.8),
    (4096, 12288, 512): (88.1, 113.6),
    (4096, 12288, 4096): (664.8, 630.4),
    (28672, 8192, 512): (416.4, 548.5),
    (28672, 8192, 2048): (1537.9, 1533.3),
}
# Times on an H200: bench/notes/2026-11-29-h200-dequantized.md.
H200 = {
    (4096, 4096, 512): (35.8, 40.2),
    (4096, 4096, 2048): (109.1, 103.5),
    (4096, 4096, 4096): (217.3, 188.6),
    (4096, 14336, 512): (103.0, 120.0),
    (4096, 14336, 2048): (361.3, 326.8),
    (4096, 14336, 4096): (737.1, 612.2),
    (28672, 8192, 512): (359.3, 464.5),
    (28672, 8192, 2048): (1447.5, 1329.8),
    (28672, 8192, 4096): (2928.9, 2487.1),
}


def chosen(arch, m, n, k, **options):
    return dequantizes_first(arch, SMS[arch], m, n, k, **options)


def test_modelled_times_are_those_of_an_h200():
    """Checks 65 products with 32 to 256 rows. None of them is faster this way."""
    errors = []
    for cell in CELLS:
        us, size = cell["us"].get("dequantize_torch"), (cell.get("rows"), cell["n"], cell["k"])
        if us is None:
            continue
        errors.append(dequantized.estimate_us((size,), "sm_90a", 132) / us - 1)
        assert not chosen("sm_90a", *size)
    assert len(errors) == 65
    assert max(map(abs, errors)) < 0.15 and abs(sum(errors)) / len(errors) < 0.02


@pytest.mark.parametrize("times", [H100, H200], ids=["H100", "H200"])
def test_the_choice_loses_little(times):
    for (n, k, m), (kernel, both) in times.items():
        taken = both if chosen("sm_90a", m, n, k) else kernel
        assert taken <= 1.1 * min(kernel, both), (n, k, m)


def test_one_launch_is_preferred_where_the_host_is_slower():
    """Products of Qwen3-30B-A3B, for which both launches take a GPU less than 100 us and save at most 8 us."""
    for n, k in ((5120, 2048), (2048, 4096)):
        assert not chosen("sm_90a", 2048, n, k) and chosen("sm_90a", 8192, n, k)
    assert chosen("sm_90a", 2048, 4096, 4096)
    assert chosen("sm_100a", 256, 5120, 2048)


@pytest.mark.parametrize(
    "arch, rows",
    [("sm_80", 512), ("sm_100a", 192), ("sm_110a", 512)],
)
def test_from_these_rows_on_matrix_units_pay(arch, rows):
    """Where tensor cores are several times faster than what ``mma.sync`` and dequantizing per tile leave of them."""
    assert chosen(arch, rows, 4096, 14336) and chosen(arch, 8192, 4096, 14336)
    assert not chosen(arch, 64, 4096, 14336)


def test_a_b200_saves_four_fifths_of_the_time_of_2048_rows():
    size = ((2048, 4096, 14336),)
    kernel = grouped_weight_only_us("sm_100a", size, 148)
    assert dequantized.estimate_us(size, "sm_100a", 148) < kernel / 5


@pytest.mark.parametrize("arch", ["sm_89", "sm_121a"])
def test_never_where_warps_use_the_same_units_as_torch(arch):
    assert not any(chosen(arch, rows, 4096, 14336) for rows in (64, 512, 2048, 8192))


def test_experts_from_about_80_rows_each_on_a_b200():
    how = {"groups": 128, "is_ragged": True, "b_format": NVFP4}
    assert not chosen("sm_100a", 32 * 128, 1536, 2048, **how)
    assert chosen("sm_100a", 128 * 128, 1536, 2048, **how)


def test_limits():
    """Small products are bound by launches; dequantized weights of many experts need too much memory."""
    assert not chosen("sm_100a", 4096, 128, 128)
    assert not chosen("sm_100a", dequantized.LEAST_ROWS - 1, 4096, 14336)
    assert dequantized.suits(((512, 4096, 7168),) * 64)
    assert not dequantized.suits(((512, 4096, 7168),) * 256)


def test_torch_dequantizes_fp8_for_more():
    sizes = ((1024, 4096, 4096),)
    us = [dequantized.estimate_us(sizes, "sm_100a", 148, b_format=format) for format in (NVFP4, FP8_128x128)]
    assert us[1] > us[0] + 20
