"""Plan: a grouped GEMM ready to launch. It holds the compiled kernel and the schedule, never data."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch

from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.compiler import CompiledKernel, table_pointer
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.launch.workspace import attach
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header, float32_bits
from nvfp4_cute.planning.arch import base, clusters_at_once, family_of, num_clusters
from nvfp4_cute.planning.choose import choose_config
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.planning.schedule import TileSchedule, make_schedule
from nvfp4_cute.problem import NVFP4, TMA_ALIGN_BYTES, GroupedOperands, GroupedProblem

# Two elements a byte
TMA_ALIGN_ELEMENTS = 2 * TMA_ALIGN_BYTES


@dataclass(frozen=True)
class Plan:
    """How one problem is launched: reusable for any operands of the same sizes.

    Attributes:
        problem: sizes and types.
        schedule: tiles of all groups; its slot order is the order of every list in the launch.
        kernel: the compiled code, shared by all problems with as many groups.
        num_clusters: to launch: no more than there are tiles, unless K tiles are dealt.
    """

    problem: GroupedProblem
    schedule: TileSchedule
    kernel: CompiledKernel
    num_clusters: int

    @property
    def _described(self) -> tuple[int, ...]:
        """The groups with a row of the table each: all of a list, the first of a batch."""
        return self.schedule.order if self.problem.form == "list" else (0,)

    @cached_property
    def _fixed_columns(self) -> np.ndarray:
        """The launch table without addresses and pitches."""
        table = np.zeros((1 + len(self._described), NUM_COLUMNS), np.int64)
        table[0, Header.NUM_GROUPS] = self.problem.num_groups
        if self.problem.limit is not None:
            table[0, Header.LIMIT] = float32_bits(self.problem.limit)
        config = self.kernel.key.config
        table[0, Header.NUM_TILES] = self.schedule.num_tiles
        table[0, Header.NUM_CTA] = self.num_clusters * config.cluster_size
        table[1:, [Group.A_BATCH, Group.B_BATCH]] = (
            self.problem.num_groups if self.problem.form == "batched" else 1
        )
        for row, group, tile_offset in zip(
            table[1:], self._described, self.schedule.tile_offsets, strict=False
        ):
            row[[Group.M, Group.N, Group.K]] = np.maximum(self.problem.sizes[group], 1)
            row[Group.SFA_ROW_BLOCKS], row[Group.SFB_ROW_BLOCKS] = -(-row[[Group.M, Group.N]] // 128)
            row[Group.SFB_BATCH_BLOCKS] = row[Group.SFB_ROW_BLOCKS]
            row[Group.TILE_OFFSET] = tile_offset
            row[Group.GROUP_IDX] = group
        return table

    def table(self, operands: GroupedOperands) -> np.ndarray:
        """The launch table (``launch_table``) for these operands."""
        table = self._fixed_columns.copy()
        if operands.alpha is not None:
            table[0, Header.ALPHA] = operands.alpha.data_ptr()
        if self.problem.form == "batched":
            table[1, Group.A_BATCH_PITCH : Group.OUT_BATCH_PITCH + 1] = (
                2 * _batch_bytes(operands.a),
                2 * _batch_bytes(operands.b),
                _batch_bytes(operands.out) // operands.out[0].element_size(),
            )
        else:  # There is one batch, whose pitch is never used but has to be well formed.
            table[1:, [Group.A_BATCH_PITCH, Group.B_BATCH_PITCH, Group.B2_BATCH_PITCH]] = TMA_ALIGN_ELEMENTS
        table[1:, Group.A : Group.OUT_PITCH + 1] = [
            (
                operands.a[group].data_ptr(),
                operands.b[group].data_ptr(),
                operands.a_scale[group].data_ptr(),
                operands.b_scale[group].data_ptr(),
                operands.out[group].data_ptr(),
                2 * operands.a[group].stride(0),
                2 * operands.b[group].stride(0),
                operands.out[group].stride(1 if self.problem.out_m_major else 0),
            )
            for group in self._described
        ]
        second = operands.second
        if second is not None:
            if second.b:
                table[1:, Group.B2 : Group.B2_PITCH + 1] = [
                    (
                        second.b[group].data_ptr(),
                        second.b_scale[group].data_ptr(),
                        2 * second.b[group].stride(0),
                    )
                    for group in self.schedule.order
                ]
            if second.alpha is not None:
                table[0, Header.ALPHA2] = second.alpha.data_ptr()
        if operands.chain is not None:
            table[0, Header.CHAIN] = operands.chain.data_ptr()
        scales = operands.out_scales
        if scales is not None:
            table[1:, Group.OUT_SCALE] = [scales.scale[group].data_ptr() for group in self._described]
            if scales.global_scale is not None:
                table[0, Header.OUT_GLOBAL_SCALE] = scales.global_scale.data_ptr()
        return table

    def address_places(self, *, has_global_scale: bool = False) -> list[int]:
        """Where in the flat launch table addresses go.

        Of a, b, a_scale, b_scale, alpha if there is one; of a dual GEMM with weights of their own b2, b2_scale and alpha2;
        the global scales if there are any, out, and the scales of NVFP4 results. Of a batch, those of its tensors; of a
        list, those of every group's, in the caller's order.
        """
        problem = self.problem
        row_of_group = {group: 1 + slot for slot, group in enumerate(self._described)}

        def of_groups(*columns: Group) -> list[int]:
            groups = sorted(row_of_group)
            return [row_of_group[group] * NUM_COLUMNS + column for column in columns for group in groups]

        places = of_groups(Group.A, Group.B, Group.SFA, Group.SFB) + [Header.ALPHA] * problem.has_alpha
        if problem.activation is not None:
            places += of_groups(Group.B2, Group.SFB2) if problem.weight_layout == "separate" else []
            places += [Header.ALPHA2] * problem.has_alpha
        places += [Header.OUT_GLOBAL_SCALE] * has_global_scale + of_groups(Group.OUT)
        return places + (of_groups(Group.OUT_SCALE) if problem.out_dtype == NVFP4 else [])

    def launch(self, operands: GroupedOperands, queue: int = 0) -> None:
        """Enqueue the kernel. Copies no data, waits for nothing, and allocates only where a ``workspace`` has to grow.

        A problem without tiles is a no-op.

        Args:
            operands: checked operands of this plan's problem.
            queue: handle of the device's current CUDA queue (``torch.cuda.current_stream().cuda_stream``).
        """
        import cuda.bindings.driver as cuda

        if self.schedule.num_tiles:
            table = self.table(operands)
            _held = attach(self.kernel, table, operands.device, queue)
            self.kernel.function(table_pointer(table.ctypes.data), cuda.CUstream(queue))


@lru_cache(maxsize=256)
def make_plan(
    problem: GroupedProblem,
    arch: str,
    sm_count: int,
    config: KernelConfig | None = None,
    *,
    for_emulator: bool = False,
) -> Plan:
    """Choose, compile (or find) and schedule; a plan is remembered by all of its arguments.

    Args:
        problem: list-form problem, or a batched one, which becomes a list where there is one batch.
        arch: target such as ``sm_100a``.
        sm_count: SMs of the device: the number of persistent CTAs unless ``config`` says otherwise.
        config: tile shape and pipeline depths; None has the family choose.
        for_emulator: whether the launch goes to the emulator.

    Raises:
        UnsupportedTarget: no kernel for ``arch``. ConfigError: ``config`` cannot be built.
        UnsupportedProblem: more groups than kernel parameters hold, or more work than ``stream_k`` counts.
    """
    if problem.num_groups == 1:
        problem = replace(problem, form="list")
    is_quantized = problem.out_dtype == NVFP4
    max_groups = base.max_list_groups(problem.num_b, is_quantized)
    if problem.form == "list" and problem.num_groups > max_groups:
        group_bytes = base.param_bytes_per_group(problem.num_b, is_quantized)
        raise UnsupportedProblem(
            f"{problem.num_groups} groups: the list form passes {group_bytes} bytes a "
            f"group as kernel parameters, {base.KERNEL_PARAM_BYTES} bytes hold {max_groups} groups; split the lists "
            f"into calls of at most {max_groups}"
        )
    # Layers of a chain follow each other: what suits one suits all.
    chosen_for = replace(problem, sizes=problem.sizes[:1]) if problem.is_chain else problem
    config = config or choose_config(chosen_for, arch, sm_count)
    key = KernelKey.of(arch, config, problem)
    what = f"groups of sizes {problem.sizes[0]}, ..."
    reason = family_of(arch).work_reason(what, problem.sizes, config)
    if reason is not None:
        raise UnsupportedProblem(reason)
    clusters = num_clusters(config, clusters_at_once(arch, config, sm_count))
    schedule = make_schedule(problem.sizes, config.work_tile_mnk, clusters, config.split_k)
    return Plan(
        problem,
        schedule,
        get_kernel(key, for_emulator=for_emulator),
        clusters if config.stream_k else schedule.num_cta,
    )


def _batch_bytes(batches: tuple[torch.Tensor, ...]) -> int:
    """Bytes from one of several tensors at equal distances to the next one."""
    return batches[1].data_ptr() - batches[0].data_ptr()
