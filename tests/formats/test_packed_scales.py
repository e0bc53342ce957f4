"""Packed ue8m0 scales of any strides become float32 scales."""

import flat_parts as parts
import pytest
import torch

import nvfp4_cute as nv
from nvfp4_cute.formats.block_scales import from_packed_ue8m0


def packed_by_hand(codes):
    """Packs int32 [rows, words], column by column like DeepGEMM; bytes after the last block are not zero."""
    rows, blocks = codes.shape
    words = -(-blocks // 4)
    padded = torch.full((rows, 4 * words), 7, dtype=torch.int64)
    padded[:, :blocks] = codes
    values = sum(padded[:, j::4] << 8 * j for j in range(4))
    buffer = torch.zeros(words, -(-rows // 4) * 4, dtype=torch.int32)
    buffer[:, :rows] = torch.where(values >= 2**31, values - 2**32, values).int().T
    return buffer.T[:rows]


@pytest.mark.parametrize(("rows", "k"), [(1, 128), (5, 640), (40, 512), (7, 1152)])
def test_every_code_finds_its_block(rows, k):
    codes = torch.randint(0, 256, (rows, k // 128), generator=torch.Generator().manual_seed(rows))
    got = from_packed_ue8m0(packed_by_hand(codes), k)
    want = torch.exp2(codes.double() - 127).masked_fill(codes == 255, torch.nan).float()
    assert got.shape == (rows, k // 128) and got.is_contiguous() and got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_product_of_packed_scales():
    codes = torch.randint(125, 130, (9, 3))
    data, w = (
        torch.randint(-3, 4, (9, 384)).to(torch.float8_e4m3fn),
        nv.quantize(torch.ones(128, 384), format=nv.FP8_128x128),
    )
    scale = from_packed_ue8m0(packed_by_hand(codes), 384)
    x = nv.BlockScaledTensor(data, scale, None, (9, 384), "rowmajor", format=nv.FP8_1x128)
    got = parts.gemm(data, w.data, scale, w.scale, a_format=nv.FP8_1x128, b_format=nv.FP8_128x128)
    assert torch.equal(got, nv.gemm(x, w))


def test_what_is_refused():
    packed = torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(TypeError, match="packed has dtype torch.int64; expected torch.int32"):
        from_packed_ue8m0(packed.long(), 1024)
    with pytest.raises(ValueError, match=r"packed has shape \[4, 2\]; expected \[..., rows, 1\] of K=512"):
        from_packed_ue8m0(packed, 512)
    with pytest.raises(ValueError, match="k=100 is not a positive multiple of 128"):
        from_packed_ue8m0(packed, 100)
    with pytest.raises(TypeError, match="packed is 'x'"):
        from_packed_ue8m0("x", 512)
    with pytest.raises(TypeError, match="k='512' is not an int"):
        from_packed_ue8m0(packed, "512")
