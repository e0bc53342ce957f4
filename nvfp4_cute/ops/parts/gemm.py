"""Dense GEMM on parts: C = alpha * A @ B^T + bias, with block-scaled or 16-bit A, a batch in one launch."""

from typing import Any

import torch

from nvfp4_cute import backends, private_api
from nvfp4_cute.backends.calls import call
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.formats.block_scaled import ScaleLayout
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.launch.simt import few_rows_task
from nvfp4_cute.launch.task import Task
from nvfp4_cute.launch.weight_only import product_task
from nvfp4_cute.operands import products
from nvfp4_cute.operands.numbers_on_device import one_number_on
from nvfp4_cute.operands.results import flat_outputs, one_result
from nvfp4_cute.operands.rules import ACTIVATION_DTYPES, check_out_global_scale, check_result_of_pair
from nvfp4_cute.operands.whole import (
    batched_parts,
    check_rows_format,
    early_weights_beside,
    scale_or_room,
    times,
)
from nvfp4_cute.ops.traced import format_name, refuse_config, refuse_gradients, torch_dtype
from nvfp4_cute.planning.config import KernelConfig, check_config
from nvfp4_cute.problem import (
    OutDtype,
    check_early_weights,
    new_quantized_data,
    new_quantized_scale,
    result_format,
)


