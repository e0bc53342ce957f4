"""Products of 16-bit rows and NVFP4 weights as layers want them: rows quantized or not, and the middle of a gated MLP."""

from typing import Any, NamedTuple

import torch

from nvfp4_cute.backends.calls import chain
from nvfp4_cute.formats.block_format import TMA_ALIGN_BYTES
from nvfp4_cute.nn.activations import Mode
from nvfp4_cute.nn.weight_only import weight_only_linear
from nvfp4_cute.ops.global_scale import find_global_scale
from nvfp4_cute.ops.parts.dual_gemm import dual_gemm
from nvfp4_cute.ops.parts.gemm import gemm
from nvfp4_cute.ops.quantize import find_and_quantize, quantize
from nvfp4_cute.problem import NVFP4, Activation

# Kernels take 16-bit activations; float32 ones are rounded to this, which has their range.
KERNEL_DTYPE = torch.bfloat16
# 16-bit rows are a multiple of this apart, and 16 bytes.
ALIGN_ELEMENTS = TMA_ALIGN_BYTES // KERNEL_DTYPE.itemsize
# Rows up to which the launch that computes gate and up also quantizes their result. Measured on an H100 (``bench/notes``), where
# beyond about 100 rows it loses to one with 16-bit results and a launch that quantizes.
QUANTIZED_HIDDEN_ROWS = 96


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
    """``alpha * x @ W^T + bias`` of a layer, [M, N]. Raises what ``quantize`` and ``gemm`` refuse.

    Args:
        x: [M, K], float16 or bfloat16, quantized by ``input_global_scale``; or multiplied as it is, copied where rows are not
            aligned.
        alpha: float32 of one element, or one a column [N]: float32 sums are multiplied by these, and rounded once all the same.
        finds_input_scale: whether the input's global scale is found here, and is no factor of ``alpha`` yet.
        mode: "nvfp4" or "16bit".
        bias: as of ``gemm``.
    """
    if alpha.numel() > 1:
        if finds_input_scale:
            (input_global_scale,) = find_global_scale(x, backend=backend)
            alpha = alpha * input_global_scale
        one = torch.ones((), device=x.device)
        sums = product(x, weight, weight_scale, one, input_global_scale, False, mode, torch.float32, backend)
        # What is behind a factor a column no launch of the product can add.
        sums *= alpha
        if bias is not None:
            sums += bias
        return sums.to(out_dtype)
    how = (finds_input_scale, mode)
    given = (x, weight, weight_scale, alpha, input_global_scale, *how, out_dtype, backend, bias)
    inputs = [x, weight, weight_scale, alpha]
    if input_global_scale is not None:
        inputs.append(input_global_scale)
    if bias is not None:
        inputs.append(bias)
    settings = ("linear", *how, out_dtype, bias is None)
    return chain(backend, settings, inputs, _product, *given)


def _product(
    x, weight, weight_scale, alpha, input_global_scale, finds_input_scale, mode, out_dtype, backend, bias
) -> torch.Tensor:
    if mode == "16bit":
        return weight_only_linear(aligned(x), weight, weight_scale, alpha, out_dtype, backend, bias=bias)
    if finds_input_scale:
        q, (alpha,) = find_and_quantize(x, alpha, backend=backend)
    else:
        q = quantize(x, global_scale=input_global_scale, backend=backend)
    return gemm(
        q.data, weight, q.scale, weight_scale, alpha,
        bias=bias, out_dtype=out_dtype, early_weights=True, backend=backend,
    )  # fmt: skip


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy of it where kernels cannot read 16-bit rows as they lie, or rows share their bytes."""
    if len(x) > 1 and x.stride(0) < x.shape[1]:
        return x.contiguous()
    if x.stride(1) != 1 or x.stride(0) % ALIGN_ELEMENTS or x.data_ptr() % TMA_ALIGN_BYTES:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def result_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that torch.nn.Linear gives for ``x``: that of autocast, where it is on and ``x`` is no float64, or of ``x``."""
    kind = "cuda" if x.is_cuda else x.device.type  # a device is slow to ask for its type
    # Meta tensors have no autocast.
    if x.dtype != torch.float64 and not x.is_meta and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


class Weights(NamedTuple):
    """A layer's weights: uint8 [N, K/2], blocked scales, and what products are multiplied by, float32 of one element."""

    data: torch.Tensor
    scale: torch.Tensor
    alpha: torch.Tensor


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
    """``down(activation(gate(x)) * up(x)) + bias``, [M, N]: gate and up are one launch. Raises what ``dual_gemm`` refuses.

    What lies between is computed in float32 and rounded once: to the dtype of ``x``, or to NVFP4 of few rows in mode "nvfp4".

    Args:
        x: [M, K], float16 or bfloat16. activation: "silu" or "gelu_tanh".
        hidden_global_scale: of what ``down`` quantizes, a factor of ``down.alpha``.
        finds_input_scale, finds_hidden_scale: whether these are found here, and are no factors yet.
        bias: of ``down``, as of ``gemm``.
    """
    scales = (input_global_scale, hidden_global_scale)
    inputs = [x, *gate, *up, *down, *(given for given in (*scales, bias) if given is not None)]
    choices = (finds_input_scale, finds_hidden_scale, activation, mode, out_dtype)
    settings = ("gated_mlp", *(given is None for given in (*scales, bias)), *choices)
    return chain(
        backend, settings, inputs, _gated_product, x, gate, up, down, *scales, *choices, backend, bias
    )


def _gated_product(
    x, gate, up, down, input_global_scale, hidden_global_scale, finds_input_scale, finds_hidden_scale, activation, mode,
    out_dtype, backend, bias,
) -> torch.Tensor:  # fmt: skip
    sides: dict[str, Any] = {"activation": activation, "backend": backend}
    if mode == "16bit":
        h = dual_gemm(
            aligned(x), gate.data, up.data, None, gate.scale, up.scale, gate.alpha, up.alpha, out_dtype=x.dtype, **sides
        )  # fmt: skip
        return product(h, down.data, down.scale, down.alpha, None, False, mode, out_dtype, backend, bias)
    if finds_input_scale:
        q, alphas = find_and_quantize(x, gate.alpha, up.alpha, backend=backend)
        gate, up = (side._replace(alpha=alpha) for side, alpha in zip((gate, up), alphas, strict=True))
    else:
        q = quantize(x, global_scale=input_global_scale, backend=backend)
    sides["early_weights"] = True
    first = (q.data, gate.data, up.data, q.scale, gate.scale, up.scale, gate.alpha, up.alpha)
    if not finds_hidden_scale and len(x) <= QUANTIZED_HIDDEN_ROWS:
        hidden = dual_gemm(*first, out_dtype=NVFP4, out_global_scale=hidden_global_scale, **sides)
        return gemm(
            hidden.data, down.data, hidden.scale, down.scale, down.alpha,
            bias=bias, out_dtype=out_dtype, early_weights=True, backend=backend,
        )  # fmt: skip
    h = dual_gemm(*first, out_dtype=x.dtype, **sides)
    how = (hidden_global_scale, finds_hidden_scale, mode)
    return product(h, down.data, down.scale, down.alpha, *how, out_dtype, backend, bias)
