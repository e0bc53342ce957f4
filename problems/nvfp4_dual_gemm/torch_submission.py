"""The problem's entry point, computed by torch's product; `nvfp4-cute export nvfp4_dual_gemm --torch` writes it into one file."""

import torch

from nvfp4_cute.problems.torch_product import product


def custom_kernel(data):
    """Computes C = silu(A @ B1^T) * (A @ B2^T), products and activation in fp32."""
    a, b1, b2, _, _, _, sfa, sfb1, sfb2, _ = data
    gate, up = product(a, b1, sfa, sfb1, torch.float32), product(a, b2, sfa, sfb2, torch.float32)
    return (torch.nn.functional.silu(gate) * up).half()
