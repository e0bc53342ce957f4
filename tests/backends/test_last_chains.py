"""Repeated calls of a layer: which ones reuse the previous launch, and that each one computes with its own tensors."""

import copy
import io
import threading

import pytest
import torch
from emulated_gpu import emulated_gpu
from oracle import assert_bitwise_equal
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_cute import MoE, QuantizedLinear, route
from nvfp4_cute.backends import last_chains
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.gpus import targets
from nvfp4_cute.launch import prepared
from nvfp4_cute.nn.gated_mlp import GatedMLP

K, N = 64, 128

pytestmark = pytest.mark.skipif(prepared.TensorGuards is None, reason="this torch has no guards")


@pytest.fixture(autouse=True)
def h100(monkeypatch):
    with torch.no_grad(), emulated_gpu(monkeypatch, targets.lookup("H100")) as emulator:
        yield emulator


def rows(*shape):
    return torch.randn(*(shape or (3,)), K).bfloat16()


def some_layer(n=N, k=K, activations="16bit", **options):
    return QuantizedLinear.from_linear(torch.nn.Linear(k, n).bfloat16(), activations=activations, **options)


WAYS = [{"activations": "nvfp4", "input_scale": scale} for scale in (0.01, None, "auto")] + [{}]


def some_mlp(**options):
    gate, up, down = (some_layer(*sizes, **options) for sizes in ((N, K), (N, K), (K, N)))
    gate.bias = up.bias = None
    return GatedMLP(gate, up, down, torch.nn.functional.silu, "silu")


class Counted:
    """A layer that was called often enough, and whether a call ran all checks."""

    def __init__(self, layer, x, monkeypatch):
        self.layer, self.count, long_way = layer, 0, layer._product
        self.settle(x)

        def product(*arguments):
            self.count += 1
            return long_way(*arguments)

        monkeypatch.setattr(layer, "_product", product)

    def settle(self, x):
        """Makes the calls that are checked, prepared, observed, and launched as a chain."""
        for _ in range(3):
            self.layer(x)

    def expect(self, x, is_repeated):
        """Checks that the result has the bits of a call with all checks."""
        before = self.count
        got = self.layer(x)
        assert (self.count == before) == is_repeated
        kept, self.layer._last._kept = self.layer._last._kept, []
        right = self.layer(x)
        self.layer._last._kept = kept
        assert_bitwise_equal(got, right)
        assert got.dtype == right.dtype
        return got


