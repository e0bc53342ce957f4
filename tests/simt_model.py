"""What the kernels in kernels/simt compute, in their own order of summation: NumPy float32, one operation a step."""

import numpy as np
import torch

from nvfp4_cute.arch import simt
from nvfp4_cute.reference import expand_operand

BLOCK = 16


def gemv_in_order(a, b, a_scale, b_scale, alpha=None, out_dtype=torch.float32):
    """One batch of a gemv, bit for bit. a uint8 [M, K/2], b uint8 [K/2], scales blocked; alpha a number or None.

    Blocks are exact; 32 lanes times two warps take pieces of 32 values in turn and add their blocks in ascending
    order; then lanes by distance 16, 8, 4, 2, 1; then warps in ascending order.
    """
    values_a = expand_operand(a, a_scale, "blocked").numpy()
    values_b = expand_operand(b.unsqueeze(0), b_scale, "blocked").numpy()
    m, k = values_a.shape
    # Exact in float64: at most 20 significant bits a block term.
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
