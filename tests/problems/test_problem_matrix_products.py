"""problems/nvfp4_gemm and problems/nvfp4_dual_gemm: reference, acceptance rule, adapter, and the official test shapes."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from oracle import poisoned

from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats.codecs import decode_e4m3, decode_packed_e2m1

MODULES = ("adapter", "inputs", "reference", "spec")
GEMM, DUAL = (
    SimpleNamespace(
        operation=name, **{m: import_module(f"nvfp4_cute.problems.nvfp4_{name}.{m}") for m in MODULES}
    )
    for name in ("gemm", "dual_gemm")
)
GEMM.smallest, DUAL.smallest = GEMM.spec.TESTS[0], DUAL.spec.TESTS[1]
# Inputs are the operands, their row-major scales, their permuted scales, and C.
GEMM.operands, DUAL.operands = 2, 3
PROBLEMS = pytest.mark.parametrize("problem", [GEMM, DUAL], ids=lambda problem: problem.operation)


def variants(of):
    return [
        pytest.param(problem, case, id=f"{problem.operation}-{case.name}")
        for problem in (GEMM, DUAL)
        for case in of(problem)
    ]


def test_the_dual_reference_by_hand():
    """Uses the row-major scales, so that the permuted ones that the reference reads are also checked."""
    case, data = DUAL.smallest, DUAL.inputs.make_inputs(DUAL.smallest)
    dense = [
        decode_packed_e2m1(x[:, :, 0].view(torch.uint8)).double()
        * decode_e4m3(s[:, :, 0]).double().repeat_interleave(16, 1)
        for x, s in zip(data[:3], data[3:6], strict=True)
    ]
    gate, up = dense[0] @ dense[1].T, dense[0] @ dense[2].T
    want = gate / (1 + torch.exp(-gate)) * up
    got = DUAL.reference.reference(data)
    assert got.shape == (case.m, case.n, 1) and got.dtype == torch.float16
    torch.testing.assert_close(got[:, :, 0].double(), want, rtol=2**-10, atol=2**-20)


@PROBLEMS
def test_adapter_hands_on_operands_and_backend(problem, monkeypatch):
    """Passes operands, permuted scales and C without a copy."""
    data, count, calls = problem.inputs.make_inputs(problem.smallest), problem.operands, []
    keep = lambda *args, **options: calls.append((args, options))
    monkeypatch.setattr(problem.adapter.parts, problem.operation, keep)
    assert problem.adapter.custom_kernel(data, backend="emulator") is data[-1]
    (((a, b), options),) = calls
    sides = [a, b] if problem.operation == "gemm" else [a, b.gate, b.up]
    given = [*(x.data for x in sides), *(x.scale for x in sides)]
    assert all(x is y for x, y in zip(given, (*data[:count], *data[2 * count : -1]), strict=True))
    assert options["out"] is data[-1] and options["backend"] == "emulator"


def check_case(problem, case, backend):
    *operands, c = problem.inputs.make_inputs(case)
    c.copy_(poisoned(case.m, case.n, dtype=torch.float16).unsqueeze(2))
    with observe(check=True) as observer:
        out = problem.adapter.custom_kernel((*operands, c), backend=backend)
    assert out is c and len(observer.stats) == (backend != "reference")
    expected = problem.reference.reference((*operands, c))
    good, message = problem.reference.check(out, expected)
    assert good, message
    # Sums of multiples of 1/4 are exact in fp32 in any order, so all bits are.
    assert problem is DUAL or torch.equal(out, expected)


@PROBLEMS
@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_smallest_official_shape(problem, backend):
    check_case(problem, problem.smallest, backend)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("problem", "case"), variants(lambda p: [c for c in dict.fromkeys(p.spec.TESTS) if c is not p.smallest])
)
def test_official_shape(problem, case):
    check_case(problem, case, "emulator")


@pytest.mark.gpu("sm_100a")
@pytest.mark.parametrize(("problem", "case"), variants(lambda p: p.spec.TESTS + p.spec.BENCHMARKS))
def test_gpu(problem, case):
    data = problem.inputs.make_inputs(case, "cuda")
    got = problem.adapter.custom_kernel(data)
    good, message = problem.reference.check(got, problem.reference.reference(data))
    assert good, message
