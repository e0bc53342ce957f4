"""``gather``: copies tokens to the rows of their experts, quantized or not."""

from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from nvfp4_cute.backends.calls import run
from nvfp4_cute.experts.checks import check_row_format, check_row_pitch, check_tokens
from nvfp4_cute.experts.keys import Gather1xKKey, GatherQuantizeKey
from nvfp4_cute.experts.new_rows import ExpertRows, new_rows
from nvfp4_cute.experts.permutation import (
    Permutation,
    PermuteTask,
    check_experts,
    new_order,
    permute,
)
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_format import NVFP4, BlockFormat
from nvfp4_cute.formats.global_scale import PER_ROW
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.table_task import TableTask
from nvfp4_cute.launch_table import GatherQuantize
from nvfp4_cute.operands import rules as checks
from nvfp4_cute.operands.results import as_results
from nvfp4_cute.ops.quantize import quantize
from nvfp4_cute.planning.arch.simt import FEW_SLOTS, WARP_SIZE

MAX_WORK = 2**31 - 1


def gather(
    x: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    *,
    format: BlockFormat | None = None,
    global_scale: torch.Tensor | str | None = None,
    first_expert: int = 0,
    backend: str = "auto",
) -> tuple[ExpertRows, Permutation]:
    """Copies every token into the rows of the experts that it chose, quantized or not, as operands of a ragged ``grouped_gemm``.

    Takes two launches: ``permute``, and one that reads each token once. For at most 64 choices (T * k), takes one launch. Rows in
    FP8_1x128 take another launch. The cost depends on tokens and rows, not on the number of experts.

    Args:
        x: float16 or bfloat16 [T, K], rows a multiple of 16 bytes apart, K a multiple of 32.
        ids, num_experts, first_expert: see ``permute``.
        format: NVFP4, FOUR_OVER_SIX, MXFP4, MXFP8, FP8_1x128, FP8_1xK or INT8; None keeps the dtype of x.
        global_scale: global scale of NVFP4 rows: float32 with one element, or [num_experts]; None for 1. "per_row": the launch
            computes a global scale per row.
        backend: see ``permute``.

    Returns:
        rows: data [T * k, bytes of K]; for NVFP4 uint8 [T * k, K/2]. Rows after the last one are not written. Scales of FP8_1xK
            and INT8: float32 [T * k, 1]. Otherwise blocked; for NVFP4 float8_e4m3fn [T * k // 128 + num_experts, K/64 rounded up,
            32, 4, 4]: every expert's rows begin a new row of atoms. Padding rows are not written; nothing reads them.
        order: order of the rows.

    Example:
        >>> x, ids = torch.randn(3, 64).bfloat16(), torch.tensor([[1, 0], [1, -1], [0, 1]])
        >>> rows, order = gather(x, ids, 2, format=NVFP4)
        >>> tuple(rows.data.shape), tuple(rows.scale.shape), order.offs.tolist()
        ((6, 32), (2, 1, 32, 4, 4), [2, 5])

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule.
        UnsupportedTarget: the GPU has no kernel.
    """
    given = None if isinstance(global_scale, str) else global_scale
    checks.check_tensors({"x": x, "ids": ids}, {"global_scale": given})
    check_tokens(x, ids)
    check_experts(num_experts)
    k, choices = x.shape[1], ids.numel()
    k_blocks = NVFP4.num_k_blocks(k)
    check_row_pitch("K", k)
    checks.check_extent("T * K / 512", len(x) * -(-k_blocks // WARP_SIZE), MAX_WORK // WARP_SIZE)
    where = first_expert, backend
    if format is None or (format.scale_layout == "rowmajor" and not format.is_1xk):
        data = torch.empty((choices, k), dtype=x.dtype, device=x.device)
        order = _gather(x, ids, num_experts, ExpertRows(data), None, None, *where)
        return quantize_rows(data, format, backend), order
    check_row_format(format, global_scale=global_scale)
    if given is not None:
        if given.dtype != torch.float32 or given.numel() not in (1, num_experts):
            raise ValueError(
                f"global_scale is {given.dtype} {list(given.shape)}; expected torch.float32, one element or "
                f"[{num_experts}], one per expert"
            )
        given = given.contiguous().view(-1)
    found = found_scales(global_scale, choices, x.device)
    rows = ExpertRows(*new_rows(choices, k, num_experts, format, x.device), found)
    order = _gather(x, ids, num_experts, rows, format, given, *where)
    return as_rows(rows, format), order


def found_scales(
    global_scale: torch.Tensor | str | None, rows: int, device: torch.device
) -> torch.Tensor | None:
    """Allocates float32 [rows] if ``global_scale`` is "per_row". Raises ValueError for other strings."""
    if not isinstance(global_scale, str):
        return None
    checks.check_choice("global_scale", global_scale, (PER_ROW,))
    return torch.empty(rows, dtype=torch.float32, device=device)


def as_rows(rows: ExpertRows, format: BlockFormat) -> ExpertRows:
    """Views bytes in the dtypes of ``format``."""
    assert rows.scale is not None
    data, scale = as_results([rows.data, rows.scale], False, format, None)
    return ExpertRows(data, scale, rows.row_scale)


def quantize_rows(rows: torch.Tensor, format: BlockFormat | None, backend: str) -> ExpertRows:
    """Quantizes in a launch of its own; without a format, returns the rows themselves."""
    if format is None:
        return ExpertRows(rows)
    made = quantize(rows, format=format, backend=backend)
    return ExpertRows(made.data, made.scale)


def _gather(
    x, ids, num_experts, rows: ExpertRows, format, global_scale, first_expert, backend
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
        global_scale=global_scale if rows.row_scale is None else rows.row_scale,
        data=rows.data,
        scale=rows.scale,
        offs=order.offs,
        slots=order.slots,
        first_expert=first_expert,
        finds_order=finds_order,
        format=format,
        finds_scales=rows.row_scale is not None,
    )
    if finds_order and not ids.numel():
        order.offs.zero_()
    run(backend, task)
    return order


@dataclass(frozen=True)
class GatherQuantizeTask(TableTask):
    """One launch of ``gather``.

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

    def by_rows(self) -> tuple[int, dict[IntEnum, int]]:
        """Returns the number of tokens."""
        return len(self.ids), {GatherQuantize.TOKENS: 1}

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
