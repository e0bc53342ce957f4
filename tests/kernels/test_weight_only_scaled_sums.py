"""16-bit tokens of groups times FP8 and INT8 weights, whose fp32 scales multiply sums.

On the emulator, every bit is the reference's.
"""

import flat_parts as parts
import pytest
import torch
from int8_check import some
from oracle import assert_bitwise_equal, poisoned, unwritten
from sm90_check import assert_mmas_overlap
from stage_release import unfinished_reads
from weight_only_check import ROWS, config, dual, key_of, largest_candidates, on_gpu, run_both, task

import nvfp4_cute as nv
from nvfp4_cute import backends
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.errors import ConfigError, UnsupportedProblem
from nvfp4_cute.formats.block_format import BFLOAT16
from nvfp4_cute.planning.arch import sm90_weight_only as planning

SLOW = pytest.mark.slow
EMULATED = "emulator:sm_90a"
FORMATS = (nv.FP8_128x128, nv.INT8)
DTYPES = (torch.bfloat16, torch.float16)


def assert_same_bits(**arguments):
    for got, want in zip(*run_both(**arguments), strict=True):
        assert_bitwise_equal(got, want)


def k_of(format, blocks):
    """K with this number of K tiles; for INT8, the last one is partial."""
    return 128 * blocks - (0 if format.block_k else 48)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("form", "chosen", "mode"),
    [
        ("ragged", config(16, num_cta=2), "random:1"),
        ("ragged", config(32, multicast_n=2, num_cta=4), "lazy"),
        ("ragged", config(128, num_cta=1), "random:3"),
        ("masked", config(64), "eager"),
        ("list", config(24, split_k=2, num_cta=4), "lazy"),
        ("list", None, "random:2"),
        ("batched", config(8, split_k=4, num_cta=8), "random:2"),
    ],
    ids=str,
)
def test_forms(format, dtype, form, chosen, mode):
    """Partial tiles in every direction, several per CTA, an odd number of K tiles, empty groups, and rows of no group."""
    rows = (20, 20, 20) if form == "batched" else ROWS
    arguments = dict(form=form, rows=rows, n=200, k=k_of(format, 3), chosen=chosen, has_alpha=True, mode=mode)
    assert_same_bits(format=format, dtype=dtype, **arguments)


@SLOW
@pytest.mark.parametrize(
    "chosen", [config(16, 256, num_cta=2), config(256, num_cta=1), config(48, 256, multicast_n=2)], ids=str
)
def test_tiles_of_integers_alone(chosen):
    """Without promoted sums: two K tiles per stage, and the most tokens."""
    assert_same_bits(form="ragged", rows=ROWS, n=200, k=336, chosen=chosen, format=nv.INT8, mode="lazy")


@SLOW
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_integer_and_any_scale(dtype):
    """-128 to 127, one per column. The sum is rounded, then multiplied by its scale, then by alpha."""
    w = torch.zeros(256, 256, dtype=torch.int8)
    w.fill_diagonal_(1)
    w = (w * torch.arange(-128, 128)[:, None]).to(torch.int8)
    scale = torch.rand(256, 1, generator=torch.Generator().manual_seed(2)) * 1e3
    w = nv.BlockScaledTensor(w, scale, None, (256, 256), "rowmajor", format=nv.INT8)
    x, options = torch.eye(256, dtype=dtype), {"alpha": torch.tensor([0.3]), "out_dtype": torch.float32}
    with observe(check=True):
        (got,) = parts.grouped_gemm([x], [w], backend=EMULATED, **options)
    want = w.data.float().T * scale.T * torch.tensor(0.3)
    assert_bitwise_equal(got + 0.0, want + 0.0)
    assert_bitwise_equal(parts.grouped_gemm([x], [w], **options)[0] + 0.0, want + 0.0)


