"""QuACK's GEMM of sequences (``quack.gemm`` with ``cu_seqlens_m``), with its static scheduler."""

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.foreign.kernels import (
    Prepared,
    Tile,
    cluster_count,
    narrow_tile,
    restricted,
    wide_tiles,
)
from nvfp4_cute.bench.foreign.operands import GroupedOperands
from nvfp4_cute.bench.foreign.schedule import static_work
from nvfp4_cute.formats.block_format import ATOM_ROWS

TILE_K = 256
KERNEL = "GemmDefaultSm1|GemmSm1"
FEW_ROWS = 64


def refuses(case: Case) -> str | None:
    """Returns why the kernel does not take a cell: it takes all."""
    return None


def tiles(case: Case) -> list[Tile]:
    """Returns the tiles to try; sm_120 has none of 64 columns."""
    most = max(m for m, _, _ in case.sizes)
    return list(dict.fromkeys((Tile(128, 128), narrow_tile(case)))) if most <= FEW_ROWS else wide_tiles(case)


def prepare(case: Case, operands: GroupedOperands, tile: Tile, sms: int) -> Prepared:
    """Prepares a call without QuACK's search for a config."""
    import torch
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_tuned

    groups, rows, ctas = len(case.sizes), operands.a.shape[0], tile.m // 128
    places = [start // ATOM_ROWS + group for group, start in enumerate(operands.starts)]
    a_scale = operands.scales_at(places, -(-rows // ATOM_ROWS) + groups).unsqueeze(0)
    fp4, e4m3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    config = GemmConfig(
        tile_m=tile.m, tile_n=tile.n, cluster_m=ctas, cluster_n=1, pingpong=False, is_dynamic_persistent=False,
        device_capacity=torch.cuda.get_device_capability()[0],
    )  # fmt: skip
    a, b = operands.a.view(fp4), operands.b.view(fp4).mT
    options = {
        "cu_seqlens_m": operands.offs(from_zero=True),
        "SFA": a_scale.view(e4m3),
        "SFB": operands.b_scale.view(e4m3),
        "bs_format_a": "nvfp4",
        "bs_format_b": "nvfp4",
        "config": config,
    }
    clusters = cluster_count(sms, ctas)
    work = static_work(operands, (tile.m, tile.n, TILE_K), clusters, "n in eights", (a_scale, places))
    n = case.sizes[0][1]
    launched = (
        (rows + groups * (tile.m - 1)) // tile.m * -(-n // tile.n)
    )  # tiles at most, whatever the groups' rows
    run = lambda: gemm_tuned.fn(a, b, operands.out, **options)
    return Prepared(run, KERNEL, restricted(work, launched), operands)
