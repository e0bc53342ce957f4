"""Matrix-vector products on parts: c = alpha * A @ b with block-scaled A, a batch in one launch."""

from typing import Any

import torch

from nvfp4_cute import private_api
from nvfp4_cute.backends.calls import call
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, ScaleLayout
from nvfp4_cute.launch.simt import GemvTask, W4A16Task
from nvfp4_cute.launch.task import Task
from nvfp4_cute.operands import products
from nvfp4_cute.operands.numbers_on_device import one_number_on
from nvfp4_cute.operands.rules import ACTIVATION_DTYPES, check_formats
from nvfp4_cute.operands.whole import batched_parts, times
from nvfp4_cute.ops.traced import refuse_gradients


def gemv(
    a: Any,
    b: Any,
    alpha: Any = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
) -> torch.Tensor:
    """Computes :func:`nvfp4_cute.gemv` of whole tensors, or of ``Parts``: data with scales.

    Sums of 16-bit ``b`` (W4A16) are added in the order of ``gemm`` with 16-bit ``a``.

    Args:
        a: as for ``parts.gemm``.
        b: data [K/2] or [K/2, L]; batches a multiple of 16 bytes apart. Scales are laid out as those of a matrix with one row:
            [1, K/16(, L)] where row-major.

    Raises what the public operation raises. Nothing is written to ``out`` when a check fails.
    """
    is_matrix = isinstance(b, BlockScaledTensor) and len(b.shape) == 3
    rows, vector = batched_parts(a, scale_layout), batched_parts(b, scale_layout)
    if rows.row_scale is not None:
        raise UnsupportedProblem(
            f"a is {list(a.shape)} with a global scale per row; gemv multiplies weights by a vector: call "
            "gemm(a, b), whose a may have them"
        )
    a, a_scale, a_format, _, factor_a = rows
    b, b_scale, b_format, of_row, factor_b = vector
    if not (isinstance(a_format, BlockFormat) and isinstance(b_format, BlockFormat)):
        check_formats(a_format=a_format, b_format=b_format)
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

    formats = a_format.name, b_format.name
    settings = ("gemv", is_weight_only, alpha is None, out_dtype, scale_layout, formats)
    inputs = [b, a, a_scale] if is_weight_only else [a, b, a_scale, b_scale]
    if alpha is not None:
        inputs.append(alpha)

    def check() -> tuple[Task, list[torch.Tensor]]:
        if b_scale is None:
            result_rows, names = None if out is None else out.unsqueeze(0), ("b", "a", "a_scale")
            product, result = products.check_weight_only(
                b.unsqueeze(0), a, a_scale, alpha, a_format, result_rows, names, out_dtype, scale_layout
            )
            return W4A16Task(product), [result[0] if out is None else out]
        if isinstance(b, torch.Tensor) and b.dtype in ACTIVATION_DTYPES:
            raise ValueError(
                f"b is {b.dtype} and has a b_scale; 16-bit b has none: pass b_scale=None, or quantize(b)"
            )
        given = vector._replace(data=b)
        product, result = products.check_gemv(rows, given, alpha, out, out_dtype, scale_layout)
        return GemvTask(product), [result]

    return call(backend, settings, inputs, [] if out is None else [out], check)[0]
