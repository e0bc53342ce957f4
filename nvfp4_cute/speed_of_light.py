"""The least possible time of a problem: bytes over bandwidth or operations over peak, whichever takes longer.

The published speed-of-light times of the GPU MODE NVFP4 problems follow from two constants, found by fitting
all fourteen published rows: the eleven GEMM rows agree within 0.05 %, the three GEMV rows within 0.4 %.
"""

from collections.abc import Iterable

from nvfp4_cute.problem import gemm_bytes

# B200: 0.96 of 8 TB/s; 94.9 % of 148 SMs x 32768 FLOP a clock x 1.5 GHz (dense NVFP4 at the published clock).
COMPETITION_HBM_BYTES_PER_S = 7.68e12
COMPETITION_FP4_FLOPS_PER_S = 6.90e15
FP16_BYTES = 2


def competition_us(num_bytes: int, flops: int) -> float:
    """Published speed of light in us of a B200 that moves ``num_bytes`` and does ``flops`` operations."""
    return 1e6 * max(num_bytes / COMPETITION_HBM_BYTES_PER_S, flops / COMPETITION_FP4_FLOPS_PER_S)


def grouped_gemm_us(sizes: Iterable[tuple[int, int, int]]) -> float:
    """Groups of (m, n, k) in elements: fp16 C_g = A_g @ B_g^T; real M, no padding."""
    sizes = tuple(sizes)
    num_bytes = sum(gemm_bytes(m, n, k, FP16_BYTES) for m, n, k in sizes)
    return competition_us(num_bytes, sum(2 * m * n * k for m, n, k in sizes))


def gemm_us(m: int, n: int, k: int, l: int = 1) -> float:
    """A batch of ``l`` GEMMs of one shape with fp16 C (m, n)."""
    return grouped_gemm_us([(m, n, k)] * l)


def gemv_us(m: int, k: int, l: int = 1) -> float:
    """A batch of ``l`` products of a matrix (m, k) and a vector (k,) with fp16 result (m,)."""
    return gemm_us(m, 1, k, l)


def dual_gemm_us(m: int, n: int, k: int) -> float:
    """C = silu(A @ B1^T) * (A @ B2^T) with fp16 C (m, n), written once."""
    return competition_us(gemm_bytes(m, n, k, FP16_BYTES, num_b=2), 2 * m * 2 * n * k)
