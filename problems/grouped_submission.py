"""Host code of the submissions that use sm_100a's grouped GEMM kernel, with one group or several.

Compiled code is cached by number of groups and config, schedules by sizes; neither holds data. Pointers, sizes and tensor maps
are kernel parameters, so nothing is copied to the device and nothing waits. Every call computes every output.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache

import torch

from nvfp4_cute.errors import ConfigError
from nvfp4_cute.formats.block_format import NVFP4, NVFP4_PAIR, BlockFormat, Formats, NumberType
from nvfp4_cute.gpus.targets import B200
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header
from nvfp4_cute.planning.arch import sm100
from nvfp4_cute.planning.choose import choose_config
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.planning.schedule import TileSchedule, make_schedule
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.problems.submission_parts import scale_address, table_pointer

# Rows per block of scales.
SF_ROWS = 128
Sizes = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class GroupTensors:
    """The tensors of one group, on the device.

    Attributes:
        a: [M, K/2, 1] float4_e2m1fn_x2, K-major; for another format [M, K(/2), 1] of its elements.
        b: [N, K/2, 1], in the same layout.
        sfa, sfb: float8_e4m3fn, or the other format's dtype, [32, 4, rm, 4, rk, 1], views of contiguous [1, rm, rk, 32, 4, 4].
        c: [M, N, 1] float16, N-major, written.
        b2, sfb2: second weights of a dual GEMM, shaped like ``b`` and ``sfb``.
    """

    a: torch.Tensor
    b: torch.Tensor
    sfa: torch.Tensor
    sfb: torch.Tensor
    c: torch.Tensor
    b2: torch.Tensor | None = None
    sfb2: torch.Tensor | None = None

    def size(self, a_format: BlockFormat) -> tuple[int, int, int]:
        """Returns (m, n, k) in elements."""
        return self.a.shape[0], self.b.shape[0], a_format.elements(self.a.shape[1])


def frozen_configs(
    problems: Iterable[GroupedProblem], config: KernelConfig | None = None, formats: Formats = NVFP4_PAIR
) -> dict[str, str]:
    """Returns an export's values for ``CONFIGS``, ``DEFAULT_CONFIG`` (with stages counted) and ``FORMATS``.

    Args:
        problems: timed problems, one config each, as ``select`` chooses for a B200. Other shapes use the config among these
            with the smallest clusters, on all SMs.
        config: config for every shape instead.
        formats: formats of ``a`` and of every ``b``, a pair of ``sm100.MMA``.

    Raises:
        ConfigError: a B200 has no kernel with ``config`` for these formats.
    """
    a_format, b_format = formats
    problems = [replace(problem, a_format=a_format, b_format=b_format) for problem in problems]
    num_b = 1 if problems[0].activation is None else 2
    frozen = {} if formats == NVFP4_PAIR else {"FORMATS": f"({', '.join(map(_expression, formats))})"}
    if config is not None:
        reason = sm100.unsupported_reason(config, num_b, formats)
        if reason is not None:
            raise ConfigError(f"config {config.to_name()}: {reason}")
        return frozen | {"CONFIGS": "{}", "DEFAULT_CONFIG": repr(sm100.resolve(config, num_b, formats))}
    chosen = {
        p.sizes: sm100.resolve(choose_config(p, B200.arch, B200.num_sms), num_b, formats) for p in problems
    }
    default = replace(min(chosen.values(), key=lambda c: c.cluster_size), num_cta=None)
    rows = [f"    {sizes!r}: {config!r}," for sizes, config in chosen.items()]
    return frozen | {"CONFIGS": "\n".join(["{", *rows, "}"]), "DEFAULT_CONFIG": repr(default)}


def _expression(record: BlockFormat | NumberType) -> str:
    """Returns the Python expression of a record with an export's names."""
    values = (getattr(record, field.name) for field in fields(record))
    parts = (_expression(x) if isinstance(x, NumberType) else repr(x) for x in values)
    return f"{type(record).__name__}({', '.join(parts)})"


