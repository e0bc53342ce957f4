"""gemv: c = alpha * A @ b over block-scaled operands, a batch of matrices and vectors in one launch."""

import torch

from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.ops.options import check_operand
from nvfp4_cute.ops.parts.gemv import gemv as gemv_of_parts


def gemv(
    a: BlockScaledTensor,
    b: BlockScaledTensor | torch.Tensor,
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
        alpha: a factor next to the global scales, which multiply by themselves: a number, or float32 of one element or [L].
        out: [M] or [M, L] of any strides, written in place; None allocates.
        out_dtype: float16, bfloat16 or float32.
        backend: as in ``gemm``.

    Returns:
        [M], or [M, L] where ``a`` has batches. The sum of a block is exact; blocks are added in fp32 in an order that depends
        on K alone (``kernels/simt/gemv.py``), so that a result depends neither on M and L nor on the GPU. Padding of the scales
        may hold anything.

    Raises:
        TypeError, ValueError, UnsupportedProblem, UnsupportedTarget: with rule, value and fix; ``out`` is unchanged.
    """
    check_operand("a", a)
    check_operand("b", b, takes_16_bits=True)
    return gemv_of_parts(a, b, None, None, alpha, out=out, out_dtype=out_dtype, backend=backend)
