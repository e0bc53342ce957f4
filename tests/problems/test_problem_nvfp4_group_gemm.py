"""problems/nvfp4_group_gemm: numbers, input structure, reference, acceptance rule, adapter."""

import math

import pytest
import torch
from oracle import bits, poisoned

from nvfp4_cute.formats.codecs import decode_e4m3, decode_packed_e2m1
from nvfp4_cute.problems.nvfp4_group_gemm import adapter, inputs, reference, spec
from nvfp4_cute.roofline.speed_of_light import grouped_gemm_us

CASE = spec.TESTS[4]
ALL_CASES = pytest.mark.parametrize("case", spec.TESTS + spec.BENCHMARKS, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def data():
    return inputs.make_inputs(CASE)


# ---- numbers ---------------------------------------------------------------------------------------------------


def test_ten_tests_and_four_benchmarks():
    assert (len(spec.TESTS), len(spec.BENCHMARKS)) == (10, 4)
    assert len({case.name for case in spec.TESTS + spec.BENCHMARKS}) == 14


@ALL_CASES
def test_sizes_are_legal(case):
    assert len(case.m) == len(case.n) == len(case.k) == case.num_groups
    assert all(m > 0 and m % 4 == 0 and n % 128 == 0 and k % 256 == 0 for m, n, k in case.sizes)
    assert case.problem_sizes == [(m, n, k, 1) for m, n, k in case.sizes]
    assert case.seed == 1111


@pytest.mark.parametrize("case", spec.BENCHMARKS, ids=lambda case: case.name)
def test_published_speed_of_light_follows_from_the_sizes(case):
    """Detects a typing error in a size."""
    assert grouped_gemm_us(case.sizes) == pytest.approx(case.sol_us, rel=5e-4)


@pytest.mark.parametrize(
    "case, sum_m, flops",
    [*zip(spec.BENCHMARKS, (1024, 1024, 512, 512), (60.1, 30.1, 12.9, 6.4), strict=True)],
)
def test_benchmark_totals(case, sum_m, flops):
    assert sum(case.m) == sum_m
    assert sum(2 * m * n * k for m, n, k in case.sizes) / 1e9 == pytest.approx(flops, abs=0.05)


def test_names_write_equal_extents_once():
    assert spec.TESTS[0].name == "g2_m96-128_n128-256_k256-512"
    assert spec.BENCHMARKS[3].name == "g2_m128-384_n4096_k1536"


# ---- inputs ----------------------------------------------------------------------------------------------------


def test_input_structure(data):
    abc, plain, permuted, sizes = data
    assert isinstance(data, tuple) and all(isinstance(entry, list) for entry in data)
    assert sizes == CASE.problem_sizes
    assert len(abc) == len(plain) == len(permuted) == CASE.num_groups


def test_operand_shapes_strides_dtypes(data):
    for (a, b, c), (m, n, k) in zip(data[0], CASE.sizes, strict=True):
        for tensor, rows in ((a, m), (b, n)):
            assert tensor.dtype == torch.float4_e2m1fn_x2
            assert tensor.shape == (rows, k // 2, 1) and tensor.stride() == (k // 2, 1, rows * k // 2)
        assert c.dtype == torch.float16 and c.shape == (m, n, 1) and c.stride() == (n, 1, m * n)


def test_scale_shapes_strides_dtypes(data):
    for plain, permuted, (m, n, k) in zip(data[1], data[2], CASE.sizes, strict=True):
        rest_k = k // 64
        for scale, blocked, rows in zip(plain, permuted, (m, n), strict=True):
            rest_mn = math.ceil(rows / 128)
            assert scale.dtype == blocked.dtype == torch.float8_e4m3fn
            assert scale.shape == (rows, k // 16, 1) and scale.stride() == (k // 16, 1, rows * k // 16)
            assert scale.device.type == "cpu"
            assert blocked.shape == (32, 4, rest_mn, 4, rest_k, 1)
            assert blocked.stride() == (16, 4, 512 * rest_k, 1, 512, 512 * rest_k * rest_mn)


def test_permuted_scales_hold_the_plain_ones(data):
    """Entry (i % 32, i % 128 // 32, i // 128, j % 4, j // 4) is the scale of row i and block j."""
    for plain, permuted in zip(data[1], data[2], strict=True):
        for scale, blocked in zip(plain, permuted, strict=True):
            i, j = torch.meshgrid(*(torch.arange(extent) for extent in scale.shape[:2]), indexing="ij")
            found = blocked.view(torch.uint8)[i % 32, i % 128 // 32, i // 128, j % 4, j // 4, 0]
            assert torch.equal(found, scale.view(torch.uint8)[:, :, 0])


def test_value_ranges(data):
    for a, b, _ in data[0]:
        for tensor in (a, b):
            values = decode_packed_e2m1(tensor[:, :, 0])
            for nibble in (values[:, 0::2], values[:, 1::2]):
                assert set(nibble.flatten().tolist()) == {-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5}
    for permuted, (m, _, _) in zip(data[2], CASE.sizes, strict=True):
        assert m % 128, "the case has padding rows"
        for blocked in permuted:
            assert set(decode_e4m3(blocked).flatten().tolist()) == {1.0, 2.0}


def test_padding_rows_are_random(data):
    """A kernel that uses them returns clearly wrong results."""
    blocked = data[2][0][0].view(torch.uint8)  # 64 rows of 128: the row groups 2 and 3 are padding
    assert blocked[:, 2:].unique().numel() == 2


def test_inputs_follow_from_the_seed():
    case = spec.TESTS[0]
    first, again, other = (inputs.make_inputs(case, seed=seed) for seed in (None, case.seed, 7))

    def equal(x, y):
        same = [torch.equal(bits(s), bits(t)) for s, t in zip(x[0][0], y[0][0], strict=True)]
        return all(same), any(same)

    assert equal(first, again) == (True, True) and equal(first, other) == (False, False)


def test_device_applies_to_all_but_row_major_scales():
    abc, plain, permuted, _ = inputs.make_inputs(spec.TESTS[0], device="meta")
    assert {t.device.type for group in abc + permuted for t in group} == {"meta"}
    assert {t.device.type for group in plain for t in group} == {"cpu"}


# ---- reference and acceptance ----------------------------------------------------------------------------------


def test_reference_by_hand(data):
    """Uses the row-major scales, so that the permuted ones that the reference reads are also checked."""
    for (a, b, _), (sfa, sfb), c in zip(data[0], data[1], reference.reference(data), strict=True):
        dense = [
            decode_packed_e2m1(x[:, :, 0]).double()
            * decode_e4m3(s[:, :, 0]).double().repeat_interleave(16, 1)
            for x, s in ((a, sfa), (b, sfb))
        ]
        assert c.dtype == torch.float16 and c.shape == (a.shape[0], b.shape[0], 1)
        assert torch.equal(c[:, :, 0], (dense[0] @ dense[1].T).half())


def answer():
    return [
        torch.tensor([[1.0, -2.0], [1000.0, 0.0]], dtype=torch.float16).unsqueeze(-1),
        torch.ones(1, 1, 1),
    ]


def changed(row, column, value):
    outputs = answer()
    outputs[0][row, column, 0] = value
    return outputs


def test_check_accepts_equal_answers_of_any_strides_and_dtype():
    outputs = answer()
    outputs[0] = outputs[0].permute(1, 0, 2).contiguous().permute(1, 0, 2)
    outputs[1] = outputs[1].double()
    assert reference.check(outputs, answer()) == (True, "")


@pytest.mark.parametrize(
    "row, column, accepted, refused", [(0, 0, 1.0015, 1.0025), (1, 0, 1000.5, 1002.0), (1, 1, 0.0009, 0.0011)]
)
def test_check_tolerance_is_absolute_plus_relative(row, column, accepted, refused):
    assert reference.check(changed(row, column, accepted), answer()) == (True, "")
    outputs = changed(row, column, refused)
    good, message = reference.check(outputs, answer())
    assert not good
    for part in (
        "doesn't match reference: 0 ",
        "Number of mismatched elements: 1",
        f"ERROR AT ({row}, {column}, 0): {outputs[0][row, column, 0]}",
    ):
        assert part in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_check_compares_where_nan_and_infinities_are(value):
    for outputs, expected in ((changed(0, 1, value), answer()), (answer(), changed(0, 1, value))):
        good, message = reference.check(outputs, expected)
        assert not good and "ERROR AT (0, 1, 0)" in message
    assert reference.check(changed(0, 1, value), changed(0, 1, value)) == (True, "")


def test_check_tells_the_infinities_apart():
    assert not reference.check(changed(0, 1, math.inf), changed(0, 1, -math.inf))[0]


def test_check_shape():
    outputs = answer()
    outputs[1] = torch.ones(1, 1)
    good, message = reference.check(outputs, answer())
    assert not good and "reference: 1 ['SIZE MISMATCH']" in message


def test_check_length_and_kind():
    good, message = reference.check(answer()[:1], answer())
    assert not good and message == "output length mismatch: got 1, expected 2"
    good, message = reference.check(answer()[0], answer())
    assert not good and "list of 2 tensors" in message


def test_check_prints_few_of_many_errors():
    _, message = reference.check([torch.zeros(100, 100, 1)], [torch.ones(100, 100, 1)])
    assert "mismatched elements: 10000" in message and "... and 9995 more mismatched elements." in message
    assert message.count("ERROR AT") == 5


# ---- adapter ---------------------------------------------------------------------------------------------------


def poison_c(data):
    abc, plain, permuted, sizes = data
    clean = [(a, b, poisoned(1, *c.shape[:2], dtype=c.dtype).permute(1, 2, 0)) for a, b, c in abc]
    return clean, plain, permuted, sizes


def test_adapter_fills_the_given_c(data):
    poisoned_data = poison_c(data)
    outputs = adapter.custom_kernel(poisoned_data, backend="reference")
    assert all(out is c for out, (_, _, c) in zip(outputs, poisoned_data[0], strict=True))
    expected = reference.reference(data)
    assert reference.check(outputs, expected) == (True, "")
    assert all(torch.equal(bits(out), bits(want)) for out, want in zip(outputs, expected, strict=True))


def test_adapter_hands_on_operands_and_backend(data, monkeypatch):
    """Passes permuted scales without a copy, and ignores the row-major ones."""
    calls = []
    monkeypatch.setattr(adapter.parts, "grouped_gemm", lambda *args, **options: calls.append((args, options)))
    adapter.custom_kernel(data)
    adapter.custom_kernel(data, backend="emulator")
    (first, options), (_, other) = calls
    a, b = first
    for g, ((want_a, want_b, want_c), (want_sfa, want_sfb)) in enumerate(zip(data[0], data[2], strict=True)):
        assert a.data[g] is want_a and b.data[g] is want_b and options["out"][g] is want_c
        assert a.scale[g] is want_sfa and b.scale[g] is want_sfb
    assert options["out_dtype"] == torch.float16
    assert (options["backend"], other["backend"]) == ("auto", "emulator")
