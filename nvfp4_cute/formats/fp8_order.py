"""MXFP4_FP8: MXFP4 weights reordered for products with FP8 rows on sm_90a, whose tensor cores multiply their exact values.

A block of 32 values keeps its 16 bytes, as four little-endian words. Word t is that of lane t of the four lanes that share a
row. Its lower four nibbles hold values 4t to 4t+3, and its upper four hold values 16+4t to 16+4t+3. The low three bits of a
nibble are the magnitude of its value, so ``prmt`` can use them to select an e4m3 number from a table. Bit 3 of nibble 2j+1 is the
sign of value 4t+j, and bit 3 of nibble 2j is the sign of value 16+4t+j. The former is bit 7 of byte j, and the latter becomes so
after a shift by four, so one mask extracts the signs of four values.

Scales are relative. Bits 3 to 6 of a scale hold the exponent of its block minus that of the row's largest scale, plus 14. Bits 0
and 1 hold a part of the largest scale, a ue8m0 code: its bits 2j and 2j+1 in the scale of block 4i+j. e4m3 holds e2m1 numbers
times 2^-8 to 2^6, which are 15 powers of two. A row whose blocks span more raises. Blocks of zeros may have any scale.
"""

from dataclasses import replace

import torch

from nvfp4_cute.formats.block_format import E4M3_POWERS, ROW_EXPONENT, BlockFormat
from nvfp4_cute.formats.codecs import pack_e2m1, unpack_e2m1

LANES, LANE_VALUES = 4, 4
SIGN, MAGNITUDE, NAN_SCALE = 8, 7, 255
# Least code of a row's largest scale for which the power of two of the row's results is a normal float32.
LEAST_LARGEST = ROW_EXPONENT + 1


def to_fp8_order(data: torch.Tensor) -> torch.Tensor:
    """Copies packed e2m1 [..., K/2], uint8, into the order of MXFP4_FP8. K is a multiple of 32."""
    # [..., block, half, lane, value] -> [..., block, lane, half, value]
    codes = unpack_e2m1(data).unflatten(-1, (-1, 2, LANES, LANE_VALUES)).transpose(-3, -2)
    signs = (codes & SIGN).flip(-2).transpose(-2, -1).reshape(codes.shape)
    return pack_e2m1((codes & MAGNITUDE | signs).flatten(-4))


def from_fp8_order(data: torch.Tensor) -> torch.Tensor:
    """Copies from the order of MXFP4_FP8 to rows; the inverse of :func:`to_fp8_order`."""
    nibbles = unpack_e2m1(data).unflatten(-1, (-1, LANES, 2, LANE_VALUES))
    signs = (nibbles & SIGN).reshape(*nibbles.shape[:-2], LANE_VALUES, 2).transpose(-2, -1).flip(-2)
    return pack_e2m1((nibbles & MAGNITUDE | signs).transpose(-3, -2).flatten(-4))


def in_rows(data: torch.Tensor, format: BlockFormat) -> tuple[torch.Tensor, BlockFormat]:
    """Returns weights in rows and their format. Copies weights in another order, whose scales stay relative."""
    return (from_fp8_order(data), replace(format, order="rows")) if format.order == "fp8" else (data, format)


def relative_scales(scale: torch.Tensor, is_zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts ue8m0 codes [..., K/32], uint8, to relative scales; also returns which of them cannot be converted.

    is_zero: whether all values of a block are zeros.
    """
    codes = torch.where(is_zero, 0, scale).int()
    largest = codes.amax(-1, keepdim=True).clamp(min=LEAST_LARGEST)
    powers = torch.where(is_zero, 0, codes - largest + E4M3_POWERS - 1)
    wrong = (powers < 0) | (codes == NAN_SCALE)
    part = torch.arange(scale.shape[-1], device=scale.device) % 4
    return (powers.clamp(min=0) << 3 | largest >> 2 * part & 3).to(torch.uint8), wrong
