"""Dist-MoE: kernels that one GPU can run, such as grouped products, quantizers and norms."""

from functools import partial

import torch
import torch.nn.functional as F
from dist_moe.formats import BlockScaledFormat, ScaleFactorLayout
from dist_moe.kernels import blockscaled_config, blockscaled_grouped_gemm, blockscaled_quantize, grouped_gemm
from dist_moe.kernels.norm import fused_rmsnorm_combine, rmsnorm

from nvfp4_cute.bench.witnesses.support import close, int32, main, nvfp4, ragged, rand

SIZES = [128, 0, 256]
N, K = 256, 256


def product(form: str, **options: bool) -> None:
    """Multiplies three groups of bfloat16, one of them empty."""
    x, w, y = rand(sum(SIZES), K), rand(len(SIZES), N, K), rand(sum(SIZES), N)
    if form == "fprop":
        close(grouped_gemm.grouped_gemm_fprop(x, w, int32(SIZES), **options), ragged(SIZES, x, w), 0.005)
    elif form == "dgrad":
        found = grouped_gemm.grouped_gemm_dgrad(y, w, int32(SIZES), **options)
        close(found, ragged(SIZES, y, w.transpose(1, 2)), 0.005)
    else:
        rows = zip(y.cpu().double().split(SIZES), x.cpu().double().split(SIZES), strict=True)
        found = grouped_gemm.grouped_gemm_wgrad(y, x, int32(SIZES), **options)
        close(found, torch.stack([a.T @ b for a, b in rows]), 0.005)


def quantized(x: torch.Tensor, name: str, is_blocked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns data and scales of a tensor."""
    layout = ScaleFactorLayout.CUBLAS_BLOCKED if is_blocked else ScaleFactorLayout.NATURAL
    return blockscaled_quantize.quantize_block_scaled(x, format=BlockScaledFormat[name], layout=layout)


def values(x: torch.Tensor, name: str) -> torch.Tensor:
    """Returns the values of a tensor after quantization, in float64. Uses the package's quantizer with row-major scales."""
    data, scale = (part.cpu() for part in quantized(x, name, is_blocked=False))
    if name == "NVFP4":
        return nvfp4(data, scale.double())
    return data.double() * scale.double().repeat_interleave(32, -1)


def quantize(name: str) -> None:
    """Compares values after quantization with those before."""
    x = rand(128, K)
    close(values(x, name), x, 0.12 if name == "NVFP4" else 0.04)


def block_scaled(name: str) -> None:
    """Multiplies three groups of a block-scaled format."""
    x, w = rand(sum(SIZES), K), rand(len(SIZES) * N, K)
    (a, sa), (b, sb) = (quantized(part, name, is_blocked=True) for part in (x, w))
    found = blockscaled_grouped_gemm.blockscaled_grouped_gemm_fprop(
        a, b.view(len(SIZES), N, -1), sa.flatten(), sb.flatten(), int32(SIZES),
        format=getattr(blockscaled_config, name),
    )  # fmt: skip
    close(found, ragged(SIZES, values(x, name), values(w, name).view(len(SIZES), N, K)), 0.005)


def norm(columns: int) -> None:
    """Compares an RMS norm and its gradients."""
    x, w, dy = rand(32, columns), rand(columns), rand(32, columns)
    y, rstd = rmsnorm.cute_rmsnorm_fwd(x, w, eps=1e-5)
    a, b = x.cpu().double().requires_grad_(), w.cpu().double().requires_grad_()
    expected = F.rms_norm(a, (columns,), b, 1e-5)
    close(y, expected, 0.005)
    expected.backward(dy.cpu().double())
    dx, dw = rmsnorm.cute_rmsnorm_bwd(dy, x, w, rstd)
    close(dx, a.grad, 0.005)
    close(dw, b.grad, 0.02)


def combine() -> None:
    """Compares the norm and weighted sum of two experts per token."""
    x, weights = rand(16, 2, 512), torch.rand(16, 2).cuda()
    y = fused_rmsnorm_combine.fused_rmsnorm_combine(
        x, weights, norm_output_dtype=torch.float32, output_dtype=torch.bfloat16
    )
    parts = F.rms_norm(x.cpu().double(), (512,), None, 1e-5) * weights.cpu().double()[..., None]
    close(y, parts.sum(1), 0.01)


main(
    {
        **{form: partial(product, form) for form in ("fprop", "dgrad", "wgrad")},
        "fprop-static": partial(product, "fprop", static_scheduler=True),
        "quantize-mxfp8": partial(quantize, "MXFP8_E4M3"),
        "quantize-nvfp4": partial(quantize, "NVFP4"),
        "fprop-mxfp8": partial(block_scaled, "MXFP8_E4M3"),
        "fprop-nvfp4": partial(block_scaled, "NVFP4"),
        "rms-norm": partial(norm, 1024),
        "rms-norm-narrow": partial(norm, 128),
        "rms-norm-combine": combine,
    }
)
