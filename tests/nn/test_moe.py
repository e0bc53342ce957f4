"""MoE: quantization, state dict, devices and dtypes, torch.compile. Results are tested in tests/moe."""

import copy
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from expert_layers import moe

import nvfp4_cute
from nvfp4_cute import (
    Activation,
    ActivationFormat,
    BlockScaledTensor,
    MoE,
    Parallel,
    UnsupportedProblem,
    quantize,
    route,
)
from nvfp4_cute.experts.weights import ExpertWeights
from nvfp4_cute.formats.block_format import INT8, MXFP4, MXFP8_E4M3, NVFP4, FP8_128x128, int4_format

E, H, I, T = 4, 128, 128, 6  # experts, hidden, intermediate, tokens


def some(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def experts(seed=0):
    return some(E, 2 * I, H, seed=seed).bfloat16() / 8, some(E, H, I, seed=seed + 1).bfloat16() / 8


def batch():
    ids, weights = route(some(T, E, seed=5), 2)
    return some(T, H, seed=6).bfloat16(), ids, weights


def test_close_to_the_layer_in_float64():
    gate_up, down = experts()
    x, ids, weights = batch()
    y = MoE.from_experts(gate_up, down)(x, ids, weights)
    want = torch.zeros(T, H, dtype=torch.float64)
    for t in range(T):
        for k in range(2):
            e = int(ids[t, k])
            gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
            want[t] += weights[t, k].double() * (down[e].double() @ (torch.nn.functional.silu(gate) * up))
    assert (y.double() - want).norm() < 0.25 * want.norm()


def test_scales_reach_the_result():
    """The module equals ``moe`` with the same scales; calibrated scales are factors of the products."""
    gate_up, down = experts()
    x, ids, weights = batch()
    scales = {"input_scale": torch.tensor(0.01), "hidden_scale": torch.rand(E) / 10}
    layer = MoE.from_experts(gate_up, down, **scales)
    w13, w2 = ExpertWeights.quantize(gate_up), ExpertWeights.quantize(down)
    assert torch.equal(layer(x, ids, weights), moe(x, ids, weights, w13, w2, **scales))
    assert not torch.equal(layer(x, ids, weights), MoE.from_experts(gate_up, down)(x, ids, weights))


def test_factors_of_both_halves():
    gate_up, down = experts()
    w13, w2 = ExpertWeights.quantize(gate_up), ExpertWeights.quantize(down)
    pair = ExpertWeights(w13.data, w13.scale, torch.stack([w13.global_scale, 2 * w13.global_scale], 1))
    x, ids, weights = batch()
    layer = MoE.from_quantized(pair, w2)
    assert torch.equal(layer(x, ids, weights), moe(x, ids, weights, pair, w2))
    assert not torch.equal(layer(x, ids, weights), moe(x, ids, weights, w13, w2))
    loaded = MoE(E, H, I)
    loaded.load_state_dict(layer.state_dict())
    assert torch.equal(loaded(x, ids, weights), layer(x, ids, weights))


@pytest.mark.parametrize(
    "scales", [{}, {"input_scale": "per_row"}, {"input_scale": 0.02, "hidden_scale": [0.1, 0.2, 0.3, 0.4]}]
)
def test_state_dict(scales):
    """A file and an empty layer give the same result, with 4.5 bits per weight and few further bytes."""
    gate_up, down = experts()
    x, ids, weights = batch()
    layer = MoE.from_experts(gate_up, down, **scales)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    empty = MoE(E, H, I, **scales)
    empty.load_state_dict(torch.load(file))
    assert torch.equal(empty(x, ids, weights), layer(x, ids, weights))
    size = sum(t.numel() * t.element_size() for t in layer.state_dict().values())
    assert size <= 3 * E * H * I * 9 // 16 + 100 * E


def test_biases_and_dtypes():
    gate_up, down = experts()
    bias13, bias2 = some(E, 2 * I).bfloat16(), some(E, H).bfloat16()
    x, ids, weights = batch()
    activation = Activation("swiglu_oai", limit=7.0)
    layer = MoE.from_experts(gate_up, down, bias13=bias13, bias2=bias2, activation=activation)
    y = layer(x, ids, weights)
    assert not torch.equal(y, MoE.from_experts(gate_up, down, activation=activation)(x, ids, weights))
    halved = layer.half()
    assert halved.bias13.dtype == torch.float16 and halved.alpha13.dtype == torch.float32
    assert halved.w13_scale.dtype == torch.float8_e4m3fn
    other = halved(x.half(), ids, weights).float()
    assert (other - y.float()).norm() < 0.1 * other.norm()


def test_ids_of_few_bits():
    x, ids, weights = batch()
    layer = MoE.from_experts(*experts())
    expected = layer(x, ids, weights)
    for dtype in (torch.uint8, torch.int16):
        assert torch.equal(layer(x, ids.to(dtype), weights), expected)
    with pytest.raises(TypeError, match=r"^ids is torch.float32; expected whole numbers: pass ids.long\(\)"):
        layer(x, ids.float(), weights)


def test_shapes_and_shared():
    gate_up, down = experts()
    x, ids, weights = batch()
    layer = MoE.from_experts(gate_up, down)
    y = layer(x.view(2, 3, H), ids, weights, shared=x.view(2, 3, H))
    assert y.shape == (2, 3, H)
    torch.testing.assert_close(
        y.view(T, H).float(), (layer(x, ids, weights) + x).float(), rtol=0.02, atol=0.02
    )
    assert layer(x[:0], ids[:0], weights[:0]).shape == (0, H)
    assert "num_experts=4" in repr(layer)


def test_without_a_gate():
    up, down = some(E, 96, H).bfloat16(), some(E, H, 96).bfloat16()
    x, ids, weights = batch()
    layer = MoE.from_experts(up, down, weight_layout="none", activation="relu2")
    e = int(ids[0, 0])
    first = layer(x[:1], ids[:1, :1].contiguous(), torch.ones(1, 1))
    want = down[e].float() @ (up[e].float() @ x[0].float()).relu().square()
    assert (first[0].float() - want).norm() < 0.3 * want.norm()


@pytest.mark.parametrize("top_k", [1, 2])
def test_router_weights_on_the_input(top_k):
    """Each expert sees its own product of weight and token, rounded once; results are added in float32."""
    w13, w2 = (quantize(w) for w in experts())
    x, ids, weights = batch()
    ids, weights = ids[:, :top_k].contiguous(), weights[:, :top_k].contiguous()
    layer = MoE.from_quantized(w13, w2, weight_on_input=True)
    plain = MoE.from_quantized(w13, w2)
    rows = [x * weights[:, k : k + 1].bfloat16() for k in range(top_k)]
    each = [plain(r, ids[:, k : k + 1].contiguous(), torch.ones(T, 1)).float() for k, r in enumerate(rows)]
    want = sum(each[1:], each[0])
    assert torch.equal(layer(x, ids, weights), want.bfloat16())
    assert not torch.equal(layer(x, ids, weights), plain(x, ids, weights))
    how = ActivationFormat("nvfp4", weight_on_input=True)
    got = nvfp4_cute.moe(x, ids, weights, w13, w2, activations=how, shared=x)
    assert torch.equal(got, (want + x).bfloat16())
    with pytest.raises(ValueError, match="weights is"):
        layer(x, ids, weights.double())


FORMATS_AND_ROWS = [
    (NVFP4, "nvfp4"), (MXFP4, "mxfp8_e4m3"), (MXFP4, "16bit"), (MXFP8_E4M3, "mxfp8_e5m2"), (FP8_128x128, "16bit"), (INT8, "16bit"),
    (int4_format(32), "16bit"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "rows"), FORMATS_AND_ROWS, ids=str)
def test_one_way_for_every_format(format, rows):
    """Every format has the bits of ``moe``, a state dict that names it, and conversions that keep codes and scales."""
    (gate_up, down), (x, ids, weights) = experts(), batch()
    bias = some(E, 2 * I, seed=3).bfloat16()
    options = {"activations": rows, "activation": Activation("swiglu_oai", limit=7.0), "bias13": bias}
    layer = MoE.from_experts(gate_up, down, format=format, **options)
    w13, w2 = (ExpertWeights.quantize(w, format) for w in (gate_up, down))
    want = moe(x, ids, weights, w13, w2, **options)
    assert torch.equal(layer(x, ids, weights), want)
    del options["bias13"]
    empty = MoE(E, H, I, format=format, bias=True, **options).bfloat16()
    empty.load_state_dict(layer.bfloat16().state_dict())
    assert torch.equal(empty(x, ids, weights), want)
    other = MoE(E, H, I, format=MXFP4 if format != MXFP4 else NVFP4, bias=True)
    with pytest.raises(RuntimeError, match="_extra_state says .*'formats'"):
        other.load_state_dict(layer.state_dict())


def test_the_usual_rows_of_every_format():
    assert [MoE(2, 128, 128, format=f).activations for f in (NVFP4, MXFP4, FP8_128x128)] == [
        "nvfp4", "mxfp8_e4m3", "16bit",
    ]  # fmt: skip


def test_blocks_as_gpt_oss_stores_them():
    """The docstring's example: row-major scales, with alternating rows of gate and up."""
    gate_up, down = experts()
    x, ids, weights = batch()
    stored = [ExpertWeights.quantize(w, MXFP4) for w in (gate_up, down)]
    tensors = [
        BlockScaledTensor(w.data, w.scale, None, (E, n, H), format=MXFP4).with_scale_layout("rowmajor")
        for w, n in zip(stored, (2 * I, H), strict=True)
    ]
    options = {
        "weight_layout": "interleaved",
        "activation": Activation("swiglu_oai", limit=7.0),
        "activations": "16bit",
    }
    layer = MoE.from_quantized(*tensors, **options)
    assert layer.w13.data_ptr() == tensors[0].data.data_ptr()
    assert torch.equal(layer(x, ids, weights), moe(x, ids, weights, *stored, **options))


@pytest.mark.parametrize("backend", ["reference", pytest.param("emulator:sm_90a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", ["nvfp4", "16bit"])
def test_rows_begin_lines(rows, backend):
    """Rows of 240 bytes start every 256 bytes on every device; the state dict has no padding."""
    gate_up, down = some(2, 960, 480).bfloat16() / 16, some(2, 480, 480, seed=1).bfloat16() / 16
    x, (ids, weights) = some(T, 480, seed=6).bfloat16(), route(some(T, 2, seed=5), 1)
    w13, w2 = ExpertWeights.quantize(gate_up), ExpertWeights.quantize(down)
    layer = MoE.from_quantized(w13, w2, activations=rows, backend=backend)
    want = moe(x, ids, weights, w13, w2, activations=rows, backend=backend)
    state = layer.state_dict()
    assert state["w13"].is_contiguous() and torch.equal(state["w13"], w13.data)
    empty = MoE(2, 480, 480, activations=rows, device="meta", backend=backend)
    empty.load_state_dict(state, assign=True)
    for one in (layer, layer.to(torch.float16), copy.deepcopy(layer), empty):
        assert one.w13.stride() == (960 * 256, 256, 1) and one.w2.stride(1) == 256
        assert torch.equal(one(x, ids, weights), want)


def test_rows_that_would_need_much_padding_stay():
    layer = MoE.from_experts(some(2, 320, 160), some(2, 160, 160))
    assert layer.w13.is_contiguous() and layer.w2.is_contiguous()


def test_compile_takes_the_layer_whole():
    gate_up, down = experts()
    layer = MoE.from_experts(gate_up, down, input_scale=0.01)
    x, _, _ = batch()
    logits = some(T, E, seed=5)

    def block(x, logits):
        return layer(x, *route(logits, 2)) + x

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, logits), block(x, logits))
    torch.library.opcheck(
        torch.ops.nvfp4_cute.route.default,
        (logits, 2, "softmax", True, None, None, [1, 1], 1.0, None, "auto"),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_a_copy_over_ranks():
    """The copy has the layer's group, which no file can store."""
    group = dist.ProcessGroup(0, 1)
    layer = MoE.from_experts(*experts(), parallel=Parallel(group))
    copied = copy.deepcopy(torch.nn.ModuleList([layer]))[0]
    assert copied.parallel.group is group and copied.w13.data_ptr() != layer.w13.data_ptr()
    assert torch.equal(copied.w13, layer.w13) and copied.parallel.placement == layer.parallel.placement
    with pytest.raises(TypeError, match="store layer.state_dict"):
        pickle.dumps(layer)


def test_tensors_that_take_the_place_of_others():
    """A call computes with the tensors that the layer has then, and refuses them where they do not fit."""
    gate_up, down = experts()
    scales = {"input_scale": 0.01, "hidden_scale": [0.1] * E}
    layer, call = MoE.from_experts(gate_up, down, **scales), batch()
    other = MoE.from_experts(gate_up.flip(0), down.flip(0), **scales)
    first = layer(*call)
    for name in ("w13", "w13_scale"):
        setattr(layer, name, getattr(other, name))
    for name in ("w2", "w2_scale", "alpha2"):
        getattr(layer, name).data = getattr(other, name)
    layer.alpha13.copy_(other.alpha13)
    found = layer(*call)
    assert torch.equal(found, other(*call)) and not torch.equal(found, first)
    layer.hidden_scale = layer.hidden_scale[:2]
    with pytest.raises(ValueError, match="hidden_scale"):
        layer(*call)


def test_nothing_of_earlier_calls_is_held():
    """A write in place reaches the result where a check makes a copy, and tensors that the layer gave up are freed."""
    gate_up, down = experts()
    layer, call = MoE.from_experts(gate_up, down, hidden_scale=0.1), batch()
    layer.hidden_scale = torch.tensor([0.1])
    first = layer(*call)
    layer.hidden_scale.fill_(3.0)
    again = MoE.from_experts(gate_up, down, hidden_scale=0.1)
    again.hidden_scale.fill_(3.0)
    assert torch.equal(layer(*call), again(*call)) and not torch.equal(first, again(*call))
    held = weakref.ref(again.w13_scale)
    again.to("meta")
    assert held() is None


def test_refusals():
    gate_up, down = experts()
    w13 = ExpertWeights.quantize(gate_up)
    layer, (x, ids, weights) = MoE.from_experts(gate_up, down), batch()
    for call, error, text in (
        (lambda: MoE(E, 40, I), UnsupportedProblem, "hidden_size=40"),
        (lambda: MoE(E, H, I, format="fp8_1x128"), ValueError, "format is FP8_1X128; use nvfp4 or"),
        (lambda: MoE(E, H, I, format=4), TypeError, "format=4 is not a format"),
        (lambda: MoE(E, H, I, format="mxfp5"), ValueError, "format='mxfp5' is unknown"),
        (
            lambda: MoE(E, H, I, format=MXFP4, activations="nvfp4"),
            ValueError,
            "with MXFP4 weights; use 'mxfp8_e4m3' or",
        ),
        (
            lambda: MoE.from_quantized(w13, ExpertWeights.quantize(down, MXFP4)),
            ValueError,
            "w13 is NVFP4 and w2 MXFP4",
        ),
        (lambda: MoE.from_quantized(w13, w13, format=NVFP4), TypeError, "w13 decides it"),
        (lambda: MoE.from_experts(gate_up[0], down), ValueError, r"expected \[E, 2 I, H\]"),
        (lambda: MoE.from_experts(gate_up[:, :96], down), ValueError, "which asks for gate_up"),
        (
            lambda: MoE.from_experts(gate_up.reshape(E, I, 2 * H), down),
            ValueError,
            "one of them transposed",
        ),
        (lambda: MoE.from_experts(gate_up, down, input_scale=[1.0, 2.0]), ValueError, "a factor of 2"),
        (
            lambda: MoE(E, H, I, activations="16bit", input_scale=0.5),
            ValueError,
            "input_scale with activations='16bit'",
        ),
        (
            lambda: MoE.from_experts(gate_up, down, activations="16bit", hidden_scale=[0.5] * E),
            ValueError,
            "hidden_scale with activations='16bit', whose rows have no global scale; leave it out",
        ),
        (lambda: MoE(E, H, I, format=MXFP4, input_scale=0.5), ValueError, "input_scale with rows of MXFP8"),
        (lambda: MoE(E, H, I, parallel=Parallel(capacity=4)), ValueError, "also pass the group"),
        (lambda: MoE(E, H, I, parallel=Parallel(divide="tensor")), ValueError, "also pass the group"),
        (lambda: MoE.from_experts([gate_up], down), TypeError, "gate_up is a list"),
        (lambda: MoE.from_quantized(gate_up, w13), TypeError, "w13 is a Tensor; pass a BlockScaledTensor or"),
        (lambda: MoE.from_quantized(w13, quantize(down[0])), ValueError, "w2 has data"),
        (lambda: layer(x, ids, weights, [1.0]), TypeError, "shared is a list"),
    ):
        with pytest.raises(error, match=text):
            call()
    assert nvfp4_cute.MoE is MoE
