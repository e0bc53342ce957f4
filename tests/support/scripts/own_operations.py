"""Calls this package's operations on the virtual GPU: the first call prepares, the second one uses the prepared launch."""

import torch

from nvfp4_cute import gemm, quantize

torch.manual_seed(1)
x, w = (quantize(torch.randn(rows, 32).bfloat16().cuda()) for rows in (4, 16))
want = x.dequantize().float().cpu() @ w.dequantize().float().cpu().T
for _ in range(3):
    found = gemm(x, w)
    assert found.is_cuda
    torch.testing.assert_close(found.float().cpu(), want, rtol=0.01, atol=0.01)
print("PASS")
