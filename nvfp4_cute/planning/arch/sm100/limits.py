"""sm_100a, sm_103a, sm_110a: cost of a KernelConfig in shared and tensor memory, and reasons for refusals.

Limits: CUDA C++ programming guide, technical specifications (227 KiB of shared memory per CTA) and PTX ISA 9.7.16.1
(tensor memory of 128 lanes x 512 columns of 32 bits).
"""

from dataclasses import dataclass, replace

from nvfp4_cute.formats.block_format import (
    ATOM_COLS,
    ATOM_ROWS,
    MIXED_PAIRS,
    MXFP4,
    MXFP8_PAIRS,
    NVFP4_PAIR,
    BlockFormat,
    Formats,
)
from nvfp4_cute.launch_table import INTERLEAVE
from nvfp4_cute.planning.arch.base import (
    Mma,
    StagedOperands,
    clusters_in_gpcs,
    foreign_option_reason,
    formats_on_sides,
    operands_on_sides,
)
from nvfp4_cute.planning.config import KernelConfig

ARCHS = ("sm_100a", "sm_103a", "sm_110a")
OPTIONS = ("use_2cta_instrs", "multicast_n")
DEFAULT_CONFIG = KernelConfig()
# Candidates, simple before special ones if two are equally good.
CANDIDATES = (
    *(KernelConfig((128, n, 256), num_acc_stage=stages) for n, stages in ((128, 3), (256, 2))),
    *(
        KernelConfig((128, n, 256), num_acc_stage=stages, swap_ab=True)
        for n, stages in ((64, 4), (128, 3), (192, 2), (256, 2))
    ),
    *(
        KernelConfig((128, n, 256), num_acc_stage=stages, use_2cta_instrs=True)
        for n, stages in ((128, 3), (256, 2))
    ),
    *(
        KernelConfig((128, n, 256), num_acc_stage=stages, use_2cta_instrs=True, swap_ab=True)
        for n, stages in ((64, 4), (128, 3), (192, 2), (256, 2))
    ),
    # If the copies of a K tile take longer than its MMAs.
    *(
        KernelConfig((128, 128, 256), num_acc_stage=3, use_2cta_instrs=pair, swap_ab=True, multicast_n=2)
        for pair in (False, True)
    ),
    # Few tiles with a long K: CTAs that would be idle compute a part of it.
    *(KernelConfig((128, 64, 256), swap_ab=True, split_k=split) for split in (2, 4, 8)),
    KernelConfig((128, 64, 256), split_k=2),
)
# Candidates of dual GEMMs, whose two products fill tensor memory twice as fast.
DUAL_CANDIDATES = (
    *(KernelConfig((128, n, 256), num_acc_stage=stages) for n, stages in ((64, 3), (128, 2))),
    *(
        KernelConfig((128, n, 256), num_acc_stage=stages, swap_ab=True)
        for n, stages in ((64, 3), (128, 2), (192, 1))
    ),
    *(
        KernelConfig((128, n, 256), num_acc_stage=stages, use_2cta_instrs=True)
        for n, stages in ((64, 3), (128, 2))
    ),
    *(
        KernelConfig((128, n, 256), num_acc_stage=stages, use_2cta_instrs=True, swap_ab=True)
        for n, stages in ((64, 3), (128, 2), (192, 1))
    ),
)
# Candidates for interleaved weights: both products of a result must lie in one row of tensor memory.
INTERLEAVED_CANDIDATES = tuple(c for c in CANDIDATES if not c.swap_ab and c.split_k == 1)
SMEM_CAPACITY_BYTES = 227 * 1024
# Buffers in which the four epilogue warps transpose slices of 32 rows and columns of 16-bit results.
STAGING_BYTES = 4 * 32 * 32 * 2
# Plus barriers and the tensor-memory address. Operand buffers come first and are multiples of their alignment.
SMEM_RESERVED_BYTES = STAGING_BYTES + 1024
TMEM_COLS = 512
# By formats of ``a`` and ``b``. MXFP4 also has its own kind, mxf4; public kernels that run on the hardware use this
# one.
MMA = {
    NVFP4_PAIR: Mma("mxf4nvf4", 64),
    (MXFP4, MXFP4): Mma("mxf4nvf4", 64),
    **{pair: Mma("mxf8f6f4", 32, element_bits=8) for pair in (*MXFP8_PAIRS, *MIXED_PAIRS)},
}
# Fields of instruction descriptors (PTX ISA 9.7.16.4.2): element types by kind, at bit 7 for the M side and at bit 10
# for the N side; type of scales at bit 23.
ELEMENT_CODES = {"mxf4nvf4": {"e2m1": 1}, "mxf8f6f4": {"e4m3": 0, "e5m2": 1, "e2m1": 5}}
M_ELEMENT_SHIFT, N_ELEMENT_SHIFT = 7, 10
UE8M0_BIT = 1 << 23
# Bytes per row of a K tile: one row of the swizzle. An MMA of any kind multiplies 32 of them.
K_TILE_BYTES = 128
MMAS_PER_K_TILE = 4
# MMAs of 96 elements of K (``KernelConfig.use_k96_instrs``): eight of them multiply three K tiles. Their bit in
# instruction descriptors (PTX ISA 9.7.16.4.2), and the scale atoms that full MMAs read: two, or four with blocks of 32.
K96, K96_BIT = 96, -1 << 31
K96_MMAS, K96_K_TILES, K96_ATOMS = 8, 3, 3
# Cycles of an SM's only copy engine: least time of a copy, and bytes per cycle (published microbenchmarks:
# ``timing.constants``).
COPY_CYCLES, COPY_BYTES_PER_CYCLE = 48, 125
# Columns of 32 bytes of K that an MMA multiplies per cycle.
MMA_COLUMNS_PER_CYCLE = 2
# Bytes of shared memory that an SM reads per cycle (CUDA C++ programming guide).
SMEM_BYTES_PER_CYCLE = 128
# Cycles from a load from device memory to the next load of its stage, under load: read off modelled launches.
RING_CYCLES = 3000
# Rows of the M side per CTA: the lanes of tensor memory.
MMA_CTA_M = 128
# N side of tiles and MMAs: multiples of 64, whose scales fill an even number of columns of tensor memory. MMAs and
# copies access scales two columns at a time, and fault at an odd one (QuACK, quack/gemm_sm100.py; CUTLASS and Triton
# comply).
MMA_N_STEP = 64
TILES_N = (64, 128, 192, 256)
# For dual GEMMs with two accumulators of each product.
DUAL_TILES_N = (64, 128)
# Columns that the epilogue reads at once.
EPI_TILE_N = 32
EPI_WARPS = 4
# Columns that an epilogue of a tile with few rows of tokens skips together, where the group has none of them.
EPI_PART_N = 8
# CTAs of a cluster that share K tiles. They exchange sums in fp32, in units of 32 rows x 32 columns.
SPLITS = (1, 2, 4, 8)
# MMAs of a cluster that share the N side: with pairs, clusters of 8 CTAs, which every GPU can launch.
MULTICASTS = (1, 2, 4)
# N tiles with few rows of tokens for which K may be split even if only the device knows the groups' sizes, by number of products.
SPLIT_TILES_N = {1: (64, 128), 2: (64,)}
UNIT_SUMS_BYTES = 32 * EPI_TILE_N * 4
# SMs per GPC, and clusters by number of SMs and their size: 15 clusters of 8 CTAs fit a B300 (CUTLASS,
# NVFP4_CUTEDSL_THROTTLE).
GPC_SMS = 18
MEASURED_CLUSTERS = {148: {8: 15}}
# A scale block covers 128 rows x 4 scales; tensor memory holds it in 4 columns.
SF_ATOM_ROWS = ATOM_ROWS
SF_ATOM_COLS = ATOM_COLS


