"""Ragged and masked grouped GEMM on the emulator, whose sizes only the device knows."""

import cases
import pytest
import torch
from device_groups_check import K, N, operands, run
from flat_parts import grouped_gemm
from oracle import assert_bitwise_equal, bits

from nvfp4_cute import KernelConfig, UnsupportedProblem
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.operands import group_sizes
from nvfp4_cute.operands.grouped import Result, Weights, check_device_groups

# Empty groups at both ends and in between; groups that end inside a tile and on its edge
ROWS = (0, 40, 128, 1, 0, 200, 0)


CONFIGS = ("t128x128x256_s0a2", "t128x64x256_s2a2_swap_p3", "t128x192x256_s2a2_2cta_swap_p4")
MULTICAST = "t128x64x256_s2a2_2cta_swap_m2_p8"
SM120_CONFIGS = (
    "t128x128x128_s0a1",
    "t128x64x256_s2a2_swap_p3",
    "t128x16x128_s3a2_swap_p2",
    "t128x32x256_s0a2_p5",
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["ragged", "masked"])
@pytest.mark.parametrize(
    ("arch", "config", "mode"),
    [
        ("sm_100a", CONFIGS[0], "eager"),
        ("sm_100a", CONFIGS[1], "lazy"),
        ("sm_100a", CONFIGS[2], "random:1"),
        ("sm_100a", MULTICAST, "random:3"),
        *(
            pytest.param("sm_100a", c, m, marks=pytest.mark.slow)
            for c in CONFIGS
            for m in ("eager", "random:2")
        ),
        ("sm_120a", SM120_CONFIGS[1], "lazy"),
        ("sm_120a", SM120_CONFIGS[2], "random:1"),
        *(
            pytest.param("sm_120a", c, m, marks=pytest.mark.slow)
            for c in SM120_CONFIGS
            for m in ("eager", "random:2")
        ),
    ],
)
def test_equals_the_reference_and_writes_no_row_of_no_group(form, arch, config, mode):
    arguments = operands(form, ROWS, slack=9)
    expected = run(arguments, "reference")
    with observe(mode=mode, check=True):
        actual = run(arguments, f"emulator:{arch}", config=KernelConfig.from_name(config))
    assert torch.equal(bits(actual), bits(expected))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["ragged", "masked"])
@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("sm_90a", "t128x16x128_s0a1_swap_pre_p6"),
        ("sm_90a", "t128x16x128_s0a1_swap_pre_sk_p6"),
        ("sm_90a", "t128x8x128_s0a1_swap_p6"),
        ("sm_100a", CONFIGS[1]),
        ("sm_120a", SM120_CONFIGS[1]),
    ],
)
def test_many_groups_with_few_rows(form, arch, config):
    """Workers skip whole windows of 32 groups: tiles lie at the edges of windows, with none in windows between."""
    rows = [0] * 150
    for group, count in ((0, 3), (31, 1), (32, 20), (95, 2), (96, 1), (128, 9), (149, 4)):
        rows[group] = count
    for part in (rows, [0] * 149 + [5]):
        arguments = operands(form, tuple(part), n=64, slack=3)
        expected = run(arguments, "reference")
        with observe(check=True):
            actual = run(arguments, f"emulator:{arch}", config=KernelConfig.from_name(config))
        assert torch.equal(bits(actual), bits(expected))


def test_the_reference_is_that_of_the_list_form():
    case = cases.Case("device", tuple((m, N, K) for m in ROWS), 0, has_alpha=True)
    listed = cases.make_operands(case)
    lists = grouped_gemm(*list(listed)[:4], alpha=listed.alpha, out_dtype=case.out_dtype, backend="reference")
    ragged = run(operands("ragged", ROWS), "reference")
    assert_bitwise_equal(ragged, torch.cat(lists))
    masked = run(operands("masked", ROWS), "reference")
    for g, part in enumerate(lists):
        assert_bitwise_equal(masked[g, : ROWS[g]], part)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["ragged", "masked"])
