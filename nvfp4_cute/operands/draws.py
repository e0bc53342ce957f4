"""Random operands with exact sums: the generator of ``check``, of ``prove`` and of the tests' fuzzer.

Operands are drawn so that every sum is exact in fp32 in any order of accumulation. Values are multiples of 1/2 up to 6,
and scales are 0.5, 1, 1.5 or 2, so products are multiples of 1/16 up to 144, and K of them stay below 2**24 sixteenths.
Weights in int4 are up to 16, but they are integers and the other operand has no scales: multiples of 1/4 up to 192.
alpha is a power of two. A backend that differs by one bit computes something else.
"""

from collections.abc import Sequence
from typing import Any

import torch

from nvfp4_cute.formats.block_format import MIXED_PAIRS, NVFP4, PADDED_K_MULTIPLE, BlockFormat, Formats
from nvfp4_cute.formats.codecs import encode, encode_e4m3, encode_ue8m0
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.formats.zero_points import FLOATS, scale_words
from nvfp4_cute.operands.whole import Parts

SCALES = (0.5, 1.0, 1.5, 2.0)
ZERO_POINTS = (0, 7, 8, 16)
ALPHAS = (0.25, 0.5, 1.0, 2.0, -1.0)
K_STEP = 32  # row pitch in full 16-byte units, as tensor maps require
MAX_EXACT_K = 2**24 // (16 * 144) // K_STEP * K_STEP
# Shares of the groups with edge-case row counts, whatever the limits are.
EMPTY_SHARE, ONE_ROW_SHARE = 0.1, 0.1
POISON_BYTE = 0xFE  # NaN in every float format


def depth_step(formats: Formats) -> int:
    """Returns the number that divides K: whole blocks, row pitches of 16 bytes, and whole boxes for formats that TMA pads."""
    return max(
        PADDED_K_MULTIPLE if formats in MIXED_PAIRS else K_STEP, *(format.k_multiple for format in formats)
    )


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns memory for results, in which every byte is ``POISON_BYTE``."""
    out = torch.empty(shape, dtype=dtype)
    out.view(torch.uint8).fill_(POISON_BYTE)
    return out


class Dice:
    """All random choices of the problem of one seed. The order of the calls matters."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        """Returns a random integer, both bounds included."""
        return int(torch.randint(low, high + 1, (), generator=self._generator))

    def choose(self, values: Sequence[Any]) -> Any:
        """Returns a random element of ``values``."""
        return values[self.integer(0, len(values) - 1)]

    def rows(self, most: int) -> int:
        """Returns the rows of a group; 0 and 1 are more frequent than by uniform chance."""
        edge = float(torch.rand((), generator=self._generator))
        if edge < EMPTY_SHARE:
            return 0
        return 1 if edge < EMPTY_SHARE + ONE_ROW_SHARE else self.integer(1, most)

    def values(self, rows: int, k: int, format: BlockFormat = NVFP4) -> torch.Tensor:
        """Returns random bit patterns of e2m1, uint8 [rows, k/2]; or 8-bit elements [rows, k], multiples of 1/2 up to 6."""
        if format.element.bits == 8:
            return encode(self.halves(rows, k), format.element)
        return torch.randint(
            0, 256, (rows, format.row_bytes(k)), dtype=torch.uint8, generator=self._generator
        )

    def scales(self, rows: int, k: int, format: BlockFormat = NVFP4) -> torch.Tensor:
        """Returns scales out of ``scale_choices``, in the format's own layout."""
        choices = scale_choices(format)
        is_rowmajor = format.scale_layout == "rowmajor"
        shape = format.scale_shape(rows, k) if is_rowmajor else (rows, format.num_k_blocks(k))
        chosen = choices[torch.randint(0, len(choices), shape, generator=self._generator)]
        return chosen if is_rowmajor else to_blocked(chosen)

    def operand(self, shapes: Sequence[tuple[int, int]], format: BlockFormat = NVFP4) -> Parts:
        """Returns one operand of groups, with rows and K of each group: lists of data and of scales."""
        return Parts(
            [self.values(*x, format) for x in shapes], [self.scales(*x, format) for x in shapes], format
        )

    def factors(self, count: int) -> torch.Tensor:
        """Returns float32 [count] out of ``ALPHAS``."""
        return torch.tensor([self.choose(ALPHAS) for _ in range(count)])

    def halves(self, *shape: int) -> torch.Tensor:
        """Returns float32 multiples of 1/2 from -6 to 6: the values of e2m1 and more."""
        return torch.randint(-12, 13, shape, generator=self._generator) / 2


def scale_choices(format: BlockFormat, values: Sequence[float] = SCALES) -> torch.Tensor:
    """Returns ``values`` as scales of a format: without 1.5 if it has powers of two alone, or each with all ``ZERO_POINTS``."""
    scale = format.scale_float.name
    choices = torch.tensor([x for x in values if scale != "ue8m0" or x != 1.5])
    if format.has_zero_points:
        words = choices.to(FLOATS[format.scale.name]).repeat_interleave(len(ZERO_POINTS))
        return scale_words(words, torch.tensor(ZERO_POINTS * len(choices)))
    if format.scale.bits == 8:
        return encode_ue8m0(choices) if scale == "ue8m0" else encode_e4m3(choices)
    return choices.to(format.scale_dtypes[0])
