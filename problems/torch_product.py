"""torch's own NVFP4 product (cuBLAS), for comparison with our submissions."""

import torch


def product(a, b, sfa, sfb, out_dtype=torch.float16):
    """Computes A @ B^T for every batch.

    Args:
        a, b: [M, K/2, L] and [N, K/2, L] float4_e2m1fn_x2, K-major.
        sfa, sfb: float8_e4m3fn [32, 4, rm, 4, rk, L], views of contiguous [L, rm, rk, 32, 4, 4], used in place.

    Returns:
        [M, N, L] in ``out_dtype``.
    """
    flat_a, flat_b = (scale.permute(5, 2, 4, 0, 1, 3).flatten(1) for scale in (sfa, sfb))
    products = [
        torch._scaled_mm(a[:, :, i], b[:, :, i].t(), flat_a[i], flat_b[i], out_dtype=out_dtype)
        for i in range(a.shape[2])
    ]
    return torch.stack(products, dim=-1)