class SmemPlan(StagedOperands):
    """Shared memory of one CTA."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all stages and of the reserved part."""
        return self.stage_bytes * self.num_ab_stage + self.exchange_bytes + SMEM_RESERVED_BYTES


@dataclass(frozen=True)
class TmemMap:
    """First columns of the accumulators and of the scales in tensor memory, and the number of allocated columns.

    Attributes:
        acc_cols: columns of one accumulator; in a dual GEMM, both products next to each other.
        acc_stride: columns from one accumulator to the next; less than ``acc_cols`` if two share columns.
        num_acc_stage: accumulators.
        sfa_col, sfb_col: first columns of the scales.
        used_cols: columns in use.
        sf_atoms: scale atoms of each operand that the columns hold; a K tile with more atoms uses them one after the other.
    """

    acc_cols: int
    acc_stride: int
    num_acc_stage: int
    sfa_col: int
    sfb_col: int
    used_cols: int
    sf_atoms: int = 0

    @property
    def overlap_cols(self) -> int:
        """Columns that two accumulators share; the epilogue reads them first."""
        return self.acc_cols - self.acc_stride

    @property
    def num_acc_barrier_stage(self) -> int:
        """Stages of the accumulator pipeline: one if accumulators share columns and therefore alternate."""
        return 1 if self.overlap_cols else self.num_acc_stage

    @property
    def alloc_cols(self) -> int:
        """Allocated columns: a power of two, at least 32 (PTX ISA, tcgen05.alloc)."""
        return max(32, 1 << (self.used_cols - 1).bit_length())


