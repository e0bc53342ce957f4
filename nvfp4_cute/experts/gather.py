"""``gather_quantize`` and ``gather``: copy tokens to the rows of their experts, quantized or not."""

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch

from nvfp4_cute.backends.calls import run
from nvfp4_cute.experts.checks import check_row_format, check_row_pitch, check_tokens
from nvfp4_cute.experts.keys import Gather1xKKey, GatherQuantizeKey
from nvfp4_cute.experts.new_rows import new_rows
from nvfp4_cute.experts.permutation import (
    Permutation,
    PermuteTask,
    check_experts,
    new_order,
    permute,
)
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_format import NVFP4, BlockFormat
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.table_task import TableTask
from nvfp4_cute.launch_table import GatherQuantize
from nvfp4_cute.operands import rules as checks
from nvfp4_cute.operands.results import as_results
from nvfp4_cute.ops.quantize import quantize
from nvfp4_cute.planning.arch.simt import FEW_SLOTS, WARP_SIZE

MAX_WORK = 2**31 - 1


def gather_quantize(
    x: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    *,
    format: BlockFormat = NVFP4,
    global_scale: torch.Tensor | None = None,
    first_expert: int = 0,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, Permutation]:
    """Quantizes every token into the rows of the experts that it chose, as operands of a ragged ``grouped_gemm``.

    Takes two launches: ``permute``, and one that reads each token once. For at most 64 choices (T * k), takes one launch. The
    cost depends on tokens and rows, not on the number of experts.

    Args:
        x: float16 or bfloat16 [T, K], rows a multiple of 16 bytes apart, K a multiple of 32.
        ids, num_experts, first_expert: see ``permute``.
        format: NVFP4, MXFP4, MXFP8, FP8_1xK or INT8. Only NVFP4 has a global scale.
        global_scale: float32 with one element, or [num_experts]; None for 1.
        backend: see ``permute``.

    Returns:
        data: [T * k, bytes of K]; for NVFP4 uint8 [T * k, K/2]. Rows after the last one are not written.
        scale: FP8_1xK, INT8: float32 [T * k, 1]. Otherwise blocked; for NVFP4 float8_e4m3fn [T * k // 128 + num_experts, K/64
            rounded up, 32, 4, 4]: every expert's rows begin a new row of atoms. Padding rows are not written; nothing reads them.
        order: order of the rows.

    Example:
        >>> x, ids = torch.randn(3, 64).bfloat16(), torch.tensor([[1, 0], [1, -1], [0, 1]])
        >>> data, scale, order = gather_quantize(x, ids, 2)
        >>> tuple(data.shape), tuple(scale.shape), order.offs.tolist()
        ((6, 32), (2, 1, 32, 4, 4), [2, 5])

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule.
        UnsupportedTarget: the GPU has no kernel.
    """
    _check(x, ids, num_experts, global_scale)
    check_row_format(format, global_scale=global_scale)
    if global_scale is not None:
        counts = (1, num_experts)
        if global_scale.dtype != torch.float32 or global_scale.numel() not in counts:
            raise ValueError(
                f"global_scale is {global_scale.dtype} {list(global_scale.shape)}; expected torch.float32, one element or "
                f"[{num_experts}], one per expert"
            )
        global_scale = global_scale.contiguous().view(-1)
    k = x.shape[1]
    data, scale = new_rows(ids.numel(), k, num_experts, format, x.device)
    order = _gather(x, ids, num_experts, global_scale, data, scale, first_expert, backend, format)
    return (*as_results([data, scale], False, format, None), order)


def gather_quantize_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    *,
    format: BlockFormat = NVFP4,
    first_expert: int = 0,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Permutation]:
    """Quantizes like ``gather_quantize``, with a global scale per row that the same launch computes.

    Args:
        x, ids, num_experts, first_expert, backend: see ``gather_quantize``.
        format: NVFP4 or FOUR_OVER_SIX.

    Returns:
        data and scale, see ``gather_quantize``; float32 [T * k], the global scales of rows; order of the rows.

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule.
        UnsupportedTarget: the GPU has no kernel.
    """
    _check(x, ids, num_experts)
    data, scale = new_rows(ids.numel(), x.shape[1], num_experts, format, x.device)
    found = torch.empty(ids.numel(), dtype=torch.float32, device=x.device)
    order = _gather(x, ids, num_experts, found, data, scale, first_expert, backend, format, finds_scales=True)
    return (*as_results([data, scale], False, format, None), found, order)


def gather(
    x: torch.Tensor, ids: torch.Tensor, num_experts: int, *, first_expert: int = 0, backend: str = "auto"
) -> tuple[torch.Tensor, Permutation]:
    """Copies every token into the rows of the experts that it chose: ``gather_quantize`` without quantization.

    Args:
        x, ids, num_experts, first_expert, backend: see ``gather_quantize``.

    Returns:
        data: [T * k, K] in the dtype of x. Rows after the last one are not written.
        order: order of the rows.

    Example:
        >>> rows, order = gather(torch.randn(3, 64).bfloat16(), torch.tensor([[1, 0], [1, -1], [0, 1]]), 2)
        >>> tuple(rows.shape), order.offs.tolist()
        ((6, 64), [2, 5])

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule.
        UnsupportedTarget: the GPU has no kernel.
    """
    _check(x, ids, num_experts)
    data = torch.empty((ids.numel(), x.shape[1]), dtype=x.dtype, device=x.device)
    return data, _gather(x, ids, num_experts, None, data, None, first_expert, backend)


