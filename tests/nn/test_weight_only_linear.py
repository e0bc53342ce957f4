"""Linear layers with 16-bit activations and many rows dequantize weights first, in one graph."""

import pytest
import torch

from nvfp4_cute import QuantizedLinear, dequantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.nn import weight_only
from nvfp4_cute.planning.arch.simt import decode_first_rows

ARCHS = ["sm_90a", "sm_100a"]


def some_layer(backend, bias=False):
    linear = torch.nn.Linear(64, 96, bias=bias).bfloat16()
    return QuantizedLinear.from_linear(linear, activations="16bit", backend=backend)


def refuse(*arguments, **options):
    raise AssertionError("not for so many rows")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHS)
def test_many_rows_decode_the_weights(arch, monkeypatch):
    """One launch dequantizes; torch multiplies."""
    layer, rows = some_layer(f"emulator:{arch}"), decode_first_rows(arch)
    x = torch.randn(rows, 64).bfloat16()
    with monkeypatch.context() as patch, observe(check=True) as observer:
        patch.setattr(weight_only, "gemm", refuse)
        got = layer(x)
    assert len(observer.stats) == 1
    assert torch.equal(got, torch.nn.functional.linear(x, dequantize(layer.quantized_weight, torch.bfloat16)))
    monkeypatch.setattr(weight_only, "dequantize", refuse)
    assert layer(x[:5]).shape == (5, 96)
    with pytest.raises(AssertionError, match="so many rows"):
        layer(x)


def test_results_keep_their_dtype():
    layer = some_layer("emulator:sm_90a", bias=True)
    x = torch.randn(decode_first_rows("sm_90a"), 64)
    assert layer(x).dtype == torch.float32 and layer(x.half()).dtype == torch.float16
    few = layer(x[:7])
    assert (layer(x)[:7] - few).abs().max() < 0.02


def test_the_reference_does_not_decode_first():
    layer = some_layer("reference")
    x = torch.randn(decode_first_rows("sm_90a") + 1, 64).bfloat16()
    assert torch.equal(layer(x)[:3], layer(x[:3]))
