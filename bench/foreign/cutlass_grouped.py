"""CUTLASS's grouped block-scaled GEMM of lists (``blackwell/kernel/blockscaled_grouped_gemm``)."""

from typing import Any

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.foreign.kernels import Prepared, Tile, cluster_count, restricted, wide_tiles
from nvfp4_cute.bench.foreign.operands import GroupedOperands
from nvfp4_cute.bench.foreign.schedule import static_work

TILE_K = 256
KERNEL = "Sm100GroupedBlockScaledGemmKernel"
FEW_ROWS = 64


def refuses(case: Case) -> str | None:
    """Returns why the kernel does not take a cell: it takes all."""
    return None


def tiles(case: Case) -> list[Tile]:
    """Returns the tiles to try."""
    most = max(m for m, _, _ in case.sizes)
    return [Tile(128, 128)] if most <= FEW_ROWS else wide_tiles(case)


def prepare(case: Case, operands: GroupedOperands, tile: Tile, sms: int) -> Prepared:
    """Prepares a compiled call for groups with rows, with sizes that the host knows."""
    import cutlass
    import cutlass.torch as cutlass_torch
    import torch
    from blackwell.kernel.blockscaled_grouped_gemm.grouped_blockscaled_gemm import (
        Sm100GroupedBlockScaledGemmKernel,
        create_tensor_and_stride,
    )
    from cutlass import cute

    ctas = tile.m // 128
    clusters = cluster_count(sms, ctas)
    work = static_work(
        operands,
        (tile.m, tile.n, TILE_K),
        clusters,
        "m",
    )
    tiles_of_all = sum(map(len, work.clusters))
    groups = [group for group, (m, _, _) in enumerate(case.sizes) if m]
    of = lambda tensor, dtype: cutlass_torch.cute_tensor_like(
        torch.tensor(tensor, dtype=getattr(torch, str(dtype).lower())),
        dtype,
        is_dynamic_layout=False,
        assumed_align=16,
    )
    kernel = Sm100GroupedBlockScaledGemmKernel(16, (tile.m, tile.n), (ctas, 1))
    seed = lambda rows, dtype: create_tensor_and_stride(1, rows, rows, False, dtype)[1:3]
    fp4, e4m3, bf16 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN, cutlass.BFloat16
    seeds = [seed(32, fp4), seed(32, fp4), seed(8, bf16), seed(16, e4m3), seed(16, e4m3)]
    int32, int64 = cutlass.Int32, cutlass.Int64
    maps = (sms, kernel.num_tensormaps, kernel.bytes_per_tensormap // 8)
    tables: list[tuple[Any, Any]] = [
        of([(*case.sizes[g], 1) for g in groups], int32),
        of([[(k, 1), (k, 1), (n, 1)] for _, n, k in (case.sizes[g] for g in groups)], int32),
        of([[operands.a[operands.starts[g] :].data_ptr(), operands.b[g].data_ptr(), operands.out[operands.starts[g] :].data_ptr()]
            for g in groups], int64),
        of([[operands.a_scale[operands.atoms[g] :].data_ptr(), operands.b_scale[g].data_ptr()] for g in groups], int64),
        cutlass_torch.cute_tensor_like(torch.empty(maps, dtype=torch.int64), int64, is_dynamic_layout=False),
    ]  # fmt: skip
    given, (sizes, strides, addresses, scales, tensormaps) = [s for _, s in seeds], [t for t, _ in tables]
    stream = cutlass_torch.default_stream()
    compiled = cute.compile(
        kernel, *given, len(groups), sizes, strides, addresses, scales, tiles_of_all, tensormaps, clusters, stream,
        options="--opt-level 2",
    )  # fmt: skip
    call = lambda: (compiled(*given, sizes, strides, addresses, scales, tensormaps, stream), seeds, tables)
    return Prepared(call, KERNEL, restricted(work, tiles_of_all), operands)
