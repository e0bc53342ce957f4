"""Dense GEMM on parts: C = alpha * A @ B^T + bias, with block-scaled or 16-bit A, a batch in one launch."""

from typing import Any

import torch

from nvfp4_cute import backends, private_api
from nvfp4_cute.backends.calls import call
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_scaled import ScaleLayout
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.launch.simt import few_rows_task
from nvfp4_cute.launch.task import Task
from nvfp4_cute.launch.weight_only import product_task
from nvfp4_cute.operands import products
from nvfp4_cute.operands.numbers_on_device import one_number_on
from nvfp4_cute.operands.results import as_stored, flat_outputs, one_result
from nvfp4_cute.operands.row_scales import scaled_product
from nvfp4_cute.operands.rules import ACTIVATION_DTYPES, check_out_global_scale, check_result_of_pair
from nvfp4_cute.operands.whole import batched_parts, is_converted, operands_of, times
from nvfp4_cute.ops.options import DEFAULT, Options
from nvfp4_cute.ops.parts import dequantized
from nvfp4_cute.ops.traced import format_name, refuse_config, refuse_gradients, torch_dtype
from nvfp4_cute.problem import (
    RESULT_FORMATS,
    OutDtype,
    new_quantized_data,
    new_quantized_scale,
    result_format,
)


