"""Weight-only products of many rows: one launch dequantizes the weights to 16 bits, then torch multiplies.

``planning.arch.dequantizes_first`` chooses between this way and weight-only kernels. A CUDA graph can capture both launches.
torch allocates the dequantized weights and frees them after the product. Batch-invariant calls always use kernels, because the
order of torch's sums depends on the number of rows.

Weights are dequantized in one of two ways:

- bfloat16 rows with bfloat16 results: every weight is rounded to bfloat16 once, with its block scale, global scale and
  ``alpha``. Kernels multiply the float32 sums by ``alpha`` instead, so results differ by about as much as they differ from
  exact ones.
- Other rows and results: weights are rounded with their block scales, and ``alpha`` multiplies float32 sums, as in kernels.
  Values times block scales of NVFP4, MXFP4 and MXFP8 are exact in 16 bits.

A bias is rounded to the dtype of 16-bit results before it is added to float32 sums.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch.torch_version import TorchVersion

from nvfp4_cute import backends
from nvfp4_cute.backends.calls import by_torch, call, outside_of_launches
from nvfp4_cute.batch_invariance import is_batch_invariant
from nvfp4_cute.compile.cache import is_planning
from nvfp4_cute.formats.block_format import FP32, BlockFormat
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, ScaleLayout, stored_scale_shape
from nvfp4_cute.launch.simt import DequantizeTask
from nvfp4_cute.launch.task import Task
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.operands.products import Product, check_weight_only
from nvfp4_cute.operands.rules import ACTIVATION_DTYPES
from nvfp4_cute.ops.dequantize import dequantize
from nvfp4_cute.planning.arch import dequantizes_first
from nvfp4_cute.planning.arch.dequantized import LEAST_ROWS
from nvfp4_cute.problem import OUT_DTYPES

# Architectures whose ``torch._grouped_mm`` reads the sizes of groups on the device, and torch's first release that does.
# On others it copies them to the host, which a CUDA graph cannot capture.
GROUPED_MM = {"sm_90a": "2.8", "sm_100a": "2.9", "sm_103a": "2.9"}
# torch's grouped product needs rows that begin at multiples of 16 bytes.
GROUPED_STEP = 8


def is_for_gemm(a: Any, b: Any, b_format: BlockFormat, out_dtype: Any, backend: str, num_b: int = 1) -> bool:
    """Returns whether ``gemm`` of 16-bit rows, or a dual GEMM with ``num_b=2``, dequantizes its weights first.

    Decides for few rows without looking up the GPU, because that costs host time.

    Args:
        a, b: [M, K] and the bytes of [N, K], or [.., .., L]; not yet checked.
        b_format: format of ``b``.
        out_dtype: dtype of the results.
        backend: see ``gemm``.
        num_b: number of weight operands, 1 or 2.
    """
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a.ndim < 2 or len(a) < LEAST_ROWS:
        return False
    if not _may_be(a, b, b_format, backend) or out_dtype not in (a.dtype, torch.float32):
        return False
    (m, k), batches = a.shape[:2], a.shape[2] if a.ndim > 2 else 1
    gpu = backends.gpu_of(backend, a.device)
    return dequantizes_first(gpu.arch, gpu.num_sms, m, len(b), k, batches, num_b, False, b_format)


def is_for_groups(a: Any, b: Any, b_format: BlockFormat, alpha: Any, out_dtype: Any, backend: str) -> bool:
    """Returns whether a ragged grouped product of 16-bit rows dequantizes its weights first.

    Args:
        a, b: [rows, K] and the bytes of [G, N, K]; not yet checked.
        b_format, out_dtype, backend: see :func:`is_for_gemm`.
        alpha: factors of the groups, or None.
    """
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a.ndim != 2 or b.ndim != 3:
        return False
    if len(a) < LEAST_ROWS or not _may_be(a, b, b_format, backend) or a.dtype != torch.bfloat16 != out_dtype:
        return False
    (rows, k), (groups, n, _) = a.shape, b.shape
    if _is_by_torch(b_format) or (alpha is not None and not b_format.has_global_scale):
        return False
    gpu = backends.gpu_of(backend, a.device)
    if k % GROUPED_STEP or n % GROUPED_STEP or not _has_grouped_mm(gpu.arch):
        return False
    return dequantizes_first(gpu.arch, gpu.num_sms, rows, n, k, groups, 1, True, b_format)


@cache
def _has_grouped_mm(arch: str) -> bool:
    """Returns whether torch's grouped product reads the sizes of groups on the device."""
    return arch in GROUPED_MM and torch.__version__ >= TorchVersion(GROUPED_MM[arch])


