"""problems/nvfp4_gemm: reference, acceptance rule, adapter, and the official test shapes."""

import pytest
import torch
from oracle import poisoned

from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.problems.nvfp4_gemm import adapter, inputs, reference, spec

CASE = spec.TESTS[0]


def test_adapter_hands_on_operands_and_backend(monkeypatch):
    """Passes operands, permuted scales and C without a copy."""
    data = inputs.make_inputs(CASE)
    calls = []
    monkeypatch.setattr(adapter.parts, "gemm", lambda *args, **options: calls.append((args, options)))
    assert adapter.custom_kernel(data, backend="emulator") is data[6]
    ((args, options),) = calls
    assert all(x is y for x, y in zip(args, (*data[:2], *data[4:6]), strict=True))
    assert options["out"] is data[6] and options["backend"] == "emulator"


def check_case(case, backend):
    *operands, c = inputs.make_inputs(case)
    c.copy_(poisoned(case.m, case.n, dtype=torch.float16).unsqueeze(2))
    with observe(check=True) as observer:
        out = adapter.custom_kernel((*operands, c), backend=backend)
    assert out is c and len(observer.stats) == (backend != "reference")
    expected = reference.reference((*operands, c))
    good, message = reference.check(out, expected)
    assert good, message
    # Sums of multiples of 1/4 are exact in fp32 in any order, so all bits are.
    assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_smallest_official_shape(backend):
    check_case(CASE, backend)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", spec.TESTS[1:], ids=lambda case: case.name)
def test_official_shape(case):
    check_case(case, "emulator")


@pytest.mark.gpu("sm_100a")
@pytest.mark.parametrize("case", spec.TESTS + spec.BENCHMARKS, ids=lambda case: case.name)
def test_gpu(case):
    data = inputs.make_inputs(case, "cuda")
    good, message = reference.check(adapter.custom_kernel(data), reference.reference(data))
    assert good, message
