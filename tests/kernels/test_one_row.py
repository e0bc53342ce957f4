"""gemm of one activation row on an architecture where a gemv is faster: the gemv's bits with gemm's arguments."""

import pytest
import torch
from flat_parts import gemm, gemv
from oracle import assert_bitwise_equal, bits, poisoned
from simt_model import gemv_expected, launches, make_gemv_operands

from nvfp4_cute import NVFP4Tensor, quantize
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.gpus.targets import H200
from nvfp4_cute.launch.simt import few_rows_task
from nvfp4_cute.nn.linear import QuantizedLinear
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.operands.products import Product
from nvfp4_cute.operands.rules import MAX_PITCH
from nvfp4_cute.planning.choose import candidates

SM90 = "emulator:sm_90a"


def as_gemm(operands):
    """a [1, K/2, L], b [N, K/2, L] and their scales, from a gemv's operands."""
    return operands.b.unsqueeze(0), operands.a, operands.b_scale, operands.a_scale


def one_row_task(a, b, a_scale, b_scale, out):
    """The task for one row of a, from tensors of one batch."""
    left, right = (
        Operand(x.unsqueeze(0), scale.view(1, -1), NVFP4, len(x), 2 * x.shape[1])
        for x, scale in ((a, a_scale), (b, b_scale))
    )
    return few_rows_task(Product(left, right, None, out.unsqueeze(0)), H200.gpu)


@pytest.mark.parametrize("n, k, l", [(1, 16, 1), (129, 272, 2), (40, 2064, 1)])
def test_bits_are_the_gemvs(n, k, l):
    operands, alpha = make_gemv_operands(n, k, l, seed=n), torch.linspace(0.3, -1.7, l)
    out, count, plans = launches(
        lambda: gemm(*as_gemm(operands), alpha, out_dtype=torch.float32, backend=SM90)
    )
    assert (count, plans) == (1, 0)
    assert out.shape == (1, n, l) and out.stride() == (n, 1, n)
    assert_bitwise_equal(out[0].contiguous(), gemv_expected(operands, alpha), n=n, k=k)


@pytest.mark.parametrize(
    "options",
    [{"backend": "emulator:sm_100a"}, {"config": next(iter(candidates("sm_90a", "batched")))}, {"rows": 9}],
)
def test_all_else_stays_with_the_gemm(options):
    options = {"backend": SM90} | options
    a, b, a_scale, b_scale = (
        t[..., 0] if t.ndim == 3 else t[0] for t in as_gemm(make_gemv_operands(40, 64, seed=3))
    )
    a = a.expand(options.pop("rows", 1), -1).contiguous()
    assert launches(lambda: gemm(a, b, a_scale, b_scale, **options))[1:] == (1, 1)


def test_quantized_results_stay_with_the_gemm():
    x, w = (
        quantize(torch.randn(1, 64), backend="reference"),
        quantize(torch.randn(48, 64), backend="reference"),
    )
    out, _, plans = launches(lambda: gemm(x.data, w.data, x.scale, w.scale, out_dtype="nvfp4", backend=SM90))
    assert isinstance(out, NVFP4Tensor) and plans == 1


@pytest.mark.slow
def test_every_form_that_gemm_takes():
    """Matrices, float4 values, an output in a larger buffer, row-major scales, and a number as alpha: the same bits."""
    operands = make_gemv_operands(72, 192, seed=8)
    want = gemv(*operands, 0.5, backend=SM90)[:, 0]
    a, b, a_scale, b_scale = (t[..., 0] if t.ndim == 3 else t[0] for t in as_gemm(operands))
    a, b = (t.contiguous().view(torch.float4_e2m1fn_x2) for t in (a, b))
    buffer = poisoned(3, 80, dtype=torch.bfloat16)
    out = buffer[1:2, :72]
    assert gemm(a, b, a_scale, b_scale, 0.5, out=out, backend=SM90) is out
    assert_bitwise_equal(out[0].contiguous(), want)
    out.copy_(poisoned(1, 72, dtype=torch.bfloat16))
    assert torch.equal(bits(buffer), bits(poisoned(3, 80, dtype=torch.bfloat16)))
    rows = [torch.full((n, 12), 0x38, dtype=torch.uint8) for n in (1, 72)]
    straight = gemm(a, b, *map(to_blocked, rows), backend=SM90)
    assert_bitwise_equal(gemm(a, b, *rows, scale_layout="rowmajor", backend=SM90), straight)


def test_no_columns():
    out = gemm(
        torch.zeros(1, 32, dtype=torch.uint8),
        torch.zeros(0, 32, dtype=torch.uint8),
        torch.zeros(512, dtype=torch.uint8),
        torch.zeros(0, dtype=torch.uint8),
        backend=SM90,
    )
    assert out.shape == (1, 0)


def test_messages_name_the_arguments_of_gemm():
    a, b, a_scale, b_scale = (t[..., 0] if t.ndim == 3 else t[0] for t in as_gemm(make_gemv_operands(40, 64)))
    with pytest.raises(ValueError, match="b_scale"):
        gemm(a, b, a_scale, b_scale[:, :0], backend=SM90)
    with pytest.raises(ValueError, match="a starts at address .* not a multiple of 16"):
        gemm(torch.zeros(1, 40, dtype=torch.uint8)[:, 8:], b, a_scale, b_scale, backend=SM90)
    with pytest.raises(ValueError, match="out"):
        gemm(a, b, a_scale, b_scale, out=torch.zeros(1, 41, dtype=torch.bfloat16), backend=SM90)
    task = one_row_task(a, b, a_scale, b_scale, torch.zeros(1, 40))
    assert task is not None
    named = {name: tensor.data_ptr() for name, tensor, _ in task.tensors()}
    assert (named["a"], named["b"]) == (a.data_ptr(), b.data_ptr())
    assert (named["a_scale"], named["b_scale"]) == (a_scale.data_ptr(), b_scale.data_ptr())


def test_rows_too_far_apart_for_a_gemv_stay_with_the_gemm():
    a, scale, out = (
        torch.zeros(1, 32, dtype=torch.uint8),
        torch.zeros(1, 512, dtype=torch.uint8),
        torch.zeros(1, 2),
    )
    for pitch, is_gemv in ((MAX_PITCH, True), (MAX_PITCH + 16, False)):
        b = torch.empty(pitch + 32, dtype=torch.uint8).as_strided((2, 32), (pitch, 1))
        assert (one_row_task(a, b, scale, scale, out) is not None) == is_gemv


@pytest.mark.slow
def test_a_linear_layer_of_one_token():
    layer = QuantizedLinear.from_linear(torch.nn.Linear(64, 40), backend=SM90)
    x = torch.randn(1, 64).bfloat16()
    y, count, plans = launches(lambda: layer(x))
    assert plans == 0 and count >= 2  # quantize and the product
    layer.backend = "reference"
    torch.testing.assert_close(y, layer(x), rtol=2**-7, atol=2**-7)
