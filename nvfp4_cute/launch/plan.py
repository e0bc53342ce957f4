"""``Plan``: a grouped GEMM ready to launch, with the compiled kernel and the schedule, but without data."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.compiler import CompiledKernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.launch.entries import address_places, entries
from nvfp4_cute.launch.task import Launch
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header, float32_bits
from nvfp4_cute.operands.grouped import GroupedOperands
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.planning.arch import base, clusters_at_once, family_of, num_clusters, of_groups
from nvfp4_cute.planning.choose import choose_config, of_rounded_rows, problem_of_mean
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.planning.schedule import TileSchedule, make_schedule
from nvfp4_cute.problem import INT32_MAX, GroupedProblem


@dataclass(frozen=True)
class Plan:
    """How one problem is launched; reusable for any operands of the same sizes.

    Attributes:
        problem: sizes and types.
        schedule: tiles of all groups. Its slot order is the order of every list in the launch. None if the sizes are on the
            device.
        kernel: the compiled code, shared by all problems with the same number of groups.
        num_clusters: number of clusters to launch, at most the number of tiles unless K tiles are distributed.
    """

    problem: GroupedProblem
    schedule: TileSchedule | None
    kernel: CompiledKernel
    num_clusters: int

    @property
    def _described(self) -> tuple[int, ...]:
        """Returns the entries with a row of the table each, in the order of rows: all of a list, or the one for all groups."""
        return self.schedule.order if self.schedule is not None and self.problem.form == "list" else (0,)

    def table(self, operands: GroupedOperands) -> np.ndarray:
        """Returns the launch table (``launch_table``) for these operands."""
        problem, config = self.problem, self.kernel.key.config
        described, mma = self._described, mma_of(self.kernel.key.arch, problem)
        table = np.zeros((1 + len(described), NUM_COLUMNS), np.int64)
        header = table[0]
        header[Header.NUM_GROUPS] = problem.num_groups
        if problem.limit is not None:
            header[Header.LIMIT] = float32_bits(problem.limit)
        if problem.form == "routed":
            assert operands.sizes is not None
            header[Header.CHOICES] = problem.num_groups // operands.a[0].rows
            header[Header.FIRST_EXPERT] = operands.first_expert
            header[Header.ID_WORDS] = operands.sizes.element_size() // 4
        clusters = self.num_clusters
        if self.schedule is not None:
            header[Header.NUM_TILES] = self.schedule.num_tiles
            table[1:, Group.TILE_OFFSET] = self.schedule.tile_offsets[: len(described)]
        if self.schedule is None or config.stream_k:
            clusters = min(clusters, most_clusters(operands, problem, self.kernel.key.arch, config))
        header[Header.NUM_CTA] = clusters * config.cluster_size
        for row, g in zip(table[1:], described, strict=True):
            b2 = operands.b2[g] if operands.b2 else None
            for column, value in _extents(operands.a[g], operands.b[g], b2, mma).items():
                row[column] = value
            out = operands.out[g]
            row[Group.OUT_PITCH] = out.stride(-1 if problem.out_m_major else -2)
            row[Group.OUT_BATCH_PITCH] = out.stride(0) if out.ndim == 3 and len(out) > 1 else 0
            row[Group.GROUP_IDX] = operands.owners[g] if operands.owners else g
        table.reshape(-1)[self.address_places(operands)] = [
            entry.tensor.data_ptr() for entry in entries(operands, problem)
        ]
        return table

    def address_places(self, operands: GroupedOperands) -> list[int]:
        """Returns the places of addresses in the flat launch table of this plan."""
        return address_places(operands, self.problem, self._described)

    def launch(self, operands: GroupedOperands, stream: int = 0) -> None:
        """Enqueues the kernel on a stream of the operands' device. Does nothing for a problem without tiles."""
        if self.schedule is None or self.schedule.num_tiles:
            launch = Launch(self.kernel, self.table(operands), self.address_places(operands), self)
            _held = launch.attach(operands.device, stream)
            launch.enqueue(stream)


