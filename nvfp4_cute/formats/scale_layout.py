"""The blocked 128x4 layout of block scales, which TMA, ``tcgen05.cp``, cuBLAS and ``torch._scaled_mm`` read.

A scale matrix ``[rows, k_blocks]`` has one byte per row of the operand and block of values along K (16 for NVFP4). It is split
into atoms of 128 rows x 4 k blocks, which follow each other row-major; missing rows and columns of the last atoms are padding.
One atom is 512 contiguous bytes, indexed ``[row % 32, row % 128 // 32, k_block % 4]``. With ``rm = ceil(rows / 128)`` and ``rk
= ceil(k_blocks / 4)``, the blocked array is contiguous ``[rm, rk, 32, 4, 4]``.

Scales of 16 or 32 bits (int4 weights) take two or four columns of bytes. Their atoms are ``[32, 4, 2]`` or ``[32, 4, 1]``, with
32 bits per row.

Source: PTX ISA 9.7.16.10.7 (scale factors in tensor memory), cuBLAS "1D block scaling factors layout".
"""

from collections.abc import Sequence
from math import prod

import torch

from nvfp4_cute.formats.block_format import (
    ATOM_BYTES,
    ATOM_COLS,
    ATOM_ROWS,
    ATOM_SHAPE,
    INT4_FORMATS,
    MXFP4,
    NVFP4,
    BlockFormat,
)

SF_VEC_SIZE = NVFP4.block_k


