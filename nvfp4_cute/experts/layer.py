"""moe: a whole layer of experts."""

from typing import Any, Literal

import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.experts.activation import ACTIVATIONS
from nvfp4_cute.experts.combine import finalize
from nvfp4_cute.experts.gather import gather_quantize
from nvfp4_cute.experts.middle import activate_quantize
from nvfp4_cute.experts.weights import per_expert, product_factors
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.operands import rules as checks
from nvfp4_cute.ops.dual_gemm import grouped_dual_gemm
from nvfp4_cute.ops.grouped_gemm import grouped_gemm
from nvfp4_cute.problem import NVFP4, Activation

ExpertLayout = Literal[
    "concatenated", "interleaved", "interleaved_64_up_first", "interleaved_32_gate_first", "none"
]
LAYOUTS = ("concatenated", "interleaved", "interleaved_64_up_first", "interleaved_32_gate_first", "none")
# Rows of both halves of concatenated weights whose scales are in blocks of their own.
FUSED_ROWS = 256


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: Any,
    w2: Any,
    *,
    activation: Activation = "silu",
    limit: float | None = None,
    weight_layout: ExpertLayout = "concatenated",
    input_scale: torch.Tensor | None = None,
    hidden_scale: torch.Tensor | None = None,
    alpha13: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    alpha2: torch.Tensor | None = None,
    bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    first_expert: int = 0,
    backend: str = "auto",
) -> torch.Tensor:
    """A layer of experts: ``y[t] = sum over k of weights[t, k] * W2_e (activation(W1_e x[t]) * W3_e x[t])``, ``e = ids[t, k]``.

    At most six launches: the order of rows (none of its own with up to 64 choices), ``gather_quantize``, ``grouped_dual_gemm``
    with quantized results, ``grouped_gemm``, ``finalize``; with biases, without a gate, or where the weights' rows do not suit
    ``grouped_dual_gemm``, a ``grouped_gemm`` and ``activate_quantize`` take its place. (On sm_90a a product may decode its rows
    by a launch of its own.) Nothing waits for the device; a captured CUDA graph follows ids that change. Buffers are allocated by
    torch for T * k rows. Rounded: rows to NVFP4 twice, the second product's rows to ``x``'s dtype, and the result.

    Args:
        x: float16 or bfloat16 [T, H], H a multiple of 32.
        ids, weights: as of ``route``: int32 or int64 [T, k] and float32 [T, k]. An id that is not of a local expert, such as -1,
            is left out.
        w13: of all local experts, [E, 2 I, H] (``weight_layout``), or [E, I, H] without a gate: NVFP4Tensor, or
            ``experts.weights.ExpertWeights``, which may have a global scale for each expert, or for gate and up of each.
        w2: the same, [E, H, I].
        activation: "silu", "gelu_tanh", "relu2" or "swiglu_oai" (gpt-oss): as of ``grouped_dual_gemm``.
        limit: cuts the gate to at most this, and up on both sides.
        weight_layout: of w13's rows: "concatenated" [gate; up], "interleaved" one of each in turn, "none" where there is no gate,
            or an interleaved one of ``grouped_dual_gemm``.
        input_scale: global scale of x, calibrated: float32, one element, or [E].
        hidden_scale: that of what lies between the products: one element, or [E].
        alpha13, alpha2: factors of the two products, float32 [E], alpha13 perhaps two, of gate and up. None computes them from
            global scales, ``w13.global_scale * input_scale``, in small launches of torch's where both are given.
        bias13: of x's dtype [E, rows of w13], added before the activation. bias2: [E, H], added before the weights.
        shared: of x's dtype [T, H]: added to the result, such as a shared expert's.
        first_expert: the id of the first local expert.
        backend: "auto", "cuda", "emulator", "emulator:ARCH" or "reference".

    Returns:
        y, [T, H] of x's dtype; the same bits in every run.

    Example:
        >>> from nvfp4_cute.experts.weights import ExpertWeights
        >>> w13, w2 = (ExpertWeights.quantize(torch.randn(4, n, k) / 16) for n, k in ((512, 128), (128, 256)))
        >>> ids, weights = route(torch.randn(3, 4), 2)
        >>> moe(torch.randn(3, 128).bfloat16(), ids, weights, w13, w2).shape
        torch.Size([3, 128])

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule. UnsupportedTarget: no kernel for the GPU.
    """
    checks.check_choice("activation", activation, ACTIVATIONS)
    checks.check_choice("weight_layout", weight_layout, LAYOUTS)
    experts, rows = _check_weights(x, w13, w2, weight_layout)
    if alpha13 is None:
        alpha13 = product_factors(w13, input_scale, experts)  # type: ignore[assignment]
    gate_alpha, up_alpha = alpha13 if isinstance(alpha13, tuple) else (alpha13, alpha13)
    if alpha2 is None:
        alpha2, _ = product_factors(w2, hidden_scale, experts)
    hidden_scale = per_expert(hidden_scale, experts, x.device)
    if torch.compiler.is_compiling():  # the custom op (experts.library) that a traced graph keeps
        return torch.ops.nvfp4_cute.moe(
            x, ids, weights, [w13.data, w13.scale], [w2.data, w2.scale], activation, limit, weight_layout, input_scale,
            hidden_scale, gate_alpha, up_alpha, alpha2, bias13, bias2, shared, first_expert, backend,
        )  # fmt: skip
    data, scale, order = gather_quantize(
        x, ids, experts, global_scale=input_scale, first_expert=first_expert, backend=backend
    )
    is_fused = bias13 is None and weight_layout not in ("interleaved", "none")
    if weight_layout == "concatenated" and rows % FUSED_ROWS:
        is_fused = False
    if is_fused:
        fused_layout: Any = weight_layout
        hidden = grouped_dual_gemm(
            data, w13.data, None, scale, w13.scale, None, gate_alpha, up_alpha, offs=order.offs, activation=activation,
            limit=limit, weight_layout=fused_layout, out_dtype=NVFP4, out_global_scale=hidden_scale, backend=backend,
        )  # fmt: skip
    else:
        hidden = _middle(
            (data, scale), ids, order, w13, gate_alpha, up_alpha, bias13, hidden_scale, x.dtype,
            activation=activation, limit=limit, gate_layout=weight_layout, first_expert=first_expert, backend=backend,
        )  # fmt: skip
    down = grouped_gemm(
        hidden[0], w2.data, hidden[1], w2.scale, order.offs, alpha2, out_dtype=x.dtype, backend=backend
    )
    return finalize(
        down, order.rows, weights, shared=shared, bias=bias2, ids=ids, first_expert=first_expert, backend=backend
    )  # fmt: skip


