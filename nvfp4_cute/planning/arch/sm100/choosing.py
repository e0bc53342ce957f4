"""Choice of a config on the sm_100 family: estimates every candidate's time from its schedule, and takes the least.

An estimate adds the times that cannot overlap: the start, the waves of tiles, and the last tile's epilogue. A wave
lasts as long as its busiest CTA or pair, or as memory needs to deliver its data. Estimates rank configs;
``modelled.modelled_times`` predicts times.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from nvfp4_cute.formats.block_format import NVFP4_PAIR, BlockFormat, Formats
from nvfp4_cute.launch_table import INTERLEAVE
from nvfp4_cute.planning.arch.base import allowed
from nvfp4_cute.planning.arch.sm100.limits import (
    CANDIDATES,
    DUAL_CANDIDATES,
    DUAL_TILES_N,
    EPI_PART_N,
    EPI_TILE_N,
    INTERLEAVED_CANDIDATES,
    K96_K_TILES,
    K96_MMAS,
    MMA_COLUMNS_PER_CYCLE,
    MMA_CTA_M,
    MMAS_PER_K_TILE,
    RING_CYCLES,
    SPLIT_TILES_N,
    SPLITS,
    TILES_N,
    SmemPlan,
    fetches_ahead,
    k96_cycles,
    k_tile_copy_cycles,
    least_columns,
    mma_columns,
    resident_clusters,
    skips_columns,
    smem_plan,
    with_k_tile,
)
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.planning.schedule import TileSchedule, WorkTile, make_schedule
from nvfp4_cute.problem import Form, GroupedProblem


@dataclass(frozen=True)
class Costs:
    """Terms of an estimate, in SM cycles and bytes per cycle.

    Source: modelled launches of the kernel (``modelled.modelled_times`` on a B200), unless a line says otherwise.
    """

    start: float = 400  # from the kernel's start to the first TMA
    pair_start: float = 200  # extra start of a pair: its loads wait for both CTAs, its requests to L2 do not
    memory_latency: float = 2100  # from the first TMA to its data, while every SM requests data
    hbm_bytes_per_cycle: float = 3700  # bandwidth of device memory for all SMs
    l2_bytes_per_cycle: float = 14000  # bandwidth of L2
    alike: float = 16  # power of the soft maximum of two times
    row_slice: float = 190  # epilogue of 32 columns if each thread has a contiguous run
    lane_slice: float = 180  # epilogue of 32 columns if a run is spread over the lanes of a warp
    activation_slice: float = 500  # extra time of an activation: two special functions per element
    mma: float = 44  # least time of one MMA
    exchange: float = 900  # split-K: from a tile's last MMA to the sums of the other CTAs, without the transfer of their bytes
    exchange_bytes_per_cycle: float = (
        16  # bytes that a CTA sends per cycle; measured on an H200 (bench/probes/h200_exchange_probe.cu)
    )
    # Required gain of a config that splits K, and of one whose MMAs wait for each other's loads. Estimates of different
    # kinds compare less well than those of one kind.
    split_gain: float = 0.11
    multicast_gain: float = 0.025
    # Least relative gain of a tile over the smallest one that holds a group of mean size, if the sizes are not known.
    tile_gain: float = 0.03
    all_gain: float = (
        0.005  # gain of all CTAs over slightly fewer with even shares, because more CTAs request data
    )


COSTS = Costs()
# Most tiles per SM for which tiles are compared if sizes are unknown. With more, tails matter less and estimates take longer.
FEW_TILES = 1
# Largest relative deviation of a group's rows from their mean, in estimates for unknown sizes: even, mild and uneven routing.
SPREADS = (0.0, 0.3, 0.5)
# Rows of a group from which on the widest tiles are chosen: few of their rows are beyond the group's end.
WIDE_ROWS = 768
# Least K with which a pair computes a tile faster than two single CTAs. A single CTA loads all operands of its tile from L2.
LONG_K = 4096
# Forms in which the host knows the sizes of groups.
KNOWN_SIZES = ("list", "batched")


@dataclass(frozen=True)
class Estimate:
    """Estimated time of one config, in SM cycles.

    Attributes:
        config: config with a number of CTAs.
        start: time until the first data arrive.
        memory: time in which device memory delivers every operand once, or L2 all loads of the SMs.
        busiest: loads, MMAs or epilogues (the longest) of the CTA or pair with the most work of each wave.
        stream: the longer of both in each wave, and more if they take about equally long.
        tail: the last tile's epilogue.
        waves: tiles of the busiest CTA or pair.
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
        """Total of all terms."""
        return self.start + self.stream + self.tail

    def __str__(self) -> str:
        """Returns the line of ``bench --explain``."""
        bound = "memory" if self.memory >= self.busiest else "the busiest CTA"
        return (
            f"{self.config.to_name():34} {self.cycles:8.0f} cycles: start {self.start:.0f}, memory {self.memory:.0f}, "
            f"busiest {self.busiest:.0f} in {self.waves} waves, last epilogue {self.tail:.0f}; bound by {bound}"
        )


