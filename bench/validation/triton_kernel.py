"""The kernel of ``triton_matmul``: imported only where Triton is."""

import triton
import triton.language as tl


@triton.jit
def matmul(a, b, c, n, k, tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr):
    """C [M, N] = A [M, K] B [K, N]: one tile per CTA, pointers, no masks; all row-major and multiples of the tile."""
    rows = tl.program_id(0) * tile_m + tl.arange(0, tile_m)
    columns = tl.program_id(1) * tile_n + tl.arange(0, tile_n)
    steps = tl.arange(0, tile_k)
    a_tile = a + rows[:, None] * k + steps[None, :]
    b_tile = b + steps[:, None] * n + columns[None, :]
    total = tl.zeros((tile_m, tile_n), dtype=tl.float32)
    for _ in range(0, k, tile_k):
        total += tl.dot(tl.load(a_tile), tl.load(b_tile))
        a_tile += tile_k
        b_tile += tile_k * n
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(tl.bfloat16))
