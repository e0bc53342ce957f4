"""Shared code of the references: NVFP4 numbers, step by step."""

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK_K = 16


def decode_values(packed):
    """Decodes [..., K/2] bytes with two e2m1 numbers each, the first in the low four bits, to float32 [..., K]."""
    codes = packed.view(torch.uint8)
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float32, device=codes.device)
    return table[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()]


def decode_scales(blocked, rows, k):
    """Decodes float8_e4m3fn [rm, rk, 32, 4, 4], atoms of 128 rows and 4 blocks of 16, to one float32 per value [rows, K]."""
    row_blocks, k_blocks = blocked.shape[:2]
    plain = blocked.float().permute(0, 3, 2, 1, 4).reshape(128 * row_blocks, 4 * k_blocks)
    return plain[:rows, : k // BLOCK_K].repeat_interleave(BLOCK_K, dim=1)


def dequantize(packed, blocked):
    """Dequantizes a matrix [rows, K/2] with its scales to float32 [rows, K]."""
    values = decode_values(packed)
    return values * decode_scales(blocked, *values.shape)


def random_values(*shape, device):
    """Draws packed e2m1 numbers, every code with equal probability."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device).view(torch.float4_e2m1fn_x2)


def random_scales(*shape, device):
    """Draws scales between 1/8 and 1, so never negative or NaN."""
    return (torch.rand(shape, device=device) * 0.875 + 0.125).to(torch.float8_e4m3fn)


def quantize(x):
    """Quantizes float [rows, K] to uint8 codes [rows, K] and float8_e4m3fn scales [rows, K/16].

    Scales are amax / 6 and codes are x / scale, both rounded to nearest even.
    """
    blocks = x.float().unflatten(1, (-1, BLOCK_K))
    scale = (blocks.abs().amax(dim=2) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    divisor = scale.float()[..., None]
    size = blocks.abs() / torch.where(divisor == 0, torch.inf, divisor)
    # Counts the midpoints below a value; a tie goes to the even code.
    code = (size > 0.25).int() + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5)
    return (code + 8 * torch.signbit(blocks)).flatten(1).to(torch.uint8), scale


def pack(codes):
    """Packs uint8 codes [rows, K] into bytes [rows, K/2], the first in the low four bits."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def through_nvfp4(x):
    """Quantizes and dequantizes float32 [rows, K]."""
    codes, scale = quantize(x)
    return decode_values(pack(codes)) * scale.float().repeat_interleave(BLOCK_K, dim=1)
