"""The kernels of kernels/simt in NumPy float32, with the same order of summation."""

from dataclasses import dataclass

import numpy as np
import torch

from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats.scale_layout import padded_shape, to_blocked
from nvfp4_cute.planning.arch import simt
from nvfp4_cute.reference import expand_operand

BLOCK = 16
NAN_CODE = 0x7F


def gemv_in_order(a, b, a_scale, b_scale, alpha=None, out_dtype=torch.float32):
    """One batch of a gemv, bit for bit: a uint8 [M, K/2], b uint8 [K/2], scales blocked, alpha a number or None.

    Blocks are exact. Lanes of two warps take pieces of 32 values in turn and add their blocks in ascending order; then
    lanes are added at distance 16, 8, 4, 2, 1; then warps in ascending order.
    """
    values_a = expand_operand(a, a_scale, "blocked").numpy()
    values_b = expand_operand(b.unsqueeze(0), b_scale, "blocked").numpy()
    m, k = values_a.shape
    # Exact in float64: a block term has at most 20 significant bits.
    terms = (values_a * values_b).reshape(m, k // BLOCK, BLOCK).sum(-1)
    assert np.array_equal(terms.astype(np.float32).astype(np.float64), terms, equal_nan=True)
    lanes = simt.GEMV_LANES_K * simt.GEMV_WARPS_K
    blocks_per_piece = simt.GEMV_PIECE_K // BLOCK
    acc = np.zeros((m, lanes), np.float32)
    for block in range(k // BLOCK):
        acc[:, block // blocks_per_piece % lanes] += terms[:, block].astype(np.float32)
    acc = acc.reshape(m, -1, simt.GEMV_LANES_K)
    while acc.shape[-1] > 1:
        half = acc.shape[-1] // 2
        acc = acc[..., :half] + acc[..., half:]
    total = acc[:, 0, 0]
    for warp in range(1, acc.shape[1]):
        total = total + acc[:, warp, 0]
    if alpha is not None:
        total = total * np.float32(alpha)
    return torch.from_numpy(total).to(out_dtype)


@dataclass(frozen=True)
class Operands:
    """a [M, K/2, L], b [K/2, L] uint8; scales [L, rm, rk, 32, 4, 4], NaN in all padding."""

    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor
    b_scale: torch.Tensor

    def __iter__(self):
        return iter((self.a, self.b, self.a_scale, self.b_scale))


def make_gemv_operands(m, k, l=1, seed=0, small_scales=False):
    """Every byte of values. Scales are all finite codes of both signs, or only 1 and 2. The row pitch exceeds the row."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape):
        buffer = torch.full((*shape[:-1], -(-k // 32) * 16), 0x77, dtype=torch.uint8)
        buffer[..., : k // 2] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return buffer[..., : k // 2]

    def scales(rows):
        shape = padded_shape(rows, k // 16)
        codes = torch.full((l, *shape), NAN_CODE, dtype=torch.uint8)
        drawn = torch.randint(0, 254, (l, rows, k // 16), generator=generator)
        finite = torch.tensor([0x38, 0x40])[drawn % 2] if small_scales else drawn + (drawn >= 127).int()
        codes[:, :rows, : k // 16] = finite.to(torch.uint8)
        return to_blocked(codes)

    return Operands(values(l, m, k // 2).permute(1, 2, 0), values(l, k // 2).t(), scales(m), scales(1))


def gemv_expected(operands, alpha=None, out_dtype=torch.float32):
    """[M, L], summed in the kernel's order."""
    a, b, a_scale, b_scale = operands
    alphas = [None] * b.shape[1] if alpha is None else alpha.expand(b.shape[1]).tolist()
    columns = [
        gemv_in_order(a[:, :, l], b[:, l], a_scale[l], b_scale[l], alphas[l], out_dtype)
        for l in range(b.shape[1])
    ]
    return torch.stack(columns, dim=1)


def launches(call, **options):
    """Returns the result, the number of launches on the emulator, and how many of them had a plan, as those of GEMMs have."""
    with observe(check=True, **options) as observer:
        result = call()
    return result, len(observer.stats), len(observer.plans)
