"""Rules that one tensor of a grouped problem keeps, and the view of it that launches take. No data is read."""

from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_scaled import DATA_DTYPES, ScaleLayout, check_is_tensor
from nvfp4_cute.formats.scale_layout import SCALE_DTYPES, SF_VEC_SIZE, as_blocked, to_blocked
from nvfp4_cute.operands.numbers_on_device import numbers_on
from nvfp4_cute.problem import INT32_MAX, NVFP4, OUT_DTYPES, TMA_ALIGN_BYTES, OutDtype, dtype_name


def check_quantized_columns(label: str, n: int) -> None:
    """Raises ValueError where rows of ``n`` results are not whole NVFP4 blocks."""
    if n == 0 or n % SF_VEC_SIZE:
        raise ValueError(
            f'{label}={n} is not a positive multiple of {SF_VEC_SIZE} (NVFP4 block size), and out_dtype="nvfp4" stores '
            f"rows of blocks; pad b to {max(-(-n // SF_VEC_SIZE), 1) * SF_VEC_SIZE} rows"
        )


def out_data(label: str, tensor: torch.Tensor, m: int, n: int) -> torch.Tensor:
    """The uint8 [M, N/2] view of a caller's NVFP4 output, aligned like an operand, as which the next layer reads it."""
    rows = fp4_rows(label, "M", tensor)
    if rows.shape != (m, n // 2):
        raise ValueError(f"{label} has shape {list(tensor.shape)}; expected [M, N/2] = {[m, n // 2]}")
    return rows


def alpha_tensor(alpha: Any, device: torch.device) -> torch.Tensor | None:
    """A checked alpha on the device; None where there is none."""
    if alpha is None or isinstance(alpha, torch.Tensor):
        return alpha
    return numbers_on(device, alpha)


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """For messages."""
    return " or ".join(dtype_name(d) for d in dtypes)


def check_out_dtype(out_dtype: OutDtype, out_global_scale: Any) -> None:
    """Raises TypeError for a dtype that no kernel writes, ValueError for a global scale that nothing uses."""
    if out_dtype != NVFP4 and out_dtype not in OUT_DTYPES:
        raise TypeError(
            f"out_dtype={out_dtype!r} is not supported; use {dtype_names(OUT_DTYPES)} or {NVFP4!r}"
        )
    if out_global_scale is not None and out_dtype != NVFP4:
        raise ValueError(
            f"out_global_scale is given and out_dtype={out_dtype}; it goes with out_dtype={NVFP4!r}"
        )


def check_tensor(label: str, tensor: Any, first: Any) -> None:
    """Raises where it is no tensor, on another device than ``first``, or has a gradient to record."""
    check_is_tensor(label, tensor)
    if tensor.device != first.device:
        raise ValueError(
            f"{label} is on {tensor.device} and group 0: a on {first.device}; move all operands to one device"
        )
    check_no_grad(label, tensor)


def check_no_grad(label: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedProblem where a gradient would be recorded."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UnsupportedProblem(
            f"{label} has requires_grad=True; there is no backward pass: pass .detach() or use torch.no_grad()"
        )


def _check_align(label: str, tensor: torch.Tensor, align_bytes: int, why: str) -> None:
    if tensor.numel() and tensor.data_ptr() % align_bytes:
        raise ValueError(
            f"{label} starts at address 0x{tensor.data_ptr():x}, not a multiple of {align_bytes} bytes ({why}); "
            f"use a view that starts on such a boundary, or .clone()"
        )


def _drop_batch(label: str, tensor: torch.Tensor, shape: str) -> torch.Tensor:
    """[X, Y] or [X, Y, 1] -> [X, Y]."""
    if tensor.ndim == 3 and tensor.shape[2] == 1:
        return tensor.squeeze(2)
    if tensor.ndim != 2:
        raise ValueError(f"{label} has shape {list(tensor.shape)}; expected {shape}")
    return tensor


def _with_pitch(tensor: torch.Tensor, pitch: int) -> torch.Tensor:
    """The same elements with canonical strides, for shapes in which one of the strides is never used."""
    return tensor.as_strided(tensor.shape, (pitch, 1))


def fp4_rows(label: str, letter: str, tensor: torch.Tensor) -> torch.Tensor:
    """The uint8 [rows, K/2] view of an operand, or the reason why it is none."""
    if tensor.dtype not in DATA_DTYPES:
        raise TypeError(
            f"{label} has dtype {dtype_name(tensor.dtype)}; expected {dtype_names(DATA_DTYPES)} (two e2m1 a byte)"
        )
    rows = _drop_batch(label, tensor.view(torch.uint8), f"[{letter}, K/2] or [{letter}, K/2, 1]")
    num_rows, row_bytes = rows.shape
    k = 2 * row_bytes
    if k == 0:
        raise UnsupportedProblem(
            f"{label} has shape {list(tensor.shape)}: K=0; K must be at least {SF_VEC_SIZE}"
        )
    if k % SF_VEC_SIZE:
        padded = -(-k // SF_VEC_SIZE) * SF_VEC_SIZE
        raise ValueError(
            f"{label}: K={k} is not a multiple of {SF_VEC_SIZE} (NVFP4 block size); pad K to {padded}"
        )
    if max(num_rows, k) > INT32_MAX:
        raise UnsupportedProblem(
            f"{label}: {letter}={num_rows}, K={k} exceeds the 32-bit limit {INT32_MAX}; split the problem"
        )
    if num_rows > 0 and rows.stride(1) != 1:
        raise ValueError(
            f"{label} has stride {rows.stride(1)} in K (strides {tuple(tensor.stride())}), not 1 (K-major); "
            f"copy with .contiguous() after bringing it to [{letter}, K/2]"
        )
    _check_align(label, rows, TMA_ALIGN_BYTES, "TMA base address")
    aligned = -(-row_bytes // TMA_ALIGN_BYTES) * TMA_ALIGN_BYTES
    if num_rows <= 1:
        return _with_pitch(rows, aligned)
    _check_pitch(label, rows, aligned)
    return rows


def _check_pitch(label: str, rows: torch.Tensor, aligned: int) -> None:
    row_bytes, pitch = rows.shape[1], rows.stride(0)
    if pitch < row_bytes:
        raise ValueError(
            f"{label} has a row pitch of {pitch} bytes for rows of {row_bytes}: rows overlap; "
            f"copy with .contiguous()"
        )
    if pitch % TMA_ALIGN_BYTES:
        raise ValueError(
            f"{label} (K={2 * row_bytes}) has a row pitch of {pitch} bytes, not a multiple of {TMA_ALIGN_BYTES} "
            f"(TMA row pitch); keep the rows {aligned} bytes apart: buffer of {aligned} bytes a row, "
            f"pass buffer[:, :{row_bytes}]"
        )


def checked_scale(
    label: str, letter: str, scale: torch.Tensor, rows: int, k: int, layout: ScaleLayout
) -> torch.Tensor:
    """Blocked: the 1-D uint8 view. Row-major: the checked [rows, K/16] matrix, still to be converted."""
    if layout == "rowmajor":
        return _rowmajor_scale(label, letter, scale, rows, k)
    try:
        blocked = as_blocked(scale, rows, k)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{label}: {error}") from error
    _check_align(label, blocked, TMA_ALIGN_BYTES, "TMA base address")
    return blocked


def _rowmajor_scale(label: str, letter: str, scale: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    if scale.dtype not in SCALE_DTYPES:
        raise TypeError(
            f"{label} has dtype {dtype_name(scale.dtype)}; expected {dtype_names(SCALE_DTYPES)} (e4m3 codes)"
        )
    expected = [rows, k // SF_VEC_SIZE]
    matrix = _drop_batch(label, scale, f"[{letter}, K/16] = {expected} (row-major)")
    if list(matrix.shape) != expected:
        raise ValueError(
            f"{label} has shape {list(scale.shape)}; expected {expected} (row-major, {letter}={rows}, K={k}); "
            f"for scales in the 128x4 layout pass scale_layout='blocked'"
        )
    return matrix


def flat_blocked(scale: torch.Tensor) -> torch.Tensor:
    """A row-major scale converted into new memory: 1-D uint8, 128x4 blocked."""
    return to_blocked(scale).view(torch.uint8).view(-1)


def check_alpha(name: str, alpha: Any, num_groups: int, device: torch.device) -> None:
    """Raises where ``alpha`` is neither None, nor one number a group, nor a float32 [G] of the device."""
    if alpha is None:
        return
    if not isinstance(alpha, torch.Tensor):
        if not isinstance(alpha, list | tuple) or not all(isinstance(x, Real) for x in alpha):
            raise TypeError(
                f"{name}={alpha!r} is neither a float32 tensor nor a list of numbers, one a group"
            )
        if len(alpha) != num_groups:
            raise ValueError(
                f"{name} has {len(alpha)} entries for {num_groups} groups; pass one number a group"
            )
        return
    if alpha.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {dtype_name(alpha.dtype)}; expected float32: {name}.float()")
    if tuple(alpha.shape) != (num_groups,) or not alpha.is_contiguous():
        raise ValueError(
            f"{name} has shape {list(alpha.shape)}, strides {tuple(alpha.stride())}; expected contiguous "
            f"[{num_groups}], one factor a group: {name}.reshape({num_groups}).contiguous()"
        )
    if alpha.device != device:
        raise ValueError(
            f"{name} is on {alpha.device} and group 0: a on {device}; move all operands to one device"
        )
    check_no_grad(name, alpha)


def is_m_major(out: Iterable[torch.Tensor]) -> bool:
    """Whether columns are contiguous. One group with several rows and columns decides for all."""
    return any(
        t.ndim >= 2 and min(t.shape[:2]) > 1 and t.stride(0) == 1 and t.stride(1) != 1
        for t in out
        if isinstance(t, torch.Tensor)
    )


def out_view(
    label: str, tensor: torch.Tensor, m: int, n: int, dtype: torch.dtype, m_major: bool
) -> torch.Tensor:
    """The [M, N] view of a caller's output, with canonical strides."""
    if tensor.dtype != dtype:
        raise TypeError(
            f"{label} has dtype {dtype_name(tensor.dtype)} and out_dtype is {dtype_name(dtype)}; "
            f"pass out_dtype={tensor.dtype} or an out of dtype {dtype_name(dtype)}"
        )
    expected = f"[M, N] = {[m, n]} or {[m, n, 1]}"
    matrix = _drop_batch(label, tensor, expected)
    if matrix.shape != (m, n):
        raise ValueError(f"{label} has shape {list(tensor.shape)}; expected {expected}")
    _check_align(label, matrix, dtype.itemsize, "natural alignment")
    if m_major:
        return _runs(label, matrix.T, "M", "column", f"torch.empty({n}, {m}).T").T
    return _runs(label, matrix, "N", "row", f"torch.empty({m}, {n})")


def _runs(label: str, matrix: torch.Tensor, letter: str, line: str, fix: str) -> torch.Tensor:
    """``matrix`` [lines, length] with unit stride along its lines, which must not overlap."""
    lines, length = matrix.shape
    if matrix.numel() == 0:
        return _with_pitch(matrix, max(length, 1))
    if length > 1 and matrix.stride(1) != 1:
        raise ValueError(
            f"{label} has stride {matrix.stride(1)} in {letter}, not 1 ({line}-major); allocate it as {fix}"
        )
    if lines == 1:
        return _with_pitch(matrix, length)
    pitch = matrix.stride(0)
    if not length <= pitch <= INT32_MAX:
        raise ValueError(
            f"{label} has a {line} pitch of {pitch} elements, expected {length} ({letter}) to {INT32_MAX}; "
            f"allocate it as {fix}"
        )
    return _with_pitch(matrix, pitch)
