"""Weight-only products of many rows whose weights are dequantized first: results of every operation, and what comes first."""

import flat_parts as parts
import pytest
import torch
from emulated_gpu import emulated_gpu

from nvfp4_cute import MoE, QuantizedLinear, dequantize, gemm, grouped_gemm, quantize, route
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.batch_invariance import set_batch_invariant
from nvfp4_cute.compile.cache import planning
from nvfp4_cute.formats.block_format import (
    INT8,
    MXFP4,
    MXFP4_FP8,
    MXFP8_E4M3,
    NVFP4,
    FP8_128x128,
    int4_format,
)
from nvfp4_cute.ops.parts import dequantized
from nvfp4_cute.planning.arch.dequantized import LEAST_ROWS

BACKEND = "emulator:sm_100a"
INT4 = int4_format(32, torch.bfloat16)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def first(monkeypatch):
    """Dequantizes whatever may be."""
    monkeypatch.setattr(dequantized, "dequantizes_first", lambda *_: True)


def some(*shape, seed=0, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def launches(run):
    """Result and launches of kernels."""
    with observe(check=True) as observer:
        result = run()
    return result, len(observer.stats)


def assert_close(got, want, tolerance):
    assert (got.float() - want.float()).norm() < tolerance * want.float().norm()


# ---- gemm ----
@pytest.mark.parametrize("format", [NVFP4, MXFP4, MXFP8_E4M3, INT4, FP8_128x128, INT8], ids=str)
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_products_of_every_format(first, format, out_dtype):
    """One launch, or none where torch dequantizes. Float32 results are not rounded to 16 bits on their way."""
    x, w, bias = some(70, 128), quantize(some(40, 128, seed=1), format=format), some(40, seed=2, dtype=FP32)
    how = {"alpha": 0.3, "bias": bias, "out_dtype": out_dtype}
    got, count = launches(lambda: gemm(x, w, backend=BACKEND, **how))
    assert count == (format.scale.bits == 8 or format.is_int4)
    # Weights in 16 bits: int4 values times their scales, and all weights with float32 scales, are rounded.
    exact = format in (NVFP4, MXFP4, MXFP8_E4M3) and out_dtype == FP32
    assert_close(got, gemm(x, w, backend="reference", **how), 1e-6 if exact else 4e-3)


def test_weights_are_rounded_once(first):
    x, w = some(LEAST_ROWS, 96), quantize(some(48, 96, seed=1), global_scale="auto")
    got = gemm(x, w, backend=BACKEND)
    assert torch.equal(got, torch.nn.functional.linear(x, dequantize(w, BF16)))


def test_factors_outside_the_range_of_fp16(first):
    x, w = some(70, 64, dtype=FP16) / 1000, quantize(some(16, 64, seed=1))
    how = {"alpha": 1e5, "out_dtype": FP32}
    got, want = (gemm(x, w, backend=backend, **how) for backend in (BACKEND, "reference"))
    assert want.isfinite().all()
    assert_close(got, want, 1e-6)


def test_batches_and_out(first):
    """Batches with a factor each, written to columns of a wider tensor."""
    x, w = some(2, 70, 64).permute(1, 2, 0), quantize(some(2, 24, 64, seed=1))
    alpha, wide = torch.tensor([0.5, -3.0]), torch.zeros(70, 32, 2, dtype=BF16)
    got = gemm(x, w, alpha=alpha, out=wide[:, :24], backend=BACKEND)
    assert got.data_ptr() == wide.data_ptr() and not wide[:, 24:].any()
    assert_close(wide[:, :24], gemm(x, w, alpha=alpha, backend="reference"), 4e-3)


def test_autocast_does_not_change_the_product(first):
    x, w = some(70, 64), quantize(some(16, 64, seed=1))
    want = gemm(x, w, backend=BACKEND)
    with torch.autocast("cpu", FP16):
        assert torch.equal(gemm(x, w, backend=BACKEND), want)


def test_faults_are_those_of_the_kernel(first):
    w = quantize(some(16, 64))
    with pytest.raises(ValueError, match="a has shape"):
        gemm(some(70, 96), w, backend=BACKEND)
    with pytest.raises(ValueError, match="bias"):
        gemm(some(70, 64), w, bias=some(15), backend=BACKEND)


def test_who_stays_with_kernels(first):
    """Few rows, batch-invariant calls, the reference, and weights in the order of a kernel."""
    w = quantize(some(16, 64))
    args = (w.data, NVFP4, BF16)
    assert dequantized.is_for_gemm(some(LEAST_ROWS, 64), *args, BACKEND)
    assert not dequantized.is_for_gemm(some(LEAST_ROWS - 1, 64), *args, BACKEND)
    assert not dequantized.is_for_gemm(some(LEAST_ROWS, 64), *args, "reference")
    assert not dequantized.is_for_gemm(some(LEAST_ROWS, 64), w.data, MXFP4_FP8, BF16, BACKEND)
    with set_batch_invariant():
        assert not dequantized.is_for_gemm(some(LEAST_ROWS, 64), *args, BACKEND)


# ---- groups ----
@pytest.mark.parametrize("has_out", [False, True])
def test_ragged_groups(first, has_out):
    """Groups with a factor each. Rows of no group keep their values in the caller's tensor."""
    x, w, alpha = some(70, 128), quantize(some(3, 40, 128, seed=1)), torch.tensor([0.3, 2.0, -1.0])
    offs = torch.tensor([10, 10, 66], dtype=torch.int32)
    out = torch.full((70, 40), 7.0).bfloat16() if has_out else None
    got, count = launches(lambda: grouped_gemm(x, w, offs, alpha=alpha, out=out, backend=BACKEND))
    assert count == 1
    assert_close(got[:66], grouped_gemm(x, w, offs, alpha=alpha, backend="reference")[:66], 4e-3)
    if has_out:
        assert got is out and (out[66:] == 7).all()


def test_groups_whose_sizes_torch_would_copy_to_the_host_stay_with_the_kernel(first):
    w = quantize(some(3, 40, 128))
    args = (some(70, 128), w.data, NVFP4, None, BF16)
    assert dequantized.is_for_groups(*args, BACKEND)
    assert not dequantized.is_for_groups(*args, "emulator:sm_80")
    assert not dequantized.is_for_groups(*args, "emulator:sm_120a")
    assert not dequantized.is_for_groups(some(70, 128, dtype=FP16), *args[1:4], FP16, BACKEND)


@pytest.mark.parametrize("layout", ["separate", "concatenated"])
def test_dual_products(first, layout):
    x, gate, up = some(70, 64), quantize(some(128, 64, seed=1)), quantize(some(128, 64, seed=2))
    both = quantize(torch.cat([dequantize(gate), dequantize(up)]))
    weights = (gate, up) if layout == "separate" else (both,)
    run = lambda backend: parts.dual_gemm(x, *weights, weight_layout=layout, backend=backend)
    got, count = launches(lambda: run(BACKEND))
    assert count == 2
    assert_close(got, run("reference"), 4e-3)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_of_experts(first, compiled):
    """Both products of the layer take this way. Repeated calls return the same bits."""
    layer = MoE.from_experts(some(4, 256, 64) / 8, some(4, 64, 128, seed=1) / 8, activations="16bit")
    x, choice = some(70, 64, seed=2), route(some(70, 4, seed=3), 2)
    want = layer(x, *choice)
    layer.backend = BACKEND
    with planning() as asked:
        layer(x, *choice)
    names = [key.to_name() for key in asked]
    assert [name.split("_")[1] for name in names].count("dequantize") == 1
    assert not any("grouped_gemm" in name or "dual_gemm" in name for name in names)
    run = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
    got = run(x, *choice)
    assert_close(got, want, 1e-2)
    assert torch.equal(run(x, *choice), got)


# ---- layers ----
def test_linear_layers(first):
    linear = torch.nn.Linear(64, 96).bfloat16()
    layer = QuantizedLinear.from_linear(linear, activations="16bit", backend=BACKEND)
    exact = QuantizedLinear.from_linear(linear, activations="16bit", backend="reference")
    x = some(70, 64)
    for rows in (x, x.half(), x.float()):
        got, count = launches(lambda rows=rows: layer(rows))
        assert got.dtype == rows.dtype and count == 1
        assert_close(got, exact(rows), 4e-3)
        assert torch.equal(layer(rows), got)
    _, count = launches(lambda: torch.compile(layer, backend="eager", fullgraph=True)(x))
    assert count == 1


def test_a_server_checks_its_weights_once(first, monkeypatch):
    """Another number of rows repeats the launch that dequantizes, without checks of the weights."""
    checked = []
    check = dequantized.check_weight_only
    monkeypatch.setattr(dequantized, "check_weight_only", lambda *given: checked.append(1) or check(*given))
    w, bias = quantize(some(48, 96, seed=1), global_scale="auto"), some(48, seed=2)
    layer, plain = QuantizedLinear.from_quantized(w, bias, activations="16bit"), dequantize(w, BF16)
    with emulated_gpu(monkeypatch):
        for rows in (LEAST_ROWS, LEAST_ROWS, 71, 130):
            x = some(rows, 96, seed=rows)
            assert torch.equal(layer(x), torch.nn.functional.linear(x, plain, bias))
    assert len(checked) == 1


def test_rows_of_another_k_are_refused_after_a_right_call(first, monkeypatch):
    w = quantize(some(48, 96, seed=1), global_scale="auto")
    with emulated_gpu(monkeypatch):
        for _ in range(2):
            gemm(some(70, 96), w)
        with pytest.raises(ValueError, match="have 96|has shape|K values"):
            gemm(some(70, 64), w)
