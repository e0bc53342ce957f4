"""Rules for single tensors, and the views of them that launches take. No check reads data on a GPU or waits for it."""

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

import torch

from nvfp4_cute import private_api
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import (
    ATOM_ROWS,
    FORMATS,
    INT8_PAIR,
    MAX_INTEGER_K,
    NVFP4_PAIR,
    SCALE_LAYOUTS,
    TMA_ALIGN_BYTES,
    UE8M0,
    BlockFormat,
    Formats,
    FP8_1x128,
    FP8_128x128,
    ScaleLayout,
)
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.formats.block_scaled import check_is_tensor
from nvfp4_cute.formats.global_scale import PER_ROW, first_wrong, is_per_row
from nvfp4_cute.formats.scale_layout import as_blocked, as_blocked_batches, to_blocked
from nvfp4_cute.operands import planned
from nvfp4_cute.operands.numbers_on_device import numbers_on
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.problem import INT32_MAX, NVFP4, OUT_DTYPES, RESULT_FORMATS, OutDtype, dtype_name

# Reach of 32-bit offsets of the kernels in ``kernels/simt``: into the scales of one row of atoms, over its 128 rows.
MAX_PITCH = 2**24
MAX_K = 2 * MAX_PITCH
MAX_BATCHES = 65535
# Dtypes of activations that are not quantized.
ACTIVATION_DTYPES = (torch.float16, torch.bfloat16)
# Dtypes of a bias, whatever the dtype of the results is.
BIAS_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_tensors(
    named: Mapping[str, Any], optional: Mapping[str, Any] = MappingProxyType({})
) -> torch.device:
    """Checks for tensors on one device without gradients to record; returns the device. ``optional`` ones may be None."""
    named = {**named, **given(**optional)}
    check_quantized(named)
    for label, tensor in named.items():
        check_is_tensor(label, tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise UnsupportedProblem(
                f"{label} has requires_grad=True; there is no backward pass: pass .detach() or use torch.no_grad()"
            )
    if not private_api.is_traced():
        check_memory(**named)
    first, model = next(iter(named.items()))
    for label, tensor in named.items():
        if tensor.device != model.device:
            raise ValueError(
                f"{label} is on {tensor.device} and {first} on {model.device}; move all operands to one device"
            )
    return model.device


def check_quantized(named: Mapping[str, Any]) -> None:
    """Raises TypeError for unquantized values: floats, or a list of them, with None as their scale."""
    for label, scale in named.items():
        name = label.removesuffix("_scale")
        if scale is not None or name == label or named.get(name) is None:
            continue
        found = named[name]
        x = found[0] if isinstance(found, list | tuple) and found else found
        if isinstance(x, torch.Tensor) and x.dtype in BIAS_DTYPES:
            fix = f"quantize({name})" if x is found else f"[quantize(x) for x in {name}]"
            raise TypeError(f"{name} has {dtype_name(x.dtype)} values and no {label}; pass {fix}")


def check_memory(**named: Any) -> None:
    """Raises TypeError or ValueError for tensors whose memory does not hold their values at their strides. Reads no values."""
    for label, tensor in tensors_in(named).items():
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError(
                f"{label} is a {type(tensor).__name__}, which holds its values in other tensors; pass one of those, such as "
                ".to_local() of a DTensor"
            )
        if tensor.layout is not torch.strided or tensor.is_nested:
            layout = "nested" if tensor.is_nested else tensor.layout
            raise TypeError(
                f"{label} has layout {layout}; kernels read strided memory: pass .to_dense() of it, or groups to grouped_gemm"
            )
        if tensor.is_neg():
            raise ValueError(
                f"{label} is a view whose sign torch turns as it reads; kernels do not: pass .resolve_neg() of it"
            )
        if tensor.numel() and not tensor.is_meta and not tensor.untyped_storage().nbytes():
            raise ValueError(
                f"{label} has shape {list(tensor.shape)} and no memory: its storage was resized to 0, as FSDP does with what it "
                "shards; call where the tensor is whole, inside of the module that gathers it"
            )


def given(**named: Any) -> dict[str, Any]:
    """Returns the entries that are not None."""
    return {name: value for name, value in named.items() if value is not None}


def tensors_in(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the entries that are tensors, since factors may be numbers."""
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def check_integers(**counts: Any) -> None:
    """Raises TypeError for values that are not integers."""
    for name, count in counts.items():
        if not isinstance(count, Integral) or isinstance(count, bool):
            raise TypeError(f"{name}={count!r} is not an int; pass the number")


def check_sizes(**sizes: Any) -> None:
    """Raises TypeError for values that are not integers, ValueError for negative ones."""
    check_integers(**sizes)
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name}={size} is negative; pass how many there are")


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raises unless ``value`` is one of ``choices``: TypeError for dtypes, ValueError otherwise."""
    if value not in choices:
        error = TypeError if isinstance(value, torch.dtype) else ValueError
        raise error(f"{name}={value!r} is not supported; use {' or '.join(map(repr, choices))}")


def check_scale_layout(scale_layout: Any) -> None:
    """Raises ValueError for an unknown layout."""
    check_choice("scale_layout", scale_layout, SCALE_LAYOUTS)


def check_formats(*, takes_rows: bool = False, **formats: Any) -> None:
    """Checks formats of operands of products.

    Args:
        takes_rows: whether scales may have rows instead of blocks.
        formats: by the names of the arguments that give them.

    Raises TypeError for a value that is not a format, and UnsupportedProblem for scales with rows if they may not have them.
    """
    for name, fmt in formats.items():
        if not isinstance(fmt, BlockFormat):
            raise TypeError(f"{name}={fmt!r} is not a BlockFormat; pass a record such as nvfp4_cute.MXFP4")
        if fmt.scale_layout != "blocked" and not takes_rows:
            raise UnsupportedProblem(
                f"{fmt.title} has {fmt.scale.name} scales: only gemm, grouped_gemm and dual GEMMs of weights that are not "
                "interleaved multiply it, and gemv 16-bit rows by FP8_128X128 or INT8; call one of those, or dequantize it "
                "and quantize to a format with blocked scales"
            )


def check_extent(name: str, extent: int, most: int) -> int:
    """Checks a number of rows, batches or bytes against what an index or the grid can hold, and returns it."""
    if extent > most:
        raise UnsupportedProblem(f"{name}={extent} exceeds {most}; split the problem")
    return extent


def check_k(k: int, fmt: BlockFormat = NVFP4_FORMAT) -> int:
    """Checks that K is a whole number of blocks within the reach of 32-bit offsets, and returns it."""
    fmt.num_k_blocks(k)
    if k > MAX_K:
        raise UnsupportedProblem(f"K={k} exceeds {MAX_K}, what 32-bit offsets reach; split the sum")
    return k


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """Joins the names of dtypes for messages."""
    return " or ".join(dtype_name(d) for d in dtypes)


def check_aligned(
    label: str, tensor: torch.Tensor, align_bytes: int = TMA_ALIGN_BYTES, pitches: Iterable[int] = ()
) -> None:
    """Checks address and ``pitches`` in bytes for alignment: 16, for TMA and vector loads, or an element's size."""
    if not tensor.numel():
        return
    for pitch in pitches:
        if pitch % align_bytes:
            aligned = -(-pitch // align_bytes) * align_bytes
            raise ValueError(
                f"{label} has rows {pitch} bytes apart, not a multiple of {align_bytes} (TMA and vector loads); keep rows in a "
                f"buffer of {aligned} bytes each and pass buffer[:, :{tensor.shape[-1]}]"
            )
    if tensor.data_ptr() % align_bytes:
        why = "TMA and vector loads" if align_bytes == TMA_ALIGN_BYTES else "natural alignment"
        raise ValueError(
            f"{label} starts at address 0x{tensor.data_ptr():x}, not a multiple of {align_bytes} bytes ({why}); "
            f"use a view that starts on such a boundary, or .clone()"
        )


# ---- operands --------------------------------------------------------------------------------------------------


def without_batch(label: str, tensor: torch.Tensor, shape: str) -> torch.Tensor:
    """Converts [X, Y] or [X, Y, 1] to [X, Y]."""
    if tensor.ndim == 3 and tensor.shape[2] == 1:
        return tensor.squeeze(2)
    if tensor.ndim != 2:
        raise ValueError(f"{label} has shape {list(tensor.shape)}; expected {shape}")
    return tensor


def batches_first(tensor: torch.Tensor) -> torch.Tensor:
    """Converts [X, Y] or [X, Y, L] to [L, X, Y]."""
    return tensor.unsqueeze(0) if tensor.ndim == 2 else tensor.permute(2, 0, 1)


def as_bytes(label: str, tensor: torch.Tensor, fmt: BlockFormat = NVFP4_FORMAT) -> torch.Tensor:
    """Returns the uint8 view of packed elements. Raises TypeError for another dtype."""
    if tensor.dtype not in fmt.data_dtypes:
        raise TypeError(
            f"{label} has dtype {tensor.dtype}; expected {dtype_names(fmt.data_dtypes)} "
            f"({8 // fmt.element.bits} {fmt.element.name} a byte)"
        )
    return tensor.view(torch.uint8)


def packed_rows(label: str, letter: str, data: torch.Tensor, fmt: BlockFormat = NVFP4_FORMAT) -> torch.Tensor:
    """Returns the rows of an operand, uint8 [rows, bytes] or [batches, rows, bytes], as tensor maps describe them."""
    rows = as_bytes(label, data, fmt)
    num_rows, row_bytes = rows.shape[-2:]
    k = fmt.elements(row_bytes)
    if k == 0:
        raise UnsupportedProblem(
            f"{label} has shape {list(data.shape)}: K=0; K must be at least {fmt.k_multiple}"
        )
    if k % fmt.k_multiple:
        raise ValueError(
            f"{label}: K={k} is not a multiple of {fmt.k_multiple} ({fmt.title} block size); pad K to {fmt.padded_k(k)}"
        )
    if max(num_rows, k) > INT32_MAX:
        raise UnsupportedProblem(
            f"{label}: {letter}={num_rows}, K={k} exceeds the 32-bit limit {INT32_MAX}; split the problem"
        )
    check_sums(k, fmt)
    return k_major_rows(f"{label} (K={k})", label, rows)


def check_sums(k: int, fmt: BlockFormat) -> None:
    """Raises UnsupportedProblem if sums of ``k`` products of integers might not fit in int32."""
    if fmt.has_integer_sums and k > MAX_INTEGER_K:
        raise UnsupportedProblem(
            f"K={k} exceeds {MAX_INTEGER_K}: sums of more products of {fmt.title} values, up to 2^14 each, may exceed int32; "
            "split K, and add float32 results"
        )


def activation_rows(label: str, letter: str, x: torch.Tensor) -> torch.Tensor:
    """Returns rows [(batches,) rows, K] of float16 or bfloat16 values, which have no scales, as tensor maps describe them."""
    if x.dtype in NVFP4_FORMAT.data_dtypes:
        raise TypeError(
            f"{label} has dtype {x.dtype} and no scales: pass those of its NVFP4 values as a_scale, or "
            f"{dtype_names(ACTIVATION_DTYPES)} values"
        )
    if x.dtype not in ACTIVATION_DTYPES:
        raise TypeError(
            f"{label} has dtype {dtype_name(x.dtype)}; expected {dtype_names(ACTIVATION_DTYPES)}, or NVFP4 with a_scale"
        )
    num_rows, k = x.shape[-2:]
    if max(num_rows, k) > INT32_MAX:
        raise UnsupportedProblem(
            f"{label}: {letter}={num_rows}, K={k} exceeds the 32-bit limit {INT32_MAX}; split the problem"
        )
    return k_major_rows(f"{label} (K={k})", label, x)


def k_major_rows(title: str, label: str, rows: torch.Tensor) -> torch.Tensor:
    """Returns ``rows`` [(batches,) rows, length] with canonical strides in dimensions of extent 1, where torch allows any.

    Raises ValueError unless elements of a row are adjacent, and rows and batches are a multiple of 16 bytes apart.
    """
    *batches, num_rows, length = rows.shape
    size = rows.element_size()
    if rows.numel() and rows.stride(-1) != 1:
        raise ValueError(
            f"{label} has stride {rows.stride(-1)} in K (strides {rows.stride()}), not 1 (K-major); "
            "copy with .contiguous() after bringing K to the end"
        )
    check_aligned(label, rows)
    aligned = -(-length * size // TMA_ALIGN_BYTES) * TMA_ALIGN_BYTES // size
    pitch = rows.stride(-2) if num_rows > 1 else aligned
    if pitch < length and rows.numel():
        raise ValueError(
            f"{title} has a row pitch of {pitch * size} bytes for rows of {length * size}: rows overlap; "
            "copy with .contiguous()"
        )
    check_aligned(title, rows, pitches=[pitch * size])
    if not batches:
        return rows.as_strided(rows.shape, (pitch, 1))
    apart = rows.stride(0)
    if batches[0] <= 1 and apart * size % TMA_ALIGN_BYTES:
        apart = aligned
    if apart * size % TMA_ALIGN_BYTES and rows.numel():
        raise ValueError(
            f"{title} has batches {apart * size} bytes apart, not a multiple of {TMA_ALIGN_BYTES} (TMA and vector loads); "
            "copy with .contiguous()"
        )
    return rows.as_strided(rows.shape, (apart, pitch, 1))


def blocked_scales(
    label: str,
    letter: str,
    scale: torch.Tensor,
    rows: int,
    k: int,
    layout: ScaleLayout,
    batches: int | None = None,
    fmt: BlockFormat = NVFP4_FORMAT,
) -> torch.Tensor:
    """Returns scales in their format's layout, uint8 [bytes], or [L, bytes] for ``batches``; converting others allocates.

    Args:
        label: name of the operand in messages.
        letter: M or N.
        scale: the given scales.
        rows, k: extents of one batch.
        layout: layout of ``scale``, in formats with blocked scales; others have rows.
        batches: number of batches; None for a single operand.
        fmt: format of the operand.
    """
    if fmt.scale_layout == "rowmajor":
        return _row_scales(label, scale, fmt.scale_shape(rows, k), batches, fmt)
    if layout == "rowmajor":
        return _converted(label, letter, scale, rows, k, batches, fmt)
    try:
        if batches is None:
            blocked = as_blocked(scale, rows, k, fmt)
        else:
            blocked = as_blocked_batches(scale, rows, k, batches, fmt)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{label}: {error}") from error
    check_aligned(label, blocked)
    if batches is not None and batches > 1 and blocked.numel() and blocked.stride(0) % TMA_ALIGN_BYTES:
        raise ValueError(
            f"{label} has batches {blocked.stride(0)} bytes apart, not a multiple of {TMA_ALIGN_BYTES}; call .contiguous()"
        )
    return blocked


def check_padding_columns(label: str, scale: torch.Tensor, rows: int, k: int, fmt: BlockFormat) -> None:
    """Raises ValueError if blocked scales of rows have NaN in padding columns.

    Checks on the CPU only; data on a GPU is not read.

    Kernels multiply these scales by zeros, and NaN would make all of a row's results NaN. Padding rows may hold anything.

    Args:
        label: name of the operand in messages.
        scale: bytes of one operand, or [batches, bytes].
        rows: rows of one batch.
        k: K in elements.
        fmt: format of the operand.
    """
    columns = fmt.num_k_blocks(k) % fmt.scale_atom[1] if fmt.scale_layout == "blocked" else 0
    if (
        not columns
        or fmt.is_int4
        or scale.device.type != "cpu"
        or private_api.is_traced()
        or not scale.numel()
    ):
        return
    if planned.keys.get() is not None:  # nothing was written
        return
    row_atoms = fmt.scale_atoms(rows, k)[0]
    last = scale.reshape(-1, row_atoms, fmt.atom_row_bytes(k))[..., -math.prod(fmt.atom_shape) :]
    in_order = last.unflatten(-1, fmt.atom_shape).transpose(2, 3).flatten(1, 3)[:, :rows]
    padding = in_order[..., columns:]
    is_nan = padding == 0xFF if fmt.scale.name == UE8M0.name else (padding & 0x7F) == 0x7F
    if is_nan.any():
        raise ValueError(
            f"{label} has NaN in its padding columns: K={k} is not a multiple of {fmt.atom_k}, and kernels multiply what follows "
            "the last block by zeros; write zeros there, as quantize and to_blocked do"
        )


def _row_scales(
    label: str, scale: torch.Tensor, one: tuple[int, ...], batches: int | None, fmt: BlockFormat
) -> torch.Tensor:
    """Returns scales [*one], or [*one, L], in rows; copies other layouts, such as column by column."""
    _check_scale_dtype(label, scale, fmt)
    accepted = [[*one], [*one, 1]] if batches in (None, 1) else [[*one, batches]]
    if list(scale.shape) not in accepted:
        raise ValueError(
            f"{label} has shape {list(scale.shape)}; expected {accepted[0]}: a scale for {fmt.blocks} values"
        )
    rows = batches_first(scale).contiguous()
    # A dimension of extent 1 may have any stride in torch.
    flat = rows.as_strided((rows.numel(),), (1,)).view(torch.uint8)
    return flat if batches is None else flat.view(batches, -1)


def _check_scale_dtype(label: str, scale: torch.Tensor, fmt: BlockFormat) -> None:
    if scale.dtype not in fmt.scale_dtypes:
        kind = "scales" if fmt.scale.bits > 8 else f"{fmt.scale.name} codes"
        raise TypeError(f"{label} has dtype {scale.dtype}; expected {dtype_names(fmt.scale_dtypes)} ({kind})")


def _converted(
    label: str, letter: str, scale: torch.Tensor, rows: int, k: int, batches: int | None, fmt: BlockFormat
) -> torch.Tensor:
    _check_scale_dtype(label, scale, fmt)
    one = [rows, fmt.num_k_blocks(k)]
    accepted = [one, [*one, 1]] if batches in (None, 1) else [[*one, batches]]
    if list(scale.shape) not in accepted:
        raise ValueError(
            f"{label} has shape {list(scale.shape)}; expected {accepted[0]} (row-major scales, {letter}={rows}, K={k}); "
            "for scales in the 128x4 layout pass scale_layout='blocked'"
        )
    blocked = to_blocked(batches_first(scale)).view(torch.uint8)
    return blocked.view(-1) if batches is None else blocked.view(batches, -1)


def scales_of_groups(
    label: str,
    scale: torch.Tensor,
    rows: int,
    k: int,
    groups: int | None,
    fmt: BlockFormat = NVFP4_FORMAT,
    *,
    is_read: bool = True,
) -> torch.Tensor:
    """Returns blocked scales of any contiguous shape as uint8 [G, bytes], or as [bytes] if ``groups`` is None.

    None means groups that are padded one by one. Scales of groups whose rows are not a multiple of 128 must have a dimension of
    groups: [G, ...]. Formats with row-major scales have [G, row blocks, k blocks], or [row blocks, k blocks], of any strides;
    other strides than the canonical ones are copied.
    """
    row_blocks, k_blocks = fmt.scale_atoms(rows, k)
    row_bytes = fmt.atom_row_bytes(k)
    if fmt.scale_layout == "rowmajor":
        of_batches = scale if groups is None or scale.ndim != 3 else scale.permute(1, 2, 0)
        return _row_scales(label, of_batches, (row_blocks, k_blocks), groups, fmt)
    _check_scale_dtype(label, scale, fmt)
    if not scale.is_contiguous():
        raise ValueError(
            f"{label} has strides {scale.stride()}; blocked scales are contiguous: call .contiguous()"
        )
    flat = scale.view(torch.uint8).view(-1)
    size = flat.numel()
    if groups is None and (size % row_bytes or size < row_blocks * row_bytes):
        raise ValueError(
            f"{label} has {size} bytes; expected a multiple of {row_bytes} (128 rows of K={k}), and every group's "
            f"rows padded to 128: at least {row_blocks * row_bytes}"
        )
    if groups is not None and size != groups * row_blocks * row_bytes:
        raise ValueError(
            f"{label} has {size} bytes; expected {groups * row_blocks * row_bytes}: {groups} groups of "
            f"{row_blocks} x {k_blocks} blocks of {row_bytes // k_blocks} bytes (128 rows x 4 scales)"
        )
    if groups is not None and groups > 1 and rows % ATOM_ROWS and scale.ndim in (1, 5):
        raise ValueError(
            f"{label} has shape {list(scale.shape)}; expected [{groups}, {row_blocks}, {k_blocks}, 32, 4, 4]: every group has "
            f"{rows} rows, padded to {ATOM_ROWS} by itself. Scales of one matrix of {groups * rows} rows lie elsewhere: quantize "
            f"[{groups}, {rows}, {k}]"
        )
    check_aligned(label, flat)
    if groups is not None and is_read:
        check_padding_columns(label, flat, rows, k, fmt)
    return flat if groups is None else flat.view(groups, -1)


def halves(operand: Operand) -> tuple[Operand, Operand]:
    """Splits concatenated weights in two: rows of whole scale blocks each (``problem.concatenated_rows``)."""
    n, half = (extent // 2 for extent in (operand.rows, operand.scale.shape[-1]))

    def part(i: int) -> Operand:
        data, scale = operand.data.narrow(-2, i * n, n), operand.scale.narrow(-1, i * half, half)
        return Operand(data, scale, operand.format, n, operand.k, operand.batches)

    return part(0), part(1)


# ---- factors ---------------------------------------------------------------------------------------------------


def factors(
    name: str,
    alpha: Any,
    count: int,
    device: torch.device,
    *,
    of: str = "group",
    allows_one: bool = False,
    allows_list: bool = True,
) -> torch.Tensor | None:
    """Returns factors as float32 [count] on the device, or [1] if one may serve all; None without factors.

    Args:
        name: name of the argument.
        alpha: None, a float32 tensor on the checked device, or numbers.
        count: number of factors.
        device: device of the operands.
        of: unit that each factor belongs to, for messages.
        allows_one: whether one number, or a tensor with one element, may serve all.
        allows_list: whether numbers are allowed.
    """
    if alpha is None:
        return None
    if isinstance(alpha, torch.Tensor):
        return _checked_factors(name, alpha, count, of, allows_one)
    if allows_one and isinstance(alpha, Real):
        return numbers_on(device, [float(alpha)])
    if allows_list and isinstance(alpha, list | tuple) and all(isinstance(x, Real) for x in alpha):
        if len(alpha) != count:
            raise ValueError(f"{name} has {len(alpha)} entries for {count} {of}s; pass one number a {of}")
        return numbers_on(device, alpha)
    kinds = (["a number"] if allows_one else []) + ["a float32 tensor"]
    kinds += [f"a list of numbers, one per {of}"] if allows_list else []
    is_tensors = isinstance(alpha, list | tuple) and any(isinstance(x, torch.Tensor) for x in alpha)
    fix = f": torch.stack({name}).float() of tensors" if is_tensors else ""
    raise TypeError(f"{name}={alpha!r} is neither {' nor '.join(kinds)}{fix}")


def _checked_factors(name: str, alpha: torch.Tensor, count: int, of: str, allows_one: bool) -> torch.Tensor:
    if alpha.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {dtype_name(alpha.dtype)}; expected float32: {name}.float()")
    if allows_one and alpha.numel() == 1:
        return alpha.reshape(1)
    if tuple(alpha.shape) != (count,) or not alpha.is_contiguous():
        one = "one number, or " if allows_one else ""
        raise ValueError(
            f"{name} has shape {list(alpha.shape)}, strides {tuple(alpha.stride())}; expected {one}contiguous "
            f"[{count}], one per {of}: {name}.reshape({count}).contiguous()"
        )
    return alpha


def global_scales(
    name: str, scales: Any, count: int, device: torch.device, **options: Any
) -> torch.Tensor | None:
    """Returns :func:`factors` that divide results: positive, normal float32 numbers. Values on a GPU are not checked."""
    found = factors(name, scales, count, device, **options)
    index = None if found is None else first_wrong(found)
    if found is not None and index is not None:
        raise ValueError(
            f"{name}[{index}]={found[index].item():g} is not a positive, normal float32 number; pass amax / 2688 of what is "
            "quantized"
        )
    return found


def check_bias(bias: torch.Tensor | None, n: int, num_groups: int | None = None) -> None:
    """Raises TypeError or ValueError unless the bias is None or contiguous, aligned float16, bfloat16 or float32 [n].

    num_groups: groups with a bias each, [num_groups, n]; None for one bias.
    """
    if bias is None:
        return
    if bias.dtype not in BIAS_DTYPES:
        raise TypeError(
            f"bias has dtype {dtype_name(bias.dtype)}; expected {dtype_names(BIAS_DTYPES)}: bias.float()"
        )
    shape, letters = ([n], "[N]") if num_groups is None else ([num_groups, n], "[G, rows]")
    if list(bias.shape) != shape:
        raise ValueError(
            f"bias has shape {list(bias.shape)}; expected {letters} = {shape}, a number for each row of b"
        )
    if not bias.is_contiguous():
        raise ValueError(
            f"bias has stride {', '.join(map(str, bias.stride()))}; it has to be contiguous: bias.contiguous()"
        )
    check_aligned("bias", bias, bias.element_size())


def addable_bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a bias that passes ``check_bias``: copied if its strides differ, and converted from float64 to float32."""
    if bias is None:
        return None
    return (bias if bias.dtype in BIAS_DTYPES else bias.float()).contiguous()


def one_each(alpha: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """Expands checked factors to float32 [count], by a copy if one served all."""
    return alpha if alpha is None or len(alpha) == count else alpha.expand(count).contiguous()


# ---- results ---------------------------------------------------------------------------------------------------


def out_dtypes(formats: Formats) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of unquantized results for operands in these formats; integers also allow their sums."""
    return (*OUT_DTYPES, torch.int32) if formats == INT8_PAIR else OUT_DTYPES


def check_out_dtype(out_dtype: OutDtype, out_global_scale: Any, formats: Formats) -> None:
    """Raises TypeError for a dtype that no kernel writes, ValueError for an unknown name or an unused global scale."""
    check_result_format(out_dtype)
    check_choice("out_dtype", out_dtype, (*out_dtypes(formats), *RESULT_FORMATS))
    check_out_global_scale(out_dtype, out_global_scale)


def check_out_global_scale(out_dtype: OutDtype, out_global_scale: Any) -> None:
    """Raises ValueError for a global scale of results that have none, UnsupportedProblem for one per row."""
    if out_global_scale is None:
        return
    if is_per_row(out_global_scale):
        raise UnsupportedProblem(
            f"out_global_scale={PER_ROW!r}: a row's results are written before its largest one is known; take "
            f"out_dtype=torch.bfloat16, then quantize(y, global_scale={PER_ROW!r})"
        )
    asked = RESULT_FORMATS.get(out_dtype)
    if not (asked and asked.has_global_scale):
        raise ValueError(
            f"out_global_scale is given and out_dtype={out_dtype}; it goes with out_dtype={NVFP4!r}"
        )


def check_no_factor(out_dtype: OutDtype, alpha: Any, bias: Any = None) -> None:
    """Raises ValueError for a factor or a bias if results are sums of integers."""
    for name, value, done in (("alpha", alpha, "multiplied with"), ("bias", bias, "added to")):
        if out_dtype == torch.int32 and value is not None:
            raise ValueError(
                f"{name} is given and out_dtype=torch.int32, sums of integers that nothing is {done}; leave {name} out, or "
                "take out_dtype=torch.float32"
            )


def check_result_format(out_dtype: Any, dtypes: Iterable[Any] = RESULT_FORMATS) -> None:
    """Raises UnsupportedProblem for the name of a format to which no kernel quantizes results, TypeError for a record.

    Args:
        out_dtype: the requested dtype or format.
        dtypes: the supported ones.
    """
    if isinstance(out_dtype, BlockFormat):
        raise TypeError(f"out_dtype={out_dtype!r} is a record; pass its name, out_dtype={out_dtype.name!r}")
    asked = FORMATS.get(out_dtype) if isinstance(out_dtype, str) else None
    if asked is not None and out_dtype not in dtypes:
        raise UnsupportedProblem(
            f"out_dtype={out_dtype!r}: no kernel quantizes these products to {asked.title}; take out_dtype=torch.bfloat16, "
            f"and call quantize(result, format={asked.record})"
        )


def may_be_of_rows(result: BlockFormat | None) -> bool:
    """Returns whether operands with row-major scales can have results in this format, or unquantized ones for None."""
    return result is None or result.scale_layout == "rowmajor"


def check_result_of_pair(out_dtype: Any, formats: Formats | None) -> None:
    """Raises UnsupportedProblem for quantized results that no kernel makes from such operands.

    These are results of 16-bit rows, for which ``formats`` is None, and results and operands of which only one has float32
    scales.
    """
    if formats is None:
        if out_dtype in RESULT_FORMATS:
            raise UnsupportedProblem(f'out_dtype="{out_dtype}" with 16-bit a: call quantize on the result')
        return
    asked = RESULT_FORMATS.get(out_dtype)
    if asked is None or not all(isinstance(format, BlockFormat) for format in formats):
        return  # ``check_formats`` refuses values that are not formats
    is_fp8 = formats == (FP8_1x128, FP8_128x128)
    of = " x ".join(format.title for format in formats)
    if out_dtype == FP8_1x128.name and not is_fp8:
        raise UnsupportedProblem(
            f"out_dtype={out_dtype!r}: only products of FP8_1X128 and FP8_128X128 are quantized to it, not of {of}; take "
            f"out_dtype=torch.bfloat16, and call quantize(result, format=FP8_1x128)"
        )
    has_rows = any(format.scale_layout == "rowmajor" for format in formats)
    if has_rows and not may_be_of_rows(asked):
        other = f' or "{FP8_1x128.name}"' if is_fp8 else ""
        raise UnsupportedProblem(
            f"out_dtype={out_dtype!r}: products of {of} have float32 scales, and are not quantized to it; take "
            f"out_dtype=torch.bfloat16{other}, and call quantize(result, format={asked.record})"
        )


def check_result(
    out_dtype: Any, out_global_scale: Any, formats: Formats, has_scales: bool = True, *, is_dual: bool = False
) -> None:
    """Checks that products of such operands can have results of a dtype.

    Args:
        out_dtype, out_global_scale: see ``gemm``.
        formats: formats of ``a`` and ``b``.
        has_scales: whether ``a`` has scales; False for 16-bit values.
        is_dual: whether results are activations, which cannot be sums of integers.

    Raises as ``check_out_dtype`` and ``check_result_of_pair`` do.
    """
    check_out_dtype(out_dtype, out_global_scale, NVFP4_PAIR if is_dual else formats)
    check_result_of_pair(out_dtype, formats if has_scales else None)


def check_written_scales(label: str, scale: torch.Tensor, format: BlockFormat) -> None:
    """Raises ValueError if a caller's row-major scales, which a launch will write, have gaps."""
    if format.scale_layout == "rowmajor" and not scale.is_contiguous():
        raise ValueError(
            f"{label} has strides {scale.stride()}; the kernel writes rows without gaps: allocate it as "
            f"torch.empty({list(scale.shape)})"
        )


def check_quantized_columns(label: str, n: int, format: BlockFormat) -> None:
    """Raises ValueError unless rows of ``n`` results are whole blocks."""
    block = format.k_multiple
    if n == 0 or n % block:
        raise ValueError(
            f'{label}={n} is not a positive multiple of {block} ({format.title} block size), and out_dtype="{format.name}" '
            f"stores rows of blocks; pad b to {format.padded_k(n)} rows"
        )


def check_out(
    label: str, out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, letters: str = ""
) -> None:
    """Checks dtype, shape and alignment of a caller's output. ``letters`` describes accepted shapes in messages."""
    if out.dtype != dtype:
        raise TypeError(
            f"{label} has dtype {dtype_name(out.dtype)} and out_dtype is {dtype_name(dtype)}; "
            f"pass out_dtype={out.dtype} or an out of dtype {dtype_name(dtype)}"
        )
    if tuple(out.shape) != shape:
        raise ValueError(f"{label} has shape {list(out.shape)}; expected {letters or list(shape)}")
    check_aligned(label, out, dtype.itemsize)


def check_apart(label: str, out: torch.Tensor) -> None:
    """Raises ValueError if elements of an output, which may have any strides, might share memory."""
    reach = 0
    for stride, extent in sorted((s, n) for s, n in zip(out.stride(), out.shape, strict=True) if n > 1):
        if stride <= reach and out.numel():
            raise ValueError(
                f"{label} has strides {out.stride()}: elements share memory; allocate it as "
                f"torch.empty({list(out.shape)})"
            )
        reach += stride * (extent - 1)


def is_m_major(outs: Iterable[torch.Tensor]) -> bool:
    """Returns whether columns of [(batches,) M, N] are contiguous. One matrix with several rows and columns decides for all."""
    return any(min(t.shape[-2:]) > 1 and t.stride(-2) == 1 and t.stride(-1) != 1 for t in outs if t.ndim > 1)


def out_lines(label: str, out: torch.Tensor, m_major: bool) -> torch.Tensor:
    """Returns a checked output [(batches,) M, N] with canonical strides: unit in N or, if ``m_major``, in M.

    Raises ValueError if elements of a line have gaps, or lines or batches share memory.
    """
    *_, m, n = out.shape
    if m_major:
        return _lines(label, out.mT, "M", "column", f"torch.empty({n}, {m}).T").mT
    return _lines(label, out, "N", "row", f"torch.empty({m}, {n})")


def _lines(label: str, out: torch.Tensor, letter: str, line: str, fix: str) -> torch.Tensor:
    """Returns ``out`` [.., lines, length] with unit stride along its lines, which must not overlap."""
    *batches, lines, length = out.shape
    pitch = max(length, 1)
    if out.numel() and length > 1 and out.stride(-1) != 1:
        raise ValueError(
            f"{label} has stride {out.stride(-1)} in {letter}, not 1 ({line}-major); allocate it as {fix}"
        )
    if out.numel() and lines > 1:
        pitch = out.stride(-2)
        if not length <= pitch <= INT32_MAX:
            raise ValueError(
                f"{label} has a {line} pitch of {pitch} elements, expected {length} ({letter}) to {INT32_MAX}; "
                f"allocate it as {fix}"
            )
    check_apart(label, out)
    return out.as_strided(out.shape, (*out.stride()[: len(batches)], pitch, 1))


def quantized_rows(
    label: str, data: torch.Tensor, shape: tuple[int, ...], format: BlockFormat
) -> torch.Tensor:
    """Returns the uint8 [.., M, N/2] view of a caller's quantized output, aligned like an operand of the next layer."""
    if tuple(data.shape) != shape:
        raise ValueError(
            f"{label} has shape {list(data.shape)}; expected [M, {format.length.replace('K', 'N')}] = {list(shape)}"
        )
    check_apart(label, data)
    return packed_rows(label, "M", data, format)
