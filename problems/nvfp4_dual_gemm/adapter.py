"""The problem's entry point, answered by ``nvfp4_cute.dual_gemm``."""

import torch

from nvfp4_cute.ops import parts


def custom_kernel(data: tuple[torch.Tensor, ...], *, backend: str = "auto") -> torch.Tensor:
    """Compute into the C that the input carries.

    The permuted scales are used where they lie; the row-major ones are ignored. Nothing is remembered from one call to
    the next but compiled code.

    Args:
        data: the tuple that ``inputs.make_inputs`` describes.
        backend: as of ``dual_gemm``; "auto" asks NVFP4_CUTE_BACKEND, then takes what fits the tensors' device.

    Returns:
        C, float16 [M, N, 1].
    """
    a, b1, b2, _, _, _, sfa, sfb1, sfb2, c = data
    parts.dual_gemm(a, b1, b2, sfa, sfb1, sfb2, out=c, out_dtype=torch.float16, backend=backend)
    return c