@SLOW
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_float_and_any_scale(dtype):
    """All e4m3 codes, one per column, times scales that no 16-bit type holds, with one rounding."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    diagonal = torch.zeros(256, 256).fill_diagonal_(1) * codes.nan_to_num(0.0)
    scale = torch.tensor([[1e-30, 3e30], [0.7, -1.1]])
    w = nv.BlockScaledTensor(
        diagonal.to(torch.float8_e4m3fn), scale, None, (256, 256), "rowmajor", format=nv.FP8_128x128
    )
    x = torch.eye(256, dtype=dtype) * 2.0**-3
    (got,) = nv.grouped_gemm([x], [w], out_dtype=torch.float32, backend=EMULATED)
    (want,) = nv.grouped_gemm([x], [w], out_dtype=torch.float32)
    assert_bitwise_equal(got + 0.0, want + 0.0)


@SLOW
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_what_is_not_finite_stays_in_its_row_or_column(format):
    """A NaN scale, an infinite token, and a negative scale of zeros, for which -0 is not required."""
    arguments = dict(form="ragged", rows=(5, 9), n=136, k=256, chosen=config(16), format=format)
    made, expected = task(**arguments), task(**arguments)
    for one in (made, expected):
        one.operands.b[0].scale[1].view(torch.float32)[0] = torch.nan
        one.operands.a[0].data[0, 7, 3] = torch.inf
        one.operands.b[0].data[0, 3] = 0
    with observe(check=True):
        backends.run_task(EMULATED, made)
    expected.reference()
    (got,), (want,) = made.operands.out, expected.operands.out
    assert want[0, 5:14, 0].isnan().all() and not want[0, :5].isnan().any()
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    finite = want.isfinite() & ~unwritten(want)
    assert_bitwise_equal(got[finite] + 0.0, want[finite] + 0.0)


@SLOW
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("layout", ["separate", "concatenated"])
def test_dual(format, layout):
    """Two products, then torch's operations. Rows of no group stay unchanged."""
    x, ends = (
        torch.randint(-4, 5, (50, 256), generator=torch.Generator().manual_seed(1)).bfloat16(),
        torch.tensor([0, 20, 47]).int(),
    )
    numbers = torch.randint(-3, 4, (2, 3, 128, 256), generator=torch.Generator().manual_seed(2)).float()
    first, second = (nv.quantize(each * torch.tensor(2.0**-4), format=format) for each in numbers)
    data, scale = (torch.cat([getattr(first, part), getattr(second, part)], 1) for part in ("data", "scale"))
    outs = [torch.full((50, 128), 7.0) for _ in range(2)]
    options = {"offs": ends, "activation": "relu2", "out_dtype": torch.float32, "b_format": format}
    for out, backend in zip(outs, (EMULATED, "reference"), strict=True):
        if layout == "concatenated":
            parts.grouped_dual_gemm(
                x, data, None, None, scale, weight_layout=layout, out=out, backend=backend, **options
            )
        else:
            sides = first.data, second.data, None, first.scale, second.scale
            parts.grouped_dual_gemm(x, *sides, out=out, backend=backend, **options)
    assert (outs[0][47:] == 7).all()
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


@SLOW
def test_operation_chooses_a_config_that_there_is():
    """Whole ragged tensors with the operation's own choice of config, and many rows per group."""
    x, w = (
        torch.randint(-6, 7, (300, 160), generator=torch.Generator().manual_seed(1)).bfloat16(),
        some(2, 72, 160),
    )
    offs = torch.tensor([280, 300]).int()
    got = nv.grouped_gemm(x, w, offs=offs, backend=EMULATED, out_dtype=torch.bfloat16)
    assert_bitwise_equal(got, nv.grouped_gemm(x, w, offs=offs))


def test_what_is_refused():
    x, w, offs = torch.zeros(40, 256).bfloat16(), some(2, 72, 256), torch.tensor([20, 40]).int()
    out = poisoned(40, 72, dtype=torch.float32)
    with pytest.raises(UnsupportedProblem, match="with 16-bit a: call quantize on the result"):
        nv.grouped_gemm(x, w, offs=offs, out_dtype="nvfp4")
    with pytest.raises(UnsupportedProblem, match="dual GEMMs of weights that are not interleaved"):
        parts.grouped_dual_gemm(
            x,
            w.data,
            None,
            None,
            w.scale,
            offs=offs,
            weight_layout="interleaved_64_up_first",
            b_format=nv.INT8,
        )
    for backend in (EMULATED, "reference"):
        with pytest.raises(ValueError, match=r"b_scale has shape \[71, 1, 2\]; expected \[72, 1, 2\]"):
            parts.grouped_gemm(
                x, w.data, None, w.scale[:, :71], offs, b_format=nv.INT8, out=out, backend=backend
            )
        with pytest.raises(TypeError, match="b_scale has dtype torch.float16; expected float32"):
            parts.grouped_gemm(
                x, w.data, None, w.scale.half(), offs, b_format=nv.INT8, out=out, backend=backend
            )
    assert unwritten(out).all()
    wide = nv.quantize(torch.ones(2, 128, 256), format=nv.FP8_128x128)
    for chosen in (config(160), config(64, 256)):
        with pytest.raises(ConfigError, match="use N tile (128|64), K tile 128"):
            parts.grouped_gemm(x, wide, offs=offs, config=chosen, backend=EMULATED)
    assert planning.unsupported_reason(dual(64), 2, (BFLOAT16, nv.INT8)).startswith(
        "weights are INT8, whose kernel computes one product"
    )


LARGEST = [(format, chosen) for format in FORMATS for chosen in largest_candidates(1, format)]


@SLOW
@pytest.mark.parametrize(("format", "chosen"), LARGEST, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_spills(format, chosen, dtype):
    """No spills, and MMAs that the assembler does not serialize.

    They end with every K tile if sums are promoted. Reads are complete when their stage is released.
    """
    key = key_of(chosen, dtype, dtype, format=format)
    kernel = get_kernel(key)
    assert kernel.resources.stack_bytes == 0
    assert_mmas_overlap(kernel.cubin, ends=1 + planning.promotes(format))
    stages = (planning.smem_plan(key.config, 1, (BFLOAT16, format)).num_ab_stage,)
    assert not unfinished_reads(kernel.cubin, stages)


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("form", ["ragged", "masked", "list", "batched"])
def test_gpu_forms(form, format):
    rows = (20, 20, 20) if form == "batched" else ROWS
    for chosen in (config(16), config(128), config(24, split_k=2), None):
        made = task(form, rows, 200, k_of(format, 3), chosen, format=format, has_alpha=True)
        moved = on_gpu(made)
        backends.run_task("cuda", moved)
        made.reference()
        for got, want in zip(moved.operands.out, made.operands.out, strict=True):
            written = ~unwritten(want)
            assert_bitwise_equal(got.cpu()[written], want[written])
