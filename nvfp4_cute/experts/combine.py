"""``finalize``: adds up the rows of each token's experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import torch

from nvfp4_cute.backends.calls import run
from nvfp4_cute.experts.checks import check_ids, check_rows, check_tokens
from nvfp4_cute.experts.keys import FinalizeKey
from nvfp4_cute.experts.signals import Inbox, Wait, fields_of
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.table_task import TableTask
from nvfp4_cute.launch_table import Finalize, PeerHeader
from nvfp4_cute.operands import rules as checks
from nvfp4_cute.operands.overlap import check_overlap
from nvfp4_cute.planning.arch import simt

# Columns that a lane stores at once.
COLUMN_STEP = 8


def finalize(
    h: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    *,
    shared: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    first_expert: int = 0,
    inbox: Inbox | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Adds up the weighted results of every token's experts: ``y[t] = sum over k of weights[t, k] * h[rows[t, k]]``.

    One launch computes in float32 and in the order of k, rounding every product and every sum, so the bits are the same
    everywhere and in every run. Then it adds ``shared`` and rounds once to the dtype of ``h``.

    Args:
        h: float16 or bfloat16 [R, N], rows a multiple of 16 bytes apart, N a multiple of 8.
        rows: int32 [T, k], from ``Permutation``; -1 is left out, whatever its weight.
        weights: float32 [T, k].
        shared: [T, N] in the dtype of ``h``, added to every token, such as a shared expert's result.
        bias: contiguous [E_local, N] in the dtype of ``h``, added to the rows of each expert before the weight.
        ids, first_expert: see ``permute``; needed with a bias.
        inbox: where other ranks signal that they have stored ``h``. The launch waits for them, and y is NaN if one is late.
            None: ``h`` is complete.
        out: [T, N] in the dtype of ``h``, written in place; None allocates.
        backend: see ``permute``.

    Returns:
        y, [T, N].

    Example:
        >>> h, rows = torch.ones(3, 8).bfloat16(), torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
        >>> finalize(h, rows, torch.tensor([[0.5, 0.25], [2.0, 9.0]]))[:, 0].tolist()
        [0.75, 2.0]

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule.
        UnsupportedTarget: the GPU has no kernel.
    """
    optional = {"shared": shared, "bias": bias, "ids": ids, "out": out}
    checks.check_tensors({"h": h, "rows": rows, "weights": weights}, optional)
    check_rows("h", h)
    tokens, n = len(rows), h.shape[1]
    check_ids(rows)
    checks.check_choice("dtype of rows", rows.dtype, (torch.int32,))
    check_addends(h.dtype, n, rows, weights, shared, bias, rows_name="rows")
    if bias is not None:
        if ids is None:
            raise ValueError("bias comes with ids, which tell the rows' experts; pass them")
        check_ids(ids)
        if ids.shape != rows.shape:
            raise ValueError(f"ids has shape {list(ids.shape)}; expected {list(rows.shape)}, as rows")
    if out is None:
        out = torch.empty((tokens, n), dtype=h.dtype, device=h.device)
    _check_tokens("out", out, h.dtype, tokens, n)
    check_overlap({"out": out}, {"h": h, "rows": rows, "weights": weights} | checks.given(bias=bias))
    if shared is not None and shared.data_ptr() != out.data_ptr():
        check_overlap({"out": out}, {"shared": shared})
    waits, ids = fields_of(inbox), None if bias is None else ids
    run(backend, FinalizeTask(h, rows, weights, out, shared, bias, ids, *waits, first_expert))
    return out


def check_call(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    bias2: torch.Tensor | None,
    num_experts: int,
    optional: Mapping[str, torch.Tensor | None] = MappingProxyType({}),
) -> None:
    """Raises before the first launch of a layer whatever its first and last launches would refuse.

    Args:
        x, ids, weights, shared, bias2: see ``moe``; bias2 has ``num_experts`` rows.
        num_experts: experts of all ranks.
        optional: other tensors of the call, by name.
    """
    checks.check_tensors(
        {"x": x, "ids": ids, "weights": weights}, {**optional, "shared": shared, "bias2": bias2}
    )
    check_tokens(x, ids)
    check_addends(x.dtype, x.shape[1], ids, weights, shared, bias2, bias_name="bias2")
    if bias2 is not None and len(bias2) != num_experts:
        raise ValueError(f"bias2 has {len(bias2)} rows; expected {num_experts}, one for each of all experts")