def _may_be(a: torch.Tensor, b: torch.Tensor, b_format: BlockFormat, backend: str) -> bool:
    is_served = a.dtype in ACTIVATION_DTYPES and b_format.order == "rows" and b.numel() > 0
    return is_served and not is_batch_invariant() and backends.resolve(backend, a.device) != "reference"


def is_plain(
    a: torch.Tensor, b: torch.Tensor, alpha: Any, bias: Any, b_format: BlockFormat, out: Any, out_dtype: Any
) -> bool:
    """Returns whether :func:`multiply_plain` multiplies these operands, for which :func:`is_for_gemm` holds.

    It multiplies a single batch with new results, while no gradients are recorded and autocast is off.

    Args:
        a, b, b_format, out_dtype: see :func:`is_for_gemm`.
        alpha, bias: see ``gemm``; not yet checked.
        out: the tensor to write, or None.
    """
    if out is not None or a.ndim != 2 or b.ndim != 2 or _is_by_torch(b_format):
        return False
    if alpha is not None and not (isinstance(alpha, torch.Tensor) and alpha.numel() == 1):
        return False
    if bias is not None and not (
        isinstance(bias, torch.Tensor)
        and bias.dtype in OUT_DTYPES
        and bias.shape == b.shape[:1]
        and bias.device == a.device
    ):
        return False
    is_recorded = torch.is_grad_enabled() and (a.requires_grad or (bias is not None and bias.requires_grad))
    return (
        a.shape[1] == b_format.elements(b.shape[1])
        and a.device == b.device
        and not is_recorded
        and not torch.is_autocast_enabled(a.device.type)
    )


def multiply_plain(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    b_format: BlockFormat,
    out_dtype: torch.dtype,
    scale_layout: ScaleLayout,
    backend: str,
) -> torch.Tensor:
    """Returns ``alpha * a @ b.T + bias`` of operands for which :func:`is_plain` holds.

    The launch that dequantizes is prepared for any number of rows (``backends.calls.call``), because servers call with a
    different one in each step.

    Args:
        a, b, b_scale, alpha, bias, b_format, out_dtype, scale_layout, backend: see ``gemm``.
    """
    is_rounded = out_dtype == a.dtype and (alpha is None or _folds(a.dtype, b_format))
    factor = alpha if is_rounded else None  # others multiply float32 sums

    def check() -> tuple[Task, list[torch.Tensor]]:
        product, _ = check_weight_only(
            a, b, b_scale, alpha, b_format, None, ("a", "b", "b_scale"), out_dtype, scale_layout, bias
        )
        weights = torch.empty((1, len(b), a.shape[1]), dtype=a.dtype, device=a.device)
        return DequantizeTask(_whole(product.b, product.alpha if is_rounded else None), weights), [weights]

    inputs = [b, b_scale] if factor is None else [b, b_scale, factor]
    settings = ("dequantized", b_format, a.dtype, scale_layout)
    (weights,) = call(backend, settings, inputs, [], check)
    if is_planning():
        outside_of_launches()
        return a.new_empty((len(a), len(b)), dtype=out_dtype)
    sums_in = None if is_rounded else out_dtype
    rest = (None if is_rounded else alpha, bias)
    made: Any = {"shape": (len(a), len(b)), "dtype": out_dtype}
    return by_torch(partial(_product, sums_in), a, weights, *rest, **made)


