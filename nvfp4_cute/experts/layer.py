"""``moe`` on parts: a whole layer of experts."""

from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from nvfp4_cute import private_api
from nvfp4_cute.activation import check_limit
from nvfp4_cute.backends.calls import chain
from nvfp4_cute.experts import routed
from nvfp4_cute.experts.checks import check_first_expert
from nvfp4_cute.experts.combine import add_up, check_call
from nvfp4_cute.experts.gather import gather_as, gather_quantize_rows
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
    """Computes a layer of experts: ``y[t] = sum over k of weights[t, k] * W2_e (activation(W1_e x[t]) * W3_e x[t])``.

    ``e = ids[t, k]``. The layer takes at most six launches: the order of rows (merged into the next one for up to 64 choices),
    ``gather_quantize``, ``grouped_dual_gemm`` with quantized results, ``grouped_gemm``, ``finalize``. A ``grouped_gemm`` and
    ``activate_quantize`` replace ``grouped_dual_gemm`` with biases, without a gate, or where it cannot read the weights' rows.
    (On sm_90a a product may dequantize its rows in a launch of its own.) Nothing waits for the device, and a captured CUDA
    graph follows ids that change. torch allocates buffers for T * k rows. Rounding happens four times: rows to their format
    twice, the second product's rows to ``x``'s dtype, and the result.

    With ``activations="16bit"`` rows stay in ``x``'s dtype (W4A16), and ``gather``, products of 16-bit rows, and ``activate``
    replace the steps that quantize. For few tokens, the two products of ``routed`` replace the first three launches. 8-bit hidden
    rows take a launch of their own after the activation, unless the first product quantizes them ("fp8_1x128" on GPUs whose
    dual kernel can). Before it, they are in float32 if ``grouped_dual_gemm`` computed them for "fp8_1x128" or "int8", otherwise
    in ``x``'s dtype. With "fp8_1x128", another launch after
    ``gather`` quantizes the first rows; ``gather_quantize`` does so for "fp8_1xk" and "int8".

    Args:
        x: float16 or bfloat16 [T, H], H a multiple of 32.
        ids, weights: int32 or int64 [T, k] and float32 [T, k], as ``route`` returns them. Ids of no local expert, such as -1,
            are left out.
        w13: weights of all local experts, [E, 2 I, H] (``weight_layout``), or [E, I, H] without a gate: an NVFP4Tensor, or
            ``experts.weights.ExpertWeights``, which may have one global scale per expert, or per expert for gate and up each.
            With bfloat16 rows also MXFP4 or MXFP8 in a BlockScaledTensor or ExpertWeights. With any 16-bit rows also int4,
            FP8_128x128 or INT8 in a BlockScaledTensor.
        w2: weights of the second product in the same types, [E, H, I].
        activations: format of the rows of both products: "nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "fp8_1x128", "fp8_1xk",
            "int8" or "16bit"; "nvfp4_per_row" has a global scale per row, computed by the launches that quantize. The weights'
            format must have a product with it: MXFP4 and MXFP8 go with rows of either, FP8_128x128 with "fp8_1x128", MXFP4
            weights from ``mxfp4_for_fp8`` with "fp8_1xk", INT8 with "int8". Ranks of a group send 16-bit rows to each other, or
            NVFP4 rows if all experts quantize alike.
        activation: text of ``nvfp4_cute.activation``, such as "silu".
        limit: clamps the gate to at most ``limit`` and up to [-limit, limit].
        weight_layout: order of w13's rows: "concatenated" [gate; up], "interleaved" with alternating rows, "none" without a
            gate, or an interleaved layout of ``grouped_dual_gemm``.
        input_scale: calibrated global scale of x: float32 with one element, or [E]. None with 16-bit rows.
        hidden_scale: calibrated global scale of the hidden activations: one element, or [E]. None with 16-bit rows.
        alpha13, alpha2: factors of the two products, float32 [E]; alpha13 may be a pair for gate and up. None computes them
            from global scales, ``w13.global_scale * input_scale``, in small launches of torch where both are given.
        bias13: [E, rows of w13] in the dtype of x, added before the activation.
        bias2: [E, H], added before the weights.
        shared: [T, H] in the dtype of x, added to the result, such as a shared expert's result.
        first_expert: id of the first local expert.
        group: a ``torch.distributed.ProcessGroup`` that divides the experts. Each rank passes its own tokens, the weights,
            factors and ``bias13`` of its own experts, and ids and ``bias2`` of all experts. All ranks make the same calls. The
            result has the bits of one GPU with all experts.
        placement: which ranks hold which experts; None for equal shares, in order. Requires a group.
        capacity: largest number of tokens per rank in any call. Nothing then waits for the device, and a CUDA graph can capture
            the layer after one call without it. None exchanges sizes first, for which the host waits. Requires a group.
        parallel: what the ranks of a group divide: "experts"; or "tensor": every rank has the same tokens and a share of the
            width of every expert (``tensor_parallel.shard``), and results are added in float32, without the bits of one GPU.
        backend: "auto", "cuda", "emulator", "emulator:ARCH" or "reference".

    Returns:
        y, [T, H] in the dtype of x; the same bits in every run.

    Example:
        >>> from nvfp4_cute.experts.weights import ExpertWeights
        >>> w13, w2 = (ExpertWeights.quantize(torch.randn(4, n, k) / 16) for n, k in ((512, 128), (128, 256)))
        >>> ids, weights = route(torch.randn(3, 4), 2)
        >>> moe(torch.randn(3, 128).bfloat16(), ids, weights, w13, w2).shape
        torch.Size([3, 128])

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule.
        UnsupportedTarget: the GPU has no kernel.
        RankError: another rank refused its operands, passed other sizes, or did not call within the group's timeout.
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
    check_limit(limit)
    call = _Call(
        x, ids, weights, w13, w2, activations, activation, limit, weight_layout, input_scale, hidden_scale, alpha13, alpha2,
        bias13, bias2, shared, first_expert, backend,
    )  # fmt: skip
    if not private_api.is_traced():
        return chain(backend, _compute, call)
    experts = call.experts()
    return torch.ops.nvfp4_cute.moe(  # the custom op (experts.library) that a traced graph keeps
        x, ids, weights, [w13.data, w13.scale], [w2.data, w2.scale], w13.format.name, w2.format.name, activations, activation,
        limit, weight_layout, input_scale, experts.hidden_scale, experts.gate_alpha, experts.up_alpha, experts.alpha2, bias13,
        bias2, shared, first_expert, backend,
    )  # fmt: skip


def check_division(group: Any, placement: Placement | None, capacity: int | None, parallel: str) -> None:
    """Raises ValueError unless these arguments of ``moe`` together describe how a group divides the layer."""
    checks.check_choice("parallel", parallel, get_args(Parallel))
    given = placement is not None or capacity is not None
    if group is None and (given or parallel != "experts"):
        raise ValueError(
            "placement, capacity and parallel divide experts over the ranks of a group: also pass the group"
        )
    if parallel == "tensor" and given:
        raise ValueError('placement or capacity with parallel="tensor", where no token moves; leave them out')


class _Call(NamedTuple):
    """Arguments of ``moe`` in one process. A tuple, since each call makes one."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13: Any
    w2: Any
    activations: Activations
    activation: Activation
    limit: float | None
    weight_layout: ExpertLayout
    input_scale: torch.Tensor | None
    hidden_scale: torch.Tensor | None
    alpha13: Any
    alpha2: torch.Tensor | None
    bias13: torch.Tensor | None
    bias2: torch.Tensor | None
    shared: torch.Tensor | None
    first_expert: int
    backend: str

    def experts(self) -> LocalExperts:
        """Checks and returns the experts."""
        return LocalExperts.of(
            self.x, self.w13, self.w2, activations=self.activations, activation=self.activation, limit=self.limit,
            weight_layout=self.weight_layout, input_scale=self.input_scale, hidden_scale=self.hidden_scale,
            alpha13=self.alpha13, alpha2=self.alpha2, bias13=self.bias13,
        )  # fmt: skip