def check_addends(
    dtype: torch.dtype,
    n: int,
    rows: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    rows_name: str = "ids",
    bias_name: str = "bias",
) -> None:
    """Raises ValueError or TypeError unless arguments of ``finalize`` fit N columns of ``dtype`` and rows, or ids, [T, k]."""
    if n % COLUMN_STEP:
        raise ValueError(f"N={n} is not a multiple of {COLUMN_STEP} (vector stores); pad N")
    if weights.dtype != torch.float32 or weights.shape != rows.shape or not weights.is_contiguous():
        raise ValueError(
            f"weights is {weights.dtype} {list(weights.shape)}, strides {list(weights.stride())}; expected contiguous "
            f"torch.float32 {list(rows.shape)}, as {rows_name}"
        )
    if shared is not None:
        _check_tokens("shared", shared, dtype, len(rows), n)
    if bias is None:
        return
    _check_tokens(bias_name, bias, dtype, None, n)
    if not bias.is_contiguous():
        raise ValueError(f"{bias_name} has strides {list(bias.stride())}; pass {bias_name}.contiguous()")


def _check_tokens(name: str, tensor: torch.Tensor, dtype: torch.dtype, length: int | None, n: int) -> None:
    check_rows(name, tensor, n)
    if tensor.dtype != dtype or (length is not None and len(tensor) != length):
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} [{length}, {n}]")


@dataclass(frozen=True)
class FinalizeTask(TableTask):
    """Checked operands of ``finalize``.

    ``ids`` are set with a bias or for routed rows. ``host_fault``, ``header`` and ``wait`` are set in a launch that waits for
    other ranks. For routed rows ``experts`` is the number of local experts, and ``rows`` is None: choice c of all has row c.
    ``follows_product``: the launch before this one is the product that writes ``h``, and writes nothing else that is read here.
    """

    columns = Finalize
    written = ("host_fault", "header", "y")
    h: torch.Tensor
    rows: torch.Tensor | None
    weights: torch.Tensor
    y: torch.Tensor
    shared: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    host_fault: torch.Tensor | None = None
    header: torch.Tensor | None = None
    wait: Wait | None = None
    first_expert: int = 0
    experts: int | None = None
    follows_product: bool = False

    @property
    def is_empty(self) -> bool:
        """Returns whether there is nothing to write and no rank to wait for."""
        return self.y.numel() == 0 and self.wait is None

    def key(self, gpu: Gpu) -> FinalizeKey:
        """Returns the key of the finalize kernel."""
        options = (
            self.shared is not None,
            self.bias is not None,
            self.wait is not None,
            self.experts is not None,
            self.follows_product and simt.has_programmatic_products(gpu.arch),
        )
        top_k = self.weights.shape[1]
        ahead = min(simt.FINALIZE_AHEAD, 1 << max(top_k - 1, 0).bit_length())
        return FinalizeKey(gpu.arch, self.h.dtype, *options, ahead)

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Returns the extents for the launch table of ``finalize``."""
        tokens, top_k = self.weights.shape
        return {
            Finalize.H_PITCH: self.h.stride(0) * self.h.element_size(),
            Finalize.SHARED_PITCH: 0
            if self.shared is None
            else self.shared.stride(0) * self.shared.element_size(),
            Finalize.Y_PITCH: self.y.stride(0) * self.y.element_size(),
            Finalize.ID_BYTES: 0 if self.ids is None else self.ids.element_size(),
            Finalize.TOKENS: tokens,
            Finalize.TOP_K: top_k,
            Finalize.N: self.y.shape[1],
            Finalize.FIRST_EXPERT: self.first_expert,
            Finalize.EXPERTS: self.experts or 0,
            **({} if self.wait is None else self.wait.numbers(Finalize)),
        }

    def by_rows(self) -> tuple[int, dict[IntEnum, int]] | None:
        """Returns the number of tokens."""
        return None if self.wait is not None else (len(self.weights), {Finalize.TOKENS: 1})

    def rows_of_choices(self) -> torch.Tensor:
        """Returns the row of every choice, [T, k]; -1 for none."""
        if self.rows is not None:
            return self.rows
        assert self.ids is not None and self.experts is not None
        local = self.ids.long() - self.first_expert
        slots = torch.arange(self.ids.numel(), device=self.ids.device).view_as(self.ids)
        return slots.where((local >= 0) & (local < self.experts), -1)

    def reference(self) -> None:
        """Repeats the finalize kernel's float32 operations in its order."""
        is_lost = False
        if self.wait is not None and self.header is not None and self.host_fault is not None:
            is_lost = self.wait.reference(PeerHeader.COMBINED, self.header, self.host_fault)
        total = torch.zeros(self.y.shape, dtype=torch.float32, device=self.y.device)
        rows = self.rows_of_choices()
        for k in range(rows.shape[1]):
            row = rows[:, k].long()
            has_row = (row >= 0)[:, None]
            if not len(self.h):
                break
            values = self.h[row.clamp(min=0)].float()
            if self.bias is not None and self.ids is not None:
                expert = (self.ids[:, k].long() - self.first_expert).clamp(0, len(self.bias) - 1)
                values = values + self.bias[expert].float()
            product = self.weights[:, k : k + 1] * values
            total = torch.where(has_row, total + product, total)
        if self.shared is not None:
            total = total + self.shared.float()
        self.y.copy_(total.fill_(torch.nan) if is_lost else total)
