"""Router weights that multiply tokens before the first product of a layer of experts, as in Llama-4."""

from collections.abc import Callable
from dataclasses import replace

import torch

from nvfp4_cute import private_api
from nvfp4_cute.experts.checks import check_tokens
from nvfp4_cute.experts.combine import check_addends
from nvfp4_cute.experts.records import Parallel
from nvfp4_cute.operands import rules as checks


def moe_of_weighted_tokens(
    run: Callable[..., torch.Tensor],
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    parallel: Parallel | None,
) -> torch.Tensor:
    """Computes ``y[t] = sum over k of expert_e(weights[t, k] * x[t])`` with ``e = ids[t, k]``, plus ``shared``.

    Products of weights and tokens are rounded to the dtype of ``x``, as in the models. A token with several experts becomes
    several tokens with one expert each, whose results are added in float32.

    Args:
        run: ``moe`` as a function of x, ids, weights, shared and parallel.
        x, ids, weights, shared, parallel: see ``moe``.

    Returns:
        [T, H] in the dtype of x.

    Raises:
        TypeError, ValueError: an operand breaks a rule of ``moe``.
    """
    if not private_api.is_traced():  # the custom op of a traced graph checks what it is given
        checks.check_tensors({"x": x, "ids": ids, "weights": weights}, {"shared": shared})
        check_tokens(x, ids)
        check_addends(x.dtype, x.shape[1], ids, weights, shared, None)
    tokens, top_k = ids.shape
    rows = (x.unsqueeze(1) * weights.unsqueeze(2).to(x.dtype)).flatten(0, 1)
    ones = torch.ones_like(weights)
    if top_k == 1:
        return run(rows, ids, ones, shared, parallel)
    every = parallel
    if parallel is not None and parallel.capacity is not None:
        every = replace(parallel, capacity=parallel.capacity * top_k)
    y = run(rows, ids.reshape(-1, 1), ones.reshape(-1, 1), None, every).view(tokens, top_k, -1)
    total = y.sum(1, dtype=torch.float32)
    return (total if shared is None else total + shared).to(x.dtype)
