"""sm_120a, sm_121a: cost of a KernelConfig in shared memory, refusals, and choice.

An accumulator lies in the registers of a team of warps (``num_teams``). One team is the cooperative schedule, where all
warps work on one tile. Two teams are ping-pong: one stores while the other multiplies. A tile has 128 rows on the M
side of the warp MMA (dual GEMMs of FP8 weights may have 64 rows of each) and up to 128 on its N side. Limits: CUDA C++
programming guide, technical specifications (99 KiB of shared memory per CTA).
"""

from collections import Counter
from dataclasses import dataclass, replace

from nvfp4_cute.formats.block_format import (
    INT8_PAIR,
    MIXED_PAIRS,
    MXFP4,
    MXFP8_PAIRS,
    NVFP4_PAIR,
    BlockFormat,
    Formats,
)
from nvfp4_cute.gpus import verdicts
from nvfp4_cute.launch_table import INTERLEAVE
from nvfp4_cute.planning.arch import fp8
from nvfp4_cute.planning.arch.base import (
    Mma,
    StagedOperands,
    allowed,
    clusters_in_gpcs,
    foreign_option_reason,
    formats_on_sides,
    never_in_turns,
    no_estimates,
    no_work_reason,
    no_workspace_bytes,
    one_cta_per_sm,
    operands_on_sides,
)
from nvfp4_cute.planning.arch.fp8 import aligned_scale_bytes, promotes
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import Form, GroupedProblem

