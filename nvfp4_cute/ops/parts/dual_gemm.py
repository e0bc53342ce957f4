"""Dual GEMMs on parts: C = activation(alpha1 * A @ B1^T) * (alpha2 * A @ B2^T), dense or grouped."""

from typing import Any

import torch

from nvfp4_cute import private_api
from nvfp4_cute.backends.calls import call
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_scaled import ScaleLayout
from nvfp4_cute.launch.task import Task
from nvfp4_cute.operands import products
from nvfp4_cute.operands.grouped import Result, Weights, dual_weights
from nvfp4_cute.operands.numbers_on_device import numbers_of
from nvfp4_cute.operands.results import as_results, as_stored, flat_outputs, one_result
from nvfp4_cute.operands.whole import Parts, batched_parts, is_converted, operands_of, times
from nvfp4_cute.ops.options import DEFAULT, GateUp, Options
from nvfp4_cute.ops.parts import composed_dual
from nvfp4_cute.ops.parts.grouped_gemm import (
    flat_inputs,
    flat_operands,
    flat_rows,
    group_outputs,
    grouped_task,
)
from nvfp4_cute.ops.traced import (
    format_name,
    new_group_results,
    refuse_config,
    refuse_gradients,
    torch_dtype,
)
from nvfp4_cute.problem import RESULT_FORMATS, Activation, Gate, OutDtype, result_format


def gate_up(
    gate: Any, up: Any = None, layout: Any = "separate", gate_alpha: Any = None, up_alpha: Any = None
) -> GateUp:
    """Returns a ``GateUp`` of weights given as ``Parts``, which the public record does not mention."""
    return GateUp(gate, up, layout, gate_alpha, up_alpha)


def grouped_dual_gemm(
    a: Any,
    w: GateUp,
    offs: torch.Tensor | None = None,
    *,
    masked_m: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: Activation = "silu",
    limit: float | None = None,
    out: Any = None,
    out_dtype: OutDtype = torch.bfloat16,
    out_global_scale: Any = None,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
    options: Options = DEFAULT,
) -> Any:
    """Computes :func:`nvfp4_cute.grouped_dual_gemm` of whole tensors, or of ``Parts``: data with scales.

    Formats with float32 scales need "separate" or "concatenated" weights. The pair FP8_1x128 and FP8_128x128 has a fused kernel
    on every GPU. For INT8, two launches compute the products in float32; torch operations, with torch's exponential, do the rest.

    Args:
        a, offs, masked_m, out, scale_layout, options: as for ``parts.grouped_gemm``.
        w: weights of the gate and of the up projection, [N_g, K/2] each; ragged and masked: [G, N, K/2].
        bias: [G, 2 N], added to both products before the activation: one number per row of the weights in their layout; of
            separate weights the gate's, then up's. Ragged and masked forms of weights whose scales are in blocks, outside traced
            graphs.
        activation, limit: ``Activation.function`` and ``Activation.limit``.

    Raises what the public operation raises. Nothing is written to ``out`` when a check fails.
    """
    is_list, out_format = offs is None and masked_m is None, RESULT_FORMATS.get(out_dtype)
    config = options.config
    early_weights = options.prefetch_weights and not is_converted(scale_layout, w.gate, w.up)
    rows, first, second = operands_of(scale_layout, out_dtype, a, w.gate, w.up)
    a, a_scale, a_format, row_scale, _ = rows
    (b1, b1_scale, b_format, *_), (b2, b2_scale, *_) = first, second
    alpha1, alpha2 = _dual_alphas(w, rows, first, second)
    if bias is not None and (is_list or private_api.is_traced() or b_format.scale_layout == "rowmajor"):
        raise UnsupportedProblem(
            f"bias with {b_format.title} weights in a list, with float32 scales or in a traced graph: add it in activate"
        )
    if private_api.is_traced():
        given = (a, b1, a_scale, b1_scale) + (() if b2 is None else (b2, b2_scale))
        choices = (activation, limit, w.layout)
        return _traced(given, (alpha1, alpha2), row_scale, (offs, masked_m), choices, out, out_dtype, out_global_scale,
                       config, (scale_layout, backend, a_format.name, b_format.name))  # fmt: skip
    alpha1 = numbers_of(alpha1, a, offs, masked_m)
    alpha2 = numbers_of(alpha2, a, offs, masked_m)
    if out_global_scale is not None:
        out_global_scale = numbers_of(out_global_scale, a, offs, masked_m, is_in_result=True)
    sides: tuple[Any, ...] = (a, b1, b1_scale) if a_scale is None else (a, b1, a_scale, b1_scale)
    sides = sides if row_scale is None else (*sides, row_scale)
    counts, inputs = flat_inputs(sides, offs, masked_m)
    others: list[Any] = []
    if b2 is not None:
        more, others = flat_inputs((b2, b2_scale), None, None) if is_list else ((), [b2, b2_scale])
        counts = (counts, more)
    inputs += [x for x in (alpha1, *others, alpha2, bias, out_global_scale) if x is not None]

    absent = (
        a_scale is None, row_scale is None, alpha1 is None, alpha2 is None, bias is None, out_global_scale is None,
    )  # fmt: skip
    choices, formats = (activation, limit, w.layout), (a_format, b_format)
    names = a_format.name, b_format.name

    def check() -> tuple[Task, list[torch.Tensor]]:
        gate = Gate.checked(*choices, (b2, b2_scale))
        weights = dual_weights(
            Weights("b1", b1, b1_scale, "alpha1", alpha1, b_format),
            Weights("b2", b2, b2_scale, "alpha2", alpha2, b_format),
            [1.0] * len(a) if is_list else 1.0,
        )
        result, how = (
            Result(out, out_dtype, out_global_scale),
            (scale_layout, gate, config, early_weights, bias),
        )
        return grouped_task(rows, weights, (offs, masked_m), result, *how)

    is_composed = composed_dual.is_composed(a_scale, formats, backend, a, b1)
    if a_scale is None and config is None and is_list and len(a) == len(b1) == 1:
        is_composed |= composed_dual.dequantizes_first(a[0], b1[0], b_format, w.layout, out_dtype, backend)
    if is_composed:
        _, outs = check()
        composed_dual.compute(
            (rows, first, second), (alpha1, alpha2), (offs, masked_m), Gate(*choices), outs,
            scale_layout=scale_layout, backend=backend, options=Options(config, early_weights),
        )  # fmt: skip
    else:
        settings = (
            "grouped_dual_gemm", counts, absent, choices, out_dtype, scale_layout, config, *names, early_weights,
        )  # fmt: skip
        outs = call(backend, settings, inputs, group_outputs(out, is_list, out_format), check)
    return as_results(outs, is_list, out_format, out_global_scale)


