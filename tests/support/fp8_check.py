"""Shared checks of FP8 products with fp32 scales on all architectures: operands, calls and expected bits."""

import flat_parts as parts
import pytest
import torch
from oracle import assert_bitwise_equal, bits

import nvfp4_cute as nv
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.planning.arch import sm120
from nvfp4_cute.planning.config import KernelConfig

FORMATS = {"a_format": nv.FP8_1x128, "b_format": nv.FP8_128x128}
ENDS = (0, 40, 40, 45, 111)


def on_sm90(tokens, weights=128, **settings):
    return KernelConfig((weights, tokens, 128), num_acc_stage=1, swap_ab=True, **settings)


def rows_on_sm90(weights=128, tokens=128, **settings):
    """Tokens on MMA-M."""
    return KernelConfig((tokens, weights, 128), num_acc_stage=1, **settings)


def on_sm100(n, swap_ab=False, num_acc_stage=2, **settings):
    return KernelConfig((128, n, 128), num_acc_stage=num_acc_stage, swap_ab=swap_ab, **settings)


def on_sm120(tokens, teams=1, rows=sm120.TILE_M, **settings):
    return KernelConfig((rows, tokens, 128), num_acc_stage=teams, **{"swap_ab": True} | settings)


def variants(table, *, on_gpu=False):
    """Parameters (arch, config, mode). The first one of each family is fast, and the others are slow."""
    marks = lambda arch, i: pytest.mark.gpu(arch) if on_gpu else pytest.mark.slow if i else ()
    return [
        pytest.param(arch, chosen, mode, marks=marks(arch, i), id=f"{arch}-{chosen}-{mode}")
        for arch, found in table.items()
        for i, (chosen, mode) in enumerate(found)
    ]


def some(format, *shape, seed=0):
    """Small integers times powers of two, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    data = torch.randint(-3, 4, shape, generator=generator).to(torch.float8_e4m3fn)
    powers = torch.randint(-2, 3, (*shape[:-2], *format.scale_shape(*shape[-2:])), generator=generator)
    return nv.BlockScaledTensor(data, torch.exp2(powers.float()), None, shape, "rowmajor", format=format)


def tokens_of(*shape, seed=0):
    return some(nv.FP8_1x128, *shape, seed=seed)


def weights_of(*shape, seed=0):
    return some(nv.FP8_128x128, *shape, seed=seed)


def check_ragged(n, k, chosen, backend, mode="eager", device="cpu"):
    """Checks ragged groups: empty ones, groups that end inside a tile, and rows that belong to no group."""
    alpha = torch.tensor([0.5, -2.0, 1.0, 4.0, 0.25])
    check_ends(tokens_of(120, k), weights_of(len(ENDS), n, k), alpha, chosen, backend, mode, device)


def check_ends(x, w, alpha, chosen, backend, mode, device):
    """Compares a ragged product whose groups end at ENDS with the reference, bit for bit."""
    offs = torch.tensor(ENDS, dtype=torch.int32)
    want = nv.grouped_gemm(x, w, offs=offs, alpha=alpha, out_dtype=torch.float32)
    x, w, offs, alpha = (t.to(device) for t in (x, w, offs, alpha))
    with observe(mode=mode, check=True):
        got = parts.grouped_gemm(
            x, w, offs=offs, alpha=alpha, config=chosen, backend=backend, out_dtype=torch.float32
        )
    assert_bitwise_equal(got.cpu()[: ENDS[-1]], want[: ENDS[-1]])


def check_list_masked_and_batched(chosen, backend):
    """Checks these forms with different sizes, an empty group and a short last block; rows of no group stay unchanged."""
    options = {"out_dtype": torch.float32}
    a = [tokens_of(m, k) for m, k in ((40, 256), (0, 128), (66, 128))]
    b = [weights_of(n, x.shape[1], seed=n) for n, x in zip((200, 64, 300), a, strict=True)]
    with observe(check=True):
        got = parts.grouped_gemm(a, b, config=chosen, backend=backend, **options)
    for result, want in zip(got, parts.grouped_gemm(a, b, **options), strict=True):
        assert_bitwise_equal(result, want)
    x, w, sizes = tokens_of(3, 50, 256), weights_of(3, 200, 256), torch.tensor([3, 0, 50], dtype=torch.int32)
    outs = [torch.full((3, 50, 200), torch.nan) for _ in range(2)]
    for out, settings in zip(outs, ({"config": chosen, "backend": backend}, {}), strict=True):
        parts.grouped_gemm(x, w, masked_m=sizes, out=out, **settings, **options)
    assert torch.equal(bits(outs[0]), bits(outs[1]))
    got = parts.gemm(x, w, config=chosen, backend=backend, **options)
    assert_bitwise_equal(got, parts.gemm(x, w, **options))


def check_rounding_and_pitch(out_dtype, backend, chosen=None):
    """Checks that results are rounded once, and that rows may have a pitch."""
    x, w = tokens_of(33, 256), weights_of(130, 256)
    buffers = [torch.full((33, 144), 7.0, dtype=out_dtype) for _ in range(2)]
    for buffer, one, config in zip(buffers, (backend, "reference"), (chosen, None), strict=True):
        parts.gemm(x, w, alpha=0.75, out=buffer[:, :130], out_dtype=out_dtype, backend=one, config=config)
    assert torch.equal(bits(buffers[0]), bits(buffers[1]))


def check_any_scales(chosen, backend):
    """Checks scales that are not powers of two: each block's sum is multiplied once by the fp32 product of its two scales."""
    x, w = tokens_of(20, 384), weights_of(128, 384)
    generator = torch.Generator().manual_seed(1)
    scales = [torch.rand(t.scale.shape, generator=generator) + 0.5 for t in (x, w)]
    values = [t.data.double().unflatten(-1, (3, 128)) for t in (x, w)]
    expected = torch.zeros(20, 128)
    for block in range(3):
        product = values[0][:, block] @ values[1][:, block].T
        factor = (scales[0][:, block, None] * scales[1][:, block]).double()
        expected = (product * factor + expected.double()).float()
    got = parts.gemm(
        x.data, w.data, *scales, out_dtype=torch.float32, backend=backend, config=chosen, **FORMATS
    )
    assert_bitwise_equal(got, expected)
    want = parts.gemm(x.data, w.data, *scales, out_dtype=torch.float32, **FORMATS)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-3)


