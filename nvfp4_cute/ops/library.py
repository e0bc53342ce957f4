"""The operations as ``torch.library`` custom ops, through which ``torch.compile`` calls them without looking inside.

A graph that is being traced calls these; everything else calls the functions. An op that allocates has a fake
implementation, which gives shape, dtype and strides of its result. None has a backward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import custom_op

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.ops.device_groups import new_device_results
from nvfp4_cute.ops.dual_gemm import grouped_dual_gemm as eager_grouped_dual_gemm
from nvfp4_cute.ops.gemm import gemm as eager_gemm
from nvfp4_cute.ops.gemv import gemv as eager_gemv
from nvfp4_cute.ops.grouped_gemm import grouped_gemm as eager_grouped_gemm
from nvfp4_cute.ops.quantize import quantize as eager_quantize
from nvfp4_cute.ops.results import as_results
from nvfp4_cute.problem import NVFP4, new_quantized_data, new_quantized_scale
from nvfp4_cute.scale_layout import ATOM_SHAPE, atom_counts, num_k_blocks

Tensors = list[torch.Tensor]
# A schema says str where these want a literal.
_gemm: Callable[..., Any] = eager_gemm
_gemv: Callable[..., torch.Tensor] = eager_gemv
_grouped_dual_gemm: Callable[..., Any] = eager_grouped_dual_gemm
_grouped_gemm: Callable[..., Any] = eager_grouped_gemm
_quantize: Callable[..., Any] = eager_quantize


@custom_op("nvfp4_cute::grouped_gemm", mutates_args=())
def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offs: torch.Tensor | None,
    alpha: torch.Tensor | None,
    masked_m: torch.Tensor | None,
    out_dtype: torch.dtype,
    scale_layout: str,
    backend: str,
) -> torch.Tensor:
    """Ragged or masked form, as ``nvfp4_cute.grouped_gemm``."""
    return _grouped_gemm(
        a, b, a_scale, b_scale, offs, alpha, masked_m=masked_m, out_dtype=out_dtype,
        scale_layout=scale_layout, backend=backend,
    )  # fmt: skip


@grouped_gemm.register_fake
def _(a, b, a_scale, b_scale, offs, alpha, masked_m, out_dtype, scale_layout, backend):
    return a.new_empty((*a.shape[:-1], b.shape[1]), dtype=out_dtype)


@custom_op("nvfp4_cute::grouped_gemm_out", mutates_args=("out",))
def grouped_gemm_out(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offs: torch.Tensor | None,
    alpha: torch.Tensor | None,
    masked_m: torch.Tensor | None,
    out: torch.Tensor,
    out_dtype: torch.dtype,
    scale_layout: str,
    backend: str,
) -> None:
    """Ragged or masked form that writes ``out``."""
    _grouped_gemm(
        a, b, a_scale, b_scale, offs, alpha, masked_m=masked_m, out=out, out_dtype=out_dtype,
        scale_layout=scale_layout, backend=backend,
    )  # fmt: skip


@custom_op("nvfp4_cute::grouped_gemm_list", mutates_args=())
def grouped_gemm_list(
    a: Tensors,
    b: Tensors,
    a_scale: Tensors,
    b_scale: Tensors,
    alpha: torch.Tensor | None,
    out_dtype: torch.dtype,
    scale_layout: str,
    backend: str,
) -> Tensors:
    """List form, as ``nvfp4_cute.grouped_gemm``, but for the results' memory: those of a custom op share none."""
    out = _new_list(a, b, out_dtype)
    _grouped_gemm(
        a, b, a_scale, b_scale, None, alpha, out=out, out_dtype=out_dtype, scale_layout=scale_layout,
        backend=backend,
    )  # fmt: skip
    return out


@grouped_gemm_list.register_fake
def _(a, b, a_scale, b_scale, alpha, out_dtype, scale_layout, backend):
    return _new_list(a, b, out_dtype)


def _new_list(a, b, out_dtype):
    return [x.new_empty((x.shape[0], y.shape[0]), dtype=out_dtype) for x, y in zip(a, b, strict=True)]


