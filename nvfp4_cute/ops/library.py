"""The operations as ``torch.library`` custom ops, so that ``torch.compile`` calls them without tracing into them.

Only a graph that is being traced calls these; everything else calls the functions directly. Most of them write tensors that the
graph allocates (``ops.traced``). The quantizing ones allocate their results, and their fake implementations give shapes and
dtypes. None has a backward pass.

``import nvfp4_cute`` registers them, because a graph loaded from a file refers to them by name. The first call imports the code
that runs them, which takes several times as long as the registration.
"""

from typing import Any

import torch

from nvfp4_cute.custom_ops import Operation, custom_op, refuse_backward
from nvfp4_cute.formats.block_format import NVFP4, BlockFormat, format_named, torch_dtypes

Tensors = list[torch.Tensor]


@custom_op("nvfp4_cute::grouped_gemm_out", mutates_args=("out",))
def grouped_gemm_out(
    operands: Tensors,
    num_groups: int | None,
    offs: torch.Tensor | None,
    masked_m: torch.Tensor | None,
    alpha: torch.Tensor | None,
    row_scale: Tensors,
    out: Tensors,
    out_dtype: torch.dtype | None,
    out_global_scale: torch.Tensor | None,
    scale_layout: str,
    backend: str,
    a_format: str = "nvfp4",
    b_format: str = "nvfp4",
    out_format: str | None = "nvfp4",
) -> None:
    """Runs any form of ``nvfp4_cute.grouped_gemm`` and writes ``out``.

    Args:
        operands: a, b, a_scale and b_scale, without a_scale where ``a`` has 16 bits. In list form: each operand's groups, one
            operand after the other.
        num_groups: number of groups in list form; None otherwise.
        row_scale: global scales per row of ``a``, one tensor for all groups or one per group; none where rows have none.
        out: all results. Quantized results: the data of all, then the scales of all.
        out_dtype: None for results in ``out_format``.
    """
    from nvfp4_cute.operands.results import as_results
    from nvfp4_cute.operands.whole import Parts
    from nvfp4_cute.ops.parts.grouped_gemm import grouped_gemm
    from nvfp4_cute.problem import result_format

    run: Operation = grouped_gemm
    a, b, a_scale, b_scale = _with_a_scale(_by_operand(operands, num_groups))
    wanted = out_dtype or out_format
    run(
        Parts(a, a_scale, format_named(a_format), _of_groups(row_scale, num_groups)),
        Parts(b, b_scale, format_named(b_format)), offs, alpha, masked_m=masked_m,
        out=as_results(out, num_groups is not None, result_format(wanted), None), out_dtype=wanted,
        out_global_scale=out_global_scale, scale_layout=scale_layout, backend=backend,
    )  # fmt: skip


@custom_op("nvfp4_cute::grouped_dual_gemm_out", mutates_args=("out",))
def grouped_dual_gemm_out(
    operands: Tensors,
    num_groups: int | None,
    alpha1: torch.Tensor | None,
    alpha2: torch.Tensor | None,
    row_scale: Tensors,
    offs: torch.Tensor | None,
    masked_m: torch.Tensor | None,
    activation: str,
    limit: float | None,
    weight_layout: str,
    out: Tensors,
    out_dtype: torch.dtype | None,
    out_global_scale: torch.Tensor | None,
    scale_layout: str,
    backend: str,
    a_format: str = "nvfp4",
    b_format: str = "nvfp4",
    out_format: str | None = "nvfp4",
) -> None:
    """Runs any form of ``nvfp4_cute.grouped_dual_gemm`` and writes ``out``.

    Args:
        operands: a, b1, a_scale and b1_scale, then b2 and b2_scale where the weights are separate; without a_scale where ``a``
            has 16 bits. In list form: each operand's groups, one operand after the other.
        num_groups, row_scale, out, out_dtype: see :func:`grouped_gemm_out`.
    """
    from nvfp4_cute.operands.results import as_results
    from nvfp4_cute.operands.whole import Parts
    from nvfp4_cute.ops.parts.dual_gemm import gate_up, grouped_dual_gemm
    from nvfp4_cute.problem import result_format

    run: Operation = grouped_dual_gemm
    a, b1, a_scale, b1_scale, *second = _with_a_scale(_by_operand(operands, num_groups))
    wanted, format = out_dtype or out_format, format_named(b_format)
    up = Parts(second[0], second[1], format) if second else None
    w = gate_up(Parts(b1, b1_scale, format), up, weight_layout, alpha1, alpha2)
    run(
        Parts(a, a_scale, format_named(a_format), _of_groups(row_scale, num_groups)),
        w, offs, masked_m=masked_m, activation=activation, limit=limit,
        out=as_results(out, num_groups is not None, result_format(wanted), None), out_dtype=wanted,
        out_global_scale=out_global_scale, scale_layout=scale_layout, backend=backend,
    )  # fmt: skip


