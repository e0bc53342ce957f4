"""``moe``: a whole layer of experts."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from nvfp4_cute import private_api
from nvfp4_cute.activation import SILU, Activation, activation_of
from nvfp4_cute.backends.calls import chain_of_rows, run
from nvfp4_cute.experts import routed
from nvfp4_cute.experts.combine import FinalizeTask, check_call
from nvfp4_cute.experts.gather import gather
from nvfp4_cute.experts.input_weights import moe_of_weighted_tokens
from nvfp4_cute.experts.parallel import moe_over_ranks
from nvfp4_cute.experts.products import LocalExperts
from nvfp4_cute.experts.records import (
    ActivationFormat,
    Activations,
    Experts,
    LayerOfExperts,
    Parallel,
    Weights,
)
from nvfp4_cute.experts.tensor_parallel import add_shares
from nvfp4_cute.formats.block_format import MXFP4_FP8, NVFP4, BlockFormat, FP8_128x128
from nvfp4_cute.formats.global_scale import PER_ROW

# Formats of rows that "auto" selects, by the format of the weights. Rows of other weights keep 16 bits.
USUAL_ROWS: dict[BlockFormat, Activations] = {NVFP4: "nvfp4", MXFP4_FP8: "fp8_1xk"}
# Formats of rows that "fp8" stands for.
FP8_ROWS: dict[BlockFormat, Activations] = {FP8_128x128: "fp8_1x128", MXFP4_FP8: "fp8_1xk"}


def moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: Weights | Experts,
    w2: Weights | Experts,
    *,
    activation: Activation | str = SILU,
    activations: ActivationFormat | str = "auto",
    shared: torch.Tensor | None = None,
    parallel: Parallel | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute a layer of experts: the sum over the chosen experts e of ``weight * w2_e (activation(gate_e x) * up_e x)``.

        >>> w13, w2 = quantize(torch.randn(4, 512, 128) / 16), quantize(torch.randn(4, 128, 256) / 16)
        >>> ids, weights = route(torch.randn(3, 4), 2)
        >>> moe(torch.randn(3, 128).bfloat16(), ids, weights, w13, w2).shape
        torch.Size([3, 128])

    The layer takes at most six launches: the order of rows, quantized rows, the first product with its activation and quantized
    results, the second product, and the sum. With 16-bit rows and few tokens, it takes three and sorts nothing. Nothing waits for
    the device, and a captured CUDA graph follows ids that change.

    Args:
        x: float16 or bfloat16 [T, H], H a multiple of 32.
        topk_ids, topk_weights: int32 or int64 [T, k] and float32 [T, k], as ``route`` returns them. Ids of no local expert,
            such as -1, are left out.
        w13: weights of gate and up of all local experts, [E, 2 I, H], gate first: a BlockScaledTensor, or :class:`Experts` with
            a layout, biases or factors. NVFP4, MXFP4, MXFP8, FP8_128x128, INT8, or with 16-bit rows int4.
        w2: weights of the second projection in the same types, [E, H, I].
        activation: a record or a name; see :class:`nvfp4_cute.Activation`.
        activations: format of both products' rows, an :class:`ActivationFormat` or a name. "auto": NVFP4 with NVFP4 weights,
            FP8_1xK with weights from ``mxfp4_for_fp8``, otherwise 16 bits. "fp8": the FP8 format that goes with the weights.
        shared: [T, H] in the dtype of x, added to the result, such as a shared expert's result.
        parallel: ranks that divide the layer; see :class:`Parallel`.
        backend: see :func:`nvfp4_cute.gemm`.

    Returns:
        [T, H] in the dtype of x; the same bits in every run. Ranks that divide experts return the bits of one process if sums of
        products do not depend on the kernel's config.

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule.
        UnsupportedTarget: the GPU has no kernel.
        RankError: another rank refused its operands, passed other sizes, or did not call within the group's timeout.
    """
    if parallel is not None and not isinstance(parallel, Parallel):
        raise TypeError(f"parallel={parallel!r} is not a Parallel; pass nvfp4_cute.Parallel(group)")
    first, second = (w if isinstance(w, Experts) else Experts(w) for w in (w13, w2))
    act, format = activation_of(activation), _format_of(activations, first.weight)
    layer = LayerOfExperts(
        first, second, act, format, 0 if parallel is None else parallel.first_expert, backend
    )
    return compute(layer, x, topk_ids, topk_weights, shared, parallel)