def launch(
    groups: list[GroupTensors],
    configs: Mapping[Sizes, KernelConfig],
    default_config: KernelConfig,
    activation: str | None = None,
    formats: Formats | None = None,
) -> None:
    """Enqueues C = A @ B^T for every group, or with an ``activation`` C = activation(A @ B^T) * (A @ B2^T).

    Args:
        groups: at least one.
        configs: config by the sizes of all groups.
        default_config: for sizes that ``configs`` does not have.
        activation: "silu", "gelu_tanh" or "relu2".
        formats: formats of ``a`` and of every ``b``; None for NVFP4.
    """
    sizes = tuple(group.size(a_format_of(formats)) for group in groups)
    config = configs.get(sizes, default_config)
    schedule = _schedule(sizes, config)
    table = _launch_table(schedule, config, groups, sizes)
    num_b = 1 if activation is None else 2
    if formats is None:
        resolved = sm100.resolve(config, num_b)
    else:
        resolved = sm100.resolve(config, num_b, formats)
    code = _compiled(replace(resolved, num_cta=None), len(sizes), activation, formats)
    code(table_pointer(table.buffer_info()[0]))


@cache
def _schedule(sizes: Sizes, config: KernelConfig) -> TileSchedule:
    num_cta = config.num_cta or torch.cuda.get_device_properties(0).multi_processor_count
    return make_schedule(sizes, config.work_tile_mnk, num_cta // config.cluster_size)


def _launch_table(
    schedule: TileSchedule, config: KernelConfig, groups: list[GroupTensors], sizes: Sizes
) -> array:
    """Returns a header row and one row per slot for the compiled host code (``launch_table``)."""
    header = [0] * NUM_COLUMNS
    header[Header.NUM_GROUPS], header[Header.NUM_TILES] = len(groups), schedule.num_tiles
    header[Header.NUM_CTA] = schedule.num_cta * config.cluster_size
    table = array("q", header)
    for slot, index in enumerate(schedule.order):
        group, row = groups[index], [0] * NUM_COLUMNS
        m, n, k = sizes[index]
        row[Group.A], row[Group.B], row[Group.OUT] = (t.data_ptr() for t in (group.a, group.b, group.c))
        row[Group.SFA], row[Group.SFB] = scale_address(group.sfa), scale_address(group.sfb)
        row[Group.A_PITCH], row[Group.B_PITCH], row[Group.OUT_PITCH] = k, k, n
        # Pitches of the only batch are never used, but have to be well formed.
        row[Group.A_BATCH_PITCH], row[Group.B_BATCH_PITCH], row[Group.B2_BATCH_PITCH] = k, k, k
        row[Group.A_BATCH], row[Group.B_BATCH] = 1, 1
        row[Group.M], row[Group.N], row[Group.K] = m, n, k
        row[Group.SFA_ROW_BLOCKS], row[Group.SFB_ROW_BLOCKS] = -(-m // SF_ROWS), -(-n // SF_ROWS)
        row[Group.SFB_BATCH_BLOCKS] = row[Group.SFB_ROW_BLOCKS]
        row[Group.TILE_OFFSET] = schedule.tile_offsets[slot]
        row[Group.GROUP_IDX] = index
        if group.b2 is not None:
            row[Group.B2], row[Group.SFB2] = group.b2.data_ptr(), scale_address(group.sfb2)
            row[Group.B2_PITCH] = k
        table.extend(row)
    return table


def a_format_of(formats: Formats | None) -> BlockFormat:
    """Returns the format of ``a``."""
    return NVFP4 if formats is None else formats[0]


@cache
def _compiled(config: KernelConfig, num_groups: int, activation: str | None, formats: Formats | None):
    import cutlass
    import cutlass.cute as cute

    from nvfp4_cute.kernels.sm100.grouped_gemm import GroupedGemmSm100

    kernel = GroupedGemmSm100(
        config=config,
        form="list",
        num_groups=num_groups,
        out_dtype=cutlass.Float16,
        has_alpha=False,
        name=f"nvfp4_grouped_gemm_g{num_groups}_{config.to_name()}",
        activation=activation,
        a_format=NVFP4 if formats is None else formats[0],
        b_format=NVFP4 if formats is None else formats[1],
    )
    return cute.compile(kernel, table_pointer(0))
