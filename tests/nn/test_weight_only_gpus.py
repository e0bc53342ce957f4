"""Layers that quantize activations, on GPUs without such products: weight-only, with one warning."""

import warnings

import pytest
import torch

from nvfp4_cute.formats.block_format import FP8_128x128
from nvfp4_cute.formats.block_scaled import quantize
from nvfp4_cute.models.checkpoints.stored import Scheme, StoredExperts, StoredLinear
from nvfp4_cute.models.layers import experts_module, linear_module
from nvfp4_cute.nn import activations
from nvfp4_cute.nn.experts import ModelExperts
from nvfp4_cute.nn.linear import QuantizedLinear

BACKEND = "emulator:sm_80"
WHERE = {"dtype": torch.bfloat16, "device": "cpu", "backend": BACKEND}
WARNING = "sm_80 multiplies no quantized activations: layers that ask for them are weight-only here"


@pytest.fixture(autouse=True)
def not_yet_warned():
    activations._warn.cache_clear()
    yield
    activations._warn.cache_clear()


def weights(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_a_linear_layer_is_weight_only_and_says_so_once():
    made = torch.nn.Linear(64, 40, bias=False, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=WARNING):
        layer = QuantizedLinear.from_linear(made, backend=BACKEND)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked = QuantizedLinear.from_linear(made, activations="16bit", backend=BACKEND)
        assert QuantizedLinear.from_linear(made, backend=BACKEND).mode == "16bit"
        assert QuantizedLinear.from_linear(made, backend="emulator:sm_90a").mode == "nvfp4"
    assert (layer.activations, layer.mode) == ("nvfp4", "16bit")
    x = weights((3, 64), 1)
    assert torch.equal(layer(x), asked(x))


def test_stored_layers_are_weight_only():
    stored = quantize(weights((40, 64)), global_scale=1.0, scale_layout="rowmajor")
    scheme = Scheme("nvfp4-pack-quantized", "nvfp4", "nvfp4")
    with pytest.warns(UserWarning, match=WARNING):
        layer = linear_module(StoredLinear("q", scheme, stored, torch.tensor(0.5)), None, **WHERE)
    assert isinstance(layer, QuantizedLinear) and layer.mode == "16bit"
    stored = quantize(weights((128, 256)), format=FP8_128x128)
    layer = linear_module(
        StoredLinear("q", Scheme("fp8", "fp8_128x128", "fp8_1x128"), stored, None), None, **WHERE
    )
    assert isinstance(layer, QuantizedLinear) and layer.format == FP8_128x128 and layer.activations == "16bit"


def test_stored_experts_are_weight_only():
    def experts(n, k):
        return quantize(weights((2, n, k)), scale_layout="rowmajor")

    one = torch.ones(2)
    stored = StoredExperts(
        "e", Scheme("modelopt", "nvfp4", "nvfp4"), experts(128, 64), torch.ones(2, 2), experts(64, 64), one, one, one,
        None, None, has_gate=True,
    )  # fmt: skip
    with pytest.warns(UserWarning, match=WARNING):
        module = experts_module(stored, "silu", **WHERE)
    assert isinstance(module, ModelExperts) and module.experts.activations == "16bit"
