"""Dual GEMMs as two products and torch operations.

For formats with float32 scales that have no fused kernel, and for many 16-bit rows, whose weights are dequantized first.

Such a call takes several launches and stores both products in float32.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from nvfp4_cute import backends
from nvfp4_cute.activation import activation_of
from nvfp4_cute.formats.block_format import BlockFormat, Formats
from nvfp4_cute.formats.block_scaled import ScaleLayout
from nvfp4_cute.operands.whole import Parts
from nvfp4_cute.ops.parts import dequantized
from nvfp4_cute.ops.parts.grouped_gemm import grouped_gemm
from nvfp4_cute.planning.arch import family_of, fp8, mmas_of
from nvfp4_cute.planning.arch.base import check_pair
from nvfp4_cute.problem import DualWeights, Gate
from nvfp4_cute.reference import activated


def is_composed(a_scale: Any, formats: Formats, backend: str, *operands: Any) -> bool:
    """Returns whether the two products are computed one after the other.

    They are where weights have float32 scales and the GPU has no dual kernel for them.

    Args:
        a_scale: None where ``a`` has 16-bit values.
        formats: formats of ``a`` and of the weights.
        backend: the operation's backend.
        operands: tensors or lists of tensors; the first tensor determines the device.
    """
    if formats[1].scale_layout != "rowmajor" or not (a_scale is None or formats in fp8.PAIRS):
        return False
    device = _first_tensor(*operands).device
    if backends.resolve(backend, device) == "reference":
        return False
    return a_scale is None or not is_fused(formats, backend, device)


def _first_tensor(*sides: Any) -> torch.Tensor:
    """Returns the first tensor among operands that are tensors or lists; an empty CPU tensor where there is none."""
    for side in sides:
        for tensor in side if isinstance(side, list | tuple) else (side,):
            if isinstance(tensor, torch.Tensor):
                return tensor
    return torch.empty(0)


def dequantizes_first(
    a: Any, b1: Any, b_format: BlockFormat, weight_layout: DualWeights, out_dtype: Any, backend: str
) -> bool:
    """Returns whether a product of 16-bit rows with both weights dequantizes them first (``parts.dequantized``).

    Args:
        a: the rows of one group.
        b1: weights of the gate, or of both.
        b_format, weight_layout, out_dtype, backend: see ``grouped_dual_gemm``.
    """
    if weight_layout not in ("separate", "concatenated"):
        return False
    num_b = 2 if weight_layout == "separate" else 1
    return dequantized.is_for_gemm(a, b1, b_format, out_dtype, backend, num_b)


def is_fused(
    formats: Formats, backend: str, device: torch.device, out_format: BlockFormat | None = None
) -> bool:
    """Returns whether one launch computes both products of these formats and their activation.

    out_format: format of quantized results; None for other results.
    """
    if backends.resolve(backend, device) == "reference":
        return False
    return _has_dual_kernel(backends.gpu_of(backend, device).arch, formats, out_format)


@lru_cache
def _has_dual_kernel(arch: str, formats: Formats, out_format: BlockFormat | None) -> bool:
    """Looks for a kernel with two weight operands. Raises as ``family_of`` and ``check_pair`` do."""
    check_pair(arch, formats, mmas_of(arch))
    return bool(family_of(arch, formats).candidates(num_b=2, out_format=out_format, formats=formats))


def compute(
    operands: tuple[Parts, Parts, Parts],
    alphas: tuple[Any, Any],
    sizes: tuple[torch.Tensor | None, torch.Tensor | None],
    gate: Gate,
    outs: Sequence[torch.Tensor],
    **options: Any,
) -> None:
    """Computes the results from checked operands and writes them to ``outs``.

    Args:
        operands: rows, weights of the gate or of both, and weights of up.
        alphas: factors of both products.
        sizes: ``offs`` and ``masked_m``. Rows of no group keep their values.
        gate: the activation and the layout of the weights, which is not interleaved.
        outs: one tensor per group, or one for all.
        options: arguments passed on to ``grouped_gemm``.

    Raises what ``grouped_gemm`` raises, before anything is written.
    """
    a, *weights = (x._replace(global_scale=None) for x in operands)  # factors of ``alphas``
    if gate.weight_layout == "concatenated":
        b = weights[0]
        scales = _halves(b.scale, _row_dimension(b, options["scale_layout"]))
        weights = [b._replace(data=x, scale=s) for x, s in zip(_halves(b.data), scales, strict=True)]
    offs, masked_m = sizes
    gates, ups = (
        grouped_gemm(a, b, offs, alpha, masked_m=masked_m, out_dtype=torch.float32, **options)
        for b, alpha in zip(weights, alphas, strict=True)
    )
    activation = activation_of(gate.activation, gate.limit)
    for out, one, other in zip(outs, _listed(gates), _listed(ups), strict=True):
        result = activated(one, other, activation).to(out.dtype)
        row = torch.arange(out.shape[-2], device=out.device)
        if offs is not None:
            result = torch.where((row < offs[-1])[:, None], result, out)
        elif masked_m is not None:
            result = torch.where((row < masked_m[:, None])[..., None], result, out)
        out.copy_(result)


def _row_dimension(b: Parts, scale_layout: ScaleLayout) -> int:
    """Returns the dimension of rows in scales of weights; for blocked scales of lists, that of atoms along the rows."""
    if b.format.scale_layout != "blocked" or scale_layout != "blocked":
        return -2
    shape = b.scale[0].shape
    if len(shape) == 6:
        return 2 if shape[0] == 32 else 1
    return 0


def _halves(side: Any, dimension: int = -2) -> tuple[Any, Any]:
    """Splits weights or scales into the rows of the gate and those of the up projection; a list element by element."""
    if isinstance(side, torch.Tensor):
        first, second = side.chunk(2, dimension)
        return first, second
    halves = [_halves(tensor, dimension) for tensor in side]
    return [first for first, _ in halves], [second for _, second in halves]


def _listed(result: Any) -> Sequence[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else result
