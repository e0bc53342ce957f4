"""Operands of products of two tensors, or of batches of them: gemm, gemv, and weight-only products.

All use one layout: batches come first, ``[L, rows, K]``, and a vector is a matrix with one row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.formats.block_format import BlockFormat, ScaleLayout
from nvfp4_cute.formats.block_scaled import (
    BlockScaledTensor,
    check_is_tensor,
    is_tensor_of,
    quantized_tensor,
    tensors_of,
)
from nvfp4_cute.formats.scale_layout import as_blocked_batches
from nvfp4_cute.operands import rules
from nvfp4_cute.operands.grouped import GroupedOperands, Weights, given_weights
from nvfp4_cute.operands.numbers_on_device import one_number_on
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.operands.overlap import check_overlap
from nvfp4_cute.operands.rules import ACTIVATION_DTYPES
from nvfp4_cute.operands.whole import Parts
from nvfp4_cute.problem import (
    INT32_MAX,
    OUT_DTYPES,
    Form,
    GroupedProblem,
    OutDtype,
    new_quantized_data,
    new_quantized_scale,
    result_format,
)

# A lane of the weight-only kernel reads 32 values of K.
W4A16_K_STEP = 32
# Kernels for few rows (``kernels/simt/few_rows.py``, ``gemv.py``) do not read padding columns of scales.
MOST_FEW_ROWS = 8


@dataclass(frozen=True, eq=False)
class Product:
    """Checked operands of ``C[l] = alpha[l] * A[l] @ B[l]^T + bias``.

    Attributes:
        a: M rows.
        b: N rows.
        alpha: float32 [L], or [1] for all batches, or None.
        out: [L, M, N]; for quantized results uint8 data.
        out_scale: for quantized results: uint8 [L, bytes], blocked.
        out_global_scale: for NVFP4 results: float32 [L], or None.
        bias: float16, bfloat16 or float32 [N], or None.
        quantized_dtype: format of quantized results; None for others, which have the dtype of ``out``.
    """

    a: Operand
    b: Operand
    alpha: torch.Tensor | None
    out: torch.Tensor
    out_scale: torch.Tensor | None = None
    out_global_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    quantized_dtype: OutDtype | None = None

    @property
    def bias_dtype(self) -> torch.dtype | None:
        """Dtype of the bias; None without one."""
        return None if self.bias is None else self.bias.dtype

    @property
    def alpha_step(self) -> int:
        """Bytes between the factors of batches; 0 if one factor serves all."""
        return 0 if self.alpha is None or len(self.alpha) == 1 else self.alpha.element_size()

    def grouped(self) -> tuple[GroupedProblem, GroupedOperands]:
        """Converts to a problem with one group per batch; a single batch becomes a list."""
        a, b = self.a, self.b
        batches = len(self.out)
        form: Form = "list" if batches == 1 else "batched"
        out, scale = self.out, self.out_scale
        if batches == 1:
            out, scale = out[0], None if scale is None else scale[0]
            row_scale = None if a.row_scale is None else a.row_scale.view(-1)
            a, b = (
                replace(x, data=x.data[0], scale=x.scale[0] if x.format.has_scales else x.scale)
                for x in (a, b)
            )
            a = replace(a, row_scale=row_scale)
        dtype: OutDtype = self.quantized_dtype or out.dtype
        m_major = scale is None and rules.is_m_major([out])
        sizes = ((a.rows, b.rows, a.k),) * batches
        problem = GroupedProblem(
            sizes, form, dtype, self.alpha is not None, m_major, a_format=a.format, b_format=b.format,
            bias_dtype=self.bias_dtype, has_row_scales=a.row_scale is not None, is_dense=True,
        )  # fmt: skip
        alpha = rules.one_each(self.alpha, batches)
        scales = () if scale is None else (scale,)
        return problem, GroupedOperands(
            (a,),
            (b,),
            (out,),
            alpha,
            out_scale=scales,
            out_global_scale=self.out_global_scale,
            bias=self.bias,
        )


def check_gemm(
    rows: Parts, weights: Parts, alpha, bias, out, out_dtype, out_global_scale, scale_layout
) -> tuple[Product, list[torch.Tensor]]:
    """Checks the operands of ``gemm``, which has the same arguments; a number for ``out_global_scale`` is already float32 [1].

    Returns:
        The operands, and the tensors that are written: the result, or data and scale of a quantized one.

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule; the message names rule, value and fix.
    """
    (a, a_scale, *_), (b, b_scale, *_), formats = rows, weights, (rows.format, weights.format)
    rules.check_scale_layout(scale_layout)
    out_format = result_format(out_dtype)
    rules.check_result(out_dtype, out_global_scale, formats)
    rules.check_formats(a_format=formats[0], b_format=formats[1], takes_rows=rules.may_be_of_rows(out_format))
    rules.check_no_factor(out_dtype, alpha, bias)
    named = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
    plain = {} if out_format is not None else rules.given(out=out)
    own = plain
    if out_format is not None and isinstance(out, BlockScaledTensor):
        own = {"data of out": out.data, "scale of out": out.scale}
    factors = rules.tensors_in({"alpha": alpha, "out_global_scale": out_global_scale})
    named |= rules.given(bias=bias)
    device = rules.check_tensors(named | factors | own)
    check_batched_shapes({"a": a, "b": b} | plain, "a [M, K/2], b [N, K/2] and out [M, N]")
    k_a, k_b = (fmt.elements(x.shape[1]) for fmt, x in zip(formats, (a, b), strict=True))
    if k_a != k_b:
        fix = "; is b transposed? It is [N, K]" if b.shape[0] == k_a else ""
        raise ValueError(f"a has K={k_a} and b has K={k_b}; both must have the same K{fix}")
    batches = num_batches(a)
    if batches == 0:
        raise ValueError("a has L=0 batches; pass at least one")
    left, right = (
        _operand(name, letter, data, scale, batches, scale_layout, fmt)
        for name, letter, data, scale, fmt in (
            ("a", "M", a, a_scale, formats[0]),
            ("b", "N", b, b_scale, formats[1]),
        )
    )
    for name, side in (("a", left), ("b", right)):
        if left.rows > MOST_FEW_ROWS:
            rules.check_padding_columns(f"{name}_scale", side.scale, side.rows, side.k, side.format)
        if not side.scale.is_contiguous():
            raise ValueError(
                f"{name}_scale has batches {side.scale.stride(0)} bytes apart, each {side.scale.shape[1]} long; "
                "they have to follow each other: .contiguous() as [L, rm, rk, 32, 4, 4]"
            )
    factor = rules.factors("alpha", alpha, batches, device, of="batch", allows_one=True, allows_list=False)
    rules.check_bias(bias, right.rows)
    if out_format is not None:
        quantized = quantized_result(out, (*a.shape[2:], len(a)), len(b), device, out_format)
        results, view, scale = _quantized_views(quantized, batches)
        written = {"data of out": view, "scale of out": scale}
    else:
        results = [out if plain else new_result(a, len(b), out_dtype)]
        rules.check_out("out", results[0], (len(a), len(b), *a.shape[2:]), out_dtype)
        view = rules.batches_first(results[0])
        view, scale = rules.out_lines("out", view, rules.is_m_major([view])), None
        written = {"out": view}
    if out is not None:
        check_overlap(written, named | factors)
    shared = rules.global_scales(
        "out_global_scale", out_global_scale, batches, device, of="batch", allows_one=True
    )
    quantized_dtype = None if out_format is None else out_dtype
    global_scale = rules.one_each(shared, batches)
    return Product(left, right, factor, view, scale, global_scale, bias, quantized_dtype), results


def check_gemv(
    matrix_parts: Parts, vector_parts: Parts, alpha, out, out_dtype, scale_layout
) -> tuple[Product, torch.Tensor]:
    """Checks the operands of ``gemv``. Returns them and the tensor to return. Raises as :func:`check_gemm` does."""
    (a, a_scale, a_format, *_), (b, b_scale, b_format, *_) = matrix_parts, vector_parts
    rules.check_result_format(out_dtype, OUT_DTYPES)
    rules.check_choice("out_dtype", out_dtype, OUT_DTYPES)
    rules.check_scale_layout(scale_layout)
    rules.check_formats(a_format=a_format, b_format=b_format)
    inputs = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale} | rules.tensors_in({"alpha": alpha})
    device = rules.check_tensors(inputs | rules.given(out=out))
    matrix, vector = rules.as_bytes("a", a, a_format), rules.as_bytes("b", b, b_format)
    if (
        matrix.ndim not in (2, 3)
        or vector.ndim != matrix.ndim - 1
        or (b_format.elements(vector.shape[0]), *vector.shape[1:])
        != (a_format.elements(matrix.shape[1]), *matrix.shape[2:])
    ):
        of_a, of_b = a_format.length, b_format.length
        raise ValueError(
            f"a is [M, {of_a}] and b [{of_b}], or a is [M, {of_a}, L] and b [{of_b}, L], with the same K and L; got "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    batches, m = num_batches(a), len(a)
    rules.check_k(a_format.elements(a.shape[1]), a_format)
    rules.check_extent("L", batches, rules.MAX_BATCHES)
    if m > 1:
        rules.check_extent("row pitch of a in bytes", a.stride(0), rules.MAX_PITCH)
    shape = (m, *a.shape[2:])
    if out is not None:
        rules.check_out("out", out, shape, out_dtype)
        rules.check_apart("out", out)
        check_overlap({"out": out}, inputs)
    left = _operand("a", "M", matrix, a_scale, batches, scale_layout, a_format)
    right = _operand("b", "N", vector.unsqueeze(0), b_scale, batches, scale_layout, b_format)
    factor = rules.factors("alpha", alpha, batches, device, of="batch", allows_one=True, allows_list=False)
    if out is None:
        out = new_result(a, None, out_dtype)
    view = out.unsqueeze(0) if out.ndim == 1 else out.t()
    return Product(left, right, factor, view.unsqueeze(2)), out


def check_weight_only(
    x, w, w_scale, alpha, w_format, out, names, out_dtype, scale_layout, bias=None
) -> tuple[Product, torch.Tensor]:
    """Checks the operands of ``out[:, :, l] = alpha[l] * X[:, :, l] @ W[:, :, l]^T + bias``.

    Args:
        x: float16 or bfloat16 [M, K] or [M, K, L], K-major, rows and batches a multiple of 16 bytes apart.
        w: bytes of ``w_format``; for NVFP4 [N, K/2] or [N, K/2, L].
        w_scale: scales of w.
        alpha, bias: see ``gemm``.
        out: [M, N] or [M, N, L] of any strides, or None.
        names: the caller's names for x, w and w_scale.

    Returns:
        The operands, and the tensor to return.

    Raises as :func:`check_gemm` does.
    """
    rules.check_result_format(out_dtype, OUT_DTYPES)
    rules.check_choice("out_dtype", out_dtype, OUT_DTYPES)
    rules.check_scale_layout(scale_layout)
    name_x, name_w, name_scale = names
    rules.check_formats(**{f"{name_w}_format": w_format}, takes_rows=True)
    inputs = {name_x: x, name_w: w, name_scale: w_scale} | rules.tensors_in({"alpha": alpha})
    inputs |= rules.given(bias=bias)
    device = rules.check_tensors(inputs | rules.given(out=out))
    if x.dtype in NVFP4_FORMAT.data_dtypes:
        raise TypeError(
            f"{name_x}_scale is None and {name_x} has dtype {x.dtype}: pass the scales of its NVFP4 values"
        )
    rules.check_choice(f"dtype of {name_x}", x.dtype, ACTIVATION_DTYPES)
    weights = rules.as_bytes(name_w, w, w_format)
    values = (w_format.elements(weights.shape[1]), *weights.shape[2:]) if weights.ndim in (2, 3) else ()
    if x.ndim not in (2, 3) or values != tuple(x.shape[1:]):
        raise ValueError(
            f"{name_x} has shape {list(x.shape)} and {name_w} {list(w.shape)}; the 16-bit operand has K values and the "
            f"{w_format.title} one {w_format.length} bytes along K, and both the same batches, if any, as a last extent"
        )
    m, k, batches, n = len(x), x.shape[1], num_batches(x), len(weights)
    if k % W4A16_K_STEP or not k:
        raise UnsupportedProblem(
            f"K={k} is not a positive multiple of {W4A16_K_STEP}, what a 16-byte load of weights holds; pad K to "
            f"{max(-(-k // W4A16_K_STEP), 1) * W4A16_K_STEP}"
        )
    rules.check_k(k, w_format)
    rules.check_extent("N", n, INT32_MAX)
    rules.check_extent("M", m, rules.MAX_BATCHES)
    rules.check_extent("L", batches, rules.MAX_BATCHES)
    if n > 1:
        rules.check_extent(f"row pitch of {name_w} in bytes", weights.stride(0), rules.MAX_PITCH)
    rows = rules.k_major_rows(f"{name_x} (K={k})", name_x, rules.batches_first(x))
    if out is not None:
        rules.check_out("out", out, (m, n, *x.shape[2:]), out_dtype)
        rules.check_apart("out", out)
        check_overlap({"out": out}, inputs)
    factor = rules.factors("alpha", alpha, batches, device, of="batch", allows_one=True, allows_list=False)
    rules.check_bias(bias, n)
    operand = _operand(name_w, "N", weights, w_scale, batches, scale_layout, w_format, name_scale)
    if out is None:
        out = new_result(x, n, out_dtype)
    return Product(Operand.of_values(rows), operand, factor, rules.batches_first(out), bias=bias), out


def split_dual_gemm(
    a, a_scale, weights: list[Weights], a_format: BlockFormat, out, out_dtype, scale_layout, parts: int
) -> tuple[list[Any], list[Any], list[Weights], list[Any], list[torch.Tensor]]:
    """Converts the operands of ``dual_gemm`` to those of ``grouped_dual_gemm`` with one group per batch.

    ``parts`` rows of b1 belong to one column of the result.

    Returns:
        Lists of a and of a_scale; the weights; a list of outputs; and the tensors that are written: the result, or data and
        scale of a quantized one.

    Raises as :func:`check_gemm` does.
    """
    named = {"a": a} | {w.name: w.data for w in given_weights(weights)}
    out_format = result_format(out_dtype)
    plain = {} if out_format is not None else rules.given(out=out)
    for name, tensor in (named | plain).items():
        if isinstance(tensor, list | tuple):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}; pass a torch.Tensor, or call grouped_dual_gemm"
            )
        check_is_tensor(name, tensor)
    rules.check_result(out_dtype, None, (a_format, weights[0].format), a_scale is not None, is_dual=True)
    check_batched_shapes(named | plain, "a [M, K/2], b1 and b2 [N, K/2] and out [M, N]")
    if out_format is not None:
        lead, columns = (*a.shape[2:], a.shape[0]), len(weights[0].data) // parts
        quantized = quantized_result(out, lead, columns, a.device, out_format)
        results: list[torch.Tensor] = [quantized.data, quantized.scale]
        outs: list[Any] = split_quantized(quantized)
    else:
        results = [new_result(a, len(weights[0].data) // parts, out_dtype) if out is None else out]
        outs = split_batches(results[0])
    listed = [
        w
        if w.data is None
        else w._replace(
            data=split_batches(w.data),
            scale=_split_scale(f"{w.name}_scale", w.scale, w.data, scale_layout, w.format),
        )
        for w in weights
    ]
    scales = _split_scale("a_scale", a_scale, a, scale_layout, a_format)
    return split_batches(a), scales, listed, outs, results


# ---- parts -----------------------------------------------------------------------------------------------------


def num_batches(tensor: torch.Tensor) -> int:
    """Returns L of [rows, K] or [rows, K, L]."""
    return tensor.shape[2] if tensor.ndim == 3 else 1


def _operand(
    name: str,
    letter: str,
    data: torch.Tensor,
    scale: torch.Tensor,
    batches: int,
    layout: ScaleLayout,
    fmt: BlockFormat,
    scale_name: str | None = None,
) -> Operand:
    """Converts [rows, K/2] or [rows, K/2, L] to an operand with batches first."""
    rows = rules.packed_rows(name, letter, rules.batches_first(data), fmt)
    num_rows, k = rows.shape[1], rules.check_k(fmt.elements(rows.shape[2]), fmt)
    label = scale_name or f"{name}_scale"
    blocked = rules.blocked_scales(label, letter, scale, num_rows, k, layout, batches, fmt)
    return Operand(rows, blocked, fmt, num_rows, k, batches)


def check_batched_shapes(named: Mapping[str, torch.Tensor], expected: str) -> None:
    """Checks that all tensors are matrices, or all batches of matrices with the same last extent L, like the first of them.

    Raises:
        ValueError: a number of dimensions, or L, differs. The message includes ``expected``.
    """
    first, model = next(iter(named.items()))
    for name, tensor in named.items():
        if tensor.ndim not in (2, 3) or tensor.ndim != model.ndim or tensor.shape[2:] != model.shape[2:]:
            beside = "" if name == first else f" and {first} {list(model.shape)}"
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}{beside}; pass {expected}, or all of them with one more extent L"
            )


def for_batches(factor: Any, a: Any, *, is_in_result: bool = False) -> Any:
    """A factor for every batch of ``a`` [M, K/2(, L)], float32 [1] or [L], where one serves all; all else as it is."""
    if factor is None or (isinstance(factor, torch.Tensor) and isinstance(a, torch.Tensor) and a.ndim == 2):
        return factor
    factor = one_number_on(factor, a, is_in_result=is_in_result)
    batches = num_batches(a) if isinstance(a, torch.Tensor) else 1
    if batches > 1 and isinstance(factor, torch.Tensor) and factor.numel() == 1:
        return factor.reshape(1).expand(batches).contiguous()
    return factor


def split_batches(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns a view per batch of [rows, K(, L)]."""
    return [tensor] if tensor.ndim == 2 else list(tensor.unbind(2))


