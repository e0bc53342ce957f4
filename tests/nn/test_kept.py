"""Kept dequantized weights: which products use them, and that they never go stale."""

import copy

import pytest
import torch
from torch.nn import functional

from nvfp4_cute import QuantizedLinear, dequantize
from nvfp4_cute.nn import decoded, kept
from nvfp4_cute.nn.decoded import KEPT_ROWS
from nvfp4_cute.nn.fused import fuse
from nvfp4_cute.nn.gated_mlp import GatedMLP
from nvfp4_cute.nn.kept import keep_decoded
from nvfp4_cute.nn.replace import replace_linears


def layer_of(seed=0, **options):
    torch.manual_seed(seed)
    linear = torch.nn.Linear(64, 96).bfloat16()
    return QuantizedLinear.from_linear(linear, activations="16bit", **options)


def rows(count=KEPT_ROWS):
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def by_torch(layer, x):
    return functional.linear(x, dequantize(layer.quantized_weight, x.dtype), layer.bias)


@pytest.fixture
def count(monkeypatch):
    """Counts how often weights are dequantized."""
    calls = []
    own = decoded.decode
    monkeypatch.setattr(decoded, "decode", lambda *a: calls.append(1) or own(*a))
    return calls


def test_many_rows_are_multiplied_by_kept_weights(count):
    layer, plain = layer_of(keep_decoded=True), layer_of()
    x = rows()
    for _ in range(3):
        assert torch.equal(layer(x), by_torch(layer, x))
    assert torch.equal(layer(x[:-1]), plain(x[:-1])) and len(count) == 1
    assert layer(x.float()).dtype == torch.float32 and len(count) == 1
    assert torch.equal(layer(x.unsqueeze(0))[0], by_torch(layer, x))
    assert list(layer.state_dict()) == list(plain.state_dict()) and "keep_decoded" in repr(layer)
    four_bits = layer_of(keep_decoded=True)
    four_bits.mode = "nvfp4"
    four_bits(x)
    assert len(count) == 1, "4-bit activations are multiplied by 4-bit weights"


