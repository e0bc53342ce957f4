"""problems/nvfp4_gemv: input structure, reference, acceptance rule, adapter, and the official test shapes."""

import math

import pytest
import torch
from oracle import assert_bitwise_equal, bits, poisoned

from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats.codecs import decode_e4m3, decode_packed_e2m1
from nvfp4_cute.problems.nvfp4_gemv import adapter, inputs, reference, spec

CASE = spec.TESTS[7]
ALL_ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
# The emulator's time is proportional to M * K * L.
SMALL = [case for case in dict.fromkeys(spec.TESTS) if case.m * case.k * case.l < 2_500_000]
LARGE = [case for case in dict.fromkeys(spec.TESTS) if case not in SMALL]


@pytest.fixture(scope="module")
def data():
    return inputs.make_inputs(CASE)


# ---- inputs ----------------------------------------------------------------------------------------------------


def test_operand_shapes_strides_dtypes(data):
    a, b, *_, c = data
    m, k, l = CASE.m, CASE.k, CASE.l
    for tensor, rows in ((a, m), (b, spec.PADDED_N)):
        assert tensor.dtype == torch.float4_e2m1fn_x2
        assert tensor.shape == (rows, k // 2, l) and tensor.stride() == (k // 2, 1, rows * k // 2)
    assert c.dtype == torch.float16 and c.shape == (m, 1, l) and c.stride() == (1, 1, m)


def test_scale_shapes_strides_dtypes(data):
    k, l = CASE.k, CASE.l
    for plain, permuted, rows in zip(data[2:4], data[4:6], (CASE.m, spec.PADDED_N), strict=True):
        rest, rest_k = math.ceil(rows / 128), math.ceil(k / 64)
        assert plain.dtype == permuted.dtype == torch.float8_e4m3fn
        assert plain.shape == (rows, k // 16, l) and plain.stride() == (k // 16, 1, rows * k // 16)
        assert permuted.shape == (32, 4, rest, 4, rest_k, l)
        assert permuted.stride() == (16, 4, 512 * rest_k, 1, 512, 512 * rest_k * rest)


def test_value_ranges(data):
    for tensor in data[:2]:
        values = decode_packed_e2m1(tensor.view(torch.uint8).permute(2, 0, 1))
        assert set(values[..., 0::2].flatten().tolist()) == {0.0, 0.5, 1.0, 1.5}
        assert not values[..., 1::2].any()
    for scales in data[2:6]:
        assert set(decode_e4m3(scales).flatten().tolist()) == {0.0, 1.0, 2.0}


def test_inputs_follow_from_the_seed():
    first, again, other = (inputs.make_inputs(spec.TESTS[0], seed=seed) for seed in (None, spec.SEED, 7))
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(first, again, strict=True))
    assert not any(torch.equal(bits(x), bits(y)) for x, y in zip(first, other, strict=True))


# ---- reference and acceptance ----------------------------------------------------------------------------------


def test_reference_by_hand(data):
    """Uses the row-major scales, so that the permuted ones that the reference reads are also checked."""
    a, b, sfa, sfb, *_ = data
    expected = reference.reference(data)
    assert expected.shape == (CASE.m, 1, CASE.l) and expected.dtype == torch.float16
    for batch in range(CASE.l):
        dense = [
            decode_packed_e2m1(x[:, :, batch].view(torch.uint8)).double()
            * decode_e4m3(s[:, :, batch]).double().repeat_interleave(16, 1)
            for x, s in ((a, sfa), (b, sfb))
        ]
        assert torch.equal(expected[:, 0, batch], (dense[0] @ dense[1][0]).half())


def test_check():
    want = torch.tensor([1.0, -2.0, 1000.0]).view(3, 1, 1)
    assert reference.check(want * 1.0005, want) == (True, "")
    for wrong, part in (
        (want * 1.01, "mismatched elements: 3"),
        (want[:2], "SIZE MISMATCH"),
        (want / 0, "ERROR AT (0, 0, 0): inf 1.0"),
        ([want], "output is a list"),
    ):
        good, message = reference.check(wrong, want)
        assert not good and part in message


# ---- adapter ---------------------------------------------------------------------------------------------------


def test_adapter_hands_on_operands_and_backend(data, monkeypatch):
    """Passes permuted scales, the first row of b and all of c without a copy."""
    calls = []
    monkeypatch.setattr(adapter.parts, "gemv", lambda *args, **options: calls.append((args, options)))
    assert adapter.custom_kernel(data, backend="emulator") is data[6]
    (((a, b), options),) = calls
    assert a.data is data[0] and a.scale is data[4] and b.scale is data[5]
    assert b.data.data_ptr() == data[1].data_ptr() and b.data.shape == (CASE.k // 2, CASE.l)
    assert options["out"].data_ptr() == data[6].data_ptr() and options["backend"] == "emulator"


def check_case(case, backend):
    *operands, c = inputs.make_inputs(case)
    c = poisoned(case.l, case.m, 1, dtype=torch.float16).permute(1, 2, 0)
    data = (*operands, c)
    with observe(check=True) as observer:
        out = adapter.custom_kernel(data, backend=backend)
    assert out is c and len(observer.stats) == 1
    assert_bitwise_equal(out.contiguous(), reference.reference(data), case=case.name, backend=backend)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["emulator:sm_100a", "emulator:sm_90a"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_official_shape(case, backend):
    check_case(case, backend)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ALL_ARCHS)
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_official_shape_on_every_architecture(case, arch):
    check_case(case, f"emulator:{arch}")


def test_the_reference_backend_answers_too(data):
    *operands, c = data
    out = adapter.custom_kernel((*operands, torch.empty_like(c)), backend="reference")
    assert_bitwise_equal(out, reference.reference(data))


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("case", spec.TESTS + spec.BENCHMARKS, ids=lambda case: case.name)
def test_gpu(case):
    data = inputs.make_inputs(case, "cuda")
    assert_bitwise_equal(adapter.custom_kernel(data).cpu(), reference.reference(data).cpu(), case=case.name)