def split_quantized(tensor: BlockScaledTensor) -> list[BlockScaledTensor]:
    """Returns a view per batch of [M, N] or [L, M, N]."""
    if len(tensor.shape) == 2:
        return [tensor]
    parts = zip(tensor.data, tensor.scale, strict=True)
    return [
        quantized_tensor(data, scale, None, tensor.shape[1:], tensor.format, tensor.scale_layout)
        for data, scale in parts
    ]


def _split_scale(name: str, scale: Any, operand: torch.Tensor, layout: ScaleLayout, fmt: BlockFormat) -> Any:
    """Returns a view per batch of an operand's scales, and anything but a tensor unchanged for later checks."""
    batches = num_batches(operand)
    if scale is None or batches == 1 or not isinstance(scale, torch.Tensor):
        return None if scale is None else [scale] * batches
    if "rowmajor" in (layout, fmt.scale_layout):
        if scale.ndim != 3 or scale.shape[2] != batches:
            raise ValueError(
                f"{name} has shape {list(scale.shape)}; expected [rows, K/{fmt.block_k}, {batches}] (row-major)"
            )
        return split_batches(scale)
    k = fmt.elements(operand.shape[1])
    try:  # checks of each batch look at addresses; a traced graph has none
        return list(as_blocked_batches(scale, len(operand), k, batches, fmt))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error