def test_no_stale_weights(count):
    """Weights that are loaded in place, assigned, written, swapped for a call, moved or copied are used at once."""
    layer, other, x = layer_of(keep_decoded=True), layer_of(1), rows()
    layer(x)
    state = {name: t.clone() for name, t in layer.state_dict().items()}
    swapped = {n: t for n, t in other.state_dict().items() if not n.startswith("_")}
    for factor in (1, 2, 4):  # tensors of a call may get the addresses of those of the last call
        values = {n: t.clone() for n, t in swapped.items()}
        values["weight_global_scale"] = values["weight_global_scale"] * factor
        values["bias"] = torch.zeros_like(other.bias)
        got = torch.func.functional_call(layer, values, x)
        assert torch.equal(got, factor * functional.linear(x, other.weight))
        del values
    assert torch.equal(layer(x), by_torch(layer, x))
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), by_torch(other, x))
    layer.load_state_dict(state, assign=True)
    assert torch.equal(layer(x), by_torch(layer_of(), x))
    layer.weight_global_scale.mul_(2)
    assert torch.equal(layer(x), by_torch(layer, x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert layer.half()(x.half()).dtype == torch.float16 and torch.equal(
        layer(x.half()), by_torch(layer, x.half())
    )


def test_writes_that_are_not_counted(count):
    """Tensors of inference mode have no version counter, so nothing is kept of them."""
    with torch.inference_mode():
        layer, x = layer_of(keep_decoded=True), rows()
        before = layer(x)
        layer.weight_global_scale.mul_(2)
        assert not torch.equal(layer(x), before) and not count


def test_graphs_do_without(count, monkeypatch):
    layer, x = layer_of(keep_decoded=True), rows()
    expected = layer_of()(x)
    torch._dynamo.reset()  # other tests may have traced this code with other results
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), expected)
    assert not count
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert decoded.is_for_kept(KEPT_ROWS, is_cuda=False) and not decoded.is_for_kept(KEPT_ROWS, is_cuda=True)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, n in (("q_proj", 128), ("k_proj", 128), ("v_proj", 64)):
            setattr(self, name, torch.nn.Linear(64, n, bias=False))

    def forward(self, x):
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(64, 128, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = torch.nn.Linear(128, 64, bias=False), torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_models(count):
    """Merged layers keep one matrix; the record has reasons for the others; results are those of dequantized weights."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {"attention": Block(), "mlp": MLP(), "lm_head": torch.nn.Linear(64, 96)}
    ).bfloat16()
    replace_linears(model, activations="16bit", keep=())
    reference = copy.deepcopy(model)
    fuse(model)
    assert isinstance(model["mlp"], GatedMLP)
    done = keep_decoded(model)
    assert set(done.left) == {"lm_head"} and len(done.layers) == 6 and len(count) == 3
    assert done.nbytes == 2 * 64 * (128 + 128 + 64 + 3 * 128)
    x = rows()
    for name in ("attention", "mlp"):
        for layer in reference[name].modules():
            if isinstance(layer, QuantizedLinear):
                layer.keep_decoded = True
        assert torch.equal(model[name](x), reference[name](x))
    assert len(count) == 3 + 6
    few = keep_decoded(copy.deepcopy(model), leave=["*"])
    assert not few.layers and few.nbytes == 0


def test_what_does_not_fit_is_left(monkeypatch):
    """Layer by layer, the bytes beyond the reserve decide."""
    model = torch.nn.ModuleDict({"small": QuantizedLinear(64, 32, activations="16bit")})
    model["large"] = QuantizedLinear(64, 96, activations="16bit")
    monkeypatch.setattr(kept, "_room", lambda device, reserved_bytes: 20_000 - reserved_bytes)
    done = keep_decoded(model, reserved_bytes=10_000)
    assert done.layers == ["small"] and done.nbytes == 2 * 64 * 32
    assert done.left == {"large": "12288 more bytes do not fit outside the reserve"}
    assert [layer.keep_decoded for layer in model.values()] == [True, False]


def test_another_call_decides_anew(monkeypatch, count):
    """Kept weights take no more memory, separately or merged; layers to be left give theirs back."""
    model = torch.nn.ModuleDict({"attention": Block(), "one": torch.nn.Linear(64, 96)}).bfloat16()
    replace_linears(model, activations="16bit")
    nbytes = 2 * 64 * (128 + 128 + 64 + 96)
    monkeypatch.setattr(kept, "_room", lambda device, reserved_bytes: nbytes)
    first = keep_decoded(model)
    assert first.nbytes == nbytes and len(first.layers) == len(count) == 4
    monkeypatch.setattr(kept, "_room", lambda device, reserved_bytes: 0)
    assert keep_decoded(model) == first and len(count) == 4
    monkeypatch.setattr(kept, "_room", lambda device, reserved_bytes: nbytes)
    fuse(model)
    again = keep_decoded(model)
    assert sorted(again.layers) == sorted(first.layers) and again.nbytes == nbytes and len(count) == 5
    layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    held = [layer.kept_nbytes for layer in layers]
    assert sorted(held) == [0, 0, 0, 2 * 64 * 96] and layers[0].shared[0].whole.kept_nbytes == nbytes - sum(
        held
    )
    few = keep_decoded(model, leave=["attention.*"])
    assert few.layers == ["one"] and few.nbytes == 2 * 64 * 96 and not layers[0].shared[0].whole.kept_nbytes
    model["attention"](rows())
    assert len(count) == 5


def test_refusals():
    with pytest.raises(ValueError, match="pass one of the two"):
        QuantizedLinear(64, 64, pre_decode=True, keep_decoded=True)
    with pytest.raises(TypeError, match="model is a str; pass a torch.nn.Module"):
        keep_decoded("model")
    with pytest.raises(
        TypeError, match=r"leave='lm_head' is one string; pass a list of patterns: \['lm_head'\]"
    ):
        keep_decoded(torch.nn.ModuleDict(), leave="lm_head")
    with pytest.raises(TypeError, match="keep='lm_head' is one string"):
        replace_linears(torch.nn.ModuleDict(), keep="lm_head")
