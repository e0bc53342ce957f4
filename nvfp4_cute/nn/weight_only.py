"""Products of 16-bit rows and NVFP4 weights: by the 4-bit kernel, or of many rows by decoding the weights first."""

import torch

from nvfp4_cute import backends
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.block_scaled import NVFP4Tensor
from nvfp4_cute.ops.dequantize import dequantize
from nvfp4_cute.ops.gemm import gemm
from nvfp4_cute.planning.arch.simt import LEAST_DECODE_FIRST_ROWS, decode_first_rows


def weight_only_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    factor: torch.Tensor,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """``factor * x @ W^T``.

    From ``planning.arch.simt.decode_first_rows`` rows on, a GPU decodes the weights to x's dtype, rounded once with their factor,
    and torch multiplies: one read of 4.5 bits and one write of 16 bits a weight, and no more reads of the 4 bits. The decoded
    weights live until the product is computed.

    Args:
        x: float16 or bfloat16 [M, K]. weight: uint8 [N, K/2]. scale: float8_e4m3fn, blocked. factor: float32, one element.
        out_dtype: float16, bfloat16 or float32. backend: as of ``gemm``.

    Returns:
        [M, N] of ``out_dtype``.

    Raises:
        What ``gemm`` refuses.
    """
    if _decodes_first(len(x), x.device, backend):
        rows, row_bytes = weight.shape
        shape = (rows, NVFP4.elements(row_bytes))
        decoded = dequantize(NVFP4Tensor(weight, scale, factor, shape), x.dtype, backend=backend)
        return torch.nn.functional.linear(x, decoded).to(out_dtype)
    return gemm(x, weight, None, scale, factor, out_dtype=out_dtype, backend=backend)


def _decodes_first(rows: int, device: torch.device, backend: str) -> bool:
    """Whether that takes less time. Of few rows the GPU is not asked for, which takes the host time in every call."""
    if rows < LEAST_DECODE_FIRST_ROWS or backends.resolve(backend, device) == "reference":
        return False
    return rows >= decode_first_rows(backends.gpu_of(backend, device).arch)
