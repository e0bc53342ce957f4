"""Loading a layer of any format: bytes are codes, numbers are not rounded, factors are positive; anything else raises."""

import copy
import json
import pickle
from functools import cache

import pytest
import torch

from nvfp4_cute import MXFP8_E4M3, FP8_128x128, QuantizedLinear, quantize
from nvfp4_cute.formats.block_format import INT8, int4_format
from nvfp4_cute.formats.int4 import int4_tensor
from nvfp4_cute.nn.embedding import QuantizedEmbedding
from nvfp4_cute.nn.experts import Projection, SortedExperts
from nvfp4_cute.nn.moe import MoE
from nvfp4_cute.nn.state import description


def some(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 8


def sorted_fp8():
    sides = (quantize(some(2, 128, 128), format=FP8_128x128) for _ in range(3))
    return SortedExperts([Projection(side) for side in sides], activations="fp8_1x128")


LAYERS = {
    "QuantizedLinear": lambda: QuantizedLinear.from_linear(torch.nn.Linear(128, 64).bfloat16()),
    "QuantizedLinear, FP8": lambda: QuantizedLinear.from_quantized(
        quantize(some(128, 128), format=FP8_128x128)
    ),
    "QuantizedLinear, INT8": lambda: QuantizedLinear.from_quantized(quantize(some(64, 128), format=INT8)),
    "QuantizedLinear, INT4": lambda: QuantizedLinear.from_quantized(
        quantize(some(64, 128), format=int4_format(128))
    ),
    "Experts, FP8": sorted_fp8,
    "MoE, FP8": lambda: MoE.from_experts(some(2, 256, 128), some(2, 128, 128), format=FP8_128x128),
    "MoE, INT8": lambda: MoE.from_experts(some(2, 64, 32), some(2, 32, 32), format=INT8, activations="int8"),
    "MoE, INT4": lambda: MoE.from_experts(some(2, 256, 128), some(2, 128, 128), format=int4_format()),
    "MoE": lambda: MoE.from_experts(some(2, 64, 32), some(2, 32, 32)),
    "NVFP4 table": lambda: QuantizedEmbedding(quantize(some(5, 64))),
    "MXFP8 table": lambda: QuantizedEmbedding(quantize(some(5, 64), format=MXFP8_E4M3)),
}
CODES = [
    (layer, name)
    for layer, names in {
        "QuantizedLinear": ("weight", "weight_scale"),
        "QuantizedLinear, FP8": ("weight",),
        "QuantizedLinear, INT8": ("weight",),
        "QuantizedLinear, INT4": ("weight",),
        "Experts, FP8": ("projections.0.data",),
        "MoE, FP8": ("w13", "w2"),
        "MoE, INT8": ("w13", "w2"),
        "MoE, INT4": ("w13", "w2"),
        "MoE": ("w13", "w13_scale", "w2_scale"),
        "NVFP4 table": ("weight", "weight_scale"),
        "MXFP8 table": ("weight", "weight_scale"),
    }.items()
    for name in names
]
PACKED = [
    ("QuantizedLinear", "weight"),
    ("QuantizedLinear, INT4", "weight"),
    ("MoE, INT4", "w13"),
    ("MoE, INT4", "w2"),
    ("MoE", "w13"),
    ("NVFP4 table", "weight"),
]
FACTORS = [
    ("QuantizedLinear", "weight_global_scale"),
    ("QuantizedLinear, FP8", "weight_scale_inv"),
    ("QuantizedLinear, INT8", "weight_scale"),
    ("Experts, FP8", "projections.1.scale"),
    ("MoE, FP8", "w2_scale"),
    ("MoE, INT8", "w13_scale"),
    ("MoE", "alpha13"),
    ("MoE", "alpha2"),
]


@cache
def made(layer):
    return LAYERS[layer]()


def loaded(layer, name, change):
    """Loads a layer with one tensor changed; returns the loaded tensor and the original."""
    state = made(layer).state_dict()
    other = copy.deepcopy(made(layer))
    other.load_state_dict(state | {name: change(state[name])})
    got, want = other.state_dict()[name], state[name]
    assert got.dtype == want.dtype
    return got.view(torch.uint8), want.view(torch.uint8)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("layer, name", CODES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_bytes_are_codes(layer, name, dtype):
    assert torch.equal(*loaded(layer, name, lambda t: t.view(dtype)))


@pytest.mark.parametrize("layer, name", [code for code in CODES if code not in PACKED])
def test_numbers_that_the_format_has_are_taken_and_others_refused(layer, name):
    assert torch.equal(*loaded(layer, name, lambda t: t.float()))
    with pytest.raises(
        RuntimeError, match=f"{name} is torch.float32; expected .* Load 16-bit weights before layers"
    ):
        loaded(layer, name, lambda t: t.float() * 1.01)
    with pytest.raises(RuntimeError, match="or quantize them first"):
        loaded(layer, name, lambda t: torch.zeros(t.shape).to(torch.float8_e5m2))


@pytest.mark.parametrize("layer, name", PACKED)
def test_packed_values_are_no_numbers(layer, name):
    with pytest.raises(RuntimeError, match="expected torch.uint8. Load 16-bit"):
        loaded(layer, name, lambda t: t.float())


def test_words_of_scales_and_zero_points_are_no_numbers():
    with pytest.raises(RuntimeError, match="weight_scale is torch.float32; expected torch.int32"):
        loaded("QuantizedLinear, INT4", "weight_scale", lambda t: torch.full(t.shape, 0.01))


@pytest.mark.parametrize("layer, name", FACTORS)
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -1.0])
def test_factors_are_finite_and_positive(layer, name, factor):
    with pytest.raises(RuntimeError, match=f"{name} is .*; a scale is finite and positive"):
        loaded(layer, name, lambda t: t * factor)