def atom_counts(rows: int, k_blocks: int) -> tuple[int, int]:
    """Returns the number of atoms along rows and along k blocks, ``(rm, rk)``."""
    return -(-rows // ATOM_ROWS), -(-k_blocks // ATOM_COLS)


def padded_shape(rows: int, k_blocks: int) -> tuple[int, int]:
    """Rounds ``(rows, k_blocks)`` up to whole atoms. The product is the blocked size in bytes."""
    rm, rk = atom_counts(rows, k_blocks)
    return rm * ATOM_ROWS, rk * ATOM_COLS


def blocked_offset(row, k_block, k_blocks: int):
    """Returns the byte offset of scale ``(row, k_block)`` in the blocked array of a matrix with ``k_blocks`` columns.

    ``row`` and ``k_block`` may be ints or integer tensors, which broadcast.
    """
    atom = row // ATOM_ROWS * -(-k_blocks // ATOM_COLS) + k_block // ATOM_COLS
    return atom * ATOM_BYTES + row % 32 * 16 + row % ATOM_ROWS // 32 * 4 + k_block % ATOM_COLS


def num_k_blocks(k: int) -> int:
    """Returns the scale blocks along K in NVFP4. Raises ValueError unless ``k`` is a positive multiple of 16."""
    return NVFP4.num_k_blocks(k)


def to_blocked(scale: torch.Tensor) -> torch.Tensor:
    """Copies row-major scales into the blocked layout, with zero padding.

    Args:
        scale: uint8, float8_e4m3fn, float8_e8m0fnu, or a 16-bit or 32-bit type of scales, ``[..., rows, k_blocks]``, any
            strides, any device.

    Returns:
        Contiguous ``[..., rm, rk, 32, 4, 4]`` in the same dtype on the same device (the last extent is 2 for 16-bit and 1 for
        32-bit scales). For one matrix, ``.flatten()`` of it is free.

    Raises:
        TypeError: the dtype is not a type of scales.
        ValueError: there are fewer than two dimensions.
    """
    _check_dtype(scale)
    if scale.ndim < 2:
        raise ValueError(
            f"row-major scales have shape [..., rows, K/16]; got {tuple(scale.shape)}; reshape first"
        )
    *lead, rows, k_blocks = scale.shape
    columns = k_blocks * scale.element_size()
    rm, rk = atom_counts(rows, columns)
    padded = torch.zeros(*lead, *padded_shape(rows, columns), dtype=torch.uint8, device=scale.device)
    padded.view(scale.dtype)[..., :rows, :k_blocks] = scale
    # (..., rm, row group, row, rk, k block) -> (..., rm, rk, row, row group, k block)
    blocked = padded.view(*lead, rm, 4, 32, rk, ATOM_COLS).transpose(-4, -2).contiguous()
    return blocked.view(scale.dtype)


def from_blocked(blocked: torch.Tensor, rows: int, k_blocks: int) -> torch.Tensor:
    """Copies blocked scales to row-major scales and drops the padding; the inverse of :func:`to_blocked`.

    Args:
        blocked: uint8, float8_e4m3fn or float8_e8m0fnu, ``[..., rm, rk, 32, 4, 4]`` of any strides, or one matrix as flat 1-D.
            Padding may hold anything.
        rows: rows of the operand, without padding.
        k_blocks: K / block (NVFP4: K / 16), without padding.

    Returns:
        Contiguous ``[..., rows, k_blocks]`` in the same dtype on the same device.

    Raises:
        TypeError: the dtype is not a type of scales.
        ValueError: the shape does not fit ``rows`` and ``k_blocks``.
    """
    _check_dtype(blocked)
    columns = k_blocks * blocked.element_size()
    atoms = (*atom_counts(rows, columns), *ATOM_SHAPE)
    source = blocked.view(torch.uint8)
    if blocked.ndim == 1 and source.numel() == prod(atoms):
        source = source.reshape(atoms)
    if source.shape[-5:] != atoms:
        raise ValueError(
            f"blocked scales of {rows} rows and {k_blocks} k blocks have shape [..., {_letters(atoms)}] or, flat, "
            f"[{prod(atoms)}]; got {tuple(blocked.shape)}"
        )
    padded = source.transpose(-4, -2).reshape(*source.shape[:-5], *padded_shape(rows, columns))
    return padded[..., :rows, :columns].contiguous().view(blocked.dtype)


def as_blocked(scale: torch.Tensor, rows: int, k: int, format: BlockFormat = NVFP4) -> torch.Tensor:
    """Views the blocked scales of one operand as flat bytes, without a copy.

    Shape and strides select one of three forms (``l`` is a batch mode and must be 1):

    - flat ``[rm * rk * 512]``, contiguous;
    - ``[rm, rk, 32, 4, 4]``, contiguous;
    - ``(32, 4, rm, 4, rk, l)``, the permuted view ``(3, 4, 1, 5, 2, 0)`` of contiguous ``[l, rm, rk, 32, 4, 4]``.

    For 16-bit and 32-bit scales, 2 and 1 replace the last 4, and 256 and 128 replace 512 (``BlockFormat.atom_shape``).

    A two-dimensional tensor is never taken as blocked, because padded row-major scales have the same shape.

    Args:
        scale: uint8 or the format's own dtype, in one of the forms.
        rows: M or N of the operand, without padding.
        k: K in elements.
        format: format of the operand.

    Returns:
        uint8, 1-D, contiguous, ``rm * rk * 512`` long, sharing storage with ``scale``.

    Raises:
        TypeError: the dtype is not one of the format's.
        ValueError: ``k`` is not a multiple of the block, shape and strides fit none of the forms, or the format's scales are
            never blocked.
    """
    rm, rk = _atoms(scale, rows, k, format)
    atoms, permuted = (rm, rk, *format.atom_shape), _permuted_shape(rm, rk, 1, format)
    size, shape = prod(atoms), tuple(scale.shape)
    if shape not in ((size,), atoms, permuted):
        raise ValueError(
            f"blocked scales of {rows} rows and K={k} have shape [{size}], [{_letters(atoms)}], or the permuted view "
            f"({_letters(permuted)}); got {shape}; {_shape_fix(shape, rows, k, permuted, format)}"
        )
    ordered = scale.permute(5, 2, 4, 0, 1, 3) if shape == permuted else scale
    if not ordered.is_contiguous():
        fix = "rebuild it as .permute(3, 4, 1, 5, 2, 0) of contiguous [l, rm, rk, 32, 4, 4]"
        raise ValueError(
            f"blocked scales of shape {shape} must lie in memory as contiguous [rm, rk, 32, 4, 4]; got strides "
            f"{scale.stride()}; {fix if shape == permuted else 'call .contiguous()'}"
        )
    return ordered.view(size).view(torch.uint8)


def as_blocked_batches(
    scale: torch.Tensor, rows: int, k: int, batches: int, format: BlockFormat = NVFP4
) -> torch.Tensor:
    """Views the blocked scales of a batch of operands as bytes, without a copy.

    The shape selects one of three forms: contiguous ``[l, rm, rk, 32, 4, 4]``; its permuted view ``(32, 4, rm, 4, rk, l)``,
    which is ``(3, 4, 1, 5, 2, 0)``; and for one batch any form of :func:`as_blocked`. There may be gaps between batches.

    Args:
        scale: uint8 or the format's own dtype, in one of the forms.
        rows: M or N of one operand, without padding.
        k: K in elements.
        batches: l.
        format: format of the operands.

    Returns:
        uint8 ``[l, rm * rk * 512]``, unit stride within a batch, sharing storage with ``scale``.

    Raises:
        TypeError, ValueError: for the reasons of :func:`as_blocked`.
    """
    rm, rk = _atoms(scale, rows, k, format)
    straight, permuted = (batches, rm, rk, *format.atom_shape), _permuted_shape(rm, rk, batches, format)
    shape = tuple(scale.shape)
    if shape not in (straight, permuted) and batches == 1:
        return as_blocked(scale, rows, k, format).unsqueeze(0)
    if shape not in (straight, permuted):
        raise ValueError(
            f"blocked scales of {batches} batches of {rows} rows and K={k} have shape [{_letters(straight)}] or the "
            f"permuted view ({_letters(permuted)}); got {shape}; convert row-major scales with scale_layout.to_blocked"
        )
    ordered = scale if shape == straight else scale.permute(5, 2, 4, 0, 1, 3)
    if batches and not ordered[0].is_contiguous():
        raise ValueError(
            f"blocked scales of shape {shape} must lie in memory as [l, rm, rk, 32, 4, 4], contiguous in every batch; "
            f"got strides {scale.stride()}; copy them with .contiguous() in that order"
        )
    size = rm * rk * prod(format.atom_shape)
    of_batches = ordered.view(batches, size) if batches else ordered.reshape(0, size)
    return of_batches.view(torch.uint8)


def _permuted_shape(rm: int, rk: int, batches: int, format: BlockFormat) -> tuple[int, ...]:
    rows, row_groups, columns = format.atom_shape
    return rows, row_groups, rm, columns, rk, batches


def _atoms(scale: torch.Tensor, rows: int, k: int, format: BlockFormat) -> tuple[int, int]:
    """Returns the atoms along rows and along K of an operand. Raises if its scales cannot be blocked or have a wrong dtype."""
    if format.scale_layout != "blocked":
        raise ValueError(
            f'scales of {format.title} are row-major, never blocked; use scale_layout="rowmajor"'
        )
    if scale.dtype not in format.scale_dtypes:
        raise TypeError(
            f"scales are {' or '.join(map(str, format.scale_dtypes))}; got {scale.dtype}; "
            "use quantize, or formats.encode_e4m3 for scales of your own"
        )
    format.num_k_blocks(k)
    return format.scale_atoms(rows, k)


def _shape_fix(shape: Sequence[int], rows: int, k: int, permuted: Sequence[int], format: BlockFormat) -> str:
    """Describes what the caller probably passed and how to convert it."""
    k_blocks = format.num_k_blocks(k)
    if tuple(shape) == (rows, k_blocks):
        return 'these look row-major: pass scale_layout="rowmajor" or convert with scale_layout.to_blocked'
    if len(shape) == 6 and tuple(shape[:5]) == tuple(permuted[:5]):
        return f"l={shape[5]} batches: pass them one at a time, scale[..., i : i + 1]"
    if tuple(shape) == padded_shape(rows, k_blocks):
        return (
            "if these bytes are already blocked, pass scale.flatten(); if they are row-major, use to_blocked"
        )
    return f"convert row-major scales [rows, K/{format.block_k}] with scale_layout.to_blocked"


def _check_dtype(scale: torch.Tensor) -> None:
    of_int4 = {dtype for format in INT4_FORMATS.values() for dtype in format.scale_dtypes}
    if scale.dtype not in (*NVFP4.scale_dtypes, *MXFP4.scale_dtypes, *of_int4):
        raise TypeError(
            f"scales are torch.uint8 or torch.float8_e4m3fn, of MX formats torch.float8_e8m0fnu; got {scale.dtype}; "
            "use quantize, or formats.encode_e4m3 for scales of your own"
        )


def _letters(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape))
