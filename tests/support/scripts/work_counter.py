"""Tiles that CTAs own from the start, and tiles that they take from an atomic counter: the same work twice."""

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

TILES, ROWS = 96, 16


@cute.kernel
def work(
    counter: cute.Tensor, x: cute.Tensor, y: cute.Tensor, tiles: cutlass.Int32, dynamic: cutlass.Constexpr
):
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    smem = cutlass.utils.SmemAllocator()
    told = smem.allocate_tensor(cutlass.Int32, cute.make_layout(1), 16)
    tile = cutlass.Int32(cta)
    if cutlass.const_expr(dynamic):
        if thread == 0:
            told[0] = cute.arch.atomic_add(counter.iterator.llvm_ptr, cutlass.Int32(1))
        cute.arch.sync_threads()
        tile = told[0]
        cute.arch.sync_threads()
    while tile < tiles:
        acc = cutlass.Float32(0)
        for i in cutlass.range(ROWS, unroll=1):
            acc = acc + x[tile, i, thread]
        y[tile, thread] = acc
        if cutlass.const_expr(dynamic):
            if thread == 0:
                told[0] = cute.arch.atomic_add(counter.iterator.llvm_ptr, cutlass.Int32(1))
            cute.arch.sync_threads()
            tile = told[0]
            cute.arch.sync_threads()
        else:
            tile = tile + ctas


@cute.jit
def go(
    counter: cute.Tensor, x: cute.Tensor, y: cute.Tensor, tiles: cutlass.Int32, dynamic: cutlass.Constexpr
):
    work(counter, x, y, tiles, dynamic).launch(grid=(8, 1, 1), block=(64, 1, 1))


x = torch.randn(TILES, ROWS, 64, device="cuda")
for dynamic in (False, True):
    counter, y = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(TILES, 64, device="cuda")
    go(from_dlpack(counter), from_dlpack(x), from_dlpack(y), TILES, dynamic)
    print("close", torch.allclose(y, x.sum(1), atol=1e-4))
