"""Products of 16-bit rows and quantized weights: weight-only kernels for few rows, dequantized weights for many."""

import torch

from nvfp4_cute import backends
from nvfp4_cute.batch_invariance import is_batch_invariant
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
    """Computes ``factor * x @ W^T + bias``.

    From ``planning.arch.simt.decode_first_rows`` rows on, a GPU dequantizes the weights to x's dtype, rounded once with their
    factor, and torch multiplies. For NVFP4 that reads 4.5 bits and writes 16 bits per weight, once. The dequantized weights are
    freed after the product.

    Args:
        x: float16 or bfloat16 [M, K].
        weight: [N, bytes of K] in ``format``.
        scale: scales in the layout of the format.
        factor: float32 with one element, or None.
        out_dtype: float16, bfloat16 or float32.
        backend, bias: see ``gemm``.
        format: format of the weights.

    Returns:
        [M, N] in ``out_dtype``.

    Raises what ``gemm`` raises.
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
    """Computes ``x @ W^T + bias`` with dequantized weights in torch, which adds the bias to 16-bit results in its own launch.

    Args:
        x: [M, K], 16 bits.
        weight: [N, K] in the dtype of ``x``.
        bias: [N] of any float dtype, or None.
        out_dtype: the dtype of ``x``, or another one to which the result is converted before the bias is added.
    """
    if is_planning():
        return x.new_empty((len(x), len(weight)), dtype=out_dtype)
    if bias is None or out_dtype == x.dtype:
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype)).to(out_dtype)
    return torch.nn.functional.linear(x, weight).to(out_dtype).add_(bias)


def decoded_by_casts(t: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantizes FP8_128x128 or INT8 [N, K] without tables from the host, so that a CUDA graph can capture it."""
    rows, step = t.shape[0], t.format.block_of(t.shape[1])
    values = t.data.view(t.format.data_dtypes[-1]).float().unflatten(1, (-1, step))
    of_rows = t.scale[:, None].expand(-1, t.format.block_rows, -1).flatten(0, 1)[:rows]
    return (values * of_rows[..., None]).flatten(1).to(dtype)


def _decodes_first(rows: int, device: torch.device, backend: str, format: BlockFormat) -> bool:
    """Returns whether dequantizing first is faster.

    Does not look up the GPU for few rows, which would cost host time per call.
    """
    if (
        rows < LEAST_DECODE_FIRST_ROWS
        or is_batch_invariant()
        or backends.resolve(backend, device) == "reference"
    ):
        return False
    return rows >= decode_first_rows(backends.gpu_of(backend, device).arch, format)
