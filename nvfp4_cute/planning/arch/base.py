"""Interface of architecture families, and limits that all of them share."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import NormalDist
from typing import Protocol

import numpy as np

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import (
    BFLOAT16,
    FLOAT16,
    MXFP4,
    NVFP4,
    NVFP4_PAIR,
    PADDED_ALIGN_BYTES,
    TMA_ALIGN_BYTES,
    UE8M0,
    BlockFormat,
    Formats,
    FP8_1xK,
)
from nvfp4_cute.planning.config import SHARED_FIELDS, KernelConfig
from nvfp4_cute.problem import Form, GroupedProblem

KERNEL_PARAM_BYTES = 32764
# m, n, k, tile offset, reciprocal and group index (4 bytes each); output address and pitch (8 bytes each).
GROUP_BYTES = 6 * 4 + 2 * 8
ADDRESS_BYTES = 8
TENSOR_MAP_BYTES = 128
# Other kernel parameters of every launch: MMA flags, coordinate shapes, tile count, alpha, and alignment.
PARAM_BYTES_FIXED = 256


def param_bytes_per_group(num_b: int = 1, num_more: int = 0) -> int:
    """Returns the bytes of kernel parameters per group of the list form.

    They hold two tensor maps for ``a`` and for each of ``num_b`` operands ``b``, and ``num_more`` addresses: of the scales of
    quantized results, and of global scales per row.
    """
    return 2 * (1 + num_b) * TENSOR_MAP_BYTES + GROUP_BYTES + ADDRESS_BYTES * num_more


def max_list_groups(num_b: int = 1, num_more: int = 0) -> int:
    """Returns the largest number of list-form groups that fit kernel parameters (:func:`param_bytes_per_group`)."""
    return (KERNEL_PARAM_BYTES - PARAM_BYTES_FIXED) // param_bytes_per_group(num_b, num_more)


MAX_LIST_GROUPS = max_list_groups()


def operands_on_sides(config: KernelConfig, num_b: int) -> tuple[int, int]:
    """Returns the number of operands on the MMA's M side and N side for one ``a`` and ``num_b`` operands ``b``."""
    return (num_b, 1) if config.swap_ab else (1, num_b)


def allowed(
    tried: Iterable[KernelConfig], problem: GroupedProblem, parts: int = 1
) -> tuple[KernelConfig, ...]:
    """Returns the configs that a problem may be computed with: if it is batch-invariant, those with one order of sums.

    Args:
        parts: parts that K has in that order, ``split_k``.
    """
    if not problem.batch_invariant:
        return tuple(tried)
    return tuple(config for config in tried if config.adds_parts(parts))


def foreign_option_reason(config: KernelConfig, options: Sequence[str]) -> str | None:
    """Returns why a family refuses options that it lacks; None if none of them is set.

    Args:
        options: options of the family (``Family.OPTIONS``).
    """
    foreign = [
        field
        for field in fields(config)
        if field.name not in (*SHARED_FIELDS, *options) and getattr(config, field.name) != field.default
    ]
    if not foreign:
        return None
    found = ", ".join(f"{field.name}={getattr(config, field.name)}" for field in foreign)
    fix = ", ".join(f"{field.name}={field.default}" for field in foreign)
    return f"{found}: kernels of this architecture have no such option; use {fix}"


def in_order(archs: Iterable[str]) -> tuple[str, ...]:
    """Returns distinct architectures, sorted by number."""
    return tuple(sorted(set(archs), key=lambda arch: int(arch.removeprefix("sm_").rstrip("a"))))


