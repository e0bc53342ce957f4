"""Merged launches of a model's layers: bits of separate layers, names, state dicts, graphs, and layers left alone."""

import copy
import io
import pickle

import pytest
import torch
from flat_parts import dual_gemm
from oracle import assert_bitwise_equal

from nvfp4_cute import QuantizedLinear, quantize, set_batch_invariant
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.nn.fused import fuse
from nvfp4_cute.nn.gated_mlp import GatedMLP
from nvfp4_cute.nn.products import QUANTIZED_HIDDEN_ROWS
from nvfp4_cute.nn.replace import replace_linears
from nvfp4_cute.nn.shared_input import SharedInput

K, HIDDEN = 64, 128
WAYS = [
    {"activations": "16bit"},
    {"input_scale": 0.01},
    {"input_scale": None},
    {"input_scale": "per_row"},
    {},
]


class Attention(torch.nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.q_proj = torch.nn.Linear(K, 256, bias)
        self.k_proj, self.v_proj = (torch.nn.Linear(K, 128, bias) for _ in range(2))

    def forward(self, x, other=None):
        other = x if other is None else other
        return self.q_proj(x), self.k_proj(other), self.v_proj(other)


class MLP(torch.nn.Module):
    def __init__(self, act_fn=torch.nn.functional.silu, bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(K, HIDDEN, bias) for _ in range(2))
        self.down_proj = torch.nn.Linear(HIDDEN, K)
        self.act_fn = act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Swapped(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Limited(MLP):
    """As gpt-oss and later models have it: small values do not show the limit."""

    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=10), self.up_proj(x).clamp(-10, 10)
        return self.down_proj(self.act_fn(gate) * up)


def hooked(mlp):
    mlp.register_forward_hook(lambda *_: None)
    return mlp


class Block(torch.nn.Module):
    def __init__(self, attention=None, mlp=None):
        super().__init__()
        self.attention, self.mlp = attention or Attention(), mlp or MLP()


@pytest.fixture(autouse=True)
def without_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def blocks(options, **parts):
    """Returns a block with separate layers, and a fused copy."""
    block = Block(**parts).bfloat16()
    for layer in (block.attention.k_proj, block.mlp.up_proj):
        layer.weight.mul_(0.7)
    replace_linears(block, **options)
    return block, fused(copy.deepcopy(block))


def fused(block):
    block.done = fuse(block)
    return block


def rows(*lead):
    return torch.randn(*lead, K).bfloat16()


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert_bitwise_equal(one, other)


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_shared_input(options, bias):
    """Results have the bits of separate layers with different global scales, and no tensor is kept afterwards."""
    block, ours = blocks(options, attention=Attention(bias))
    assert ours.done.shared[0] == tuple(f"attention.{name}_proj" for name in "qkv")
    shared = ours.attention.q_proj.shared[0]
    assert shared.whole.weight_global_scale.shape == (512,)
    for x in (rows(2, 5), rows(1), rows(3).float()):
        assert_same(ours.attention(x), block.attention(x))
        assert shared.kept is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", WAYS[:2], ids=str)
def test_one_launch_on_a_gpu(options):
    """One product computes all rows where global scales agree; otherwise no further launch of ours does. The bits are equal."""
    attention = Attention().bfloat16()
    for layer in attention.children():
        layer.weight.clamp_(-0.1, 0.1)[0, 0] = 0.1
    x = rows(3)
    for is_equal in (True, False):
        if not is_equal:
            attention.k_proj.weight[0, 0] = 0.2
        block = Block(copy.deepcopy(attention))
        replace_linears(block, backend="emulator:sm_90a", **options)
        expected = block.attention(x)
        ours = fused(block)
        assert ours.attention.q_proj.shared[0].whole.weight_global_scale.numel() == (1 if is_equal else 512)
        with observe() as observer:
            got = ours.attention(x)
        assert_same(got, expected)
        assert len(observer.stats) == (1 if "activations" in options else 2)


@pytest.mark.parametrize("is_invariant", [False, True])
def test_another_input_ends_sharing(is_invariant):
    """But not of batch-invariant layers, whose common product may have other bits than separate ones."""
    block, ours = blocks({"activations": "16bit"})
    x, other = rows(4), rows(2)
    with set_batch_invariant(is_invariant):
        for _ in range(2):
            assert_same(ours.attention(x, other), block.attention(x, other))
        assert ours.attention.q_proj.shared[0].is_shared == is_invariant
        assert_same(ours.attention(x), block.attention(x))


def test_an_input_that_was_written_is_computed_anew():
    _, ours = blocks({"activations": "16bit"})
    q, k = ours.attention.q_proj, ours.attention.k_proj
    x = rows(4)
    q(x)
    x.mul_(2)
    assert_bitwise_equal(k(x), k.product(x))


def test_calls_that_were_cut_off():
    """After an error, the next call recomputes its results and sharing continues."""
    block, ours = blocks({"activations": "16bit"})
    ours.attention.q_proj(rows(4))
    with pytest.raises(ValueError, match="in_features"):
        ours.attention(torch.randn(3, 2 * K).bfloat16())
    x = rows(4)
    assert_same(ours.attention(x), block.attention(x))
    assert ours.attention.q_proj.shared[0].is_shared


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_gated_mlp(options):
    """The bits are those of dual_gemm and the following layer, and closer to exact results than layers that round three times."""
    block, ours = blocks(options)
    assert ours.done.mlps == ["mlp"] and isinstance(ours.mlp, GatedMLP) and ours.mlp.is_fused
    gate, up, down = (
        ours.mlp.get_submodule(f"{name}_proj").quantized_weight for name in ("gate", "up", "down")
    )
    for x in (rows(2, 5), rows(QUANTIZED_HIDDEN_ROWS + 1)):
        flat, got = x.reshape(-1, K), ours.mlp(x)
        assert got.shape == x.shape
        is_16bit, scale = "activations" in options, options.get("input_scale", "auto")
        a = flat if is_16bit else quantize(flat, global_scale=scale)
        if is_16bit or scale in ("auto", "per_row") or len(flat) > QUANTIZED_HIDDEN_ROWS:
            h = dual_gemm(a, gate, up)
            expected = ours.mlp.down_proj(h)
        else:
            h = dual_gemm(a, gate, up, out_dtype="nvfp4", out_global_scale=scale)
            expected = ours.mlp.down_proj(h.dequantize().bfloat16())
        error = (got.view_as(expected) - expected).abs().max() / expected.abs().max()
        assert error < 2**-7
        if is_16bit:
            exact = torch.nn.functional.silu(flat.double() @ gate.dequantize().double().T)
            exact = exact * (flat.double() @ up.dequantize().double().T)
            exact = exact @ down.dequantize().double().T + ours.mlp.down_proj.bias.double()
            apart = lambda y, exact=exact: (y.reshape(exact.shape).double() - exact).norm()
            assert apart(got) < apart(block.mlp(x))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", WAYS[:2], ids=str)
def test_gated_mlp_on_the_emulator(options):
    """16-bit rows take two launches, quantized ones three; results differ only by rounding."""
    block = Block().bfloat16()
    replace_linears(block, backend="emulator:sm_90a", **options)
    alone = copy.deepcopy(block.mlp)
    ours, x = fused(block), rows(3)
    with observe(check=True) as observer:
        got = ours.mlp(x)
    is_per_row = options.get("input_scale") == "per_row"  # no epilogue quantizes hidden rows
    assert len(observer.stats) == (2 if "activations" in options else 3 + is_per_row)
    expected = alone(x)
    assert (got - expected).norm() < 0.1 * expected.norm()


def test_without_a_launch_for_both():
    """Layers with different modes take one product for gate and up, and the activation function."""
    block = Block().bfloat16()
    replace_linears(block, backend="emulator:sm_90a", activations="16bit")
    down = block.mlp.down_proj
    block.mlp.down_proj = QuantizedLinear.from_quantized(
        down.quantized_weight, down.bias, input_scale=0.01, backend="emulator:sm_90a"
    )
    alone = copy.deepcopy(block.mlp)
    ours, x = fused(block), rows(3)
    assert not ours.mlp.is_fused
    with observe() as observer:
        got = ours.mlp(x)
    assert len(observer.stats) == 3, "gate and up, quantize, down"
    assert_bitwise_equal(got, alone(x))


def test_hooks_see_every_layer():
    _, ours = blocks({"activations": "16bit"})
    seen = []
    handle = ours.mlp.up_proj.register_forward_hook(lambda module, given, result: seen.append(result.shape))
    ours.mlp(rows(3))
    handle.remove()
    ours.mlp(rows(3))
    assert seen == [(3, HIDDEN)]


@pytest.mark.parametrize(
    ("mlp", "reason"),
    [
        (lambda: Swapped(), "something else"),
        (lambda: Limited(), "something else"),
        (lambda: MLP(lambda x: torch.nn.functional.silu(x).clamp(max=7)), "activation is none"),
        (lambda: hooked(MLP()), "forward hooks"),
        (lambda: MLP(torch.nn.functional.mish), "activation is none"),
        (lambda: MLP(bias=True), "has a bias"),
    ],
)
def test_other_mlps_are_left(mlp, reason):
    block, ours = blocks({"activations": "16bit"}, mlp=mlp())
    assert type(ours.mlp) is type(block.mlp) and reason in ours.done.left["mlp"]
    assert ("mlp.gate_proj", "mlp.up_proj") in ours.done.shared
    x = rows(3)
    assert_bitwise_equal(ours.mlp(x), block.mlp(x))


def test_layers_that_do_not_go_together():
    attention = Attention()
    attention.q_proj = torch.nn.Linear(K, 40)
    _, ours = blocks({"activations": "16bit"}, attention=attention)
    assert "not a multiple of it" in ours.done.left["attention"] and ours.attention.q_proj.shared is None
    block = Block().bfloat16()
    names = [
        "attention.q_proj",
        "attention.k_proj",
        "attention.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ]
    replace_linears(block, input_scale=dict(zip(names, (0.01, 0.02, 0.01, 0.01, 0.02, 0.01), strict=True)))
    alone, ours = copy.deepcopy(block), fused(block)
    assert "quantize their input differently" in ours.done.left["attention"] and not ours.mlp.is_fused
    x = rows(3)
    assert_bitwise_equal(ours.mlp(x), alone.mlp(x))


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts(assign):
    """State dicts of fused and separate layers load into each other; loading and moving rebuild the merged products."""
    block, ours = blocks({"input_scale": 0.01})
    assert ours.state_dict().keys() == block.state_dict().keys()
    other, _ = blocks({"input_scale": 0.01})
    buffer = io.BytesIO()
    torch.save(other.state_dict(), buffer)
    buffer.seek(0)
    ours.load_state_dict(torch.load(buffer), assign=assign)
    x = rows(3)
    assert_same(ours.attention(x), other.attention(x))
    again, _ = blocks({"input_scale": 0.01})
    again.load_state_dict(ours.state_dict())
    assert_same(again.attention(x), other.attention(x))
    moved = copy.deepcopy(ours).to("cpu", torch.float16)
    assert_same(moved.attention(x), other.attention(x))
    assert moved.attention.q_proj.shared[0].whole is not None
    moved.attention.k_proj.weight_global_scale = moved.attention.k_proj.weight_global_scale * 2
    assert_bitwise_equal(moved.attention(x)[1], 2 * other.attention(x)[1])


def test_pickled():
    """A pickled module is still fused, and stores the weights once."""
    block, ours = blocks({"input_scale": 0.01})
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    again, x = torch.load(buffer, weights_only=False), rows(3)
    whole = again.attention.q_proj.shared[0].whole
    assert whole is not None
    assert_same(again.attention(x), block.attention(x))
    assert_bitwise_equal(again.mlp(x), ours.mlp(x))
    assert whole is again.attention.q_proj.shared[0].whole
    assert again.attention.v_proj.packed_weight.untyped_storage().data_ptr() == whole.packed_weight.data_ptr()
    plain = pickle.loads(pickle.dumps(ours))
    for one in (again, plain, copy.deepcopy(ours)):
        assert_same(one.attention(x), block.attention(x))
        key = one.attention.k_proj
        key.weight_global_scale = key.weight_global_scale * 2
        assert_bitwise_equal(one.attention(x)[1], 2 * block.attention(x)[1])


def test_from_the_meta_device():
    with torch.device("meta"):
        empty = fused(Block(*(replaced(part()) for part in (Attention, MLP))))
    block, _ = blocks({"input_scale": 0.01})
    empty.to_empty(device="cpu")
    empty.load_state_dict(block.state_dict())
    x = rows(3)
    assert_same(empty.attention(x), block.attention(x))
    assert isinstance(empty.mlp, GatedMLP)


def replaced(module):
    for name, linear in list(module.named_children()):
        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        setattr(module, name, QuantizedLinear(*sizes, input_scale=0.01))
    return module


def test_weights_are_stored_once():
    _, ours = blocks({"activations": "16bit"})
    layers = list(ours.attention.children())
    whole = layers[0].shared[0].whole
    assert {layer.packed_weight.untyped_storage().data_ptr() for layer in layers} == {
        whole.packed_weight.untyped_storage().data_ptr()
    }
    assert sum(layer.packed_weight.numel() for layer in layers) == whole.packed_weight.numel()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", WAYS[:2], ids=str)
def test_compiled(options):
    """One graph serves any number of rows, with one product for q, k and v, and the bits of eager calls."""
    _, ours = blocks(options)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    whole = lambda x: (*ours.attention(x), ours.mlp(x))
    compiled = torch.compile(whole, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (5, 300, 2):
        x = rows(count)
        assert_same(compiled(x), whole(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_what_is_no_module_or_no_such_layer_is_refused():
    gate, up, down = (QuantizedLinear(*sizes, False) for sizes in ((K, HIDDEN), (K, HIDDEN), (HIDDEN, K)))
    for call in (fuse, replace_linears):
        with pytest.raises(TypeError, match="model is a str; pass a torch.nn.Module"):
            call("model")
    with pytest.raises(TypeError, match="up_proj is a Linear; pass QuantizedLinear.from_linear"):
        GatedMLP(gate, torch.nn.Linear(K, HIDDEN), down, torch.nn.SiLU(), "silu")
    with pytest.raises(ValueError, match='activation=\'tanh\' is unknown; use one of "silu", "gelu"'):
        GatedMLP(gate, up, down, torch.nn.Tanh(), "tanh")
    with pytest.raises(TypeError, match="layers has a Linear"):
        SharedInput([gate, torch.nn.Linear(K, HIDDEN)])
    with pytest.raises(ValueError, match="layers is empty"):
        SharedInput([])