ARCHS = ("sm_120a", "sm_121a")
KERNEL = "sm120.grouped_gemm.GroupedGemmSm120"
OPTIONS = ()
DEFAULT_CONFIG = KernelConfig((128, 128, 128), num_acc_stage=1)
OUT_M_MAJOR, HAS_CHAINS, HAS_EARLY_WEIGHTS, TO_AND_FRO = True, False, False, False
work_reason, workspace_bytes, ctas_per_sm = no_work_reason, no_workspace_bytes, one_cta_per_sm
prefetches_in_turns, estimates = never_in_turns, no_estimates
SMEM_CAPACITY_BYTES = 99 * 1024
# Alignment of every operand's buffer: a tile of 128-byte rows repeats its swizzle every 1024 bytes.
BUFFER_ALIGN_BYTES = 1024
# Barriers come last, in a separate buffer.
BARRIER_BYTES = 1024
# By formats of ``a`` and ``b``.
MMA = {
    NVFP4_PAIR: Mma("mxf4nvf4", 64),
    (MXFP4, MXFP4): Mma("mxf4", 64),
    **{pair: Mma("mxf8f6f4", 32, element_bits=8) for pair in (*MXFP8_PAIRS, *MIXED_PAIRS, fp8.PAIR)},
    INT8_PAIR: Mma("s8", 32, element_bits=8),
}
TILE_M = 128
TILES_N = (8, 16, 32, 64, 128)
# Bytes per row of a K tile: one row of the swizzle. An MMA of any kind multiplies 32 of them.
K_TILE_ROW_BYTES = (64, 128)
MMA_ROW_BYTES = 32
# A stage is released while the next one is read.
MIN_AB_STAGE = 2
# CTAs of a cluster that share K tiles. A warp's sums are added in one CTA, and a team has at least four warps to
# distribute.
SPLITS = (1, 2, 4, 8)
MIN_TEAM_WARPS = 4
# Neighbouring columns of a result per warp: a block of NVFP4.
WARP_COLUMNS = 16
# Columns of all products of a tile, by num_acc_stage: 128 sums per thread. More would spill registers.
MAX_TILE_COLUMNS = {1: 256, 2: 128}
# Rows of tokens per tile if products of a K tile are promoted, because a thread then holds products and sums.
PROMOTED_TILES_N = (8, 16, 32, 64, 96)
MAX_PROMOTED_COLUMNS = {1: 96, 2: 32}
# Columns of both products of a dual GEMM, whose epilogue needs more registers: with 96, two spill.
MAX_PROMOTED_DUAL_COLUMNS = {1: 64, 2: 32}
# Rows of each weight operand of such a dual GEMM. With 64 rows, both together fill the M side of the warp MMAs.
PROMOTED_DUAL_TILES_M = (64, 128)
# Candidates of ``choose``, the simplest first if several are equally good.
CANDIDATES = (
    DEFAULT_CONFIG,
    KernelConfig((TILE_M, 128, 128), num_acc_stage=2),
    KernelConfig((TILE_M, 64, 128), num_acc_stage=1),
    KernelConfig((TILE_M, 64, 128), num_acc_stage=2),
    KernelConfig((TILE_M, 64, 128), num_acc_stage=1, swap_ab=True),
    KernelConfig((TILE_M, 64, 128), num_acc_stage=2, swap_ab=True),
    KernelConfig((TILE_M, 32, 256), num_acc_stage=2, swap_ab=True),
    KernelConfig((TILE_M, 16, 256), num_acc_stage=2, swap_ab=True),
    KernelConfig((TILE_M, 8, 256), num_acc_stage=2, swap_ab=True),
    KernelConfig((TILE_M, 32, 128), num_acc_stage=1),
    # Few tiles: more SMs work on each of them.
    *(
        KernelConfig((TILE_M, n, k), num_acc_stage=1, swap_ab=True, split_k=split)
        for n, k, split in (
            (64, 128, 2), (64, 128, 4), (32, 256, 2), (32, 256, 4), (16, 256, 4), (8, 256, 4), (8, 256, 8)
        )
    ),
)  # fmt: skip
# Candidates of dual GEMMs, which have sums of two products.
DUAL_CANDIDATES = (
    KernelConfig((TILE_M, 128, 128), num_acc_stage=1),
    KernelConfig((TILE_M, 64, 128), num_acc_stage=2),
    KernelConfig((TILE_M, 64, 128), num_acc_stage=1),
    KernelConfig((TILE_M, 64, 128), num_acc_stage=1, swap_ab=True),
    KernelConfig((TILE_M, 32, 128), num_acc_stage=2, swap_ab=True),
    KernelConfig((TILE_M, 16, 256), num_acc_stage=2, swap_ab=True),
    KernelConfig((TILE_M, 8, 256), num_acc_stage=2, swap_ab=True),
    KernelConfig((TILE_M, 32, 128), num_acc_stage=1),
    *(
        KernelConfig((TILE_M, n, k), num_acc_stage=1, swap_ab=True, split_k=4)
        for n, k in ((32, 128), (16, 256), (8, 256))
    ),
)
# Candidates with promoted products: weights, of which 128 share a scale, are on the M side.
PROMOTED_CANDIDATES = (
    KernelConfig((TILE_M, 96, 128), num_acc_stage=1, swap_ab=True),
    *(config for config in CANDIDATES if config.swap_ab),
)
# Candidates of dual GEMMs with promoted products: half the rows of each weight operand leave room for equally many
# tokens, and for more stages.
PROMOTED_DUAL_CANDIDATES = tuple(
    KernelConfig((m, n, 128), num_acc_stage=teams, swap_ab=True, split_k=split)
    for m, n, teams, split in (
        (64, 64, 1, 1), (64, 32, 2, 1), (64, 16, 2, 1), (64, 8, 1, 1), (128, 32, 1, 1), (128, 16, 2, 1),
        (128, 8, 2, 1), (64, 64, 1, 2), (64, 64, 1, 4), (64, 32, 1, 2), (64, 32, 1, 4), (64, 16, 1, 4), (64, 8, 1, 4),
        (64, 8, 1, 8),
    )
)  # fmt: skip
GPC_SMS = 16  # SMs per GPC (NVIDIA RTX Blackwell architecture: 8 pairs in GB202)
# Resident clusters of an RTX 5090 by number of SMs and cluster size (QuACK, AI/sm120_hardware.md).
MEASURED_CLUSTERS = {170: {2: 85, 4: 41, 8: 19}}
FP32_BYTES = 4
# A scale block covers 128 rows x 4 scales. A tile loads full blocks, whatever part of their rows it uses.
SF_ATOM_ROWS = 128