def candidates(
    num_b: int = 1,
    weight_layout: str = "separate",
    out_format: BlockFormat | None = None,
    form: Form = "list",
    formats: Formats = NVFP4_PAIR,
) -> tuple[KernelConfig, ...]:
    """Returns the candidates.

    Args:
        num_b: weight operands: 2 for a dual GEMM whose weights are not interleaved.
        weight_layout: "separate", or one of ``launch_table.INTERLEAVE``.
        out_format: ignored.
        form: if only the device knows the groups' sizes, there is one config per number of rows.
        formats: formats of ``a`` and ``b``, which determine the K tile.
    """
    tried = _candidates_of_k_tile_256(num_b, weight_layout, form)
    return tuple(with_k_tile(config, formats) for config in tried)


def _candidates_of_k_tile_256(num_b: int, weight_layout: str, form: Form) -> tuple[KernelConfig, ...]:
    is_interleaved = weight_layout in INTERLEAVE
    if form in KNOWN_SIZES:
        return INTERLEAVED_CANDIDATES if is_interleaved else DUAL_CANDIDATES if num_b > 1 else CANDIDATES
    sizes = ((rows, n) for n in (128, 256) for rows in (*TILES_N, WIDE_ROWS))
    whole = dict.fromkeys(config_for_rows(rows, n, num_b, weight_layout) for rows, n in sizes)
    split = (
        replace(config_for_rows(rows, MMA_CTA_M, num_b), split_k=split)
        for rows in (() if is_interleaved else SPLIT_TILES_N[num_b])
        for split in SPLITS[1:]
    )
    return (*whole, *split)


def choose(problem: GroupedProblem, num_sms: int) -> KernelConfig:
    """Returns the config for groups of these sizes, or of this mean size if only the device knows the sizes."""
    if problem.form in KNOWN_SIZES:
        return estimates(problem, num_sms)[0].config
    return _config_for_mean(problem, num_sms)


def estimates(problem: GroupedProblem, num_sms: int) -> list[Estimate]:
    """Returns every candidate, the best first; equal ones in the order of the family's table.

    Empty if only the device knows the sizes.

    A candidate that splits K or shares loads comes first only if it gains ``Costs.split_gain`` or ``multicast_gain``.
    """
    if problem.form not in KNOWN_SIZES:
        return []
    return ranked(
        candidates(problem.num_b, problem.weight_layout, formats=_formats(problem)), problem, num_sms
    )


def ranked(tried: tuple[KernelConfig, ...], problem: GroupedProblem, num_sms: int) -> list[Estimate]:
    """Returns the estimates of configs for a problem of known sizes, ordered as by :func:`estimates`."""
    if problem.is_chain:
        tried = tuple(config for config in tried if config.cluster_size == config.num_mma_cta)
    return sorted((estimate(config, problem, num_sms) for config in allowed(tried, problem)), key=_ranked)


def _ranked(candidate: Estimate) -> float:
    config = candidate.config
    return candidate.cycles * (
        1 + COSTS.split_gain * (config.split_k > 1) + COSTS.multicast_gain * (config.multicast_n > 1)
    )


