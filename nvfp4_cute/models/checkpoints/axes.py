"""Dimensions along N and K of stored weights, for ranks of an engine, which slice tensors before they are read."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nvfp4_cute.formats.block_format import MXFP4, NVFP4
from nvfp4_cute.models.checkpoints.convention import DATA, SCALE, ZERO
from nvfp4_cute.models.checkpoints.stored import INT4, Scheme

BLOCK = 0  # stands for "values that share a scale", a number that the file decides


@dataclass(frozen=True)
class Axes:
    """The axes of a matrix in a file.

    Attributes:
        n: its dimension along N, 0 or 1; the other dimension runs along K.
        n_values, k_values: values of the weights per element, along N and along K; BLOCK for a block.
        dtype: dtype of the elements; None if the file decides.
    """

    n: int
    n_values: int = 1
    k_values: int = 1
    dtype: torch.dtype | None = None

    @property
    def k(self) -> int:
        """Dimension along K."""
        return 1 - self.n

    def shape(self, n: int, k: int, block_k: int) -> tuple[int, int]:
        """Returns the shape for [n, k] weights with blocks of ``block_k`` values."""
        sizes = n // self.n_values, k // (self.k_values or block_k)
        return sizes if self.n == 0 else sizes[::-1]


NVFP4_AXES = {
    DATA: Axes(0, k_values=2, dtype=torch.uint8),
    SCALE: Axes(0, k_values=NVFP4.block_k, dtype=torch.float8_e4m3fn),
}
_K_FIRST = {SCALE: Axes(1, k_values=BLOCK), ZERO: Axes(1, 8, BLOCK, torch.int32)}
MXFP4_AXES = {
    DATA: Axes(0, k_values=2, dtype=torch.uint8),
    SCALE: Axes(0, k_values=MXFP4.block_k, dtype=torch.uint8),
}
# Axes by tool; the table in ``checkpoints.int4`` has the sources.
INT4_AXES = {
    "compressed-tensors": {
        DATA: Axes(0, k_values=8, dtype=torch.int32),
        SCALE: Axes(0, k_values=BLOCK),
        ZERO: Axes(0, 8, BLOCK, torch.int32),
    },
    "gptq": {DATA: Axes(1, k_values=8, dtype=torch.int32), **_K_FIRST},
    "awq": {DATA: Axes(1, 8, dtype=torch.int32), **_K_FIRST},
    "modelopt": {DATA: Axes(0, 2, dtype=torch.uint8), SCALE: Axes(0, k_values=BLOCK)},
}


def axes_of(scheme: Scheme, tool: str) -> Mapping[str, Axes]:
    """Returns the axes of a layer's matrices by role, for NVFP4, MXFP4 or int4."""
    if scheme.weights == INT4:
        return INT4_AXES[tool]
    return MXFP4_AXES if scheme.weights == "mxfp4" else NVFP4_AXES
