"""footprint: bytes of weights equal those of real tensors, including padding."""

import pytest
import torch

from nvfp4_cute.formats.block_scaled import quantize
from nvfp4_cute.gpus import targets
from nvfp4_cute.roofline import footprint
from nvfp4_cute.roofline.footprint import FORMATS, MOE_MODELS, Weights, linear, matrix_bytes, moe_layer


@pytest.mark.parametrize("n, k", [(128, 256), (130, 80), (1, 16), (384, 64)])
def test_nvfp4_bytes_are_those_of_a_quantized_tensor(n, k):
    """Blocked scales of 130 x 80 are padded in both directions."""
    tensor = quantize(torch.ones(n, k), global_scale="auto")
    stored = tensor.data.nbytes + tensor.scale.nbytes + tensor.global_scale.nbytes
    assert matrix_bytes("nvfp4", n, k) == stored


def test_wider_formats():
    assert matrix_bytes("fp16", 7, 33) == 7 * 33 * 2
    assert matrix_bytes("fp8", 7, 33) == 7 * 33 + 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("int4", 8, 16), "format 'int4' is unknown; use one of fp16, fp8, nvfp4"),
        (("nvfp4", 8, 100), "K=100 is not a positive multiple of 16 .*; pad K to 112"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        matrix_bytes(*arguments)


def test_experts_are_a_gate_an_up_and_a_down_matrix():
    layer = moe_layer("moe", 8, hidden=4096, intermediate=14336)
    assert layer.parameters == 8 * 3 * 4096 * 14336
    assert layer.stored_bytes("fp16") == 2 * layer.parameters
    three = Weights("moe, 3 layers", tuple((3 * count, n, k) for count, n, k in layer.matrices))
    assert moe_layer("moe, 3 layers", 8, 4096, 14336, num_layers=3) == three
    assert all(three.stored_bytes(f) == 3 * layer.stored_bytes(f) for f in FORMATS)


@pytest.mark.parametrize(
    "model, billions", [*zip(MOE_MODELS, (656.5, 29.0, 45.1), strict=True)], ids=lambda value: str(value)[:20]
)
def test_experts_of_the_models(model, billions):
    """Experts' share of 671, 30.5 and 46.7 billion parameters; the rest is attention, dense layers and embeddings."""
    assert model.model().parameters / 1e9 == pytest.approx(billions, abs=0.05)
    assert model.model().parameters == model.num_layers * model.layer().parameters


def test_records():
    (row,) = footprint.records([linear(4096, 4096)], targets.H200)
    assert row["bytes"] == {"fp16": 33_554_432, "fp8": 16_777_220, "nvfp4": 9_437_188}
    assert row["fp16_over_nvfp4"] == pytest.approx(16 / 4.5, rel=1e-5)
    assert row["read_us"]["fp16"] == pytest.approx(33_554_432 / 4.69e6)
    assert row["fits"] == dict.fromkeys(FORMATS, True)


def test_a_model_that_does_not_fit_says_so():
    rows = footprint.records(footprint.catalogue(), targets.RTX_5090)
    fits = {row["name"]: row["fits"] for row in rows}["Mixtral-8x7B experts, 32 layers"]
    assert fits == {"fp16": False, "fp8": False, "nvfp4": True}
