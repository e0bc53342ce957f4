"""sm_90a, weight-only: what a KernelConfig of 16-bit activations times NVFP4 weights costs, and why one is refused.

``cta_tile_shape_mnk`` is (weight rows, tokens, K) with ``swap_ab``, as of :mod:`.sm90`; here its K is what a pipeline stage
holds, 128 or 256 values. ``multicast_n=2``: two CTAs with neighbouring weights share what they load of the tokens.
``split_k``: the CTAs of a cluster share a tile's K tiles.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.planning.arch.base import clusters_in_gpcs, foreign_option_reason
from nvfp4_cute.planning.arch.sm90 import (
    FP16_BYTES,
    FP32_BYTES,
    GPC_SMS,
    MAX_AB_STAGE,
    MAX_TILE_TOKENS,
    MEASURED_CLUSTERS,
    PAIRED_TILE_TOKENS,
    SF_BLOCK_ROWS,
    SMEM_CAPACITY_BYTES,
    SMEM_PER_CTA_BYTES,
    SMEM_PER_SM_BYTES,
    SMEM_RESERVED_BYTES,
    TILE_K,
    TILE_WEIGHTS,
    TOKEN_BOXES,
    TOKEN_STEP,
)
from nvfp4_cute.planning.config import KernelConfig

ARCHS = ("sm_90a",)
KERNEL = "sm90.weight_only.grouped_gemm.WeightOnlyGemmSm90"
OPTIONS = ("multicast_n",)
TILES_K = (TILE_K, 2 * TILE_K)
# Tokens of the tiles that are tried where the caller chooses no config.
TOKEN_CHOICES = (8, 16, 32, 64, 96, 128, 192, 256)
# CTAs that may share K tiles, and tokens of the largest tile of which the others' sums fit the first one's shared memory.
SPLITS = {1: MAX_TILE_TOKENS, 2: 128, 4: 64, 8: 16}
PAIR = 2
# Scales of 64 values of K a row lie in one atom; 16 values are one scale's.
SF_ATOM_K, SF_BYTES_OF_ATOM = 64, 4
MIN_STAGES = 2
DEFAULT_CONFIG = KernelConfig((TILE_WEIGHTS, 64, TILE_K), num_acc_stage=1, swap_ab=True)
# Model of a launch: the launch, a tile, and a K tile of 128 values, which takes the time of its instructions, of its MMAs, or of
# what the memory and L2 deliver.
US_PER_LAUNCH, US_PER_TILE, US_PER_SPLIT_TILE = 5.1, 1.0, 1.0
US_PER_K_TILE, US_PER_TOKEN, MMA_US_PER_TOKEN = 0.26, 0.0012, 0.00485
PAIRED_FACTOR = 1.7
HBM_BYTES_PER_US, L2_BYTES_PER_US = 2.9e6, 5.0e6


@dataclass(frozen=True)
class WeightOnlySmem:
    """Bytes of one stage, by operand, and the number of stages. Plain integers, printable.

    Attributes:
        b_stage_bytes, sfb_stage_bytes: of each operand with weights, and of its scales.
        a_stage_bytes: tokens of 16 bits.
        num_ab_stage: stages.
        partial_bytes: sums that the first CTA of a cluster gets from the others.
        num_b: operands with weights.
    """

    b_stage_bytes: int
    sfb_stage_bytes: int
    a_stage_bytes: int
    num_ab_stage: int
    partial_bytes: int
    num_b: int

    @property
    def weight_bytes(self) -> int:
        """Of a stage: what the warp that loads weights brings in."""
        return self.num_b * (self.b_stage_bytes + self.sfb_stage_bytes)

    @property
    def total_bytes(self) -> int:
        """Of all stages and of what is reserved beside them."""
        stages = (self.weight_bytes + self.a_stage_bytes) * self.num_ab_stage
        return stages + self.partial_bytes + SMEM_RESERVED_BYTES


def ctas_per_sm(config: KernelConfig) -> int:
    """CTAs that share an SM: those of few tokens, whose warps fill each other's waits."""
    return 2 if config.work_tile_mnk[0] <= PAIRED_TILE_TOKENS else 1


