"""A grouped GEMM of any form as a task: list, ragged, masked, batched, or the layers of a chain."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from nvfp4_cute.compile.cache import is_planning
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_format import (
    PADDED_ALIGN_BYTES,
    PADDED_K_MULTIPLE,
    TMA_ALIGN_BYTES,
    ScaleLayout,
)
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch import tuned
from nvfp4_cute.launch.bands import divided
from nvfp4_cute.launch.entries import entries
from nvfp4_cute.launch.plan import config_of, key_of, make_plan, mma_of, most_tiles_m, sizes_of
from nvfp4_cute.launch.task import ByRows, Launch, Rows
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header
from nvfp4_cute.operands.grouped import GroupedOperands, ragged_places
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.planning.arch import clusters_at_once, family_of, num_clusters
from nvfp4_cute.planning.choose import check_order
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.planning.rows import rounded_rows
from nvfp4_cute.problem import RESULT_FORMATS, GroupedProblem
from nvfp4_cute.reference import (
    grouped_dual_gemm_reference,
    grouped_gemm_reference,
    weight_only_dual_reference,
    weight_only_reference,
)


class GroupRows(NamedTuple):
    """Location of a group's rows: ``start`` to ``end`` of batch ``batch`` in entry ``entry``, and its first scale block."""

    entry: int
    batch: int
    start: int
    end: int
    block: int


