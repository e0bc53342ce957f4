"""Runs a GEMM of github.com/luongthecong123/learn-cutedsl at a small size: FILE M N K. The file multiplies 4096 x 4096 x 4096."""

import importlib.util
import sys

import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

spec = importlib.util.spec_from_file_location("kernel_file", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["kernel_file"] = module
spec.loader.exec_module(module)

m, n, k = map(int, sys.argv[2:5])
torch.manual_seed(0)
a, b, c = (torch.randn(shape, device="cuda", dtype=torch.float16) for shape in ((m, k), (n, k), (m, n)))
tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (a, b, c)]
gemm = cute.compile(module.Gemm_TC(), *tensors)
gemm(*tensors)
torch.testing.assert_close(c.float(), a.float() @ b.float().T, atol=1e-1, rtol=1e-1)
print("PASS")