def sf_blocks_n(tile_n: int) -> int:
    """Returns the 128-row scale blocks that a tile of ``tile_n`` rows may touch at any position."""
    starts = range(0, SF_ATOM_ROWS * tile_n, tile_n)
    return max(_ceil_div(start % SF_ATOM_ROWS + tile_n, SF_ATOM_ROWS) for start in starts)


def mma_columns(rows: int, first_row: int, tile_n: int) -> int:
    """Returns the columns that the MMA of a tile computes from ``first_row`` on, in a group with ``rows`` rows from there.

    A tile that begins in the middle of a scale block has 64 or 192 columns; CUTLASS's kernels have no other numbers
    there.
    """
    return min(_ceil_div(rows, MMA_N_STEP) * MMA_N_STEP, tile_n) | first_row & MMA_N_STEP


def least_columns(config: KernelConfig) -> int:
    """Returns the least number of columns that an MMA of ``config`` computes.

    With K=96 an MMA finds the second word of a row's scales after one word per 128 of its columns, so it has all
    columns of its tile.
    """
    if not config.use_k96_instrs:
        return MMA_N_STEP
    return max(SF_ATOM_ROWS, SF_ATOM_ROWS * (sf_blocks_n(config.cta_tile_shape_mnk[1]) - 1) + MMA_N_STEP)


def skips_columns(config: KernelConfig) -> bool:
    """Returns whether epilogues skip parts of slices that no row of the group has: in the smallest tile of tokens."""
    return config.swap_ab and config.cta_tile_shape_mnk[1] == MMA_N_STEP


def loaded_k_tiles(config: KernelConfig, k_tile_cnt: int) -> int:
    """Returns the K tiles that a tile of ``k_tile_cnt`` loads, on the host or on the device.

    With K=96 the last MMA may read beyond the end of K. TMA fills the K tile after the end with zeros.
    """
    return k_tile_cnt + (k_tile_cnt % K96_K_TILES + 1) // 2 if config.use_k96_instrs else k_tile_cnt


def mma_of(config: KernelConfig, formats: Formats) -> Mma:
    """Returns how ``config`` multiplies a pair of ``MMA``."""
    return replace(MMA[formats], k=K96) if config.use_k96_instrs else MMA[formats]


def mma_types(config: KernelConfig, formats: Formats) -> int:
    """Returns the type bits of elements and scales in the instruction descriptor. ``formats``: a pair of ``MMA``."""
    codes = ELEMENT_CODES[MMA[formats].kind]
    m_format, n_format = formats_on_sides(config, formats)
    of_m, of_n = codes[m_format.element.name], codes[n_format.element.name]
    scales = UE8M0_BIT if m_format.scale.name == "ue8m0" else 0
    return of_m << M_ELEMENT_SHIFT | of_n << N_ELEMENT_SHIFT | scales | K96_BIT * config.use_k96_instrs


