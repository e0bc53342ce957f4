"""Runs gn-kernels' products in CuTe DSL, NVFP4 on sm_120 and bfloat16 on sm_100: `--mnk 256,256,512 [--tile 128 --ctas 1]`.

The options for tile and CTAs of an MMA apply to sm_100. (The NVFP4 kernel for sm_100 needs an older version of CuTe
DSL.)
"""

import argparse

import torch

from nvfp4_cute.formats.block_scaled import quantize
from nvfp4_cute.reference import grouped_gemm_reference

TOLERANCE = 1e-2
"""Relative to the largest result, of 16-bit results."""


def nvfp4_error(m: int, n: int, k: int) -> float:
    """Returns the largest error of the NVFP4 product relative to the largest result."""
    from gn_kernels.cutedsl.sm120.sm120_mm_nvfp4 import mm

    x, w = quantize(torch.randn(m, k)), quantize(torch.randn(n, k))
    (want,) = grouped_gemm_reference([x.data], [w.data], [x.scale], [w.scale], None, out_dtype=torch.float64)
    data = [t.data.view(torch.float4_e2m1fn_x2).cuda() for t in (x, w)]
    scales = [t.scale.view(torch.float8_e4m3fn).flatten().cuda() for t in (x, w)]
    return float((mm(*data, *scales).cpu().double() - want).abs().max() / want.abs().max())


def bfloat16_error(m: int, n: int, k: int, tile: int, ctas: int) -> float:
    """Returns the largest error of the bfloat16 product relative to the largest result."""
    from gn_kernels.cutedsl.sm100.sm100_mm_bf16 import Sm100MatmulBF16

    a, b = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    Sm100MatmulBF16.compile(tile, ctas)(a, b, out)
    want = a.float() @ b.float().T
    return float((out.float() - want).abs().max() / want.abs().max())


def main() -> None:
    """Multiplies and compares with the reference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnk", required=True)
    parser.add_argument("--tile", type=int, default=256)
    parser.add_argument("--ctas", type=int, default=2)
    args = parser.parse_args()
    m, n, k = map(int, args.mnk.split(","))
    torch.manual_seed(0)
    is_sm120 = torch.cuda.get_device_capability()[0] == 12
    error = nvfp4_error(m, n, k) if is_sm120 else bfloat16_error(m, n, k, args.tile, args.ctas)
    assert error < TOLERANCE, f"relative error {error:.3g}"


if __name__ == "__main__":
    main()
