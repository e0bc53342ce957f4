"""Dual GEMMs of formats with float32 scales in every form: by one kernel, or by two products, then torch's operations."""

import flat_parts as parts
import pytest
import torch
from fp8_check import ENDS, tokens_of, weights_of
from int8_check import some as integers

import nvfp4_cute as nv

SLOW = pytest.mark.slow
GPT_OSS = {
    "activation": "swiglu_oai",
    "limit": 7.0,
    "alpha1": torch.full((5,), 2.0**-7),
    "alpha2": torch.full((5,), 2.0**-9),
}
ARCHS = ("sm_90a", pytest.param("sm_100a", marks=SLOW), pytest.param("sm_120a", marks=SLOW))


def close(got, want):
    """Sums are exact. Activations differ, because torch computes the exponential in float32 and the reference in float64."""
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("arch", ARCHS)
def test_ragged_and_one_operand_with_both_weights(arch):
    x, gate, up = tokens_of(120, 128), weights_of(5, 128, 128), weights_of(5, 128, 128, seed=3)
    both = nv.BlockScaledTensor(
        torch.cat([gate.data, up.data], 1),
        torch.cat([gate.scale, up.scale], 1),
        None,
        (5, 256, 128),
        "rowmajor",
        format=nv.FP8_128x128,
    )
    offs = torch.tensor(ENDS, dtype=torch.int32)
    options = {"offs": offs, "out_dtype": torch.float32, **GPT_OSS}
    want = parts.grouped_dual_gemm(x, gate, up, **options)
    outs = [torch.full((120, 128), 7.0) for _ in range(2)]
    parts.grouped_dual_gemm(x, gate, up, out=outs[0], backend=f"emulator:{arch}", **options)
    layout = {"weight_layout": "concatenated"}
    parts.grouped_dual_gemm(x, both, out=outs[1], backend=f"emulator:{arch}", **layout, **options)
    assert want[: ENDS[-1]].abs().max() > 1
    for out in outs:
        close(out[: ENDS[-1]], want[: ENDS[-1]])
        assert (out[ENDS[-1] :] == 7.0).all()


def test_masked():
    x, gate, up = tokens_of(3, 40, 128), weights_of(3, 72, 128), weights_of(3, 72, 128, seed=3)
    sizes = torch.tensor([3, 0, 40], dtype=torch.int32)
    outs = [torch.full((3, 40, 72), 7.0) for _ in range(2)]
    for out, backend in zip(outs, ("emulator:sm_90a", "reference"), strict=True):
        parts.grouped_dual_gemm(
            x, gate, up, masked_m=sizes, out=out, out_dtype=torch.float32, backend=backend
        )
    close(*outs)
    assert (outs[0][0, 3:] == 7.0).all() and (outs[0][1] == 7.0).all()


@SLOW
def test_lists_and_batches():
    a = [tokens_of(m, k) for m, k in ((40, 256), (0, 128), (66, 128))]
    gates = [weights_of(n, x.shape[1], seed=n) for n, x in zip((200, 64, 300), a, strict=True)]
    ups = [weights_of(n, x.shape[1], seed=n + 1) for n, x in zip((200, 64, 300), a, strict=True)]
    got = parts.grouped_dual_gemm(a, gates, ups, backend="emulator:sm_90a", out_dtype=torch.float32)
    for one, other in zip(got, parts.grouped_dual_gemm(a, gates, ups, out_dtype=torch.float32), strict=True):
        close(one, other)
    for shape in ((20,), (3, 20)):
        x, gate, up = (
            make(*shape[:-1], rows, 128)
            for make, rows in ((tokens_of, 20), (weights_of, 72), (weights_of, 72))
        )
        got = parts.dual_gemm(x, gate, up, backend="emulator:sm_90a", out_dtype=torch.float32)
        close(got, parts.dual_gemm(x, gate, up, out_dtype=torch.float32))


@SLOW
def test_integers():
    x, gate, up = integers(20, 96), integers(72, 96), integers(72, 96, seed=1)
    got = parts.dual_gemm(x, gate, up, backend="emulator:sm_90a", out_dtype=torch.float32)
    close(got, parts.dual_gemm(x, gate, up, out_dtype=torch.float32))


@pytest.mark.parametrize("backend", ["emulator:sm_90a", "reference"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"out_dtype": "nvfp4"},
            nv.errors.UnsupportedProblem,
            "products of .* have float32 scales, and are not quantized to it",
        ),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype=torch.int32 is not supported"),
        (
            {"weight_layout": "interleaved_32_gate_first", "b2": None},
            nv.errors.UnsupportedProblem,
            "not interleaved",
        ),
        ({"activation": "tanh"}, ValueError, "activation='tanh' is unknown"),
    ],
    ids=str,
)
def test_refusals(options, error, message, backend):
    x, gate = tokens_of(20, 128), weights_of(128, 128)
    with pytest.raises(error, match=message):
        parts.dual_gemm(x, gate, **({"b2": gate, "backend": backend} | options))
