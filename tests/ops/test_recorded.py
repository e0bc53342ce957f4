"""Operations while torch records or transforms calls, and tensors whose memory does not hold their values."""

import flat_parts as parts
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import nvfp4_cute as nv
from nvfp4_cute.launch.prepared import Addresses, Place, signature

K = 128


def some(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


X, W, V = nv.quantize(some(20, K)), nv.quantize(some(64, K)), nv.quantize(some(K))
ROWS, OFFS = some(30, K).bfloat16(), torch.tensor([10, 30], dtype=torch.int32)
EXPERTS = nv.quantize(some(2, 64, K), global_scale="per_batch")
DATA, SCALE = nv.grouped_quantize(ROWS, OFFS)
GATE_UP, DOWN = nv.quantize(some(2, 128, K)), nv.quantize(some(2, K, 64))
IDS, WEIGHTS = torch.tensor([[0, 1], [1, 0]]), torch.full((2, 2), 0.5)
LAYER = nv.QuantizedLinear.from_linear(torch.nn.Linear(K, 64).bfloat16())

# Each entry is a function of one operand and a backend, and that operand.
CALLS = {
    "gemm": (lambda a, **k: parts.gemm(a, W.data, X.scale, W.scale, **k), X.data),
    "gemm of 16 bits": (lambda a, **k: parts.gemm(a, W, **k), ROWS),
    "gemm, its alpha": (lambda alpha, **k: parts.gemm(X, W, alpha=alpha, **k), torch.ones(1)),
    "gemm, its bias": (lambda bias, **k: parts.gemm(X, W, bias=bias, **k), some(64).bfloat16()),
    "gemv": (lambda b, **k: parts.gemv(W.data, b, W.scale, V.scale, **k), V.data),
    "dual_gemm": (lambda a, **k: parts.dual_gemm(a, W.data, W.data, X.scale, W.scale, W.scale, **k), X.data),
    "groups": (lambda a, **k: parts.grouped_gemm([a], [W.data], [X.scale], [W.scale], **k)[0], X.data),
    "ragged": (lambda a, **k: parts.grouped_gemm(a, EXPERTS, SCALE, offs=OFFS, **k), DATA),
    "quantize": (lambda x, **k: nv.quantize(x, **k).data, ROWS),
    "quantize, a scale found": (lambda x, **k: nv.quantize(x, global_scale="auto", **k).data, ROWS),
    "quantize, its scale": (lambda s, **k: nv.quantize(ROWS, global_scale=s, **k).data, torch.tensor(0.5)),
    "grouped_quantize": (lambda x, **k: parts.grouped_quantize(x, OFFS, **k)[0], ROWS),
    "route": (lambda x, **k: nv.route(x, 2, **k)[1], some(5, 8)),
    "moe": (lambda x, **k: nv.moe(x, IDS, WEIGHTS, GATE_UP, DOWN, **k), some(2, K).bfloat16()),
    "layer": (lambda x, backend: LAYER(x), ROWS),
}
each_call = pytest.mark.parametrize("name", CALLS)
FLOATS = [name for name, (_, given) in CALLS.items() if given.dtype in (torch.bfloat16, torch.float32)]
PLAIN = [name for name in CALLS if name != "layer"]


class Records(TorchDispatchMode):
    """Records the names of the operations that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Wrapper(torch.Tensor):
    """A tensor without memory, like a DTensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, strides=inner.stride()
        )

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called")


@each_call
def test_a_graph_keeps_the_operation(name):
    """The graph records the operation, not the values that one call computed."""
    call, given = CALLS[name]
    graph = make_fx(lambda x: call(x, backend="reference"))(given)
    assert any("nvfp4_cute" in str(node.target) for node in graph.graph.nodes)
    other = given.flip(0) if given.dtype == torch.uint8 else given * 2
    assert torch.equal(graph(other), call(other, backend="reference"))


