"""problems/nvfp4_dual_gemm: reference, acceptance rule, adapter, and the official test shapes."""

import pytest
import torch
from oracle import poisoned

from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats.codecs import decode_e4m3, decode_packed_e2m1
from nvfp4_cute.problems.nvfp4_dual_gemm import adapter, inputs, reference, spec

CASE = spec.TESTS[1]


@pytest.fixture(scope="module")
def data():
    return inputs.make_inputs(CASE)


def test_reference_by_hand(data):
    """Uses the row-major scales, so that the permuted ones that the reference reads are also checked."""
    dense = [
        decode_packed_e2m1(x[:, :, 0].view(torch.uint8)).double()
        * decode_e4m3(s[:, :, 0]).double().repeat_interleave(16, 1)
        for x, s in zip(data[:3], data[3:6], strict=True)
    ]
    gate, up = dense[0] @ dense[1].T, dense[0] @ dense[2].T
    want = gate / (1 + torch.exp(-gate)) * up
    got = reference.reference(data)
    assert got.shape == (CASE.m, CASE.n, 1) and got.dtype == torch.float16
    torch.testing.assert_close(got[:, :, 0].double(), want, rtol=2**-10, atol=2**-20)


def test_adapter_hands_on_operands_and_backend(data, monkeypatch):
    """Passes operands, permuted scales and C without a copy."""
    calls = []
    monkeypatch.setattr(adapter.parts, "dual_gemm", lambda *args, **options: calls.append((args, options)))
    assert adapter.custom_kernel(data, backend="emulator") is data[9]
    ((args, options),) = calls
    assert all(x is y for x, y in zip(args, (*data[:3], *data[6:9]), strict=True))
    assert options["out"] is data[9] and options["backend"] == "emulator"


def check_case(case, backend):
    *operands, c = inputs.make_inputs(case)
    c.copy_(poisoned(case.m, case.n, dtype=torch.float16).unsqueeze(2))
    with observe(check=True) as observer:
        out = adapter.custom_kernel((*operands, c), backend=backend)
    assert out is c and len(observer.stats) == (backend != "reference")
    good, message = reference.check(out, reference.reference((*operands, c)))
    assert good, message


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_smallest_official_shape(backend):
    check_case(CASE, backend)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "case", [c for c in dict.fromkeys(spec.TESTS) if c is not CASE], ids=lambda case: case.name
)
def test_official_shape(case):
    check_case(case, "emulator")


@pytest.mark.gpu("sm_100a")
@pytest.mark.parametrize("case", spec.TESTS + spec.BENCHMARKS, ids=lambda case: case.name)
def test_gpu(case):
    data = inputs.make_inputs(case, "cuda")
    good, message = reference.check(adapter.custom_kernel(data), reference.reference(data))
    assert good, message
