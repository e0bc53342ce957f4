"""Problem and GPU -> config: every candidate's time is estimated from its schedule, and the least is taken.

An estimate adds up what cannot overlap: the start, the waves of tiles, each as long as its busiest CTA or pair or as what
memory delivers to all of them, and the last tile's epilogue. It ranks configs; ``modelled.modelled_time`` predicts times.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from nvfp4_cute.planning.arch import choosing_family_of, sm100
from nvfp4_cute.planning.arch.base import INTERLEAVE
from nvfp4_cute.planning.arch.sm100 import (
    DUAL_TILES_N,
    EPI_TILE_N,
    MMA_COLUMNS_PER_CYCLE,
    MMA_CTA_M,
    RING_CYCLES,
    SPLIT_TILES_N,
    SPLITS,
    TILES_N,
    SmemPlan,
    fetches_ahead,
    k_tile_copy_cycles,
    mma_columns,
    smem_plan,
)
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.planning.schedule import TileSchedule, WorkTile, make_schedule
from nvfp4_cute.problem import NVFP4, Form, Gate, GroupedProblem, gemm_bytes

# Cycles and bytes a cycle, read off modelled launches of the sm_100a kernel (``modelled.modelled_time`` on a B200).
START_CYCLES = 400  # from the kernel's start to the first TMA
PAIR_START_CYCLES = 200  # of a pair: its loads wait for both CTAs, its requests to L2 do not
MEMORY_LATENCY_CYCLES = 2100  # from the first TMA to its data, with every SM asking
HBM_BYTES_PER_CYCLE = 3700  # what device memory gives to all SMs
L2_BYTES_PER_CYCLE = 14000  # and L2
ALIKE = 16  # power of the mean that takes the longer of two times, and more where both are long
ROW_SLICE_CYCLES = 190  # the epilogue of 32 columns whose thread has a run of its own
ACTIVATION_SLICE_CYCLES = 500  # what an activation adds: two special functions an element
LANE_SLICE_CYCLES = 180  # and where a run lies across the lanes of a warp
# By how much a config that splits K has to be better, and one whose MMAs wait for each other's loads.
SPLIT_GAIN = 0.11
MULTICAST_GAIN = 0.025
ALL_GAIN = 0.005  # what all CTAs gain over a few less that share the work evenly: they ask memory for more
MMA_CYCLES = 44  # of one MMA, at least
MMAS_PER_K_TILE = 4
EXCHANGE_CYCLES = (
    900  # of split-K: from the last MMA of a tile to the sums of the other CTAs, beside their bytes
)
EXCHANGE_BYTES_PER_CYCLE = 16  # what a CTA sends (bench/probes/h200_exchange_probe.cu)


@dataclass(frozen=True)
class Estimate:
    """What one config would take, in SM cycles.

    Attributes:
        config: with a number of CTAs.
        start: until the first data are there.
        memory: until memory has delivered every operand once, at the rate that the GPU reaches, or L2 what the SMs ask.
        busiest: loads, MMAs or epilogues of the CTA or pair with the most work of each wave, whichever takes longest.
        stream: the longer of both in each wave, and more where they take about as long.
        tail: the last tile's epilogue.
        waves: tiles of the busiest.
    """

    config: KernelConfig
    start: float
    memory: float
    busiest: float
    stream: float
    tail: float
    waves: int

    @property
    def cycles(self) -> float:
        """All of it."""
        return self.start + self.stream + self.tail

    def __str__(self) -> str:
        """One line of ``bench --explain``."""
        bound = "memory" if self.memory >= self.busiest else "the busiest CTA"
        return (
            f"{self.config.to_name():34} {self.cycles:8.0f} cycles: start {self.start:.0f}, memory {self.memory:.0f}, "
            f"busiest {self.busiest:.0f} in {self.waves} waves, last epilogue {self.tail:.0f}; bound by {bound}"
        )


def choose_config(problem: GroupedProblem, arch: str, num_sms: int) -> KernelConfig:
    """The config to compute a list-form problem with. Raises UnsupportedTarget for an ``arch`` without a kernel."""
    family = choosing_family_of(arch)
    if family is not None:
        is_quantized = problem.out_dtype == NVFP4
        return family.choose(problem.sizes, num_sms, problem.num_b, problem.weight_layout, is_quantized)
    return estimates(problem, num_sms)[0].config


def estimates(problem: GroupedProblem, num_sms: int) -> list[Estimate]:
    """Every candidate of the sm_100 family, the best first; equal ones in the order of the family's table.

    One that splits K or shares loads comes first only where that gains ``SPLIT_GAIN`` or ``MULTICAST_GAIN``: estimates of
    different kinds are less alike than those of one.
    """
    tried = sm100.CANDIDATES if problem.activation is None else sm100.DUAL_CANDIDATES
    if problem.weight_layout != "separate":
        tried = sm100.INTERLEAVED_CANDIDATES
    if problem.is_chain:
        tried = tuple(config for config in tried if config.cluster_size == config.num_mma_cta)
    return sorted((estimate(config, problem, num_sms) for config in tried), key=_ranked)


def _ranked(candidate: Estimate) -> float:
    config = candidate.config
    return candidate.cycles * (
        1 + SPLIT_GAIN * (config.split_k > 1) + MULTICAST_GAIN * (config.multicast_n > 1)
    )


def explain(problem: GroupedProblem, num_sms: int) -> str:
    """Why a config was chosen: a line for each candidate of the sm_100 family, the chosen one first."""
    return "\n".join(map(str, estimates(problem, num_sms)))


def estimate(config: KernelConfig, problem: GroupedProblem, num_sms: int) -> Estimate:
    """The estimate of one config of the sm_100 family: with as few CTAs as finish at the same time, to which the work is dealt
    evenly, or with all that run at a time where they lose no more by it than they gain by asking memory for more.
    """
    resident = sm100.resident_clusters(num_sms, config.cluster_size)
    schedule = make_schedule(problem.sizes, config.work_tile_mnk, resident, config.split_k)
    fewest = -(-schedule.num_tiles // max(schedule.waves, 1))
    all_ctas = _estimate(config, problem, max(schedule.num_cta, 1))
    if fewest == schedule.num_cta:
        return all_ctas
    few_ctas = _estimate(config, problem, fewest)
    loses = all_ctas.cycles > (1 + ALL_GAIN) * few_ctas.cycles
    return few_ctas if loses else replace(few_ctas, config=all_ctas.config)


def _estimate(config: KernelConfig, problem: GroupedProblem, num_clusters: int) -> Estimate:
    split = config.split_k
    schedule = make_schedule(problem.sizes, config.work_tile_mnk, num_clusters, split)
    across_lanes = problem.out_m_major != config.swap_ab
    slice_cycles: float = LANE_SLICE_CYCLES if across_lanes else ROW_SLICE_CYCLES
    if problem.activation is not None:
        slice_cycles += ACTIVATION_SLICE_CYCLES
    if problem.weight_layout != "separate":
        slice_cycles /= 2  # two slices of products make one of results
    num_b = problem.num_b
    smem = smem_plan(config, num_b)
    read = _reads(schedule, num_b)
    memory, busiest, stream, last_slices = 0.0, 0.0, 0.0, 0
    for wave in range(schedule.waves):
        indices = range(wave * num_clusters, min((wave + 1) * num_clusters, schedule.num_tiles))
        tiles = [schedule.work_tile(index) for index in indices]
        hbm = sum(read[index] for index in indices) / HBM_BYTES_PER_CYCLE
        loaded = sum(tile.k_tile_cnt * _k_tile_bytes(config, schedule, tile, smem) for tile in tiles)
        delivered = max(hbm, loaded * config.num_m_cta / L2_BYTES_PER_CYCLE)
        longest = max(
            _tile_cycles(config, schedule, tile, slice_cycles, smem, num_b, wave == 0) for tile in tiles
        )
        memory, busiest = memory + delivered, busiest + longest
        # Neither is even: where they take about as long, now one is waited for and now the other.
        stream += (delivered**ALIKE + longest**ALIKE) ** (1 / ALIKE)
        last_slices = max(_slices(config, schedule, tile) for tile in tiles)
    return Estimate(
        replace(config, num_cta=num_clusters * config.cluster_size),
        START_CYCLES + (PAIR_START_CYCLES if config.use_2cta_instrs else 0) + MEMORY_LATENCY_CYCLES,
        memory,
        busiest,
        stream,
        _epilogue_cycles(config, last_slices, slice_cycles, num_b),
        schedule.waves,
    )


def _reads(schedule: TileSchedule, num_b: int) -> list[int]:
    """Bytes that each tile brings from device memory: what no tile before it has read."""
    tile_m, tile_n, _ = schedule.cta_tile_shape_mnk
    reads, seen = [], set()
    for tile in map(schedule.work_tile, range(schedule.num_tiles)):
        m, n, k = schedule.sizes[tile.group_idx]
        rows = 0
        sides = (("a", tile.tile_m_idx, tile_m, m, 1), ("b", tile.tile_n_idx, tile_n, n, num_b))
        for side, index, extent, total, count in sides:
            strip = (side, tile.group_idx, index)
            if strip not in seen:
                seen.add(strip)
                rows += count * min(extent, total - index * extent)
        reads.append(gemm_bytes(0, rows, k, 0))
    return reads


def _n_side(config: KernelConfig, schedule: TileSchedule, tile: WorkTile) -> tuple[int, int, int]:
    """Of the tile's N side: rows of the group from its first one on, its first one, and as many as it has at most."""
    m, n, _ = schedule.sizes[tile.group_idx]
    extent, index = (m, tile.tile_m_idx) if config.swap_ab else (n, tile.tile_n_idx)
    tile_n = config.cta_tile_shape_mnk[1]
    return extent - index * tile_n, index * tile_n, tile_n