def new_result(a: torch.Tensor, n: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Allocates [M, N(, L)] for ``a`` [M, K(, L)], batch after batch in memory; [M(, L)] if ``n`` is None."""
    columns = () if n is None else (n,)
    # Not len(a): in a graph with a dynamic number of rows, that would be the number at tracing.
    result = torch.empty((*a.shape[2:], a.shape[0], *columns), dtype=dtype, device=a.device)
    return result if a.ndim == 2 else result.movedim(0, -1)


def quantized_result(
    out: Any, lead: tuple[int, ...], n: int, device: torch.device, format: BlockFormat
) -> BlockScaledTensor:
    """Returns the tensor for quantized results [*lead, N]: the caller's ``out``, or a new one.

    Raises:
        TypeError: ``out`` is not a tensor of the format.
        ValueError: ``out`` has another shape, or its batches' scales have gaps.
    """
    rules.check_quantized_columns("N", n, format)
    shape = (*lead, n)
    if out is None:
        data = new_quantized_data(shape, device, format)
        scale = new_quantized_scale(lead, n, device, format)
        return quantized_tensor(data, scale, None, shape, format, format.scale_layout)
    if not is_tensor_of(out, format):
        raise TypeError(
            f'out is a {type(out).__name__}; with out_dtype="{format.name}" pass a {tensors_of(format)}'
        )
    if tuple(out.shape) != shape:
        raise ValueError(f"out has shape {list(out.shape)}; expected {list(shape)}")
    if out.scale_layout != format.scale_layout:
        raise ValueError(f"out has {out.scale_layout} scales; the kernel writes {format.scale_layout} ones")
    if not out.scale.is_contiguous():
        raise ValueError(f"scale of out has strides {out.scale.stride()}; it has to be contiguous")
    return out


def _quantized_views(
    out: BlockScaledTensor, batches: int
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Returns the tensors written, as the caller sees them, and as bytes [L, M, N/2] and [L, bytes]."""
    data = out.data if out.data.ndim == 3 else out.data.unsqueeze(0)
    rows = rules.quantized_rows("data of out", data, tuple(data.shape), out.format)
    return [out.data, out.scale], rows, out.scale.view(torch.uint8).view(batches, -1)