def _by_operand(operands: Tensors, num_groups: int | None) -> list[Any]:
    """Splits a flat list into one list per operand in list form; returns other forms unchanged."""
    if num_groups is None:
        return [*operands]
    return [operands[i : i + num_groups] for i in range(0, len(operands), num_groups)]


def _of_groups(row_scale: Tensors, num_groups: int | None) -> Any:
    """Returns the list of a list form's global scales, the only tensor of other forms, or None."""
    return (row_scale if num_groups is not None else row_scale[0]) if row_scale else None


def _with_a_scale(operands: list[Any]) -> list[Any]:
    """Inserts None for the missing scale of 16-bit ``a``; all other operands have one."""
    return [*operands[:2], None, *operands[2:]] if len(operands) % 2 else operands


@custom_op("nvfp4_cute::gemm_out", mutates_args=("out",))
def gemm_out(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    out: Tensors,
    out_dtype: torch.dtype | None,
    out_global_scale: torch.Tensor | None,
    scale_layout: str,
    backend: str,
    a_format: str = "nvfp4",
    b_format: str = "nvfp4",
    bias: torch.Tensor | None = None,
    out_format: str | None = "nvfp4",
    row_scale: torch.Tensor | None = None,
) -> None:
    """Runs ``nvfp4_cute.gemm`` and writes ``out``: the result, or data and scale where ``out_dtype`` is None."""
    from nvfp4_cute.operands.results import as_results
    from nvfp4_cute.operands.whole import Parts
    from nvfp4_cute.ops.parts.gemm import gemm
    from nvfp4_cute.problem import result_format

    run: Operation = gemm
    wanted = out_dtype or out_format
    run(
        Parts(a, a_scale, format_named(a_format), row_scale), Parts(b, b_scale, format_named(b_format)), alpha, bias=bias,
        out=as_results(out, True, result_format(wanted), None)[0], out_dtype=wanted,
        out_global_scale=out_global_scale, scale_layout=scale_layout, backend=backend,
    )  # fmt: skip


@custom_op("nvfp4_cute::gemv_out", mutates_args=("out",))
def gemv_out(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor | None,
    alpha: torch.Tensor | None,
    out: torch.Tensor,
    out_dtype: torch.dtype,
    scale_layout: str,
    backend: str,
    a_format: str = "nvfp4",
    b_format: str = "nvfp4",
) -> None:
    """Runs ``nvfp4_cute.gemv`` and writes ``out``."""
    from nvfp4_cute.operands.whole import Parts
    from nvfp4_cute.ops.parts.gemv import gemv

    run: Operation = gemv
    run(
        Parts(a, a_scale, format_named(a_format)), Parts(b, b_scale, format_named(b_format)), alpha,
        out=out, out_dtype=out_dtype, scale_layout=scale_layout, backend=backend,
    )  # fmt: skip


