"""Dual GEMMs in formats with float32 scales that have no fused kernel: two products, then torch operations.

Such a call takes several launches and stores both products in float32.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from nvfp4_cute import backends
from nvfp4_cute.formats.block_format import BlockFormat, Formats
from nvfp4_cute.ops.parts.grouped_gemm import grouped_gemm
from nvfp4_cute.planning.arch import family_of, fp8, mmas_of
from nvfp4_cute.planning.arch.base import check_pair
from nvfp4_cute.problem import Gate
from nvfp4_cute.reference import ACTIVATIONS


def is_composed(a_scale: Any, formats: Formats, backend: str, device: torch.device) -> bool:
    """Returns whether the two products are computed one after the other.

    They are where weights have float32 scales and the GPU has no dual kernel for them.

    Args:
        a_scale: None where ``a`` has 16-bit values.
        formats: formats of ``a`` and of the weights.
        backend: the operation's backend.
        device: device of the operands.
    """
    has_kernels = formats[1].scale_layout == "rowmajor" if a_scale is None else formats in fp8.PAIRS
    if not has_kernels or backends.resolve(backend, device) == "reference":
        return False
    return a_scale is None or not is_fused(formats, backend, device)


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
    operands: tuple[Any, Any, Any, Any, Any, Any],
    alphas: tuple[Any, Any],
    sizes: tuple[torch.Tensor | None, torch.Tensor | None],
    gate: Gate,
    outs: Sequence[torch.Tensor],
    **options: Any,
) -> None:
    """Computes the results from checked operands and writes them to ``outs``.

    Args:
        operands: ``a``, ``b1``, ``b2``, ``a_scale``, ``b1_scale``, ``b2_scale``; see ``grouped_dual_gemm``.
        alphas: factors of both products.
        sizes: ``offs`` and ``masked_m``. Rows of no group keep their values.
        gate: the activation and the layout of the weights, which is not interleaved.
        outs: one tensor per group, or one for all.
        options: arguments passed on to ``grouped_gemm``.

    Raises what ``grouped_gemm`` raises, before anything is written.
    """
    a, b1, b2, a_scale, b1_scale, b2_scale = operands
    if gate.weight_layout == "concatenated":
        (b1, b2), (b1_scale, b2_scale) = _halves(b1), _halves(b1_scale)
    offs, masked_m = sizes
    gates, ups = (
        grouped_gemm(a, b, a_scale, scale, offs, alpha, masked_m=masked_m, out_dtype=torch.float32, **options)
        for b, scale, alpha in ((b1, b1_scale, alphas[0]), (b2, b2_scale, alphas[1]))
    )
    for out, one, other in zip(outs, _listed(gates), _listed(ups), strict=True):
        result = _activated(one, other, gate).to(out.dtype)
        row = torch.arange(out.shape[-2], device=out.device)
        if offs is not None:
            result = torch.where((row < offs[-1])[:, None], result, out)
        elif masked_m is not None:
            result = torch.where((row < masked_m[:, None])[..., None], result, out)
        out.copy_(result)


def _activated(one: torch.Tensor, other: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Returns ``activation(one) * other`` in float32, with the limit applied first."""
    if gate.limit is not None:
        one, other = one.clamp(max=gate.limit), other.clamp(-gate.limit, gate.limit)
    if gate.activation == "swiglu_oai":
        other = other + 1
    return ACTIVATIONS[gate.activation](one) * other


def _halves(side: Any) -> tuple[Any, Any]:
    """Splits weights or scales into the rows of the gate and those of the up projection; a list element by element."""
    if isinstance(side, torch.Tensor):
        return side.chunk(2, -2)[0], side.chunk(2, -2)[1]
    halves = [_halves(tensor) for tensor in side]
    return [first for first, _ in halves], [second for _, second in halves]


def _listed(result: Any) -> Sequence[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else result
