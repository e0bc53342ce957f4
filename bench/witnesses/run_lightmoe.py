"""LightMoE: products, quantizers, routing, and layers of experts for inference and training."""

from functools import partial

import torch
from lightmoe import InferenceMoE, MoEDispatch, MoEExpertLayer, gemm
from lightmoe.kernels.grouped import wgrad_kernel
from lightmoe.kernels.quantize import runtime

from nvfp4_cute.bench.witnesses.support import blocked, close, int32, main, nvfp4, ragged, rand, rounded

HIDDEN, INNER, TOP = 256, 128, 2
SIZES = [40, 0, 200, 130]
ENDS = [0, 40, 40, 240, 370]
wgrad_kernel._USING_INTERNAL_CUTLASS_DSL = True  # FP4 tensors count elements from CuTe DSL 4.8 on


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Returns zeros on the virtual GPU."""
    return torch.zeros(shape, dtype=dtype, device="cuda")


def codes(rows: int, columns: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates NVFP4 data and its scales: tiles of 128 rows, and one more tile per expert."""
    tiles = -(-rows // 128) + experts
    scale = empty(1, tiles, columns // 64, 32, 4, 4, dtype=torch.float8_e4m3fn)
    return empty(rows, columns // 2, dtype=torch.uint8), scale


def pair(x: torch.Tensor) -> torch.Tensor:
    """Returns a global scale and its inverse. The factor 1.0371 keeps values off the quantizer's ties."""
    scale = (x.float().abs().amax() / 2688 * 1.0371).reshape(1)
    return torch.cat([scale, 1 / scale]).cuda()


def route(tokens: int, experts: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor, MoEDispatch]:
    """Returns experts (from `first` on) and weights of tokens, and the plan that sorts their rows."""
    ids = int32(torch.stack([torch.randperm(experts - first)[:TOP] + first for _ in range(tokens)]))
    weights = torch.rand(tokens, TOP).softmax(-1).cuda()
    plan = MoEDispatch(tokens, experts, TOP)
    plan(ids, weights)
    return ids, weights, plan


def grouped_scales(scale: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Returns row-major scales of experts whose tiles begin at ``start // 128 + expert``."""
    tiles = scale.cpu().view(torch.uint8).flatten(0, 1)
    spans = enumerate(zip(ends[:-1], ends[1:], strict=True))
    return torch.cat([blocked(tiles[a // 128 + e :], b - a) for e, (a, b) in spans if b > a])


def dense() -> None:
    """Multiplies NVFP4 matrices."""
    (a, sa, ga), (b, sb, gb) = gemm.quantize(rand(200, 256)), gemm.quantize(rand(256, 256))
    out, alpha = empty(200, 256), (ga * gb).reshape(1)
    gemm.DenseGemm(256, 256, 128, 128)(a, b, out, sa, sb, alpha)
    close(out, nvfp4(a, blocked(sa, 200)) @ nvfp4(b, blocked(sb, 256)).T * alpha.item(), 0.005)


def grouped(tile: tuple[int, int], **options: bool) -> None:
    """Multiplies four groups, one of them empty."""
    a, b, sa, sb, alpha = gemm.quantize_grouped(rand(370, 256), rand(4, 512, 256), int32(ENDS))
    out = empty(370, 512)
    plan = gemm.GroupedGemm(experts=4, n=512, k=256, tile_m=tile[0], tile_n=tile[1], **options)
    plan.run(a, b, out, int32(ENDS), sa, sb, alpha)
    weights = torch.stack([nvfp4(q, blocked(s, 512)) for q, s in zip(b, sb, strict=True)])
    close(out, ragged(SIZES, nvfp4(a, grouped_scales(sa, ENDS)), weights) * alpha.item(), 0.005)


def dispatch() -> None:
    """Compares the order of rows and their weights."""
    ids, weights, plan = route(40, 8)
    order = torch.sort(ids.cpu().flatten(), stable=True).indices
    close(plan.gi, order // TOP, 0)
    close(plan.ps, weights.cpu().flatten()[order], 0)


def quantize(form: str) -> None:
    """Quantizes gathered rows; "both" also quantizes columns after a Hadamard transform."""
    x = rand(40, HIDDEN)
    ids, _, plan = route(40, 8)
    scales, ends, taken = pair(x), plan.cu.tolist(), x[plan.gi.long()].cpu()
    q, sf = codes(80, HIDDEN, 8)
    if form == "rowwise":
        runtime.nvfp4_quantize_rowwise(
            x, plan.cu, scales, q, sf, gather_idx=plan.gi, padded_offsets=plan.off_pad, te_math=True
        )
    else:
        columns = sum(-(-(b - a) // 128) * 128 for a, b in zip(ends[:-1], ends[1:], strict=True))
        other, other_sf = (
            empty(HIDDEN, columns // 2, dtype=torch.uint8),
            empty(HIDDEN * columns // 16, dtype=sf.dtype),
        )
        options = {"gather_idx": plan.gi, "padded_offsets": plan.off_pad}
        runtime.nvfp4_rht_amax(x, plan.cu, empty(18 * HIDDEN // 128, 2, dtype=torch.float32), **options)
        runtime.nvfp4_quantize_row_colwise(x, plan.cu, scales, scales, q, sf, other, other_sf, **options)
    close(nvfp4(q, grouped_scales(sf, ends)) * scales[0].item(), rounded(taken, scales[0].item()), 1e-6)


def layer(form: str, tokens: int, activation: str = "swiglu", experts: int = 8, first: int = 0) -> None:
    """Compares a layer of experts in one of its three forms. Experts before `first` get no rows."""
    gate, up = (rand(experts, INNER, HIDDEN, scale=2 / HIDDEN**0.5) for _ in range(2))
    down, x = rand(experts, HIDDEN, INNER, scale=INNER**-0.5), rand(tokens, HIDDEN)
    ids, weights, _ = route(tokens, experts, first)
    moe = InferenceMoE(HIDDEN, INNER, experts, TOP, tokens, activation=activation)
    moe.load_weights(*((up, down) if activation == "relu2" else (gate, up, down)))
    w1, w2 = (
        torch.stack([nvfp4(q, blocked(s, q.shape[0])) for q, s in zip(data, scale, strict=True)]) * g.item()
        for data, scale, g in ((moe.qb1, moe.sfb1, moe.p_w1), (moe.qb2, moe.sfb2, moe.p_w2))
    )
    scale = float(x.float().abs().amax()) / 2688 * 1.0371  # as in pair
    sums = (w1[ids.cpu().long()] @ rounded(x, scale)[:, None, :, None]).squeeze(-1)
    silu = torch.nn.functional.silu
    inner = sums.relu() ** 2 if activation == "relu2" else silu(sums[..., 0::2]) * sums[..., 1::2]
    inner_scale = float(inner.abs().amax()) / 2688 * 1.0371
    moe.set_activation_scales(scale, inner_scale)
    second = (w2[ids.cpu().long()] @ rounded(inner, inner_scale)[..., None]).squeeze(-1)
    out = getattr(moe, form)(x, ids, weights)
    close(out, (second * weights.cpu().double()[..., None]).sum(1), 0.02)


def train() -> None:
    """Compares forward and gradients with float32, within the error of NVFP4."""
    experts, tokens = 4, 40
    model = MoEExpertLayer(HIDDEN, INNER, experts, TOP).cuda()
    model.refresh_weights()
    x, dy = rand(tokens, HIDDEN).requires_grad_(), rand(tokens, HIDDEN)
    ids, weights, plan = route(tokens, experts)
    weights.requires_grad_()
    model.calibrate(x.detach(), plan.gi, plan.cu, off_pad=plan.off_pad)
    y = model(x, plan.gi, plan.cu, plan.differentiable_probs(weights), plan.slots, plan.off_pad)
    y.backward(dy)
    exact = [part.detach().cpu().float().requires_grad_() for part in (x, weights, model.w1, model.w2)]
    a, p, w1, w2 = exact
    first = (w1[ids.cpu().long()] @ a[:, None, :, None]).squeeze(-1)
    inner = torch.nn.functional.silu(first[..., 0::2]) * first[..., 1::2]
    expected = ((w2[ids.cpu().long()] @ inner[..., None]).squeeze(-1) * p[..., None]).sum(1)
    expected.backward(dy.cpu().float())
    close(y, expected, 0.3)
    for found, reference in zip((x, weights, model.w1, model.w2), exact, strict=True):
        close(found.grad, reference.grad, 0.3)


main(
    {
        "dense": dense,
        "grouped": partial(grouped, (128, 128), use_dynamic_sched=False),
        "grouped-pair": partial(grouped, (256, 256), use_dynamic_sched=False),
        "grouped-dynamic": partial(grouped, (128, 128), use_dynamic_sched=True),
        "dispatch": dispatch,
        "quantize-rowwise": partial(quantize, "rowwise"),
        "quantize-both": partial(quantize, "both"),
        "decode-1": partial(layer, "run_decode", 1),
        "decode-5": partial(layer, "run_decode", 5),
        "decode-relu2": partial(layer, "run_decode", 5, "relu2"),
        "decode-70": partial(layer, "run", 70, experts=16),
        "decode-70-empty": partial(layer, "run", 70, experts=16, first=1),
        "prefill-40": partial(layer, "run_prefill", 40),
        "train": train,
    }
)