@pytest.fixture
def counted(monkeypatch):
    return lambda layer, x: Counted(layer, x, monkeypatch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("make", [some_layer, some_mlp])
def test_other_rows_of_the_same_kind(counted, make, options):
    layer = counted(make(**options), rows())
    assert not torch.equal(layer.expect(rows(), True), layer.expect(rows(), True))
    batch = rows(2, 3)
    first = layer.expect(batch, False)
    layer.settle(batch)
    assert layer.expect(batch, True).shape == first.shape == (2, 3, K if make is some_mlp else N)
    layer.expect(rows(), True)


@pytest.mark.slow
def test_rows_of_other_dtypes_that_lie_otherwise(counted):
    layer = counted(some_layer(), rows())
    layer.expect(rows().half(), False)
    layer.settle(rows().float())
    layer.expect(rows().float(), False)
    flat = torch.randn(3 * K + 1).bfloat16()
    layer.expect(flat[1:].view(3, K), False)
    layer.expect(rows(6)[::2], False)
    layer.expect(rows()[:0], False)
    layer.expect(rows(), True)


def test_parameters_are_those_of_the_call(counted):
    """Parameters that are written in place, replaced, passed by functional_call, or of another kind."""
    layer, other, x = counted(some_layer(), rows()), some_layer(), rows()
    before = layer.expect(x, True)
    own = layer.layer
    own.bias.add_(1)
    own.packed_weight.copy_(other.packed_weight)
    written = layer.expect(x, True)
    assert not torch.equal(before, written)
    own.load_state_dict(other.state_dict())
    assert_bitwise_equal(layer.expect(x, True), other(x))
    own.weight_scale = own.weight_scale.clone()
    own.weight_global_scale = own.weight_global_scale * 2
    assert not torch.equal(layer.expect(x, True), other(x))
    given = {"bias": torch.zeros(N).bfloat16()}
    got = torch.func.functional_call(own, given, (x,))
    own.bias = torch.nn.Parameter(given["bias"], requires_grad=False)
    assert_bitwise_equal(got, layer.expect(x, True))
    own.bias.data = own.bias.data.float() + 1
    layer.expect(x, False)
    own.bias = None
    layer.expect(x, False)
    own.bias = torch.nn.Parameter(torch.ones(N, dtype=torch.float64), requires_grad=False)
    layer.expect(x, False)
    layer.expect(x, False)


def test_a_bias_that_is_computed(counted):
    class Twice(torch.nn.Module):
        def forward(self, bias):
            return 2 * bias

    layer = counted(some_layer(), rows())
    torch.nn.utils.parametrize.register_parametrization(layer.layer, "bias", Twice())
    for _ in range(3):
        layer.expect(rows(), False)


def test_a_setting_that_changes(counted):
    layer = counted(some_layer(), rows())
    for name, value in (("mode", "nvfp4"), ("finds_input_scale", False), ("backend", "cuda")):
        setattr(layer.layer, name, value)
        layer.settle(rows())
        layer.expect(rows(), True)
    for name, value in (
        ("mode", "16bit"),
        ("finds_input_scale", True),
        ("backend", "reference"),
        ("keep_decoded", True),
    ):
        setattr(layer.layer, name, value)
        layer.expect(rows(), False)


def test_the_environment_and_plans_that_change(counted, monkeypatch):
    layer = counted(some_layer(), rows())
    with monkeypatch.context() as patch:
        patch.setenv("NVFP4_CUTE_BACKEND", "cuda")
        layer.expect(rows(), False)
    layer.expect(rows(), True)
    prepared.forget()
    layer.expect(rows(), False)


def test_another_thread_prepares_its_own(counted):
    layer = counted(some_layer(), rows())
    x, found = rows(), []

    def run():
        with torch.no_grad():
            before = layer.count
            found.append((layer.layer(x), layer.count - before))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (got, long_ways), right = found[0], layer.expect(x, True)
    assert long_ways == 1
    assert_bitwise_equal(got, right)


def test_gradients_and_autocast(counted):
    layer = counted(some_layer(), rows())
    with torch.enable_grad():
        layer.expect(rows(), True)
        with pytest.raises(UnsupportedProblem, match="requires_grad"):
            layer.layer(rows().requires_grad_())
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            for _ in range(3):
                assert layer.expect(rows(), False).dtype == dtype
    with torch.inference_mode():
        layer.expect(rows(), False)
        layer.settle(rows())
        layer.expect(rows(), True)
    layer.expect(rows(), True)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_what_torch_records(counted):
    """Modes and graphs see the operation, unsupported transforms are refused, and later calls launch nothing of it."""
    layer, x = counted(some_layer(), rows()), rows()
    for _ in range(3):
        with Seen() as seen:
            layer.layer(x)
        assert "nvfp4_cute.linear.default" in seen.names
    graph = make_fx(layer.layer)(x)
    assert "nvfp4_cute.linear" in graph.code
    assert_bitwise_equal(graph(x), layer.expect(x, True))
    with pytest.raises(UnsupportedProblem, match="vmap"):
        torch.vmap(layer.layer)(rows(2, 3))
    layer.expect(x, True)


@pytest.mark.slow
def test_a_tensor_that_came_twice(counted):
    """Scales were one tensor and then are two."""
    layer = counted(some_layer(activations="nvfp4", input_scale=0.01), rows())
    own = layer.layer
    own.input_global_scale = own.weight_global_scale
    for _ in range(3):
        layer.layer(rows())
    own.input_global_scale = torch.tensor(0.03)
    layer.settle(rows())
    layer.expect(rows(), True)


def test_a_copy_has_nothing():
    layer, x = some_layer(), rows()
    for _ in range(3):
        right = layer(x)
    assert layer._last._kept
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert not other._last._kept
        assert_bitwise_equal(other(x), right)


def test_few_kinds_are_kept(counted):
    layer = counted(some_layer(), rows())
    for count in range(1, last_chains.MAX_KEPT + 1):
        for _ in range(3):
            layer.layer(rows(count + 3))
    assert len(layer.layer._last._kept) == last_chains.MAX_KEPT
    layer.expect(rows(), False)
    kept = layer.layer._last._kept
    for count in (40, 41, 42, 40, 41, 42, 40, 41, 42):  # in turn they replace none
        layer.layer(rows(count))
    assert layer.layer._last._kept is kept


@pytest.mark.parametrize("count", [3, 70])
def test_experts_repeat_their_chain(monkeypatch, count):
    """Until a call is of another kind; factors of gate and up that become different ones are another kind."""
    experts, hidden, width = 4, 128, 128
    weights = torch.randn(experts, 2 * width, hidden) / 8, torch.randn(experts, hidden, width) / 8
    layer, checked, long_way = MoE.from_experts(*weights, activations="16bit"), [], MoE._compute
    monkeypatch.setattr(MoE, "_compute", lambda *given: checked.append(1) or long_way(*given))

    def call(number=count):
        x, choices = (
            torch.randn(number, hidden).bfloat16(),
            route(torch.randn(number, experts), 2, backend="reference"),
        )
        return x, *choices

    def settle(*given):
        for _ in range(3):
            layer(*given)

    def expect(is_repeated, *given):
        checked.clear()
        got = layer(*given)
        assert checked == ([] if is_repeated else [1])
        if is_repeated:
            kept, layer._last._kept = layer._last._kept, []
            assert_bitwise_equal(got, layer(*given))
            layer._last._kept = kept
        return got

    first = call()
    settle(*call())
    before = expect(True, *first)
    if count > 3:
        expect(True, *call(count + 1))
        expect(False, *call(count + 20))
        return
    expect(False, *call(count + 1))
    layer.w2 = layer.w2.flip(0).contiguous()
    assert not torch.equal(expect(True, *first), before)
    x, *rest = call()
    settle(*first, first[0].clone())
    assert expect(True, x[:, None], *rest, x[:, None]).shape == (count, 1, hidden)
    layer.alpha13[1] *= 2
    expect(False, *first)
    settle(*first)
    layer.alpha13[1] *= 3
    expect(True, *first)
