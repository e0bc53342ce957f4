"""moe: a whole layer of experts."""

from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from nvfp4_cute import private_api
from nvfp4_cute.experts.checks import check_first_expert
from nvfp4_cute.experts.combine import add_up, check_call
from nvfp4_cute.experts.gather import gather_as
from nvfp4_cute.experts.parallel import moe_over_ranks
from nvfp4_cute.experts.placement import Placement
from nvfp4_cute.experts.products import Activations, ExpertLayout, LocalExperts
from nvfp4_cute.experts.tensor_parallel import add_shares
from nvfp4_cute.operands import rules as checks
from nvfp4_cute.problem import Activation

Parallel = Literal["experts", "tensor"]


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: Any,
    w2: Any,
    *,
    activations: Activations = "nvfp4",
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
    group: Any = None,
    placement: Placement | None = None,
    capacity: int | None = None,
    parallel: Parallel = "experts",
    backend: str = "auto",
) -> torch.Tensor:
    """A layer of experts: ``y[t] = sum over k of weights[t, k] * W2_e (activation(W1_e x[t]) * W3_e x[t])``, ``e = ids[t, k]``.

    At most six launches: the order of rows (none of its own with up to 64 choices), ``gather_quantize``, ``grouped_dual_gemm``
    with quantized results, ``grouped_gemm``, ``finalize``; with biases, without a gate, or where the weights' rows do not suit
    ``grouped_dual_gemm``, a ``grouped_gemm`` and ``activate_quantize`` take its place. (On sm_90a a product may decode its rows
    by a launch of its own.) Nothing waits for the device; a captured CUDA graph follows ids that change. Buffers are allocated by
    torch for T * k rows. Rounded: rows to their format twice, the second product's rows to ``x``'s dtype, and the result.

    With ``activations="16bit"`` rows stay in ``x``'s dtype (W4A16): ``gather``, products of 16-bit rows, and ``activate`` take
    the places of those that quantize. There are kernels for sm_90a.

    Args:
        x: float16 or bfloat16 [T, H], H a multiple of 32.
        ids, weights: as of ``route``: int32 or int64 [T, k] and float32 [T, k]. An id that is not of a local expert, such as -1,
            is left out.
        w13: of all local experts, [E, 2 I, H] (``weight_layout``), or [E, I, H] without a gate: NVFP4Tensor, or
            ``experts.weights.ExpertWeights``, which may have a global scale for each expert, or for gate and up of each. Beside
            16-bit rows of bfloat16 also a BlockScaledTensor of MXFP4 or MXFP8, or such ExpertWeights; beside any 16-bit rows a
            BlockScaledTensor of int4, FP8_128x128 or INT8.
        w2: the same, [E, H, I].
        activations: "nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2" or "16bit": what both products take rows as. Weights are of a
            format that products multiply by such rows: MXFP4 or MXFP8 beside rows of either. Ranks of a group send each other
            rows in 16 bits, or NVFP4 ones that all experts quantize alike.
        activation: "silu", "gelu_tanh", "relu2" or "swiglu_oai" (gpt-oss): as of ``grouped_dual_gemm``.
        limit: cuts the gate to at most this, and up on both sides.
        weight_layout: of w13's rows: "concatenated" [gate; up], "interleaved" one of each in turn, "none" where there is no gate,
            or an interleaved one of ``grouped_dual_gemm``.
        input_scale: global scale of x, calibrated: float32, one element, or [E]. None with 16-bit rows.
        hidden_scale: that of what lies between the products: one element, or [E]. None with 16-bit rows.
        alpha13, alpha2: factors of the two products, float32 [E], alpha13 perhaps two, of gate and up. None computes them from
            global scales, ``w13.global_scale * input_scale``, in small launches of torch's where both are given.
        bias13: of x's dtype [E, rows of w13], added before the activation. bias2: [E, H], added before the weights.
        shared: of x's dtype [T, H]: added to the result, such as a shared expert's.
        first_expert: the id of the first local expert.
        group: a ``torch.distributed.ProcessGroup``: the experts are divided over its ranks, each rank passes its own tokens, its
            own experts' weights, factors and ``bias13``, ids of all experts, and ``bias2`` of all experts. All ranks make the
            same calls. The result has the bits of one GPU with all experts.
        placement: which experts lie on which ranks; None: as many on each, in order. With a group.
        capacity: most tokens of a rank, in every call; then nothing waits for the device, and a CUDA graph can hold the layer
            after one call without it. None: sizes are exchanged first, for which the host waits. With a group.
        parallel: what ranks of a group divide: "experts", or "tensor": every rank has the same tokens and a share of the width of
            every expert (``tensor_parallel.shard``), and the results are added up in float32; not the bits of one GPU.
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
        RankError: another rank refused its operands, passed other sizes, or did not come within the group's timeout.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is a {type(group).__name__}; pass a torch.distributed.ProcessGroup")
    check_division(group, placement, capacity, parallel)
    if group is not None and parallel == "tensor":
        first = dist.get_rank(group) == 0
        local = lambda: moe(
            x, ids, weights, w13, w2, activations=activations, activation=activation, limit=limit, weight_layout=weight_layout,
            input_scale=input_scale, hidden_scale=hidden_scale, alpha13=alpha13, alpha2=alpha2, bias13=bias13,
            bias2=bias2 if first else None, shared=shared if first else None, first_expert=first_expert, backend=backend,
        )  # fmt: skip
        return _over_shares(local, x, ids, w2, group)
    if group is not None:
        return _over_ranks(
            x, ids, weights, w13, w2, group=group, placement=placement, capacity=capacity, activations=activations,
            activation=activation, limit=limit, weight_layout=weight_layout, input_scale=input_scale, hidden_scale=hidden_scale,
            alpha13=alpha13, alpha2=alpha2, bias13=bias13, bias2=bias2, shared=shared, first_expert=first_expert, backend=backend,
        )  # fmt: skip
    check_first_expert(first_expert)
    experts = LocalExperts.of(
        x, w13, w2, activations=activations, activation=activation, limit=limit, weight_layout=weight_layout,
        input_scale=input_scale, hidden_scale=hidden_scale, alpha13=alpha13, alpha2=alpha2, bias13=bias13,
    )  # fmt: skip
    if private_api.is_traced():  # the custom op (experts.library) that a traced graph keeps
        return torch.ops.nvfp4_cute.moe(
            x, ids, weights, [w13.data, w13.scale], [w2.data, w2.scale], w13.format.name, w2.format.name, activations,
            activation, limit, weight_layout, input_scale, experts.hidden_scale, experts.gate_alpha, experts.up_alpha,
            experts.alpha2, bias13, bias2, shared, first_expert, backend,
        )  # fmt: skip
    return moe_of(experts, x, ids, weights, input_scale, bias2, shared, first_expert, backend)


def check_division(group: Any, placement: Placement | None, capacity: int | None, parallel: str) -> None:
    """Raise ValueError where these, as of ``moe``, do not say together how a layer lies over the ranks of a group."""
    checks.check_choice("parallel", parallel, get_args(Parallel))
    given = placement is not None or capacity is not None
    if group is None and (given or parallel != "experts"):
        raise ValueError(
            "placement, capacity and parallel say how experts lie on the ranks of a group: pass the group, too"
        )
    if parallel == "tensor" and given:
        raise ValueError('placement or capacity with parallel="tensor", where no token moves; leave them out')


def moe_of(
    experts: LocalExperts,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias2: torch.Tensor | None,
    shared: torch.Tensor | None,
    first_expert: int,
    backend: str,
) -> torch.Tensor:
    """``moe`` of experts that were checked, in one process."""
    check_call(x, ids, weights, shared, bias2, experts.count)
    where: Any = {"first_expert": first_expert, "backend": backend}
    data, scale, order = gather_as(experts.row_format, x, ids, experts.count, input_scale, **where)
    down = experts.rows(data, scale, ids, order, dtype=x.dtype, **where)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    add_up(down, order.rows, weights, shared, bias2, ids, first_expert, None, y, backend)
    return y


@torch.compiler.disable
def _over_ranks(*arguments: torch.Tensor, first_expert: int, **options: Any) -> torch.Tensor:
    if first_expert:
        raise ValueError(f"first_expert={first_expert} with a group: its placement says where experts lie")
    return moe_over_ranks(*arguments, **options)


@torch.compiler.disable
def _over_shares(*arguments: Any) -> torch.Tensor:
    return add_shares(*arguments)
