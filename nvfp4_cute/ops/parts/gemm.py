"""gemm: C = alpha * A @ B^T + bias over block-scaled operands, or 16-bit A and block-scaled B; dense, a batch in one launch."""

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
    """Multiply block-scaled matrices: ``C[:, :, l] = alpha[l] * A[:, :, l] @ B[:, :, l]^T + bias``.

    The grouped kernel of the GPU with one group, or with a group a batch; a batch of any size has one set of tensor maps.
    Unless ``config`` is given, one row of ``a`` goes to the kernel of ``gemv`` where that is faster (sm_90a), and two to eight
    go to one of their own (``kernels/simt/few_rows.py``) where its CTAs, one for 32 rows of a batch's ``b``, have an SM each:
    N up to 4224 on an H200. In both the order of summation is documented and depends on K alone, not on M, N, L or the GPU.

    Weight-only (W4A16): where ``a`` is float16 or bfloat16 [M, K] or [M, K, L] and ``a_scale`` None, another kernel
    multiplies by ``b`` without quantizing ``a``, on every GPU from sm_90a on. It is made for few rows: every 32 of them
    read the weights anew. On sm_90a the kernel of ``grouped_gemm`` takes over where estimates say that it is faster, from 16 to
    33 rows on, if rows of ``out`` are contiguous; from about 512 rows on, bf16 weights are faster (``LinearNVFP4(pre_decode=
    True)``). Elsewhere quantize ``a`` of many rows, or decode the weights once. Here K is a multiple of 32, ``out`` may have
    any strides, and there is no ``config``. Of few rows the order of summation is documented (``kernels/simt/w4a16.py``) and
    depends on K alone.

    ``gemm(x, w)`` takes BlockScaledTensors whole, their scales left out: [M, K] or [L, M, K] (of 16-bit activations ``w``
    alone). Their global scales are factors of the result, beside ``alpha``, and multiplied on the device.

    Operands are NVFP4, or of the formats that whole tensors have, or ``a_format`` and ``b_format`` say: below, K/2 and K/16 are
    then K elements' bytes and blocks, and dtypes those of the format. README says which pairs have kernels on which GPU.

    Args:
        a: [M, K/2] or [M, K/2, L], uint8 or float4_e2m1fn_x2, K-major (stride 1 in K), two e2m1 values a byte, the low
            nibble first. K a multiple of 16; rows and batches a multiple of 16 bytes apart.
        b: [N, K/2] or [N, K/2, L], the same.
        a_scale: e4m3 scales of blocks of 16 along K (float8_e4m3fn or uint8): 128x4 blocked ([L, rm, rk, 32, 4, 4], the
            (32, 4, rm, 4, rk, L) view, and for one batch also [rm, rk, 32, 4, 4] or flat; zero-copy, batches one after the
            other), or [M, K/16(, L)] with ``scale_layout="rowmajor"`` (converted, which allocates). Padding rows may hold
            anything.
        b_scale: the same of b.
        alpha: a number, or float32 on the operands' device: [L], or one element (copied L times where L > 1).
        bias: contiguous float16, bfloat16 or float32 [N], whatever ``out_dtype`` is, of every row and batch. The launch adds it.
        a_format, b_format: what the parts of ``a`` and ``b`` stand for, such as ``nvfp4_cute.MXFP4``.
        out: [M, N] or [M, N, L], rows or columns contiguous, written in place, or quantized a BlockScaledTensor as it
            would be returned, its scales contiguous; None allocates.
        out_dtype: float16, bfloat16, float32, or "nvfp4", "mxfp4", "mxfp8_e4m3" or "mxfp8_e5m2": the result quantized for the
            next layer, as ``grouped_gemm`` does it, of FP8 "fp8_1x128". Of INT8 also int32: the sums of products of integers,
            exact; no scale is read, and both may be left out.
        out_global_scale: with "nvfp4": a number, or float32 of one element on the operands' device, for all batches.
        scale_layout: "blocked" or "rowmajor". Float32 scales always have rows: ``a_scale`` [M, K/128(, L)] of FP8_1x128,
            ``b_scale`` [ceil(N/128), K/128(, L)] of FP8_128x128, [M, 1(, L)] and [N, 1(, L)] of INT8.
            Scales whose rows are not contiguous are copied.
        early_weights, backend, config: as of ``grouped_gemm``.

    Returns:
        C, [M, N], or [M, N, L] where ``a`` has batches (batch after batch in memory). fp32 accumulation; alpha multiplies
        in fp32, then the bias is added in fp32, both rounded; one rounding to ``out_dtype``; all to nearest even. Quantized
        an NVFP4Tensor or a BlockScaledTensor of [M, N], or of [L, M, N]: the next call's ``a`` is its ``data.permute(1, 2, 0)``
        then, and ``a_scale`` its ``scale``.

    Example:
        >>> x, w = quantize(torch.randn(40, 512)), quantize(torch.randn(256, 512))
        >>> gemm(x.data, w.data, x.scale, w.scale).shape
        torch.Size([40, 256])
        >>> hidden = gemm(x.data, w.data, x.scale, w.scale, out_dtype="nvfp4")  # for the next layer
        >>> gemm(torch.randn(40, 512).half(), w.data, None, w.scale, out_dtype=torch.float16).shape  # weight-only
        torch.Size([40, 256])

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule; the message names rule, value and fix.
        UnsupportedProblem, too: no kernel for the pair of formats. UnsupportedTarget: no kernel for the GPU.
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
        """The task, and what it writes."""
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
    """The call as the custom op (``ops.library``) that a traced graph keeps; the graph allocates the result."""
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
