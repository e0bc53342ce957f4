"""b12x: quantizers, products and norms for sm_120, prepared with their default configurations."""

from typing import Any

import torch
from b12x.gemm import bf16_gemv, blockscaled
from b12x.preparation import PreparationRequest, PreparedCall, prepare_default
from b12x.quantization import mxfp8, nvfp4

from nvfp4_cute.bench.witnesses import support
from nvfp4_cute.bench.witnesses.support import blocked, close, main, rand


def prepared(plan: Any, run: Any) -> None:
    """Prepares a plan with its default configuration, and runs the call."""
    prepare_default(
        PreparationRequest(name="call", plan=plan, prepare_call=lambda state: PreparedCall(run=run))
    )
    run()


def codes(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``x * scale`` to NVFP4. Returns packed data and blocked scales."""
    rows, columns = x.shape
    plan = nvfp4.plan(rows, columns)
    made = nvfp4.allocate_outputs(plan)
    multiplier = torch.tensor([scale], device="cuda")
    prepared(plan, lambda: nvfp4.run(plan=plan, x=x, global_scale=multiplier, outputs=made))
    return made.packed_a_flat.view(rows, columns // 2), made.scale_flat.view(
        rows // 128, columns // 64, 32, 4, 4
    )


def quantize_nvfp4() -> None:
    """Compares values after quantization with those before."""
    x = rand(128, 256)
    scale = 2688 / float(x.abs().max())
    data, factors = codes(x, scale)
    close(support.nvfp4(data, blocked(factors, 128)) / scale, x, 0.12)


def quantize_mxfp8() -> None:
    """Compares values after quantization with those before. Reads the row-major scales."""
    x = rand(128, 256)
    values = torch.empty(128, 256, dtype=torch.float8_e4m3fn, device="cuda")
    rows = torch.zeros(128, 8, dtype=torch.uint8, device="cuda")
    tiles = torch.zeros(1024, dtype=torch.uint8, device="cuda")
    plan = mxfp8.plan(mxfp8.query_from_call(x, values, rows, tiles))
    prepared(plan, lambda: mxfp8.quantize_rows(x, values, rows, tiles, plan=plan))
    scale = rows.cpu().view(torch.float8_e8m0fnu).double()
    close(values.cpu().double() * scale.repeat_interleave(32, -1), x, 0.04)


def gemm_nvfp4() -> None:
    """Multiplies matrices that the package quantized."""
    a, b = rand(128, 256), rand(256, 256)
    scales = [2688 / float(x.abs().max()) for x in (a, b)]
    (qa, sa), (qb, sb) = (codes(x, s) for x, s in zip((a, b), scales, strict=True))
    alpha = torch.tensor([1 / scales[0] / scales[1]], device="cuda")
    found = blockscaled.mm_nvfp4(qa, sa.flatten(), qb, sb.flatten(), alpha)
    expected = support.nvfp4(qa, blocked(sa, 128)) @ support.nvfp4(qb, blocked(sb, 256)).T * alpha.item()
    close(found, expected, 0.005)


def gemv() -> None:
    """Multiplies four rows of bfloat16."""
    x, w = rand(4, 2048), rand(64, 2048)
    plan = bf16_gemv.plan(bf16_gemv.query_from_call(x, w))
    prepared(plan, lambda: bf16_gemv.mm(x, w, plan=plan))
    close(bf16_gemv.mm(x, w, plan=plan), x.cpu().double() @ w.cpu().double().T, 0.005)


main(
    {
        "quantize-nvfp4": quantize_nvfp4,
        "quantize-mxfp8": quantize_mxfp8,
        "gemm-nvfp4": gemm_nvfp4,
        "gemv-bf16": gemv,
    }
)
