"""Fused layers on a GPU: fewer launches, also prepared together and in CUDA graphs, with the bits of single calls."""

import copy

import pytest
import torch
from oracle import assert_bitwise_equal

from nvfp4_cute import QuantizedLinear
from nvfp4_cute.launch import prepared
from nvfp4_cute.launch.prepared_chain import PreparedChain
from nvfp4_cute.nn.fused import fuse
from nvfp4_cute.nn.replace import replace_linears

pytestmark = pytest.mark.gpu("sm_90a")
K, HIDDEN = 512, 1024
WAYS = [{"activations": "auto"}, {"input_scale": 0.01}, {"input_scale": None}, {}]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = torch.nn.Linear(K, 512)
        self.k_proj, self.v_proj = (torch.nn.Linear(K, 128) for _ in range(2))

    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(K, HIDDEN, False) for _ in range(2))
        self.down_proj, self.act_fn = torch.nn.Linear(HIDDEN, K), torch.nn.functional.silu

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.fixture(autouse=True)
def without_gradients():
    torch.manual_seed(0)
    prepared.forget()
    with torch.no_grad():
        yield


def layers(options):
    """Returns functions of rows, with q, k, v and an MLP fused, and the same layers separately."""
    made = torch.nn.ModuleDict({"block": Block(), "mlp": MLP()}).bfloat16().cuda()
    replace_linears(made, **options)
    alone = copy.deepcopy(made)
    fuse(made)
    return [lambda x, m=m: (*m["block"](x), m["mlp"](x)) for m in (made, alone)], made


def rows(count):
    return torch.randn(count, K, device="cuda").bfloat16()


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("count", [1, 8, 32, 200])
def test_fused_layers(options, count):
    """q, k and v equal separate layers where sums have one order; the MLP differs slightly, because it rounds less often."""
    (ours, alone), made = layers(options)
    assert made["mlp"].is_fused
    assert made["block"].q_proj.mode == ("16bit" if "activations" in options else "nvfp4")
    for _ in range(4):
        x = rows(count)
        for got, expected in zip(ours(x), alone(x), strict=True):
            assert (got.double() - expected.double()).norm() < 0.1 * expected.double().norm()
    chains = [call for call in prepared._local.calls.values() if isinstance(call, PreparedChain)]
    assert chains


@pytest.mark.parametrize("options", WAYS[:3], ids=str)
@pytest.mark.parametrize("count", [1, 8, 200])
def test_in_a_graph(options, count):
    """A replay with other rows gives the bits of eager calls: of the first, and of the third, which is launched as a chain."""
    (ours, _), _ = layers(options)
    given = [rows(count) for _ in range(3)]
    eager = [ours(x) for x in given]
    assert all(map(torch.equal, ours(given[0]), eager[0]))
    x = given[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = ours(x)
    for other, expected in zip(given, eager, strict=True):
        x.copy_(other)
        graph.replay()
        for got, right in zip(results, expected, strict=True):
            assert_bitwise_equal(got, right)


def test_a_graph_follows_scales():
    """A graph follows written scales after the next call, which updates the kept factor in place."""
    layer = QuantizedLinear.from_linear(torch.nn.Linear(K, 256, False).bfloat16().cuda(), input_scale=0.01)
    x = rows(4)
    for _ in range(3):
        before = layer(x).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    layer.weight_global_scale.mul_(2)
    assert_bitwise_equal(layer(x), 2 * before)
    graph.replay()
    assert_bitwise_equal(y, 2 * before)
