"""torch.set_default_dtype and set_default_device, which engines and loaders set, change neither scales nor results."""

import pytest
import torch
from flat_parts import gemv

from nvfp4_cute import MoE, PersistentMLP, QuantizedLinear, quantize, route


@pytest.fixture
def default_bfloat16():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def default_meta():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def everything(x, gate_up, down, logits):
    ids, topk = route(logits, 2)
    found = [ids, topk]
    for q in (quantize(x, global_scale="auto"), quantize(x, global_scale=0.0123456)):
        found += [q.data, q.scale, q.global_scale]
    linear = QuantizedLinear.from_quantized(quantize(gate_up[0], global_scale="auto"), dtype=torch.bfloat16)
    experts = MoE.from_experts(gate_up, down, input_scale=0.0123456)
    square = quantize(gate_up[0, :64])
    mlp = PersistentMLP([square, square], [0.0123456, 0.1, 0.2], backend="reference")
    row, vector = quantize(x), quantize(x[0])
    found.append(gemv(row.data, vector.data, row.scale, vector.scale, alpha=0.0123456))
    tensors = [t for m in (linear, experts, mlp) for t in m.state_dict().values() if t is not None]
    return [*found, *tensors, linear(x), experts(x, ids, topk)]


@pytest.mark.parametrize("default", ["default_bfloat16", "default_meta"])
@torch.no_grad()
def test_nothing_depends_on_it(default, request):
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=g).bfloat16()
    operands = make(5, 64), make(4, 256, 64), make(4, 64, 128), make(5, 4)
    expected = everything(*operands)
    request.getfixturevalue(default)
    for got, exact in zip(everything(*operands), expected, strict=True):
        assert got.dtype == exact.dtype
        assert torch.equal(bits(got), bits(exact))
