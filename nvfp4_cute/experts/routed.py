"""Both products for few tokens with 16-bit rows: every choice of an expert is a group of one row, and nothing is sorted.

A layer then takes three launches instead of four, and the first one does not depend on another launch.
"""

from dataclasses import replace
from typing import Any

import torch

from nvfp4_cute.backends.calls import call
from nvfp4_cute.batch_invariance import is_batch_invariant
from nvfp4_cute.experts.products import LocalExperts
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.launch.task import Task
from nvfp4_cute.operands import grouped
from nvfp4_cute.operands.grouped import Result, Weights
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.problem import Gate

# Least number of experts per choice, for several tokens. Two choices of one expert read its weights twice, which is rare among
# so few choices. Source: ``bench/notes/2026-11-29-h200-peers.md``.
EXPERTS_PER_CHOICE = 8


def takes(experts: LocalExperts, ids: torch.Tensor) -> bool:
    """Returns whether to compute a call in this way: it has one token, or few choices for the number of experts."""
    if experts.row_format is not None or not experts.is_fused or is_batch_invariant():
        return False
    return len(ids) == 1 or 0 < ids.numel() * EXPERTS_PER_CHOICE <= experts.count


def rows(
    experts: LocalExperts, x: torch.Tensor, ids: torch.Tensor, *, first_expert: int, backend: str
) -> torch.Tensor:
    """Computes one result per choice, [T * k, H] in the dtype of ``x``, in two launches.

    Row c is the result of choice c of ``ids``. Rows of choices of no local expert are 0.
    """
    gate = Gate(experts.activation.function, experts.activation.limit, experts.weight_layout)
    how: Any = {"first_expert": first_expert, "backend": backend}
    alphas = {"alpha1": experts.gate_alpha, "alpha2": experts.up_alpha}
    hidden = _product(x, experts.w13, alphas, ids, gate, bias=experts.bias13, **how)
    return _product(hidden, experts.w2, {"alpha": experts.alpha2}, ids, None, **how)


def _product(
    a: torch.Tensor,
    w: Any,
    alphas: dict[str, torch.Tensor | None],
    ids: torch.Tensor,
    gate: Gate | None,
    *,
    bias: torch.Tensor | None = None,
    first_expert: int,
    backend: str,
) -> torch.Tensor:
    """Multiplies the row of each choice by the weights of its expert.

    Each row of ``a`` is that of an equal number of consecutive choices: k in the first product, and one in the second.
    """
    choices, names = ids.numel(), [name for name, alpha in alphas.items() if alpha is not None]

    def check() -> tuple[Task, list[torch.Tensor]]:
        # The checks are those of ragged groups: rows of every choice, and an end for every expert.
        every, offs = (
            a.new_empty((choices, a.shape[1])),
            torch.zeros(len(w.data), dtype=torch.int32, device=a.device),
        )
        weights = [
            Weights("b", w.data if i == 0 else None, w.scale, name, alpha, w.format)
            for i, (name, alpha) in enumerate(alphas.items())
        ]
        if gate is not None:
            weights = grouped.dual_weights(weights[0], weights[1], 1.0)
        problem, operands, outs = grouped.check_device_groups(
            every, None, weights, (offs, None), Result(None, a.dtype, None), gate=gate
        )
        if bias is not None:
            problem, operands = grouped.with_bias(problem, operands, bias)
        _, n, k = problem.sizes[0]
        problem = replace(problem, form="routed", sizes=((1, n, k),) * choices)
        rows = Operand.of_values(a.unsqueeze(0))
        operands = replace(operands, a=(rows,), sizes=ids.view(-1), first_expert=first_expert)
        return GroupedTask(problem, operands), outs

    settings = (
        "routed",
        gate and (gate.activation, gate.limit, gate.weight_layout),
        w.format,
        first_expert,
        *names,
        bias is None,
    )
    inputs = [a, w.data, w.scale, ids, *(alphas[name] for name in names), *([] if bias is None else [bias])]
    return call(backend, settings, inputs, [], check)[0]