def _dual_alphas(w: GateUp, a: Parts, first: Parts, second: Parts) -> tuple[Any, Any]:
    """Multiplies each alpha by the global scales of ``a`` and of its weights."""
    of_a, one, other = a.global_scale, first.global_scale, (first if w.up is None else second).global_scale
    if of_a is one is other is None:
        return w.gate_alpha, w.up_alpha
    return times(w.gate_alpha, of_a, one), times(w.up_alpha, of_a, other)


def _traced(
    operands, alphas, row_scale, sizes, choices, out, out_dtype, global_scale, config, settings
) -> Any:
    """Calls the custom op (``ops.library``) that a traced graph keeps; the graph allocates the results."""
    refuse_config(config)
    is_list, out_format = all(x is None for x in sizes), result_format(out_dtype)
    a, b1 = operands[:2]
    groups: Any = a if is_list else next(x for x in sizes if x is not None)
    *alphas, factors = (numbers_of(x, groups) for x in (*alphas, global_scale))
    if out is not None:
        outs = group_outputs(out, is_list, out_format)
    else:
        separate = 1 if choices[2] == "separate" else 2
        outs = new_group_results(a, b1, None if is_list else len(groups), separate, out_dtype)
    flat, rows = flat_operands(operands, is_list), flat_rows(row_scale)
    refuse_gradients(*flat, *rows, *alphas, factors)
    torch.ops.nvfp4_cute.grouped_dual_gemm_out(
        flat, len(a) if is_list else None, *alphas, rows, *sizes, *choices, outs,
        torch_dtype(out_dtype), factors, *settings, out_format=format_name(out_dtype),
    )  # fmt: skip
    return as_results(outs, is_list, out_format, factors)


