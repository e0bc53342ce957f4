"""``activate``: bias and activation between the two products, where no epilogue computes them."""

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import torch

from nvfp4_cute.activation import IDENTITY, SILU, Activation, activation_of
from nvfp4_cute.backends.calls import run
from nvfp4_cute.experts.activation import GateLayout, activate_rows
from nvfp4_cute.experts.checks import check_ids, check_row_format, check_rows, check_vector
from nvfp4_cute.experts.gather import as_rows, found_scales
from nvfp4_cute.experts.keys import ActivateKey
from nvfp4_cute.experts.new_rows import ExpertRows, new_rows
from nvfp4_cute.experts.permutation import Permutation
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.table_task import TableTask
from nvfp4_cute.launch_table import Activate, float32_bits
from nvfp4_cute.operands import rules as checks
from nvfp4_cute.planning.arch import simt


def activate(
    h: torch.Tensor,
    ids: torch.Tensor,
    order: Permutation,
    *,
    activation: Activation | str = SILU,
    gate_layout: GateLayout = "concatenated",
    bias: torch.Tensor | None = None,
    format: BlockFormat | None = None,
    global_scale: torch.Tensor | str | None = None,
    first_expert: int = 0,
    follows_product: bool = False,
    backend: str = "auto",
) -> ExpertRows:
    """Computes ``activation(gate + bias) * (up + bias)`` for every expert's rows in one launch, quantized or not.

    Computes in float32 with the operations of ``experts.activation``, so the bits are the same everywhere.

    Args:
        h: float16 or bfloat16 results of the first product: [R, 2 N], or [R, N] without a gate; rows a multiple of 16 bytes
            apart. R is at most T * k and at least the number of rows in ``order``.
        ids, order, first_expert: see ``permute``.
        activation: an ``Activation`` or its text, or ``IDENTITY`` for rows that are activated already.
        gate_layout: "concatenated": the gate's columns, then up's; "interleaved": alternating columns, the gate's first;
            "none".
        bias: contiguous [E_local, columns of h] in the dtype of ``h``.
        format: see ``gather``; None rounds once to the dtype of h, to nearest even.
        global_scale: float32 [E_local], or None for 1. "per_row": the launch computes a global scale per row.
        follows_product: whether the launch before this one is the product that writes ``h``, and writes nothing else that is read
            here.
        backend: see ``permute``.

    Returns:
        [R, N] in the dtype of h, or data and scales like those of ``gather``. Rows after the last expert's are not written.

    Raises:
        TypeError, ValueError: an operand breaks a rule.
        UnsupportedTarget: the GPU has no kernel.
    """
    given = None if isinstance(global_scale, str) else global_scale
    limit: float | None = None
    if activation == IDENTITY:
        function = IDENTITY
    else:
        record = activation_of(activation)
        function, limit = record.function, record.limit
    n, experts, found = _check(h, ids, order, gate_layout, bias, given), len(order.offs), None
    if format is None:
        rows = ExpertRows(torch.empty((len(h), n), dtype=h.dtype, device=h.device))
    else:
        check_vector("global_scale", given, experts)
        check_row_format(format, global_scale=global_scale)
        found = found_scales(global_scale, len(h), h.device)
        rows = ExpertRows(*new_rows(len(h), n, experts, format, h.device), found)
    task = ActivateTask(
        h=h,
        bias=bias,
        ids=ids,
        slots=order.slots,
        places=order.places,
        offs=order.offs,
        global_scale=given if found is None else found,
        data=rows.data,
        scale=rows.scale,
        activation=function,
        gate_layout=gate_layout,
        limit=None if gate_layout == "none" else limit,
        first_expert=first_expert,
        format=format,
        finds_scales=found is not None,
        follows_product=follows_product,
    )
    run(backend, task)
    return rows if format is None else as_rows(rows, format)


