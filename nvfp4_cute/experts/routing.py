"""``route``: chooses the experts of each token and their weights."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, get_args

import torch

from nvfp4_cute import private_api
from nvfp4_cute.backends.calls import call
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.experts.checks import check_vector, kernel_ids
from nvfp4_cute.experts.keys import RouteKey
from nvfp4_cute.formats.silu import exp_minus, sigmoid
from nvfp4_cute.formats.softplus import sqrt_softplus
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.table_task import TableTask
from nvfp4_cute.launch_table import Route, float32_bits
from nvfp4_cute.operands import rules as checks
from nvfp4_cute.operands.quantization import FLOAT32_MAX
from nvfp4_cute.planning.arch.simt import MAX_EXPERTS, MAX_TOP_K, WARP_SIZE, route_slots

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Constants of the kernel.
LARGEST = torch.finfo(torch.float32).max
TINY = 1e-20


def route(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    scoring: Scoring = "softmax",
    renormalize: bool = True,
    bias: torch.Tensor | None = None,
    correction_bias: torch.Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    scale: float = 1.0,
    ids: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose every token's experts and their weights, in float32 and in one launch.

        >>> ids, weights = route(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), 2)
        >>> ids.tolist(), weights.tolist()
        ([[1, 3]], [[0.5, 0.5]])

    A score is the ``softmax`` (over all experts) or ``sigmoid`` of a logit, or ("sqrtsoftplus") the square root of its
    softplus, log(1 + exp(logit)). The experts with the largest scores are chosen; ties go to the lowest id. The
    weights of a token are its experts' scores, divided by their sum with ``renormalize``. Settings of common models:

    - Qwen3-MoE, Mixtral: softmax, then top-k, with ``renormalize=True``, which equals a softmax of the chosen logits. gpt-oss
      also has its router's ``bias``.
    - Llama-4: ``scoring="sigmoid", top_k=1, renormalize=False``.
    - DeepSeek-V3: ``scoring="sigmoid", correction_bias=..., groups=(8, 4), scale=2.5``. Score + correction
      decides the choice, within the groups that have the largest sums of their two best experts; weights are scores without the
      correction.
    - GLM-5, Kimi-K3, MiniMax-M3, Nemotron-3: like DeepSeek-V3, with one group.
    - DeepSeek-V4: ``scoring="sqrtsoftplus", correction_bias=..., scale=1.5``. Its hash layers have a table of experts per token
      id: ``ids=tid2eid[input_ids]`` instead of the correction.

    Args:
        router_logits: [T, E], float32, bfloat16 or float16; E at most 1,024. Infinities count as the largest number.
        top_k: experts per token, at most 32.
        scoring: "softmax", "sigmoid" or "sqrtsoftplus".
        renormalize: whether a token's weights are divided by their sum (plus 1e-20).
        bias: float32 [E], added to the logits, as in a linear layer.
        correction_bias: float32 [E], added to the scores only for the choice.
        groups: (number of groups into which the E experts are divided, at most 32; number of groups from which a token's
            experts are chosen).
        scale: factor of all weights.
        ids: given experts of each token, integers [T, top_k]; ``route`` then only computes their weights. int32 avoids a
            conversion.
        backend: "auto", "cuda", "emulator", "emulator:ARCH" or "reference". All give the same bits.

    Returns:
        ids: int32 [T, top_k], by descending score, or in the order of the given ones. NaN is never chosen; -1 with weight 0 fills
            up where no expert is left, and replaces given ids that name no expert.
        weights: float32 [T, top_k].

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule.
        UnsupportedTarget: the GPU has no kernel.
    """
    if private_api.is_traced():  # the custom op that a traced graph keeps
        return torch.ops.nvfp4_cute.route(
            router_logits, top_k, scoring, renormalize, bias, correction_bias, groups, scale, ids, backend
        )  # fmt: skip
    if not isinstance(groups, tuple) or len(groups) != 2:
        raise TypeError(f"groups={groups!r} is not a pair; pass (groups of experts, groups to choose from)")
    checks.check_integers(top_k=top_k, groups=groups[0], chosen_groups=groups[1])
    if not isinstance(scale, int | float):
        raise TypeError(f"scale={scale!r} is not a number; pass the factor of the weights")
    choices = (top_k, scoring, renormalize, *groups, scale)
    if isinstance(ids, torch.Tensor):
        ids = kernel_ids(ids, "ids").int()
    given = (router_logits, bias, correction_bias, ids)
    settings = ("route", bias is None, correction_bias is None, ids is None, *choices)
    inputs = [tensor for tensor in given if tensor is not None]
    chosen, weights = call(backend, settings, inputs, [], _check, *given, *choices)
    return chosen, weights


