"""The problem's entry point, computed by ``nvfp4_cute.gemm``."""

import torch

from nvfp4_cute.ops import parts
from nvfp4_cute.ops.parts import Parts


def custom_kernel(data: tuple[torch.Tensor, ...], *, backend: str = "auto") -> torch.Tensor:
    """Computes into the C in the input.

    Uses the permuted scales in place and ignores the row-major ones. Only compiled code is cached between calls.

    Args:
        data: the tuple that ``inputs.make_inputs`` describes.
        backend: see ``gemm``; "auto" uses NVFP4_CUTE_BACKEND, or else the tensors' device.

    Returns:
        C, float16 [M, N, 1].
    """
    a, b, _, _, sfa, sfb, c = data
    parts.gemm(Parts(a, sfa), Parts(b, sfb), out=c, out_dtype=torch.float16, backend=backend)
    return c