def check_not_a_number(backend):
    """Checks that a NaN stays in its row or column."""
    x, w = tokens_of(24, 256), weights_of(300, 256)
    x.scale[3, 1], w.scale[1, 0] = torch.nan, torch.nan
    x.data.view(torch.uint8)[5, 200] = 0x7F
    with observe(check=True):
        got = nv.gemm(x, w, out_dtype=torch.float32, backend=backend)
    want = nv.gemm(x, w, out_dtype=torch.float32)
    assert want[3].isnan().all() and want[5].isnan().all() and want[:, 128:256].isnan().all()
    assert torch.equal(got.isnan(), want.isnan())
    assert_bitwise_equal(got.nan_to_num(0.0), want.nan_to_num(0.0))


def relu2_of(one, other, dtype):
    """The result of a dual GEMM for exact products: each operation rounds once, as in the kernels."""
    positive = one.clamp(min=0)
    return (positive * positive * other).to(dtype)


def check_dual_ragged(n, k, chosen, backend, mode="eager", device="cpu", out_dtype=torch.bfloat16):
    """Checks two products in one launch: every bit follows from the exact values, and rows of no group stay unchanged."""
    x, gate, up = tokens_of(120, k), weights_of(len(ENDS), n, k), weights_of(len(ENDS), n, k, seed=3)
    alpha, offs = torch.tensor([0.5, -2.0, 1.0, 4.0, 0.25]), torch.tensor(ENDS, dtype=torch.int32)
    exact = {"offs": offs, "out_dtype": torch.float32}
    want = relu2_of(
        parts.grouped_gemm(x, gate, alpha=alpha, **exact), parts.grouped_gemm(x, up, **exact), out_dtype
    )
    assert want[: ENDS[-1]].abs().max() > 1
    x, gate, up, offs, alpha = (t.to(device) for t in (x, gate, up, offs, alpha))
    out = torch.full((120, n), 7.0, dtype=out_dtype, device=device)
    with observe(mode=mode, check=True):
        parts.grouped_dual_gemm(
            x, gate, up, alpha1=alpha, offs=offs, activation="relu2", out=out, out_dtype=out_dtype, config=chosen,
            backend=backend,
        )  # fmt: skip
    assert_bitwise_equal(out.cpu()[: ENDS[-1]], want[: ENDS[-1]])
    assert (out[ENDS[-1] :] == 7.0).all()


def check_dual_list_and_masked(chosen, backend):
    """Does the checks of ``check_list_masked_and_batched`` for dual products: one operand times two weights."""
    options = {"out_dtype": torch.float32}
    settings = {"activation": "relu2", "config": chosen, "backend": backend}
    a = [tokens_of(m, k) for m, k in ((40, 256), (0, 128), (66, 128))]
    gates, ups = (
        [weights_of(n, x.shape[1], seed=n + s) for n, x in zip((200, 64, 300), a, strict=True)]
        for s in (0, 1)
    )
    with observe(check=True):
        got = parts.grouped_dual_gemm(a, gates, ups, **settings, **options)
    products = (parts.grouped_gemm(a, side, **options) for side in (gates, ups))
    for result, one, other in zip(got, *products, strict=True):
        assert_bitwise_equal(result, relu2_of(one, other, torch.float32))
    x, both, sizes = (
        tokens_of(3, 50, 256),
        weights_of(3, 512, 256),
        torch.tensor([3, 0, 50], dtype=torch.int32),
    )
    out, want = torch.full((3, 50, 256), torch.nan), torch.full((3, 50, 512), torch.nan)
    layout = {"weight_layout": "concatenated"}
    parts.grouped_dual_gemm(x, both, masked_m=sizes, out=out, **layout, **settings, **options)
    parts.grouped_gemm(x, both, masked_m=sizes, out=want, **options)
    want = torch.where(want[..., :256].isnan(), torch.nan, relu2_of(*want.chunk(2, -1), torch.float32))
    assert torch.equal(bits(out), bits(want))


def check_activations(chosen, backend):
    """Checks inexact activations: they agree with the reference as closely as the GPU's exponential allows."""
    x, gate, up = tokens_of(20, 128), weights_of(72, 128), weights_of(72, 128, seed=3)
    for activation, limit in (("silu", None), ("situ(beta=4.0,linear_beta=25.0)", 5.0), ("swiglu_oai", 7.0)):
        options = {
            "alpha1": 2.0**-7,
            "alpha2": 2.0**-5,
            "activation": activation,
            "limit": limit,
            "out_dtype": torch.float32,
        }
        got = parts.dual_gemm(x, gate, up, config=chosen, backend=backend, **options)
        torch.testing.assert_close(got, parts.dual_gemm(x, gate, up, **options), rtol=4e-6, atol=1e-6)
