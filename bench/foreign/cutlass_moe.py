"""CUTLASS's scaled grouped GEMM for experts (``blackwell/kernel/moe/torch_scaled_grouped_mm.py``)."""

from typing import Any

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.foreign.kernels import Prepared, Tile, cluster_count, narrow_tile, wide_tiles
from nvfp4_cute.bench.foreign.operands import GroupedOperands
from nvfp4_cute.bench.foreign.schedule import static_work

TILE_K = 256
KERNEL = r"^(?!.*desc_init).*ScaledGroupedGemmKernel"
"""The kernel that multiplies. Another one makes the tensor maps of all experts first; its time is not counted."""
FEW_ROWS = 64
_COMPILED: dict[Tile, Any] = {}


def refuses(case: Case) -> str | None:
    """Returns why the kernel does not take a cell: it takes all."""
    return None


def tiles(case: Case) -> list[Tile]:
    """Returns the tiles to try."""
    most = max(m for m, _, _ in case.sizes)
    return [narrow_tile(case)] if most <= FEW_ROWS else wide_tiles(case)


def prepare(case: Case, operands: GroupedOperands, tile: Tile, sms: int) -> Prepared:
    """Prepares a compiled call, as the example's own benchmark makes it."""
    import cuda.bindings.driver as cuda
    import cutlass.torch as cutlass_torch
    import torch
    from blackwell.kernel.moe.torch_scaled_grouped_mm import ScaledGroupedGemmKernel
    from cutlass import cute

    _, n, k = case.sizes[0]
    groups, ctas = len(case.sizes), tile.m // 128
    kernel = ScaledGroupedGemmKernel(
        scenario="2Dx3D",
        sf_vec_size=16,
        accumulate_on_output=False,
        separate_tensormap_init=True,
        consistent_token_padding=False,
        mma_tiler_mnk=(tile.m, tile.n, TILE_K),
        cluster_shape_mnk=(ctas, 1, 1),
        use_2cta_instrs=ctas == 2,
    )
    fp4, e4m3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    columns = operands.b_scale.shape[2] * 4
    tensors = (
        operands.a.view(fp4),
        operands.b.view(fp4).transpose(1, 2),
        operands.a_scale.view(e4m3).view(-1, columns),
        operands.b_scale.view(e4m3).view(groups, -1),
        operands.out,
        operands.offs(),
        torch.zeros(kernel.get_workspace_size(groups), dtype=torch.uint8, device=operands.device),
    )
    ones = [torch.ones(groups, device=operands.device) for _ in range(2)]

    def cute_tensor(tensor: torch.Tensor) -> object:
        found = cutlass_torch.from_dlpack(tensor)
        return found.mark_layout_dynamic(leading_dim=cutlass_torch.get_leading_dim(tensor))

    arguments = list(map(cute_tensor, tensors))
    scales = dict(zip(("global_scale_a", "global_scale_b"), map(cute_tensor, ones), strict=True))
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    clusters = cluster_count(sms, ctas)
    if tile not in _COMPILED:  # all shapes are run-time arguments
        _COMPILED[tile] = cute.compile(kernel, *arguments, clusters, stream, **scales)
    compiled = _COMPILED[tile]
    work = static_work(
        operands,
        (tile.m, tile.n, TILE_K),
        clusters,
        "shorter",
    )
    kept = (tensors, ones)
    return Prepared(lambda: (compiled(*arguments, stream, **scales), kept), KERNEL, work, operands)
