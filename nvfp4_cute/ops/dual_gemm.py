"""``dual_gemm`` and ``grouped_dual_gemm``: both projections of a gated layer and its activation in one launch."""

from collections.abc import Sequence
from typing import Any, overload

import torch

from nvfp4_cute.activation import SILU, Activation, activation_of
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.operands.results import group_tensor, own_outputs
from nvfp4_cute.ops import parts
from nvfp4_cute.ops.options import (
    Factor,
    GateUp,
    Input,
    Options,
    check_operand,
    check_operands,
    gate_up_of,
    options_of,
    running,
)
from nvfp4_cute.problem import QuantizedName


@overload
def dual_gemm(
    a: Input,
    w: GateUp,
    *,
    activation: Activation | str = SILU,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    options: Options | None = None,
) -> torch.Tensor: ...


@overload
def dual_gemm(
    a: BlockScaledTensor,
    w: GateUp,
    *,
    activation: Activation | str = SILU,
    out: BlockScaledTensor | None = None,
    out_dtype: QuantizedName,
    out_global_scale: float | torch.Tensor | None = None,
    backend: str = "auto",
    options: Options | None = None,
) -> BlockScaledTensor: ...


def dual_gemm(
    a: Input,
    w: GateUp,
    *,
    activation: Activation | str = SILU,
    out: Any = None,
    out_dtype: torch.dtype | QuantizedName = torch.bfloat16,
    out_global_scale: float | torch.Tensor | None = None,
    backend: str = "auto",
    options: Options | None = None,
) -> Any:
    """Compute the first half of a gated layer, such as SwiGLU: ``activation(a @ gate.T) * (a @ up.T)``.

        >>> x, gate, up = (quantize(torch.randn(rows, 512)) for rows in (40, 256, 256))
        >>> dual_gemm(x, GateUp(gate, up)).shape
        torch.Size([40, 256])

    Args:
        a: [M, K] or [L, M, K], block-scaled, or float16 or bfloat16 [M, K] or [M, K, L].
        w: weights of both projections, [N, K] or [L, N, K] each, or both in one tensor; see :class:`nvfp4_cute.GateUp`.
        activation: a record or a name; see :class:`nvfp4_cute.Activation`.
        out: [M, N] or [M, N, L], written in place; a BlockScaledTensor for quantized results. None allocates.
        out_dtype: float16, bfloat16, float32 or the name of a format, such as "nvfp4".
        out_global_scale: global scale of an "nvfp4" result: a number, or float32 with one element.
        backend, options: see :func:`gemm`.

    Returns:
        [M, N], or [M, N, L] where ``a`` has batches. Both products accumulate in fp32 and stay on the chip. Alphas and the
        activation are applied in fp32, with the GPU's approximate exponential and reciprocal
        (``reference.grouped_dual_gemm_reference`` bounds the error). The result is rounded once, to ``out_dtype``.

    Padding columns of blocked scales must be finite; a NaN there spoils whole rows. There are such columns where K is not a
    multiple of 64 (MX formats: 128).

    Raises:
        TypeError, ValueError, UnsupportedProblem, UnsupportedTarget, ConfigError: the message names rule, value and fix, and
        ``out`` is unchanged.
    """
    how, act, w = options_of(options), activation_of(activation), gate_up_of(w)
    check_operand("a", a, takes_16_bits=True)
    check_operand("w.gate", w.gate)
    if w.up is not None:
        check_operand("w.up", w.up)
    run = running(parts.dual_gemm, how)
    return run(
        a, w, activation=act.function, limit=act.limit, out=out, out_dtype=out_dtype, out_global_scale=out_global_scale,
        backend=backend, options=how,
    )  # fmt: skip


@overload
def grouped_dual_gemm(
    a: Input,
    w: GateUp,
    offs: torch.Tensor,
    *,
    activation: Activation | str = SILU,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    options: Options | None = None,
) -> torch.Tensor: ...