@dataclass(frozen=True)
class Costs:
    """Terms by which ``choose`` ranks, in SM cycles and bytes per cycle.

    Source: read off modelled launches on RTX 5090 and RTX PRO 6000, unless a line says otherwise.
    """

    start: float = 3000  # from the start to the first bytes, and after the last store
    memory_bytes_per_cycle: float = 620
    l2_bytes_per_cycle: float = 7400  # of all SMs; the model merges requests for one piece at the same time,
    split_l2_bytes_per_cycle: float = 4096  # but those of CTAs that share a tile do not coincide
    store_bytes_per_cycle: float = 2048  # of all SMs
    load_bytes_per_cycle: float = 50  # bandwidth of L2 for one SM while all of them load
    ring: float = 1300  # from a load to the next load of its stage
    mma_flop_per_cycle: float = 4096  # of an SM
    team: float = 20  # extra time of a K tile of fewer than 128 columns that a team with one warp per sub-core cannot hide
    overlap_loss: float = 0.08  # share of the shorter time that adds to the longer one
    epilogue: float = 100  # time per tile if no other team multiplies meanwhile
    exchange: float = 500  # split-K: until another CTA's sums have arrived and are added, without the transfer of their bytes
    exchange_bytes_per_cycle: float = (
        16  # bytes that a CTA sends per cycle; measured on an H200 (bench/probes/h200_exchange_probe.cu)
    )
    # Required gain of a config that splits K, because estimates of the two kinds compare less well.
    split_gain: float = 0.05


COSTS = Costs()