def token_box(config: KernelConfig) -> int:
    """Tokens of one copy: whole swizzle atoms. The CTAs of a pair take turns."""
    return max(rows for rows in TOKEN_BOXES if config.work_tile_mnk[0] % (config.multicast_n * rows) == 0)


def leaves_tokens_out(config: KernelConfig) -> bool:
    """Whether tokens may be multiplied that no copy brought."""
    return token_box(config) < min(TOKEN_STEP, config.work_tile_mnk[0])


def smem_plan(config: KernelConfig, num_b: int = 1) -> WeightOnlySmem:
    """Shared memory of ``config``. ``num_ab_stage=None`` is resolved to as many stages as fit."""
    weights, tokens, k = config.cta_tile_shape_mnk
    plan = WeightOnlySmem(
        b_stage_bytes=weights * NVFP4.row_bytes(k),
        sfb_stage_bytes=SF_BLOCK_ROWS * k // SF_ATOM_K * SF_BYTES_OF_ATOM,
        a_stage_bytes=tokens * k * FP16_BYTES,
        num_ab_stage=config.num_ab_stage or 0,
        partial_bytes=(config.split_k - 1) * tokens * TILE_WEIGHTS * FP32_BYTES,
        num_b=num_b,
    )
    if config.num_ab_stage is None:
        free = smem_capacity_bytes(config) - plan.total_bytes
        plan = replace(plan, num_ab_stage=min(free // (plan.weight_bytes + plan.a_stage_bytes), MAX_AB_STAGE))
    return plan


def smem_capacity_bytes(config: KernelConfig) -> int:
    """Shared memory that a CTA can have."""
    return min(SMEM_PER_SM_BYTES // ctas_per_sm(config) - SMEM_PER_CTA_BYTES, SMEM_CAPACITY_BYTES)


def resolve(config: KernelConfig, num_b: int = 1) -> KernelConfig:
    """``config`` with its stage count made explicit."""
    return replace(config, num_ab_stage=smem_plan(config, num_b).num_ab_stage)


def unsupported_reason(config: KernelConfig, num_b: int = 1) -> str | None:
    """Why the weight-only kernel cannot be built with ``config``, with the nearest legal value; None where it can."""
    weights, tokens, k = shape = config.cta_tile_shape_mnk
    foreign = foreign_option_reason(config, OPTIONS)
    if foreign is not None:
        return foreign
    plain = {"swap_ab": True, "num_acc_stage": 1}
    for name, value in plain.items():
        if getattr(config, name) != value:
            found = f"{name}={getattr(config, name)}"
            return f"{found} with 16-bit a: weights are on MMA-M and decoded in registers; use {name}={value}"
    if weights * num_b != TILE_WEIGHTS:
        return (
            f"cta_tile_shape_mnk={shape}: two warpgroups have 64 rows of weights each, of {num_b} "
            f"operand{'s' * (num_b > 1)}; use M tile {TILE_WEIGHTS // num_b}"
        )
    step = 8 if config.multicast_n == 1 and tokens <= MAX_TILE_TOKENS // 2 else 16
    if not step <= tokens <= MAX_TILE_TOKENS or tokens % step:
        nearest = min(max(-(-tokens // step) * step, step), MAX_TILE_TOKENS)
        return (
            f"cta_tile_shape_mnk={shape}: tokens are on MMA-N, a multiple of 8 up to {MAX_TILE_TOKENS // 2} and of 16 up to "
            f"{MAX_TILE_TOKENS} or where two CTAs share them; use N tile {nearest}"
        )
    if k not in TILES_K:
        return f"cta_tile_shape_mnk={shape}: a stage has 128 or 256 values of K; use K tile {TILE_K}"
    if config.multicast_n not in (1, PAIR) or (config.multicast_n > 1 and config.split_k > 1):
        return (
            f"multicast_n={config.multicast_n}, split_k={config.split_k}: a cluster is two CTAs that share tokens, or CTAs that "
            f"share K tiles; use multicast_n=1"
        )
    if tokens > SPLITS.get(config.split_k, 0):
        allowed = max(split for split, most in SPLITS.items() if tokens <= most)
        return f"split_k={config.split_k} with N tile {tokens}: the sums do not fit; use split_k={allowed}"
    smem, capacity = smem_plan(config, num_b), smem_capacity_bytes(config)
    if smem.num_ab_stage < MIN_STAGES or smem.total_bytes > capacity:
        most = smem_plan(replace(config, num_ab_stage=None), num_b).num_ab_stage
        fix = f"{MIN_STAGES} to {most}" if most >= MIN_STAGES else "a smaller tile"
        return f"num_ab_stage={config.num_ab_stage}: {smem.total_bytes} bytes of shared memory, {capacity} exist; use {fix}"
    if config.num_cta is not None and config.num_cta < config.cluster_size:
        return f"num_cta={config.num_cta}: {config.cluster_size} CTAs work on a tile, launch at least as many"
    return None


def candidates(num_b: int = 1) -> tuple[KernelConfig, ...]:
    """What ``choose`` chooses from. num_b: 2 for a dual GEMM whose weights are not interleaved."""
    return tuple(_candidates(num_b))


def _candidates(num_b: int) -> Iterator[KernelConfig]:
    for tokens in TOKEN_CHOICES:
        for k in TILES_K:
            for multicast, split in ((1, 1), (PAIR, 1), (1, 2), (1, 4), (1, 8)):
                shape = (TILE_WEIGHTS // num_b, tokens, k)
                config = replace(
                    DEFAULT_CONFIG, cta_tile_shape_mnk=shape, multicast_n=multicast, split_k=split
                )
                if unsupported_reason(config, num_b) is None:
                    yield config


def clusters_at_once(config: KernelConfig, num_sms: int) -> int:
    """Clusters that a GPU runs at once."""
    return clusters_in_gpcs(num_sms, config.cluster_size, GPC_SMS, MEASURED_CLUSTERS) * ctas_per_sm(config)


def choose(sizes: Iterable[tuple[int, int, int]], num_sms: int, num_b: int = 1) -> KernelConfig:
    """The candidate with the least modelled time.

    Args:
        sizes: (m, n, k) of every group, or their means.
        num_sms: SMs of the device.
        num_b: as of :func:`candidates`.
    """
    live = [size for size in sizes if min(size) > 0]
    return min(candidates(num_b), key=lambda config: modelled_us(live, config, num_sms))


def modelled_us(live: list[tuple[int, int, int]], config: KernelConfig, num_sms: int) -> float:
    """Time of a launch: whole waves of equal tiles, each as long as its slowest part."""
    tile_tokens, tile_weights, tile_k = config.work_tile_mnk
    workers, split = clusters_at_once(config, num_sms), config.split_k
    busy, tiles, read, moved = 0.0, 0, 0.0, 0.0
    for m, n, k in live:
        strips, columns, k_tiles = -(-m // tile_tokens), -(-n // tile_weights), -(-k // tile_k)
        tokens = min(m, tile_tokens)
        per_k = max(US_PER_K_TILE + US_PER_TOKEN * tokens, MMA_US_PER_TOKEN * tokens) * tile_k / TILE_K
        tile_us = US_PER_TILE + -(-k_tiles // split) * per_k + (US_PER_SPLIT_TILE if split > 1 else 0.0)
        busy, tiles = busy + strips * columns * tile_us, tiles + strips * columns
        weights = columns * config.num_m_cta * TILE_WEIGHTS * k * 9 / 16
        read += weights + m * k * FP16_BYTES
        moved += strips * (weights + columns * tokens * k * FP16_BYTES)
    if not tiles:
        return 0.0
    waves = -(-tiles // workers)
    shares = PAIRED_FACTOR if ctas_per_sm(config) == 2 and tiles * config.cluster_size > num_sms else 1.0
    most = waves * busy / tiles * shares
    return US_PER_LAUNCH + max(most, read / HBM_BYTES_PER_US, moved / L2_BYTES_PER_US)
