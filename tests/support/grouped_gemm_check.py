"""Runs a case of `cases` on a backend and compares every output with the float64 reference."""

import hashlib

import cases
import torch
from flat_parts import grouped_gemm
from oracle import assert_bitwise_equal, poisoned, repro_line

from nvfp4_cute.reference import grouped_gemm_reference

# Many tiles, ragged in every extent, and a long K. Sums are not exact.
SHAPES = cases.Case("shapes", ((130, 264, 1280), (72, 128, 3328), (1, 40, 256)), seed=11, kind="wide")


def run(case, operands, backend, config=None, m_major=False):
    """Outputs of one backend, written into poisoned buffers."""
    out = [
        poisoned(n, m, dtype=case.out_dtype).T if m_major else poisoned(m, n, dtype=case.out_dtype)
        for m, n, _ in case.sizes
    ]
    returned = grouped_gemm(
        operands.a,
        operands.b,
        operands.a_scale,
        operands.b_scale,
        alpha=operands.alpha,
        out=out,
        out_dtype=case.out_dtype,
        backend=backend,
        config=config,
    )
    assert all(x is y for x, y in zip(returned, out, strict=True))
    return out


def check(case, config=None, backend="emulator"):
    """Fails if an output differs by a bit or, for inexact sums, by more than the case's bound."""
    operands = cases.make_operands(case)
    digest = fingerprint(operands)
    actual = run(case, operands, backend, config)
    assert fingerprint(operands) == digest, "an operand was modified"
    if case.kind == "exact":
        for got, want in zip(actual, run(case, operands, "reference"), strict=True):
            assert_bitwise_equal(got, want, case=case.name, seed=case.seed)
        return
    expected = grouped_gemm_reference(*operands, out_dtype=torch.float64)
    for got, want, bound in zip(actual, expected, cases.error_bound(case, operands, expected), strict=True):
        error = (got.double() - want).abs()
        assert bool((error <= bound).all()), f"error {error.max():.3g}\n{repro_line(case=case.name)}"


def fingerprint(operands):
    tensors = [*operands.a, *operands.b, *operands.a_scale, *operands.b_scale]
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()
