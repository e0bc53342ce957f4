"""Whole block-scaled tensors give the bits of their parts, with the product of their global scales as alpha."""

import flat_parts as on_parts
import pytest
import torch

import nvfp4_cute as nv

G, N, K = 2, 96, 128


def tensors(*shape, global_scale=0.37, **options):
    generator = torch.Generator().manual_seed(sum(shape))
    return nv.quantize(torch.randn(*shape, generator=generator), global_scale=global_scale, **options)


def test_gemm():
    x, w = tensors(40, K), tensors(N, K, global_scale=0.5)
    expected = on_parts.gemm(x.data, w.data, x.scale, w.scale, x.global_scale * w.global_scale)
    assert torch.equal(nv.gemm(x, w), expected)
    assert torch.equal(on_parts.gemm(x, w.data, b_scale=w.scale, alpha=w.global_scale), expected)
    assert torch.equal(nv.gemm(x, w, alpha=2.0), 2 * expected)
    plain, bare = tensors(40, K, global_scale=None), tensors(N, K, global_scale=None)
    assert torch.equal(nv.gemm(plain, bare), on_parts.gemm(plain.data, bare.data, plain.scale, bare.scale))


def test_batches_and_row_major_scales():
    x, w = tensors(G, 40, K), tensors(G, N, K)
    parts = [t.data.permute(1, 2, 0) for t in (x, w)]
    expected = on_parts.gemm(*parts, x.scale, w.scale, x.global_scale * w.global_scale)
    assert torch.equal(nv.gemm(x, w), expected)
    rowmajor = [t.with_scale_layout("rowmajor") for t in (x, w)]
    assert torch.equal(on_parts.gemm(*rowmajor), expected)
    assert torch.equal(nv.gemm(rowmajor[0], w), expected)
    assert torch.equal(on_parts.gemm(*rowmajor, scale_layout="rowmajor"), expected)


def test_weight_only():
    x, w = torch.randn(4, K).bfloat16(), tensors(N, K)
    expected = on_parts.gemm(x, w.data, None, w.scale, w.global_scale)
    assert torch.equal(nv.gemm(x, w), expected)


def test_gemv():
    w, v = tensors(N, K), tensors(K, global_scale=0.5)
    expected = on_parts.gemv(w.data, v.data, w.scale, v.scale, w.global_scale * v.global_scale)
    assert torch.equal(nv.gemv(w, v), expected)
    batch, rows = tensors(G, N, K), tensors(G, 1, K)
    factor = batch.global_scale * rows.global_scale
    data = batch.data.permute(1, 2, 0), rows.data[:, 0].t()
    assert torch.equal(nv.gemv(batch, rows), on_parts.gemv(*data, batch.scale, rows.scale, factor))
    assert torch.equal(
        nv.gemv(w, torch.ones(K).half()),
        on_parts.gemv(w.data, torch.ones(K).half(), w.scale, None, w.global_scale),
    )


def test_dual_gemm():
    x, gate, up = tensors(40, K), tensors(N, K, global_scale=0.5), tensors(N, K, global_scale=0.25)
    alphas = [x.global_scale * w.global_scale for w in (gate, up)]
    expected = on_parts.dual_gemm(x.data, gate.data, up.data, x.scale, gate.scale, up.scale, *alphas)
    assert torch.equal(on_parts.dual_gemm(x, gate, up), expected)
    whole = tensors(256, K)
    options = {"weight_layout": "interleaved_32_gate_first"}
    factor = x.global_scale * whole.global_scale
    parts = on_parts.dual_gemm(
        x.data, whole.data, None, x.scale, whole.scale, None, factor, factor, **options
    )
    assert torch.equal(on_parts.dual_gemm(x, whole, **options), parts)


def test_lists():
    a = [tensors(40, K), tensors(7, K, global_scale=None)]
    b = [tensors(N, K), tensors(N + 32, K)]
    alpha = torch.stack([a[0].global_scale * b[0].global_scale, b[1].global_scale])
    parts = [[t.data for t in side] for side in (a, b)] + [[t.scale for t in side] for side in (a, b)]
    for ours, right in zip(nv.grouped_gemm(a, b), on_parts.grouped_gemm(*parts, alpha=alpha), strict=True):
        assert torch.equal(ours, right)
    halved = nv.grouped_gemm(a, b, alpha=[0.5, 0.25])
    for ours, right in zip(
        halved, on_parts.grouped_gemm(*parts, alpha=alpha * torch.tensor([0.5, 0.25])), strict=True
    ):
        assert torch.equal(ours, right)
    with pytest.raises(ValueError, match="alpha has 1 entries for 2 groups"):
        nv.grouped_gemm(a, b, alpha=[0.5])


def test_groups_on_the_device():
    x, w = tensors(256, K), tensors(G, N, K, global_scale=0.5)
    offs, factor = torch.tensor([128, 200], dtype=torch.int32), x.global_scale * w.global_scale
    expected = on_parts.grouped_gemm(x.data, w.data, x.scale, w.scale, offs, factor)
    assert torch.equal(nv.grouped_gemm(x, w, offs=offs)[:200], expected[:200])
    tokens, sizes = tensors(G, 40, K), torch.tensor([40, 3], dtype=torch.int32)
    whole = nv.grouped_gemm(tokens, w, masked_m=sizes)
    parts = on_parts.grouped_gemm(
        tokens.data, w.data, tokens.scale, w.scale, masked_m=sizes, alpha=tokens.global_scale * w.global_scale
    )
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1, :3], parts[1, :3])
    dual = on_parts.grouped_dual_gemm(x, w, w, offs=offs)
    same = on_parts.grouped_dual_gemm(
        x.data, w.data, w.data, x.scale, w.scale, w.scale, factor, factor, offs=offs
    )
    assert torch.equal(dual[:200], same[:200])


@pytest.mark.parametrize("backend", ["reference", "emulator", "emulator:sm_90a"])
def test_a_format_of_16_bit_values_is_refused(backend):
    w, plain = tensors(N, K), torch.ones(4, K).bfloat16()
    for call in (
        lambda **how: on_parts.gemm(plain, w, a_format=nv.MXFP4, **how),
        lambda **how: on_parts.gemm(plain, w, a_format="mxfp4", **how),
        lambda **how: on_parts.dual_gemm(plain, w, w, a_format=nv.MXFP4, **how),
        lambda **how: on_parts.grouped_gemm([plain], [w], a_format=nv.MXFP4, **how),
        lambda **how: on_parts.grouped_dual_gemm([plain], [w], [w], a_format=nv.MXFP4, **how),
    ):
        with pytest.raises(ValueError, match="values of 16 bits have no format"):
            call(backend=backend)
