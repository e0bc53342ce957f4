"""Checked operands of a grouped GEMM whose group sizes live on the device: the ragged and the masked form.

Nothing here reads the sizes, so nothing waits for the GPU and a captured graph follows sizes that change.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from nvfp4_cute import backends
from nvfp4_cute.compile import KernelKey
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header
from nvfp4_cute.ops import vector_checks as checks
from nvfp4_cute.reference import grouped_gemm_reference
from nvfp4_cute.scale_layout import ATOM_BYTES, atom_counts, num_k_blocks
from nvfp4_cute.select import config_for_rows

SF_ATOM_ROWS = 128


@dataclass(frozen=True)
class DeviceGroupsTask:
    """One launch of the ragged or masked form (``task.Task``).

    Attributes:
        form: "ragged": ``sizes`` are the groups' inclusive ends in the rows of ``a``; "masked": their row counts.
        a: uint8 [batches, rows, K/2]: one batch where ragged, one a group where masked.
        b: uint8 [G, N, K/2].
        a_scale, b_scale: uint8, flat, blocked; where ragged, every group's rows begin a 128-row block.
        sizes: int32 [G].
        alpha: float32 [G], or None.
        out: [batches, rows, N], unit stride in N or in M.
        config: how.
        num_sms: of the GPU.
    """

    form: Literal["ragged", "masked"]
    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor
    b_scale: torch.Tensor
    sizes: torch.Tensor
    alpha: torch.Tensor | None
    out: torch.Tensor
    config: KernelConfig
    num_sms: int

    @property
    def device(self) -> torch.device:
        """The device of the operands."""
        return self.a.device

    @property
    def is_empty(self) -> bool:
        """Whether there can be no work, whatever the sizes are."""
        return self.out.numel() == 0

    @property
    def out_m_major(self) -> bool:
        """Whether columns of the output are contiguous, not rows."""
        _, rows, n = self.out.shape
        return self.out.stride(2) != 1 and n > 1 and rows > 1

    def key(self, arch: str) -> KernelKey:
        """What to compile. Raises UnsupportedTarget, UnsupportedProblem or ConfigError."""
        has_alpha = self.alpha is not None
        return KernelKey.make(arch, self.config, 1, self.out.dtype, has_alpha, self.form, self.out_m_major)

    def table(self) -> np.ndarray:
        """``launch_table``: a header and one row."""
        batches, rows, row_bytes = self.a.shape
        num_groups, n, _ = self.b.shape
        k = 2 * row_bytes
        table = np.zeros((2, NUM_COLUMNS), np.int64)
        header, row = table
        header[Header.NUM_CTA] = self._num_cta()
        header[Header.GROUP_SIZES] = self.sizes.data_ptr()
        header[Header.NUM_GROUPS] = num_groups
        if self.alpha is not None:
            header[Header.ALPHA] = self.alpha.data_ptr()
        row[Group.A : Group.OUT + 1] = [
            tensor.data_ptr() for tensor in (self.a, self.b, self.a_scale, self.b_scale, self.out)
        ]
        row[Group.A_PITCH], row[Group.A_BATCH_PITCH] = 2 * self.a.stride(1), 2 * self.a.stride(0)
        row[Group.B_PITCH], row[Group.B_BATCH_PITCH] = 2 * self.b.stride(1), 2 * self.b.stride(0)
        row[Group.OUT_PITCH] = self.out.stride(2 if self.out_m_major else 1)
        row[Group.OUT_BATCH_PITCH] = self.out.stride(0)
        row[[Group.M, Group.N, Group.K]] = rows, n, k
        row[Group.A_BATCH], row[Group.B_BATCH] = batches, num_groups
        _, k_blocks = atom_counts(1, num_k_blocks(k))
        block_bytes = k_blocks * ATOM_BYTES
        row[Group.SFA_ROW_BLOCKS] = self.a_scale.numel() // (block_bytes * batches)
        row[Group.SFB_ROW_BLOCKS] = self.b_scale.numel() // (block_bytes * num_groups)
        return table

    def address_places(self) -> list[int]:
        """Where in the flat launch table addresses go: of a, b, a_scale, b_scale, sizes, alpha if there is one, and out."""
        a, b, sfa, sfb, out = (
            NUM_COLUMNS + column for column in (Group.A, Group.B, Group.SFA, Group.SFB, Group.OUT)
        )
        alpha = [] if self.alpha is None else [Header.ALPHA]
        return [a, b, sfa, sfb, Header.GROUP_SIZES, *alpha, out]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name, tensor, and whether it is written."""
        for name in ("a", "b", "a_scale", "b_scale", "sizes", "alpha", "out"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor, name == "out"

    def reference(self) -> None:
        """Float64 sums, rounded as ``reference.grouped_gemm_reference`` says. Reads the sizes."""
        _, k_blocks = atom_counts(1, num_k_blocks(2 * self.a.shape[2]))
        n_bytes = self.b_scale.numel() // self.b.shape[0]
        for group, (batch, start, end, block) in enumerate(self._groups()):
            num_blocks = -(-(end - start) // SF_ATOM_ROWS)
            scale = self.a_scale.view(-1, k_blocks * ATOM_BYTES)[block : block + num_blocks].reshape(-1)
            results = grouped_gemm_reference(
                [self.a[batch, start:end]],
                [self.b[group]],
                [scale],
                [self.b_scale[group * n_bytes : (group + 1) * n_bytes]],
                None if self.alpha is None else self.alpha[group : group + 1],
                out_dtype=self.out.dtype,
            )
            self.out[batch, start:end] = results[0]

    def _groups(self) -> Iterator[tuple[int, int, int, int]]:
        """Batch, first row, end, and first scale block of every group, clipped to the rows that there are."""
        batches, rows, _ = self.a.shape
        row_blocks = self.table()[1, Group.SFA_ROW_BLOCKS]
        start = block = 0
        for group, size in enumerate(self.sizes.tolist()):
            if self.form == "masked":
                yield group, 0, max(min(size, rows), 0), group * int(row_blocks)
                continue
            end = max(min(size, rows), start)
            yield 0, start, end, block
            start, block = max(size, 0), block + -(-(end - start) // SF_ATOM_ROWS)

    def _num_cta(self) -> int:
        """Persistent CTAs: one an SM, and no more than there can be tiles."""
        config = self.config
        batches, rows, _ = self.a.shape
        num_groups, n, _ = self.b.shape
        tile_m, tile_n, _ = config.work_tile_mnk
        # Where ragged, every group but one may end a tile early.
        tiles_m = batches * -(-rows // tile_m) + (num_groups - 1 if self.form == "ragged" else 0)
        clusters = min((config.num_cta or self.num_sms) // config.cluster_size, tiles_m * -(-n // tile_n))
        return clusters * config.cluster_size


def check_device_groups(
    a, b, a_scale, b_scale, offs, masked_m, alpha, out, out_dtype, scale_layout, backend, config
) -> tuple[DeviceGroupsTask, torch.Tensor]:
    """The task, and the tensor to return: ``out``, or a new one.

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule; the message names rule, value and fix.
    """
    if offs is not None and masked_m is not None:
        raise ValueError(
            "offs and masked_m are both given; offs is of the ragged form, masked_m of the masked one"
        )
    if scale_layout != "blocked":
        raise UnsupportedProblem(
            f"scale_layout={scale_layout!r} with offs or masked_m: only the device knows where padding goes; quantize "
            "to blocked scales, every group's rows padded to 128"
        )
    ragged = offs is not None
    sizes_name, sizes = ("offs", offs) if ragged else ("masked_m", masked_m)
    factor = alpha if isinstance(alpha, torch.Tensor) else None
    named = {
        "a": a,
        "b": b,
        "a_scale": a_scale,
        "b_scale": b_scale,
        sizes_name: sizes,
        "alpha": factor,
        "out": out,
    }
    checks.check_choice("out_dtype", out_dtype, checks.OUT_DTYPES)
    device = checks.check_tensors(named)
    if sizes.dtype != torch.int32 or sizes.ndim != 1 or not sizes.is_contiguous():
        raise TypeError(
            f"{sizes_name} is {sizes.dtype} of shape {list(sizes.shape)}; expected contiguous int32 [G]: "
            f"{sizes_name}.to(torch.int32)"
        )
    num_groups = sizes.shape[0]
    matrix, weights = checks.fp4_bytes("a", a), checks.fp4_bytes("b", b)
    if matrix.ndim != (2 if ragged else 3):
        expected = "[sum of M, K/2]" if ragged else "[G, M_max, K/2]"
        raise ValueError(f"a has shape {list(a.shape)}; with {sizes_name} it is {expected}")
    matrix = matrix.unsqueeze(0) if ragged else matrix
    batches, rows, row_bytes = matrix.shape
    k = checks.check_k(2 * row_bytes)
    if weights.ndim != 3 or weights.shape[0] != num_groups or weights.shape[2] != row_bytes:
        raise ValueError(
            f"b has shape {list(b.shape)}; expected [G, N, K/2] = [{num_groups}, N, {row_bytes}] "
            f"({num_groups} entries in {sizes_name}, K={k} in a)"
        )
    if num_groups == 0 or (not ragged and batches != num_groups):
        raise ValueError(
            f"a has {batches} groups and {sizes_name} {num_groups}; expected as many, at least one"
        )
    n = weights.shape[1]
    for name, tensor in (("a", matrix), ("b", weights)):
        if tensor.numel() and tensor.stride(2) != 1:
            raise ValueError(
                f"{name} has stride {tensor.stride(2)} in K, not 1 (K-major); copy with .contiguous()"
            )
        pitches = [tensor.stride(i) for i in (0, 1) if tensor.shape[i] > 1]
        checks.check_aligned(name, tensor, pitches=pitches)
        checks.check_extent(f"rows of {name}", tensor.shape[1], checks.INT32_MAX)
    sfa = _scales("a_scale", a_scale, rows, k, None if ragged else batches)
    sfb = _scales("b_scale", b_scale, n, k, num_groups)
    shape = (rows, n) if ragged else (batches, rows, n)
    if out is not None:
        if out.dtype != out_dtype:
            raise TypeError(f"out has dtype {out.dtype} and out_dtype is {out_dtype}; make them agree")
        if tuple(out.shape) != shape:
            raise ValueError(f"out has shape {list(out.shape)}; expected {list(shape)}")
        if out.numel() and 1 not in out.stride()[-2:]:
            raise ValueError(
                f"out has strides {out.stride()}; expected unit stride in N or in M: torch.empty{shape}"
            )
        checks.check_overlap(out, {name: t for name, t in named.items() if name != "out"})
    factors = _factors(alpha, num_groups, device)
    result = torch.empty(shape, dtype=out_dtype, device=device) if out is None else out
    view = result.unsqueeze(0) if ragged else result
    form: Literal["ragged", "masked"] = "ragged" if ragged else "masked"
    arch, num_sms = backends.arch_and_sms(backend, device)
    return (
        DeviceGroupsTask(
            form,
            _pitched(matrix),
            _pitched(weights),
            sfa,
            sfb,
            sizes,
            factors,
            view,
            config or config_for_rows(arch, -(-rows // num_groups) if ragged else rows, n),
            num_sms,
        ),
        result,
    )


def _factors(alpha, num_groups: int, device: torch.device) -> torch.Tensor | None:
    """float32 [G] on the device, or None."""
    if isinstance(alpha, list | tuple):
        if len(alpha) != num_groups:
            raise ValueError(
                f"alpha has {len(alpha)} entries for {num_groups} groups; pass one number a group"
            )
        return torch.tensor(alpha, dtype=torch.float32, device=device)
    factors, step = checks.as_alpha(alpha, num_groups, device)
    return factors if factors is None or step else factors.expand(num_groups).contiguous()


def _pitched(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements with 16-byte pitches in the modes of extent 1, whose strides are never used."""
    batches, rows, row_bytes = tensor.shape
    aligned = -(-row_bytes // 16) * 16
    pitch = tensor.stride(1) if rows > 1 else aligned
    return tensor.as_strided(tensor.shape, (tensor.stride(0) if batches > 1 else aligned, pitch, 1))


def _scales(name: str, scale: torch.Tensor, rows: int, k: int, batches: int | None) -> torch.Tensor:
    """Blocked scales as flat bytes: of ``batches`` matrices, or, where None, of groups one after the other."""
    row_blocks, k_blocks = atom_counts(rows, num_k_blocks(k))
    row_bytes = k_blocks * ATOM_BYTES
    if scale.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise TypeError(f"{name} has dtype {scale.dtype}; expected float8_e4m3fn or uint8 (e4m3 codes)")
    if not scale.is_contiguous():
        raise ValueError(
            f"{name} has strides {scale.stride()}; blocked scales are contiguous: call .contiguous()"
        )
    flat = scale.view(torch.uint8).view(-1)
    size = flat.numel()
    if batches is None:
        if size % row_bytes or size < row_blocks * row_bytes:
            raise ValueError(
                f"{name} has {size} bytes; expected a multiple of {row_bytes} (128 rows of K={k}), and every group's "
                f"rows padded to 128: at least {row_blocks * row_bytes}"
            )
    elif size != batches * row_blocks * row_bytes:
        raise ValueError(
            f"{name} has {size} bytes; expected {batches * row_blocks * row_bytes}: {batches} groups of "
            f"{row_blocks} x {k_blocks} blocks of {ATOM_BYTES} bytes (128 rows x 4 scales)"
        )
    checks.check_aligned(name, flat)
    return flat