def gemm(
    a: Any,
    b: Any,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    alpha: Any = None,
    *,
    bias: torch.Tensor | None = None,
    a_format: BlockFormat = NVFP4_FORMAT,
    b_format: BlockFormat = NVFP4_FORMAT,
    out: Any = None,
    out_dtype: OutDtype = torch.bfloat16,
    out_global_scale: Any = None,
    scale_layout: ScaleLayout = "blocked",
    early_weights: bool = False,
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> Any:
    """Multiplies block-scaled matrices: ``C[:, :, l] = alpha[l] * A[:, :, l] @ B[:, :, l]^T + bias``.

    Runs the grouped kernel of the GPU with one group per batch; a batch of any size has one set of tensor maps. Unless
    ``config`` is given, few rows run elsewhere:

    - One row runs the kernel of ``gemv`` where that is faster (sm_90a).
    - Two to eight rows run a kernel of their own (``kernels/simt/few_rows.py``) where each of its CTAs, one per 32 rows of a
      batch's ``b``, has an SM to itself: N up to 4224 on an H200.

    Both document their order of summation, which depends on K alone, not on M, N, L or the GPU.

    Weight-only (W4A16): with float16 or bfloat16 ``a`` [M, K] or [M, K, L] and ``a_scale=None``, another kernel multiplies
    ``a`` by ``b`` without quantizing it, on every GPU from sm_90a on. It is made for few rows and reads the weights once per 32
    rows. On sm_90a the kernel of ``grouped_gemm`` takes over, from 16 to 33 rows on, where estimates say that it is faster and
    rows of ``out`` are contiguous; from about 512 rows on, bf16 weights are faster (``LinearNVFP4(pre_decode=True)``). On other
    GPUs, quantize ``a`` if it has many rows, or dequantize the weights once. K is a multiple of 32, ``out`` may have any
    strides, and ``config`` is refused. For few rows the order of summation is documented (``kernels/simt/w4a16.py``) and
    depends on K alone.

    ``gemm(x, w)`` without scales takes whole BlockScaledTensors [M, K] or [L, M, K] (only ``w`` with 16-bit activations). Their
    global scales multiply the result, in addition to ``alpha``, on the device.

    Operands are NVFP4 unless ``a_format`` and ``b_format``, or whole tensors, say otherwise. For other formats, read K/2 below
    as the bytes of K elements, K/16 as the blocks of K elements, and the dtypes as those of the format. README says which pairs
    have kernels on which GPU.

    Args:
        a: [M, K/2] or [M, K/2, L], uint8 or float4_e2m1fn_x2, K-major (stride 1 in K), two e2m1 values per byte, the low nibble
            first. K a multiple of 16; rows and batches a multiple of 16 bytes apart.
        b: [N, K/2] or [N, K/2, L], in the same layout.
        a_scale: e4m3 scales of blocks of 16 along K (float8_e4m3fn or uint8). Either 128x4 blocked ([L, rm, rk, 32, 4, 4], the
            (32, 4, rm, 4, rk, L) view, and for one batch also [rm, rk, 32, 4, 4] or flat; not copied, batches one after the
            other), or [M, K/16(, L)] with ``scale_layout="rowmajor"`` (converted, which allocates). Padding rows may hold
            anything.
        b_scale: scales of b in the same layouts.
        alpha: a number, or float32 on the operands' device: [L], or one element (copied L times where L > 1).
        bias: contiguous float16, bfloat16 or float32 [N], whatever ``out_dtype`` is. The launch adds it to every row of every
            batch.
        a_format, b_format: formats of ``a`` and ``b``, such as ``nvfp4_cute.MXFP4``.
        out: [M, N] or [M, N, L], rows or columns contiguous, written in place. Quantized: a BlockScaledTensor shaped like the
            result, with contiguous scales. None allocates.
        out_dtype: float16, bfloat16, float32, or the name of a format for results quantized for the next layer, as in
            ``grouped_gemm``: "nvfp4", "mxfp4", "mxfp8_e4m3" or "mxfp8_e5m2"; for FP8 operands "fp8_1x128". For INT8 operands
            also int32, the exact sums of products; no scale is read, and both may be left out.
        out_global_scale: global scale of "nvfp4" results, for all batches: a number, or float32 with one element on the
            operands' device.
        scale_layout: "blocked" or "rowmajor". Float32 scales always have rows: ``a_scale`` [M, K/128(, L)] for FP8_1x128,
            ``b_scale`` [ceil(N/128), K/128(, L)] for FP8_128x128, [M, 1(, L)] and [N, 1(, L)] for INT8. Scales whose rows are
            not contiguous are copied.
        early_weights, backend, config: see ``grouped_gemm``.

    Returns:
        C: [M, N], or [M, N, L] where ``a`` has batches (batch after batch in memory). Accumulation is fp32; alpha, then the
            bias, are applied in fp32 with a rounding each; then C is rounded to ``out_dtype``. All roundings are to nearest
            even. Quantized: an NVFP4Tensor or BlockScaledTensor of [M, N] or [L, M, N]; the next call takes its
            ``data.permute(1, 2, 0)`` as ``a`` and its ``scale`` as ``a_scale``.

    Example:
        >>> x, w = quantize(torch.randn(40, 512)), quantize(torch.randn(256, 512))
        >>> gemm(x.data, w.data, x.scale, w.scale).shape
        torch.Size([40, 256])
        >>> hidden = gemm(x.data, w.data, x.scale, w.scale, out_dtype="nvfp4")  # for the next layer
        >>> gemm(torch.randn(40, 512).half(), w.data, None, w.scale, out_dtype=torch.float16).shape  # weight-only
        torch.Size([40, 256])

    Raises:
        TypeError, ValueError: an operand breaks a rule; the message names rule, value and fix.
        UnsupportedProblem: an operand breaks a rule, or the pair of formats has no kernel.
        UnsupportedTarget: the GPU has no kernel.
        ConfigError: ``config`` cannot be built.

    Nothing is written to ``out`` when a check fails.
    """
    if a_scale is None or b_scale is None:
        early_weights = early_weights_beside(early_weights, scale_layout, b)
        a, a_scale, factor_a, a_format = batched_parts(a, a_scale, scale_layout, a_format)
        check_rows_format("a", a, a_scale, a_format)
        b, b_scale, factor_b, b_format = batched_parts(b, b_scale, scale_layout, b_format)
        alpha = times(alpha, factor_a, factor_b)
        a_scale = scale_or_room(a_scale, a, out_dtype, a_format)
        b_scale = scale_or_room(b_scale, b, out_dtype, b_format)
    out_format = result_format(out_dtype)
    if out_format is not None and a_scale is None:
        check_result_of_pair(out_dtype, None)
    check_out_global_scale(out_dtype, out_global_scale)
    if config is not None and a_scale is None:
        raise UnsupportedProblem("config with 16-bit a: that kernel has nothing to configure; leave it out")
    if private_api.is_traced():  # the custom op (ops.library) that a traced graph keeps
        check_early_weights(early_weights)
        return _traced((a, b, a_scale, b_scale), alpha, bias, out, out_dtype, out_global_scale, config,
                       (scale_layout, backend, a_format.name, b_format.name))  # fmt: skip
    if alpha is not None:
        alpha = products.for_batches(alpha, a)
    if out_global_scale is not None:
        out_global_scale = products.for_batches(out_global_scale, a)

    is_weight_only = a_scale is None
    inputs = [a, b, b_scale] if is_weight_only else [a, b, a_scale, b_scale]
    if alpha is not None:
        inputs.append(alpha)
    if bias is not None:
        inputs.append(bias)
    if out_global_scale is not None:
        inputs.append(out_global_scale)
    formats = a_format, b_format
    settings = (
        "gemm", is_weight_only, alpha is None, bias is None, out_dtype, scale_layout, config, formats, early_weights,
    )  # fmt: skip

    def check() -> tuple[Task, list[torch.Tensor]]:
        check_early_weights(early_weights)
        if a_scale is None:
            product, result = products.check_weight_only(
                a, b, b_scale, alpha, b_format, out, ("a", "b", "b_scale"), out_dtype, scale_layout, bias
            )
            return product_task(product, backends.gpu_of(backend, a.device)), [result]
        if isinstance(a, torch.Tensor) and a.dtype in ACTIVATION_DTYPES:
            raise ValueError(
                f"a is {a.dtype} and has an a_scale; 16-bit a has none: pass a_scale=None, or quantize(a)"
            )
        check_config(config)
        product, results = products.check_gemm(
            a, b, a_scale, b_scale, alpha, bias, formats, out, out_dtype, out_global_scale, scale_layout
        )
        task: Task | None = None
        if config is None and isinstance(out_dtype, torch.dtype):
            task = few_rows_task(product, backends.gpu_of(backend, a.device))
        if task is None:
            task = GroupedTask.of(*product.grouped(), config, early_weights, scale_layout)
        return task, results

    given = [] if out is None else flat_outputs([out], out_format is not None)
    return one_result(call(backend, settings, inputs, given, check), out_format, out_global_scale)


def _traced(operands, alpha, bias, out, out_dtype, global_scale, config, settings) -> Any:
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
    refuse_gradients(*operands, alpha, bias, factor)
    torch.ops.nvfp4_cute.gemm_out(
        *operands, alpha, outs, torch_dtype(out_dtype), factor, *settings, bias, format_name(out_dtype)
    )
    return one_result(outs, out_format, factor)
