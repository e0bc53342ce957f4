"""Runs FlashInfer's `mm_fp4` on NVFP4 operands with a backend in CuTe DSL: `--backend b12x --mnk 17,128,128`.

FlashInfer's tests quantize on the GPU with CUDA C++, which the emulator does not run. This script quantizes by the
specification.
"""

import argparse

import torch
from flashinfer import mm_fp4

from nvfp4_cute.formats.block_scaled import quantize
from nvfp4_cute.reference import grouped_gemm_reference

TOLERANCE = 1e-2
"""Relative to the largest result: sums in another order, and 16-bit results."""


def main() -> None:
    """Multiplies and compares with the reference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--mnk", required=True)
    args = parser.parse_args()
    m, n, k = map(int, args.mnk.split(","))
    torch.manual_seed(0)
    x, w = quantize(torch.randn(m, k), global_scale=0.01), quantize(torch.randn(n, k), global_scale=0.01)
    alpha = torch.tensor([1e-4])
    (want,) = grouped_gemm_reference([x.data], [w.data], [x.scale], [w.scale], alpha, out_dtype=torch.float64)
    scales = [
        t.scale.view(torch.uint8).reshape(-(-rows // 128) * 128, -1).cuda() for t, rows in ((x, m), (w, n))
    ]
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    mm_fp4(
        x.data.view(torch.uint8).cuda(),
        w.data.view(torch.uint8).cuda().T,
        scales[0],
        scales[1].T,
        alpha.cuda(),
        torch.bfloat16,
        out,
        block_size=16,
        use_8x4_sf_layout=False,
        backend=args.backend,
        use_nvfp4=True,
    )
    error = (out.cpu().double() - want).abs().max() / want.abs().max()
    assert error < TOLERANCE, f"relative error {error:.3g}"


if __name__ == "__main__":
    main()
