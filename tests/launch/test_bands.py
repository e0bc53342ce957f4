"""launch.bands: large groups divided for the kernel give the same bits with less traffic, and stay whole without a gain."""

from dataclasses import replace

import pytest
import torch
from flat_parts import grouped_gemm

from nvfp4_cute import quantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.gpus import targets
from nvfp4_cute.launch import bands, prepared
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.launch.plan import config_of
from nvfp4_cute.operands.grouped import Result, Weights, check_lists
from nvfp4_cute.problem import GroupedProblem

NAME = "RTX 5090, two SMs and little L2"
SIZES = ((1600, 256, 64), (40, 256, 64))


@pytest.fixture
def small(monkeypatch):
    part = replace(targets.lookup("RTX 5090"), name=NAME, num_sms=2, l2_bytes=1 << 10)
    monkeypatch.setattr(targets, "TARGETS", (*targets.TARGETS, part))
    return part


def operands(device="cpu"):
    generator = torch.Generator().manual_seed(3)
    draw = lambda rows, k: quantize(torch.randn((rows, k), generator=generator).bfloat16())
    return [draw(m, k) for m, _, k in SIZES], [draw(n, k) for _, n, k in SIZES]


def product(backend, **options):
    a, b = operands()
    data, scales = ([[getattr(x, part) for x in side] for side in (a, b)] for part in ("data", "scale"))
    return grouped_gemm(*data, *scales, alpha=[0.5, 2.0], backend=backend, **options)


def task_on(gpu):
    a, b = operands()
    weights = [Weights("b", [x.data for x in b], [x.scale for x in b], "alpha", None)]
    problem, checked = check_lists(
        [x.data for x in a], [x.scale for x in a], weights, Result(None, torch.bfloat16, None), "blocked"
    )
    config = config_of(problem, gpu.arch, gpu.num_sms)
    return problem, checked, bands.divided(problem, checked, config, gpu)


@pytest.mark.parametrize("options", [{}, pytest.param({"out_dtype": "nvfp4"}, marks=pytest.mark.slow)])
def test_bits_are_those_of_whole_groups(small, options):
    with observe() as observer:
        found = product(f"emulator:{NAME}", **options)
    assert observer.plans[0].problem.sizes == ((512, 256, 64),) * 3 + ((64, 256, 64), (40, 256, 64))
    values = lambda x: x.dequantize() if options else x  # padding rows of scales hold anything
    for one, other in zip(found, product("emulator:RTX 5090", **options), strict=True):
        assert torch.equal(values(one), values(other))


def test_views_of_the_callers_memory(small):
    problem, whole, (found, parts) = task_on(small.gpu)
    assert found.num_groups == 5 and parts.owners == (0, 0, 0, 0, 1)
    starts = [x.data.data_ptr() - whole.a[0].data.data_ptr() for x in parts.a[:4]]
    assert starts == [512 * i * 32 for i in range(4)]
    scales = [x.scale.data_ptr() - whole.a[0].scale.data_ptr() for x in parts.a[:4]]
    assert scales == [4 * i * 512 for i in range(4)]
    assert [x.rows for x in parts.a] == [512, 512, 512, 64, 40]
    assert all(x.data_ptr() == parts.out[0].data_ptr() + 512 * i * 512 for i, x in enumerate(parts.out[:4]))


def test_a_prepared_call_finds_bands_in_other_memory(small):
    """Every place of the table holds a tensor of the call, or one inside it."""
    problem, whole, _ = task_on(small.gpu)
    task = GroupedTask(problem, whole)
    launch = task.launch(small.gpu, for_emulator=True)
    tensors = [tensor for _, tensor, _ in task.tensors()]
    parts = prepared.parts_of(launch, tensors)
    assert parts is not None
    offsets = [part.offset for part in parts.values() if part.tensor == 0]
    assert offsets == [512 * i * 32 for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("name", "size", "rows"),
    [
        ("GB10", (16384, 16384, 16384), 1024),
        ("GB10", (8192, 8192, 8192), 2048),
        ("GB10", (4096, 4096, 4096), 4096),
        ("RTX 5090", (8192, 8192, 8192), 8192),
        ("RTX 5090", (16384, 16384, 16384), 4096),
        pytest.param("B200", (16384, 16384, 16384), 4096, marks=pytest.mark.slow),
        ("GB10", (16384, 32, 16384), 16384),
        ("H100 SXM", (16384, 16384, 16384), 16384),
    ],
)
def test_rows_of_a_band_stay_in_half_of_l2(name, size, rows):
    target = targets.lookup(name)
    problem = GroupedProblem((size,), "list")
    config = config_of(problem, target.arch, target.num_sms)
    whole = task_on(target.gpu)[1]
    found = bands._rows_of_bands(problem, whole, config, target.gpu)
    assert found == [rows]
