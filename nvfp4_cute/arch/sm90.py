"""sm_90a: what a KernelConfig costs in shared memory and registers, and why one is refused.

``cta_tile_shape_mnk`` is (weight rows, tokens, K): weights are on MMA-M, tokens on MMA-N (``swap_ab``). Limits: CUDA C++
programming guide, technical specifications (227 KiB of shared memory a CTA); PTX ISA 9.7.15 (wgmma: N a multiple of 8).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from nvfp4_cute.config import KernelConfig
from nvfp4_cute.scale_layout import SF_VEC_SIZE

ARCHS = ("sm_90a",)
DEFAULT_CONFIG = KernelConfig((128, 128, 128), num_acc_stage=1, swap_ab=True)
FORMS = ("list",)
OUT_M_MAJOR = False
OUT_NVFP4 = False
SMEM_CAPACITY_BYTES = 227 * 1024
# Barriers, the gaps that aligning the buffers to 1024 bytes leaves, and 32 x 64 results of each MATH warpgroup.
SMEM_RESERVED_BYTES = 4096 + 2 * 4096
TILE_WEIGHTS = 128
TILE_K = 128
# Accumulators of more tokens leave wgmma too few of the registers that a launch of four warpgroups has.
MAX_TILE_TOKENS = 160
# Tokens of a tile that are tried where the caller chooses no config.
TOKEN_CHOICES = (8, 16, 32, 64, 80, 96, 112, 128, 144, 160)
# What ``choose`` chooses from.
CANDIDATES = tuple(
    replace(DEFAULT_CONFIG, cta_tile_shape_mnk=(TILE_WEIGHTS, tokens, TILE_K)) for tokens in TOKEN_CHOICES
)
# Model of one CTA's time, fitted to an H200's times of one tile an SM (64 to 128 tokens, K of 1536 and 4096); the least
# time of a K tile is that of its weights' bytes at the HBM bandwidth that a copy reaches, 4.3 TB/s over 132 SMs.
US_PER_TILE = 1.5
US_PER_K_TILE = 0.25
US_PER_TOKEN = 0.0053
MIN_US_PER_K_TILE = 0.29
# Scales come in blocks of 128 rows.
SF_BLOCK_ROWS = 128
# Values of K in a stage of decoded activations: one 128-byte swizzle row of fp16.
SLAB_K = 64
# Stages of decoded activations: some are multiplied while others are written. More than these gain nothing.
MIN_DECODED_STAGE, MAX_DECODED_STAGE = 4, 6
# Packed stages that are wanted before decoded ones become more: enough bytes in flight for the memory's latency.
WANTED_AB_STAGE = 5
MAX_AB_STAGE = 10
FP16_BYTES = 2


@dataclass(frozen=True)
class SmemPlan:
    """Bytes of one stage, by operand, and of all stages. Plain integers, printable.

    Attributes:
        a_stage_bytes, b_stage_bytes: packed e2m1 of tokens and of weights.
        sfa_stage_bytes, sfb_stage_bytes: their scales, in whole blocks of 128 rows.
        decoded_stage_bytes: the tokens of half a K tile in fp16.
        num_ab_stage, num_decoded_stage: stages of packed operands, of decoded tokens.
    """

    a_stage_bytes: int
    b_stage_bytes: int
    sfa_stage_bytes: int
    sfb_stage_bytes: int
    decoded_stage_bytes: int
    num_ab_stage: int
    num_decoded_stage: int

    @property
    def stage_bytes(self) -> int:
        """Bytes that the TMA of one stage writes: the transaction count of its barrier."""
        return self.a_stage_bytes + self.b_stage_bytes + self.sfa_stage_bytes + self.sfb_stage_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all stages and of what is reserved beside them."""
        return (
            self.stage_bytes * self.num_ab_stage
            + self.decoded_stage_bytes * self.num_decoded_stage
            + SMEM_RESERVED_BYTES
        )


