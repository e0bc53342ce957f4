"""The entry point as a competition server calls it: what `nvfp4-cute export nvfp4_group_gemm` puts into one file.

Compiled code is remembered by number of groups and config, schedules by sizes; both hold no data. Pointers, sizes and
tensor maps travel as kernel parameters: no copy to the device, no wait. Every call computes every output.
"""

from array import array
from dataclasses import replace
from functools import cache

import torch

from nvfp4_cute.arch import sm100
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.schedule import TileSchedule, make_schedule
from nvfp4_cute.select import choose_config
from nvfp4_cute.targets import B200

from .spec import BENCHMARKS

INT64_BYTES = 8
# Rows of a block of scales.
SF_ROWS = 128
# Sizes of all groups -> config, for the shapes that are timed, where the export freezes what `select` chooses; every
# other shape takes the default.
CONFIGS: dict[tuple[tuple[int, int, int], ...], KernelConfig] = {}
DEFAULT_CONFIG = sm100.DEFAULT_CONFIG


def frozen_constants() -> dict[str, str]:
    """What an export writes in the place of constants: name to Python expression."""
    rows = [
        f"    {case.sizes!r}: {choose_config(GroupedProblem(case.sizes, out_dtype=torch.float16), B200.arch, B200.num_sms)!r},"
        for case in BENCHMARKS
    ]
    return {"CONFIGS": "\n".join(["{", *rows, "}"])}


def custom_kernel(data):
    """Compute every group into the C that the input carries.

    Args:
        data: (abc, scales on the CPU, permuted scales, problem sizes), one entry a group in each: A [M, K/2, 1] and
            B [N, K/2, 1] float4_e2m1fn_x2, C [M, N, 1] float16; SFA and SFB float8_e4m3fn [32, 4, rm, 4, rk, 1], a view
            of contiguous [1, rm, rk, 32, 4, 4], whose memory is used as it lies; (m, n, k, 1).

    Returns:
        The C tensors.
    """
    try:
        return _custom_kernel(data)
    except Exception as error:
        # Exceptions of the compiler cannot be sent from the server's worker process to its parent.
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _custom_kernel(data):
    abc, _, permuted_scales, problem_sizes = data
    sizes = tuple((m, n, k) for m, n, k, _ in problem_sizes)
    config = CONFIGS.get(sizes, DEFAULT_CONFIG)
    schedule = _schedule(sizes, config)
    table = _launch_table(schedule, config, abc, permuted_scales)
    launch = _compiled(replace(sm100.resolve(config), num_cta=None), len(sizes))
    launch(_table_pointer(table.buffer_info()[0]))
    return [c for _, _, c in abc]


@cache
def _schedule(sizes: tuple[tuple[int, int, int], ...], config: KernelConfig) -> TileSchedule:
    num_cta = config.num_cta or torch.cuda.get_device_properties(0).multi_processor_count
    return make_schedule(sizes, config.work_tile_mnk, num_cta // config.cluster_size)


def _launch_table(schedule: TileSchedule, config: KernelConfig, abc, permuted_scales) -> array:
    """Header row and one row a slot, as the compiled host code reads them (``launch_table``)."""
    header = [0] * NUM_COLUMNS
    header[Header.NUM_TILES] = schedule.num_tiles
    header[Header.NUM_CTA] = schedule.num_cta * config.cluster_size
    table = array("q", header)
    for slot, group in enumerate(schedule.order):
        (a, b, c), (sfa, sfb), (m, n, k) = abc[group], permuted_scales[group], schedule.sizes[group]
        row = [0] * NUM_COLUMNS
        row[Group.A], row[Group.B], row[Group.OUT] = a.data_ptr(), b.data_ptr(), c.data_ptr()
        row[Group.SFA], row[Group.SFB] = sfa.data_ptr(), sfb.data_ptr()
        row[Group.A_PITCH], row[Group.B_PITCH], row[Group.OUT_PITCH] = k, k, n
        # Of the one batch, never used, but well formed.
        row[Group.A_BATCH_PITCH], row[Group.B_BATCH_PITCH] = k, k
        row[Group.A_BATCH], row[Group.B_BATCH] = 1, 1
        row[Group.M], row[Group.N], row[Group.K] = m, n, k
        row[Group.SFA_ROW_BLOCKS], row[Group.SFB_ROW_BLOCKS] = -(-m // SF_ROWS), -(-n // SF_ROWS)
        row[Group.TILE_OFFSET] = schedule.tile_offsets[slot]
        row[Group.GROUP_IDX] = group
        table.extend(row)
    return table


@cache
def _compiled(config: KernelConfig, num_groups: int):
    import cutlass
    import cutlass.cute as cute

    from nvfp4_cute.kernels.sm100.grouped_gemm import GroupedGemmSm100

    name = f"nvfp4_grouped_gemm_g{num_groups}_{config.to_name()}"
    kernel = GroupedGemmSm100(
        config, "list", num_groups, cutlass.Float16, out_m_major=False, has_alpha=False, name=name
    )
    return cute.compile(kernel, _table_pointer(0))


def _table_pointer(address: int):
    import cutlass
    import cutlass.cute as cute

    return cute.runtime.make_ptr(cutlass.Int64, address, cute.AddressSpace.generic, assumed_align=INT64_BYTES)
