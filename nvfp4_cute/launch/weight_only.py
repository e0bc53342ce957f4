"""One launch of a weight-only grouped product: 16-bit activations times quantized weights, in every form."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.weight_only_keys import WeightOnlyKey, weights_of
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import ATOM_ROWS, NVFP4, BlockFormat
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.simt import W4A16Task, check_weights
from nvfp4_cute.launch.task import Launch, Task
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header, float32_bits
from nvfp4_cute.operands.grouped import GroupedOperands
from nvfp4_cute.operands.products import Product
from nvfp4_cute.operands.rules import one_each, out_lines
from nvfp4_cute.planning.arch import WEIGHT_ONLY_ARCHS, base, num_clusters, weight_only_family_of
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.planning.schedule import TileSchedule, make_schedule
from nvfp4_cute.problem import INT32_MAX, TMA_ALIGN_BYTES, Form, Gate, GroupedProblem
from nvfp4_cute.problem import NVFP4 as NVFP4_RESULTS
from nvfp4_cute.reference import weight_only_dual_reference, weight_only_reference


@dataclass(frozen=True, eq=False)
class WeightOnlyTask:
    """Checked operands (``launch.task.Task``): of a list an entry a group, of the other forms one of all groups.

    Attributes:
        form: "list"; "ragged": ``sizes`` are the groups' inclusive ends in the rows of ``a``; "masked": their row counts;
            "batched": all rows of every batch.
        a: float16 or bfloat16 [batches, M, K], unit stride in K: one batch where ragged or listed, else one a group.
        b: uint8 [groups, N, K/2]: one group where listed.
        b_scale: uint8 [groups, bytes], blocked.
        out: [batches, M, N], unit stride in N.
        alpha: float32 [G], or None.
        sizes: int32 [G], or None where the host knows the sizes.
        gate: of a dual GEMM; None where there is one product.
        b2, b2_scale, alpha2: of a dual GEMM with weights of their own: like ``b``, ``b_scale`` and ``alpha``.
        config: how; None has it chosen.
        gpu: that it is computed on.
        b_format: of ``b`` and ``b2``.
        bias: float16, bfloat16 or float32 [N], of every group, or None.
    """

    form: Form
    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]
    b_scale: tuple[torch.Tensor, ...]
    out: tuple[torch.Tensor, ...]
    alpha: torch.Tensor | None
    sizes: torch.Tensor | None
    gate: Gate | None
    b2: tuple[torch.Tensor, ...]
    b2_scale: tuple[torch.Tensor, ...]
    alpha2: torch.Tensor | None
    config: KernelConfig | None
    gpu: Gpu
    b_format: BlockFormat = NVFP4
    bias: torch.Tensor | None = None

    @classmethod
    def of(
        cls, problem: GroupedProblem, operands: GroupedOperands, config: KernelConfig | None, gpu: Gpu
    ) -> "WeightOnlyTask":
        """Of checked operands with ``activations``. Raises UnsupportedProblem for results that no such kernel writes."""
        if problem.out_dtype == NVFP4_RESULTS:
            raise UnsupportedProblem(
                f"out_dtype={NVFP4_RESULTS!r} with 16-bit a: results have 16 or 32 bits; quantize them afterwards"
            )
        if problem.out_m_major:
            raise UnsupportedProblem(
                "out has contiguous columns; with 16-bit a the kernel writes rows: allocate it as torch.empty(M, N)"
            )
        gate = None
        if problem.activation is not None:
            gate = Gate(problem.activation, problem.limit, problem.weight_layout)
        b, b2 = operands.b, operands.b2
        return cls(
            problem.form,
            _batches(operands.activations),
            _batches(x.data for x in b),
            tuple(x.scale if x.scale.ndim > 1 else x.scale.unsqueeze(0) for x in b),
            _batches(operands.out),
            operands.alpha,
            operands.sizes,
            gate,
            _batches(x.data for x in b2),
            tuple(x.scale if x.scale.ndim > 1 else x.scale.unsqueeze(0) for x in b2),
            operands.alpha2,
            config,
            gpu,
            problem.b_format,
            operands.bias,
        )

    @property
    def device(self) -> torch.device:
        """The device of the operands."""
        return self.a[0].device

    @property
    def is_empty(self) -> bool:
        """Whether there can be no work, whatever the sizes are."""
        return not any(out.numel() for out in self.out)

    @property
    def num_groups(self) -> int:
        """Of all forms."""
        return len(self.a) if self.form == "list" else len(self.b[0])

    @cached_property
    def problem_sizes(self) -> tuple[tuple[int, int, int], ...]:
        """(m, n, k) of every group, n rows of ``b``; of the ragged form about the mean, of the masked one the most."""
        sizes = tuple((a.shape[1], b.shape[1], a.shape[2]) for a, b in zip(self.a, self.b, strict=True))
        if self.form == "list":
            return sizes
        ((m, n, k),) = sizes
        if self.form != "ragged":
            return sizes * self.num_groups
        mean, over = divmod(m, self.num_groups)
        return ((mean + 1, n, k),) * over + ((mean, n, k),) * (self.num_groups - over)

    @cached_property
    def chosen(self) -> KernelConfig:
        """The config to compute with."""
        if self.config is not None:
            return self.config
        family, is_ragged = weight_only_family_of(self.gpu.arch), self.form == "ragged"
        num_b = weights_of(self.gate)
        return family.choose(self.problem_sizes, self.gpu.num_sms, num_b, is_ragged, self.b_format)

    @cached_property
    def _schedule(self) -> TileSchedule:
        """Tiles of a list's groups."""
        config = self.chosen
        return make_schedule(self.problem_sizes, config.work_tile_mnk, self._most_clusters, config.split_k)

    @property
    def _most_clusters(self) -> int:
        """Clusters to launch at most."""
        family = weight_only_family_of(self.gpu.arch)
        return num_clusters(self.chosen, family.clusters_at_once(self.chosen, self.gpu.num_sms))

    def key(self, arch: str) -> WeightOnlyKey:
        """What to compile. Raises UnsupportedTarget, UnsupportedProblem or ConfigError."""
        check_weights(arch, self.a[0].dtype, self.b_format, weight_only_family_of(arch).PAIRS)
        most = base.max_list_groups(weights_of(self.gate))
        if self.form == "list" and len(self.a) > most:
            raise UnsupportedProblem(
                f"{len(self.a)} groups: kernel parameters of the list form hold {most}; split the lists into calls of as many"
            )
        first, has_alpha = self.out[0], self.alpha is not None
        dtypes = (self.a[0].dtype, first.dtype)
        bias_dtype = None if self.bias is None else self.bias.dtype
        variant = (self.num_groups, *dtypes, has_alpha, self.form, self.gate, self.b_format, bias_dtype)
        return WeightOnlyKey(arch, self.chosen, *variant).validated()

    def launch(self, gpu: Gpu, *, for_emulator: bool = False) -> Launch:
        """Compile for a GPU. Raises UnsupportedTarget, UnsupportedProblem or ConfigError."""
        kernel = get_kernel(self.key(gpu.arch), for_emulator=for_emulator)
        return Launch(kernel, self.table(), self.address_places(), natural=frozenset({int(Header.BIAS)}))

    def table(self) -> np.ndarray:
        """``launch_table``: a header and a row a group of a list, or one row."""
        is_list = self.form == "list"
        order = self._schedule.order if is_list else (0,)
        table = np.zeros((1 + len(order), NUM_COLUMNS), np.int64)
        header = table[0]
        header[Header.NUM_CTA] = self._num_cta()
        header[Header.NUM_GROUPS] = self.num_groups
        for column, tensor in (
            (Header.ALPHA, self.alpha),
            (Header.ALPHA2, self.alpha2),
            (Header.GROUP_SIZES, self.sizes),
            (Header.BIAS, self.bias),
        ):
            if tensor is not None:
                header[column] = tensor.data_ptr()
        if self.gate is not None and self.gate.limit is not None:
            header[Header.LIMIT] = float32_bits(self.gate.limit)
        if is_list:
            header[Header.NUM_TILES] = self._schedule.num_tiles
            table[1:, Group.TILE_OFFSET] = self._schedule.tile_offsets[:-1]
            table[1:, Group.GROUP_IDX] = order
        for row, group in zip(table[1:], order, strict=True):
            self._describe(row, group)
        return table

    def _describe(self, row: np.ndarray, group: int) -> None:
        """A group's operands, or those of all groups. Extents are at least 1: unused tensor maps are well formed."""
        a, b, out = self.a[group], self.b[group], self.out[group]
        row[Group.A], row[Group.B], row[Group.OUT] = a.data_ptr(), b.data_ptr(), out.data_ptr()
        row[Group.SFB] = self.b_scale[group].data_ptr()
        row[Group.A_PITCH], row[Group.A_BATCH_PITCH] = pitches(a)
        row[Group.B_PITCH], row[Group.B_BATCH_PITCH] = map(self.b_format.elements, pitches(b))
        row[Group.OUT_PITCH], row[Group.OUT_BATCH_PITCH] = out.stride(1), out.stride(0)
        if self.b2:
            row[Group.B2], row[Group.SFB2] = self.b2[group].data_ptr(), self.b2_scale[group].data_ptr()
            row[Group.B2_PITCH], row[Group.B2_BATCH_PITCH] = map(
                self.b_format.elements, pitches(self.b2[group])
            )
        row[[Group.M, Group.N, Group.K]] = np.maximum((a.shape[1], b.shape[1], a.shape[2]), 1)
        row[Group.A_BATCH], row[Group.B_BATCH] = len(a), len(b)
        block_bytes = self.b_format.atom_row_bytes(a.shape[2])
        row[Group.SFB_ROW_BLOCKS] = -(-max(b.shape[1], 1) // ATOM_ROWS)
        row[Group.SFB_BATCH_BLOCKS] = self.b_scale[group].stride(0) // block_bytes

    def _num_cta(self) -> int:
        """Persistent CTAs: as many as run at once, and no more than there can be tiles."""
        config = self.chosen
        if self.form == "list":
            return self._schedule.num_cta * config.cluster_size
        family = weight_only_family_of(self.gpu.arch)
        tiles = family.most_tiles(self.problem_sizes, config, self.form == "ragged")
        return min(self._most_clusters, tiles) * config.cluster_size

    def address_places(self) -> list[int]:
        """Where in the flat launch table addresses go: of what :meth:`tensors` names, in its order."""
        order = self._schedule.order if self.form == "list" else (0,)
        rows = {group: 1 + slot for slot, group in enumerate(order)}
        columns = {"a": Group.A, "b": Group.B, "b_scale": Group.SFB, "b2": Group.B2, "b2_scale": Group.SFB2}
        columns |= {"out": Group.OUT}
        header = {"alpha": Header.ALPHA, "alpha2": Header.ALPHA2, "sizes": Header.GROUP_SIZES}
        header |= {"bias": Header.BIAS}
        return [
            int(header[name]) if name in header else rows[group] * NUM_COLUMNS + columns[name]
            for name, group, _ in self._named()
        ]

    def mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and bytes of every operand that a tensor map describes."""
        for name in ("a", "b", "b2"):
            yield from ((f"{name}[{g}]", tensor) for g, tensor in enumerate(getattr(self, name)))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name, tensor, and whether it is written: inputs in the order of the operation's arguments, then outputs."""
        for name, group, tensor in self._named():
            yield f"{name}[{group}]", tensor, name == "out"

    def _named(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Name, group and tensor."""
        for name in ("a", "b", "b_scale", "sizes", "alpha", "b2", "b2_scale", "alpha2", "bias", "out"):
            found = getattr(self, name)
            entries = found if isinstance(found, tuple) else (found,) if found is not None else ()
            yield from ((name, group, tensor) for group, tensor in enumerate(entries))

    def reference(self) -> None:
        """Float64 sums, rounded as ``reference`` says. Reads the sizes."""
        for group, (out, a) in enumerate(self._group_rows()):
            at, part = (group, 0) if self.form == "list" else (0, group)
            b, scale = self.b[at][part], self.b_scale[at][part]
            alpha, alpha2 = (None if x is None else x[group] for x in (self.alpha, self.alpha2))
            if self.gate is None:
                out[:] = weight_only_reference(
                    a, b, scale, alpha, out.dtype, bias=self.bias, b_format=self.b_format
                )
                continue
            second = (self.b2[at][part], self.b2_scale[at][part]) if self.b2 else (None, None)
            weights = (b, second[0], scale, second[1])
            out[:] = weight_only_dual_reference(
                a, *weights, alpha, alpha2, out.dtype, b_format=self.b_format, **vars(self.gate)
            )

    def _group_rows(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every group's rows of the results and of ``a``."""
        if self.form == "list":
            yield from ((out[0], a[0]) for out, a in zip(self.out, self.a, strict=True))
            return
        (a,), (out,), start = self.a, self.out, 0
        ends = [a.shape[1]] * self.num_groups if self.sizes is None else self.sizes.tolist()
        for group, end in enumerate(ends):
            batch = 0 if self.form == "ragged" else group
            first = start if self.form == "ragged" else 0
            rows = slice(first, max(min(end, a.shape[1]), first))
            yield out[batch, rows], a[batch, rows]
            start = max(end, 0)


def product_task(product: Product, gpu: Gpu) -> Task:
    """One product of 16-bit ``a``, or a batch of them: by this kernel where there is one and estimates say it is faster."""
    a, b, out = product.a, product.b, product.out
    assert isinstance(a, torch.Tensor)
    batches, m, k = a.shape
    n = out.shape[2]
    is_plain = (n <= 1 or out.stride(2) == 1) and n <= out.stride(1) <= INT32_MAX
    if gpu.arch not in WEIGHT_ONLY_ARCHS or not out.numel() or not is_plain:
        return W4A16Task(product)
    family = weight_only_family_of(gpu.arch)
    if (None, b.format) not in family.PAIRS:
        return W4A16Task(product)
    if not family.is_faster_than_few_rows(m, b.rows, k, batches, gpu.num_sms, b.format):
        return W4A16Task(product)
    form: Form = "list" if batches == 1 else "batched"
    alpha = one_each(product.alpha, batches)
    rest = (alpha, None, None, (), (), None, None, gpu, b.format, product.bias)
    return WeightOnlyTask(form, (a,), (b.data,), (b.scale,), (out_lines("out", out, False),), *rest)


def _batches(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """[rows, columns] as one batch of them."""
    return tuple(x if x.ndim == 3 else x.unsqueeze(0) for x in tensors)


def pitches(tensor: torch.Tensor) -> tuple[int, int]:
    """Elements between rows and between batches of [batches, rows, K]; of 16 bytes where there is one, and it is not used."""
    batches, rows, k = tensor.shape
    step = TMA_ALIGN_BYTES // tensor.element_size()
    aligned = max(-(-k // step), 1) * step
    pitch = tensor.stride(1) if rows > 1 else aligned
    return pitch, tensor.stride(0) if batches > 1 else aligned
