"""``gemm``: C = alpha * A @ B^T + bias, with block-scaled or 16-bit A and block-scaled B, a batch in one launch."""

from typing import overload

import torch

from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.ops.options import Input, Options, check_operand, options_of, running
from nvfp4_cute.ops.parts.gemm import gemm as gemm_of_parts
from nvfp4_cute.problem import QuantizedName


@overload
def gemm(
    a: Input,
    b: BlockScaledTensor,
    *,
    alpha: float | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    options: Options | None = None,
) -> torch.Tensor: ...


@overload
def gemm(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    *,
    alpha: float | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: BlockScaledTensor | None = None,
    out_dtype: QuantizedName,
    out_global_scale: float | torch.Tensor | None = None,
    backend: str = "auto",
    options: Options | None = None,
) -> BlockScaledTensor: ...


def gemm(
    a: Input,
    b: BlockScaledTensor,
    *,
    alpha: float | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | BlockScaledTensor | None = None,
    out_dtype: torch.dtype | QuantizedName = torch.bfloat16,
    out_global_scale: float | torch.Tensor | None = None,
    backend: str = "auto",
    options: Options | None = None,
) -> torch.Tensor | BlockScaledTensor:
    """Multiply matrices: ``alpha * a @ b.T + bias``, summed in fp32.

        >>> x, w = quantize(torch.randn(40, 512)), quantize(torch.randn(256, 512))
        >>> gemm(x, w).shape
        torch.Size([40, 256])
        >>> w4 = mxfp4_for_fp8(quantize(torch.randn(256, 512), format=MXFP4))  # FP8 rows times MXFP4 weights (W4A8, sm_90a)
        >>> gemm(quantize(torch.randn(40, 512), format=FP8_1xK), w4).dtype
        torch.bfloat16
        >>> hidden = gemm(x, w, out_dtype="nvfp4")  # quantized for the next layer
        >>> gemm(torch.randn(40, 512).half(), w).dtype  # 16-bit activations, quantized weights (W4A16)
        torch.bfloat16

    Args:
        a: [M, K] or [L, M, K], block-scaled, or float16 or bfloat16 [M, K] or [M, K, L].
        b: [N, K] or [L, N, K], block-scaled. README says which pairs of formats have kernels on which GPU.
        alpha: factor of the result: a number, or float32 with one element or [L]. Global scales are applied in addition.
        bias: float16, bfloat16 or float32 [N], added in fp32.
        out: [M, N] or [M, N, L], rows or columns contiguous, written in place; a BlockScaledTensor for quantized results. None
            allocates.
        out_dtype: float16, bfloat16, float32 or the name of a format, such as "nvfp4"; for INT8 operands also int32.
        out_global_scale: global scale of an "nvfp4" result: a number, or float32 with one element.
        backend: "auto" (the tensors' GPU, or the reference on the CPU), "cuda", "emulator[:ARCH]" or "reference".
        options: tile shape, weight prefetch, checks; see :class:`nvfp4_cute.Options`.

    Returns:
        [M, N], or [M, N, L] where ``a`` has batches (batch after batch in memory). Quantized results are a BlockScaledTensor
        [M, N] or [L, M, N].

    Padding columns of blocked scales must be finite; a NaN there spoils whole rows. There are such columns where K is not a
    multiple of 64 (MX formats: 128).

    Raises:
        TypeError, ValueError, UnsupportedProblem, UnsupportedTarget, ConfigError: the message names rule, value and fix, and
        ``out`` is unchanged.
    """
    how = options_of(options)
    check_operand("a", a, takes_16_bits=True)
    check_operand("b", b)
    run = running(gemm_of_parts, how)
    return run(
        a, b, alpha, bias=bias, out=out, out_dtype=out_dtype, out_global_scale=out_global_scale, backend=backend, options=how,
    )  # fmt: skip
