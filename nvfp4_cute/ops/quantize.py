"""quantize: 16-bit floats, or silu(x) * up of two such, to NVFP4 in one pass; and the same over groups of rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
import torch

from nvfp4_cute import backends
from nvfp4_cute.compile.simt_keys import QuantizeKey
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_scaled import (
    SCALE_LAYOUTS,
    NVFP4Tensor,
    ScaleLayout,
    check_is_tensor,
)
from nvfp4_cute.formats.global_scale import resolve_global_scale
from nvfp4_cute.formats.scale_layout import ATOM_ROWS, ATOM_SHAPE, atom_counts, num_k_blocks
from nvfp4_cute.formats.silu import silu_mul
from nvfp4_cute.launch_table import Quantize
from nvfp4_cute.ops import vector_checks as checks

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
# Rows of atoms lie along y of the grid, batches along z.
MAX_GRID = 65535


def quantize(
    x: torch.Tensor,
    *,
    up: torch.Tensor | None = None,
    global_scale: float | torch.Tensor | Literal["auto"] | None = None,
    global_scale_inv: float | torch.Tensor | None = None,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
) -> NVFP4Tensor:
    """Quantize to NVFP4 in blocks of 16 along the last dimension, exactly as ``formats.quantize`` specifies.

    float16 and bfloat16 on a GPU (or on the emulator) take one kernel launch, which reads ``x`` once and writes data and
    scales with their padding; it can be captured in a CUDA graph. float32 and float64, and CPU tensors, take
    ``formats.quantize``. The bits are the same.

    Args:
        x: float16, bfloat16, float32 or float64, [..., K], K a multiple of 16; copied where rows are not contiguous or
            not 16-byte aligned.
        up: of the dtype and shape of ``x``: then ``silu(x) * up`` is quantized, the middle of a gated layer. It is computed
            in float32, by the operations that ``nvfp4_cute.formats.silu`` lists, so its bits are the same everywhere, too; x and
            up may be the halves ``h[:, :I]`` and ``h[:, I:]`` of one tensor.
        global_scale: the factor one multiplies by to dequantize, amax / 2688: a number, a tensor of one element, "auto"
            (computed from what is quantized in passes of their own), or None.
        global_scale_inv: the inverse convention, by this name only.
        scale_layout: "blocked" ([batches..., rm, rk, 32, 4, 4]) or "rowmajor" ([..., K/16]).
        backend: "auto", "cuda", "emulator" (float16 and bfloat16 only), "emulator:ARCH", or "reference".

    Returns:
        NVFP4Tensor with uint8 data and float8_e4m3fn scales, contiguous, on the device of ``x``.

    Example:
        >>> quantize(torch.randn(40, 512).bfloat16(), global_scale="auto").data.shape
        torch.Size([40, 256])
        >>> gate, up = torch.randn(2, 40, 512).bfloat16()
        >>> quantize(gate, up=up).shape  # silu(gate) * up
        (40, 512)

    Raises:
        TypeError, ValueError: as ``formats.quantize``. UnsupportedTarget: no kernel for the GPU.
        UnsupportedProblem: more rows or batches than a grid has.
    """
    if torch.compiler.is_compiling():  # the custom op (ops.library) that a traced graph keeps
        return _traced(x, up, global_scale, global_scale_inv, scale_layout, backend)
    check_is_tensor("x", x)
    name = backends.resolve(backend, x.device)
    _check_up(x, up)
    if name == "reference" or (x.dtype not in KERNEL_DTYPES and name == "cuda"):
        values = x if up is None else silu_mul(x.detach(), up.detach())
        return block_scaled.quantize(
            values, global_scale=global_scale, global_scale_inv=global_scale_inv, scale_layout=scale_layout
        )
    checks.check_choice("dtype of x", x.dtype, KERNEL_DTYPES)
    checks.check_choice("scale_layout", scale_layout, SCALE_LAYOUTS)
    if x.ndim == 0:
        raise ValueError("x has no dimensions, hence no K; reshape it to [..., K], K a multiple of 16")
    x = x.detach()
    k_blocks = num_k_blocks(x.shape[-1])
    *batches, rows = x.shape[:-1] if x.ndim > 1 else (1,)
    is_auto = isinstance(global_scale, str)
    values = silu_mul(x, up.detach()) if is_auto and up is not None else x
    factor = resolve_global_scale(values, global_scale, global_scale_inv)
    atoms = atom_counts(rows, k_blocks)
    shape = (*batches, *atoms, *ATOM_SHAPE) if scale_layout == "blocked" else (*x.shape[:-1], k_blocks)
    task = QuantizeTask(
        x=_rows(x, prod(batches), rows),
        up=None if up is None else _rows(up.detach(), prod(batches), rows),
        data=torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8, device=x.device),
        scale=torch.empty(shape, dtype=torch.uint8, device=x.device),
        global_scale=factor,
        offs=None,
        scale_layout=scale_layout,
        atom_rows=atoms[0],
    )
    backends.run_task(backend, task)
    scale = task.scale.view(torch.float8_e4m3fn)
    return NVFP4Tensor(task.data, scale, factor, tuple(x.shape), scale_layout)


def grouped_quantize(
    x: torch.Tensor,
    offs: torch.Tensor,
    *,
    up: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize groups of rows to NVFP4 in one launch; sizes stay on the device.

    Args:
        x: [sum M, K], float16 or bfloat16, rows contiguous and a multiple of 16 bytes apart.
        up: of the dtype and shape of ``x``: then silu(x) * up is quantized, as by :func:`quantize`.
        offs: int32 [G] on the device of ``x``, the inclusive ends of the groups, ascending; the last at most sum M.
        global_scale: float32 [G] on the device, a factor a group, or None.
        backend: as of :func:`quantize`.

    Returns:
        data: uint8 [sum M, K/2]; rows behind the last group are not written.
        scale: float8_e4m3fn [sum M // 128 + G, K/64 rounded up, 32, 4, 4], blocked. Every group begins with a new row of
        atoms, ceil(M_g / 128) of them; padding, and what is left behind the last group, is zero.

    Example:
        >>> rows, offs = torch.randn(47, 512).bfloat16(), torch.tensor([40, 47], dtype=torch.int32)
        >>> data, scale = grouped_quantize(rows, offs)
        >>> tuple(scale.shape)
        (2, 8, 32, 4, 4)

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule. UnsupportedTarget: no kernel for the GPU.
    """
    checks.check_tensors({"x": x, "offs": offs}, {"up": up, "global_scale": global_scale})
    checks.check_choice("dtype of x", x.dtype, KERNEL_DTYPES)
    if x.ndim != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected [sum M, K]")
    _check_up(x, up)
    k_blocks = num_k_blocks(x.shape[1])
    if offs.dtype != torch.int32 or offs.ndim != 1 or not offs.is_contiguous() or not len(offs):
        raise ValueError(
            f"offs has dtype {offs.dtype}, shape {tuple(offs.shape)}; expected contiguous int32 [G]"
        )
    if global_scale is not None and (
        global_scale.dtype != torch.float32
        or global_scale.shape != offs.shape
        or not global_scale.is_contiguous()
    ):
        raise ValueError(
            f"global_scale has dtype {global_scale.dtype}, shape {tuple(global_scale.shape)}; expected contiguous "
            f"float32 [{len(offs)}], one a group"
        )
    atom_rows, atoms_k = x.shape[0] // ATOM_ROWS + len(offs), -(-k_blocks // 4)
    task = QuantizeTask(
        x=_rows(x.detach(), 1, x.shape[0]),
        up=None if up is None else _rows(up.detach(), 1, x.shape[0]),
        data=torch.empty((x.shape[0], x.shape[1] // 2), dtype=torch.uint8, device=x.device),
        scale=torch.empty((atom_rows, atoms_k, *ATOM_SHAPE), dtype=torch.uint8, device=x.device),
        global_scale=global_scale,
        offs=offs,
        scale_layout="blocked",
        atom_rows=atom_rows,
    )
    backends.run_task(backend, task)
    return task.data, task.scale.view(torch.float8_e4m3fn)


@dataclass(frozen=True)
class QuantizeTask:
    """Checked operands. x and up (or None) [B, M, K] with unit stride in K; data and scale uint8, contiguous.

    ``offs`` int32 [G] (then B is 1 and global_scale float32 [G]) or None; ``atom_rows``: rows of atoms a batch.
    """

    x: torch.Tensor
    up: torch.Tensor | None
    data: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    offs: torch.Tensor | None
    scale_layout: ScaleLayout
    atom_rows: int

    @property
    def device(self) -> torch.device:
        """The device of the operands."""
        return self.x.device

    @property
    def is_empty(self) -> bool:
        """Whether there are no scales to write."""
        return self.scale.numel() == 0

    def key(self, arch: str) -> QuantizeKey:
        """What to compile."""
        has_global_scale, is_grouped = self.global_scale is not None, self.offs is not None
        is_blocked = self.scale_layout == "blocked"
        return QuantizeKey(arch, self.x.dtype, has_global_scale, is_grouped, is_blocked, self.up is not None)

    def table(self) -> np.ndarray:
        """``launch_table.Quantize``."""
        batches, m, k = self.x.shape
        table = np.zeros(len(Quantize), np.int64)
        for name, tensor, _ in self.tensors():
            table[Quantize[name.upper()]] = tensor.data_ptr()
        table[Quantize.X_PITCH], table[Quantize.X_BATCH] = (
            2 * stride for stride in (self.x.stride(1), self.x.stride(0))
        )
        if self.up is not None:
            table[Quantize.UP_PITCH], table[Quantize.UP_BATCH] = (2 * self.up.stride(i) for i in (1, 0))
        table[Quantize.M], table[Quantize.K], table[Quantize.BATCHES] = m, k, batches
        table[Quantize.GROUPS] = 0 if self.offs is None else len(self.offs)
        table[Quantize.ATOM_ROWS] = self.atom_rows
        return table

    def mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """No operand has a tensor map."""
        return iter(())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name, tensor, and whether it is written."""
        for name in ("x", "up", "data", "scale", "global_scale", "offs"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor, name in ("data", "scale")

    def reference(self) -> None:
        """``formats.quantize``, group by group where there are groups (reads ``offs``, which waits for a GPU)."""
        values = self.x if self.up is None else silu_mul(self.x, self.up)
        if self.offs is None:
            result = block_scaled.quantize(
                values, global_scale=self.global_scale, scale_layout=self.scale_layout
            )
            self.data.view(-1).copy_(result.data.view(-1))
            self.scale.view(-1).copy_(result.scale.view(torch.uint8).view(-1))
            return
        self.scale.zero_()
        start, atom = 0, 0
        for group, stop in enumerate(self.offs.tolist()):
            if stop > start:
                factor = None if self.global_scale is None else self.global_scale[group]
                result = block_scaled.quantize(values[0, start:stop], global_scale=factor)
                self.data[start:stop] = result.data
                self.scale[atom : atom + len(result.scale)] = result.scale.view(torch.uint8)
                atom += len(result.scale)
            start = stop


def _traced(x, up, global_scale, global_scale_inv, scale_layout, backend) -> NVFP4Tensor:
    is_auto = isinstance(global_scale, str)
    values = silu_mul(x, up) if is_auto and up is not None else x
    factor = resolve_global_scale(values, global_scale, global_scale_inv)
    data, scale = torch.ops.nvfp4_cute.quantize(x, up, factor, scale_layout, backend)
    return NVFP4Tensor(data, scale, factor, tuple(x.shape), scale_layout)


def _check_up(x: torch.Tensor, up: torch.Tensor | None) -> None:
    if up is None:
        return
    checks.check_choice("dtype of x with up", x.dtype, (*KERNEL_DTYPES, torch.float32))
    if up.dtype != x.dtype or up.shape != x.shape or up.device != x.device:
        raise ValueError(
            f"up is {up.dtype} {list(up.shape)} on {up.device} and x {x.dtype} {list(x.shape)} on {x.device}; silu(x) * up "
            "takes two of one dtype, shape and device"
        )


def _rows(x: torch.Tensor, batches: int, rows: int) -> torch.Tensor:
    """[B, M, K] in rows that vectors of 16 bytes can read, copied where ``x`` is not."""
    checks.check_extent("batches", batches, MAX_GRID)
    checks.check_extent("M", rows, MAX_GRID * ATOM_ROWS)
    view = x.reshape(batches, rows, x.shape[-1])
    strides = [
        2 * stride for stride, extent in zip(view.stride()[:2], view.shape[:2], strict=True) if extent > 1
    ]
    aligned = view.data_ptr() % checks.ALIGN_BYTES == 0 and all(s % checks.ALIGN_BYTES == 0 for s in strides)
    return view if view.stride(2) == 1 and aligned else view.clone(memory_format=torch.contiguous_format)