def estimate(config: KernelConfig, problem: GroupedProblem, num_sms: int) -> Estimate:
    """Returns the estimate of one config.

    It uses the fewest CTAs that finish at the same time, with evenly divided work, or all that run at a time if they
    gain more from memory bandwidth than they lose.
    """
    resident = resident_clusters(num_sms, config.cluster_size)
    schedule = make_schedule(problem.sizes, config.work_tile_mnk, resident, config.split_k)
    fewest = -(-schedule.num_tiles // max(schedule.waves, 1))
    all_ctas = _estimate(config, problem, max(schedule.num_cta, 1))
    if fewest == schedule.num_cta:
        return all_ctas
    few_ctas = _estimate(config, problem, fewest)
    loses = all_ctas.cycles > (1 + COSTS.all_gain) * few_ctas.cycles
    return few_ctas if loses else replace(few_ctas, config=all_ctas.config)


def _estimate(config: KernelConfig, problem: GroupedProblem, num_clusters: int) -> Estimate:
    split = config.split_k
    schedule = make_schedule(problem.sizes, config.work_tile_mnk, num_clusters, split)
    across_lanes = problem.out_m_major != config.swap_ab
    slice_cycles = COSTS.lane_slice if across_lanes else COSTS.row_slice
    if problem.activation is not None:
        slice_cycles += COSTS.activation_slice
    if problem.weight_layout != "separate":
        slice_cycles /= 2  # two slices of products make one slice of results
    num_b = problem.num_b
    smem = smem_plan(config, num_b, _formats(problem))
    read = _reads(schedule, problem)
    skips = skips_columns(config) and (split > 1 or problem.activation is not None)
    memory, busiest, stream, last_slices = 0.0, 0.0, 0.0, 0.0
    for wave in range(schedule.waves):
        indices = range(wave * num_clusters, min((wave + 1) * num_clusters, schedule.num_tiles))
        tiles = [schedule.work_tile(index) for index in indices]
        hbm = sum(read[index] for index in indices) / COSTS.hbm_bytes_per_cycle
        loaded = sum(tile.k_tile_cnt * _k_tile_bytes(config, schedule, tile, smem) for tile in tiles)
        delivered = max(hbm, loaded * config.num_m_cta / COSTS.l2_bytes_per_cycle)
        longest = max(
            _tile_cycles(config, schedule, tile, slice_cycles, smem, num_b, wave == 0, skips)
            for tile in tiles
        )
        memory, busiest = memory + delivered, busiest + longest
        # Neither time is even. If they are about equal, sometimes one is waited for and sometimes the other.
        stream += (delivered**COSTS.alike + longest**COSTS.alike) ** (1 / COSTS.alike)
        last_slices = max(_slices(config, schedule, tile, skips) for tile in tiles)
    return Estimate(
        replace(config, num_cta=num_clusters * config.cluster_size),
        COSTS.start + (COSTS.pair_start if config.use_2cta_instrs else 0) + COSTS.memory_latency,
        memory,
        busiest,
        stream,
        _epilogue_cycles(config, last_slices, slice_cycles, num_b),
        schedule.waves,
    )


def _formats(problem: GroupedProblem) -> Formats:
    return problem.a_format, problem.b_format


def _reads(schedule: TileSchedule, problem: GroupedProblem) -> list[int]:
    """Returns the bytes that each tile loads from device memory: data that no earlier tile has read."""
    tile_m, tile_n, _ = schedule.cta_tile_shape_mnk
    reads, seen = [], set()
    for tile in map(schedule.work_tile, range(schedule.num_tiles)):
        m, n, k = schedule.sizes[tile.group_idx]
        rows = {"a": 0, "b": 0}
        sides = (("a", tile.tile_m_idx, tile_m, m, 1), ("b", tile.tile_n_idx, tile_n, n, problem.num_b))
        for side, index, extent, total, count in sides:
            strip = (side, tile.group_idx, index)
            if strip not in seen:
                seen.add(strip)
                rows[side] = count * min(extent, total - index * extent)
        reads.append(problem.a_format.nbytes(rows["a"], k) + problem.b_format.nbytes(rows["b"], k))
    return reads


def _n_side(config: KernelConfig, schedule: TileSchedule, tile: WorkTile) -> tuple[int, int, int]:
    """Returns (rows of the group from the tile's first N-side row on, the first row, most rows of the tile)."""
    m, n, _ = schedule.sizes[tile.group_idx]
    extent, index = (m, tile.tile_m_idx) if config.swap_ab else (n, tile.tile_n_idx)
    tile_n = config.cta_tile_shape_mnk[1]
    return extent - index * tile_n, index * tile_n, tile_n


def _columns(config: KernelConfig, schedule: TileSchedule, tile: WorkTile) -> int:
    """Returns the columns that an MMA of the tile computes."""
    return max(mma_columns(*_n_side(config, schedule, tile)), least_columns(config))


def _slices(config: KernelConfig, schedule: TileSchedule, tile: WorkTile, skips: bool) -> float:
    """Returns the slices of the tile that the epilogue reads. skips: whether it skips parts of a slice."""
    rows, _, tile_n = _n_side(config, schedule, tile)
    if skips and rows <= EPI_TILE_N:
        return ceil(rows / EPI_PART_N) * EPI_PART_N / EPI_TILE_N
    return ceil(min(rows, tile_n) / EPI_TILE_N)


def _k_tile_bytes(config: KernelConfig, schedule: TileSchedule, tile: WorkTile, smem: SmemPlan) -> int:
    """Returns the bytes that one CTA loads for a K tile."""
    rows_n = _columns(config, schedule, tile) // config.num_mma_cta
    rows = config.cta_tile_shape_mnk[1] // config.num_mma_cta
    n_side = smem.num_n * (rows_n * (smem.b_stage_bytes - smem.b_gap_bytes) // rows + smem.sfb_stage_bytes)
    m_side = smem.num_m * (smem.a_stage_bytes - smem.a_gap_bytes + smem.sfa_stage_bytes)
    return m_side + n_side // config.multicast_n


def _load_cycles(config: KernelConfig, schedule: TileSchedule, tile: WorkTile, smem: SmemPlan) -> float:
    """Returns the time of one CTA's copy engine for a K tile.

    It has one box per operand and one of its scales, plus the CTA's share of the prefetches into L2, if tiles share an
    operand and the ring does not hold them completely.
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
    skips: bool,
) -> float:
    """Returns the time of the slowest of the three overlapping roles for a tile."""
    columns = _columns(config, schedule, tile)
    slices = _slices(config, schedule, tile, skips)
    if config.use_k96_instrs:
        mma = K96_MMAS / K96_K_TILES * num_b * k96_cycles(config, columns)
    else:
        mma = MMAS_PER_K_TILE * num_b * max(COSTS.mma, columns / MMA_COLUMNS_PER_CYCLE)
    k_tiles = -(-tile.k_tile_cnt // config.split_k)
    step = max(_load_cycles(config, schedule, tile, smem), mma)
    cycles = max(k_tiles * step, _epilogue_cycles(config, slices, slice_cycles, num_b))
    if schedule.sizes[tile.group_idx][0] > schedule.cta_tile_shape_mnk[0] and fetches_ahead(config, smem):
        return cycles
    # Without a prefetch into L2, weights arrive only after the ring requests them.
    if not is_first:
        return max(cycles, k_tiles * RING_CYCLES / smem.num_ab_stage)
    rounds, rest = divmod(k_tiles - 1, smem.num_ab_stage)
    return max(cycles, rounds * RING_CYCLES + (rest + 1) * step)


def _epilogue_cycles(config: KernelConfig, slices: float, slice_cycles: float, num_b: int) -> float:
    """Returns the time from a tile's last MMA to its last store.

    With split-K, a CTA sends all but its part and stores that part.
    """
    split, whole_slices = config.split_k, max(ceil(slices), 1)
    if split == 1:
        return slices * slice_cycles
    sent = num_b * MMA_CTA_M * slices * EPI_TILE_N * 4 * (split - 1) / split
    stored = ceil(whole_slices / split) * slices / whole_slices
    return COSTS.exchange + sent / COSTS.exchange_bytes_per_cycle + stored * slice_cycles


def _config_for_mean(problem: GroupedProblem, num_sms: int) -> KernelConfig:
    """Returns the config for groups of the given mean sizes.

    The tile is the smallest one that holds a group of mean size, or that of the least estimate if there are few tiles. K is split
    if even the largest number of tiles that the rows can form leaves SMs idle.
    """
    (m, n, k), formats = problem.sizes[0], _formats(problem)
    chosen = with_k_tile(config_for_rows(m, n, problem.num_b, problem.weight_layout, k), formats)
    if problem.weight_layout != "separate" or problem.batch_invariant:
        return chosen
    # Groups without rows have no tiles.
    problem = replace(
        problem, form="list", sizes=((m, n, k),) * max(sum(size[0] > 0 for size in problem.sizes), 1)
    )
    tiles = make_schedule(problem.sizes, chosen.work_tile_mnk, num_sms).num_tiles
    if tiles <= FEW_TILES * num_sms:
        chosen = _of_least_estimate(chosen, num_sms, problem)
    return _of_few_tiles(chosen, num_sms, problem)


@lru_cache(1024)
def _of_least_estimate(whole: KernelConfig, num_sms: int, problem: GroupedProblem) -> KernelConfig:
    """Returns ``whole``, or a config with another tile whose mean estimate over ``SPREADS`` is lower by ``COSTS.tile_gain``."""
    (m, n, k), groups = problem.sizes[0], problem.num_groups
    problems = []
    for most in SPREADS:
        steps = [0.0] if groups == 1 else [2 * i / (groups - 1) - 1 for i in range(groups)]
        problems.append(
            replace(problem, sizes=tuple((max(1, round(m * (1 + most * step))), n, k) for step in steps))
        )

    def cycles(config: KernelConfig) -> float:
        total = sum(estimate(config, problem, num_sms).cycles for problem in problems)
        return total * (1 if config == whole else 1 + COSTS.tile_gain)

    rows_of_tiles, formats = (*TILES_N, WIDE_ROWS), _formats(problem)
    tried = dict.fromkeys(config_for_rows(rows, n, problem.num_b) for rows in rows_of_tiles)
    others = (with_k_tile(config, formats) for config in tried)
    return min([whole, *others], key=cycles)


@lru_cache(1024)
def _of_few_tiles(whole: KernelConfig, num_sms: int, problem: GroupedProblem) -> KernelConfig:
    """Returns ``whole``, or a config that splits K if most SMs are idle for every division of the rows, and it gains.

    If no CTA can have a second tile, the config has no more stages than a tile has K tiles: CTAs of the next launch find room
    before those of this one have ended.
    """
    (m, n, k), groups = problem.sizes[0], problem.num_groups

    def fits(config: KernelConfig) -> bool:
        tile_m, tile_n, _ = config.work_tile_mnk
        # The total of rows bounds the tiles: every group's first tile has at least one row, and each further tile is full.
        most_tiles = (groups + groups * max(m - 1, 0) // tile_m) * -(-n // tile_n)
        return most_tiles <= resident_clusters(num_sms, config.cluster_size)

    chosen = whole
    if whole.swap_ab and whole.cta_tile_shape_mnk[1] in SPLIT_TILES_N[problem.num_b]:
        splits = (replace(whole, use_2cta_instrs=False, split_k=split) for split in SPLITS[1:])
        tried = [whole, *filter(fits, splits)]
        if tried[1:]:
            chosen = min(tried, key=lambda config: _ranked(estimate(config, problem, num_sms)))
    k_tiles = -(-k // (chosen.cta_tile_shape_mnk[2] * chosen.split_k))
    if not fits(chosen) or k_tiles >= smem_plan(chosen, problem.num_b, _formats(problem)).num_ab_stage:
        return chosen
    return replace(chosen, num_ab_stage=k_tiles, num_acc_stage=1)


def config_for_rows(
    mean_rows: int, n: int, num_b: int = 1, weight_layout: str = "separate", k: int = 0
) -> KernelConfig:
    """Returns the config for groups whose sizes only the device knows, with the K tile of NVFP4.

    Tokens are on the N side, in the smallest tile that holds a group of mean size. A pair computes a tile if weights
    fill it. Groups of more than 192 rows are exceptions (modelled times: ``bench/notes/2026-11-29-b200-prefill.md``):

    - Up to 256 rows and K below ``LONG_K``, weights bound the launch. A group that exceeds a tile of 256 rows would load all its
      weights for the rest, so tokens are on the M side, in tiles of 128 rows, each of a single CTA.
    - Up to ``WIDE_ROWS``, tiles have 192 rows: two accumulators of 256 columns would share some.
    - From there on, a dual GEMM has tokens on the M side, where a pair loads 38 KB per K tile instead of 46.
    """
    if weight_layout in INTERLEAVE:
        # Weights on the N side: a tile of 256 rows has 128 results.
        return KernelConfig((128, 256, 256), use_2cta_instrs=mean_rows > MMA_CTA_M)
    is_pair, is_wide = n > MMA_CTA_M, mean_rows >= WIDE_ROWS
    tiles: tuple[int, ...]
    if num_b > 1:
        tiles, tokens_on_m = DUAL_TILES_N, is_pair and is_wide
    else:
        tiles, tokens_on_m = TILES_N, is_pair and TILES_N[-2] < mean_rows <= TILES_N[-1] and k < LONG_K
        if is_pair and not is_wide and not tokens_on_m:
            tiles = TILES_N[:-1]
    tile_n = next((tile for tile in tiles if tile >= mean_rows), tiles[-1])
    return KernelConfig(
        (128, tile_n, 256),
        use_2cta_instrs=is_pair and (num_b > 1 or not tokens_on_m),
        swap_ab=not tokens_on_m,
    )