def _check(
    router_logits, bias, correction_bias, given, top_k, scoring, renormalize, num_groups, topk_groups, scale
) -> tuple["RouteTask", list[torch.Tensor]]:
    """Returns the checked task and its results."""
    checks.check_tensors(
        {"router_logits": router_logits}, {"bias": bias, "correction_bias": correction_bias, "ids": given}
    )
    checks.check_choice("dtype of router_logits", router_logits.dtype, LOGIT_DTYPES)
    checks.check_choice("scoring", scoring, get_args(Scoring))
    if router_logits.ndim != 2:
        raise ValueError(f"router_logits has shape {list(router_logits.shape)}; expected [T, E]")
    tokens, experts = router_logits.shape
    _check_counts(experts, top_k, num_groups, topk_groups)
    if not -FLOAT32_MAX <= scale <= FLOAT32_MAX:
        raise ValueError(
            f"scale={str(scale)[:20]} is not a finite float32 number; pass the factor of the weights"
        )
    check_vector("bias", bias, experts)
    check_vector("correction_bias", correction_bias, experts)
    if given is not None:
        _check_given(given, (tokens, top_k), correction_bias is not None or topk_groups < num_groups)
    logits = router_logits if router_logits.stride(1) == 1 else router_logits.contiguous()
    ids, weights = (
        torch.empty((tokens, top_k), dtype=dtype, device=logits.device)
        for dtype in (torch.int32, torch.float32)
    )
    how = (scoring, renormalize, num_groups, topk_groups, scale)
    return RouteTask(logits, bias, correction_bias, given, ids, weights, *how), [ids, weights]


def _check_given(given: torch.Tensor, shape: tuple[int, int], has_choice: bool) -> None:
    if given.shape != shape:
        raise ValueError(f"ids has shape {list(given.shape)}; expected [T, top_k] = {list(shape)}")
    if has_choice:
        raise ValueError(
            "ids choose the experts, as correction_bias and groups would; leave out ids, or both of these"
        )


def _check_counts(experts: int, top_k: int, num_groups: int, topk_groups: int) -> None:
    if not 1 <= experts <= MAX_EXPERTS:
        raise UnsupportedProblem(f"E={experts} is not from 1 to {MAX_EXPERTS}, what a warp has room for")
    if not 1 <= top_k <= min(experts, MAX_TOP_K):
        raise UnsupportedProblem(
            f"top_k={top_k} is not from 1 to {min(experts, MAX_TOP_K)}: E={experts}, and a token has at most {MAX_TOP_K} experts"
        )
    if not 1 <= num_groups <= WARP_SIZE or experts % num_groups:
        raise UnsupportedProblem(
            f"groups=({num_groups}, {topk_groups}): the first is not a divisor of E={experts} up to {WARP_SIZE}"
        )
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"groups=({num_groups}, {topk_groups}): the second is not from 1 to {num_groups}")


