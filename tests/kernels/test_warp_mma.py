"""``kernels/warp_mma`` on the emulator: where sums are exact, bit-equal to the reference on every architecture."""

from dataclasses import replace

import pytest
import torch
from oracle import assert_bitwise_equal
from weight_only_check import task

from nvfp4_cute import backends
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.formats.block_format import BFLOAT16, INT4_FORMATS, INT8, MXFP4, MXFP8, NVFP4, FP8_128x128
from nvfp4_cute.formats.codecs import decode_ue4m3
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.planning.arch import warp_mma
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import Gate, GroupedProblem
from nvfp4_cute.reference import expand_operand

ROWS = (0, 20, 5, 1, 33, 0)
# With this number of CTAs, some share tiles and some have several.
NUM_CTA = 7


def config(tokens=8, rows=4, k=1, num_cta=NUM_CTA):
    return replace(warp_mma.make_config(tokens, rows, k), num_cta=num_cta)


def compute(arch="sm_90a", mode="eager", **arguments):
    """Results of the kernel and of the reference, one entry per tensor."""
    made, expected = (task(**arguments) for _ in range(2))
    with observe(mode=mode, check=True):
        backends.run_task(f"emulator:{arch}", made)
    expected.reference()
    return made.operands.out, expected.operands.out


def check(**arguments):
    for got, want in zip(*compute(**arguments), strict=True):
        assert_bitwise_equal(got, want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", warp_mma.ARCHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_architecture(arch, dtype):
    """Empty groups, tiles that several CTAs share, and partial tiles in every direction."""
    check(
        arch=arch, form="ragged", rows=ROWS, n=300, k=352, chosen=config(16, 4, 2), dtype=dtype,
        out_dtype=torch.bfloat16, has_alpha=True,
    )  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["lazy", "random:1"])
@pytest.mark.parametrize("form", ["list", "masked", "batched"])
def test_other_forms(form, mode):
    """One group of a list is empty, and the number of columns is odd."""
    rows = (5,) * 3 if form == "batched" else (3, 0, 9)
    check(form=form, rows=rows, n=151, k=352, chosen=config(8, 2, 4), dtype=torch.float16, mode=mode)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tokens", warp_mma.TOKEN_CHOICES)
def test_every_tile_has_the_same_bits_for_every_number_of_ctas(tokens):
    for num_cta, warps in ((1, (8, 1)), (5, (4, 2)), (40, (8, 1))):
        check(form="ragged", rows=(13, 40), n=200, k=384, chosen=config(tokens, *warps, num_cta))


def test_more_pieces_of_tokens_than_threads():
    """24 tokens of 128 bytes are one and a half 16-byte pieces per thread."""
    check(form="ragged", rows=(8, 3, 24), n=40, k=640, chosen=config(24, 8), dtype=torch.float16, format=INT8)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "format", [MXFP4, *MXFP8, FP8_128x128, INT8, *INT4_FORMATS.values()], ids=lambda format: format.name
)
def test_formats(format, arch):
    dtype = torch.float16 if "float16" in format.scale.dtypes[0] else torch.bfloat16
    check(
        arch=arch,
        form="ragged",
        rows=(5, 2),
        n=130,
        k=512,
        chosen=config(8, 4, 2),
        dtype=dtype,
        format=format,
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["separate", "interleaved_64_up_first", "interleaved_32_gate_first"])
@pytest.mark.parametrize(
    "activation", ["silu", "gelu", "situ(beta=4.0,linear_beta=25.0)", "relu2", "swiglu_oai"]
)
def test_dual(layout, activation):
    """As exact as the activation is."""
    gate = Gate(activation, None if activation == "relu2" else 7.0, layout)
    both = compute(
        form="ragged", rows=(0, 4, 9), n=192, k=352, chosen=config(8, 4, 2), gate=gate, has_alpha=True
    )
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_weight_is_exact(dtype, arch):
    """All e2m1 codes times all finite scales times 1. The sign of a scale is ignored."""
    made = task("list", (16,), 256, 32, config(16), dtype)
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8)
    (weights,), (a,) = made.operands.b, (made.operands.a[0].data,)
    b = weights.data
    b[:] = 0
    b[0, :, :8] = (torch.arange(8) * 2 | (torch.arange(8) * 2 + 1) << 4).byte()
    a[:] = 0
    a[0, torch.arange(16), torch.arange(16)] = 1
    scale = torch.zeros(256, 4, dtype=torch.uint8)
    scale[:, 0] = codes
    weights.scale[0] = to_blocked(scale).flatten()
    with observe(check=True):
        backends.run_task(f"emulator:{arch}", made)
    want = expand_operand(b[0], weights.scale[0], "blocked")[:, :16].T
    assert torch.equal(made.operands.out[0][0].double(), want)
    assert decode_ue4m3(codes).unique().numel() == 127


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nan_scale_and_infinite_token(arch):
    """A NaN scale makes its column NaN, and a non-finite token affects only its row."""
    arguments = dict(form="ragged", rows=(5, 9), n=136, k=128, chosen=config(16))
    made, expected = (task(**arguments) for _ in range(2))
    for one in (made, expected):
        one.operands.b[0].scale[1, 0] = 0x7F  # group 1, row 0, block 0
        one.operands.a[0].data[0, 7, 3] = float("inf")
    with observe(check=True):
        backends.run_task(f"emulator:{arch}", made)
    expected.reference()
    (got,), (want,) = made.operands.out, expected.operands.out
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


@pytest.mark.slow
@pytest.mark.parametrize("chosen", warp_mma.candidates(), ids=KernelConfig.to_name)
@pytest.mark.parametrize("gate", [None, Gate("silu", None, "separate")], ids=["one", "dual"])
def test_spills_are_few(chosen, gate):
    """At most a few addresses, which are read once per iteration."""
    made = task("ragged", (3, 5), 256, 256, chosen, out_dtype=torch.bfloat16, gate=gate, has_alpha=True)
    resources = get_kernel(made.key(lookup("sm_90a").gpu), for_emulator=True).resources
    assert resources.stack_bytes <= 32


def test_choice_and_refusals():
    for rows, form, tokens in ((1, "ragged", 8), (9, "list", 16), (200, "list", 32)):
        problem = GroupedProblem(((rows, 4096, 4096),) * 8, form, a_format=BFLOAT16)
        assert warp_mma.choose(problem, 132).cta_tile_shape_mnk[1] == tokens
    reason = warp_mma.unsupported_reason
    assert all(reason(candidate) is None for candidate in warp_mma.candidates())
    good = warp_mma.make_config(8, 4, 1)
    assert "use 2" in reason(replace(good, num_ab_stage=3))
    assert "use N tile 16" in reason(replace(good, cta_tile_shape_mnk=(128, 12, 128)))
    assert "use_warp_mma=True" in reason(replace(good, use_warp_mma=False))
    assert "M tile 128" in reason(replace(good, cta_tile_shape_mnk=(96, 8, 128)))
    assert "N tile 16" in reason(replace(good, cta_tile_shape_mnk=(64, 32, 128)))
    assert "split_k=1" in reason(replace(good, split_k=2))
    assert (BFLOAT16, NVFP4) in warp_mma.MMA