def _middle(
    rows, ids, order, w13, gate_alpha, up_alpha, bias, hidden_scale, dtype, *, gate_layout, backend, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first product and its activation, by two launches."""
    if gate_layout not in ("concatenated", "interleaved", "none"):
        raise UnsupportedProblem(
            f'weight_layout={gate_layout!r} with bias13: pass rows that are "concatenated" or "interleaved"'
        )
    if gate_alpha is not up_alpha:
        raise UnsupportedProblem(
            "gate and up have factors of their own, and the layer is not one for grouped_dual_gemm (a bias, rows in turn, or "
            "halves that are no multiple of 128 rows): give both halves of every expert one global scale"
        )
    data, scale = rows
    h = grouped_gemm(
        data, w13.data, scale, w13.scale, order.offs, gate_alpha, out_dtype=dtype, backend=backend
    )
    return activate_quantize(
        h, ids, order, gate_layout=gate_layout, bias=bias, global_scale=hidden_scale, backend=backend, **options
    )  # fmt: skip


def _check_weights(x: torch.Tensor, w13: Any, w2: Any, layout: str) -> tuple[int, int]:
    """Experts, and rows of w13 of each. Raises TypeError or ValueError where shapes do not fit each other."""
    for name, tensor in (("w13", w13), ("w2", w2)):
        if not all(isinstance(getattr(tensor, part, None), torch.Tensor) for part in ("data", "scale")):
            raise TypeError(f"{name} is a {type(tensor).__name__}; pass an NVFP4Tensor or ExpertWeights")
        if tensor.data.ndim != 3:
            raise ValueError(f"{name} has data {list(tensor.data.shape)}; expected [E, N, K/2]")
    (experts, rows, row_bytes), down = w13.data.shape, tuple(w2.data.shape)
    width = rows if layout == "none" else rows // 2
    wanted = (experts, x.shape[-1], NVFP4_FORMAT.row_bytes(width))
    if x.ndim != 2 or x.shape[1] != NVFP4_FORMAT.elements(row_bytes) or down != wanted:
        raise ValueError(
            f"x has shape {list(x.shape)}, w13 {list(w13.data.shape)} and w2 {list(down)} in bytes; expected [T, H], "
            f"[E, {'I' if layout == 'none' else '2 I'}, H/2] and [E, H, I/2]"
        )
    return experts, rows