def _slices(config: KernelConfig, schedule: TileSchedule, tile: WorkTile) -> int:
    """Slices of the tile that the epilogue reads."""
    rows, _, tile_n = _n_side(config, schedule, tile)
    return -(-min(rows, tile_n) // EPI_TILE_N)


def _k_tile_bytes(config: KernelConfig, schedule: TileSchedule, tile: WorkTile, smem: SmemPlan) -> int:
    """What one CTA loads for a K tile."""
    rows_n = mma_columns(*_n_side(config, schedule, tile)) // config.num_mma_cta
    n_side = smem.num_n * (rows_n * config.cta_tile_shape_mnk[2] // 2 + smem.sfb_stage_bytes)
    return smem.num_m * (smem.a_stage_bytes + smem.sfa_stage_bytes) + n_side // config.multicast_n


def _load_cycles(config: KernelConfig, schedule: TileSchedule, tile: WorkTile, smem: SmemPlan) -> float:
    """What the copy engine of one CTA needs for a K tile: a box an operand and one of its scales, and the CTA's share of
    what it has L2 fetch ahead, where tiles share an operand and the ring does not hold them whole.
    """
    m, n, _ = schedule.sizes[tile.group_idx]
    tile_m, tile_n, _ = schedule.cta_tile_shape_mnk
    sharing_a, sharing_b = -(-n // tile_n), -(-m // tile_m)
    sharing = (sharing_b, sharing_a) if config.swap_ab else (sharing_a, sharing_b)
    ahead = max(0.0, 1 - smem.num_ab_stage / tile.k_tile_cnt) if fetches_ahead(config, smem) else 0.0
    sides = zip(k_tile_copy_cycles(config, smem), sharing, strict=True)
    return sum(cycles * (1 + ahead / tiles * (tiles > 1)) for cycles, tiles in sides)


def _tile_cycles(
    config: KernelConfig,
    schedule: TileSchedule,
    tile: WorkTile,
    slice_cycles: float,
    smem: SmemPlan,
    num_b: int,
    is_first: bool,
) -> float:
    """What the slowest of the three roles needs for a tile: they overlap."""
    columns = mma_columns(*_n_side(config, schedule, tile))
    slices = _slices(config, schedule, tile)
    mma = MMAS_PER_K_TILE * num_b * max(MMA_CYCLES, columns / MMA_COLUMNS_PER_CYCLE)
    k_tiles = -(-tile.k_tile_cnt // config.split_k)
    step = max(_load_cycles(config, schedule, tile, smem), mma)
    cycles = max(k_tiles * step, _epilogue_cycles(config, slices, slice_cycles, num_b))
    if schedule.sizes[tile.group_idx][0] > schedule.cta_tile_shape_mnk[0] and fetches_ahead(config, smem):
        return cycles
    # Weights that no tile has L2 fetch come no sooner than the ring asks for them.
    if not is_first:
        return max(cycles, k_tiles * RING_CYCLES / smem.num_ab_stage)
    rounds, rest = divmod(k_tiles - 1, smem.num_ab_stage)
    return max(cycles, rounds * RING_CYCLES + (rest + 1) * step)


def _epilogue_cycles(config: KernelConfig, slices: int, slice_cycles: float, num_b: int) -> float:
    """From a tile's last MMA to its last store; of split-K, a CTA sends all but its part and stores that."""
    split = config.split_k
    if split == 1:
        return slices * slice_cycles
    sent = num_b * MMA_CTA_M * slices * EPI_TILE_N * 4 * (split - 1) / split
    return EXCHANGE_CYCLES + sent / EXCHANGE_BYTES_PER_CYCLE + -(-slices // split) * slice_cycles


def config_for_mean(
    arch: str,
    num_sms: int,
    num_groups: int,
    mean: tuple[int, int, int],
    gate: Gate | None = None,
    is_quantized: bool = False,
    is_ragged: bool = True,
) -> KernelConfig:
    """The config of a problem whose group sizes only the device knows. Raises UnsupportedTarget as ``choose_config``.

    On the sm_100 family K is split where even the most tiles that the rows can make leave SMs idle.

    Args:
        mean: (m, n, k) of a group of mean size, n of its results.
        is_quantized: whether results are NVFP4.
        is_ragged: whether groups share rows, so that some have more than the mean; no group of the masked form has.
    """
    m, n, k = mean
    weight_layout = "separate" if gate is None else gate.weight_layout
    is_interleaved = weight_layout in INTERLEAVE
    sizes = [(m, 2 * n if is_interleaved else n, k)] * num_groups
    num_b = 1 if gate is None or is_interleaved else 2
    family = choosing_family_of(arch)
    if family is not None:
        return family.choose(sizes, num_sms, num_b, weight_layout, is_quantized, are_means=is_ragged)
    chosen = config_for_rows(m, n, gate)
    return chosen if gate is not None else _split_where_idle(chosen, num_sms, num_groups, mean)


@lru_cache(1024)
def _split_where_idle(
    whole: KernelConfig, num_sms: int, num_groups: int, mean: tuple[int, int, int]
) -> KernelConfig:
    """``whole``, or what splits K where that leaves most SMs idle however the rows are dealt to the groups, and gains.

    Rows in all bound the tiles: every group's first one takes a row at least, and each further one as many as it has.
    """
    m, n, _ = mean
    tile_n = whole.cta_tile_shape_mnk[1]
    further = num_groups * max(m - 1, 0) // tile_n
    most_tiles = (num_groups + further) * -(-n // MMA_CTA_M)
    splits = [split for split in SPLITS[1:] if most_tiles <= sm100.resident_clusters(num_sms, split)]
    if not splits or tile_n not in SPLIT_TILES_N:
        return whole
    problem = GroupedProblem((mean,) * num_groups)
    tried = [whole, *(replace(whole, use_2cta_instrs=False, split_k=split) for split in splits)]
    return min(tried, key=lambda config: _ranked(estimate(config, problem, num_sms)))


def config_for_rows(mean_rows: int, n: int, gate: Gate | None = None) -> KernelConfig:
    """The same on the sm_100 family: tokens on the N side, in the smallest tile that holds a group of mean size; a pair
    where the weights fill it.
    """
    if gate is not None and gate.weight_layout in INTERLEAVE:
        # Weights on the N side: a tile of 256 rows has 128 results.
        return KernelConfig((128, 256, 256), use_2cta_instrs=mean_rows > MMA_CTA_M)
    tiles = TILES_N if gate is None else DUAL_TILES_N
    tile_n = next((tile for tile in tiles if tile >= mean_rows), tiles[-1])
    return KernelConfig((128, tile_n, 256), use_2cta_instrs=n > 128, swap_ab=True)


def dual_candidates(
    arch: str, form: Form, gate: Gate, is_quantized: bool = False
) -> tuple[KernelConfig, ...]:
    """The same as :func:`candidates` of dual GEMMs."""
    family, is_interleaved = choosing_family_of(arch), gate.weight_layout in INTERLEAVE
    if family is not None:
        return family.candidates(1 if is_interleaved else 2, gate.weight_layout, is_quantized)
    if form not in ("list", "batched"):
        sizes = ((rows, n) for n in (128, 256) for rows in (*DUAL_TILES_N, 2 * MMA_CTA_M))
        return tuple(dict.fromkeys(config_for_rows(rows, n, gate) for rows, n in sizes))
    return sm100.INTERLEAVED_CANDIDATES if is_interleaved else sm100.DUAL_CANDIDATES


def candidates(arch: str, form: Form, is_quantized: bool = False) -> tuple[KernelConfig, ...]:
    """Every config that is computed with where the caller chooses none. Raises UnsupportedTarget as ``choose_config``."""
    family = choosing_family_of(arch)
    if family is not None:
        return family.candidates(is_quantized=is_quantized)
    if form in ("list", "batched"):
        return sm100.CANDIDATES
    split = (
        replace(config_for_rows(rows, MMA_CTA_M), split_k=split)
        for rows in SPLIT_TILES_N
        for split in SPLITS[1:]
    )
    return (*(config_for_rows(rows, n) for n in (128, 256) for rows in TILES_N), *split)