def sf_blocks(tile_rows: int) -> int:
    """Most 128-row blocks of scales that a tile of so many rows touches, wherever in its group it lies."""
    starts = (tile * tile_rows % SF_BLOCK_ROWS for tile in range(SF_BLOCK_ROWS))
    return max(-(-(start + tile_rows) // SF_BLOCK_ROWS) for start in starts)


def smem_plan(config: KernelConfig) -> SmemPlan:
    """Shared memory of ``config``. ``num_ab_stage=None`` is resolved to as many stages as fit."""
    m, n, k = config.work_tile_mnk
    sf_block_bytes = SF_BLOCK_ROWS * k // SF_VEC_SIZE
    plan = SmemPlan(
        a_stage_bytes=m * k // 2,
        b_stage_bytes=n * k // 2,
        sfa_stage_bytes=sf_blocks(m) * sf_block_bytes,
        sfb_stage_bytes=sf_blocks(n) * sf_block_bytes,
        decoded_stage_bytes=m * SLAB_K * FP16_BYTES,
        num_ab_stage=config.num_ab_stage or WANTED_AB_STAGE,
        num_decoded_stage=MIN_DECODED_STAGE,
    )
    for num_decoded_stage in range(MIN_DECODED_STAGE, MAX_DECODED_STAGE + 1):
        wider = replace(plan, num_decoded_stage=num_decoded_stage)
        if wider.total_bytes <= SMEM_CAPACITY_BYTES:
            plan = wider
    if config.num_ab_stage is None:
        free_bytes = SMEM_CAPACITY_BYTES - replace(plan, num_ab_stage=0).total_bytes
        plan = replace(plan, num_ab_stage=min(free_bytes // plan.stage_bytes, MAX_AB_STAGE))
    return plan


def resolve(config: KernelConfig) -> KernelConfig:
    """``config`` with its stage count made explicit."""
    return replace(config, num_ab_stage=smem_plan(config).num_ab_stage)


def choose(sizes: Iterable[tuple[int, int, int]], num_sms: int) -> KernelConfig:
    """The number of tokens in a tile with the least modelled time: padding and idle SMs against decoding weights again.

    Args:
        sizes: (m, n, k) of every group.
        num_sms: SMs of the device.
    """
    live = [size for size in sorted(sizes, key=lambda size: -size[0]) if min(size) > 0]
    most = max((m for m, _, _ in live), default=0)
    fitting = [tokens for tokens in TOKEN_CHOICES if tokens >= most]
    choices = [tokens for tokens in TOKEN_CHOICES if tokens < most] + fitting[:1]
    best = min(choices, key=lambda tokens: _modelled_us(live, tokens, num_sms))
    return CANDIDATES[TOKEN_CHOICES.index(best)]


def _modelled_us(live: list[tuple[int, int, int]], tile_tokens: int, num_sms: int) -> float:
    """Time of the CTA with most work, tiles being dealt out in turn."""
    tiles: list[float] = []
    for m, n, k in live:
        rows = [min(tile_tokens, m - first) for first in range(0, m, tile_tokens)]
        tiles += [
            US_PER_TILE + -(-k // TILE_K) * max(US_PER_K_TILE + US_PER_TOKEN * count, MIN_US_PER_K_TILE)
            for count in rows
        ] * -(-n // TILE_WEIGHTS)
    return max((sum(tiles[cta::num_sms]) for cta in range(num_sms)), default=0.0)


def unsupported_reason(config: KernelConfig) -> str | None:
    """Why this family cannot build ``config``, with the nearest legal value; None where it can."""
    if not config.swap_ab or config.use_2cta_instrs:
        return (
            f"swap_ab={config.swap_ab}, use_2cta_instrs={config.use_2cta_instrs}: weights are on MMA-M, and one CTA "
            f"issues an MMA; use swap_ab=True, use_2cta_instrs=False"
        )
    m, n, k = config.cta_tile_shape_mnk
    if m != TILE_WEIGHTS:
        return (
            f"cta_tile_shape_mnk={config.cta_tile_shape_mnk}: two warpgroups have 64 rows of weights each; "
            f"use M tile {TILE_WEIGHTS}"
        )
    if not 8 <= n <= MAX_TILE_TOKENS or n % 8:
        nearest = min(max(-(-n // 8) * 8, 8), MAX_TILE_TOKENS)
        return (
            f"cta_tile_shape_mnk={config.cta_tile_shape_mnk}: tokens are on MMA-N, a multiple of 8 from 8 to "
            f"{MAX_TILE_TOKENS}; use N tile {nearest}"
        )
    if k != TILE_K:
        return (
            f"cta_tile_shape_mnk={config.cta_tile_shape_mnk}: a K tile is two 128-byte rows of fp16; "
            f"use K tile {TILE_K}"
        )
    if config.num_acc_stage != 1:
        return f"num_acc_stage={config.num_acc_stage}: accumulators are in registers, there is one; use 1"
    smem = smem_plan(config)
    if smem.num_ab_stage < 1 or smem.total_bytes > SMEM_CAPACITY_BYTES:
        return (
            f"num_ab_stage={config.num_ab_stage}: {smem.total_bytes} bytes of shared memory, {SMEM_CAPACITY_BYTES} "
            f"exist; use 1 to {smem_plan(replace(config, num_ab_stage=None)).num_ab_stage}"
        )
    if config.num_cta is not None and config.num_cta < 1:
        return f"num_cta={config.num_cta}: at least one CTA must be launched"
    return None