@overload
def grouped_dual_gemm(
    a: BlockScaledTensor,
    w: GateUp,
    offs: torch.Tensor,
    *,
    activation: Activation | str = SILU,
    out: BlockScaledTensor | None = None,
    out_dtype: QuantizedName,
    out_global_scale: Factor = None,
    backend: str = "auto",
    options: Options | None = None,
) -> BlockScaledTensor: ...


@overload
def grouped_dual_gemm(
    a: Input,
    w: GateUp,
    *,
    masked_m: torch.Tensor,
    activation: Activation | str = SILU,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    options: Options | None = None,
) -> torch.Tensor: ...


@overload
def grouped_dual_gemm(
    a: BlockScaledTensor,
    w: GateUp,
    *,
    masked_m: torch.Tensor,
    activation: Activation | str = SILU,
    out: BlockScaledTensor | None = None,
    out_dtype: QuantizedName,
    out_global_scale: Factor = None,
    backend: str = "auto",
    options: Options | None = None,
) -> BlockScaledTensor: ...


@overload
def grouped_dual_gemm(
    a: Sequence[Input],
    w: GateUp,
    *,
    activation: Activation | str = SILU,
    out: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    options: Options | None = None,
) -> list[torch.Tensor]: ...


@overload
def grouped_dual_gemm(
    a: Sequence[BlockScaledTensor],
    w: GateUp,
    *,
    activation: Activation | str = SILU,
    out: Sequence[BlockScaledTensor] | None = None,
    out_dtype: QuantizedName,
    out_global_scale: Factor = None,
    backend: str = "auto",
    options: Options | None = None,
) -> list[BlockScaledTensor]: ...


def grouped_dual_gemm(
    a: Input | Sequence[Input],
    w: GateUp,
    offs: torch.Tensor | None = None,
    *,
    masked_m: torch.Tensor | None = None,
    activation: Activation | str = SILU,
    out: Any = None,
    out_dtype: torch.dtype | QuantizedName = torch.bfloat16,
    out_global_scale: Factor = None,
    backend: str = "auto",
    options: Options | None = None,
) -> Any:
    """Compute the first half of every group's gated layer in one launch: ``activation(a_g @ gate_g.T) * (a_g @ up_g.T)``.

        >>> gate, up = (quantize(torch.randn(2, 256, 512)) for _ in range(2))
        >>> offs = torch.tensor([40, 47], dtype=torch.int32)
        >>> a = grouped_quantize(torch.randn(47, 512).half(), offs)
        >>> grouped_dual_gemm(a, GateUp(gate, up), offs=offs).shape
        torch.Size([47, 256])

    FP8 and INT8 weights are "separate" or "concatenated", and their results have 16 or 32 bits or are FP8_1x128. The pair
    FP8_1x128 and FP8_128x128 has a fused kernel on every GPU. INT8 takes two launches, followed by torch operations.

    Args:
        a, offs, masked_m, out, out_dtype, out_global_scale, backend, options: see :func:`grouped_gemm`.
        w: weights, [G, N, K] in the ragged and masked forms, and lists with one [N_g, K] per group in the list form. See
            :class:`nvfp4_cute.GateUp`.
        activation: a record or a name; see :class:`nvfp4_cute.Activation`.

    Returns:
        Results in the shapes of ``grouped_gemm``, computed and rounded as in ``dual_gemm``.

    Raises:
        TypeError, ValueError, UnsupportedProblem, UnsupportedTarget, ConfigError: the message names rule, value and fix, and
        ``out`` is unchanged.
    """
    how, act, w = options_of(options), activation_of(activation), gate_up_of(w)
    is_list = offs is None and masked_m is None
    check_operands("a", a, is_list=is_list, takes_16_bits=True)
    check_operands("w.gate", w.gate, is_list=is_list)
    if w.up is not None:
        check_operands("w.up", w.up, is_list=is_list)
    run = running(parts.grouped_dual_gemm, how)
    result = run(
        a, w, offs=offs, masked_m=masked_m, activation=act.function, limit=act.limit,
        out=None if out is None else own_outputs(out, is_list), out_dtype=out_dtype, out_global_scale=out_global_scale,
        backend=backend, options=how,
    )  # fmt: skip
    return group_tensor(result, out, out_dtype, out_global_scale) if type(result) is tuple else result