def dual_gemm(
    a: Any,
    w: GateUp,
    *,
    activation: Activation = "silu",
    limit: float | None = None,
    out: Any = None,
    out_dtype: OutDtype = torch.bfloat16,
    out_global_scale: Any = None,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
    options: Options = DEFAULT,
) -> Any:
    """Computes :func:`nvfp4_cute.dual_gemm` of whole tensors, or of ``Parts``: data with scales.

    Operands are shaped as for ``parts.gemm``; the weights are those of :func:`grouped_dual_gemm`.

    Raises what the public operation raises. Nothing is written to ``out`` when a check fails.
    """
    config = options.config
    early_weights = options.prefetch_weights and not is_converted(scale_layout, w.gate, w.up)
    rows, first, second = operands_of(scale_layout, out_dtype, a, w.gate, w.up, split=batched_parts)
    a, a_scale, a_format, row_scale, _ = rows
    (b1, b1_scale, b_format, *_), (b2, b2_scale, *_) = first, second
    alpha1, alpha2 = _dual_alphas(w, rows, first, second)
    alpha1, alpha2 = products.for_batches(alpha1, a), products.for_batches(alpha2, a)
    if out_global_scale is not None:
        out_global_scale = products.for_batches(out_global_scale, a, is_in_result=True)
    out_format, formats = RESULT_FORMATS.get(out_dtype), (a_format, b_format)

    def split() -> Any:
        """Splits the batches into groups: rows, weights, outputs, and the tensors written."""
        weights = [
            Weights("b1", b1, b1_scale, "alpha1", _vector(alpha1), b_format),
            Weights("b2", b2, b2_scale, "alpha2", _vector(alpha2), b_format),
        ]
        parts = 1 if w.layout == "separate" else 2
        each, scales, *others = products.split_dual_gemm(
            a, a_scale, weights, a_format, out, out_dtype, scale_layout, parts
        )
        of_rows = None if row_scale is None else [*row_scale.view(len(each), -1)]
        return Parts(each, scales, a_format, of_rows), *others

    is_composed = composed_dual.is_composed(a_scale, formats, backend, a, b1)
    has_batches = isinstance(a, torch.Tensor) and products.num_batches(a) > 1
    if a_scale is None and config is None and not has_batches:
        is_composed |= composed_dual.dequantizes_first(a, b1, b_format, w.layout, out_dtype, backend)
    if private_api.is_traced() or has_batches or is_composed:
        listed, (gates, ups), outs, results = split()
        up = None if ups.data is None else Parts(ups.data, ups.scale, b_format)
        both = gate_up(Parts(gates.data, gates.scale, b_format), up, w.layout, gates.alpha, ups.alpha)
        grouped_dual_gemm(
            listed, both, activation=activation, limit=limit, out=outs, out_dtype=out_dtype,
            out_global_scale=_vector(out_global_scale), scale_layout=scale_layout, backend=backend,
            options=Options(config, early_weights),
        )  # fmt: skip
        return one_result(results, out_format, _vector(out_global_scale))

    def check() -> tuple[Task, list[torch.Tensor]]:
        gate = Gate.checked(activation, limit, w.layout, (b2, b2_scale))
        listed, (gates, ups), outs, results = split()
        weights, result = dual_weights(gates, ups, [1.0]), Result(outs, out_dtype, _vector(out_global_scale))
        task, _ = grouped_task(
            listed, weights, (None, None), result, scale_layout, gate, config, early_weights
        )
        return task, results if out is not None else as_stored(results, out_format)

    order = (a, b1, a_scale, b1_scale, row_scale, alpha1, b2, b2_scale, alpha2, out_global_scale)
    names = a_format.name, b_format.name
    choices = (activation, limit, w.layout, out_dtype, scale_layout, config, *names, early_weights)
    settings = ("dual_gemm", *[x is None for x in order], *choices)
    inputs = [x for x in order if x is not None]
    given = [] if out is None else flat_outputs([out], out_format is not None)
    outs = call(backend, settings, inputs, given, check)
    return one_result(outs, out_format, out_global_scale)


def _vector(factor: Any) -> Any:
    """Returns a tensor without dimensions as [1], and anything else unchanged."""
    return factor.reshape(1) if isinstance(factor, torch.Tensor) and factor.ndim == 0 else factor