def mma_of(arch: str, problem: GroupedProblem) -> base.Mma:
    """Returns the MMA with which tensor cores multiply a problem's operands."""
    formats = problem.a_format, problem.b_format
    return family_of(arch, formats).MMA[formats]


def _extents(a: Operand, b: Operand, b2: Operand | None, mma: base.Mma) -> dict[Group, int]:
    """Returns pitches and extents, in elements, and scale blocks. Unused ones also have to be well formed."""
    row_blocks = [
        max(x.scale.numel() // (x.atom_row_bytes * x.batches), 1) if x.format.has_scales else 1
        for x in (a, b)
    ]
    found = {
        Group.M: max(a.rows, 1),
        Group.N: max(b.rows, 1),
        Group.K: a.k,
        Group.A_PITCH: a.pitch,
        Group.B_PITCH: b.pitch,
        Group.A_BATCH_PITCH: _batch_pitch(a, mma),
        Group.B_BATCH_PITCH: _batch_pitch(b, mma),
        Group.B2_BATCH_PITCH: _batch_pitch(b2 or b, mma),
        Group.A_BATCH: a.batches,
        Group.B_BATCH: b.batches,
        Group.SFA_ROW_BLOCKS: row_blocks[0],
        Group.SFB_ROW_BLOCKS: row_blocks[1],
        Group.SFB_BATCH_BLOCKS: b.scale.stride(0) // b.atom_row_bytes if b.batches > 1 else row_blocks[1],
    }
    return found if b2 is None else found | {Group.B2_PITCH: b2.pitch}


def _batch_pitch(x: Operand, mma: base.Mma) -> int:
    return x.batch_pitch if x.batches > 1 else x.format.elements(mma.align_bytes(x.format))


def most_tiles_m(operands: GroupedOperands, problem: GroupedProblem, config: KernelConfig) -> int:
    """Returns an upper bound of the tiles along M of groups on the device; ragged groups may each end in a partial tile."""
    (a,) = operands.a
    further = problem.num_groups - 1 if problem.form == "ragged" else 0
    return a.batches * -(-a.rows // config.work_tile_mnk[0]) + further


def most_clusters(operands: GroupedOperands, problem: GroupedProblem, arch: str, config: KernelConfig) -> int:
    """Returns an upper bound of the clusters that find work if the device knows the sizes, or with stream-K."""
    if not problem.a_format.has_scales:
        family: Any = family_of(arch, (problem.a_format, problem.b_format), config)
        return family.most_clusters(sizes_of(operands, problem), config, problem.form == "ragged")
    if config.stream_k:
        return INT32_MAX
    return most_tiles_m(operands, problem, config) * -(-operands.b[0].rows // config.work_tile_mnk[1])


def sizes_of(
    operands: GroupedOperands, problem: GroupedProblem, num_rows: int | None = None
) -> tuple[tuple[int, int, int], ...]:
    """Returns (m, n, k) of every group, where n counts rows of ``b``.

    Ragged groups divide all rows evenly. Masked groups have the most rows that they may have.

    num_rows: replaces the number of rows of ``a``, if ``a`` is one tensor for all groups.
    """
    if problem.form == "list" and num_rows is None:
        return tuple((a.rows, b.rows, b.k) for a, b in zip(operands.a, operands.b, strict=True))
    b, groups = operands.b[0], problem.num_groups
    rows = operands.a[0].rows if num_rows is None else num_rows
    if problem.form == "ragged":
        return of_groups(rows, b.rows, b.k, groups)
    return ((1 if problem.form == "routed" else rows, b.rows, b.k),) * groups


@lru_cache(maxsize=1024)
def config_of(problem: GroupedProblem, arch: str, sm_count: int, num_rows: int | None = None) -> KernelConfig:
    """Returns the config that is estimated for a problem, cached because the estimate takes milliseconds.

    num_rows: see ``planning.choose.problem_of_mean``.

    Raises UnsupportedTarget for ``arch`` without a kernel.
    """
    if problem.a_format.has_scales and problem.form in ("ragged", "masked"):
        out_format, is_ragged = problem.out_format, problem.form == "ragged"
        formats = problem.a_format, problem.b_format
        mean = problem_of_mean(
            problem.num_groups, problem.sizes[0], problem.gate, out_format, is_ragged, formats, num_rows
        )
        problem = replace(mean, batch_invariant=problem.batch_invariant)
    elif problem.is_chain:
        # Layers of a chain run one after the other, so the best config for one is the best for all.
        problem = replace(problem, sizes=problem.sizes[:1])
    return _config_of_rounded(of_rounded_rows(problem), arch, sm_count)


@lru_cache(maxsize=1024)
def _config_of_rounded(problem: GroupedProblem, arch: str, sm_count: int) -> KernelConfig:
    """Caches the config by rounded rows, because a server passes any number of rows."""
    return choose_config(problem, arch, sm_count)


@lru_cache(maxsize=256)
def make_plan(
    problem: GroupedProblem,
    arch: str,
    sm_count: int,
    config: KernelConfig | None = None,
    *,
    for_emulator: bool = False,
) -> Plan:
    """Chooses a config, compiles or finds the kernel, and makes the schedule. Plans are cached by all arguments.

    Args:
        problem: a problem of any form; a batched one with one batch becomes a list.
        arch: target such as ``sm_100a``.
        sm_count: SMs of the device; also the number of persistent CTAs unless ``config`` has another one.
        config: tile shape and pipeline depths; None lets the family choose.
        for_emulator: whether the launch goes to the emulator.

    Raises:
        UnsupportedTarget: ``arch`` has no kernel.
        ConfigError: ``config`` cannot be built.
        UnsupportedProblem: there are more groups than kernel parameters can hold, or more work than ``stream_k`` can count.
    """
    problem = _as_launched(problem)
    config = config or config_of(problem, arch, sm_count)
    key = key_of(problem, arch, config)
    clusters = num_clusters(
        config, clusters_at_once(arch, config, sm_count, (problem.a_format, problem.b_format))
    )
    schedule = None
    if problem.form in ("list", "batched"):
        schedule = make_schedule(problem.sizes, config.work_tile_mnk, clusters, config.split_k)
        clusters = clusters if config.stream_k else schedule.num_cta
    return Plan(problem, schedule, get_kernel(key, for_emulator=for_emulator), clusters)


def key_of(problem: GroupedProblem, arch: str, config: KernelConfig) -> KernelKey:
    """Returns the key of a problem's kernel. Raises as :func:`make_plan` does, except for work of sizes on the device."""
    problem = _as_launched(problem)
    if problem.form == "list":
        check_list_groups(problem.num_groups, problem.num_b, problem.num_more_addresses)
    key = KernelKey.of(arch, config, problem)
    if problem.form in ("list", "batched"):
        family = family_of(arch, (problem.a_format, problem.b_format), config)
        reason = family.work_reason(f"groups of sizes {problem.sizes[0]}, ...", problem.sizes, config)
        if reason is not None:
            raise UnsupportedProblem(reason)
    return key


def _as_launched(problem: GroupedProblem) -> GroupedProblem:
    """Converts a single batch to a list with one group."""
    if problem.form == "batched" and problem.num_groups == 1:
        return replace(problem, form="list")
    return problem


def check_list_groups(num_groups: int, num_b: int = 1, num_more: int = 0) -> None:
    """Raises UnsupportedProblem for more groups of the list form than kernel parameters can hold.

    Args:
        num_groups: number of groups.
        num_b, num_more: see ``base.max_list_groups``.
    """
    max_groups = base.max_list_groups(num_b, num_more)
    if num_groups > max_groups:
        group_bytes = base.param_bytes_per_group(num_b, num_more)
        raise UnsupportedProblem(
            f"{num_groups} groups: the list form passes {group_bytes} bytes a "
            f"group as kernel parameters, {base.KERNEL_PARAM_BYTES} bytes hold {max_groups} groups; split the lists "
            f"into calls of at most {max_groups}"
        )