@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_columns_may_be_contiguous(arch, form):
    arguments = operands(form, (30, 70), n=72, slack=3)
    out = arguments["out"].transpose(-1, -2).contiguous().transpose(-1, -2)
    expected = run(arguments, "reference")
    actual = grouped_gemm(**{**arguments, "out": out}, backend=f"emulator:{arch}")
    assert torch.equal(bits(actual.contiguous()), bits(expected))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_many_groups(arch):
    """More groups than a warp has lanes, so it searches several windows. A CTA skips windows without tiles."""
    rows = tuple(3 if g in (0, 37, 69, 511) else 0 for g in range(512))
    arguments = operands("ragged", rows, n=40, k=64)
    config = KernelConfig((128, 64, 256), swap_ab=True, num_cta=3)
    with observe(check=True):
        actual = run(arguments, f"emulator:{arch}", config=config)
    assert_bitwise_equal(actual, run(arguments, "reference"))


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_no_rows_at_all(arch):
    """No CTA gets a tile. A config is still chosen."""
    arguments = operands("masked", (0, 0), n=40, k=64, slack=5)
    before = bits(arguments["out"]).clone()
    with observe(check=True):
        assert torch.equal(bits(run(arguments, f"emulator:{arch}")), before)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_one_launch_serves_sizes_that_change(arch, monkeypatch):
    """The compiled kernel and its table stay the same; the sizes that the device reads decide, as with a replayed graph."""
    monkeypatch.setattr(
        group_sizes, "_values", lambda name, sizes: None
    )  # as on a GPU, where nothing reads them before
    arguments = operands("masked", (60, 0, 33), n=64, k=128, slack=0)
    problem, checked, _ = check_device_groups(
        arguments["a"],
        arguments["a_scale"],
        [Weights("b", arguments["b"], arguments["b_scale"], "alpha", arguments["alpha"])],
        (None, arguments["masked_m"]),
        Result(arguments["out"], arguments["out_dtype"], None),
    )
    task = GroupedTask(problem, checked)
    before = task.launch(lookup(arch).gpu, for_emulator=True).table
    for sizes in ((60, 0, 33), (1, 60, 0), (99, -5, 7)):  # sizes beyond the rows are clipped
        arguments["masked_m"].copy_(torch.tensor(sizes))
        arguments["a_scale"].fill_(0x38)
        assert (task.launch(lookup(arch).gpu, for_emulator=True).table == before).all()
        actual, expected = run(arguments, f"emulator:{arch}"), run(arguments, "reference")
        assert torch.equal(bits(actual), bits(expected))


@pytest.mark.parametrize(
    ("change", "error", "facts"),
    [
        ({"offs": torch.zeros(3, dtype=torch.int64)}, TypeError, ("offs", "int64", "torch.int32")),
        ({"masked_m": torch.zeros(7, dtype=torch.int32)}, ValueError, ("offs and masked_m",)),
        ({"scale_layout": "rowmajor"}, UnsupportedProblem, ("rowmajor", "padded to 128")),
        (
            {"b": torch.zeros(6, N, K // 2, dtype=torch.uint8)},
            ValueError,
            ("b has shape", "7 entries in offs"),
        ),
        ({"a": torch.zeros(7, 9, K // 2, dtype=torch.uint8)}, ValueError, ("a has shape", "[sum of M, K/2]")),
        ({"a_scale": torch.zeros(512, dtype=torch.uint8)}, ValueError, ("a_scale has 512 bytes", "2560")),
        ({"b_scale": torch.zeros(512, dtype=torch.uint8)}, ValueError, ("b_scale has 512 bytes", "7 groups")),
        ({"out_dtype": torch.float32}, TypeError, ("out has dtype", "float32")),
        ({"alpha": [1.0]}, ValueError, ("alpha has 1 entries for 7 groups",)),
    ],
)
def test_refusals_name_rule_and_value(change, error, facts):
    arguments = operands("ragged", ROWS)
    before = bits(arguments["out"]).clone()
    with pytest.raises(error) as caught:
        grouped_gemm(**{**arguments, **change}, backend="reference")
    for fact in facts:
        assert fact in str(caught.value)
    assert torch.equal(bits(arguments["out"]), before)
