"""Products of 16-bit rows and NVFP4 weights for layers, with or without quantized rows, and the middle of a gated MLP."""

from typing import Any, NamedTuple

import torch

from nvfp4_cute.backends.calls import chain, chain_of_rows
from nvfp4_cute.batch_invariance import is_batch_invariant, refuse_found_scales
from nvfp4_cute.experts.checks import format_of_rows, has_row_scales
from nvfp4_cute.formats.block_format import TMA_ALIGN_BYTES, BlockFormat
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.formats.global_scale import PER_ROW
from nvfp4_cute.nn.activations import LayerMode, Mode, rows_format
from nvfp4_cute.operands.whole import Parts
from nvfp4_cute.ops.global_scale import find_global_scale
from nvfp4_cute.ops.options import GateUp, Options
from nvfp4_cute.ops.parts.dual_gemm import dual_gemm, gate_up
from nvfp4_cute.ops.parts.gemm import gemm
from nvfp4_cute.ops.quantize import find_and_quantize, quantize
from nvfp4_cute.problem import Activation

# Kernels read 16-bit activations. float32 ones are rounded to bfloat16, which has their range.
KERNEL_DTYPE = torch.bfloat16
# Rows of 16-bit values start at multiples of 16 bytes.
ALIGN_ELEMENTS = TMA_ALIGN_BYTES // KERNEL_DTYPE.itemsize
# Largest number of rows for which the launch of gate and up also quantizes. Measured on an H100 (``bench/notes``): from about
# 100 rows on, 16-bit results and a separate launch that quantizes are faster.
QUANTIZED_HIDDEN_ROWS = 96
# The launch that quantizes rows writes no weights.
EARLY = Options(prefetch_weights=True)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    alpha: torch.Tensor,
    input_global_scale: torch.Tensor | None,
    finds_input_scale: bool,
    mode: Mode,
    out_dtype: torch.dtype,
    backend: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``alpha * x @ W^T + bias`` for a layer, [M, N]. Raises what ``quantize`` and ``gemm`` raise.

    Args:
        x: [M, K], float16 or bfloat16. Mode "nvfp4" quantizes it with ``input_global_scale``; mode "16bit" multiplies it
            directly, and copies it if rows are not aligned.
        weight: uint8 [N, K/2].
        weight_scale: blocked scales of the weights.
        alpha: float32 with one element, or with one per column [N]. It multiplies float32 sums, which are rounded once.
        input_global_scale: global scale of quantized rows, or None.
        finds_input_scale: whether this function computes the input's global scale and multiplies ``alpha`` by it.
        mode: "16bit", or the format to which rows are quantized.
        out_dtype, backend, bias: see ``gemm``.
    """
    if alpha.numel() > 1:
        if finds_input_scale:
            refuse_found_scales()
            (input_global_scale,) = find_global_scale(x, format=_format(mode), backend=backend)
            alpha = alpha * input_global_scale
        one, of_rows = torch.ones((), device=x.device), None
        # The launch of the product cannot add, or multiply by, what follows a factor per column.
        if has_row_scales(mode):
            q = _quantized(x, None, mode, backend)
            of_rows = q.global_scale
            how: Any = {"out_dtype": torch.float32, "backend": backend, "options": EARLY}
            sums = gemm(Parts(q.data, q.scale), Parts(weight, weight_scale), one, **how)
        else:
            sums = product(
                x, weight, weight_scale, one, input_global_scale, False, mode, torch.float32, backend
            )
        sums *= alpha
        if of_rows is not None:
            sums *= of_rows[:, None]
        if bias is not None:
            sums += bias
        return sums.to(out_dtype)
    if finds_input_scale:
        refuse_found_scales()
    how = (finds_input_scale, mode, out_dtype, backend)
    return chain_of_rows(backend, _product, 1, x, weight, weight_scale, alpha, input_global_scale, *how, bias)


def _product(
    x, weight, weight_scale, alpha, input_global_scale, finds_input_scale, mode, out_dtype, backend, bias
) -> torch.Tensor:
    w = Parts(weight, weight_scale)
    if mode == "16bit":
        return gemm(aligned(x), w, alpha, bias=bias, out_dtype=out_dtype, backend=backend)
    q: BlockScaledTensor
    if finds_input_scale:
        q, (alpha,) = find_and_quantize(x, alpha, format=_format(mode), backend=backend)
    else:
        q = _quantized(x, input_global_scale, mode, backend)
    rows = Parts(q.data, q.scale, row_scale=_row_scale(q, mode))
    return gemm(rows, w, alpha, bias=bias, out_dtype=out_dtype, backend=backend, options=EARLY)


def product_of_format(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    format: BlockFormat,
    mode: LayerMode,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """Computes ``x @ W^T + bias`` with weights in formats that have no global scales, [M, N]. Raises as :func:`product` does.

    Args:
        x: [M, K], float16 or bfloat16, or what ``quantize`` takes. Mode "16bit" multiplies it, others quantize it.
        weight, scale: codes of the weights, and scales in the layout of kernels.
        bias, format, out_dtype, backend: see ``gemm``; ``format`` is that of the weights.
        mode: "16bit", or the format to which rows are quantized.
    """
    how = format, mode, out_dtype, backend
    return chain_of_rows(backend, _product_of_format, 1, x, weight, scale, bias, *how)


def _product_of_format(x, weight, scale, bias, format, mode, out_dtype, backend) -> torch.Tensor:
    w, options = Parts(weight, scale, format), {"bias": bias, "out_dtype": out_dtype, "backend": backend}
    if mode == "16bit":
        return gemm(aligned(x), w, **options)
    own = rows_format(format)
    q = quantize(x, format=own, backend=backend)
    return gemm(Parts(q.data, q.scale, own), w, **options)


def _format(mode: Mode) -> Any:
    """Returns the format to which a mode other than "16bit" quantizes rows."""
    return format_of_rows(mode)


def _quantized(x: torch.Tensor, given: torch.Tensor | None, mode: Mode, backend: str) -> BlockScaledTensor:
    """Quantizes rows with a given global scale or, if the mode says so, with one per row."""
    g: Any = PER_ROW if has_row_scales(mode) else given
    return quantize(x, format=_format(mode), global_scale=g, backend=backend)


def _row_scale(q: BlockScaledTensor, mode: Mode) -> torch.Tensor | None:
    """Returns the global scales per row; None if one for all rows is a factor of the products' alpha."""
    return q.global_scale if has_row_scales(mode) else None


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x``, or a copy if kernels cannot read its 16-bit rows or if rows overlap."""
    if len(x) > 1 and x.stride(0) < x.shape[1]:
        return x.contiguous()
    if x.stride(1) != 1 or x.stride(0) % ALIGN_ELEMENTS or x.data_ptr() % TMA_ALIGN_BYTES:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def result_dtype(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype of torch.nn.Linear's result: autocast's where it is on, but not for float64; otherwise that of ``x``."""
    kind = "cuda" if x.is_cuda else x.device.type  # looking up the type of a device is slow
    # Meta tensors do not support autocast.
    if x.dtype != torch.float64 and not x.is_meta and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