def _compute(call: _Call) -> torch.Tensor:
    """Computes ``moe`` in one process."""
    x, ids, experts = call.x, call.ids, call.experts()
    check_call(x, ids, call.weights, call.shared, call.bias2, experts.count)
    where: Any = {"first_expert": call.first_expert, "backend": call.backend}
    if routed.takes(experts, ids):
        down = routed.rows(experts, x, ids, **where)
        return _added_up(call, down, None, experts.count)
    row_scale: torch.Tensor | None = None
    scale: torch.Tensor | None
    format = experts.row_format
    if experts.scales_rows and format is not None:
        data, scale, row_scale, order = gather_quantize_rows(x, ids, experts.count, format=format, **where)
    else:
        data, scale, order = gather_as(format, x, ids, experts.count, call.input_scale, **where)
    down = experts.rows(data, scale, ids, order, dtype=x.dtype, row_scale=row_scale, **where)
    return _added_up(call, down, order.rows)


def _added_up(
    call: _Call, down: torch.Tensor, rows: torch.Tensor | None, experts: int | None = None
) -> torch.Tensor:
    y = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    where = call.ids, call.first_expert, None, y, call.backend, experts
    add_up(down, rows, call.weights, call.shared, call.bias2, *where)
    return y


@torch.compiler.disable
def _over_ranks(*arguments: torch.Tensor, first_expert: int, **options: Any) -> torch.Tensor:
    if first_expert:
        raise ValueError(f"first_expert={first_expert} with a group: its placement says where experts lie")
    return moe_over_ranks(*arguments, **options)


@torch.compiler.disable
def _over_shares(*arguments: Any) -> torch.Tensor:
    return add_shares(*arguments)
