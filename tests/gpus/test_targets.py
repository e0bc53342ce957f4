"""targets: every figure has a source, figures agree with each other, GPUs are found by name and SM count."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

from nvfp4_cute.backends import emulator
from nvfp4_cute.emulator.fronts import virtual_gpu
from nvfp4_cute.errors import UnsupportedTarget
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import MATH_FORMATS, TARGETS, detect, lookup, match
from nvfp4_cute.planning.arch import has_fp4_mma

EACH = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)

# What a driver reports, and the target that it is.
REPORTED = {
    ("NVIDIA B200", 148): "B200",
    ("NVIDIA GB200", 152): "GB200",
    ("NVIDIA B300 SXM6 AC", 148): "B300",
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188): "RTX PRO 6000",
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188): "RTX PRO 6000",
    ("NVIDIA GeForce RTX 5090", 170): "RTX 5090",
    ("NVIDIA GB10", 48): "GB10",
    ("NVIDIA Thor", 20): "Thor",
    ("NVIDIA H200", 132): "H200",
    ("NVIDIA H100 80GB HBM3", 132): "H100 SXM",
    ("NVIDIA H100 PCIe", 114): "H100 PCIe",
    ("NVIDIA A100-SXM4-80GB", 108): "A100 80GB",
    ("NVIDIA A100-SXM4-40GB", 108): "A100 40GB",
    ("NVIDIA A100-PCIE-40GB", 108): "A100 40GB",
    ("NVIDIA A10", 72): "A10",
    ("NVIDIA GeForce RTX 3090", 82): "RTX 3090",
    ("NVIDIA L40S", 142): "L40S",
    ("NVIDIA L4", 58): "L4",
    ("NVIDIA GeForce RTX 4090", 128): "RTX 4090",
    ("NVIDIA RTX 6000 Ada Generation", 142): "RTX 6000 Ada",
    ("NVIDIA GeForce RTX 4060 Laptop GPU", 24): "RTX 4060 Laptop",
}
NOT_IN_THE_TABLE = [
    ("NVIDIA H200 MIG 1g.18gb", 16),
    ("NVIDIA H200", 16),
    ("NVIDIA GB300", 148),
    ("NVIDIA GH200 480GB", 132),
    ("NVIDIA GeForce RTX 5090 D", 170),
    ("NVIDIA GeForce RTX 5090 Laptop GPU", 82),
    ("NVIDIA A100-SXM4-80GB", 98),
    ("NVIDIA A10G", 80),
    ("NVIDIA L40", 142),
    ("", 148),
]


# ---- the table -------------------------------------------------------------------------------------------------


def test_the_products_that_are_promised():
    assert [t.name for t in TARGETS] == [
        "B200", "B300", "GB200", "RTX PRO 6000", "RTX 5090", "GB10", "Thor", "H200", "H100 SXM", "H100 PCIe",
        "A100 80GB", "A100 40GB", "A10", "RTX 3090", "L40S", "L4", "RTX 4090", "RTX 6000 Ada", "RTX 4060 Laptop",
    ]  # fmt: skip


@EACH
def test_every_figure_has_a_source_and_every_source_a_figure(target):
    figures = list(target.figures())
    numeric = {f.name for f in dataclasses.fields(target)} - {"name", "arch", "device_name", "sources"}
    assert {name.split(".")[0] for name, _, _ in figures} == numeric
    for name, value, source in figures:
        assert (value is None) == (source == ""), name
        assert value is None or value > 0, name
    assert set(target.sources) == {name for name, _, source in figures if source}


@EACH
def test_required_figures_are_known(target):
    """What grids, tiles and floors need is there; the rest may be None."""
    required = {
        "num_sms",
        "boost_clock_hz",
        "smem_per_sm_bytes",
        "smem_per_cta_bytes",
        "l2_bytes",
        "memory_bytes",
        "bandwidth_bytes_per_s",
    }
    assert not [name for name, value, _ in target.figures() if name in required and value is None]


@EACH
def test_figures_agree_with_each_other(target):
    assert target.floor_bandwidth_bytes_per_s <= target.bandwidth_bytes_per_s
    assert target.clock_hz >= target.boost_clock_hz
    # 1 KiB of every CTA's shared memory belongs to the system.
    assert target.smem_per_cta_bytes == target.smem_per_sm_bytes - 1024
    rates = [target.rates[math] for math in MATH_FORMATS if math in target.rates and math != "int8"]
    assert all(wide > narrow for wide, narrow in zip(rates, rates[1:], strict=False))
    if "int8" in target.rates:
        # The GeForce of Ada halves what has fp32 sums; earlier GPUs lack fp8.
        assert target.rates["int8"] // target.rates.get("fp8", target.rates["int8"]) in (
            (1, 2) if target.arch == "sm_89" else (1,)
        )
    for math, peak in target.peaks.items():
        # A floor must hold against the published peak as well.
        assert peak <= target.math_flops_per_s(math) * (1 + 1e-6), math


def test_fp4_tensor_cores_are_those_of_blackwell():
    assert all(("nvfp4" in t.rates) == has_fp4_mma(t.arch) for t in TARGETS)
    assert {t.arch for t in TARGETS if "fp8" not in t.rates} == {"sm_80", "sm_86"}
    assert not [t.name for t in TARGETS if ("nvfp4" in t.rates) != ("nvfp4" in t.peaks)]


def test_a_rate_that_is_not_known_is_none_and_a_wrong_format_an_error():
    assert targets.GB10.math_flops_per_s("tf32") is None
    with pytest.raises(ValueError, match="math='int4' is unknown; use one of nvfp4, fp8, int8, fp16, tf32"):
        targets.B200.math_flops_per_s("int4")


def test_b200_at_its_boost_clock():
    assert targets.B200.math_flops_per_s("nvfp4") == pytest.approx(9.53e15, rel=1e-3)


@pytest.mark.parametrize(
    "target, math, measured_tflops",
    [
        (targets.B200, "nvfp4", 5797),
        (targets.B300, "nvfp4", 9860),
        (targets.RTX_PRO_6000, "nvfp4", 1629),
        (targets.RTX_5090, "nvfp4", 2019),
        (targets.RTX_5090, "fp8", 728),
        (targets.RTX_5090, "tf32", 122),
        (targets.GB10, "fp16", 95),
        (targets.THOR, "fp16", 135),
    ],
)
def test_nothing_measured_in_public_exceeds_the_rate_of_a_floor(target, math, measured_tflops):
    """The RTX 5090 ran above its stated boost clock."""
    assert measured_tflops * 1e12 <= target.math_flops_per_s(math)


def test_printed_targets_show_sources_and_gaps():
    text = str(targets.GB10)
    assert text.startswith("GB10 (sm_121a)\n")
    assert re.search(r"reached_bandwidth_bytes_per_s +2\.34e\+11  saturating read", text)
    assert re.search(r"launch_s +unknown$", text, re.MULTILINE)


def test_targets_are_hashable_and_cannot_be_changed():
    assert len(set(TARGETS)) == len(TARGETS)
    with pytest.raises(TypeError):
        targets.B200.peaks["nvfp4"] = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        targets.B200.num_sms = 1


def test_the_emulated_products_have_the_same_sms():
    """The emulator stands alone and keeps its own table: it must not drift away."""
    for arch, product in virtual_gpu.PRODUCTS.items():
        same = [t for t in TARGETS if t.arch == arch and re.fullmatch(t.device_name, product.name)]
        assert [t.num_sms for t in same] == [product.sm_count], arch
    assert (emulator.B200.arch, emulator.B200.num_sms) == ("sm_100a", 148)


# ---- finding a target ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, expected",
    [
        *((t.name, t.name) for t in TARGETS),
        ("b200", "B200"),
        ("rtx-5090", "RTX 5090"),
        ("RTX_PRO_6000", "RTX PRO 6000"),
        ("NVIDIA H200", "H200"),
        ("dgx spark", "GB10"),
        ("jetson thor", "Thor"),
        ("h100", "H100 SXM"),
        ("a100", "A100 80GB"),
        ("sm_86", "A10"),
    ],
)
def test_lookup(name, expected):
    assert lookup(name).name == expected


def test_lookup_of_a_wrong_name_helps():
    with pytest.raises(
        UnsupportedTarget, match=r"'b2000' is not in the table; did you mean B200\? use one of"
    ):
        lookup("b2000")
    with pytest.raises(UnsupportedTarget, match="'xyz' is not in the table; use one of B200, B300, GB200"):
        lookup("xyz")
    for far in ("gtx1080", "b100"):  # neither is a slip of the pen for a GPU of the table
        with pytest.raises(UnsupportedTarget) as error:
            lookup(far)
        assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("reported, expected", REPORTED.items())
def test_match(reported, expected):
    assert match(*reported).name == expected


@pytest.mark.parametrize("reported", NOT_IN_THE_TABLE)
def test_other_products_and_parts_of_one_do_not_match(reported):
    assert match(*reported) is None


def test_every_target_can_be_detected():
    assert sorted(REPORTED.values()) == sorted([*(t.name for t in TARGETS), "RTX PRO 6000", "A100 40GB"])


def test_detect_asks_the_device(monkeypatch):
    machine = {0: ("NVIDIA B200", 148), 1: ("NVIDIA H200", 132), 2: ("NVIDIA H200", 60)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(
            name=machine[device or 0][0], multi_processor_count=machine[device or 0][1]
        ),
    )
    assert [detect(), detect(0), detect(1), detect(2)] == [targets.B200, targets.B200, targets.H200, None]


def test_detect_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect() is None


@pytest.mark.parametrize(
    "capability, arch", [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((12, 1), "sm_121a")]
)
def test_arch_of_capability(capability, arch):
    assert targets.arch_of_capability(capability) == arch


@pytest.mark.gpu("sm_90a")
def test_a_real_gpu_is_what_the_table_says():
    properties = torch.cuda.get_device_properties(0)
    target = detect(0)
    assert target is not None and target.arch == "sm_90a"
    assert (target.l2_bytes, target.num_sms) == (properties.L2_cache_size, properties.multi_processor_count)


def test_an_architecture_stands_for_its_first_product():
    assert targets.lookup("sm_100a") is targets.B200
    assert targets.lookup("sm_120a") is targets.RTX_PRO_6000
    assert targets.lookup("sm_121a") is targets.GB10
