"""Dual GEMMs of groups add each group's bias to both products, before the activation. Every bit is the reference's."""

import flat_parts as parts
import pytest
import torch
from oracle import assert_bitwise_equal

import nvfp4_cute as nv
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats.scale_layout import from_blocked

SLOW = pytest.mark.slow
GROUPS, K = 3, 128
OFFS = torch.tensor([5, 5, 13], dtype=torch.int32)
UP_FIRST, GATE_FIRST = "interleaved_64_up_first", "interleaved_32_gate_first"
# Architecture, format of rows, layout of the weights, N, results.
CASES = [
    ("sm_90a", None, GATE_FIRST, 96, torch.bfloat16),
    ("sm_90a", nv.FP8_1xK, UP_FIRST, 128, torch.float32),
    ("sm_90a", nv.NVFP4, "concatenated", 128, "nvfp4"),
    ("sm_80", None, "concatenated", 128, torch.float32),
    ("sm_100a", nv.NVFP4, "concatenated", 128, torch.bfloat16),
    ("sm_120a", nv.NVFP4, GATE_FIRST, 96, torch.bfloat16),
    pytest.param("sm_100a", nv.NVFP4, UP_FIRST, 128, "nvfp4", marks=SLOW),
    pytest.param("sm_90a", None, "concatenated", 128, torch.float32, marks=SLOW),
    pytest.param("sm_90a", nv.MXFP8_E4M3, GATE_FIRST, 160, torch.float32, marks=SLOW),
    pytest.param("sm_80", None, UP_FIRST, 128, torch.bfloat16, marks=SLOW),
    pytest.param("sm_80", None, GATE_FIRST, 96, torch.bfloat16, marks=SLOW),
    pytest.param("sm_100a", nv.MXFP8_E4M3, GATE_FIRST, 160, torch.float32, marks=SLOW),
    pytest.param("sm_120a", nv.NVFP4, "concatenated", 128, torch.bfloat16, marks=SLOW),
    pytest.param("sm_120a", nv.MXFP8_E4M3, UP_FIRST, 128, torch.float32, marks=SLOW),
]


def drawn(*shape):
    """Small integers, whose sums and products float32 represents exactly."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(sum(shape)))


def weights_of(rows, n):
    """Weights of both products in a format that multiplies rows in ``rows`` (None: 16 bits)."""
    if rows is nv.NVFP4:
        return nv.quantize(drawn(GROUPS, n, K).bfloat16(), global_scale=1.0)
    made = nv.quantize(drawn(GROUPS, n, K).bfloat16(), format=nv.MXFP4)
    return nv.mxfp4_for_fp8(made) if rows is nv.FP8_1xK else made


def rows_of(format):
    x = drawn(int(OFFS[-1]), K).bfloat16()
    if format is None:
        return x
    if format is not nv.FP8_1xK:
        return nv.grouped_quantize(x, OFFS, format=format)
    made = nv.quantize(x, format=format)
    made.data.copy_(x)
    made.scale.fill_(0.5)
    return made


def codes_of(quantized):
    """Elements and block scales of quantized results, one row each, without rows that pad groups."""
    data, scale = (part.view(torch.uint8) for part in quantized)
    first, second = (from_blocked(scale.flatten(1)[i].flatten(), 128, data.shape[1] // 8) for i in (0, 1))
    return torch.cat([data, torch.cat([first[:5], second[:8]])], 1)  # the group in the middle is empty


@pytest.mark.parametrize(("arch", "rows", "layout", "n", "out_dtype"), CASES)
def test_bias_of_every_group(arch, rows, layout, n, out_dtype):
    a, w, bias = rows_of(rows), weights_of(rows, 2 * n), drawn(GROUPS, 2 * n).bfloat16()
    how = {"offs": OFFS, "activation": "relu2", "weight_layout": layout, "out_dtype": out_dtype}
    with observe(check=True):
        got = parts.grouped_dual_gemm(a, w, bias=bias, backend=f"emulator:{arch}", **how)
    want, without = (parts.grouped_dual_gemm(a, w, bias=b, backend="reference", **how) for b in (bias, None))
    if out_dtype == "nvfp4":
        got, want, without = map(codes_of, (got, want, without))
    assert_bitwise_equal(got, want)
    assert not torch.equal(want, without)


def test_bias_of_rows_in_their_layout():
    """The gate's and the up projection's numbers are those of their rows of weights."""
    n, x, w = 64, rows_of(None), weights_of(None, 128)
    dense, bias = nv.dequantize(w, torch.float32), drawn(GROUPS, 2 * n).float()
    group = torch.repeat_interleave(torch.arange(GROUPS), torch.diff(OFFS, prepend=OFFS.new_zeros(1)))
    both = (dense[group] @ x.float()[..., None])[..., 0] + bias[group]
    places = {UP_FIRST: (both[:, 64:], both[:, :64])}
    places[GATE_FIRST] = tuple(both.view(-1, 2, 2, 32)[:, :, i].flatten(1) for i in (0, 1))
    for layout, (gate, up) in places.items():
        want = gate.relu() ** 2 * up
        how = {"offs": OFFS, "activation": "relu2", "weight_layout": layout, "out_dtype": torch.float32}
        assert torch.equal(parts.grouped_dual_gemm(x, w, bias=bias, backend="reference", **how), want)


def test_refusals():
    x, w = rows_of(None), weights_of(None, 128)
    how = {"activation": "relu2", "weight_layout": GATE_FIRST}
    for bias, words in (
        (torch.zeros(GROUPS, 64), r"\[G, rows\] = \[3, 128\]"),
        (torch.zeros(128), r"\[3, 128\]"),
    ):
        with pytest.raises(ValueError, match=words):
            parts.grouped_dual_gemm(x, w, bias=bias, offs=OFFS, **how)
    with pytest.raises(nv.UnsupportedProblem, match="in a list"):
        parts.grouped_dual_gemm([x], [w.data[0]], None, None, [w.scale[0]], bias=torch.zeros(1, 128), **how)
