"""FlashInfer's masked grouped GEMM (``flashinfer.gemm.grouped_gemm_nt_masked``): every group has the rows of the largest."""

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.foreign.cells import FLASHINFER
from nvfp4_cute.bench.foreign.kernels import Prepared, Tile, restricted, wide_tiles
from nvfp4_cute.bench.foreign.operands import GroupedOperands
from nvfp4_cute.bench.foreign.schedule import static_work

TILE_K = 256
KERNEL = "Sm100BlockScaledPersistentDenseGemmKernel"
FEW_ROWS = 64
PUBLISHED_ROWS = 4096
"""Rows per group in FlashInfer's benchmark. Tiles load rows that no group uses, as long as they exist."""


def refuses(case: Case) -> str | None:
    """Returns why the kernel does not take a cell: it takes all."""
    return None


def tiles(case: Case) -> list[Tile]:
    """Returns the tiles to try.

    With tiles of 256 rows the kernel's scheduler counts tiles of 128, so that half of the clusters compute nothing.
    """
    most = max(m for m, _, _ in case.sizes)
    return [Tile(128, 128)] if most <= FEW_ROWS else [tile for tile in wide_tiles(case) if tile.m == 128]


def prepare(case: Case, operands: GroupedOperands, tile: Tile, sms: int) -> Prepared:
    """Prepares a call on copies in which every group has the number of rows of the largest group."""
    import torch
    from flashinfer.gemm import grouped_gemm_nt_masked

    _, n, k = case.sizes[0]
    groups = len(case.sizes)
    most = PUBLISHED_ROWS if case.problem == FLASHINFER else max(operands.rows)
    padded = operands.padded(most)
    e4m3 = torch.float8_e4m3fn
    matrix = lambda x, rows: x.view(groups, rows, -1).permute(1, 2, 0)
    scale = lambda x: x.view(groups, -1, *x.shape[-4:]).permute(3, 4, 1, 5, 2, 0).view(e4m3)
    masked_m = torch.tensor(padded.rows, dtype=torch.int32, device=operands.device)
    run = lambda: grouped_gemm_nt_masked(
        (matrix(padded.a, most), scale(padded.a_scale)),
        (matrix(padded.b, n), scale(padded.b_scale)),
        matrix(padded.out, most),
        masked_m,
        ab_dtype="float4_e2m1fn",
        sf_dtype="float8_e4m3fn",
        c_dtype="bfloat16",
        sf_vec_size=16,
        mma_tiler_mn=(tile.m, tile.n),
        sm_count=sms,
    )
    work = static_work(padded, (tile.m, tile.n, TILE_K), sms, "n")
    launched = groups * -(-most // tile.m) * -(-n // tile.n)  # tiles with the rows of the largest group
    return Prepared(run, KERNEL, restricted(work, launched), padded)
