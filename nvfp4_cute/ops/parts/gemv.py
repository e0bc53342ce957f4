"""Matrix-vector products on parts: c = alpha * A @ b with block-scaled A, a batch in one launch."""

from typing import Any

import torch

from nvfp4_cute import private_api
from nvfp4_cute.backends.calls import call
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import NVFP4, BlockFormat
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, ScaleLayout
from nvfp4_cute.launch.simt import GemvTask, W4A16Task
from nvfp4_cute.launch.task import Task
from nvfp4_cute.operands import products
from nvfp4_cute.operands.numbers_on_device import one_number_on
from nvfp4_cute.operands.rules import ACTIVATION_DTYPES
from nvfp4_cute.operands.whole import batched_parts, check_rows_format, times
from nvfp4_cute.ops.traced import refuse_gradients


def gemv(
    a: Any,
    b: Any,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    alpha: Any = None,
    *,
    a_format: BlockFormat = NVFP4,
    b_format: BlockFormat = NVFP4,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
) -> torch.Tensor:
    """Computes :func:`nvfp4_cute.gemv` of operands given as data and scales; without scales, of whole tensors.

    Without ``b_scale``, ``b`` holds 16-bit values (W4A16), whose sums are added in the order of ``gemm`` with 16-bit ``a``.

    Args:
        a, a_scale: as for ``parts.gemm``. b: [K/2] or [K/2, L]; batches a multiple of 16 bytes apart.
        b_scale: scales of b, laid out as those of a matrix with one row: [1, K/16(, L)] where row-major.

    Raises what the public operation raises. Nothing is written to ``out`` when a check fails.
    """
    if a_scale is None or b_scale is None:
        is_matrix = isinstance(b, BlockScaledTensor) and len(b.shape) == 3
        whole = a
        a, a_scale, factor_a, a_format, of_rows = batched_parts(a, a_scale, scale_layout, a_format)
        b, b_scale, factor_b, b_format, of_row = batched_parts(b, b_scale, scale_layout, b_format)
        check_rows_format("b", b, b_scale, b_format)
        if of_rows is not None:
            raise UnsupportedProblem(
                f"a is {list(whole.shape)} with a global scale per row; gemv multiplies weights by a vector: call "
                "gemm(a, b), whose a may have them"
            )
        b = b[0] if is_matrix else b
        alpha = times(alpha, factor_a, factor_b, None if of_row is None else of_row.reshape(-1))
    if private_api.is_traced():  # the custom op (ops.library) that a traced graph keeps
        alpha = one_number_on(alpha, a)
        refuse_gradients(a, b, a_scale, b_scale, alpha)
        out = products.new_result(a, None, out_dtype) if out is None else out
        torch.ops.nvfp4_cute.gemv_out(
            a, b, a_scale, b_scale, alpha, out, out_dtype, scale_layout, backend, a_format.name, b_format.name
        )
        return out
    is_weight_only = b_scale is None
    if alpha is not None:
        alpha = one_number_on(alpha, a)

    formats = a_format, b_format
    settings = ("gemv", is_weight_only, alpha is None, out_dtype, scale_layout, formats)
    inputs = [b, a, a_scale] if is_weight_only else [a, b, a_scale, b_scale]
    if alpha is not None:
        inputs.append(alpha)

    def check() -> tuple[Task, list[torch.Tensor]]:
        if b_scale is None:
            rows, names = None if out is None else out.unsqueeze(0), ("b", "a", "a_scale")
            product, result = products.check_weight_only(
                b.unsqueeze(0), a, a_scale, alpha, a_format, rows, names, out_dtype, scale_layout
            )
            return W4A16Task(product), [result[0] if out is None else out]
        if isinstance(b, torch.Tensor) and b.dtype in ACTIVATION_DTYPES:
            raise ValueError(
                f"b is {b.dtype} and has a b_scale; 16-bit b has none: pass b_scale=None, or quantize(b)"
            )
        product, result = products.check_gemv(
            a, b, a_scale, b_scale, alpha, formats, out, out_dtype, scale_layout
        )
        return GemvTask(product), [result]

    return call(backend, settings, inputs, [] if out is None else [out], check)[0]