def compute(
    layer: LayerOfExperts,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    parallel: Parallel | None,
) -> torch.Tensor:
    """Computes the layer that a record describes; other arguments and errors are those of ``moe``.

    Rounding happens four times: rows to their format twice, the second product's rows to ``x``'s dtype, and the result. A
    ``grouped_gemm`` and ``activate`` replace ``grouped_dual_gemm`` without a gate, where it cannot read the weights' rows,
    or with biases of weights that have float32 scales. (On sm_90a a product may dequantize its rows in a launch of its own.)
    torch allocates buffers for T * k rows.

    8-bit hidden rows take a launch of their own after the activation, unless the first product quantizes them ("fp8_1x128" on
    GPUs whose dual kernel can). Before it, they are in float32 if ``grouped_dual_gemm`` computed them for "fp8_1x128" or "int8",
    otherwise in ``x``'s dtype. With "fp8_1x128", another launch quantizes the first rows.
    """
    if layer.activations.weight_on_input:
        plain = layer._replace(activations=replace(layer.activations, weight_on_input=False))
        return moe_of_weighted_tokens(
            lambda *arguments: compute(plain, *arguments), x, ids, weights, shared, parallel
        )
    if parallel is not None and parallel.group is not None:
        return _over_group(layer, x, ids, weights, shared, parallel)
    if not private_api.is_traced():
        return chain_of_rows(layer.backend, _compute, 4, x, ids, weights, shared, layer)
    experts, w13, w2 = LocalExperts.of(x, layer), layer.w13, layer.w2
    first, second, act = w13.weight, w2.weight, experts.activation
    return torch.ops.nvfp4_cute.moe(  # the custom op (experts.library) that a traced graph keeps
        x, ids, weights, [first.data, first.scale], [second.data, second.scale], first.format.name, second.format.name,
        experts.activations, act.function, act.limit, w13.layout, experts.input_scale, experts.hidden_scale,
        experts.gate_alpha, experts.up_alpha, experts.alpha2, w13.bias, w2.bias, shared, layer.first_expert, layer.backend,
    )  # fmt: skip


def _compute(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    layer: LayerOfExperts,
) -> torch.Tensor:
    """Computes the layer in one process."""
    experts, bias = LocalExperts.of(x, layer), layer.w2.bias
    check_call(x, ids, weights, shared, bias, experts.count)
    where: Any = {"first_expert": layer.first_expert, "backend": layer.backend}
    sum_of: Any = {
        "shared": shared, "bias": bias, "first_expert": layer.first_expert, "follows_product": True
    }  # fmt: skip
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if routed.takes(experts, ids):
        down = routed.rows(experts, x, ids, **where)
        run(layer.backend, FinalizeTask(down, None, weights, y, ids=ids, experts=experts.count, **sum_of))
        return y
    factor = PER_ROW if experts.has_row_scales else experts.input_scale
    rows, order = gather(x, ids, experts.count, format=experts.row_format, global_scale=factor, **where)
    down = experts.rows(rows, ids, order, dtype=x.dtype, **where)
    run(
        layer.backend, FinalizeTask(down, order.rows, weights, y, ids=None if bias is None else ids, **sum_of)
    )
    return y


@torch.compiler.disable
def _over_group(
    layer: LayerOfExperts,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    parallel: Parallel,
) -> torch.Tensor:
    """Computes the layer together with the other ranks."""
    group = parallel.group
    if parallel.divide == "experts" or group is None:
        return moe_over_ranks(layer, x, ids, weights, shared, parallel)
    if dist.get_rank(group):  # only the first rank adds the bias and the shared result
        layer, shared = layer._replace(w2=replace(layer.w2, bias=None)), None
    return add_shares(lambda: compute(layer, x, ids, weights, shared, None), x, ids, layer.w2.weight, group)


def _format_of(activations: ActivationFormat | str, weight: Weights) -> ActivationFormat:
    if isinstance(activations, ActivationFormat):
        return activations
    if not isinstance(activations, str):
        raise TypeError(
            f'activations={activations!r} is not an ActivationFormat; pass nvfp4_cute.ActivationFormat("nvfp4", input_scale), '
            "or a name"
        )
    if activations == "auto":
        return ActivationFormat(USUAL_ROWS.get(getattr(weight, "format", NVFP4), "16bit"))
    if activations == "fp8":
        format = getattr(weight, "format", NVFP4)
        if format not in FP8_ROWS:
            raise ValueError(
                f'activations="fp8" with {format.title} weights; pass weights in FP8_128x128, or MXFP4 weights from mxfp4_for_fp8'
            )
        return ActivationFormat(FP8_ROWS[format])
    return ActivationFormat(activations)  # type: ignore[arg-type]