@pytest.mark.parametrize("name", ["gemm", "quantize"])
def test_a_graph_launches_on_the_emulator(name):
    call, given = CALLS[name]
    graph = make_fx(lambda x: call(x, backend="emulator"))(given)
    assert torch.equal(graph(given), call(given, backend="emulator"))


@each_call
def test_a_mode_sees_the_operation(name):
    call, given = CALLS[name]
    with Records() as records:
        found = call(given, backend="reference")
    assert any(n.startswith("nvfp4_cute.") for n in records.names)
    assert torch.equal(found, call(given, backend="reference"))


@each_call
def test_fake_tensors(name):
    call, given = CALLS[name]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = call(mode.from_tensor(given), backend="emulator")
    assert found.shape == call(given, backend="reference").shape


@each_call
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_transforms_are_refused(name, backend):
    call, given = CALLS[name]
    with pytest.raises(nv.UnsupportedProblem, match="no rule for torch.vmap"):
        torch.vmap(lambda x: call(x, backend=backend))(given[None])
    with pytest.raises(nv.UnsupportedProblem, match="no rule for torch.vmap"):
        torch.func.functionalize(lambda x: call(x, backend=backend))(given)
    with pytest.raises(nv.UnsupportedProblem, match="torch.jit.trace does not record"):
        torch.jit.trace(lambda x: call(x, backend=backend), (given,))
    with forward_ad.dual_level(), pytest.raises(nv.UnsupportedProblem, match="no forward-mode derivative"):
        call(given, backend=backend)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_values_that_lie_nowhere_are_refused(name, backend):
    call, given = CALLS[name]
    freed = given.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="and no memory: its storage was resized to 0"):
        call(freed, backend=backend)
    if given.ndim:
        with pytest.raises(TypeError, match="is a Wrapper, which holds its values in other tensors"):
            call(Wrapper(given), backend=backend)


@pytest.mark.parametrize("name", [name for name in FLOATS if name in PLAIN])
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_values_that_lie_otherwise_are_refused(name, backend):
    """The imaginary part of a conjugated tensor is such a view; a kernel would read it with the wrong sign."""
    call, given = CALLS[name]
    conjugated = torch.complex(torch.zeros_like(given.float()), given.float()).conj().imag
    assert conjugated.is_neg()
    if given.dtype == torch.float32:
        with pytest.raises(ValueError, match="pass .resolve_neg"):
            call(conjugated, backend=backend)
    if given.ndim > 1:
        with pytest.raises(TypeError, match="has layout torch.sparse_coo; kernels read strided memory"):
            call(given.to_sparse(), backend=backend)


def test_what_was_prepared_for_plain_tensors_is_not_for_others():
    plain, settings = torch.ones(4, 4), ("gemm",)
    known = signature([plain], *settings)
    conjugated = torch.complex(plain, plain).conj()
    assert conjugated.imag.is_neg() and not conjugated.real.is_neg()
    strided = torch.complex(plain, plain).imag
    assert signature([strided]) == signature([conjugated.real]) != signature([conjugated.imag])
    for other in (Wrapper(plain), plain.to_sparse()):
        assert signature([other], *settings) != known


def test_memory_that_was_given_back_is_not_launched_with():
    table = np.zeros(2, np.int64)
    addresses = Addresses(table, [Place(0, 0, 0), Place(1, 1, 0)], [15, 15], [True, False])
    assert addresses.write(addresses.pack(32, 0), None)
    assert not addresses.write(addresses.pack(0, 32), None)
    assert table.tolist() == [32, 0]


def test_a_layer_whose_bias_is_no_parameter():
    class Negated(torch.nn.Module):
        def forward(self, bias):
            return -bias

    layer = nv.QuantizedLinear.from_linear(torch.nn.Linear(K, 64).bfloat16())
    product = layer(ROWS) - layer.bias
    bias = layer.bias.clone()
    torch.nn.utils.parametrize.register_parametrization(layer, "bias", Negated())
    torch.testing.assert_close(layer(ROWS), product - bias, atol=0.05, rtol=0.02)
