"""``gemv``: c = alpha * A @ b with block-scaled A, a batch of matrices and vectors in one launch."""

import torch

from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.ops.options import Input, check_operand
from nvfp4_cute.ops.parts.gemv import gemv as gemv_of_parts


def gemv(
    a: BlockScaledTensor,
    b: Input,
    *,
    alpha: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> torch.Tensor:
    """Multiply a matrix by a vector: ``alpha * a @ b``.

        >>> w, v = quantize(torch.randn(256, 512)), quantize(torch.randn(512))
        >>> gemv(w, v).shape
        torch.Size([256])

    Args:
        a: [M, K] or [L, M, K], block-scaled.
        b: [K] or [L, 1, K], block-scaled, or float16 or bfloat16 [K] or [K, L] (W4A16; K a multiple of 32).
        alpha: factor of the result: a number, or float32 with one element or [L]. Global scales are applied in addition.
        out: [M] or [M, L] of any strides, written in place; None allocates.
        out_dtype: float16, bfloat16 or float32.
        backend: see :func:`gemm`.

    Returns:
        [M], or [M, L] where ``a`` has batches. Each block is summed exactly. Blocks are added in fp32 in an order that depends
        on K alone (``kernels/simt/gemv.py``), so the result depends on neither M, L nor the GPU. Padding of the scales may hold
        anything.

    Raises:
        TypeError, ValueError, UnsupportedProblem, UnsupportedTarget: the message names rule, value and fix, and ``out`` is
            unchanged.
    """
    check_operand("a", a)
    check_operand("b", b, takes_16_bits=True)
    return gemv_of_parts(a, b, alpha, out=out, out_dtype=out_dtype, backend=backend)
