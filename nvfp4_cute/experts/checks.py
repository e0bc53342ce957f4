"""Rules that the operands of a layer of experts share."""

from typing import Any, Literal, get_args

import torch

from nvfp4_cute.formats.block_format import BlockFormat, as_format, format_named
from nvfp4_cute.formats.global_scale import PER_ROW
from nvfp4_cute.operands import rules as checks
from nvfp4_cute.problem import ResultName

ID_DTYPES = (torch.int32, torch.int64)
ROW_FORMATS = get_args(ResultName)
ROW_DTYPES = (torch.float16, torch.bfloat16)
# Activations with a global scale per row: names of formats with a suffix.
PER_ROW_SUFFIX = f"_{PER_ROW}"
PerRowActivations = Literal["nvfp4_per_row", "nvfp4_four_over_six_per_row"]
PER_ROW_ACTIVATIONS = get_args(PerRowActivations)


def check_vector(name: str, tensor: torch.Tensor | None, length: int) -> None:
    """Raises ValueError unless ``tensor`` is None or contiguous float32 [length]."""
    if tensor is None:
        return
    if tensor.dtype != torch.float32 or tuple(tensor.shape) != (length,) or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; expected contiguous torch.float32 [{length}], one per expert"
        )


def check_ids(ids: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless ``ids`` are contiguous integers [T, k], k at most ``MAX_TOP_K``."""
    from nvfp4_cute.planning.arch.simt import MAX_TOP_K

    checks.check_choice("dtype of ids", ids.dtype, ID_DTYPES)
    if ids.ndim != 2 or not ids.is_contiguous() or not 1 <= ids.shape[1] <= MAX_TOP_K:
        raise ValueError(
            f"ids has shape {list(ids.shape)}, strides {list(ids.stride())}; expected contiguous [T, k] with k from 1 to "
            f"{MAX_TOP_K}"
        )


def kernel_ids(ids: torch.Tensor, name: str = "topk_ids") -> torch.Tensor:
    """Converts ids to contiguous int32 or int64, because narrower types cannot hold the number of experts, which means "none".

    Raises TypeError for other types than integers. ``name`` is the argument's name, for messages.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} is {ids.dtype}; expected whole numbers: pass {name}.long()")
    return (ids if ids.dtype in ID_DTYPES else ids.long()).contiguous()


def check_expert_weights(name: str, weights: Any) -> None:
    """Raises TypeError or ValueError unless the weights are [E, N, K] in a BlockScaledTensor or ExpertWeights."""
    if not all(isinstance(getattr(weights, part, None), torch.Tensor) for part in ("data", "scale")):
        raise TypeError(f"{name} is a {type(weights).__name__}; pass a BlockScaledTensor or ExpertWeights")
    if weights.data.ndim != 3:
        raise ValueError(f"{name} has data {list(weights.data.shape)}; expected [E, N, K/2]")


def check_first_expert(first_expert: int) -> None:
    """Raises TypeError or ValueError unless the number can be the id of an expert."""
    if not isinstance(first_expert, int) or isinstance(first_expert, bool):
        raise TypeError(f"first_expert={first_expert!r} is not an int; pass the id of the first local expert")
    if not 0 <= first_expert < 2**31:
        raise ValueError(f"first_expert={first_expert} is not from 0 to 2^31 - 1, as ids are")


def check_tokens(x: torch.Tensor, ids: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless ``x`` holds rows of tokens and ``ids`` their experts."""
    check_rows("x", x)
    check_ids(ids)
    if len(ids) != len(x):
        raise ValueError(f"ids has {len(ids)} rows and x {len(x)}; each has one row per token")


def check_row_format(format: BlockFormat, **global_scales: Any) -> None:
    """Raises TypeError or ValueError for a format that rows of experts cannot have, or for a global scale that it lacks."""
    format = as_format("format", format)
    if format.name not in ROW_FORMATS and not format.is_1xk:
        raise ValueError(
            f"format={format.name} is not a format of rows of experts; use one of {', '.join(ROW_FORMATS)}, fp8_1xk, int8"
        )
    _check_global_scales(format, global_scales)


def check_row_scales(activations: str, **global_scales: Any) -> None:
    """Raises ValueError for global scales of rows that have none: 16-bit rows, and formats other than NVFP4.

    Args:
        activations: see ``moe``.
        global_scales: by the caller's argument names; None where not given.
    """
    for name, scale in global_scales.items():
        if scale is not None and has_row_scales(activations):
            raise ValueError(
                f"{name} with activations={activations!r}, whose rows find their own scales; leave it out"
            )
    row_format = format_of_rows(activations)
    if row_format is not None:
        return _check_global_scales(row_format, global_scales)
    for name, scale in global_scales.items():
        if scale is not None:
            raise ValueError(
                f"{name} with activations={activations!r}, whose rows have no global scale; leave it out"
            )


def _check_global_scales(format: BlockFormat, global_scales: dict[str, Any]) -> None:
    for name, scale in global_scales.items():
        if scale is not None and not format.has_global_scale:
            raise ValueError(f"{name} with rows of {format.title}, which have no global scale; leave it out")


def has_row_scales(activations: str) -> bool:
    """Returns whether ``activations``, see ``moe``, have a global scale per row."""
    return activations in PER_ROW_ACTIVATIONS


def per_row_name(activations: str) -> Any:
    """Returns the name of ``activations`` with a global scale per row. Raises ValueError if their format has none."""
    name = f"{activations}{PER_ROW_SUFFIX}"
    if name not in PER_ROW_ACTIVATIONS:
        raise ValueError(
            f"input_scale={PER_ROW!r} with activations={activations!r}, which have no global scale; leave it out, or pass "
            'activations="nvfp4"'
        )
    return name


def kind_of_rows(activations: str, input_scale: Any) -> tuple[Any, Any]:
    """Returns ``activations`` and ``input_scale`` as a layer uses them, where "per_row" is part of the name."""
    if isinstance(input_scale, str):
        checks.check_choice("input_scale", input_scale, (PER_ROW,))
        return per_row_name(activations), None
    return activations, input_scale


def format_of_rows(activations: str) -> BlockFormat | None:
    """Returns the format of quantized rows, see ``moe``; None for rows in 16 bits."""
    return None if activations == "16bit" else format_named(activations.removesuffix(PER_ROW_SUFFIX))


def check_row_pitch(letter: str, k: int) -> None:
    """Raises ValueError unless NVFP4 rows of ``k`` values start at multiples of 16 bytes. Messages call K ``letter``."""
    if k % 32:
        raise ValueError(
            f"{letter}={k} is not a multiple of 32 (rows of results start 16 bytes apart); pad {letter}"
        )


def check_rows(name: str, x: torch.Tensor, columns: int | None = None) -> None:
    """Raises TypeError or ValueError unless ``x`` is 16-bit [rows, columns] that 16-byte vectors can read."""
    checks.check_choice(f"dtype of {name}", x.dtype, ROW_DTYPES)
    if x.ndim != 2 or (columns is not None and x.shape[1] != columns) or x.stride(1) != 1:
        wanted = "columns" if columns is None else columns
        raise ValueError(
            f"{name} has shape {list(x.shape)}, strides {list(x.stride())}; expected [rows, {wanted}] with contiguous rows"
        )
    checks.check_aligned(name, x, pitches=[x.stride(0) * x.element_size()] if len(x) > 1 else [])
