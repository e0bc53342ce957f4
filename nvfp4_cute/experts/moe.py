"""``moe``: a whole layer of experts, and the records that describe its weights, rows and ranks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from nvfp4_cute.activation import SILU, Activation, activation_of
from nvfp4_cute.experts.checks import kind_of_rows
from nvfp4_cute.experts.input_weights import moe_of_weighted_tokens
from nvfp4_cute.experts.layer import moe as moe_of_parts
from nvfp4_cute.experts.placement import Placement
from nvfp4_cute.experts.products import Activations, ExpertLayout
from nvfp4_cute.experts.weights import ExpertWeights
from nvfp4_cute.formats.block_format import MXFP4_FP8, NVFP4, BlockFormat, FP8_128x128
from nvfp4_cute.formats.block_scaled import BlockScaledTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Weights = BlockScaledTensor | ExpertWeights
# Formats of rows that "auto" selects, by the format of the weights. Rows of other weights keep 16 bits.
USUAL_ROWS: dict[BlockFormat, Activations] = {NVFP4: "nvfp4", MXFP4_FP8: "fp8_1xk"}
# Formats of rows that "fp8" stands for.
FP8_ROWS: dict[BlockFormat, Activations] = {FP8_128x128: "fp8_1x128", MXFP4_FP8: "fp8_1xk"}


@dataclass(frozen=True, eq=False)
class Experts:
    """Weights of one projection of all experts, with their layout, biases and factors.

    Attributes:
        weight: [E, N, K].
        layout: order of the first projection's rows: "concatenated" [gate; up], "interleaved" with alternating rows, "none"
            without a gate, or an interleaved layout of :class:`nvfp4_cute.GateUp`.
        bias: [E, N] in the dtype of x.
        alpha: factors of the product, float32 [E]; for the first projection also a pair, for gate and up. None computes them
            from global scales. If the rows also have a global scale, torch multiplies the two in small launches.
    """

    weight: Weights
    layout: ExpertLayout = "concatenated"
    bias: torch.Tensor | None = None
    alpha: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True, eq=False)
class ActivationFormat:
    """Format of the rows of both products, and where router weights multiply.

    Attributes:
        format: "nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "fp8_1x128" (with weights in FP8_128x128), "fp8_1xk" (with those
            of ``mxfp4_for_fp8``), "int8" (with INT8), or "16bit" for rows that stay in x's dtype (W4A16, sm_80 and newer).
        input_scale: calibrated global scale of x (NVFP4): float32 with one element, or [E]. "per_row": every row of both products
            has its own, found by the launches that quantize; nothing is calibrated, and rows are independent of each other.
        hidden_scale: calibrated global scale of the rows between both products; None with "per_row".
        weight_on_input: whether router weights multiply tokens before the first product (Llama-4) instead of results after the
            second one. The weighted tokens are rounded to the dtype of x.
    """

    format: Activations = "nvfp4"
    input_scale: torch.Tensor | Literal["per_row"] | None = None
    hidden_scale: torch.Tensor | None = None
    weight_on_input: bool = False


@dataclass(frozen=True, eq=False)
class Parallel:
    """How a layer of experts is divided over ranks.

    Attributes:
        group: a ``torch.distributed.ProcessGroup``. Each rank passes its own tokens, its own experts, ids of all experts, and
            the second projection's bias of all experts. All ranks make the same calls. None: this process computes alone.
        capacity: largest number of tokens per rank in any call. Nothing then waits for the device, and a CUDA graph can capture
            the layer after one call without it. None exchanges sizes first, for which the host waits.
        placement: which ranks hold which experts; None for equal shares, in order.
        divide: "experts"; or "tensor": every rank has the same tokens and a share of the width of every expert
            (``experts.tensor_parallel.shard``), and the results are added in float32.
        first_expert: without a group: id of the first local expert.
    """

    group: "ProcessGroup | None" = None
    capacity: int | None = None
    placement: Placement | None = None
    divide: Literal["experts", "tensor"] = "experts"
    first_expert: int = 0


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
        [T, H] in the dtype of x; the same bits in every run, and on any number of ranks that divide experts.

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule.
        UnsupportedTarget: the GPU has no kernel.
        RankError: another rank refused its operands, passed other sizes, or did not call within the group's timeout.
    """
    first, second = (w if isinstance(w, Experts) else Experts(w) for w in (w13, w2))
    act, ranks = activation_of(activation), parallel if parallel is not None else Parallel()
    if not isinstance(ranks, Parallel):
        raise TypeError(f"parallel={ranks!r} is not a Parallel; pass nvfp4_cute.Parallel(group)")
    how = _format_of(activations, first.weight)
    kind, input_scale = kind_of_rows(how.format, how.input_scale)
    if isinstance(second.alpha, tuple):
        raise TypeError("w2.alpha is a tuple; the second product has one factor per expert")
    run = lambda x, ids, weights, shared, capacity: moe_of_parts(
        x, ids, weights, first.weight, second.weight, activations=kind, activation=act.function, limit=act.limit,
        weight_layout=first.layout, input_scale=input_scale, hidden_scale=how.hidden_scale, alpha13=first.alpha,
        alpha2=second.alpha, bias13=first.bias, bias2=second.bias, shared=shared, first_expert=ranks.first_expert,
        group=ranks.group, placement=ranks.placement, capacity=capacity, parallel=ranks.divide, backend=backend,
    )  # fmt: skip
    given = (x, topk_ids, topk_weights, shared, ranks.capacity)
    return moe_of_weighted_tokens(run, *given) if how.weight_on_input else run(*given)


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
