"""Shared checks of INT8 products on all architectures. Sums are exact, so every bit must equal the reference's."""

import torch
from fp8_check import ENDS, check_ends
from oracle import assert_bitwise_equal

import nvfp4_cute as nv
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats.block_format import MAX_INTEGER_K
from nvfp4_cute.ops import parts

FORMATS = {"a_format": nv.INT8, "b_format": nv.INT8}
PAIR = (nv.INT8, nv.INT8)


def some(*shape, seed=0):
    """All integers including -128, with scales that are not powers of two."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    data = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    scale = torch.rand((*shape[:-1], 1), generator=generator) + 0.5
    return nv.BlockScaledTensor(data, scale, None, shape, "rowmajor", format=nv.INT8)


def check_ragged(n, k, chosen, backend, mode="eager", device="cpu"):
    """Checks ragged groups: empty ones, groups that end inside a tile, and rows that belong to no group."""
    alpha = torch.tensor([0.3, -2.0, 1.0, 4.0, 0.25])
    check_ends(some(120, k), some(len(ENDS), n, k), alpha, chosen, backend, mode, device)


def check_list_masked_and_batched(chosen, backend):
    """Checks these forms with different sizes, an empty group, and K and N that end inside a tile.

    Rows of no group stay unchanged. Also checks int32 sums.
    """
    a = [some(m, k) for m, k in ((40, 272), (0, 128), (66, 128))]
    b = [some(n, x.shape[1], seed=n) for n, x in zip((200, 64, 300), a, strict=True)]
    x, w, sizes = some(3, 50, 256), some(3, 200, 256), torch.tensor([3, 0, 50], dtype=torch.int32)
    with observe(check=True):
        got = parts.grouped_gemm(a, b, config=chosen, backend=backend, out_dtype=torch.int32)
        scaled = parts.gemm(x, w, config=chosen, backend=backend, out_dtype=torch.bfloat16)
    for result, left, right in zip(got, a, b, strict=True):
        assert torch.equal(result, (left.data.long() @ right.data.long().T).int())
    assert_bitwise_equal(scaled, nv.gemm(x, w, out_dtype=torch.bfloat16))
    outs = [torch.full((3, 50, 200), torch.nan) for _ in range(2)]
    for out, settings in zip(outs, ({"config": chosen, "backend": backend}, {}), strict=True):
        parts.grouped_gemm(x, w, masked_m=sizes, out=out, out_dtype=torch.float32, **settings)
    assert torch.equal(outs[0].view(torch.int32), outs[1].view(torch.int32))


def check_extremes(backend):
    """Checks the largest sum that int32 holds, NaN and infinite scales, zeros times a negative scale, and rows with a pitch."""
    k = MAX_INTEGER_K // 16 * 16
    low = torch.full((1, k), -128, dtype=torch.int8)
    sums = parts.gemm(low, low, out_dtype=torch.int32, backend=backend, **FORMATS)
    assert sums.item() == 2**14 * k < 2**31
    x, w = some(33, 256), some(130, 256)
    x.scale[3], x.scale[4], w.scale[5] = torch.nan, torch.inf, -1.0
    x.data[7] = 0
    buffers = [torch.full((33, 144), 7.0, dtype=torch.float16) for _ in range(2)]
    for buffer, one in zip(buffers, (backend, "reference"), strict=True):
        nv.gemm(x, w, alpha=0.75, out=buffer[:, :130], out_dtype=torch.float16, backend=one)
    nan = buffers[1].isnan()
    assert nan[3, :130].all() and torch.equal(buffers[0].isnan(), nan)
    assert torch.equal(*(buffer.masked_fill(nan, 0.0).view(torch.int16) for buffer in buffers))