@custom_op("nvfp4_cute::grouped_gemm_nvfp4", mutates_args=())
def grouped_gemm_nvfp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offs: torch.Tensor | None,
    alpha: torch.Tensor | None,
    masked_m: torch.Tensor | None,
    out_global_scale: torch.Tensor | None,
    scale_layout: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged or masked form with NVFP4 results."""
    return _grouped_gemm(
        a, b, a_scale, b_scale, offs, alpha, masked_m=masked_m, out_dtype=NVFP4,
        out_global_scale=out_global_scale, scale_layout=scale_layout, backend=backend,
    )  # fmt: skip


@grouped_gemm_nvfp4.register_fake
def _(a, b, a_scale, b_scale, offs, alpha, masked_m, out_global_scale, scale_layout, backend):
    data, scale = new_device_results((*a.shape[:-1], b.shape[1]), b.shape[0], masked_m is None, a.device)
    return data, scale.view(torch.float8_e4m3fn)


@custom_op("nvfp4_cute::grouped_gemm_list_nvfp4", mutates_args=())
def grouped_gemm_list_nvfp4(
    a: Tensors,
    b: Tensors,
    a_scale: Tensors,
    b_scale: Tensors,
    alpha: torch.Tensor | None,
    out_global_scale: torch.Tensor | None,
    scale_layout: str,
    backend: str,
) -> Tensors:
    """List form with NVFP4 results: all data, then all scales."""
    outs = _new_quantized_list(a, b)
    _grouped_gemm(
        a, b, a_scale, b_scale, None, alpha, out=as_results(outs, True, True, None), out_dtype=NVFP4,
        out_global_scale=out_global_scale, scale_layout=scale_layout, backend=backend,
    )  # fmt: skip
    return outs


@grouped_gemm_list_nvfp4.register_fake
def _(a, b, a_scale, b_scale, alpha, out_global_scale, scale_layout, backend):
    return _new_quantized_list(a, b)


def _new_quantized_list(a, b):
    results = [_new_quantized(x.shape[:1], y.shape[0], x.device) for x, y in zip(a, b, strict=True)]
    return [data for data, _ in results] + [scale for _, scale in results]


@custom_op("nvfp4_cute::grouped_dual_gemm_out", mutates_args=("out",))
def grouped_dual_gemm_out(
    operands: Tensors,
    num_groups: int | None,
    alpha1: torch.Tensor | None,
    alpha2: torch.Tensor | None,
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
) -> None:
    """Every form of ``nvfp4_cute.grouped_dual_gemm``; the caller allocates.

    Args:
        operands: a, b1, a_scale, b1_scale, and b2 and b2_scale where weights are separate; of the list form every group's.
        num_groups: of the list form; None otherwise.
        out: all results, or all data, then all scales, of NVFP4 ones.
        out_dtype: None is NVFP4.
    """
    given: list[Any] = operands
    if num_groups is not None:
        given = [operands[i : i + num_groups] for i in range(0, len(operands), num_groups)]
    a, b1, a_scale, b1_scale, *second = given
    b2, b2_scale = second or (None, None)
    _grouped_dual_gemm(
        a, b1, b2, a_scale, b1_scale, b2_scale, alpha1, alpha2, offs=offs, masked_m=masked_m, activation=activation,
        limit=limit, weight_layout=weight_layout, out=as_results(out, num_groups is not None, out_dtype is None, None),
        out_dtype=out_dtype or NVFP4, out_global_scale=out_global_scale, scale_layout=scale_layout, backend=backend,
    )  # fmt: skip


@custom_op("nvfp4_cute::grouped_gemm_list_out", mutates_args=("out",))
def grouped_gemm_list_out(
    a: Tensors,
    b: Tensors,
    a_scale: Tensors,
    b_scale: Tensors,
    alpha: torch.Tensor | None,
    out: Tensors,
    out_dtype: torch.dtype,
    scale_layout: str,
    backend: str,
) -> None:
    """List form that writes ``out``."""
    _grouped_gemm(
        a, b, a_scale, b_scale, None, alpha, out=out, out_dtype=out_dtype, scale_layout=scale_layout,
        backend=backend,
    )  # fmt: skip


@custom_op("nvfp4_cute::gemm", mutates_args=())
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    out_dtype: torch.dtype,
    scale_layout: str,
    backend: str,
) -> torch.Tensor:
    """As ``nvfp4_cute.gemm``."""
    return _gemm(
        a, b, a_scale, b_scale, alpha, out_dtype=out_dtype, scale_layout=scale_layout, backend=backend
    )


@gemm.register_fake
def _(a, b, a_scale, b_scale, alpha, out_dtype, scale_layout, backend):
    result = a.new_empty((*a.shape[2:], a.shape[0], b.shape[0]), dtype=out_dtype)
    return result if a.ndim == 2 else result.permute(1, 2, 0)


@custom_op("nvfp4_cute::gemm_nvfp4", mutates_args=())
def gemm_nvfp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    out_global_scale: torch.Tensor | None,
    scale_layout: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gemm with an NVFP4 result: data and scales."""
    result = _gemm(
        a, b, a_scale, b_scale, alpha, out_dtype=NVFP4, out_global_scale=out_global_scale,
        scale_layout=scale_layout, backend=backend,
    )  # fmt: skip
    return result.data, result.scale


