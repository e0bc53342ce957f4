"""Rounds weights column by column, while the remaining columns compensate for each column's error (GPTQ).

GPTQ minimizes the error of a layer's results, not of its weights. With H the sum of x x^T over the inputs x, rounding W to Q
costs tr((W - Q) H (W - Q)^T). U is the upper Cholesky factor of H^-1. The error of column j is e = (w_j - q_j) / U[j, j], and
its cost is |e|^2. This is the smallest possible cost if every later column k is changed by -e U[j, k]. (Frantar et al., "GPTQ",
arXiv 2210.17323, section 3 and algorithm 1.)

Formats with blocks along K leave two choices:

- Blocks are rounded by descending mean activation, and so are the columns inside a block. Columns of a block stay together, so
  that its scale is computed from the values that are rounded, which include the compensation of earlier blocks.
- The scale of a block is the trial with the smallest cost, including the compensation inside the block.
"""

import torch

from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.models.quantizing.weights import Rounding, check_finite

DAMPING = 0.01  # fraction of the mean of H's diagonal that is added to the diagonal


def gptq(weight: torch.Tensor, rounding: Rounding, hessian: torch.Tensor) -> BlockScaledTensor:
    """Rounds weights so that the layer's error is small on the inputs that it saw.

    Args:
        weight: float [N, K].
        rounding: format, global scale, and the trial scales.
        hessian: float32 [K, K], the sum of x x^T.

    Raises:
        ValueError: weights are not finite.
    """
    check_finite(weight)
    block = rounding.format.block_k
    damped = hessian.double().clone()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny))
    order = column_order(damped.diagonal(), block)
    left = weight.float()[:, order]
    upper = inverse_factor(damped[order][:, order])
    codes, scales = [], []
    for start in range(0, left.shape[1], block):
        own = slice(start, start + block)
        found, scale, errors = _block(left[:, own], rounding, upper[own, own])
        left[:, own.stop :] -= errors @ upper[own, own.stop :]
        codes.append(found)
        scales.append(scale)
    back = order.argsort()
    blocks_back = order[::block].div(block, rounding_mode="floor").argsort()
    return rounding.stored(torch.cat(codes, 1)[:, back], torch.stack(scales, 1)[:, blocks_back])


def column_order(diagonal: torch.Tensor, block: int) -> torch.Tensor:
    """Returns the order of columns, int64 [K]: blocks, and columns in them, by descending activation; ties keep their order."""
    each = diagonal.unflatten(0, (-1, block))
    inside = each.argsort(dim=1, descending=True, stable=True)
    columns = inside + torch.arange(0, len(diagonal), block, device=diagonal.device).unsqueeze(1)
    return columns[each.mean(1).argsort(dim=0, descending=True, stable=True)].flatten()


def inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Returns the upper Cholesky factor, float32, of the inverse of a positive definite matrix, float64 [K, K]."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _block(
    values: torch.Tensor, rounding: Rounding, upper: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds the columns of a block, with all trial scales at once.

    Args:
        values: float32 [N, block].
        rounding: format and trial scales.
        upper: the block's own part of U.

    Returns:
        For each row, from its cheapest trial: codes uint8 [N, block], scales uint8 [N], errors float32 [N, block].
    """
    amax = values.abs().amax(1)
    tried = [rounding.scales(amax, trial) for trial in rounding.trials]
    scales, steps = (torch.stack(part) for part in zip(*tried, strict=True))
    rest = values.expand(len(scales), -1, -1).clone()
    codes, errors = torch.empty_like(rest, dtype=torch.uint8), torch.empty_like(rest)
    for j in range(values.shape[1]):
        codes[..., j] = rounding.encode(rest[..., j], steps)
        errors[..., j] = (rest[..., j] - rounding.decode(codes[..., j], steps)) / upper[j, j]
        rest[..., j + 1 :] -= errors[..., j, None] * upper[j, j + 1 :]
    best = errors.square().sum(-1).argmin(0)
    rows = torch.arange(len(values), device=values.device)
    return codes[best, rows], scales[best, rows], errors[best, rows]
