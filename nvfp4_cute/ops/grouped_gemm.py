"""``grouped_gemm``: C_g = alpha_g * A_g @ B_g^T with block-scaled operands, many groups in one launch."""

from collections.abc import Sequence
from typing import Any, overload

import torch

from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.operands.results import group_tensor, own_outputs
from nvfp4_cute.ops.options import Factor, Input, Options, check_operands, options_of, running
from nvfp4_cute.ops.parts.grouped_gemm import grouped_gemm as grouped_gemm_of_parts
from nvfp4_cute.problem import QuantizedName


@overload
def grouped_gemm(
    a: Input,
    b: BlockScaledTensor,
    offs: torch.Tensor,
    *,
    alpha: Factor = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    options: Options | None = None,
) -> torch.Tensor: ...


@overload
def grouped_gemm(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offs: torch.Tensor,
    *,
    alpha: Factor = None,
    out: BlockScaledTensor | None = None,
    out_dtype: QuantizedName,
    out_global_scale: Factor = None,
    backend: str = "auto",
    options: Options | None = None,
) -> BlockScaledTensor: ...


@overload
def grouped_gemm(
    a: Input,
    b: BlockScaledTensor,
    *,
    masked_m: torch.Tensor,
    alpha: Factor = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    options: Options | None = None,
) -> torch.Tensor: ...


@overload
def grouped_gemm(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    *,
    masked_m: torch.Tensor,
    alpha: Factor = None,
    out: BlockScaledTensor | None = None,
    out_dtype: QuantizedName,
    out_global_scale: Factor = None,
    backend: str = "auto",
    options: Options | None = None,
) -> BlockScaledTensor: ...


@overload
def grouped_gemm(
    a: Sequence[Input],
    b: Sequence[BlockScaledTensor],
    *,
    alpha: Factor = None,
    out: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    options: Options | None = None,
) -> list[torch.Tensor]: ...


@overload
def grouped_gemm(
    a: Sequence[BlockScaledTensor],
    b: Sequence[BlockScaledTensor],
    *,
    alpha: Factor = None,
    out: Sequence[BlockScaledTensor] | None = None,
    out_dtype: QuantizedName,
    out_global_scale: Factor = None,
    backend: str = "auto",
    options: Options | None = None,
) -> list[BlockScaledTensor]: ...


def grouped_gemm(
    a: Input | Sequence[Input],
    b: BlockScaledTensor | Sequence[BlockScaledTensor],
    offs: torch.Tensor | None = None,
    *,
    masked_m: torch.Tensor | None = None,
    alpha: Factor = None,
    out: Any = None,
    out_dtype: torch.dtype | QuantizedName = torch.bfloat16,
    out_global_scale: Factor = None,
    backend: str = "auto",
    options: Options | None = None,
) -> Any:
    """Multiply the rows of every group by the group's weights in one launch: ``alpha[g] * a_g @ b_g.T``.

        >>> w, offs = quantize(torch.randn(2, 256, 512)), torch.tensor([40, 47], dtype=torch.int32)
        >>> grouped_gemm(grouped_quantize(torch.randn(47, 512).half(), offs), w, offs=offs).shape
        torch.Size([47, 256])
        >>> [tuple(c.shape) for c in grouped_gemm([quantize(torch.randn(40, 512))], [w[0]])]
        [(40, 256)]

    There are three forms. *Ragged*: ``offs`` says where each group ends in the rows of ``a``. *Masked*: ``masked_m`` says how
    many rows of each group count. *List*: one tensor per group; M, N and K may all differ. In the ragged and masked forms the
    kernel reads the sizes on the device, so the host never waits for them and a captured graph follows changes.

    Args:
        a: block-scaled, or float16 or bfloat16 (weight-only, W4A16). Ragged: [rows, K], from ``grouped_quantize`` with the same
            ``offs``, or from ``quantize`` where groups end at multiples of 128. Masked: [G, M_max, K]. List: one [M_g, K]
            per group.
        b: ragged, masked: [G, N, K]. List: one [N_g, K] per group. README says which pairs of formats have kernels.
        offs: int32 [G], the row where each group ends, ascending, without a leading 0. Other values raise on the CPU; on a GPU
            they are undefined behavior, which ``nvfp4_cute.debug()`` checks for.
        masked_m: int32 [G], rows of each group, 0 to M_max; otherwise as ``offs``.
        alpha: one factor per group: float32 [G], or numbers. Global scales are applied in addition.
        out: shaped like the result, written in place, rows or columns contiguous. Rows of no group keep their values.
        out_dtype: float16, bfloat16, float32 or the name of a format, such as "nvfp4"; for INT8 operands also int32.
        out_global_scale: global scales of "nvfp4" results: float32 [G], or numbers.
        backend, options: see :func:`gemm`.

    Returns:
        [rows, N], [G, M_max, N], or a list of [M_g, N_g]. Quantized: BlockScaledTensors, the ``a`` of the next call.

    Padding columns of blocked scales must be finite; a NaN there spoils whole rows. There are such columns where K is not a
    multiple of 64 (MX formats: 128).

    Raises:
        TypeError, ValueError, UnsupportedProblem, UnsupportedTarget, ConfigError: the message names rule, value and fix, and
        ``out`` is unchanged.
    """
    how, is_list = options_of(options), offs is None and masked_m is None
    check_operands("a", a, is_list=is_list, takes_16_bits=True)
    check_operands("b", b, is_list=is_list)
    run = running(grouped_gemm_of_parts, how)
    result = run(
        a, b, offs, alpha, masked_m=masked_m, out=None if out is None else own_outputs(out, is_list), out_dtype=out_dtype,
        out_global_scale=out_global_scale, backend=backend, options=how,
    )  # fmt: skip
    return group_tensor(result, out, out_dtype, out_global_scale) if type(result) is tuple else result