@gemm_nvfp4.register_fake
def _(a, b, a_scale, b_scale, alpha, out_global_scale, scale_layout, backend):
    return _new_quantized((*a.shape[2:], a.shape[0]), b.shape[0], a.device)


def _new_quantized(lead, n, device):
    return new_quantized_data((*lead, n), device), new_quantized_scale(lead, n, device).view(
        torch.float8_e4m3fn
    )


@custom_op("nvfp4_cute::gemm_out", mutates_args=("out",))
def gemm_out(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    out: torch.Tensor,
    out_dtype: torch.dtype,
    scale_layout: str,
    backend: str,
) -> None:
    """Gemm that writes ``out``."""
    _gemm(
        a, b, a_scale, b_scale, alpha, out=out, out_dtype=out_dtype, scale_layout=scale_layout, backend=backend
    )  # fmt: skip


@custom_op("nvfp4_cute::gemv", mutates_args=())
def gemv(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor | None,
    alpha: torch.Tensor | None,
    out_dtype: torch.dtype,
    scale_layout: str,
    backend: str,
) -> torch.Tensor:
    """As ``nvfp4_cute.gemv``."""
    return _gemv(
        a, b, a_scale, b_scale, alpha, out_dtype=out_dtype, scale_layout=scale_layout, backend=backend
    )


@gemv.register_fake
def _(a, b, a_scale, b_scale, alpha, out_dtype, scale_layout, backend):
    if a.ndim == 2:
        return a.new_empty((a.shape[0],), dtype=out_dtype)
    return a.new_empty((a.shape[2], a.shape[0]), dtype=out_dtype).t()


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
) -> None:
    """Gemv that writes ``out``."""
    _gemv(
        a,
        b,
        a_scale,
        b_scale,
        alpha,
        out=out,
        out_dtype=out_dtype,
        scale_layout=scale_layout,
        backend=backend,
    )


@custom_op("nvfp4_cute::quantize", mutates_args=())
def quantize(
    x: torch.Tensor,
    up: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    scale_layout: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales of ``nvfp4_cute.quantize``."""
    result = _quantize(x, up=up, global_scale=global_scale, scale_layout=scale_layout, backend=backend)
    return result.data, result.scale


@quantize.register_fake
def _(x, up, global_scale, scale_layout, backend):
    *lead, k = x.shape
    shape = (*lead, num_k_blocks(k))
    if scale_layout == "blocked":
        *batches, rows = lead or (1,)
        shape = (*batches, *atom_counts(rows, num_k_blocks(k)), *ATOM_SHAPE)
    data = x.new_empty((*lead, k // 2), dtype=torch.uint8)
    return data, x.new_empty(shape, dtype=torch.float8_e4m3fn)


def _refuse_backward(context, *gradients):
    raise UnsupportedProblem("there is no backward pass: pass .detach() or use torch.no_grad()")


for _op in (
    grouped_gemm,
    grouped_gemm_nvfp4,
    grouped_gemm_list,
    grouped_gemm_list_nvfp4,
    gemm,
    gemm_nvfp4,
    gemv,
    quantize,
):
    _op.register_autograd(_refuse_backward)