def gather_as(
    format: BlockFormat | None,
    x: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    global_scale: torch.Tensor | None,
    *,
    first_expert: int = 0,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None, Permutation]:
    """Calls ``gather_quantize`` if there is a format; otherwise calls ``gather`` and returns None as the scale.

    Rows in FP8_1x128 take a launch of their own after ``gather``.
    """
    where: Any = {"first_expert": first_expert, "backend": backend}
    if format is None or (format.scale_layout == "rowmajor" and not format.is_1xk):
        data, order = gather(x, ids, num_experts, **where)
        return (*quantize_rows(data, format, backend), order)
    return gather_quantize(x, ids, num_experts, format=format, global_scale=global_scale, **where)


def quantize_rows(
    rows: torch.Tensor, format: BlockFormat | None, backend: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns data and scales of ``rows``; without a format, the rows themselves and None."""
    if format is None:
        return rows, None
    made = quantize(rows, format=format, backend=backend)
    return made.data, made.scale


def _check(
    x: torch.Tensor, ids: torch.Tensor, num_experts: int, global_scale: torch.Tensor | None = None
) -> None:
    """Raises where an operand breaks a rule of both operations."""
    checks.check_tensors({"x": x, "ids": ids}, {"global_scale": global_scale})
    check_tokens(x, ids)
    check_experts(num_experts)
    k_blocks = NVFP4.num_k_blocks(x.shape[1])
    check_row_pitch("K", x.shape[1])
    checks.check_extent("T * K / 512", len(x) * -(-k_blocks // WARP_SIZE), MAX_WORK // WARP_SIZE)


def _gather(
    x, ids, num_experts, global_scale, data, scale, first_expert, backend, format=None, finds_scales=False
) -> Permutation:
    """Finds the order of rows, and writes them, quantized if there is a ``format``."""
    finds_order = ids.numel() <= FEW_SLOTS
    if finds_order:
        order = new_order(ids, num_experts)
    else:
        order = permute(ids, num_experts, first_expert=first_expert, backend=backend)
        order = replace(order, is_older=True)
    task = GatherQuantizeTask(
        x=x,
        ids=ids,
        rows=order.rows,
        places=order.places,
        global_scale=global_scale,
        data=data,
        scale=scale,
        offs=order.offs,
        slots=order.slots,
        first_expert=first_expert,
        finds_order=finds_order,
        format=format,
        finds_scales=finds_scales,
    )
    if finds_order and not ids.numel():
        order.offs.zero_()
    run(backend, task)
    return order


@dataclass(frozen=True)
class GatherQuantizeTask(TableTask):
    """One launch of ``gather_quantize``.

    ``finds_order``: whether the kernel writes the fields of ``Permutation`` or reads them.

    Without ``scale``, rows of ``data`` are copies of rows of ``x``. With ``finds_scales``, ``global_scale`` is written, one
    number per row.
    """

    columns = GatherQuantize
    x: torch.Tensor
    ids: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    global_scale: torch.Tensor | None
    data: torch.Tensor
    scale: torch.Tensor | None
    offs: torch.Tensor
    slots: torch.Tensor
    first_expert: int
    finds_order: bool
    format: BlockFormat | None
    finds_scales: bool = False

    @property
    def written(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the fields that the gather kernel writes."""
        scale = ("global_scale",) * self.finds_scales
        scale += () if self.scale is None else ("scale",)
        return ("data", *scale, *(("rows", "places", "offs", "slots") if self.finds_order else ()))

    @property
    def is_empty(self) -> bool:
        """Returns whether there are no tokens to gather."""
        return self.ids.numel() == 0

    def key(self, gpu: Gpu) -> GatherQuantizeKey | Gather1xKKey:
        """Returns the key of the gather kernel."""
        if self.format is not None and self.format.scale_layout == "rowmajor":
            return Gather1xKKey(gpu.arch, self.x.dtype, self.format, self.finds_order)
        return GatherQuantizeKey(gpu.arch, self.x.dtype, self.format, self._global_scales, self.finds_order)

    @property
    def _global_scales(self) -> str:
        if self.global_scale is None:
            return "none"
        if self.finds_scales:
            return "rows"
        return "one" if self.global_scale.numel() == 1 else "each"

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Returns the extents for the launch table of a gather."""
        tokens, top_k = self.ids.shape
        return {
            GatherQuantize.X_PITCH: self.x.stride(0) * self.x.element_size(),
            GatherQuantize.ID_BYTES: self.ids.element_size(),
            GatherQuantize.TOKENS: tokens,
            GatherQuantize.TOP_K: top_k,
            GatherQuantize.K: self.x.shape[1],
            GatherQuantize.FIRST_EXPERT: self.first_expert,
            GatherQuantize.EXPERTS: len(self.offs),
        }

    def reference(self) -> None:
        """Copies every expert's rows, or quantizes them with ``formats.quantize``."""
        if self.finds_order:
            fields = (self.ids, self.offs, self.slots, self.rows, self.places)
            PermuteTask(*fields, None, self.first_expert, "whole").reference()
        tokens = self.slots.long() // self.ids.shape[1]
        if self.scale is None or self.format is None:
            end = int(self.offs[-1])
            self.data[:end] = self.x[tokens[:end]]
            return
        if self.format.scale_layout == "rowmajor":
            end = int(self.offs[-1])
            made = block_scaled.quantize(self.x[tokens[:end]], format=self.format)
            self.data[:end], self.scale[:end] = made.data.view(torch.uint8), made.scale
            return
        rows_of = lambda _, start, stop: self.x[tokens[start:stop]]
        ends, parts = self.offs.tolist(), (self.data, self.scale)
        given, found = (None, self.global_scale) if self.finds_scales else (self.global_scale, None)
        block_scaled.quantize_groups(ends, rows_of, given, *parts, self.format, found=found)