class Weights(NamedTuple):
    """A layer's weights: uint8 [N, K/2], blocked scales, and the factor of products, float32 with one element."""

    data: torch.Tensor
    scale: torch.Tensor
    alpha: torch.Tensor


def _gate_up(gate: Weights, up: Weights) -> GateUp:
    """Returns the weights of both projections as ``dual_gemm`` takes them."""
    one, other = (Parts(w.data, w.scale) for w in (gate, up))
    return gate_up(one, other, gate_alpha=gate.alpha, up_alpha=up.alpha)


def gated_product(
    x: torch.Tensor,
    gate: Weights,
    up: Weights,
    down: Weights,
    input_global_scale: torch.Tensor | None,
    hidden_global_scale: torch.Tensor | None,
    finds_input_scale: bool,
    finds_hidden_scale: bool,
    activation: Activation,
    mode: Mode,
    out_dtype: torch.dtype,
    backend: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``down(activation(gate(x)) * up(x)) + bias``, [M, N], with gate and up in one launch.

    Raises what ``dual_gemm`` raises.

    Hidden activations are computed in float32 and rounded once: to the dtype of ``x``, or to NVFP4 for few rows that are
    quantized.

    Args:
        x: [M, K], float16 or bfloat16.
        gate, up, down: weights of the three layers.
        input_global_scale: global scale of quantized rows of ``x``.
        hidden_global_scale: global scale of the hidden activations, already a factor of ``down.alpha``.
        finds_input_scale, finds_hidden_scale: whether this function computes these scales and multiplies the factors by them.
        activation: text of ``nvfp4_cute.activation``.
        mode: "16bit", or the format to which rows are quantized.
        out_dtype, backend: see ``gemm``.
        bias: bias of ``down``; see ``gemm``.
    """
    if finds_input_scale or finds_hidden_scale:
        refuse_found_scales()
    how = (finds_input_scale, finds_hidden_scale, activation, mode, out_dtype, backend)
    given = (x, gate, up, down, input_global_scale, hidden_global_scale)
    return chain(backend, _gated_product, *given, *how, bias)


def _gated_product(
    x, gate, up, down, input_global_scale, hidden_global_scale, finds_input_scale, finds_hidden_scale, activation, mode,
    out_dtype, backend, bias,
) -> torch.Tensor:  # fmt: skip
    sides: dict[str, Any] = {"activation": activation, "backend": backend}
    if mode == "16bit":
        h = dual_gemm(aligned(x), _gate_up(gate, up), out_dtype=x.dtype, **sides)
        return product(h, down.data, down.scale, down.alpha, None, False, mode, out_dtype, backend, bias)
    q: BlockScaledTensor
    if finds_input_scale:
        q, alphas = find_and_quantize(x, gate.alpha, up.alpha, format=_format(mode), backend=backend)
        gate, up = (side._replace(alpha=alpha) for side, alpha in zip((gate, up), alphas, strict=True))
    else:
        q = _quantized(x, input_global_scale, mode, backend)
    sides["options"] = EARLY
    first = Parts(q.data, q.scale, row_scale=_row_scale(q, mode)), _gate_up(gate, up)
    can_quantize = not finds_hidden_scale and not has_row_scales(mode) and not is_batch_invariant()
    if can_quantize and len(x) <= QUANTIZED_HIDDEN_ROWS:
        hidden = dual_gemm(*first, out_dtype=mode, out_global_scale=hidden_global_scale, **sides)
        rows, w = Parts(hidden.data, hidden.scale), Parts(down.data, down.scale)
        return gemm(rows, w, down.alpha, bias=bias, out_dtype=out_dtype, backend=backend, options=EARLY)
    h = dual_gemm(*first, out_dtype=x.dtype, **sides)
    how = (hidden_global_scale, finds_hidden_scale, mode)
    return product(h, down.data, down.scale, down.alpha, *how, out_dtype, backend, bias)
