"""Scales of int4 weights as modules hold them: 32-bit words, which no conversion of a module's floats reaches."""

import torch

from nvfp4_cute.formats.block_format import ATOM_SHAPE, BlockFormat
from nvfp4_cute.formats.block_scaled import BlockScaledTensor


def words_of(weight: BlockScaledTensor) -> torch.Tensor:
    """Blocked scales as int32 words, [..., rm, rk, 32, 4]."""
    return as_words(weight.with_scale_layout("blocked").scale)


def as_words(scale: torch.Tensor) -> torch.Tensor:
    """The same of blocked scales [..., rm, rk, 32, 4, scales of a word]."""
    return scale.view(torch.int32).squeeze(-1)


def scales_of(words: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    """Inverse of :func:`as_words`: blocked scales of their own dtype."""
    assert words.shape[-2:] == ATOM_SHAPE[:2]
    return words.unsqueeze(-1).view(format.scale_dtypes[0])
