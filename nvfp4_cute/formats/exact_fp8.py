"""Converts MXFP4 weights without rounding, so that FP8 tensor cores multiply them: to MXFP4_FP8 or FP8_128x128.

An e2m1 value has two significant bits, and a ue8m0 scale is a power of two. Their product is an e4m3 value times a power of two
per 128 x 128 values, if the scales of those values span at most 15 binades: e4m3 holds 6 * 2^6 down to 0.5 * 2^-8. NVFP4 has
no such conversion, because e2m1 times an e4m3 scale has up to six significant bits.
"""

import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import E2M1, E4M3, E4M3_POWERS, MXFP4, MXFP4_FP8, FP8_128x128
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.formats.codecs import decode_e4m3, encode_e4m3
from nvfp4_cute.formats.fp8_order import relative_scales, to_fp8_order
from nvfp4_cute.formats.scale_layout import to_blocked

# Values converted at a time. Bounds the memory for their float64 copies.
MOST_VALUES = 1 << 24
# Values along K whose four scales store the largest scale of their row, and the magnitude bits of a byte's two e2m1 numbers.
TILE_K, E2M1_MAGNITUDES = 128, 0x77
# Smallest exponent of a normal float32 scale.
LEAST_EXPONENT = -126


def mxfp4_as_fp8(weight: BlockScaledTensor) -> BlockScaledTensor:
    """Returns the same values in FP8_128x128, which takes 8 bits per weight instead of 4.25.

    Args:
        weight: MXFP4 [..., N, K], K a multiple of 128.

    Raises:
        TypeError, ValueError: ``weight`` is not an MXFP4 tensor, or K is not a multiple of 128.
        UnsupportedProblem: the values of a block span more than e4m3 holds.
    """
    check_is_mxfp4(weight)
    *lead, n, k = weight.shape
    k_blocks, rows = FP8_128x128.num_k_blocks(k), FP8_128x128.block_rows
    data = torch.empty((*lead, n, k), dtype=torch.uint8, device=weight.device)
    scale = torch.empty((*lead, -(-n // rows), k_blocks), dtype=torch.float32, device=weight.device)
    step = max(MOST_VALUES // (rows * k), 1) * rows
    for index in range(max(torch.Size(lead).numel(), 1)):
        batch = [int(i) for i in torch.unravel_index(torch.tensor(index), lead)] if lead else []
        part = weight
        for i in batch:
            part = part[i]
        own_data, own_scale = (x[tuple(batch)] if batch else x for x in (data, scale))
        for start in range(0, n, step):
            stop = min(start + step, n)
            found = _converted(part[start:stop].dequantize(torch.float64), [*batch, start])
            own_data[start:stop] = found[0]
            own_scale[start // rows : -(-stop // rows)] = found[1]
    return BlockScaledTensor(
        data.view(FP8_128x128.data_dtypes[-1]), scale, None, (*lead, n, k), "rowmajor", format=FP8_128x128
    )


def mxfp4_for_fp8(weight: BlockScaledTensor) -> BlockScaledTensor:
    """Prepare MXFP4 weights for products with FP8_1xK rows on sm_90a: the same values in MXFP4_FP8, 4.25 bits each as before.

    The kernel converts weights exactly to e4m3 numbers, which tensor cores multiply: each value times its scale, relative to the
    largest scale of its row. The largest scale multiplies the sums.

        >>> x, w = torch.randn(40, 512), quantize(torch.randn(256, 512), format=MXFP4)
        >>> gemm(quantize(x, format=FP8_1xK), mxfp4_for_fp8(w)).shape
        torch.Size([40, 256])

    Args:
        weight: MXFP4 [..., N, K], K a multiple of 32 and at least 128.

    Returns:
        A copy with data and scales in another order, from which ``dequantize`` computes the same values.

    Raises:
        TypeError, ValueError: ``weight`` is not an MXFP4 tensor, or K is less than 128.
        UnsupportedProblem: the scales of a row span more than 15 powers of two, or a scale is NaN.
    """
    check_is_mxfp4(weight)
    *lead, n, k = weight.shape
    if k < TILE_K:
        raise ValueError(
            f"weight has K={k}; scales of {TILE_K} values say what a row's largest scale is: pad K"
        )
    data = weight.data.view(torch.uint8).reshape(-1, n, k // 2)
    scale = weight.with_scale_layout("rowmajor").scale.view(torch.uint8).reshape(-1, n, k // MXFP4.block_k)
    new_data, new_scale = torch.empty_like(data), torch.empty_like(scale)
    step = max(MOST_VALUES // k, 1)
    for batch in range(len(data)):
        for start in range(0, n, step):
            part = batch, slice(start, start + step)
            new_data[part] = to_fp8_order(data[part])
            magnitudes = data[part].unflatten(-1, (-1, MXFP4.row_bytes(MXFP4.block_k))) & E2M1_MAGNITUDES
            new_scale[part], wrong = relative_scales(scale[part], (magnitudes == 0).all(-1))
            if wrong.any():
                row, block = (int(i) for i in wrong.nonzero()[0])
                where = f"row {start + row}, K {block * MXFP4.block_k} on" + (
                    f" of matrix {batch}" if lead else ""
                )
                raise UnsupportedProblem(
                    f"MXFP4 weights: {where} has a scale of NaN or more than {E4M3_POWERS - 1} binades below the row's largest, "
                    f'which e4m3 does not hold exactly; use activations="16bit" or "mxfp8_e4m3" rows'
                )
    new_scale = to_blocked(new_scale.view(*lead, n, -1))
    return BlockScaledTensor(
        new_data.view(weight.data.shape), new_scale, None, weight.shape, "blocked", format=MXFP4_FP8
    )


def check_is_mxfp4(weight: object) -> None:
    """Raises TypeError unless ``weight`` is an MXFP4 tensor."""
    if not isinstance(weight, BlockScaledTensor) or weight.format != MXFP4:
        name = weight.format.title if isinstance(weight, BlockScaledTensor) else type(weight).__name__
        raise TypeError(f"weight is {name}; pass an MXFP4 BlockScaledTensor")


def _converted(values: torch.Tensor, place: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns e4m3 codes of float64 [rows, K] and float32 scales of its blocks. place: batch and first row, for the message."""
    n, k = values.shape
    rows, columns = FP8_128x128.block_rows, FP8_128x128.block_k
    blocks = torch.nn.functional.pad(values, (0, 0, 0, -n % rows))
    blocks = blocks.view(-1, rows, k // columns, columns)
    largest = blocks.abs().nan_to_num(0.0).amax((1, 3))
    # The largest magnitude is 6, 4 or 3 times a power of two at most, so its scaled value is at most 6 * 2^6 = 384.
    exponent = torch.where(largest > 0, torch.frexp(largest / E2M1.max).exponent - 1, 6) - 6
    exponent += (torch.ldexp(torch.ones_like(largest), exponent) * E4M3.max < largest).int()
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(min=LEAST_EXPONENT))
    codes = encode_e4m3(blocks / scale[:, None, :, None])
    again = decode_e4m3(codes, torch.float64) * scale[:, None, :, None]
    wrong = ((again != blocks) & ~blocks.isnan()).any(3).any(1)
    if wrong.any():
        row, column = (int(i) for i in wrong.nonzero()[0])
        *batch, start = place
        where = f"rows {start + row * rows} on, K {column * columns} on" + (f" of {batch}" if batch else "")
        raise UnsupportedProblem(
            f"MXFP4 values ({where}) span more binades than e4m3 holds with one scale per {rows} x {columns} values; "
            'use activations="16bit" or "mxfp8_e4m3" rows'
        )
    return codes.view(-1, k)[:n], scale.float()