@dataclass(frozen=True)
class RouteTask(TableTask):
    """Checked operands and choices of ``route``; ``logits`` has unit stride in E."""

    columns = Route
    written = ("ids", "weights")
    logits: torch.Tensor
    bias: torch.Tensor | None
    correction: torch.Tensor | None
    given: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    scoring: Scoring
    renormalize: bool
    num_groups: int
    topk_groups: int
    scale: float

    @property
    def is_empty(self) -> bool:
        """Returns whether there are no tokens to route."""
        return self.ids.numel() == 0

    @property
    def has_groups(self) -> bool:
        """Whether some groups are left out."""
        return self.topk_groups < self.num_groups

    def key(self, gpu: Gpu) -> RouteKey:
        """Returns the key of the routing kernel."""
        slots = route_slots(self.logits.shape[1])
        given = self.bias is not None, self.correction is not None, self.has_groups, self.given is not None
        return RouteKey(gpu.arch, self.logits.dtype, slots, self.scoring, self.renormalize, *given)

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Returns the extents for the launch table of routing."""
        tokens, experts = self.logits.shape
        return {
            Route.PITCH: self.logits.stride(0) * self.logits.element_size(),
            Route.TOKENS: tokens,
            Route.EXPERTS: experts,
            Route.TOP_K: self.ids.shape[1],
            Route.NUM_GROUPS: self.num_groups,
            Route.TOPK_GROUPS: self.topk_groups,
            Route.SCALE: float32_bits(self.scale),
        }

    def reference(self) -> None:
        """Repeats the routing kernel's float32 operations in its order."""
        logits = self.logits.float()
        x = logits if self.bias is None else logits + self.bias
        can_be_chosen = ~x.isnan()
        x = x.clamp(-LARGEST, LARGEST) + 0.0
        total = None
        if self.scoring == "softmax":
            largest = x.masked_fill(~can_be_chosen, -LARGEST).amax(1, keepdim=True)
            scores = exp_minus(largest - x).masked_fill(~can_be_chosen, 0.0)
            total = _warp_sum(scores) + TINY
        else:
            function = sigmoid if self.scoring == "sigmoid" else sqrt_softplus
            scores = function(x).masked_fill(~can_be_chosen, 0.0)
        choice = x
        if self.correction is not None:
            scores = scores if total is None else scores / total
            total = None
            choice = scores + self.correction
            can_be_chosen = can_be_chosen & ~choice.isnan()
            choice = choice.clamp(-LARGEST, LARGEST) + 0.0
        if self.has_groups:
            can_be_chosen = can_be_chosen & self._in_best_groups(choice, can_be_chosen)
        if self.given is None:
            order = _falling(choice, can_be_chosen)[:, : self.ids.shape[1]]
            is_chosen = can_be_chosen.gather(1, order)
        else:
            order = self.given.long().clamp(0, choice.shape[1] - 1)
            is_chosen = can_be_chosen.gather(1, order) & (order == self.given)
        weights = scores.gather(1, order).masked_fill(~is_chosen, 0.0)
        if self.renormalize:
            sums = torch.zeros_like(weights[:, :1])
            for k in range(weights.shape[1]):
                sums = sums + weights[:, k : k + 1]
            weights = weights / (sums + TINY)
        elif total is not None:
            weights = weights / total
        self.ids.copy_(order.masked_fill(~is_chosen, -1))
        self.weights.copy_(weights * torch.full_like(weights, self.scale))

    def _in_best_groups(self, choice: torch.Tensor, can_be_chosen: torch.Tensor) -> torch.Tensor:
        tokens, experts = choice.shape
        grouped = choice.masked_fill(~can_be_chosen, -torch.inf).view(tokens, self.num_groups, -1)
        best = grouped.topk(min(2, grouped.shape[2]), dim=2).values
        has_any = best[..., 0] > -torch.inf
        sums = best[..., 0] + (best[..., 1].clamp(min=-LARGEST) if grouped.shape[2] > 1 else 0.0)
        if grouped.shape[2] > 1:
            sums = torch.where(best[..., 1] > -torch.inf, sums, best[..., 0] + 0.0)
        sums = sums.clamp(-LARGEST, LARGEST)
        kept = torch.zeros_like(has_any)
        kept.scatter_(1, _falling(sums, has_any)[:, : self.topk_groups], True)
        return kept.repeat_interleave(experts // self.num_groups, dim=1)


def _falling(numbers: torch.Tensor, is_valid: torch.Tensor) -> torch.Tensor:
    """Returns column indices by descending numbers, equal numbers by index, invalid ones last."""
    return numbers.masked_fill(~is_valid, -torch.inf).sort(dim=1, descending=True, stable=True).indices


def _warp_sum(scores: torch.Tensor) -> torch.Tensor:
    """Adds rows in the order of a warp: each lane its own experts in order, then lanes pairwise, 16 apart first."""
    tokens, experts = scores.shape
    padded = torch.nn.functional.pad(scores, (0, -experts % WARP_SIZE)).view(tokens, -1, WARP_SIZE)
    total = torch.zeros((tokens, WARP_SIZE), dtype=scores.dtype, device=scores.device)
    for s in range(padded.shape[1]):
        total = total + padded[:, s]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total