@custom_op("nvfp4_cute::quantize", mutates_args=())
def quantize(
    x: torch.Tensor,
    up: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    scale_layout: str,
    format: str,
    scale_rounding: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs ``nvfp4_cute.quantize`` and returns data and scales."""
    from nvfp4_cute.ops.quantize import quantize as eager

    run: Operation = eager
    result = run(
        x,
        format=format_named(format),
        up=up,
        global_scale=global_scale,
        scale_layout=scale_layout,
        scale_rounding=scale_rounding,
        backend=backend,
    )
    return result.data, result.scale


@quantize.register_fake
def _(x, up, global_scale, scale_layout, format, scale_rounding, backend):
    from nvfp4_cute.formats.block_scaled import stored_scale_shape

    record = format_named(format)
    return _new_quantized(x, record, stored_scale_shape(record, tuple(x.shape), scale_layout))


def _new_quantized(
    x: torch.Tensor, format: BlockFormat, scale_shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates data and scales for quantized ``x``."""
    *lead, k = x.shape
    data_dtype, scale_dtype = torch_dtypes((format.element.quantized_dtype, format.scale.quantized_dtype))
    data = x.new_empty((*lead, format.row_bytes(k)), dtype=data_dtype)
    return data, x.new_empty(scale_shape, dtype=scale_dtype)


@custom_op("nvfp4_cute::grouped_quantize", mutates_args=())
def grouped_quantize(
    x: torch.Tensor,
    offs: torch.Tensor,
    format: str,
    up: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    scale_rounding: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs ``nvfp4_cute.grouped_quantize`` and returns data and scales."""
    from nvfp4_cute.ops.quantize import grouped_quantize_parts as eager

    run: Operation = eager
    return run(
        x, offs, format=format_named(format), up=up, global_scale=global_scale, scale_rounding=scale_rounding,
        backend=backend,
    )  # fmt: skip


@grouped_quantize.register_fake
def _(x, offs, format, up, global_scale, scale_rounding, backend):
    record = format_named(format)
    rows, k = x.shape
    return _new_quantized(x, record, record.ragged_scale_shape(rows, k, offs.shape[0]))


@custom_op("nvfp4_cute::quantize_scaled_rows", mutates_args=())
def quantize_scaled_rows(
    x: torch.Tensor,
    up: torch.Tensor | None,
    offs: torch.Tensor | None,
    scale_layout: str,
    format: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs ``nvfp4_cute.quantize``, or ``grouped_quantize`` with ``offs``; returns data, scales, and global scales per row."""
    from nvfp4_cute.ops.quantize import grouped_quantize
    from nvfp4_cute.ops.quantize import quantize as eager

    run: Operation = eager if offs is None else grouped_quantize
    how: dict[str, Any] = {"scale_layout": scale_layout} if offs is None else {"offs": offs}
    made = run(x, format=format_named(format), up=up, global_scale="per_row", backend=backend, **how)
    return made.data, made.scale, made.global_scale


@quantize_scaled_rows.register_fake
def _(x, up, offs, scale_layout, format, backend):
    from nvfp4_cute.formats.block_scaled import stored_scale_shape

    record = format_named(format)
    if offs is None:
        shape = stored_scale_shape(record, tuple(x.shape), scale_layout)
    else:
        shape = record.ragged_scale_shape(x.shape[0], x.shape[1], offs.shape[0])
    rows = x.shape[:-1] if offs is None else (x.shape[0], 1)
    return *_new_quantized(x, record, shape), x.new_empty(rows, dtype=torch.float32)


@custom_op("nvfp4_cute::gemm_chain", mutates_args=())
def gemm_chain(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor,
    out_global_scale: torch.Tensor,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs ``ops.gemm_chain`` in a workspace of its own and returns data and scales."""
    from nvfp4_cute.ops.gemm_chain import ChainWorkspace
    from nvfp4_cute.ops.gemm_chain import gemm_chain as eager

    workspace = ChainWorkspace.make(b.shape[0], a.shape[0], b.shape[1], a.device)
    result = eager(a, b, a_scale, b_scale, alpha, out_global_scale, workspace, backend=backend)
    return result.data, result.scale


@gemm_chain.register_fake
def _(a, b, a_scale, b_scale, alpha, out_global_scale, backend):
    rows, n = a.shape[0], b.shape[1]
    data = a.new_empty((rows, NVFP4.pitch_bytes(n)), dtype=torch.uint8)[:, : NVFP4.row_bytes(n)]
    return data, a.new_empty(NVFP4.scale_shape(rows, n), dtype=torch.float8_e4m3fn)


for _op in (quantize, grouped_quantize, quantize_scaled_rows, gemm_chain):
    _op.register_autograd(refuse_backward)