def test_a_block_of_zeros_has_a_factor_of_zero():
    weights = torch.zeros(128, 128)
    layer = QuantizedLinear.from_quantized(quantize(weights, format=FP8_128x128))
    layer.load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match="alpha2 is 0 to 0"):
        loaded("MoE", "alpha2", lambda t: t * 0)


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_are_pickled(layer):
    """Torch cannot unpickle 8-bit floats itself. A tensor that two modules share stays one tensor in a copy."""
    pair = torch.nn.ModuleList([made(layer), made(layer)])
    for other in (pickle.loads(pickle.dumps(pair)), copy.deepcopy(pair)):
        assert other[0] is other[1] and other[0].training == made(layer).training
        for (name, tensor), same in zip(
            made(layer).named_buffers(), dict(other[0].named_buffers()).values(), strict=True
        ):
            assert same.dtype == tensor.dtype, name
            assert torch.equal(bits(same), bits(tensor)), name


def test_tables_that_layers_share_stay_one_in_a_copy():
    table = made("NVFP4 table")
    tied = copy.deepcopy(torch.nn.ModuleList([table, QuantizedLinear.from_quantized(table.table)]))
    assert tied[0].weight_scale.data_ptr() == tied[1].weight_scale.data_ptr()


@pytest.mark.parametrize("layer", LAYERS)
def test_converted_layers_keep_their_codes(layer):
    """``type`` converts integers as well, where ``to`` converts only floats."""
    for convert in (torch.nn.Module.half, lambda m: m.type(torch.float16), torch.nn.Module.double):
        other = convert(copy.deepcopy(made(layer))).state_dict()
        for name, tensor in made(layer).state_dict().items():
            if name != "bias":
                assert torch.equal(bits(other[name]), bits(tensor)), name


@pytest.mark.parametrize("other", [torch.zeros(64, 128), torch.nn.Parameter(torch.zeros(64, 128)), None])
def test_decoded_weights_are_not_set(other):
    layer = copy.deepcopy(made("QuantizedLinear"))
    with pytest.raises(AttributeError, match="weight is set to a .*; it is decoded when it is read"):
        layer.weight = other
    assert torch.equal(layer.packed_weight, made("QuantizedLinear").packed_weight)
    layer.weight = torch.zeros_like(layer.packed_weight)
    assert not layer.weight.any()


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_are_made_on_the_meta_device(layer):
    """Layers quantize weights without memory, then get memory or the tensors of a state dict."""
    full = made(layer)  # kept for other tests, so not on the meta device
    with torch.device("meta"):
        empty = LAYERS[layer]() if "NVFP4" not in layer.split()[0] else copy.deepcopy(full).to("meta")
    assert all(buffer.is_meta for buffer in empty.buffers())
    state = made(layer).state_dict()
    for given, assign in ((copy.deepcopy(empty).to_empty(device="cpu"), False), (empty, True)):
        given.load_state_dict(state, assign=assign)
        for name, value in given.state_dict().items():
            assert value.dtype == state[name].dtype
            assert torch.equal(value.reshape(-1).view(torch.uint8), state[name].reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("layer", [name for name in LAYERS if name.startswith(("Experts", "MoE"))])
def test_experts_without_memory_give_results_without_memory(layer):
    empty = copy.deepcopy(made(layer)).to("meta")
    x = torch.empty(3, 32 if layer in ("MoE", "MoE, INT8") else 128, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(3, 2, dtype=torch.int64, device="meta")
    y = empty(x, ids, torch.empty(3, 2, device="meta"))
    assert y.is_meta and y.shape == x.shape and y.dtype == x.dtype


@pytest.mark.parametrize("layer", ["MoE, FP8", "MoE, INT8", "MoE, INT4"])
def test_experts_name_their_formats(layer):
    """Bits of another format and a later version are refused; a state dict without the name loads; meta tensors are not read."""
    state = made(layer).state_dict()
    assert json.loads(bytes(state["_extra_state"].tolist()))["version"] == 1
    made(layer).load_state_dict({name: value for name, value in state.items() if name != "_extra_state"})
    copy.deepcopy(made(layer)).load_state_dict(
        {name: value.to("meta") for name, value in state.items()}, assign=True
    )
    for said in ({"formats": ["mxfp4", "mxfp4"], "version": 1}, {"formats": ["int8", "int8"], "version": 2}):
        with pytest.raises(RuntimeError, match="_extra_state says .*; this layer reads"):
            made(layer).load_state_dict(state | {"_extra_state": description(said)})


def test_experts_name_the_order_of_their_rows():
    """Gate and up in another order have the same shapes, and other results."""
    layouts = ("concatenated", "interleaved", "interleaved_64_up_first", "interleaved_32_gate_first")
    layers = [MoE(2, 64, 128, weight_layout=layout) for layout in layouts]
    for one in layers:
        for other in layers:
            if one is other:
                one.load_state_dict(other.state_dict())
                continue
            with pytest.raises(RuntimeError, match="weight_layout"):
                one.load_state_dict(other.state_dict())


def test_int4_of_no_memory_is_made_of_parts():
    """Values on the meta device are not read, so the format has zero points even if all may be 8."""
    codes, scale = (
        torch.empty(2, 8, 128, dtype=torch.uint8, device="meta"),
        torch.empty(2, 8, 2, device="meta").half(),
    )
    zeros = torch.empty(2, 8, 2, dtype=torch.uint8, device="meta")
    assert int4_tensor(codes, scale).format == int4_format(64, "float16")
    made_of = int4_tensor(codes, scale, zeros)
    assert made_of.format == int4_format(64, "float16", zero_points=True)
    assert made_of.data.is_meta and made_of.scale.is_meta and made_of.data.shape == (2, 8, 64)
