"""A grouped GEMM whose group sizes live on the device: the ragged and the masked form, as a launch takes them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.scale_layout import ATOM_BYTES, ATOM_ROWS, atom_counts, num_k_blocks
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header, float32_bits
from nvfp4_cute.planning.arch import family_of, num_clusters
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import NVFP4, Gate, OutDtype
from nvfp4_cute.reference import grouped_dual_gemm_reference, grouped_gemm_reference


@dataclass(frozen=True)
class DeviceGroupsTask:
    """One launch of the ragged or masked form (``task.Task``).

    Attributes:
        form: "ragged": ``sizes`` are the groups' inclusive ends in the rows of ``a``; "masked": their row counts.
        a: uint8 [batches, rows, K/2]: one batch where ragged, one a group where masked.
        b: uint8 [G, N, K/2].
        a_scale: uint8, flat, blocked; where ragged, every group's rows begin a 128-row block.
        b_scale: uint8 [G, bytes], blocked.
        sizes: int32 [G].
        alpha: float32 [G], or None.
        out: [batches, rows, N], unit stride in N or in M; of NVFP4 results, data: uint8 [batches, rows, N/2].
        config: how.
        clusters_at_once: clusters that the GPU runs at once.
        out_scale: uint8, flat, blocked, of NVFP4 results, as ``a_scale``; None otherwise.
        out_global_scale: float32 [G] of NVFP4 results, or None.
        gate: of a dual GEMM; None where there is one product.
        b2, b2_scale: of a dual GEMM with separate weights: like ``b`` and ``b_scale``.
        alpha2: of a dual GEMM: float32 [G], or None where ``alpha`` is.
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
    clusters_at_once: int
    out_scale: torch.Tensor | None = None
    out_global_scale: torch.Tensor | None = None
    gate: Gate | None = None
    b2: torch.Tensor | None = None
    b2_scale: torch.Tensor | None = None
    alpha2: torch.Tensor | None = None

    @property
    def out_dtype(self) -> OutDtype:
        """Of the results."""
        return self.out.dtype if self.out_scale is None else NVFP4

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
        return self.out_scale is None and is_m_major(self.out)

    def key(self, arch: str) -> KernelKey:
        """What to compile. Raises UnsupportedTarget, UnsupportedProblem or ConfigError."""
        has_alpha, gate = self.alpha is not None, self.gate
        variant = (arch, self.config, 1, self.out_dtype, has_alpha, self.form, self.out_m_major)
        combined = () if gate is None else (gate.activation, gate.weight_layout, gate.limit is not None)
        key = KernelKey(*variant, *combined).validated()
        (_, rows, row_bytes), (num_groups, n, _) = self.a.shape, self.b.shape
        what = f"{num_groups} {self.form} groups, rows={rows}, N={n}, K={2 * row_bytes}"
        most = (self._most_tiles_m * self.config.work_tile_mnk[0], n, 2 * row_bytes)
        reason = family_of(arch).work_reason(what, [most], self.config)
        if reason is not None:
            raise UnsupportedProblem(reason)
        return key

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
        if self.alpha2 is not None:
            header[Header.ALPHA2] = self.alpha2.data_ptr()
        if self.gate is not None and self.gate.limit is not None:
            header[Header.LIMIT] = float32_bits(self.gate.limit)
        row[Group.A : Group.OUT + 1] = [
            tensor.data_ptr() for tensor in (self.a, self.b, self.a_scale, self.b_scale, self.out)
        ]
        row[Group.A_PITCH], row[Group.A_BATCH_PITCH] = 2 * self.a.stride(1), 2 * self.a.stride(0)
        row[Group.B_PITCH], row[Group.B_BATCH_PITCH] = 2 * self.b.stride(1), 2 * self.b.stride(0)
        if self.b2 is not None and self.b2_scale is not None:
            row[Group.B2], row[Group.SFB2] = self.b2.data_ptr(), self.b2_scale.data_ptr()
            row[Group.B2_PITCH], row[Group.B2_BATCH_PITCH] = 2 * self.b2.stride(1), 2 * self.b2.stride(0)
        row[Group.OUT_PITCH] = self.out.stride(2 if self.out_m_major else 1)
        row[Group.OUT_BATCH_PITCH] = self.out.stride(0)
        if self.out_scale is not None:
            row[Group.OUT_SCALE] = self.out_scale.data_ptr()
        if self.out_global_scale is not None:
            header[Header.OUT_GLOBAL_SCALE] = self.out_global_scale.data_ptr()
        row[[Group.M, Group.N, Group.K]] = rows, n, k
        row[Group.A_BATCH], row[Group.B_BATCH] = batches, num_groups
        _, k_blocks = atom_counts(1, num_k_blocks(k))
        block_bytes = k_blocks * ATOM_BYTES
        row[Group.SFA_ROW_BLOCKS] = self.a_scale.numel() // (block_bytes * batches)
        row[Group.SFB_ROW_BLOCKS] = self.b_scale.shape[1] // block_bytes
        row[Group.SFB_BATCH_BLOCKS] = self.b_scale.stride(0) // block_bytes
        return table

    def address_places(self) -> list[int]:
        """Where in the flat launch table addresses go: of what :meth:`tensors` names, in its order."""
        header = {
            "sizes": Header.GROUP_SIZES,
            "alpha": Header.ALPHA,
            "alpha2": Header.ALPHA2,
            "out_global_scale": Header.OUT_GLOBAL_SCALE,
        }
        row = {
            "a": Group.A,
            "b": Group.B,
            "a_scale": Group.SFA,
            "b_scale": Group.SFB,
            "b2": Group.B2,
            "b2_scale": Group.SFB2,
            "out": Group.OUT,
            "out_scale": Group.OUT_SCALE,
        }
        return [
            int(header[name]) if name in header else NUM_COLUMNS + row[name] for name, _, _ in self.tensors()
        ]

    def mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and bytes of every operand that a tensor map describes."""
        named = (("a", self.a), ("b", self.b), ("b2", self.b2))
        return ((name, tensor) for name, tensor in named if tensor is not None)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name, tensor, and whether it is written: inputs in the order of the operation's arguments, then outputs."""
        weights = ("b2", "b2_scale", "alpha2")
        inputs = ("a", "b", "a_scale", "b_scale", "sizes", "alpha", *weights, "out_global_scale")
        for name in (*inputs, "out", "out_scale"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor, name not in inputs

    def reference(self) -> None:
        """Float64 sums, rounded as ``reference.grouped_gemm_reference`` says. Reads the sizes."""
        _, k_blocks = atom_counts(1, num_k_blocks(2 * self.a.shape[2]))
        dtype = torch.float32 if self.out_scale is not None else self.out.dtype
        for group, (batch, start, end, block) in enumerate(self.groups()):
            num_blocks = -(-(end - start) // ATOM_ROWS)
            scales = self.a_scale.view(-1, k_blocks * ATOM_BYTES)
            if block + num_blocks > len(scales):
                raise ValueError(
                    f"a_scale has {len(scales)} blocks of {ATOM_ROWS} rows, and group {group} ends in block "
                    f"{block + num_blocks}; pad every group's rows to {ATOM_ROWS}"
                )
            scale = scales[block : block + num_blocks].reshape(-1)
            results = self._group_reference(group, self.a[batch, start:end], scale, dtype)
            if self.out_scale is None:
                self.out[batch, start:end] = results[0]
            elif end > start:
                factor = None if self.out_global_scale is None else self.out_global_scale[group]
                quantized = block_scaled.quantize(results[0], global_scale=factor)
                self.out[batch, start:end] = quantized.data
                row_bytes = quantized.scale[0].numel()
                self.out_scale.view(-1, row_bytes)[block : block + num_blocks] = quantized.scale.view(
                    torch.uint8
                ).view(num_blocks, row_bytes)

    def _group_reference(
        self, group: int, a: torch.Tensor, a_scale: torch.Tensor, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """The results of one group, in a list of one."""
        b, b_scale = [self.b[group]], [self.b_scale[group]]
        alpha, alpha2 = (x if x is None else x[group : group + 1] for x in (self.alpha, self.alpha2))
        if self.gate is None:
            return grouped_gemm_reference([a], b, [a_scale], b_scale, alpha, out_dtype=dtype)
        b2, b2_scale = (x if x is None else [x[group]] for x in (self.b2, self.b2_scale))
        return grouped_dual_gemm_reference(
            [a], b, b2, [a_scale], b_scale, b2_scale, alpha, alpha2, dtype, **vars(self.gate)
        )

    def groups(self) -> Iterator[tuple[int, int, int, int]]:
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
            start, block = max(size, 0), block + -(-(end - start) // ATOM_ROWS)

    def _num_cta(self) -> int:
        """Persistent CTAs: one an SM, and no more than there can be tiles, unless K tiles are dealt."""
        config = self.config
        clusters = num_clusters(config, self.clusters_at_once)
        if config.stream_k:
            return clusters * config.cluster_size
        tiles_n = -(-self.b.shape[1] // config.work_tile_mnk[1])
        return min(clusters, self._most_tiles_m * tiles_n) * config.cluster_size

    @property
    def _most_tiles_m(self) -> int:
        """Tiles that all groups have at most along M: where ragged, every group but one may end a tile early."""
        batches, rows, _ = self.a.shape
        further = len(self.b) - 1 if self.form == "ragged" else 0
        return batches * -(-rows // self.config.work_tile_mnk[0]) + further


def is_m_major(out: torch.Tensor) -> bool:
    """Whether columns of [batches, rows, N] are contiguous, not rows."""
    _, rows, n = out.shape
    return out.stride(2) != 1 and n > 1 and rows > 1
