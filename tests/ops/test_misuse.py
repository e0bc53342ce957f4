"""Messages of the public operations for arguments of a wrong kind: rule, value, and fix."""

import flat_parts as parts
import pytest
import torch

import nvfp4_cute as nv
from nvfp4_cute.formats import scale_layout
from nvfp4_cute.formats.block_format import FORMATS
from nvfp4_cute.operands import group_sizes

N, K = 256, 512
X = nv.quantize(torch.randn(40, K))
W = nv.quantize(torch.randn(N, K))
V = nv.quantize(torch.randn(K))
EXPERTS = W.data.expand(2, N, K // 2).contiguous(), W.scale.expand(2, *W.scale.shape).contiguous()
OFFS = torch.tensor([33, 40], dtype=torch.int32)
ROWS = scale_layout.from_blocked(X.scale, 40, K // 16)
GROUP_SCALES = torch.cat([scale_layout.to_blocked(rows) for rows in (ROWS[:33], ROWS[33:])])


LINEAR = torch.nn.Linear(32, 16)
EXPERT_LAYERS = torch.ones(2, 64, 32), torch.ones(2, 32, 32)


def gemm(a=X.data, b=W.data, a_scale=X.scale, b_scale=W.scale, **options):
    return parts.gemm(a, b, a_scale, b_scale, **options)


def grouped(a=(X.data,), b=(W.data,), a_scale=(X.scale,), b_scale=(W.scale,), **options):
    return parts.grouped_gemm(a, b, a_scale, b_scale, **options)


def ragged(a=X.data, b=EXPERTS[0], a_scale=GROUP_SCALES, b_scale=EXPERTS[1], offs=OFFS, **options):
    return parts.grouped_gemm(a, b, a_scale, b_scale, offs, **options)


def dual(b1=W.data, b2=W.data, b2_scale=W.scale, **options):
    return parts.dual_gemm(X.data, b1, b2, X.scale, W.scale, b2_scale, **options)


def dual_list(b1=(W.data,), **options):
    return parts.grouped_dual_gemm((X.data,), b1, (W.data,), (X.scale,), (W.scale,), (W.scale,), **options)


def dual_ragged(b1=EXPERTS[0], **options):
    return parts.grouped_dual_gemm(
        X.data, b1, EXPERTS[0], GROUP_SCALES, EXPERTS[1], EXPERTS[1], offs=OFFS, **options
    )


def test_the_calls_that_are_varied_below_are_right():
    expected = gemm()
    torch.testing.assert_close(grouped()[0], expected)
    torch.testing.assert_close(ragged(), expected)
    assert dual().shape == expected.shape


@pytest.mark.parametrize(
    ("call", "arguments", "error", "words"),
    [
        (gemm, {"a": X}, TypeError, "a is an NVFP4Tensor; pass its .data"),
        (gemm, {"b_scale": None}, TypeError, "b_scale is None; pass a torch.Tensor"),
        (gemm, {"b": torch.zeros(256, 512), "b_scale": None}, TypeError, "b has float32 values and no b_scale; pass quantize(b)"),
        (grouped, {"b": (torch.zeros(256, 512).bfloat16(),), "b_scale": None}, TypeError, "pass [quantize(x) for x in b]"),
        *(
            (op, {"out_dtype": "NVFP4"}, ValueError, "out_dtype='NVFP4' is not supported; use torch.float16")
            for op in (gemm, grouped, ragged, dual)
        ),
        (gemm, {"a_scale": None}, TypeError, "a_scale is None and a has dtype torch.uint8"),
        (gemm, {"a": X.data[0]}, ValueError, "a has shape [256]; pass a [M, K/2]"),
        (gemm, {"b": W.data[0]}, ValueError, "b has shape [256] and a [40, 256]; pass a [M, K/2]"),
        (gemm, {"b": W.data[:, :128]}, ValueError, "a has K=512 and b has K=256"),
        (gemm, {"config": "t128x128x256_s0a2"}, TypeError, "pass one, such as KernelConfig.from_name("),
        (gemm, {"out": X}, TypeError, 'it goes with out_dtype="nvfp4": pass that, or a torch.Tensor'),
        (grouped, {"out": (X,)}, TypeError, 'it goes with out_dtype="nvfp4"'),
        (ragged, {"out": X}, TypeError, 'it goes with out_dtype="nvfp4"'),
        (gemm, {"backend": None}, TypeError, "backend=None is no name; use one of auto, cuda"),
        (ragged, {"backend": torch.device("cpu")}, TypeError, "backend=device(type='cpu') is no name"),
        (grouped, {"alpha": [torch.tensor(1.0)]}, TypeError, "torch.stack(alpha).float() of tensors"),
        (gemm, {"alpha": [torch.tensor(1.0)]}, TypeError, "torch.stack(alpha).float() of tensors"),
        (grouped, {"config": 3}, TypeError, "config=3 is no KernelConfig"),
        (grouped, {"a": X.data}, TypeError, "without offs or masked_m pass a list"),
        (grouped, {"a": (X,)}, TypeError, "group 0: a is an NVFP4Tensor; pass its .data"),
        (grouped, {"masked_m": OFFS}, TypeError, "with masked_m it is one tensor, [G, M_max, K/2]"),
        (ragged, {"a": [X.data]}, TypeError, "with offs it is one tensor, [sum of M, K/2]"),
        (dual, {"b1": None}, TypeError, "b1 is None; pass a torch.Tensor"),
        (dual_list, {"b1": None}, TypeError, "b1 is a NoneType; pass a list"),
        (dual_ragged, {"b1": None}, TypeError, "b1 is None; pass a torch.Tensor"),
        (ragged, {"config": "x"}, TypeError, "is no KernelConfig"),
        (ragged, {"b_scale": None}, TypeError, "b_scale is None"),
        (ragged, {"offs": OFFS[:0]}, ValueError, "offs is empty; pass at least one group"),
        (ragged, {"alpha": torch.ones(3)}, ValueError, "contiguous [2], one per group"),
        (ragged, {"a_scale": X.scale, "backend": "emulator"}, ValueError, "a_scale has 1 blocks of 128 rows, and group 1 ends in block 2"),
        (ragged, {"a_scale": X.scale, "backend": "emulator:sm_90a"}, ValueError, "quantize rows with grouped_quantize(x, offs)"),
        (dual, {"b2": None}, TypeError, "pass b2 and b2_scale"),
        (dual, {"b2_scale": None}, TypeError, "pass b2 and b2_scale"),
        (dual, {"b2": None, "weight_layout": "concatenated"}, TypeError, "pass None for b2 and b2_scale"),
        (dual, {"b2": [W.data]}, TypeError, "b2 is a list; pass a torch.Tensor, or call grouped_dual_gemm"),
    ],
)  # fmt: skip
def test_operands(call, arguments, error, words):
    with pytest.raises(error) as caught:
        call(**arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("a", "error", "words"),
    [
        ([], ValueError, "a is an empty list; pass at least one group"),
        ([torch.ones(3, K)], TypeError, "a[0] has torch.float32 values; pass quantize(a[0]), or 16-bit values: a[0].bfloat16()"),
        ([X, torch.ones(3, K).half()], TypeError, "a[0] is an NVFP4Tensor and a[1] a Tensor; quantize all groups of a call, or none"),
        ([torch.ones(3, K).half(), torch.ones(3, K).bfloat16()], TypeError, "groups of bfloat16 and of float16; convert them"),
        ((x for x in [X]), TypeError, "a is a generator; pass a list with one tensor per group, or list(a)"),
    ],
)  # fmt: skip
def test_lists_of_groups(a, error, words):
    with pytest.raises(error) as caught:
        nv.grouped_gemm(a, [W] * (len(a) if isinstance(a, list) else 1))
    assert words in str(caught.value)


def test_sizes_in_the_place_of_offs():
    with pytest.raises(ValueError, match="sizes of the groups of a 3-D tensor go to masked_m="):
        nv.grouped_gemm(nv.quantize(torch.ones(2, 40, K)), nv.quantize(torch.ones(2, N, K)), OFFS)


def moe_of(x):
    first, second = nv.quantize(torch.ones(2, 64, 64)), nv.quantize(torch.ones(2, 64, 32))
    return nv.moe(x, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1), first, second)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: nv.quantize([1.0]), TypeError, "x is a list; pass a torch.Tensor"),
        (lambda: nv.quantize(torch.ones(4, 32), global_scale_inv="auto"), TypeError, "'auto' is not a number, a tensor or None"),
        (lambda: nv.quantize(torch.ones(4, 32), global_scale=object()), TypeError, "is not a number, a tensor"),
        (lambda: nv.grouped_quantize(torch.ones(4, 32).half(), torch.tensor([4])), TypeError, "offs.int().contiguous()"),
        (lambda: nv.QuantizedLinear.from_linear(LINEAR, device="cpu"), TypeError, "device='cpu' is given, and linear decides it"),
        (lambda: nv.QuantizedLinear.from_linear(LINEAR, bias=False), TypeError, "bias=False is given, and linear decides it"),
        (lambda: nv.QuantizedLinear.from_quantized(W, bias=None, device="cpu"), TypeError, "and weight decides it"),
        (lambda: nv.QuantizedLinear.from_linear(LINEAR, backend=None)(torch.ones(2, 32)), TypeError, "backend=None is no name"),
        (lambda: nv.QuantizedLinear.from_linear(LINEAR, input_scale=torch.ones(2)), ValueError, "input_scale has shape [2]"),
        (lambda: nv.QuantizedLinear.from_linear(LINEAR)(torch.ones(2, 32).double()), TypeError, "pass x.float(), or make"),
        (lambda: nv.MoE.from_experts(*EXPERT_LAYERS, device="cpu"), TypeError, "and gate_up decides it"),
        (lambda: nv.dequantize(X.data), TypeError, "t is a Tensor; pass a BlockScaledTensor"),
        (lambda: parts.gemv(W.data, V.data, W.scale, V.scale, out=torch.zeros(1).expand(N), out_dtype=torch.float32), ValueError,
            "out has strides (0,): elements share memory"),
        (lambda: parts.gemm(torch.ones(40, K).half(), W.data, None, W.scale, out=torch.zeros(295).as_strided((40, N), (1, 1)),
            out_dtype=torch.float32), ValueError, "out has strides (1, 1): elements share memory"),
        (lambda: parts.gemv(W.data, V.data, W.scale, None), TypeError, "b_scale is None"),
        (lambda: parts.gemv(W.data, V.data, W.scale, V.scale, "2"), TypeError, "alpha='2' is neither a number"),
        (lambda: nv.QuantizedLinear.from_linear(torch.nn.Bilinear(2, 2, 2)), TypeError, "linear is a Bilinear"),
        (lambda: nv.QuantizedLinear(K, N)(torch.randn(40, 256)), ValueError, "x has shape [40, 256]; expected [..., 512]"),
        (lambda: nv.PersistentMLP([nv.quantize(torch.eye(32))], [1, 1])(torch.eye(32)), TypeError, "x is a Tensor"),
        (lambda: moe_of(None), TypeError, "x is None; pass a torch.Tensor"),
        (lambda: moe_of(torch.tensor(1.0)), ValueError, "x has shape []"),
        (lambda: nv.MoE.from_experts(*EXPERT_LAYERS)(torch.ones(3, 32).half(), torch.zeros(3, 1).int(), torch.tensor(1.0)), ValueError,
            "weights is torch.float32 [], strides []; expected"),
    ],
)  # fmt: skip
def test_other_calls(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize("backend", ["reference", "emulator", "emulator:sm_90a"])
@pytest.mark.parametrize("out_dtype", ["nvfp4", "mxfp4", "fp8_1x128"])
def test_results_of_16_bit_rows_are_not_quantized(backend, out_dtype):
    x, options = X.dequantize(torch.bfloat16), {"out_dtype": out_dtype, "backend": backend}
    for call in (
        lambda: parts.gemm(x, W.data, None, W.scale, **options),
        lambda: parts.grouped_gemm([x], [W.data], None, [W.scale], **options),
        lambda: parts.grouped_gemm(x, EXPERTS[0], None, EXPERTS[1], OFFS, **options),
        lambda: parts.dual_gemm(x, W.data, W.data, None, W.scale, W.scale, **options),
        lambda: parts.grouped_dual_gemm(x, *EXPERTS[:1] * 2, None, *EXPERTS[1:] * 2, offs=OFFS, **options),
    ):
        with pytest.raises(nv.UnsupportedProblem, match=f'"{out_dtype}" with 16-bit a: call quantize'):
            call()


def test_refusals_name_records_as_code_does():
    with pytest.raises(nv.UnsupportedProblem, match=r"quantize\(result, format=FP8_128x128\)"):
        gemm(out_dtype="fp8_128x128")
    with pytest.raises(nv.UnsupportedProblem, match=r"quantize\(x, format=FP8_1x128\)"):
        nv.grouped_quantize(torch.ones(4, 128).half(), OFFS, format=nv.FP8_1x128)
    assert all(getattr(nv, format.record) is format for format in FORMATS.values())


@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1.0},
        {"top_k": "2"},
        {"groups": (2.0, 1)},
        {"groups": (2, True)},
        {"scale": float("nan")},
        {"scale": 10**400},
    ],
    ids=lambda options: next(iter(options)),
)
def test_routes_that_are_not_chosen(backend, options):
    (name,) = options
    with pytest.raises(
        (TypeError, ValueError), match=f"{name}=.* is not a(n int| finite float32 number); pass"
    ):
        nv.route(torch.zeros(5, 8), **{"top_k": 2, "backend": backend} | options)


@pytest.mark.parametrize("ends", [[-5, 20], [-(2**31), 3], [7, 31], [2**31 - 1, 2**31 - 1]], ids=str)
def test_kernels_clip_ends_beyond_the_rows(ends, monkeypatch):
    """A launch stays within bounds where nothing has checked the ends before it, as on a GPU."""
    monkeypatch.setattr(group_sizes, "_values", lambda name, sizes: None)
    rows, wanted = torch.randn(30, 64).bfloat16(), [min(max(end, 0), 30) for end in ends]
    calls = [(ends, "reference"), (ends, "emulator"), (wanted, "reference")]
    found = [nv.grouped_quantize(rows, torch.tensor(e, dtype=torch.int32), backend=b) for e, b in calls]
    *others, (data, scale) = found
    for other_data, other_scale in others:
        assert torch.equal(other_data[: wanted[-1]], data[: wanted[-1]])
        assert torch.equal(other_scale.view(torch.uint8), scale.view(torch.uint8))