def gemm(
    a: Any,
    b: Any,
    alpha: Any = None,
    *,
    bias: torch.Tensor | None = None,
    out: Any = None,
    out_dtype: OutDtype = torch.bfloat16,
    out_global_scale: Any = None,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
    options: Options = DEFAULT,
) -> Any:
    """Computes :func:`nvfp4_cute.gemm` of whole tensors, or of ``Parts``: data with scales.

    Runs the grouped kernel of the GPU with one group per batch; a batch of any size has one set of tensor maps. Unless
    ``options`` have a config, few rows run elsewhere:

    - One row runs the kernel of ``gemv`` where that is faster (sm_90a).
    - Two to eight rows run a kernel of their own (``kernels/simt/few_rows.py``) where each of its CTAs, one per 32 rows of a
      batch's ``b``, has an SM to itself: N up to 4224 on an H200.

    Both document their order of summation, which depends on K alone, not on M, N, L or the GPU. Rows of 16-bit values
    are multiplied without quantizing them (W4A16): K is a multiple of 32, and a config is refused. Many such rows are
    multiplied by torch after a launch that dequantizes ``b`` where that is faster (``parts.dequantized``).

    Args:
        a, b: data [M, K/2] and [N, K/2], or [.., .., L], K-major; rows and batches a multiple of 16 bytes apart. Scales are
            128x4 blocked ([L, rm, rk, 32, 4, 4], the (32, 4, rm, 4, rk, L) view, and for one batch also
            [rm, rk, 32, 4, 4] or flat; not copied, batches one after the other), or [M, K/16(, L)] with
            ``scale_layout="rowmajor"`` (converted, which allocates). Float32 scales have rows: [M, K/128(, L)] for FP8_1x128,
            [ceil(N/128), K/128(, L)] for FP8_128x128, [M, 1(, L)] for INT8.
            Global scales per row of ``a`` are float32 [M] or [L, M].
        scale_layout, options: as for :func:`grouped_gemm`; all else as in the public operation.

    Raises what the public operation raises. Nothing is written to ``out`` when a check fails.
    """
    early_weights, config = options.prefetch_weights and not is_converted(scale_layout, b), options.config
    first, second, _ = operands_of(scale_layout, out_dtype, a, b, split=batched_parts)
    a, a_scale, a_format, row_scale, factor_a = first
    b, b_scale, b_format, _, factor_b = second
    if factor_a is not None or factor_b is not None:
        alpha = times(alpha, factor_a, factor_b)
    out_format = RESULT_FORMATS.get(out_dtype)
    if out_format is not None and a_scale is None:
        check_result_of_pair(out_dtype, None)
    if out_global_scale is not None:
        check_out_global_scale(out_dtype, out_global_scale)
    if config is not None and a_scale is None:
        raise UnsupportedProblem("config with 16-bit a: that kernel has nothing to configure; leave it out")
    if private_api.is_traced():  # the custom op (ops.library) that a traced graph keeps
        return _traced((a, b, a_scale, b_scale), alpha, row_scale, bias, out, out_dtype, out_global_scale, config,
                       (scale_layout, backend, a_format.name, b_format.name))  # fmt: skip
    if alpha is not None:
        alpha = products.for_batches(alpha, a)
    if out_global_scale is not None:
        out_global_scale = products.for_batches(out_global_scale, a, is_in_result=True)

    is_weight_only = a_scale is None
    if is_weight_only and dequantized.is_for_gemm(a, b, b_format, out_dtype, backend):
        if dequantized.is_plain(a, b, alpha, bias, b_format, out, out_dtype):
            how: Any = (b_format, out_dtype, scale_layout, backend)
            return dequantized.multiply_plain(a, b, b_scale, alpha, bias, *how)
        product, result = products.check_weight_only(
            a, b, b_scale, alpha, b_format, out, ("a", "b", "b_scale"), out_dtype, scale_layout, bias
        )
        dequantized.multiply(product, backend)
        return result
    inputs = [a, b, b_scale] if is_weight_only else [a, b, a_scale, b_scale]
    if row_scale is not None:
        inputs.append(row_scale)
    if alpha is not None:
        inputs.append(alpha)
    if bias is not None:
        inputs.append(bias)
    if out_global_scale is not None:
        inputs.append(out_global_scale)
    formats = a_format.name, b_format.name
    settings = (
        "gemm", is_weight_only, row_scale is None, alpha is None, bias is None, out_dtype, scale_layout, config, formats,
        early_weights,
    )  # fmt: skip

    def check() -> tuple[Task, list[torch.Tensor]]:
        if a_scale is None:
            product, result = products.check_weight_only(
                a, b, b_scale, alpha, b_format, out, ("a", "b", "b_scale"), out_dtype, scale_layout, bias
            )
            return product_task(product, backends.gpu_of(backend, a.device)), [result]
        if isinstance(a, torch.Tensor) and a.dtype in ACTIVATION_DTYPES:
            raise ValueError(
                f"a is {a.dtype} and has an a_scale; 16-bit a has none: pass a_scale=None, or quantize(a)"
            )
        product, results = products.check_gemm(
            first, second, alpha, bias, out, out_dtype, out_global_scale, scale_layout
        )
        if row_scale is not None:
            product = scaled_product(product, row_scale)
        task: Task | None = None
        if config is None and isinstance(out_dtype, torch.dtype):
            task = few_rows_task(product, backends.gpu_of(backend, a.device))
        if task is None:
            task = GroupedTask.of(*product.grouped(), config, early_weights, scale_layout)
        return task, results if out is not None else as_stored(results, out_format)

    given = [] if out is None else flat_outputs([out], out_format is not None)
    return one_result(call(backend, settings, inputs, given, check), out_format, out_global_scale)


def _traced(operands, alpha, row_scale, bias, out, out_dtype, global_scale, config, settings) -> Any:
    """Calls the custom op that a traced graph keeps; the graph allocates the result."""
    refuse_config(config)
    a, b = operands[:2]
    out_format, lead = result_format(out_dtype), (*a.shape[2:], a.shape[0])
    alpha, factor = (one_number_on(x, a) for x in (alpha, global_scale))
    if out is not None:
        outs = flat_outputs([out], out_format is not None)
    elif out_format is not None:
        outs = [
            new_quantized_data((*lead, b.shape[0]), a.device, out_format),
            new_quantized_scale(lead, b.shape[0], a.device, out_format),
        ]
    else:
        outs = [products.new_result(a, b.shape[0], out_dtype)]
    refuse_gradients(*operands, alpha, row_scale, bias, factor)
    torch.ops.nvfp4_cute.gemm_out(
        *operands,
        alpha,
        outs,
        torch_dtype(out_dtype),
        factor,
        *settings,
        bias,
        format_name(out_dtype),
        row_scale,
    )
    return one_result(outs, out_format, factor)
