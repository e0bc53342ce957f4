"""The kernel that finds a global scale returns the bits of ``formats.global_scale``. Also checks products with it."""

import pytest
import torch

from nvfp4_cute import quantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats.global_scale import resolve_global_scale
from nvfp4_cute.ops.global_scale import find_global_scale
from nvfp4_cute.ops.quantize import find_and_quantize
from nvfp4_cute.planning.arch.simt import AMAX_SMALL

DTYPES = (torch.bfloat16, torch.float16)
EXTREMES = {
    "zeros": 0.0,
    "negative zero": -0.0,
    "subnormal": 1e-7,
    "least of bfloat16": 2.0**-133,
    "largest of float16": 65504.0,
    "infinite": float("-inf"),
    "nan": float("nan"),
}


def expect(x, got, *times):
    scale = resolve_global_scale(x, "auto", None)
    want = [scale, *(factor * scale for factor in times)]
    assert [t.shape for t in got] == [torch.Size(())] * len(want)
    assert [t.view(torch.int32).item() for t in got] == [t.view(torch.int32).item() for t in want]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["emulator:sm_90a", "emulator:sm_100a", "emulator:sm_120a"])
def test_one_cta_and_many(dtype, backend):
    factors = [torch.tensor(0.37), torch.tensor(2.0**-20)]
    for shape, count in (((1, 8), 0), ((3, 5, 416), 1), ((33, AMAX_SMALL // 32), 2)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
        x[..., -1, -1] = -9
        with observe(check=True) as observer:
            got = find_global_scale(x, *factors[:count], backend=backend)
        expect(x, got, *factors[:count])
        assert len(observer.stats) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", EXTREMES.values(), ids=EXTREMES)
def test_ends_of_the_range(dtype, value):
    for first in (0.0, 2.0**-12):
        x = torch.full((2, 64), value).to(dtype)
        x[0, 0] = first
        expect(x, find_global_scale(x, backend="emulator:sm_90a"))


def test_rows_with_gaps_and_what_no_kernel_reads():
    """The kernel reads rows that are a multiple of 16 bytes apart in place; the specification computes the rest."""
    wide = torch.randn(6, 200).half()
    wide[:, 128:] = 100
    odd = torch.randn(65).half()[1:].view(2, 32)
    with observe(check=True) as observer:
        expect(wide[:, :128], find_global_scale(wide[:, :128], backend="emulator:sm_90a"))
        assert len(observer.stats) == 1
        for x in (odd, wide[:, :132], wide.float(), wide[:0], torch.randn(4, 6).half()):
            expect(x, find_global_scale(x, backend="emulator:sm_90a"))
        assert len(observer.stats) == 1


def expect_quantized(x, got, layout="blocked"):
    want = quantize(x, global_scale="auto", scale_layout=layout, backend="reference")
    assert torch.equal(got.data, want.data) and torch.equal(got.global_scale, want.global_scale)
    assert (
        torch.equal(got.scale.view(torch.uint8), want.scale.view(torch.uint8)) and got.scale_layout == layout
    )


def test_quantize_finds_it(monkeypatch):
    """For batches, rows with gaps and large tensors, a preceding launch finds the scale."""
    monkeypatch.setattr("nvfp4_cute.ops.quantize.AMAX_SMALL", 640)
    batches = torch.randn(2, 9, 96).bfloat16()
    rows = batches[0]
    for x, launches in ((batches, 2), (rows[:, :64], 2), (rows, 2), (rows[:6], 1)):
        with observe(check=True) as observer:
            expect_quantized(x, quantize(x, global_scale="auto", backend="emulator:sm_90a"))
        assert len(observer.stats) == launches


ONE_LAUNCH = (
    ("sm_90a", torch.bfloat16, 1, "blocked"),
    ("sm_100a", torch.float16, 2, "blocked"),
    ("sm_120a", torch.bfloat16, 0, "rowmajor"),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("arch", "dtype", "count", "layout"), ONE_LAUNCH, ids=str)
def test_one_launch_finds_it_and_quantizes(arch, dtype, count, layout):
    """Every CTA finds the same scale, and the first one stores it."""
    factors = [torch.tensor(0.37), torch.tensor(2.0**-20)][:count]
    for m, k in ((1, 16), (5, 1040), (140, 96)):
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(7)).to(dtype)
        x[-1, -2:] = torch.tensor([-9, float("inf")])
        with observe(check=True) as observer:
            q, products = find_and_quantize(x, *factors, scale_layout=layout, backend=f"emulator:{arch}")
        expect_quantized(x, q, layout)
        expect(x, [q.global_scale, *products], *factors)
        assert len(observer.stats) == 1 and not observer.hazards


@pytest.mark.parametrize("backend", ["reference", "emulator:sm_90a"])
def test_a_third_factor_is_refused(backend):
    with pytest.raises(ValueError, match="3 factors; a launch has up to 2"):
        find_global_scale(torch.ones(1, 8).half(), *[torch.ones(())] * 3, backend=backend)
    with pytest.raises(ValueError, match="3 factors; a launch has up to 2"):
        find_and_quantize(torch.ones(1, 16).half(), *[torch.ones(())] * 3, backend=backend)


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype):
    factor = torch.tensor(0.37, device="cuda")
    for shape in ((1, 16), (32, 4096), (2048, 7168), (3, 1000, 1056)):
        for _ in range(3):
            x = torch.randn(shape, device="cuda").to(dtype)
            x.view(-1)[:2] = torch.tensor([float("inf"), float("nan")])
            expect(x, find_global_scale(x, factor), factor)
            q, products = find_and_quantize(x, factor)
            expect_quantized(x.cpu(), q.cpu())
            expect(x, [q.global_scale, *products], factor)
    graph = torch.cuda.CUDAGraph()
    x = torch.randn(16, 4096, device="cuda").to(dtype)
    with torch.cuda.graph(graph):
        got = find_global_scale(x, factor)
    for size in (1, 100):
        x.normal_().mul_(size)
        graph.replay()
        expect(x, got, factor)
