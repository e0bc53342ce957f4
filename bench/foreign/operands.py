"""Operands of a cell in the layouts of every kernel, on the CPU or on the virtual GPU, with sums that are exact in fp32.

Elements have all bit patterns of e2m1. Scales are 1 or 2. Products are multiples of 1/4 of at most 144, so fp32 sums of
up to 29,000 of them are exact in any order, and every correct kernel gives the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.emulator.fronts.virtual_gpu import VirtualGpu, aligned_bytes
from nvfp4_cute.emulator.memory import host_view
from nvfp4_cute.formats.block_format import ATOM_ROWS, NVFP4

SCALES = (0x38, 0x40)
"""1 and 2 in e4m3."""
PATTERN, STRIDE = 1 << 22, 4099
"""Bytes of the repeated random pattern (one more, so that rows differ), and the shift of the pattern from group to group."""
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class GroupedOperands:
    """Rows of all groups in one matrix, and stacked weights.

    Attributes:
        sizes: (m, n, k) of every group.
        starts: first row of every group in ``a`` and ``out``.
        atoms: first scale atom of every group in ``a_scale``, of 128 rows.
        a, b: uint8 [rows, K/2] and [groups, N, K/2].
        a_scale: uint8 [atoms, K/64, 32, 4, 4].
        b_scale: uint8 [groups, N/128, K/64, 32, 4, 4].
        out: bf16 [rows, N], not initialized.
        device: "cpu", or "cuda" for the virtual GPU.
    """

    sizes: tuple[tuple[int, int, int], ...]
    starts: tuple[int, ...]
    atoms: tuple[int, ...]
    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor
    b_scale: torch.Tensor
    out: torch.Tensor
    device: str

    @property
    def rows(self) -> list[int]:
        """Rows of every group."""
        return [m for m, _, _ in self.sizes]

    def offs(self, *, from_zero: bool = False) -> torch.Tensor:
        """Returns the number of rows up to the end of every group as int32. from_zero: whether a zero comes first."""
        ends = list(accumulate(self.rows, initial=0))
        return torch.tensor(ends if from_zero else ends[1:], dtype=torch.int32, device=self.device)

    def scales_at(self, places: Sequence[int], count: int, rows: int = ATOM_ROWS) -> torch.Tensor:
        """Returns the scales of ``a`` in another order of atoms.

        Args:
            places: first atom of every group.
            count: number of atoms.
            rows: rows of a group that share an atom; the rest of the atom is unused.
        """
        placed = torch.zeros(count, *self.a_scale.shape[1:], dtype=torch.uint8, device=self.device)
        source, target = bytes_of(self.a_scale), bytes_of(placed)
        row, group = self._of_rows()
        of = source.reshape(self.a_scale.shape)[_places(np.array(self.atoms)[group], row, ATOM_ROWS)]
        target.reshape(placed.shape)[_places(np.array(places)[group], row, rows)] = of
        return placed

    def padded(self, most: int) -> "GroupedOperands":
        """Returns operands in which every group has ``most`` rows: its own, and then rows of zeros."""
        groups = len(self.sizes)
        starts, atoms_of_group = tuple(most * g for g in range(groups)), -(-most // ATOM_ROWS)
        a = torch.zeros(groups * most, self.a.shape[1], dtype=torch.uint8, device=self.device)
        row, group = self._of_rows()
        source, target = bytes_of(self.a).reshape(self.a.shape), bytes_of(a).reshape(a.shape)
        target[np.array(starts)[group] + row] = source[np.array(self.starts)[group] + row]
        atoms = tuple(atoms_of_group * g for g in range(groups))
        out = torch.full((len(a), self.out.shape[1]), torch.nan, dtype=torch.bfloat16, device=self.device)
        a_scale = self.scales_at(atoms, atoms_of_group * groups)
        return replace(self, starts=starts, atoms=atoms, a=a, a_scale=a_scale, out=out)

    def _of_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number in its group and the group of every row."""
        return np.concatenate([np.arange(m) for m in self.rows]), np.repeat(
            np.arange(len(self.rows)), self.rows
        )

    def expected(self, group: int, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Returns the exact sums of some rows and columns of a group, float32."""
        m, _, k = self.sizes[group]
        first, atoms = self.starts[group], -(-m // ATOM_ROWS)
        scale = self.a_scale[self.atoms[group] : self.atoms[group] + atoms]
        a = _numbers(self.a[first : first + m], scale, rows, k)
        return a @ _numbers(self.b[group], self.b_scale[group], columns, k).T


def _places(atoms: np.ndarray, row: np.ndarray, rows: int) -> tuple[Any, ...]:
    """Returns indices of the scales of rows of groups. `atoms`: first atom of each row's group, with `rows` rows in each."""
    atom, inside = atoms + row // rows, row % rows
    return atom, slice(None), inside % 32, inside // 32


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Returns the memory of a contiguous tensor, uint8. NumPy reads it as it is, also on the virtual GPU."""
    return host_view(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _numbers(data: torch.Tensor, scale: torch.Tensor, rows: np.ndarray, k: int) -> np.ndarray:
    """Returns dequantized rows of an operand, float32."""
    packed = bytes_of(data).reshape(-1, NVFP4.row_bytes(k))[rows]
    values = np.stack((VALUES[packed & 15], VALUES[packed >> 4]), -1).reshape(len(rows), k)
    atoms = bytes_of(scale).reshape(-1, scale.shape[-4], *scale.shape[-3:])
    blocks = np.arange(NVFP4.num_k_blocks(k))
    found = atoms[
        rows[:, None] // ATOM_ROWS,
        blocks // 4,
        rows[:, None] % 32,
        rows[:, None] % ATOM_ROWS // 32,
        blocks % 4,
    ]
    factors = np.where(found == SCALES[1], np.float32(2), np.float32(1))
    return values * factors.repeat(k // len(blocks), axis=-1)


def make(case: Case, gpu: VirtualGpu | None = None) -> GroupedOperands:
    """Makes the operands of a cell, on the virtual GPU or on the CPU. Weights of groups without rows are not filled."""
    generator = np.random.default_rng(1)
    elements = generator.integers(0, 256, PATTERN + 1, np.uint8)
    factors = np.array(SCALES, np.uint8)[generator.integers(0, 2, PATTERN // 8 + 1)]

    def tensor(shape: Sequence[int]) -> torch.Tensor:
        made = torch.from_numpy(aligned_bytes(prod(shape))[: prod(shape)]).reshape(tuple(shape))
        return made if gpu is None else gpu.torch_memory.adopt(made)

    def fill(target: torch.Tensor, pattern: np.ndarray, source: int = 0) -> torch.Tensor:
        target_bytes, first = bytes_of(target), 0
        while first < len(target_bytes):
            count = min(len(target_bytes) - first, len(pattern) - source)
            target_bytes[first : first + count] = pattern[source : source + count]
            first, source = first + count, 0
        return target

    _, n, k = case.sizes[0]
    starts = tuple(accumulate((m for m, _, _ in case.sizes), initial=0))
    atoms = tuple(accumulate((-(-m // ATOM_ROWS) for m, _, _ in case.sizes), initial=0))
    rows, groups = starts[-1], len(case.sizes)
    row_bytes = NVFP4.row_bytes(k)
    b, b_scale = tensor((groups, n, row_bytes)), tensor((groups, *NVFP4.scale_shape(n, k)))
    for group, (m, _, _) in enumerate(case.sizes):
        if m:
            fill(b[group], elements, group * STRIDE % len(elements))
            fill(b_scale[group], factors, group * STRIDE % len(factors))
    return GroupedOperands(
        sizes=case.sizes,
        starts=starts[:-1],
        atoms=atoms[:-1],
        a=fill(tensor((rows, row_bytes)), elements),
        a_scale=fill(tensor(NVFP4.scale_shape(ATOM_ROWS * atoms[-1], k)), factors),
        b=b,
        b_scale=b_scale,
        out=tensor((rows, n, 2)).view(torch.bfloat16).squeeze(-1),
        device="cpu" if gpu is None else "cuda",
    )