@dataclass(frozen=True, kw_only=True)
class SmemPlan(StagedOperands):
    """Shared memory of one CTA.

    Attributes:
        row_bytes: bytes per row of a K tile.
        scales_by_tma: whether TMA also loads scales; small copies load fp32 scales.
    """

    row_bytes: int
    scales_by_tma: bool = True

    @property
    def loaded_bytes(self) -> int:
        """Bytes that TMA writes per stage: the transaction count of its barrier."""
        scales = self.num_m * self.sfa_stage_bytes + self.num_n * self.sfb_stage_bytes
        return super().loaded_bytes - (0 if self.scales_by_tma else scales)

    @property
    def buffer_bytes(self) -> tuple[int, int, int, int]:
        """Bytes of all stages of the operands on the M side and on the N side, and of the scales of both."""
        return (
            self.num_ab_stage * self.num_m * self.a_stage_bytes,
            self.num_ab_stage * self.num_n * self.b_stage_bytes,
            self.num_ab_stage * self.num_m * self.sfa_stage_bytes,
            self.num_ab_stage * self.num_n * self.sfb_stage_bytes,
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of the buffers, each rounded up to its alignment, and of the barriers."""
        return sum(map(_round_up, (*self.buffer_bytes, self.exchange_bytes))) + BARRIER_BYTES


def candidates(
    num_b: int = 1,
    weight_layout: str = "separate",
    out_format: BlockFormat | None = None,
    form: Form = "list",
    formats: Formats = NVFP4_PAIR,
) -> tuple[KernelConfig, ...]:
    """Returns the candidates of ``choose``.

    There are none for quantized results or interleaved weights with fp32 scales, nor for dual GEMMs with scales of
    rows.

    K is split only if ``nvfp4-cute prove`` has shown its cost on this machine. We know of nobody who has run vectors of
    ``st.async``, or clusters of GEMMs with programmatic launches, on sm_120.

    Args:
        num_b: weight operands: 2 for a dual GEMM whose weights are not interleaved.
        weight_layout: "separate", or one of ``launch_table.INTERLEAVE``.
        out_format: format of quantized results; None for other results.
        form: ignored.
        formats: formats of ``a`` and ``b``, which determine the K tile.
    """
    has_fp32_scales = promotes(formats) or formats[0].is_1xk
    if has_fp32_scales and (weight_layout != "separate" or out_format is not None):
        return ()
    if formats[0].is_1xk and num_b > 1:
        return ()
    may_split = any(verdicts.is_proven(arch, "split_k") for arch in ARCHS)
    kinds = (
        (PROMOTED_CANDIDATES, PROMOTED_DUAL_CANDIDATES)
        if promotes(formats)
        else (CANDIDATES, DUAL_CANDIDATES)
    )
    tried = (with_k_tile(config, formats) for config in kinds[num_b - 1])
    return tuple(
        config
        for config in dict.fromkeys(tried)
        if (config.split_k == 1 or may_split)
        and (formats == NVFP4_PAIR or unsupported_reason(config, num_b, formats) is None)
        and interleave_reason(config, weight_layout) is None
        and (out_format is None or quantized_reason(config, out_format) is None)
    )


def tiles_k(formats: Formats) -> tuple[int, ...]:
    """Returns the possible elements of K per K tile.

    A K tile has rows of the swizzle with full scale atoms; INT8, without atoms, has long rows.
    """
    mma = MMA[formats]
    found = [mma.elements(nbytes) for nbytes in K_TILE_ROW_BYTES]
    return tuple(k for k in found if all(k % (format.atom_k or found[-1]) == 0 for format in formats))


def with_k_tile(config: KernelConfig, formats: Formats) -> KernelConfig:
    """Returns a config for NVFP4 with the K tile of formats that has equally many bytes, or the next larger one."""
    m, n, k = config.cta_tile_shape_mnk
    row_bytes = MMA[NVFP4_PAIR].row_bytes(k)
    tile_k = next(k for k in tiles_k(formats) if MMA[formats].row_bytes(k) >= row_bytes)
    return replace(config, cta_tile_shape_mnk=(m, n, tile_k))


def choose(problem: GroupedProblem, num_sms: int) -> KernelConfig:
    """Returns the candidate with the least estimated time, the default for a problem.

    K is split only if all tiles are computed at once, because a cluster's next tile does not hide the exchange of sums.

    Args:
        problem: its sizes, operands and results matter; mean sizes stand for those of all groups.
        num_sms: SMs of the device.
    """
    num_b, formats = problem.num_b, (problem.a_format, problem.b_format)
    live = Counter(size for size in problem.sizes if min(size) > 0)
    tried = [
        config
        for config in allowed(
            candidates(num_b, problem.weight_layout, problem.out_format, problem.form, formats), problem
        )
        if config.split_k == 1 or _num_tiles(config, live) <= resident_clusters(num_sms, config.split_k)
    ]
    chosen = min(
        tried,
        key=lambda config: (
            _estimated_cycles(config, live, num_sms, num_b, formats)
            * (1 + COSTS.split_gain * (config.split_k > 1))
        ),
    )
    if chosen.split_k > 1:
        chosen = replace(chosen, num_cta=resident_clusters(num_sms, chosen.split_k) * chosen.split_k)
    return chosen


def _num_tiles(config: KernelConfig, sizes: Counter[tuple[int, int, int]]) -> int:
    tile_m, tile_n, _ = config.work_tile_mnk
    return sum(-(-m // tile_m) * -(-n // tile_n) * times for (m, n, _), times in sizes.items())


def _estimated_cycles(
    config: KernelConfig, sizes: Counter[tuple[int, int, int]], num_sms: int, num_b: int, formats: Formats
) -> float:
    """Returns the start, each wave's time, the last K tile, the last exchange of sums, and the last stores.

    A wave lasts as long as its tiles on an SM, or as its loads.
    """
    plan, (tile_m, tile_n, tile_k) = smem_plan(config, num_b, formats), config.work_tile_mnk
    a_format, b_format = formats
    split, workers = config.split_k, resident_clusters(num_sms, config.split_k)
    counts = {size: -(-size[0] // tile_m) * -(-size[1] // tile_n) * times for size, times in sizes.items()}
    k_tiles = sum(count * -(-k // tile_k) for (_, _, k), count in counts.items())
    num_tiles = sum(counts.values())
    if not num_tiles:
        return COSTS.start
    operand_bytes = sum(
        (a_format.nbytes(m, k) + num_b * b_format.nbytes(n, k)) * times for (m, n, k), times in sizes.items()
    )
    out_bytes = sum(m * n * 2 * times for (m, n, _), times in sizes.items())

    # An MMA takes equally long for 32 bytes of K of any type.
    k_of_fp4 = MMA[NVFP4_PAIR].elements(plan.row_bytes)
    mma = 2 * num_b * tile_m * tile_n * k_of_fp4 / COSTS.mma_flop_per_cycle
    has_two_teams = num_teams(config) > 1
    exposed = COSTS.team if has_two_teams and config.cta_tile_shape_mnk[1] < 128 else 0
    k_tile = max(
        mma + exposed, plan.loaded_bytes / COSTS.load_bytes_per_cycle, COSTS.ring / plan.num_ab_stage
    )
    tile = sum(count * -(-k // (tile_k * split)) for (_, _, k), count in counts.items()) / num_tiles * k_tile
    tile += 0 if has_two_teams else COSTS.epilogue
    l2_rate = COSTS.l2_bytes_per_cycle if split == 1 else COSTS.split_l2_bytes_per_cycle
    memory, l2 = operand_bytes / COSTS.memory_bytes_per_cycle, k_tiles * plan.loaded_bytes / l2_rate

    def wave(count: int) -> float:
        parts = sorted((tile, memory * count / num_tiles, l2 * count / num_tiles))
        return parts[2] + COSTS.overlap_loss * (parts[0] + parts[1])

    full_waves, rest = divmod(num_tiles, workers)
    waves = full_waves * wave(workers) + (wave(rest) if rest else 0)
    stores = out_bytes / num_tiles * min(num_tiles, workers) / COSTS.store_bytes_per_cycle
    return COSTS.start + waves + k_tile + stores + _exchange_cycles(config, num_b)


def _exchange_cycles(config: KernelConfig, num_b: int) -> float:
    """Returns the time from a tile's last MMA until its sums have arrived and are added."""
    if config.split_k == 1:
        return 0.0
    m, n, _ = config.cta_tile_shape_mnk
    sent_bytes = num_b * m * n * FP32_BYTES * (config.split_k - 1) / config.split_k
    return COSTS.exchange + sent_bytes / COSTS.exchange_bytes_per_cycle


def resident_clusters(num_sms: int, cluster_size: int) -> int:
    """Returns the number of clusters resident at once if every CTA fills an SM."""
    return clusters_in_gpcs(num_sms, cluster_size, GPC_SMS, MEASURED_CLUSTERS)


def num_teams(config: KernelConfig) -> int:
    """Returns the number of teams of warps, each with its own accumulator and tiles."""
    return config.num_acc_stage


def num_receivers(split: int) -> int:
    """Returns how many CTAs of a cluster of ``split`` add and store sums, each for an equal share of the warps."""
    return min(split, MIN_TEAM_WARPS)


def smem_plan(config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> SmemPlan:
    """Returns the shared memory of ``config``. ``num_ab_stage=None`` becomes the largest number of stages that fits."""
    m, n, k = config.cta_tile_shape_mnk
    row_bytes = MMA[formats].row_bytes(k)
    sfa, sfb = 0, 0
    if not formats[0].is_1xk:
        sfa, sfb = map(_scale_stage_bytes, formats_on_sides(config, formats), (m, n), (k, k))
    gap_m, gap_n = (MMA[formats].gap_bytes(format, k) for format in formats_on_sides(config, formats))
    num_m, num_n = operands_on_sides(config, num_b)
    tile_sums_bytes = num_b * m * n * FP32_BYTES
    plan = SmemPlan(
        row_bytes=row_bytes,
        scales_by_tma=not promotes(formats),
        a_stage_bytes=m * row_bytes,
        b_stage_bytes=n * row_bytes,
        sfa_stage_bytes=sfa,
        sfb_stage_bytes=sfb,
        a_gap_bytes=m * gap_m,
        b_gap_bytes=n * gap_n,
        num_ab_stage=config.num_ab_stage or 0,
        num_m=num_m,
        num_n=num_n,
        exchange_bytes=config.num_acc_stage
        * (config.split_k - 1)
        * tile_sums_bytes
        // num_receivers(config.split_k),
    )
    if config.num_ab_stage is None:
        while (
            deeper := replace(plan, num_ab_stage=plan.num_ab_stage + 1)
        ).total_bytes <= SMEM_CAPACITY_BYTES:
            plan = deeper
    return plan


def _scale_stage_bytes(format: BlockFormat, rows: int, k: int) -> int:
    """Returns the bytes of one operand's scales per stage.

    Blocked scales are loaded as full blocks, whatever part of their rows a tile uses.
    """
    return aligned_scale_bytes(format.scale_bytes(rows, k))


def resolve(config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> KernelConfig:
    """Returns ``config`` with an explicit stage count."""
    return replace(config, num_ab_stage=smem_plan(config, num_b, formats).num_ab_stage)


def unsupported_reason(config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> str | None:
    """Returns why this family cannot build ``config``, with the nearest legal value; None if it can."""
    foreign = foreign_option_reason(config, OPTIONS)
    if foreign is not None:
        return foreign
    m, n, k = config.cta_tile_shape_mnk
    tiles_m = PROMOTED_DUAL_TILES_M if promotes(formats) and num_b > 1 else (TILE_M,)
    if m not in tiles_m:
        legal = " or ".join(map(str, tiles_m))
        return f"cta_tile_shape_mnk={config.cta_tile_shape_mnk}: M tiles other than {legal} are not built; use M tile {legal}"
    tiles_n, most_columns = TILES_N, MAX_TILE_COLUMNS
    if promotes(formats):
        tiles_n = PROMOTED_TILES_N
        most_columns = MAX_PROMOTED_COLUMNS if num_b == 1 else MAX_PROMOTED_DUAL_COLUMNS
    if n not in tiles_n:
        return (
            f"cta_tile_shape_mnk={config.cta_tile_shape_mnk}: use an N tile of {', '.join(map(str, tiles_n))}"
        )
    if k not in tiles_k(formats):
        return (
            f"cta_tile_shape_mnk={config.cta_tile_shape_mnk}: a K tile fills a 64-byte or a 128-byte swizzle row, with whole "
            f"scale blocks; use K tile {' or '.join(map(str, tiles_k(formats)))}"
        )
    if config.num_acc_stage not in (1, 2):
        return f"num_acc_stage={config.num_acc_stage}: one team of warps has one accumulator; use 1, or 2 for two teams"
    # Limits are for columns of 128 rows.
    columns = most_columns[config.num_acc_stage] * TILE_M // (num_b * m)
    max_n = max(tile for tile in tiles_n if tile <= columns)
    if n > max_n:
        of_rows = "" if m == TILE_M else f" of {m} rows"
        return (
            f"num_acc_stage={config.num_acc_stage}: sums of {num_b} x {n} columns{of_rows} do not fit the warps' registers; use "
            f"an N tile of {max_n}"
        )
    if promotes(formats) and not config.swap_ab:
        return (
            f"swap_ab=False: {formats[1].title} has one scale for 128 rows, which the M side of a tile holds; "
            "use swap_ab=True"
        )
    if config.split_k not in SPLITS:
        return f"split_k={config.split_k}: 2, 4 or 8 CTAs of a cluster share K tiles; use split_k=2, or 1"
    plan = smem_plan(config, num_b, formats)
    most = smem_plan(replace(config, num_ab_stage=None), num_b, formats).num_ab_stage
    if most < MIN_AB_STAGE:
        return (
            f"cta_tile_shape_mnk={config.cta_tile_shape_mnk}, split_k={config.split_k}: {SMEM_CAPACITY_BYTES} bytes of "
            f"shared memory hold {most} of {MIN_AB_STAGE} stages; use a smaller N tile, K tile 128, or a smaller split_k"
        )
    if plan.num_ab_stage < MIN_AB_STAGE or plan.total_bytes > SMEM_CAPACITY_BYTES:
        return (
            f"num_ab_stage={config.num_ab_stage}: {plan.total_bytes} bytes of shared memory, {SMEM_CAPACITY_BYTES} "
            f"exist; use {MIN_AB_STAGE} to {most}"
        )
    if config.num_cta is not None and config.num_cta < config.split_k:
        return f"num_cta={config.num_cta}: at least {config.split_k} CTA{'s' * (config.split_k > 1)} must be launched"
    return None


def interleave_reason(config: KernelConfig, weight_layout: str) -> str | None:
    """Returns why weights of ``launch_table.INTERLEAVE`` cannot be computed with ``config``; None if they can."""
    n, period = config.cta_tile_shape_mnk[1], 2 * INTERLEAVE.get(weight_layout, 0)
    if period and not config.swap_ab and n % period:
        return f"N tile {n} with weight_layout={weight_layout!r}: tiles hold whole periods; use N tile {period} or swap_ab"
    return None


def quantized_reason(config: KernelConfig, format: BlockFormat) -> str | None:
    """Returns why results of a format cannot be computed with ``config``; None if they can: a warp has 16 columns of a row.

    For blocks of 32 columns, warps exchange the scales of the halves.
    """
    n, what = config.cta_tile_shape_mnk[1], f"with {format.title} results"
    least = WARP_COLUMNS if config.swap_ab and config.num_acc_stage == 2 else 2 * WARP_COLUMNS
    if n < least:
        return f"N tile {n} {what}: two warps would share {WARP_COLUMNS} columns of a block; use an N tile of {least}"
    if config.split_k > 1 and format.block_k > WARP_COLUMNS:
        return (
            f"split_k={config.split_k} {what}: two warps have the halves of a block, and other CTAs add up their sums; "
            "use split_k=1"
        )
    return None


def _round_up(nbytes: int) -> int:
    return -(-nbytes // BUFFER_ALIGN_BYTES) * BUFFER_ALIGN_BYTES