def _product(
    sums_in: torch.dtype | None,
    a: torch.Tensor,
    weights: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Returns ``alpha * a @ weights[0].T + bias``, also under autocast.

    sums_in: dtype of the result of float32 sums; None for a product in the dtype of ``a``.
    """
    if torch.is_autocast_enabled(a.device.type):
        with _as_it_is(a.device):
            return _product(sums_in, a, weights, alpha, bias)
    if sums_in is None:
        w = weights[0].t()
        return torch.mm(a, w) if bias is None else torch.addmm(bias.to(a.dtype), a, w)
    sums = _float32_sums(a[None], weights)[0]
    if alpha is not None:
        sums *= alpha.view(())
    if bias is not None:
        sums += bias
    return sums.to(sums_in)


def multiply(product: Product, backend: str) -> None:
    """Writes ``alpha * a @ b.T + bias`` to ``product.out``."""
    outside_of_launches()
    a, b, out, alpha, bias = product.a.data, product.b, product.out, product.alpha, product.bias
    is_rounded = out.dtype == a.dtype and (alpha is None or _folds(a.dtype, b.format))
    weights = _dequantized(b, alpha if is_rounded else None, a.dtype, backend)
    if is_planning():
        return
    with _as_it_is(a.device):
        if is_rounded and len(a) == 1:
            result = (
                out[0]
                if out[0].is_contiguous()
                else torch.empty_like(out[0], memory_format=torch.contiguous_format)
            )
            if bias is None:
                torch.mm(a[0], weights[0].t(), out=result)
            else:
                torch.addmm(bias.to(a.dtype), a[0], weights[0].t(), out=result)
            if result.data_ptr() != out.data_ptr():
                out[0].copy_(result)
            return
        sums = torch.bmm(a, weights.mT) if is_rounded and bias is None else _float32_sums(a, weights)
        if alpha is not None and not is_rounded:
            sums *= alpha.view(-1, 1, 1)
        if bias is not None:
            sums += bias
        out.copy_(sums)


def multiply_groups(
    a: torch.Tensor, b: Operand, alpha: torch.Tensor | None, offs: torch.Tensor, backend: str
) -> torch.Tensor:
    """Returns ``alpha[g] * a_g @ b_g.T`` of ragged bfloat16 rows, [rows, N]. Rows of no group may hold anything.

    Args:
        a: [rows, K].
        b: [G, N, K].
        alpha: float32 [G], or None.
        offs: int32 [G], the row where each group ends.
        backend: see ``gemm``; of the launch that dequantizes.
    """
    weights = _dequantized(b, alpha, a.dtype, backend)
    if is_planning():
        return a.new_empty((len(a), b.rows))
    return by_torch(_grouped_product, a, weights, offs, shape=(len(a), b.rows), dtype=a.dtype)


def _grouped_product(a: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Returns ``a_g @ weights[g].T`` for ragged groups, also under autocast."""
    if torch.is_autocast_enabled(a.device.type):
        with _as_it_is(a.device):
            return _grouped_product(a, weights, offs)
    return torch._grouped_mm(a, weights.mT, offs=offs)


def by_casts(t: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantizes FP8_128x128 or INT8 [..., N, K] without tables from the host, so that a CUDA graph can capture it."""
    rows, step = t.shape[-2], t.format.block_of(t.shape[-1])
    values = t.data.view(t.format.data_dtypes[-1]).float().unflatten(-1, (-1, step))
    of_rows = t.scale.unsqueeze(-2).expand(*t.scale.shape[:-1], t.format.block_rows, -1)
    of_rows = of_rows.flatten(-3, -2)[..., :rows, :]
    return (values * of_rows[..., None]).flatten(-2).to(dtype)


def _folds(dtype: torch.dtype, format: BlockFormat) -> bool:
    """Returns whether weights times any ``alpha`` are in the range of a dtype, so that ``alpha`` can be part of them."""
    return dtype == torch.bfloat16 and format.has_global_scale


def _is_by_torch(format: BlockFormat) -> bool:
    """Returns whether torch dequantizes a format, for which there is no kernel."""
    return format.scale == FP32 and not format.is_int4


def _dequantized(b: Operand, alpha: torch.Tensor | None, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """Returns the weights times ``alpha``, [L, N, K] in ``dtype``."""
    t = _whole(b, alpha)
    if _is_by_torch(b.format):
        outside_of_launches()
        return by_casts(t, dtype)
    return dequantize(t, dtype, backend=backend)


def _whole(b: Operand, alpha: torch.Tensor | None) -> BlockScaledTensor:
    """Returns the weights as one tensor [L, N, K] whose global scale is ``alpha``."""
    format, shape = b.format, (b.batches, b.rows, b.k)
    scales = stored_scale_shape(format, shape, format.scale_layout)
    data, scale = b.data.view(format.data_dtypes[-1]), b.scale.view(format.scale_dtypes[0]).reshape(scales)
    if alpha is not None:
        alpha = alpha.reshape(()) if alpha.numel() == 1 else alpha
    return BlockScaledTensor(
        data.view(b.batches, b.rows, -1), scale, alpha, shape, format.scale_layout, format=format
    )


def _float32_sums(a: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns ``a @ weights.mT`` in float32, [L, M, N]."""
    if not a.is_cuda:
        return a.float() @ weights.float().mT
    if len(a) > 1:
        return torch.bmm(a, weights.mT, out_dtype=torch.float32)
    return torch.mm(a[0], weights[0].t(), out_dtype=torch.float32)[None]


@contextmanager
def _as_it_is(device: torch.device) -> Iterator[None]:
    """Context manager in which torch's products keep their dtypes, also under autocast."""
    with torch.autocast(device.type, enabled=False), torch.no_grad():
        yield