def clusters_in_gpcs(
    num_sms: int, cluster_size: int, gpc_sms: int, measured: dict[int, dict[int, int]]
) -> int:
    """Returns the number of clusters that are resident at once if every CTA fills an SM; at least one.

    All CTAs of a cluster run on one graphics processing cluster (GPC). Products disable some SMs, so a GPC's remaining SMs may
    be too few for another cluster.

    Args:
        gpc_sms: SMs per GPC, used if the GPU has not been measured.
        measured: measured clusters, by number of SMs and cluster size.
    """
    found = measured.get(num_sms, {}).get(cluster_size)
    if found is not None:
        return found
    in_gpcs = num_sms // gpc_sms * (gpc_sms // cluster_size)
    return in_gpcs if cluster_size > 2 and in_gpcs else max(num_sms // cluster_size, 1)


def weight_only_pairs(weights: Iterable[BlockFormat]) -> tuple[Formats, ...]:
    """Returns the pairs of 16-bit ``a`` and these formats of ``b``. float16 does not hold scales from 2^-127 to 2^127."""
    return tuple((a, b) for b in weights for a in (BFLOAT16, FLOAT16) if (a, b.scale) != (FLOAT16, UE8M0))


def weight_only_mmas(weights: Iterable[BlockFormat]) -> dict[Formats, "Mma"]:
    """Returns the 16-bit MMA for every pair of :func:`weight_only_pairs`."""
    return {pair: Mma("bf16" if pair[0] == BFLOAT16 else "f16", 16) for pair in weight_only_pairs(weights)}


def multiple_reason(ks: Iterable[int], multiple: int) -> str | None:
    """Returns why a kernel does not compute one of these K, which have to be multiples; None if it computes all."""
    wrong = next((k for k in ks if k % multiple), None)
    return None if wrong is None else f"K={wrong} is not a multiple of {multiple}: pad K"


def check_pair(what: str, formats: Formats, pairs: Iterable[Formats]) -> None:
    """Raises UnsupportedProblem, naming the supported pairs, if a kernel does not multiply these formats.

    Args:
        what: architecture, or architecture and operation, for the message.
        formats: formats of ``a`` and ``b``.
        pairs: supported pairs.
    """
    a, b = formats
    served = [pair for pair in pairs if pair[0].has_scales == a.has_scales]
    if formats in served:
        return
    if (BFLOAT16, b) in served:
        raise UnsupportedProblem(
            f"{what}: a is float16 with {b.title} weights, whose scales from 2^-127 to 2^127 float16 does not hold; "
            'pass bfloat16 a, or backend="reference"'
        )
    name = lambda format: format.name if format.has_scales else "16-bit a"
    names = dict.fromkeys(f"{name(x)} x {y.family}" for x, y in served)
    beside = [x.title for x, y in served if x.has_scales and y == b]
    fix = f"quantize a to {' or '.join(beside)}" if beside else "quantize both to a pair that has one"
    if formats == (FP8_1xK, MXFP4):
        fix = "prepare b (sm_90a): mxfp4_for_fp8(b)"
    raise UnsupportedProblem(
        f"{what}: no kernel for {name(a)} x {b} (there is one for {', '.join(names)}); "
        f'use backend="reference", or {fix}'
    )


@dataclass(frozen=True)
class Mma:
    """Tensor-core instruction that multiplies operands of two formats.

    Attributes:
        kind: kind of the instruction in PTX.
        k: elements of K per instruction.
        element_bits: bits per element in shared memory.
    """

    kind: str
    k: int
    element_bits: int = 4

    @property
    def decodes(self) -> bool:
        """Whether operands are dequantized to 16-bit floats before the MMA."""
        return self.kind in ("f16", "bf16")

    def pads(self, format: BlockFormat) -> bool:
        """Returns whether TMA pads elements of ``format``, which have fewer bits in device memory than in shared memory."""
        return format.element.bits < self.element_bits

    def align_bytes(self, format: BlockFormat) -> int:
        """Returns the alignment of an operand's addresses and pitches in bytes, as its tensor map requires."""
        return PADDED_ALIGN_BYTES if self.pads(format) else TMA_ALIGN_BYTES

    def gap_bytes(self, format: BlockFormat, k: int) -> int:
        """Returns the bytes of a row of ``k`` elements in shared memory that TMA does not write."""
        return self.row_bytes(k) - format.row_bytes(k) if self.pads(format) else 0

    def row_bytes(self, k: int) -> int:
        """Returns the bytes of a row of ``k`` elements in shared memory."""
        return k * self.element_bits // 8

    def elements(self, row_bytes: int) -> int:
        """Returns the elements in ``row_bytes`` bytes of a row in shared memory."""
        return row_bytes * 8 // self.element_bits

    def per_atom(self, format: BlockFormat) -> int:
        """Returns the MMAs per scale atom of ``format``: 1, 2 or 4 if an MMA uses 4, 2 or 1 scales of a row."""
        return format.atom_k // self.k


def formats_on_sides(config: KernelConfig, formats: Formats) -> Formats:
    """Returns the formats on the MMA's M side and N side, given those of ``a`` and ``b``."""
    return formats[::-1] if config.swap_ab else formats


@dataclass(frozen=True)
class StagedOperands:
    """Bytes of one pipeline stage per operand, and number of stages: plain integers, printable.

    Attributes:
        a_stage_bytes, sfa_stage_bytes: bytes per stage of each operand on the MMA's M side, and of its scales.
        b_stage_bytes, sfb_stage_bytes: bytes per stage of each operand on the N side, and of its scales.
        num_ab_stage: stages.
        num_m, num_n: operands on the M side and on the N side.
        exchange_bytes: partial sums that a CTA receives from the other CTAs of a split-K cluster.
        a_gap_bytes, b_gap_bytes: bytes of a stage that TMA does not write, because it pads 4-bit elements to bytes.
    """

    a_stage_bytes: int
    b_stage_bytes: int
    sfa_stage_bytes: int
    sfb_stage_bytes: int
    num_ab_stage: int
    num_m: int = 1
    num_n: int = 1
    exchange_bytes: int = 0
    a_gap_bytes: int = 0
    b_gap_bytes: int = 0

    @property
    def loaded_bytes(self) -> int:
        """Bytes that TMA writes per stage: the transaction count of its barrier."""
        return self.stage_bytes - self.num_m * self.a_gap_bytes - self.num_n * self.b_gap_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage: all operands and their scales."""
        m_side, n_side = self.a_stage_bytes + self.sfa_stage_bytes, self.b_stage_bytes + self.sfb_stage_bytes
        return self.num_m * m_side + self.num_n * n_side


class SmemUse(Protocol):
    """Shared memory of a config."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all stages and of everything else in shared memory."""


class Estimated(Protocol):
    """A candidate with its estimated time; prints as one line that starts with the config's name."""

    @property
    def config(self) -> KernelConfig:
        """The candidate with an explicit number of CTAs."""


class Family(Protocol):
    """Interface of a module of this package: the architectures of one kernel, and everything other code asks about them."""

    @property
    def ARCHS(self) -> tuple[str, ...]:
        """Names of the architectures, such as ``sm_100a``."""

    @property
    def KERNEL(self) -> str:
        """Module and class of the kernel, below ``nvfp4_cute.kernels``."""

    @property
    def OPTIONS(self) -> tuple[str, ...]:
        """Fields of KernelConfig that this family supports in addition to ``config.SHARED_FIELDS``."""

    @property
    def DEFAULT_CONFIG(self) -> KernelConfig:
        """Config used if nothing better is known."""

    @property
    def CANDIDATES(self) -> tuple[KernelConfig, ...]:
        """Candidates of the list form."""

    @property
    def DUAL_CANDIDATES(self) -> tuple[KernelConfig, ...]:
        """Candidates of dual GEMMs with two weight operands (``num_b`` = 2)."""

    @property
    def MMA(self) -> Mapping[tuple[BlockFormat, BlockFormat], Mma]:
        """MMA for every supported pair of formats of ``a`` and ``b``."""

    @property
    def OUT_M_MAJOR(self) -> bool:
        """Whether the kernel also writes outputs with contiguous columns."""

    @property
    def HAS_CHAINS(self) -> bool:
        """Whether the kernel computes several layers in one launch."""

    @property
    def HAS_EARLY_WEIGHTS(self) -> bool:
        """Whether the kernel can load weights before the previous launch has ended."""

    @property
    def TO_AND_FRO(self) -> bool:
        """Whether every other wave of tiles is assigned from the last CTA to the first (``TileSchedule.tiles_of_cta``)."""

    def smem_plan(self, config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> SmemUse:
        """Returns the shared-memory use of ``config``. formats: formats of ``a`` and ``b``, here and below a pair of ``MMA``."""

    def resolve(self, config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> KernelConfig:
        """Returns ``config`` with an explicit stage count."""

    def unsupported_reason(
        self, config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR
    ) -> str | None:
        """Returns why this family cannot build ``config``, with the nearest legal value; None if it can."""

    def interleave_reason(self, config: KernelConfig, weight_layout: str) -> str | None:
        """Returns why weights of ``launch_table.INTERLEAVE`` cannot be computed with ``config``; None if they can."""

    def quantized_reason(self, config: KernelConfig, format: BlockFormat) -> str | None:
        """Returns why results of a format cannot be computed with ``config``; None if they can."""

    def work_reason(
        self, what: str, sizes: Iterable[tuple[int, int, int]], config: KernelConfig
    ) -> str | None:
        """Returns why ``config`` cannot compute this much work in one launch; None if it can.

        Args:
            what: name of the work, with which the message starts.
            sizes: (m, n, k) of every group, or of fewer groups with equally many tiles.
        """

    def workspace_bytes(self, config: KernelConfig, rows: np.ndarray, k: np.ndarray, num_cta: int) -> int:
        """Returns the workspace of a launch of ``config`` in bytes of device memory.

        Args:
            rows, k: extents of every group's ``a`` in elements; for batches, the total rows.
            num_cta: persistent CTAs of the launch.
        """

    def resident_clusters(self, num_sms: int, cluster_size: int) -> int:
        """Returns the number of clusters resident at once if every CTA fills an SM."""

    def ctas_per_sm(self, config: KernelConfig) -> int:
        """Returns the number of CTAs per SM."""

    def prefetches_in_turns(
        self, config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR
    ) -> bool:
        """Returns whether clusters alternate in prefetching operands that several of them load, so that none is fetched twice."""

    def candidates(
        self,
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
            out_format: format of quantized results; None for other results.
            form: form of the operands.
            formats: formats of ``a`` and ``b``.
        """

    def choose(self, problem: GroupedProblem, num_sms: int) -> KernelConfig:
        """Returns the config for groups of these sizes, or of this mean size if only the device knows the sizes.

        Ragged groups share rows, so some exceed the mean. Masked groups never exceed their size here.
        """

    def estimates(self, problem: GroupedProblem, num_sms: int) -> Sequence[Estimated]:
        """Returns every candidate, the best first, if the family estimates times and sizes are known; otherwise nothing."""


class WeightOnlyFamily(Family, Protocol):
    """A family with a kernel for products of 16-bit ``a`` and quantized ``b``, whose times it estimates."""

    @property
    def K_MULTIPLE(self) -> int:
        """Divisor of K."""

    def most_clusters(
        self, sizes: Sequence[tuple[int, int, int]], config: KernelConfig, is_ragged: bool
    ) -> int:
        """Returns the largest number of clusters that find work: tiles, or shares of them with stream-K.

        Ragged groups may divide the total rows in any way.
        """

    def estimate_us(
        self,
        sizes: tuple[tuple[int, int, int], ...],
        config: KernelConfig,
        num_sms: int,
        num_b: int = 1,
        is_ragged: bool = False,
        b_format: BlockFormat = NVFP4,
        arch: str = "sm_90a",
    ) -> float:
        """Returns the modelled time of a launch in us. At least one group must have work.

        Args:
            sizes: (m, n, k) of every group; for ragged groups about their mean, because only the device knows them.
            num_b: number of operands ``b``. b_format: their format.
        """


# ---- default members of families --------------------------------------------------------------------
def no_work_reason(what: str, sizes: Iterable[tuple[int, int, int]], config: KernelConfig) -> str | None:
    """Implements ``Family.work_reason`` for kernels without a limit."""
    return None


def no_workspace_bytes(config: KernelConfig, rows: np.ndarray, k: np.ndarray, num_cta: int) -> int:
    """Implements ``Family.workspace_bytes`` for kernels without a workspace."""
    return 0


def one_cta_per_sm(config: KernelConfig) -> int:
    """Implements ``Family.ctas_per_sm`` for kernels whose CTAs fill an SM."""
    return 1


def never_in_turns(config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> bool:
    """Implements ``Family.prefetches_in_turns`` for kernels that do not prefetch for each other."""
    return False


def no_estimates(problem: GroupedProblem, num_sms: int) -> Sequence[Estimated]:
    """Implements ``Family.estimates`` for families that estimate no times."""
    return ()


# ---- sizes that only the device knows -----------------------------------------------------------------
# Largest mean of a Poisson distribution whose quantiles are summed exactly.
MOST_EXACT_MEAN = 300


def spread(sizes: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Returns group sizes when rows are routed uniformly at random (Poisson quantiles), with the total rows unchanged."""
    (_, n, k), mean = sizes[0], sum(m for m, _, _ in sizes) / len(sizes)
    if mean > MOST_EXACT_MEAN:
        normal = NormalDist(mean, math.sqrt(mean))
        return [(round(normal.inv_cdf((g + 0.5) / len(sizes))), n, k) for g in range(len(sizes))]
    found = list[tuple[int, int, int]]()
    rows, part = 0, math.exp(-mean)
    below = part
    for g in range(len(sizes)):
        while below < (g + 0.5) / len(sizes):
            rows += 1
            part *= mean / rows
            below += part
        found.append((rows, n, k))
    return found


@lru_cache(maxsize=64)
def live_sizes(
    sizes: tuple[tuple[int, int, int], ...], is_ragged: bool
) -> Mapping[tuple[int, int, int], int]:
    """Returns the number of groups per size, without groups that have no work."""
    counted = Counter(spread(sizes) if is_ragged else sizes)
    return {size: count for size, count in counted.items() if min(size) > 0}


# ---- GPUs next to the one on which times were measured ------------------------------------------------
@dataclass(frozen=True)
class Pace:
    """Rates of a GPU, by which times of weight-only kernels that were measured on an H200 are scaled.

    Attributes:
        memory_bytes: bytes per us and SM that a copy moves.
        clock: clock of the SMs under load, in MHz.
        flops: operations of dense 16-bit products per clock and SM (``gpus.targets``).
    """

    memory_bytes: float
    clock: float
    flops: float


# The H200's memory rate is measured. Others are 0.9 times the specified bandwidth of the GPU with the most bandwidth per SM.
PACES = {
    "sm_80": Pace(17000, 1410, 2048),
    "sm_86": Pace(10300, 1700, 1024),
    "sm_89": Pace(7100, 2500, 1024),
    "sm_90a": Pace(31800, 1755, 4096),
    "sm_100a": Pace(48600, 1900, 8192),
    "sm_103a": Pace(48600, 1900, 8192),
    "sm_110a": Pace(12300, 1570, 8192),
    "sm_120a": Pace(9500, 2400, 1024),
    "sm_121a": Pace(5100, 2400, 1024),
}
H200_SMS = 132


def paced_us(arch: str, num_sms: int, us: float, nbytes: float) -> float:
    """Returns the time of a kernel in us, without its launch: that on an H200, scaled by SMs and clocks, or that of memory.

    us: time on an H200. nbytes: bytes that are moved from and to memory.
    """
    pace = PACES[arch]
    work = us * (H200_SMS * PACES["sm_90a"].clock) / (num_sms * pace.clock)
    return max(work, nbytes / (pace.memory_bytes * num_sms))
