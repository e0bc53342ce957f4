"""Group sizes on the device, ``offs`` and ``masked_m``: their rules, and when their values are checked.

Values of CPU tensors are always checked. Reading values on a GPU would wait for it, so they are checked only inside
:class:`debug`.
"""

from typing import Any

import torch

_is_debugging = False
ENDS = "_nvfp4_cute_ends"
"""Attribute of scales that :func:`remember_ends` sets. Views and copies of them do not have it."""


class debug:  # noqa: N801, reads as torch.set_grad_enabled does
    """Check the values of ``offs`` and ``masked_m`` also on a GPU, before each launch that reads them. Off by default.

        >>> with nvfp4_cute.debug():
        ...     y = grouped_gemm(a, w, offs=offs)
        >>> nvfp4_cute.debug(True)  # until the end of the process

    Without this check, values on a GPU that break their rule are undefined behavior: results are silently wrong. The rules:
    ``offs`` is ascending and at most the number of rows, ``masked_m`` is at most M_max, and neither is negative. The check
    waits for the GPU and cannot be captured in a CUDA graph. Values on the CPU are always checked.

    Args:
        enabled: whether to check.

    Raises:
        While enabled, operations raise ValueError for wrong sizes, and RuntimeError during the capture of a CUDA graph.
    """

    def __init__(self, enabled: bool = True):
        global _is_debugging
        self._before = _is_debugging
        _is_debugging = bool(enabled)

    def __enter__(self) -> "debug":
        return self

    def __exit__(self, *_: object) -> None:
        global _is_debugging
        _is_debugging = self._before


def is_debugging() -> bool:
    """Returns whether sizes on a GPU are checked."""
    return _is_debugging


def check_group_sizes(name: str, sizes: torch.Tensor) -> None:
    """Raises TypeError unless ``sizes`` is contiguous int32 [G], ValueError if it is empty. ``name`` is for messages."""
    if sizes.dtype != torch.int32 or sizes.ndim != 1 or not sizes.is_contiguous():
        fix = f"{name}.int().contiguous()"
        if sizes.dtype == torch.int64 and name == "offs":
            fix += ", or rows_per_group.cumsum(0, dtype=torch.int32)"
        raise TypeError(
            f"{name} is {sizes.dtype} of shape {list(sizes.shape)}; expected contiguous int32 [G]: {fix}"
        )
    if len(sizes) == 0:
        raise ValueError(f"{name} is empty; pass at least one group (a group may have no rows)")


def check_offs(offs: torch.Tensor, rows: int) -> None:
    """Raises ValueError if ends of groups descend, are negative, or exceed ``rows``; see :class:`debug`."""
    ends = _values("offs", offs)
    if ends is None:
        return
    fix = "pass the row where each group ends, ascending"
    if len(ends) > 1 and min(ends) >= 0 and sum(ends) == rows:
        fix = "these are sizes of groups: pass sizes.cumsum(0, dtype=torch.int32), where each group ends"
    start = 0
    for g, end in enumerate(ends):
        if end < 0:
            raise ValueError(f"offs[{g}]={end} is negative; {fix}")
        if end < start:
            raise ValueError(f"offs[{g}]={end} is less than offs[{g - 1}]={start}; {fix}")
        if end > rows:
            raise ValueError(f"offs[{g}]={end} exceeds the {rows} rows; {fix}")
        start = end


def remember_ends(scale: torch.Tensor, offs: torch.Tensor) -> None:
    """Notes on the scales of grouped rows where the groups end, for :func:`ends_of`; ends on a GPU are not read."""
    if offs.device.type == "cpu":
        setattr(scale, ENDS, tuple(offs.tolist()))


def ends_of(scale: torch.Tensor) -> tuple[int, ...] | None:
    """Returns where groups ended when these scales were computed, or None if that is not known."""
    return getattr(scale, ENDS, None)


def check_masked_m(masked_m: torch.Tensor, most: int) -> None:
    """Raises ValueError if the rows of a group are negative or exceed ``most``; see :class:`debug`."""
    for g, rows in enumerate(_values("masked_m", masked_m) or ()):
        if not 0 <= rows <= most:
            raise ValueError(
                f"masked_m[{g}]={rows} is not between 0 and M_max={most}; pass how many rows of each group count"
            )


def _values(name: str, sizes: torch.Tensor) -> list[int] | None:
    """Returns the values to check, or None if they must not be read."""
    if sizes.is_cuda:
        if not _is_debugging:
            return None
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"nvfp4_cute.debug() reads {name}, which a CUDA graph cannot capture; capture outside of it"
            )
    elif sizes.device.type != "cpu":
        return None
    values: Any = sizes.tolist()
    return values
