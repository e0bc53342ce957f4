"""LightMoE's grouped GEMM."""

from itertools import accumulate

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.foreign.kernels import MANY_EXPERTS, Prepared, Tile, cluster_count, wide_tiles
from nvfp4_cute.bench.foreign.operands import GroupedOperands
from nvfp4_cute.bench.foreign.schedule import static_work
from nvfp4_cute.formats.block_format import ATOM_ROWS

MOST_EXPERTS = 256
TILE_K = 256
NARROW = (8, 16, 32, 64)
"""Tokens per tile with swapped operands."""
SWAPPED, DECODE = "swapped", "swapped, decode"
"""Forms of a tile. Swapped: tokens along N. Decode: also with a list of tiles, as LightMoE's layer calls the kernel to decode."""
KERNEL = "Sm100GroupedBlockScaledGemm"


def refuses(case: Case) -> str | None:
    """Returns why the package does not take a cell."""
    groups = len(case.sizes)
    return f"at most {MOST_EXPERTS} experts, not {groups}" if groups > MOST_EXPERTS else None


def tiles(case: Case) -> list[Tile]:
    """Returns the tiles to try: with swapped operands, tokens along N, for few rows.

    For at most 8 rows its decode path is the fastest of three forms in all cells where they were modelled. With many experts the
    other forms walk over them one by one, which takes tens of microseconds, so only one of these is tried, from 33 rows on.
    """
    most = max(m for m, _, _ in case.sizes)
    decode = [Tile(128, n, DECODE) for n in NARROW if most <= n][:1]
    if most <= NARROW[0]:
        return decode
    if len(case.sizes) >= MANY_EXPERTS and most <= NARROW[-1]:
        return decode if most <= NARROW[-2] else [*decode, Tile(128, 128)]
    swapped = [Tile(128, n, SWAPPED) for n in NARROW if n // 2 < most <= 2 * n]
    return [*decode, *swapped, *(wide_tiles(case) if most > NARROW[-1] else [Tile(128, 128)])]


def prepare(case: Case, operands: GroupedOperands, tile: Tile, sms: int) -> Prepared:
    """Prepares a call with the static scheduler."""
    import torch
    from lightmoe.gemm import GroupedGemm

    _, n, k = case.sizes[0]
    groups, rows = len(case.sizes), operands.a.shape[0]
    is_decode, is_swapped = tile.form == DECODE, tile.form in (SWAPPED, DECODE)
    options: dict[str, torch.Tensor] = {}
    if is_decode:
        counts = [-(-m // tile.n) for m, _, _ in case.sizes]
        places, scale_rows = list(accumulate(counts, initial=0))[:-1], tile.n
        listed = [group + j * groups for group, count in enumerate(counts) for j in range(count)]
        plan = [len(listed), *listed, *places]
        options["decode_plan"] = torch.tensor(plan, dtype=torch.int32, device=operands.device)
    else:
        places = [start // ATOM_ROWS + group for group, start in enumerate(operands.starts)]
        scale_rows = ATOM_ROWS
    a_scale = operands.scales_at(places, -(-rows // scale_rows) + groups, scale_rows).unsqueeze(0)
    gemm = GroupedGemm(
        experts=groups, n=n, k=k, tile_m=tile.m, tile_n=tile.n,
        use_dynamic_sched=False, swap_ab=is_swapped, fast_decode_sched=is_decode,
    )  # fmt: skip
    gemm._direct_c_store = (
        is_decode and max(m for m, _, _ in case.sizes) > 1
    )  # as its layer does for several tokens
    fp4, e4m3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    arguments = (
        operands.a.view(fp4),
        operands.b.view(fp4),
        operands.out,
        operands.offs(from_zero=True),
        a_scale.view(e4m3),
        operands.b_scale.view(e4m3),
        torch.ones(1, device=operands.device),
    )
    work = static_work(
        operands,
        (tile.n, tile.m, TILE_K) if is_swapped else (tile.m, tile.n, TILE_K),
        cluster_count(sms, 2 if tile.m == 256 else 1),
        "n" if is_decode else "shorter",
        (a_scale, places),
    )
    return Prepared(lambda: gemm.run(*arguments, **options), KERNEL, work, operands)
