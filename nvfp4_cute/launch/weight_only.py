"""One launch of a weight-only grouped product: 16-bit activations times quantized weights, in every form."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from nvfp4_cute.batch_invariance import is_batch_invariant
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.weight_only_keys import WeightOnlyKey, weights_of
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import ATOM_ROWS
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.entries import GroupsTask, address_places, entries
from nvfp4_cute.launch.plan import check_list_groups
from nvfp4_cute.launch.simt import W4A16Task, check_weights
from nvfp4_cute.launch.task import ByRows, Launch, Task
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header, float32_bits
from nvfp4_cute.operands.grouped import GroupedOperands
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.operands.products import Product
from nvfp4_cute.operands.rules import one_each, out_lines
from nvfp4_cute.planning.arch import (
    choose_weight_only,
    is_faster_than_few_rows,
    num_clusters,
    parts_of_k,
    warp_mma,
    weight_only_family_of,
)
from nvfp4_cute.planning.choose import check_order
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.planning.rows import rounded_rows
from nvfp4_cute.planning.schedule import TileSchedule, make_schedule
from nvfp4_cute.problem import INT32_MAX, TMA_ALIGN_BYTES, Form, GroupedProblem
from nvfp4_cute.reference import weight_only_dual_reference, weight_only_reference


@dataclass(frozen=True, eq=False)
class WeightOnlyTask(GroupsTask):
    """One launch for checked operands with ``activations``.

    Attributes:
        config: None chooses one.
        gpu: GPU that computes.
    """

    config: KernelConfig | None
    gpu: Gpu

    @classmethod
    def of(
        cls, problem: GroupedProblem, operands: GroupedOperands, config: KernelConfig | None, gpu: Gpu
    ) -> "WeightOnlyTask":
        """Makes a task. Raises UnsupportedProblem for results with contiguous columns, which no such kernel writes."""
        if problem.out_m_major:
            raise UnsupportedProblem(
                "out has contiguous columns; with 16-bit a the kernel writes rows: allocate it as torch.empty(M, N)"
            )
        return cls(problem, operands, config, gpu)

    @cached_property
    def a(self) -> tuple[torch.Tensor, ...]:
        """Activations [batches, M, K], one entry per group of a list or one for all groups."""
        return tuple(map(_batches, self.operands.activations))

    @cached_property
    def out(self) -> tuple[torch.Tensor, ...]:
        """Results [batches, M, N], one entry per group of a list or one for all groups."""
        return tuple(map(_batches, self.operands.out))

    @cached_property
    def problem_sizes(self) -> tuple[tuple[int, int, int], ...]:
        """(m, n, k) of every group, n rows of ``b``; for the ragged form about the mean, for the masked form the largest."""
        if self.problem.form == "routed":
            return self._sizes_to_choose_for
        sizes = tuple((a.shape[1], b.rows, b.k) for a, b in zip(self.a, self.operands.b, strict=True))
        return sizes if self.problem.form == "list" else self._shared(sizes[0])

    def _shared(self, size: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
        """Returns the sizes of all groups in one operand: equal ones, or ragged ones about the mean."""
        groups = self.problem.num_groups
        if self.problem.form != "ragged":
            return (size,) * groups
        (m, n, k) = size
        mean, over = divmod(m, groups)
        return ((mean + 1, n, k),) * over + ((mean, n, k),) * (groups - over)

    @property
    def _sizes_to_choose_for(self) -> tuple[tuple[int, int, int], ...]:
        """Returns ``problem_sizes`` with rows rounded up (``planning.rows``), except for lists with several groups."""
        if len(self.a) > 1:
            return self.problem_sizes
        (a,), (b,) = self.a, self.operands.b
        rows = 1 if self.problem.form == "routed" else rounded_rows(a.shape[1])
        size = rows, b.rows, b.k
        return (size,) if self.problem.form == "list" else self._shared(size)

    @cached_property
    def chosen(self) -> KernelConfig:
        """The config to compute with."""
        problem, gpu = self.problem, self.gpu
        if self.config is not None:
            check_order(self.config, problem)
            return self.config
        how = (
            weights_of(problem.gate),
            problem.form == "ragged",
            problem.b_format,
            parts_of_k(problem, gpu.arch, gpu.num_sms),
        )
        if problem.form == "routed":  # one family has this form
            return warp_mma.choose(self._sizes_to_choose_for, gpu.num_sms, *how)
        return choose_weight_only(gpu.arch, self._sizes_to_choose_for, gpu.num_sms, *how)

    @cached_property
    def _schedule(self) -> TileSchedule:
        """Returns the schedule of a list's tiles."""
        config = self.chosen
        return make_schedule(self.problem_sizes, config.work_tile_mnk, self._most_clusters, config.split_k)

    @property
    def _most_clusters(self) -> int:
        """Returns the largest number of clusters to launch."""
        family = weight_only_family_of(self.gpu.arch, self.chosen)
        return num_clusters(self.chosen, family.clusters_at_once(self.chosen, self.gpu.num_sms))

    def key(self, arch: str) -> WeightOnlyKey:
        """Returns the weight-only grouped kernel's key. Raises UnsupportedTarget, UnsupportedProblem or ConfigError."""
        problem, dtype = self.problem, self.a[0].dtype
        out_dtype: Any = problem.out_dtype  # never a format's name: ``rules.check_result_of_pair``
        family = weight_only_family_of(arch, self.chosen)
        check_weights(arch, dtype, problem.b_format, family.PAIRS)
        step = family.K_MULTIPLE
        for b in self.operands.b:
            if b.k % step:
                raise UnsupportedProblem(f"K={b.k} is not a multiple of {step}: pad K")
        groups = problem.num_groups
        if problem.form == "list":
            check_list_groups(groups, weights_of(problem.gate))
        form, formats = problem.form, (problem.gate, problem.b_format, problem.bias_dtype)
        variant = (groups, dtype, out_dtype, problem.has_alpha, form, *formats)
        return WeightOnlyKey(arch, self.chosen, *variant).validated()

    def launch(self, gpu: Gpu, *, for_emulator: bool = False) -> Launch:
        """Compiles the weight-only kernel for a GPU. Raises UnsupportedTarget, UnsupportedProblem or ConfigError."""
        kernel = get_kernel(self.key(gpu.arch), for_emulator=for_emulator)
        rows = self.rows(self.chosen.work_tile_mnk[:2], self._clusters())
        natural = frozenset({int(Header.BIAS)})
        return Launch(kernel, self.table(), self.address_places(), natural=natural, rows=rows)

    def _clusters(self) -> ByRows:
        """Returns how the number of CTAs of a list's only group follows from its rows."""
        config, (_, n, k) = self.chosen, self.problem_sizes[0]
        family = weight_only_family_of(self.gpu.arch, config)
        of_tile = family.most_tiles(((1, n, k),), config, False)
        size = config.cluster_size
        return ByRows(
            int(Header.NUM_CTA), config.work_tile_mnk[0], of_tile * size, self._most_clusters * size
        )

    @property
    def _described(self) -> tuple[int, ...]:
        """Returns the groups with a row of the table each: all groups of a list, or the one entry for all."""
        return self._schedule.order if self.problem.form == "list" else (0,)

    def table(self) -> np.ndarray:
        """Returns the launch table: a header and one row per group of a list, or one row for all groups."""
        problem, order = self.problem, self._described
        table = np.zeros((1 + len(order), NUM_COLUMNS), np.int64)
        header = table[0]
        header[Header.NUM_CTA] = self._num_cta()
        header[Header.NUM_GROUPS] = problem.num_groups
        if problem.limit is not None:
            header[Header.LIMIT] = float32_bits(problem.limit)
        if problem.form == "routed":
            assert self.operands.sizes is not None
            header[Header.CHOICES] = problem.num_groups // self.a[0].shape[1]
            header[Header.FIRST_EXPERT] = self.operands.first_expert
            header[Header.ID_WORDS] = self.operands.sizes.element_size() // 4
        if problem.form == "list":
            header[Header.NUM_TILES] = self._schedule.num_tiles
            table[1:, Group.TILE_OFFSET] = self._schedule.tile_offsets[:-1]
            table[1:, Group.GROUP_IDX] = order
        for row, group in zip(table[1:], order, strict=True):
            self._describe(row, group)
        named = entries(self.operands, problem)
        table.reshape(-1)[self.address_places()] = [entry.tensor.data_ptr() for entry in named]
        return table

    def _describe(self, row: np.ndarray, group: int) -> None:
        """Describes a group's operands, or those of all groups.

        Extents are at least 1, so that unused tensor maps are well formed.
        """
        a, b, out = self.a[group], self.operands.b[group], self.out[group]
        weights, scale = _batches(b.data), b.scale
        row[Group.A_PITCH], row[Group.A_BATCH_PITCH] = pitches(a)
        row[Group.B_PITCH], row[Group.B_BATCH_PITCH] = map(b.format.elements, pitches(weights))
        row[Group.OUT_PITCH], row[Group.OUT_BATCH_PITCH] = out.stride(1), out.stride(0)
        if self.operands.b2:
            second = _batches(self.operands.b2[group].data)
            row[Group.B2_PITCH], row[Group.B2_BATCH_PITCH] = map(b.format.elements, pitches(second))
        row[[Group.M, Group.N, Group.K]] = np.maximum((a.shape[1], b.rows, b.k), 1)
        row[Group.A_BATCH], row[Group.B_BATCH] = len(a), len(weights)
        row[Group.SFB_ROW_BLOCKS] = -(-max(b.rows, 1) // ATOM_ROWS)
        batch_bytes = scale.stride(0) if scale.ndim > 1 else scale.numel()
        row[Group.SFB_BATCH_BLOCKS] = batch_bytes // b.atom_row_bytes

    def _num_cta(self) -> int:
        """Returns the number of persistent CTAs: those that run at once, but at most the possible number of tiles."""
        config = self.chosen
        if self.problem.form == "list" and not config.stream_k:
            return self._schedule.num_cta * config.cluster_size
        family = weight_only_family_of(self.gpu.arch, config)
        tiles = family.most_tiles(self.problem_sizes, config, self.problem.form == "ragged")
        return min(self._most_clusters, tiles) * config.cluster_size

    def address_places(self) -> list[int]:
        """Returns the places of the addresses of :meth:`tensors` in the flat launch table, in their order."""
        return address_places(self.operands, self.problem, self._described)

    def reference(self) -> None:
        """Computes float64 sums, rounded like ``reference``. Reads sizes from the device."""
        operands, problem = self.operands, self.problem
        is_list, b_format = problem.form == "list", problem.b_format
        ids = None
        if problem.form == "routed" and operands.sizes is not None:
            ids = (operands.sizes - operands.first_expert).tolist()
        for group, (out, a) in enumerate(self._group_rows()):
            expert = group if ids is None else ids[group]
            if ids is not None and not 0 <= expert < operands.b[0].batches:
                out.zero_()
                continue
            at, part = (group, 0) if is_list else (0, expert)
            b, scale = _weights_of_group(operands.b[at], part)
            alpha, alpha2 = (None if x is None else x[expert] for x in (operands.alpha, operands.alpha2))
            if problem.gate is None:
                out[:] = weight_only_reference(
                    a, b, scale, alpha, out.dtype, bias=operands.bias, b_format=b_format
                )
                continue
            second = _weights_of_group(operands.b2[at], part) if operands.b2 else (None, None)
            weights = (b, second[0], scale, second[1])
            bias = None if operands.bias is None else operands.bias[expert]
            out[:] = weight_only_dual_reference(
                a, *weights, alpha, alpha2, out.dtype, bias=bias, b_format=b_format, **vars(problem.gate)
            )

    def _group_rows(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterates over every group's rows of the results and of ``a``."""
        form, sizes = self.problem.form, self.operands.sizes
        if form == "list":
            yield from ((out[0], a[0]) for out, a in zip(self.out, self.a, strict=True))
            return
        (a,), (out,), start = self.a, self.out, 0
        if form == "routed":
            yield from zip(
                out[0].split(1), a[0].repeat_interleave(out.shape[1] // a.shape[1], 0).split(1), strict=True
            )
            return
        ends = [a.shape[1]] * self.problem.num_groups if sizes is None else sizes.tolist()
        for group, end in enumerate(ends):
            batch = 0 if form == "ragged" else group
            first = start if form == "ragged" else 0
            rows = slice(first, max(min(end, a.shape[1]), first))
            yield out[batch, rows], a[batch, rows]
            start = max(end, 0)


def product_task(product: Product, gpu: Gpu) -> Task:
    """Returns the task of a product, or batch, with 16-bit ``a``: this kernel if it exists and estimates favor it."""
    a, b, out = product.a, product.b, product.out
    assert isinstance(a, torch.Tensor)
    batches, m, k = a.shape
    n = out.shape[2]
    is_plain, is_invariant = (
        (n <= 1 or out.stride(2) == 1) and n <= out.stride(1) <= INT32_MAX,
        is_batch_invariant(),
    )
    if is_invariant and not is_plain:
        raise UnsupportedProblem(
            "out has contiguous columns; batch-invariant products of 16-bit a write rows: allocate it as torch.empty(M, N)"
        )
    if not out.numel() or not is_plain:
        return W4A16Task(product)
    size = rounded_rows(m), b.rows, k, batches, b.format
    if b.format.order == "rows" and not is_invariant:
        if not is_faster_than_few_rows(gpu.arch, gpu.num_sms, *size):
            return W4A16Task(product)
    form: Form = "list" if batches == 1 else "batched"
    alpha, sizes = one_each(product.alpha, batches), ((m, b.rows, k),) * batches
    problem = GroupedProblem(
        sizes,
        form,
        out.dtype,
        alpha is not None,
        b_format=b.format,
        bias_dtype=product.bias_dtype,
        is_dense=True,
    )
    lines = (out_lines("out", out, False),)
    operands = GroupedOperands((), (b,), lines, alpha, activations=(a,), bias=product.bias)
    return WeightOnlyTask(problem, operands, None, gpu)


def _batches(tensor: torch.Tensor) -> torch.Tensor:
    """Views [rows, columns] as one batch."""
    return tensor if tensor.ndim == 3 else tensor.unsqueeze(0)


def _weights_of_group(x: Operand, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [N, bytes] and the bytes of their scales, for one batch."""
    return _batches(x.data)[part], x.scale if x.scale.ndim == 1 else x.scale[part]


def pitches(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns elements between rows and between batches of [batches, rows, K]; 16 bytes' worth for unused pitches."""
    batches, rows, k = tensor.shape
    step = TMA_ALIGN_BYTES // tensor.element_size()
    aligned = max(-(-k // step), 1) * step
    pitch = tensor.stride(1) if rows > 1 else aligned
    return pitch, tensor.stride(0) if batches > 1 else aligned