def k_tile(formats: Formats) -> int:
    """Returns the elements of K per K tile."""
    return MMA[formats].elements(K_TILE_BYTES)


def with_k_tile(config: KernelConfig, formats: Formats) -> KernelConfig:
    """Returns ``config`` with the K tile of formats."""
    return replace(config, cta_tile_shape_mnk=(*config.cta_tile_shape_mnk[:2], k_tile(formats)))


def smem_plan(config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> SmemPlan:
    """Returns the shared memory of one CTA. ``num_ab_stage=None`` becomes the largest number of stages that fits.

    Args:
        formats: formats of ``a`` and ``b``.
    """
    (m, n, k), (m_format, n_format) = config.cta_tile_shape_mnk, formats_on_sides(config, formats)
    row_bytes = MMA[formats].row_bytes(k)
    a, b = m * row_bytes, n // config.num_mma_cta * row_bytes
    sfa, sfb = m_format.scale_bytes(m, k), sf_blocks_n(n) * n_format.atom_row_bytes(k)
    exchange = 0
    if config.split_k > 1:
        units = _ceil_div(EPI_WARPS * n // EPI_TILE_N, config.split_k)
        exchange = units * (config.split_k - 1) * num_b * UNIT_SUMS_BYTES
    stages = config.num_ab_stage or 0
    gap_m, gap_n = (MMA[formats].gap_bytes(format, k) for format in (m_format, n_format))
    plan = SmemPlan(
        a,
        b,
        sfa,
        sfb,
        stages,
        *operands_on_sides(config, num_b),
        exchange,
        m * gap_m,
        n // config.num_mma_cta * gap_n,
    )
    if config.num_ab_stage is not None:
        return plan
    return replace(plan, num_ab_stage=(SMEM_CAPACITY_BYTES - plan.total_bytes) // plan.stage_bytes)


def k_tile_copy_cycles(config: KernelConfig, smem: SmemPlan) -> tuple[float, float]:
    """Returns the copy engine's time per K tile of a CTA, for boxes of operands and scales: (M side, N side)."""
    # Each CTA of a pair copies half of the N side's scales.
    sfb_bytes = smem.sfb_stage_bytes // config.num_mma_cta
    m_side = smem.num_m * (copy_cycles(smem.a_stage_bytes) + copy_cycles(smem.sfa_stage_bytes))
    n_side = smem.num_n * (copy_cycles(smem.b_stage_bytes) + copy_cycles(sfb_bytes))
    return m_side, n_side / config.multicast_n


def copy_cycles(nbytes: int) -> float:
    """Returns the copy engine's time for a box; 0 without bytes."""
    return max(COPY_CYCLES, nbytes / COPY_BYTES_PER_CYCLE) if nbytes else 0.0


def k_tile_mma_cycles(config: KernelConfig, smem: SmemPlan) -> float:
    """Returns the time of the tensor cores for a K tile."""
    products, n = smem.num_m * smem.num_n, config.cta_tile_shape_mnk[1]
    if config.use_k96_instrs:
        return products * K96_MMAS / K96_K_TILES * k96_cycles(config, n)
    return products * MMAS_PER_K_TILE * n / MMA_COLUMNS_PER_CYCLE


def k96_cycles(config: KernelConfig, columns: int) -> float:
    """Returns the time of an MMA of 96 elements of K: that of 64 elements, or of reading 48 bytes of every row."""
    read = (MMA_CTA_M + columns // config.num_mma_cta) * K96 // 2
    return max(columns / MMA_COLUMNS_PER_CYCLE, read / SMEM_BYTES_PER_CYCLE)


def fetches_ahead(config: KernelConfig, smem: SmemPlan) -> bool:
    """Whether tiles that share an operand prefetch it into L2.

    If copies bound a tile, many narrow stages cover the latency of device memory, but wide ones do not.
    """
    is_mma_bound = k_tile_mma_cycles(config, smem) > sum(k_tile_copy_cycles(config, smem))
    return config.cta_tile_shape_mnk[1] >= MMA_CTA_M or is_mma_bound


def prefetches_in_turns(config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> bool:
    """Whether clusters take turns in prefetching operands that several of them load."""
    return fetches_ahead(config, smem_plan(config, num_b, formats))


def prefetch_k_tiles(config: KernelConfig, smem: SmemPlan) -> int:
    """Returns the distance in K tiles of the prefetch into L2: the part of memory latency that the ring does not cover."""
    k_tile = max(k_tile_mma_cycles(config, smem), sum(k_tile_copy_cycles(config, smem)))
    return max(round(RING_CYCLES / k_tile) - smem.num_ab_stage, 3)


def tmem_map(config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> TmemMap:
    """Returns the tensor memory of ``config``: accumulators, then scales of A and of B.

    Two accumulators that do not fit next to each other share columns: the second ends where the scales begin. The MMA waits until
    the epilogue has read these columns, in a dual GEMM one slice of both products at a time. If its two accumulators would
    fill tensor memory, the scales of both halves of a K tile use the same columns one after the other, so that only one slice is
    shared.

    Args:
        formats: formats of ``a`` and ``b``.
    """
    _, n, k = config.cta_tile_shape_mnk
    num_m, num_n = operands_on_sides(config, num_b)
    (_, m_atoms), (_, n_atoms) = (format.scale_atoms(1, k) for format in formats_on_sides(config, formats))
    acc_cols = stride = num_b * n
    is_full = config.num_acc_stage == 2 and 2 * acc_cols == TMEM_COLS
    takes_turns = is_full and num_b == 2 and m_atoms == n_atoms == 4 and not config.use_k96_instrs
    if config.use_k96_instrs:
        m_atoms = n_atoms = K96_ATOMS
    elif takes_turns:
        m_atoms = n_atoms = 2
    sfa_cols, sfb_cols = num_m * SF_ATOM_COLS * m_atoms, num_n * sf_blocks_n(n) * SF_ATOM_COLS * n_atoms
    free_cols = TMEM_COLS - sfa_cols - sfb_cols
    if config.num_acc_stage == 2 and 2 * acc_cols > free_cols:
        stride = max(free_cols - acc_cols, 0)
        if takes_turns:
            stride -= stride % EPI_TILE_N
    sfa_col = stride * (config.num_acc_stage - 1) + acc_cols
    return TmemMap(
        acc_cols,
        stride,
        config.num_acc_stage,
        sfa_col,
        sfa_col + sfa_cols,
        sfa_col + sfa_cols + sfb_cols,
        m_atoms,
    )


def resolve(config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> KernelConfig:
    """Returns ``config`` with an explicit stage count."""
    return replace(config, num_ab_stage=smem_plan(config, num_b, formats).num_ab_stage)


def unsupported_reason(
    config: KernelConfig,
    num_b: int = 1,
    formats: Formats = NVFP4_PAIR,
    options: tuple[str, ...] = OPTIONS,
) -> str | None:
    """Returns why this family cannot build ``config``, with the nearest legal value; None if it can.

    options: options of the family.
    """
    reason = foreign_option_reason(config, options) or tile_reason(config, TILES_N, k_tile(formats))
    if reason is not None:
        return reason
    _, n, _ = config.cta_tile_shape_mnk
    if config.num_acc_stage < 1:
        return f"num_acc_stage={config.num_acc_stage}: at least 1 accumulator stage is needed; 2 overlap the epilogue"
    tmem = tmem_map(config, num_b, formats)
    if num_b > 1 and (tmem.acc_cols + tmem.used_cols - tmem.sfa_col > TMEM_COLS or tmem.overlap_cols > n):
        return (
            f"cta_tile_shape_mnk={config.cta_tile_shape_mnk}, num_acc_stage={config.num_acc_stage}: {num_b} accumulators "
            f"of {n} columns a tile do not fit {TMEM_COLS} columns of tensor memory so often; use N tile 64 or 128, or "
            "192 with num_acc_stage=1"
        )
    if tmem.used_cols > TMEM_COLS:
        return (
            f"num_acc_stage={config.num_acc_stage}: {tmem.used_cols} columns of tensor memory, {TMEM_COLS} exist; "
            f"use at most {max(2, (TMEM_COLS - (tmem.used_cols - tmem.sfa_col)) // tmem.acc_cols)}"
        )
    smem, most = (smem_plan(c, num_b, formats) for c in (config, replace(config, num_ab_stage=None)))
    return launch_reason(config, smem, most.num_ab_stage)


def tile_reason(config: KernelConfig, tiles_n: tuple[int, ...], k: int) -> str | None:
    """Returns why there is no tile of this shape, with the nearest legal value; None if there is.

    Args:
        tiles_n: N tiles of the kernel.
        k: the K tile.
    """
    shape = config.cta_tile_shape_mnk
    if shape[0] != MMA_CTA_M:
        return f"cta_tile_shape_mnk={shape}: a CTA holds {MMA_CTA_M} rows of the MMA; use M tile 128"
    if shape[1] not in tiles_n:
        return f"cta_tile_shape_mnk={shape}: N tile {shape[1]} is not built; use one of {tiles_n}"
    if shape[2] != k:
        return (
            f"cta_tile_shape_mnk={shape}: a K tile fills one {K_TILE_BYTES}-byte swizzle row; use K tile {k}"
        )
    return None


def launch_reason(config: KernelConfig, smem: SmemPlan, max_stages: int) -> str | None:
    """Returns why the cluster is impossible, stages do not fit, or too few CTAs are launched; None if all is well.

    Args:
        smem: shared memory of ``config``.
        max_stages: number of stages that fit.
    """
    if config.multicast_n not in MULTICASTS or (config.multicast_n > 1 and config.split_k > 1):
        return (
            f"multicast_n={config.multicast_n}, split_k={config.split_k}: 2 or 4 MMAs of a cluster share the N side's loads, "
            "with all of K; use multicast_n=2 with split_k=1, or multicast_n=1"
        )
    if config.split_k not in SPLITS or (config.split_k > 1 and config.use_2cta_instrs):
        return (
            f"split_k={config.split_k}, use_2cta_instrs={config.use_2cta_instrs}: 2, 4 or 8 CTAs of a cluster share K "
            "tiles, each with MMAs of its own; use split_k=2 with use_2cta_instrs=False, or split_k=1"
        )
    if smem.num_ab_stage < 1 or smem.total_bytes > SMEM_CAPACITY_BYTES:
        return (
            f"num_ab_stage={config.num_ab_stage}: {smem.total_bytes} bytes of shared memory, {SMEM_CAPACITY_BYTES} "
            f"exist; use 1 to {max_stages}"
        )
    if config.num_cta is not None and config.num_cta < config.cluster_size:
        return f"num_cta={config.num_cta}: at least {config.cluster_size} CTA{'s' * (config.cluster_size > 1)} work on a tile"
    return None


def interleave_reason(config: KernelConfig, weight_layout: str) -> str | None:
    """Returns why weights of ``launch_table.INTERLEAVE`` cannot be computed with ``config``; None if they can."""
    if weight_layout not in INTERLEAVE:
        return None
    n, width = config.cta_tile_shape_mnk[1], INTERLEAVE[weight_layout]
    if config.swap_ab:
        return "swap_ab with interleaved weights: their products would lie in lanes of two warps; use swap_ab=False"
    if n % (2 * width):
        return f"N tile {n} with weight_layout={weight_layout!r}: tiles hold whole periods; use N tile 128 or 256"
    if EPI_WARPS * n // (2 * EPI_TILE_N) % config.split_k:
        return f"split_k={config.split_k} with N tile {n} of interleaved weights: every CTA adds up as many units; use N tile 128"
    return None


def quantized_reason(config: KernelConfig, format: BlockFormat) -> str | None:
    """Returns why results of a format cannot be computed with ``config``: None, they always can."""
    return None


def resident_clusters(num_sms: int, cluster_size: int) -> int:
    """Returns the number of clusters resident at once if every CTA fills an SM."""
    return clusters_in_gpcs(num_sms, cluster_size, GPC_SMS, MEASURED_CLUSTERS)


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