def _check(h, ids, order: Permutation, gate_layout: str, bias, global_scale) -> int:
    """Returns the columns of the result. Raises where an operand breaks a rule."""
    checks.check_tensors({"h": h, "ids": ids}, {"bias": bias, "global_scale": global_scale})
    check_rows("h", h)
    check_ids(ids)
    checks.check_choice("gate_layout", gate_layout, ("concatenated", "interleaved", "none"))
    rows, columns = h.shape
    n = columns if gate_layout == "none" else columns // 2
    if n % 32 or columns % n:
        raise ValueError(
            f"h has {columns} columns; N={n} is not a multiple of 32 (rows start 16 bytes apart)"
        )
    experts = len(order.offs)
    if rows > ids.numel():
        raise ValueError(f"h has {rows} rows; expected at most T * k = {ids.numel()}, as order has")
    if bias is not None and (
        bias.dtype != h.dtype or tuple(bias.shape) != (experts, columns) or not bias.is_contiguous()
    ):
        raise ValueError(
            f"bias is {bias.dtype} {list(bias.shape)}; expected contiguous {h.dtype} [{experts}, {columns}]"
        )
    if bias is not None:
        checks.check_aligned("bias", bias)
    return n


@dataclass(frozen=True)
class ActivateTask(TableTask):
    """Checked operands of ``activate``. Without a format there is no ``scale``.

    With ``finds_scales``, ``global_scale`` is written, one number per row. ``follows_product``: see ``activate``.
    """

    columns = Activate
    h: torch.Tensor
    bias: torch.Tensor | None
    ids: torch.Tensor
    slots: torch.Tensor
    places: torch.Tensor
    offs: torch.Tensor
    global_scale: torch.Tensor | None
    data: torch.Tensor
    scale: torch.Tensor | None
    activation: str
    gate_layout: GateLayout
    limit: float | None
    first_expert: int
    format: BlockFormat | None
    finds_scales: bool = False
    follows_product: bool = False

    @property
    def written(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the fields that the activation kernel writes."""
        if self.finds_scales:
            return ("data", "scale", "global_scale")
        return ("data",) if self.scale is None else ("data", "scale")

    @property
    def is_empty(self) -> bool:
        """Returns whether there are no rows to activate."""
        return self.h.numel() == 0

    def key(self, gpu: Gpu) -> ActivateKey:
        """Returns the key of the activation kernel."""
        limit, bias, scale = (x is not None for x in (self.limit, self.bias, self.global_scale))
        of_rows = self.h.dtype, self.format, self.activation, self.gate_layout
        is_early = self.follows_product and simt.has_programmatic_products(gpu.arch)
        return ActivateKey(gpu.arch, *of_rows, limit, bias, scale, self.finds_scales, is_early)

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Returns the extents for the launch table of an activation."""
        return {
            Activate.H_PITCH: self.h.stride(0) * self.h.element_size(),
            Activate.ID_BYTES: self.ids.element_size(),
            Activate.ROWS: len(self.h),
            Activate.N: self.h.shape[1] // (1 if self.gate_layout == "none" else 2),
            Activate.FIRST_EXPERT: self.first_expert,
            Activate.EXPERTS: len(self.offs),
            Activate.LIMIT: 0 if self.limit is None else float32_bits(self.limit),
        }

    def by_rows(self) -> tuple[int, dict[IntEnum, int]]:
        """Returns the number of rows."""
        return len(self.h), {Activate.ROWS: 1}

    def reference(self) -> None:
        """Applies ``experts.activation`` and ``formats.quantize``, expert by expert."""

        def rows_of(expert: int, start: int, stop: int) -> torch.Tensor:
            h = self.h[start:stop].float()
            h = h if self.bias is None else h + self.bias[expert].float()
            return activate_rows(h, self.activation, self.gate_layout, self.limit)

        ends = self.offs.tolist()
        if self.scale is not None and self.format is not None:
            parts = self.data, self.scale
            given, found = (None, self.global_scale) if self.finds_scales else (self.global_scale, None)
            block_scaled.quantize_groups(ends, rows_of, given, *parts, self.format, found=found)
            return
        for expert, (start, stop) in enumerate(pairwise([0, *ends])):
            self.data[start:stop] = rows_of(expert, start, stop)
