"""Multiplies groups of different sizes in one launch: python -m nvfp4_cute.examples.grouped_gemm"""

import torch

from nvfp4_cute import grouped_gemm, quantize


def main(backend: str = "auto") -> list[torch.Tensor]:
    """Quantizes two groups to NVFP4, multiplies them and compares with float32 products of the same values.

    Args:
        backend: "auto" runs the kernel of the tensors' GPU, or the float64 reference for CPU tensors; "emulator" compiles
            the kernel that a B200 would run and executes it on the CPU.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(m, k, generator=generator).to(device) for m, k in ((40, 512), (7, 256))]  # [M, K]
    weights = [
        torch.randn(n, k, generator=generator).to(device) for n, k in ((256, 512), (384, 256))
    ]  # [N, K]

    a, b = [quantize(x) for x in tokens], [quantize(w) for w in weights]
    out = grouped_gemm(a, b, backend=backend)  # bfloat16 [M, N] per group

    for y, x, w in zip(out, a, b, strict=True):
        torch.testing.assert_close(y.float(), x.dequantize() @ w.dequantize().T, rtol=1e-2, atol=1e-2)
    print("shapes:", [tuple(y.shape) for y in out], "- equal to float32 products of the quantized values")
    return out


if __name__ == "__main__":
    main()