@dataclass(frozen=True, eq=False)
class GroupedTask:
    """One launch of a grouped GEMM (``task.Task``). ``config=None`` uses the tuned or estimated config for the GPU."""

    problem: GroupedProblem
    operands: GroupedOperands
    config: KernelConfig | None = None

    @classmethod
    def of(
        cls,
        problem: GroupedProblem,
        operands: GroupedOperands,
        config: KernelConfig | None,
        early_weights: bool,
        scale_layout: ScaleLayout,
    ) -> "GroupedTask":
        """Makes the task with the caller's promise ``early_weights``.

        A launch converts scales that are not blocked right before. Early loads would not wait for it, so the promise is then
        dropped.

        Raises UnsupportedProblem for 16-bit ``a`` and results with contiguous columns, which no such kernel writes.
        """
        if problem.out_m_major and not problem.a_format.has_scales:
            raise UnsupportedProblem(
                "out has contiguous columns; with 16-bit a the kernel writes rows: allocate it as torch.empty(M, N)"
            )
        is_early = early_weights and scale_layout == "blocked"
        return cls(replace(problem, early_weights=is_early), operands, config)

    @property
    def device(self) -> torch.device:
        """Device of the operands of all groups."""
        return self.operands.device

    @property
    def is_empty(self) -> bool:
        """Returns whether there is no work, whatever sizes the device has."""
        return not any(out.numel() for out in self.operands.out)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Iterates over name, tensor, and whether it is written: inputs in the order of arguments, then outputs."""
        return ((e.name, e.tensor, e.is_written) for e in entries(self.operands, self.problem))

    def rows(self, tile: tuple[int, int], clusters: ByRows | None = None) -> Rows | None:
        """Returns how the launch table depends on the rows of a list's only group; the device knows those of other forms.

        Args:
            tile: rows and columns of a work tile.
            clusters: how the number of CTAs does; None if it is the same for all rows.
        """
        problem = self.problem
        if problem.form != "list":
            return Rows(0)
        if problem.num_groups > 1 or problem.out_m_major or problem.out_format is not None:
            return None
        ((m, n, _),), (tile_m, tile_n) = problem.sizes, tile
        numbers = ByRows(NUM_COLUMNS + Group.M), ByRows(int(Header.NUM_TILES), tile_m, -(-n // tile_n))
        return Rows(m, numbers if clusters is None else (*numbers, clusters))

    def mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterates over name and bytes of every operand of groups that a tensor map describes."""
        operands = self.operands
        rows = {id(x.data) for side in (operands.a, operands.b, operands.b2) for x in side}
        return ((name, tensor) for name, tensor, _ in self.tensors() if id(tensor) in rows)

    def config_on(self, gpu: Gpu) -> KernelConfig:
        """Returns the caller's config, the tuned one, or an estimate, in this order."""
        if self.config is not None:
            check_order(self.config, self.problem)
            return self.config
        if not self.problem.a_format.has_scales:
            return config_of(self._to_choose_for, gpu.arch, gpu.num_sms)
        config = tuned.find(self.problem, gpu, lambda tried: replace(self, config=tried).key(gpu))
        return config or config_of(self.problem, gpu.arch, gpu.num_sms, self._num_rows)

    @property
    def _to_choose_for(self) -> GroupedProblem:
        """Returns a weight-only problem with its rows rounded up (``planning.rows``), except for lists with several groups."""
        num_rows = rounded_rows(self.operands.a[0].rows) if len(self.operands.a) == 1 else None
        return replace(self.problem, sizes=sizes_of(self.operands, self.problem, num_rows))

    @property
    def _num_rows(self) -> int | None:
        """Returns the rows of ragged groups, rounded up, if there are fewer than groups; None otherwise."""
        (a, *_), groups = self.operands.a, self.problem.num_groups
        return rounded_rows(a.rows) if self.problem.form == "ragged" and a.rows < groups else None

    def key(self, gpu: Gpu) -> KernelKey:
        """Returns the kernel key, with bands if the launch has them.

        Raises UnsupportedTarget, UnsupportedProblem or ConfigError.
        """
        problem, config = self.problem, self.config_on(gpu)
        if problem.form in ("ragged", "masked", "routed"):
            a, b = self.operands.a[0], self.operands.b[0]
            what = f"{problem.num_groups} {problem.form} groups, rows={a.rows}, N={b.rows}, K={a.k}"
            most = (most_tiles_m(self.operands, problem, config) * config.work_tile_mnk[0], b.rows, a.k)
            reason = family_of(gpu.arch, (a.format, b.format), config).work_reason(what, [most], config)
            if reason is not None:
                raise UnsupportedProblem(reason)
        return key_of(divided(problem, self.operands, config, gpu)[0], gpu.arch, config)

    def launch(self, gpu: Gpu, *, for_emulator: bool = False) -> Launch:
        """Plans and compiles for a GPU. Raises UnsupportedTarget, UnsupportedProblem or ConfigError."""
        self.key(gpu)
        config, align_bytes = self.config_on(gpu), self._check_padded(gpu)
        problem, operands = divided(self.problem, self.operands, config, gpu)
        # Bypasses the cache while planning, because a cached plan would not ask for its kernel.
        make = make_plan.__wrapped__ if is_planning() else make_plan
        plan = make(problem, gpu.arch, gpu.num_sms, config, for_emulator=for_emulator)
        table, places = plan.table(operands), plan.address_places(operands)
        rows = range(NUM_COLUMNS, table.size, NUM_COLUMNS)
        natural = frozenset({int(Header.BIAS), *(row + Group.ROW_SCALE for row in rows)})
        has_bands = operands is not self.operands
        by_rows = None if has_bands else self.rows(config.work_tile_mnk[:2], self._clusters(config, gpu))
        return Launch(plan.kernel, table, places, plan, align_bytes, natural, operands, by_rows)

    def _clusters(self, config: KernelConfig, gpu: Gpu) -> ByRows | None:
        """Returns how the number of CTAs depends on the rows of a list's only group; None if it is the same for all rows."""
        (_, n, k), (tile_m, tile_n, _) = self.problem.sizes[0], config.work_tile_mnk
        formats = self.problem.a_format, self.problem.b_format
        most = num_clusters(config, clusters_at_once(gpu.arch, config, gpu.num_sms, formats))
        if not formats[0].has_scales:
            family: Any = family_of(gpu.arch, formats, config)
            of_tile = family.most_clusters(((1, n, k),), config, False)
        elif config.stream_k:
            return None
        else:
            of_tile = -(-n // tile_n)
        size = config.cluster_size
        return ByRows(int(Header.NUM_CTA), tile_m, of_tile * size, most * size)

    def _check_padded(self, gpu: Gpu) -> int:
        """Returns the alignment of operands in bytes. Raises UnsupportedProblem for 4-bit operands that TMA cannot unpack.

        Some MMAs need elements padded to bytes (``cuTensorMapEncodeTiled``, CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B).
        """
        mma, operands = mma_of(gpu.arch, self.problem), self.operands
        sides = (("a", operands.a), ("b", operands.b), ("b2", operands.b2))
        padded = [(name, x) for name, side in sides for x in side if mma.pads(x.format)]
        for name, x in padded:
            pitches = [x.data.stride(-2)] + [x.data.stride(0)] * (x.batches > 1)
            places = (*pitches, x.data.data_ptr())
            if x.k % PADDED_K_MULTIPLE or any(place % PADDED_ALIGN_BYTES for place in places):
                raise UnsupportedProblem(
                    f"{gpu.arch}: {name} of {x.format.title} has K={x.k}, rows (and batches) {pitches} bytes apart, and begins "
                    f"at 0x{places[-1]:x}; with 8-bit elements TMA pads 4-bit ones to bytes, in rows of a multiple of "
                    f"{PADDED_K_MULTIPLE} elements, all places multiples of {PADDED_ALIGN_BYTES} bytes: pad K of both "
                    f"operands, or pass {name}.clone()"
                )
        return PADDED_ALIGN_BYTES if padded else TMA_ALIGN_BYTES

    def groups(self) -> Iterator[GroupRows]:
        """Iterates over the locations of all groups, clipped to the existing rows. Reads sizes from the device."""
        operands, form = self.operands, self.problem.form
        if form == "list":
            for g, x in enumerate(operands.a):
                yield GroupRows(g, 0, 0, x.rows, 0)
            return
        (a,) = operands.a
        if form == "routed":
            choices = self.problem.num_groups // a.rows
            yield from (
                GroupRows(0, 0, c // choices, c // choices + 1, 0) for c in range(self.problem.num_groups)
            )
            return
        row_blocks = a.scale.numel() // a.atom_row_bytes // a.batches if a.format.has_scales else 0
        sizes = [a.rows] * a.batches if operands.sizes is None else operands.sizes.tolist()
        if form == "ragged":
            places = ragged_places(sizes, a.rows, a.format.atom_rows)
            yield from (GroupRows(0, 0, *place) for place in places)
            return
        for g, size in enumerate(sizes):
            yield GroupRows(0, g, 0, max(min(size, a.rows), 0), g * row_blocks)

    def reference(self) -> None:
        """Computes every group in float64, rounded like ``reference``; quantizes float32 results where needed."""
        if not self.problem.a_format.has_scales:
            return self._weight_only_reference()
        operands = self.operands
        for g, rows in enumerate(self.groups()):
            a = operands.a[rows.entry]
            num_blocks = -(-(rows.end - rows.start) // a.format.atom_rows)
            blocks = a.scale.view(-1, a.atom_row_bytes)
            scale = blocks[rows.block : rows.block + num_blocks].reshape(-1)
            data, out = a.data, operands.out[rows.entry]
            if data.ndim == 3:
                data = data[rows.batch]
            out = (out[rows.batch] if out.ndim == 3 else out)[rows.start : rows.end]
            of_rows = None
            if a.row_scale is not None:
                of_rows = [a.row_scale.view(-1, a.rows)[rows.batch, rows.start : rows.end]]
            result = self._group_reference(g, data[rows.start : rows.end], scale, of_rows)
            if not operands.out_scale:
                out.copy_(result)
            elif rows.end > rows.start:
                factors, out_format = operands.out_global_scale, RESULT_FORMATS[self.problem.out_dtype]
                quantized = block_scaled.quantize(
                    result, format=out_format, global_scale=None if factors is None else factors[g]
                )
                out.copy_(quantized.data.view(torch.uint8))
                scale = quantized.scale.view(torch.uint8)
                written = operands.out_scale[rows.entry].view(-1, scale[0].numel())
                target = written[rows.block : rows.block + num_blocks]
                target.copy_(scale.view(target.shape))

    def _weight_only_reference(self) -> None:
        operands, problem = self.operands, self.problem
        ids = None
        if problem.form == "routed" and operands.sizes is not None:
            ids = (operands.sizes - operands.first_expert).tolist()
        for g, rows in enumerate(self.groups()):
            expert = g if ids is None else ids[g]
            a, out = operands.a[rows.entry].data, operands.out[rows.entry]
            a, out = (x[rows.batch] if x.ndim == 3 else x for x in (a, out))
            out = out[g : g + 1] if ids is not None else out[rows.start : rows.end]
            if ids is not None and not 0 <= expert < operands.b[0].batches:
                out.zero_()
                continue
            (b, scale), second = (self._weights(side, expert) for side in (operands.b, operands.b2))
            alpha, alpha2 = (None if x is None else x[expert] for x in (operands.alpha, operands.alpha2))
            a, b_format = a[rows.start : rows.end], problem.b_format
            if problem.gate is None:
                out[:] = weight_only_reference(
                    a, b, scale, alpha, out.dtype, bias=operands.bias, b_format=b_format
                )
                continue
            weights = b, second[0], scale, second[1]
            bias = None if operands.bias is None else operands.bias[expert]
            out[:] = weight_only_dual_reference(
                a, *weights, alpha, alpha2, out.dtype, bias=bias, b_format=b_format, **vars(problem.gate)
            )

    def _weights(self, side: tuple[Operand, ...], g: int) -> tuple[Any, Any]:
        """Returns the bytes of a group's weights and of their scales; None twice without the side."""
        if not side:
            return None, None
        x, batch = (side[g], 0) if self.problem.form == "list" else (side[0], g)
        return (x.data, x.scale) if x.data.ndim == 2 else (x.data[batch], x.scale[batch])

    def _group_reference(
        self, g: int, a: torch.Tensor, a_scale: torch.Tensor, row_scale: list | None
    ) -> torch.Tensor:
        operands, problem = self.operands, self.problem
        sides = (self._weights(side, g) for side in (operands.b, operands.b2))
        given: list[Any] = [None if x is None else [x] for side in sides for x in side]
        b, b_scale, b2, b2_scale = given
        alpha, alpha2 = (x if x is None else x[g : g + 1] for x in (operands.alpha, operands.alpha2))
        dtype = problem.out_dtype if isinstance(problem.out_dtype, torch.dtype) else torch.float32
        if problem.activation is None:
            return grouped_gemm_reference(
                [a], b, [a_scale], b_scale, alpha, dtype, bias=operands.bias, row_scale=row_scale,
                a_format=problem.a_format, b_format=problem.b_format,
            )[0]  # fmt: skip
        return grouped_dual_gemm_reference(
            [a], b, b2, [a_scale], b_scale, b2_scale, alpha, alpha2, dtype,
            activation=problem.activation, limit=problem.limit, weight_layout=problem.weight_layout,
            bias=None if operands.bias is None else [operands.bias[g]], row_scale=row_scale,
            a_format=problem.a_format, b_format=problem.b_format,
        )[0]  # fmt: skip
