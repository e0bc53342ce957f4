"""The reference of every operation in float64 torch, on any device: slow and plain, and exact where the docstring says so.

It calls no kernel and reads no padding of scales, so garbage there, including NaN, cannot reach a result.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from nvfp4_cute.activation import Activation, activation_of
from nvfp4_cute.formats.block_format import INT8, INT8_PAIR, NVFP4, BlockFormat, ScaleLayout
from nvfp4_cute.formats.codecs import decode_blocks
from nvfp4_cute.formats.fp8_order import in_rows
from nvfp4_cute.formats.scale_layout import as_blocked, from_blocked, to_blocked
from nvfp4_cute.launch_table import INTERLEAVE

OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGER_DTYPES = (*OUT_DTYPES, torch.int32)
ACTIVATIONS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "silu": lambda x, _: torch.nn.functional.silu(x),
    # Without erf and tanh, which round to -1 where the result is small.
    "gelu": lambda x, _: x * torch.special.erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x, _: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    "relu": lambda x, _: x.clamp(min=0),
    "relu2": lambda x, _: x.clamp(min=0).square(),
    "swiglu_oai": lambda x, own: x * torch.sigmoid(own.alpha * x),
    "situ": lambda x, own: own.beta * torch.tanh(x / own.beta) * torch.sigmoid(x),
}
# B is expanded to float64 in pieces of at most this many elements (128 MiB).
CHUNK_ELEMS = 1 << 24


def grouped_gemm_reference(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    a_scale: Sequence[torch.Tensor],
    b_scale: Sequence[torch.Tensor],
    alpha: Sequence[float] | torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    bias: torch.Tensor | None = None,
    row_scale: Sequence[torch.Tensor] | None = None,
    scale_layout: ScaleLayout = "blocked",
    a_format: BlockFormat = NVFP4,
    b_format: BlockFormat = NVFP4,
) -> list[torch.Tensor]:
    """Computes ``out[g] = alpha[g] * (a[g] * a_scale[g]) @ (b[g] * b_scale[g])^T + bias`` for every group ``g``, in list form.

    The roundings, each to nearest even, are these, in this order: the sum over K, computed in float64, is rounded to float32;
    ``alpha`` multiplies in float32; ``row_scale`` of the row multiplies in float32; ``bias`` is added in float32; the result is
    rounded to ``out_dtype``. A sum of zeros is +0.
    For NVFP4, the float64 sum is exact, and so independent of its order, while the magnitudes of the products add up to less
    than 2^33, because they are multiples of 2^-20. With ``out_dtype=torch.float64`` nothing is rounded to float32; use it to
    measure errors.

    A kernel accumulates in float32. It must give the same bits where float32 holds every partial sum exactly, and may differ by
    its own roundings elsewhere.

    INT8 has one scale per row, and sums of products of integers are exact also in kernels. The roundings are then the only
    ones, and every kernel gives the same bits: the sum is rounded to float32; ``b_scale`` of its column multiplies in float32;
    ``a_scale`` of its row multiplies in float32 (the order of CUTLASS's epilogue in vLLM); then ``alpha``, ``bias`` and
    ``out_dtype`` follow. With ``out_dtype=torch.int32`` the sums themselves are the result, and scales are not read.

    Args:
        a: uint8 or float4_e2m1fn_x2, ``[M_g, K_g/2]``, low nibble first; M_g may be 0. For other formats, their bytes.
        b: ``[N_g, K_g/2]`` in the same layout.
        a_scale: uint8 or float8_e4m3fn (sign bit ignored), for "blocked" in a form of ``scale_layout.as_blocked``, for
            "rowmajor" ``[M_g, K_g/16]``. For other formats, one scale per block.
        b_scale: scales of ``b`` in the same layout.
        alpha: one factor per group: numbers, or a float32 tensor ``[G]``. None skips the multiplication.
        bias: ``[N]`` for every group; all groups then have the same N. None adds nothing.
        row_scale: global scale per row of ``a``, float32 ``[M_g]`` per group. None skips the multiplication.
        out_dtype: float16, bfloat16, float32 or float64; for INT8 also int32.
        scale_layout: layout of both scales, in formats with blocked ones; others have rows.
        a_format, b_format: formats of ``a`` and ``b``; any two records.

    Returns:
        One ``[M_g, N_g]`` tensor of ``out_dtype`` per group, on the device of its operands.

    Raises:
        TypeError, ValueError: lengths, shapes or dtypes do not fit each other.
    """
    dtypes = INTEGER_DTYPES if (a_format, b_format) == INT8_PAIR else OUT_DTYPES
    if out_dtype not in dtypes:
        raise TypeError(f"out_dtype={out_dtype}: use one of {', '.join(map(str, dtypes))}")
    lengths = {"a": len(a), "b": len(b), "a_scale": len(a_scale), "b_scale": len(b_scale)}
    if alpha is not None:
        lengths["alpha"] = len(alpha)
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{count} in {name}" for name, count in lengths.items())
        raise ValueError(f"every list has one entry per group; got {counts}; make them equally long")
    acc_dtype = torch.float64 if out_dtype == torch.float64 else torch.float32
    outputs = []
    for group_idx in range(len(a)):
        operands = (a[group_idx], b[group_idx], a_scale[group_idx], b_scale[group_idx])
        if (a_format, b_format) == INT8_PAIR and out_dtype != torch.float64:
            acc = _integer_products(*operands, out_dtype)
        else:
            acc = _accumulate(*operands, scale_layout, a_format, b_format).to(acc_dtype)
        factor = None if alpha is None else alpha[group_idx]
        of_rows = None if row_scale is None else row_scale[group_idx]
        outputs.append(_finished(acc, factor, bias, out_dtype, of_rows))
    return outputs


def _finished(
    acc: torch.Tensor,
    alpha: float | torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    row_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiplies sums [M, N] by a factor and by those of rows [M], and adds a bias [N], in the dtype of the sums; then rounds."""
    if alpha is not None:
        acc = acc * torch.as_tensor(alpha, dtype=torch.float32, device=acc.device).to(acc.dtype)
    if row_scale is not None:
        acc = acc * row_scale.to(acc.dtype)[:, None]
    if bias is not None:
        acc = acc + bias.to(acc.dtype)
    return acc.to(out_dtype)


def grouped_dual_gemm_reference(
    a: Sequence[torch.Tensor],
    b1: Sequence[torch.Tensor],
    b2: Sequence[torch.Tensor] | None,
    a_scale: Sequence[torch.Tensor],
    b1_scale: Sequence[torch.Tensor],
    b2_scale: Sequence[torch.Tensor] | None,
    alpha1: Sequence[float] | torch.Tensor | None = None,
    alpha2: Sequence[float] | torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    activation: Activation | str = "silu",
    limit: float | None = None,
    weight_layout: Literal[
        "separate", "concatenated", "interleaved_64_up_first", "interleaved_32_gate_first"
    ] = "separate",
    bias: Sequence[torch.Tensor] | None = None,
    row_scale: Sequence[torch.Tensor] | None = None,
    scale_layout: ScaleLayout = "blocked",
    a_format: BlockFormat = NVFP4,
    b_format: BlockFormat = NVFP4,
) -> list[torch.Tensor]:
    """Computes ``activation(alpha1[g] * a[g] @ b1[g]^T) * (alpha2[g] * a[g] @ b2[g]^T)`` in float64, rounded once.

    :class:`nvfp4_cute.Activation` defines the activations.

    A kernel with silu may differ from this, beyond its accumulation, by these errors in units of u = 2^-24 relative to the
    result: x = alpha1 * a @ b1^T (1); -x * log2(e) (2 of the exponent, from factor and product); ex2.approx (4, and 2 |x| from
    its argument); 1 + that (1); rcp.approx (2); times x (1); alpha2 times the second sum (1); the product (1). The error of x
    reaches silu 1 + |x| times. Together these are at most (3 |x| + 11) * 2^-24, plus half a unit of ``out_dtype``. Where
    exp(-x) exceeds 2^126, the reciprocal is 0; the result is then 0 instead of less than 2^-119 times the second factor.
    ex2.approx and rcp.approx have errors of at most 2^-22 and 2^-23 (PTX ISA 9.7.3).

    Args:
        a, b1, b2, a_scale, b1_scale, b2_scale: see :func:`grouped_gemm_reference`.
        alpha1, alpha2: one factor per group: numbers, or a float32 tensor ``[G]``. None skips the multiplication.
        out_dtype: float16, bfloat16, float32 or float64.
        activation: a record or a name.
        limit: before the activation, clamps the first product to at most ``limit`` and the second to [-limit, limit].
        weight_layout: "separate", or the order in which ``b1`` [2 N, K/2] holds the rows of both products (the gate's are the
            first product's); ``b2`` and ``b2_scale`` are then None. "concatenated": gate, then up. "interleaved_64_up_first":
            64 rows of up, 64 of the gate and so on. "interleaved_32_gate_first": 32 of the gate, 32 of up and so on.
        bias: ``[2 N_g]`` per group, added to both products before the clamp: one number per row of the weights in their layout;
            of separate weights the first product's, then the second's. None adds nothing.
        row_scale: as for :func:`grouped_gemm_reference`; both products are multiplied.
        scale_layout: layout of all scales.
        a_format: format of ``a``.
        b_format: format of both weights.

    Returns:
        One ``[M_g, N_g]`` tensor of ``out_dtype`` per group.

    Raises:
        TypeError, ValueError: for the reasons of :func:`grouped_gemm_reference`.
    """
    if weight_layout == "separate":
        products = list(zip(b1, b1_scale, strict=True)), list(zip(b2 or (), b2_scale or (), strict=True))
    else:
        separated = [
            separate_weights(b, s, weight_layout, scale_layout, b_format)
            for b, s in zip(b1, b1_scale, strict=True)
        ]
        products = [gate for gate, _ in separated], [up for _, up in separated]
    gates, ups = (
        grouped_gemm_reference(
            a, [b for b, _ in product], a_scale, [s for _, s in product], alpha, torch.float64, row_scale=row_scale,
            scale_layout=scale_layout, a_format=a_format, b_format=b_format,
        )
        for product, alpha in zip(products, (alpha1, alpha2), strict=True)
    )  # fmt: skip
    if bias is not None:
        biases = [of_products(of_group, weight_layout) for of_group in bias]
        gates = [gate + own for gate, (own, _) in zip(gates, biases, strict=True)]
        ups = [up + own for up, (_, own) in zip(ups, biases, strict=True)]
    own = activation_of(activation, limit)
    return [activated(gate, up, own).to(out_dtype) for gate, up in zip(gates, ups, strict=True)]


def activated(gate: torch.Tensor, up: torch.Tensor | None, activation: Activation) -> torch.Tensor:
    """Computes ``activation(gate) * up`` in the dtype of ``gate``, or ``activation(gate)`` without ``up``; see ``Activation``."""
    apply = ACTIVATIONS[activation.name]
    if up is None:
        return apply(gate, activation)
    if (limit := activation.limit) is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation.name == "swiglu_oai":
        up = up + 1
    if (bound := activation.linear_beta) is not None:
        up = bound * torch.tanh(up / bound)
    return apply(gate, activation) * up


def separate_weights(
    b: torch.Tensor,
    scale: torch.Tensor,
    weight_layout: str,
    scale_layout: ScaleLayout = "blocked",
    format: BlockFormat = NVFP4,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Copies rows and scales of the gate and of the up projection out of one operand that holds both.

    Args:
        b: [2 N, K/2].
        scale: scales of ``b``.
        weight_layout: see :func:`grouped_dual_gemm_reference`; not "separate".
        scale_layout: layout of ``scale`` and of the returned scales.
        format: format of ``b``, whose blocks have one row.
    """
    gate, up = of_products(torch.arange(len(b), device=b.device), weight_layout)
    plain = _rowmajor_scale(b, scale, scale_layout, format)

    def part(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = plain[index]
        blocked = to_blocked(chosen).flatten() if scale_layout == "blocked" else chosen
        return b.view(torch.uint8)[index], blocked

    return part(gate), part(up)


def of_products(rows: torch.Tensor, weight_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies the entries of the gate and of the up projection out of ``[2 N]``, one entry per row of the weights.

    weight_layout: see :func:`grouped_dual_gemm_reference`; "separate" has the order of "concatenated".
    """
    width = INTERLEAVE.get(weight_layout, len(rows) // 2)
    halves = [half.flatten() for half in rows.view(-1, 2, width).unbind(1)]
    gate, up = halves[::-1] if weight_layout == "interleaved_64_up_first" else halves
    return gate, up


def gemv_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: float | torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    scale_layout: ScaleLayout = "blocked",
    a_format: BlockFormat = NVFP4,
    b_format: BlockFormat = NVFP4,
) -> torch.Tensor:
    """Computes ``alpha * (a * a_scale) @ (b * b_scale)``, with the roundings of a grouped GEMM with one group and N = 1.

    Args:
        a: uint8 or float4_e2m1fn_x2, ``[M, K/2]``.
        b: ``[K/2]`` in the same type.
        a_scale: scales of ``a``; see :func:`grouped_gemm_reference`.
        b_scale: scales of ``b``, like those of a matrix with one row.
        alpha: a number, a float32 tensor with one element, or None.
        out_dtype, scale_layout: see :func:`grouped_gemm_reference`.
        a_format, b_format: formats of ``a`` and ``b``.

    Returns:
        ``[M]`` in ``out_dtype``.
    """
    alphas = (
        None if alpha is None else torch.as_tensor(alpha, dtype=torch.float32, device=a.device).reshape(1)
    )
    operands = ([a], [b.unsqueeze(0)], [a_scale], [b_scale])
    return grouped_gemm_reference(
        *operands, alphas, out_dtype, scale_layout=scale_layout, a_format=a_format, b_format=b_format
    )[0][:, 0]


def weight_only_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: float | torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    bias: torch.Tensor | None = None,
    scale_layout: ScaleLayout = "blocked",
    b_format: BlockFormat = NVFP4,
) -> torch.Tensor:
    """Computes ``alpha * a @ (b * b_scale)^T + bias`` for 16-bit ``a``, with the roundings of :func:`grouped_gemm_reference`.

    4-bit integers times their scales are rounded to float32, which is exact for 16-bit scales, then to the dtype of ``a``. For
    INT8, the sum of products with integers is rounded to float32, and the scale of its column multiplies in float32.

    Args:
        a: float16 or bfloat16, ``[M, K]``.
        b: uint8 or float4_e2m1fn_x2, ``[N, K/2]``.
        b_scale: scales of ``b``; see :func:`grouped_gemm_reference`.
        alpha: a number, a float32 tensor with one element, or None.
        bias: ``[N]``, or None.
        out_dtype, scale_layout: see :func:`grouped_gemm_reference`.
        b_format: format of ``b``.

    Returns:
        ``[M, N]`` in ``out_dtype``.
    """
    acc_dtype = torch.float64 if out_dtype == torch.float64 else torch.float32
    of_columns, (b, b_format) = None, in_rows(b, b_format)
    if b_format == INT8 and acc_dtype == torch.float32:
        of_columns = _rowmajor_scale(b, b_scale, scale_layout, INT8)
        b_scale = torch.ones_like(of_columns)
    weights = expand_operand(b, b_scale, scale_layout, b_format)
    if b_format.is_int4:
        weights = weights.float().to(a.dtype).double()
    acc = (a.double() @ weights.T).add_(0.0).to(acc_dtype)
    if of_columns is not None:
        acc = acc * of_columns.T
    return _finished(acc, alpha, bias, out_dtype)


def weight_only_dual_reference(
    a: torch.Tensor,
    b1: torch.Tensor,
    b2: torch.Tensor | None,
    b1_scale: torch.Tensor,
    b2_scale: torch.Tensor | None,
    alpha1: float | torch.Tensor | None = None,
    alpha2: float | torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    activation: Activation | str = "silu",
    limit: float | None = None,
    weight_layout: str = "separate",
    bias: torch.Tensor | None = None,
    scale_layout: ScaleLayout = "blocked",
    b_format: BlockFormat = NVFP4,
) -> torch.Tensor:
    """Computes ``activation(alpha1 * a @ b1^T) * (alpha2 * a @ b2^T)`` for 16-bit ``a`` in float64, rounded once.

    Args:
        a: float16 or bfloat16, ``[M, K]``. Other arguments are those of :func:`grouped_dual_gemm_reference`, for one group.

    Returns:
        ``[M, N]`` in ``out_dtype``.
    """
    (b1, plain), b2 = in_rows(b1, b_format), None if b2 is None else in_rows(b2, b_format)[0]
    products: list[Any] = [(b1, b1_scale), (b2, b2_scale)]
    b_format = plain
    if weight_layout != "separate":
        products = list(separate_weights(b1, b1_scale, weight_layout, scale_layout, b_format))
    gate, up = (
        weight_only_reference(a, b, scale, alpha, torch.float64, scale_layout=scale_layout, b_format=b_format)
        for (b, scale), alpha in zip(products, (alpha1, alpha2), strict=True)
    )
    if bias is not None:
        gate, up = (x + own for x, own in zip((gate, up), of_products(bias, weight_layout), strict=True))
    return activated(gate, up, activation_of(activation, limit)).to(out_dtype)


def expand_operand(
    data: torch.Tensor, scale: torch.Tensor, scale_layout: ScaleLayout, format: BlockFormat = NVFP4
) -> torch.Tensor:
    """Computes ``value * scale`` of one operand in float64, exactly.

    Args:
        data: uint8 or float4_e2m1fn_x2, ``[rows, K/2]``, or the format's own dtype and size.
        scale: uint8 or float8_e4m3fn, blocked (any form of ``scale_layout.as_blocked``) or row-major ``[rows, K/16]``, or the
            format's own dtype and size.
        scale_layout: "blocked" or "rowmajor".
        format: format of the operand.

    Returns:
        float64 ``[rows, K]``. A NaN scale makes all values of its block NaN.
    """
    data, format = in_rows(data, format)
    return _expand(data, _rowmajor_scale(data, scale, scale_layout, format), format)


def _integer_products(a, b, a_scale, b_scale, out_dtype: torch.dtype) -> torch.Tensor:
    """Returns ``[M, N]``: sums of products of integers as int32, or times both scales in float32."""
    one_a, one_b = (torch.ones(len(x), 1, dtype=torch.float32, device=x.device) for x in (a, b))
    # Sums under 2^53 are exact in float64, in any order.
    sums = _accumulate(a, b, one_a, one_b, "rowmajor", INT8, INT8)
    if out_dtype == torch.int32:
        return sums.to(torch.int32)
    of_rows, of_columns = (
        _rowmajor_scale(x, scale, "rowmajor", INT8)
        for x, scale in zip((a, b), (a_scale, b_scale), strict=True)
    )
    return sums.float() * of_columns.T * of_rows


def _accumulate(
    a, b, a_scale, b_scale, scale_layout: ScaleLayout, a_format: BlockFormat, b_format: BlockFormat
) -> torch.Tensor:
    """Returns float64 ``[M, N]``. Expands B piece by piece, so that the copy stays small."""
    b, b_format = in_rows(b, b_format)
    if a.ndim != 2 or b.ndim != 2 or a_format.elements(a.shape[1]) != b_format.elements(b.shape[1]):
        raise ValueError(
            f"a is [M, K/2] and b is [N, K/2] with the same K; got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    a_values = expand_operand(a, a_scale, scale_layout, a_format)
    b_scale = _rowmajor_scale(b, b_scale, scale_layout, b_format)
    acc = torch.empty(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    unit = b_format.block_rows
    step = max(1, CHUNK_ELEMS // a_values.shape[1] // unit) * unit
    for start in range(0, b.shape[0], step):
        scales = b_scale[start // unit : (start + step) // unit]
        acc[:, start : start + step] = a_values @ _expand(b[start : start + step], scales, b_format).T
    # BLAS may return -0 where every product is -0. An accumulator that starts at +0 does not.
    return acc.add_(0.0)


def _expand(data: torch.Tensor, rowmajor_scale: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    scale = rowmajor_scale
    if format.block_rows > 1:
        scale = scale.repeat_interleave(format.block_rows, dim=0)[: len(data)]
    return decode_blocks(data.view(torch.uint8), scale, format, torch.float64)


def _rowmajor_scale(
    data: torch.Tensor, scale: torch.Tensor, scale_layout: ScaleLayout, format: BlockFormat
) -> torch.Tensor:
    """Returns scales ``[rows, K/16]`` (one row and column per block) without padding, as uint8 or wider scales.

    Scales of a format with row-major scales already have this layout. Scales of more than 8 bits are bytes as well.
    """
    rows, k = data.shape[0], format.elements(data.shape[1])
    k_blocks = format.num_k_blocks(k)
    if format.scale.bits > 8 and scale.dtype == torch.uint8:
        scale = scale.view(format.scale_dtypes[0])
    if format.scale_layout == "rowmajor":
        scale_layout = "rowmajor"
        scale = scale.reshape(format.scale_shape(rows, k)) if scale.ndim == 1 else scale
    if scale_layout == "blocked":
        blocked = as_blocked(scale, rows, k, format)
        blocked = blocked.view(format.scale_dtypes[0]) if format.scale.bits > 8 else blocked
        return from_blocked(blocked, rows, k_blocks)
    if scale_layout != "rowmajor":
        raise ValueError(f'scale_layout={scale_layout!r} is neither "blocked" nor "rowmajor"')
    expected = format.scale_shape(rows, k, "rowmajor")
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"row-major scales of {rows} rows and K={k} have shape {expected}; got {tuple(scale.shape)}"
        )
    return scale if format.scale.bits > 8 else scale.view(torch.uint8)
