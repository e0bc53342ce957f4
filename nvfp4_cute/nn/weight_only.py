"""Products of 16-bit rows and quantized weights: by the weight-only kernel, or of many rows by decoding the weights first."""

import torch

from nvfp4_cute import backends
from nvfp4_cute.compile.cache import is_planning
from nvfp4_cute.formats.block_format import INT8, NVFP4, BlockFormat, FP8_128x128
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.ops.dequantize import dequantize
from nvfp4_cute.ops.parts.gemm import gemm
from nvfp4_cute.planning.arch.simt import LEAST_DECODE_FIRST_ROWS, decode_first_rows


def weight_only_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    factor: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
    format: BlockFormat = NVFP4,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``factor * x @ W^T + bias``.

    From ``planning.arch.simt.decode_first_rows`` rows on, a GPU decodes the weights to x's dtype, rounded once with their factor,
    and torch multiplies: of NVFP4 one read of 4.5 bits and one write of 16 bits a weight, and no more reads of the 4 bits. The
    decoded weights live until the product is computed.

    Args:
        x: float16 or bfloat16 [M, K]. weight: [N, bytes of K] of ``format``. scale: as the format has it. factor: float32, one
            element, or None.
        out_dtype: float16, bfloat16 or float32. backend, bias: as of ``gemm``.

    Returns:
        [M, N] of ``out_dtype``.

    Raises:
        What ``gemm`` refuses.
    """
    if _decodes_first(len(x), x.device, backend, format):
        rows, row_bytes = weight.shape
        shape = (rows, format.elements(row_bytes))
        packed = BlockScaledTensor(weight, scale, factor, shape, format.scale_layout, format=format)
        if format in (FP8_128x128, INT8):
            decoded = decoded_by_casts(packed, x.dtype)
        else:
            decoded = dequantize(packed, x.dtype, backend=backend)
        return decoded_linear(x, decoded, bias, out_dtype)
    return gemm(
        x, weight, None, scale, factor, bias=bias, b_format=format, out_dtype=out_dtype, backend=backend
    )


def decoded_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """``x @ W^T + bias`` of decoded weights by torch, which adds the bias to 16-bit results in its own launch.

    Args:
        x: [M, K], of 16 bits. weight: [N, K] of its dtype. bias: [N] of any float dtype, or None.
        out_dtype: the dtype of ``x``, or another one that the result is converted to before the bias is added.
    """
    if is_planning():
        return x.new_empty((len(x), len(weight)), dtype=out_dtype)
    if bias is None or out_dtype == x.dtype:
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype)).to(out_dtype)
    return torch.nn.functional.linear(x, weight).to(out_dtype).add_(bias)


def decoded_by_casts(t: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """``dequantize`` of FP8_128x128 or INT8 [N, K] without tables from the host, so that a CUDA graph can hold it."""
    rows, step = t.shape[0], t.format.block_of(t.shape[1])
    values = t.data.view(t.format.data_dtypes[-1]).float().unflatten(1, (-1, step))
    of_rows = t.scale[:, None].expand(-1, t.format.block_rows, -1).flatten(0, 1)[:rows]
    return (values * of_rows[..., None]).flatten(1).to(dtype)


def _decodes_first(rows: int, device: torch.device, backend: str, format: BlockFormat) -> bool:
    """Whether that takes less time. Of few rows the GPU is not asked for, which takes the host time in every call."""
    if rows < LEAST_DECODE_FIRST_ROWS or backends.resolve(backend, device) == "reference":
        return False
    return rows >= decode_first_rows(backends.gpu_of(backend, device).arch, format)
