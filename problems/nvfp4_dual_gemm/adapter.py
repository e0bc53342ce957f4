"""The problem's entry point, computed by ``nvfp4_cute.dual_gemm``."""

import torch

from nvfp4_cute.ops import parts
from nvfp4_cute.ops.parts import Parts


def custom_kernel(data: tuple[torch.Tensor, ...], *, backend: str = "auto") -> torch.Tensor:
    """Computes into the C in the input.

    Uses the permuted scales in place and ignores the row-major ones. Only compiled code is cached between calls.

    Args:
        data: the tuple that ``inputs.make_inputs`` describes.
        backend: see ``dual_gemm``; "auto" uses NVFP4_CUTE_BACKEND, or else the tensors' device.

    Returns:
        C, float16 [M, N, 1].
    """
    a, b1, b2, _, _, _, sfa, sfb1, sfb2, c = data
    w = parts.gate_up(Parts(b1, sfb1), Parts(b2, sfb2))
    parts.dual_gemm(Parts(a, sfa), w, out=c, out_dtype=torch.float16, backend=backend)
    return c
