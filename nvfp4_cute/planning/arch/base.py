"""What every family of architectures states, and the limits that all of them share."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from nvfp4_cute.planning.config import KernelConfig

KERNEL_PARAM_BYTES = 32764
# m, n, k, tile offset, reciprocal and group index (4 bytes each); output address and pitch (8 bytes each).
GROUP_BYTES = 6 * 4 + 2 * 8
# The address of a group's scales, of NVFP4 outputs.
OUT_SCALE_BYTES = 8
TENSOR_MAP_BYTES = 128
# Rows that each product of a dual GEMM has in turn, where one operand interleaves both products' weights.
INTERLEAVE = {"interleaved_64_up_first": 64, "interleaved_32_gate_first": 32}
# Why most families refuse ``decode_first``.
DECODED_BY_THE_MMA = (
    "decode_first, deal_k: MMAs take NVFP4 as it is, nothing has to be decoded before; leave both False"
)
# Why most families refuse ``multicast_n``.
NOTHING_TO_SHARE = "multicast_n: CTAs of this family load for themselves; use multicast_n=1"
# What every launch passes besides: the MMA's flags, coordinate shapes, tile count, alpha, and alignment.
PARAM_BYTES_FIXED = 256


def param_bytes_per_group(num_b: int = 1, is_quantized: bool = False) -> int:
    """Kernel parameters of one group of the list form: two tensor maps an operand, ``a`` and ``num_b`` operands ``b``."""
    return 2 * (1 + num_b) * TENSOR_MAP_BYTES + GROUP_BYTES + OUT_SCALE_BYTES * is_quantized


def max_list_groups(num_b: int = 1, is_quantized: bool = False) -> int:
    """Groups of the list form that kernel parameters hold. ``is_quantized``: whether outputs are NVFP4."""
    return (KERNEL_PARAM_BYTES - PARAM_BYTES_FIXED) // param_bytes_per_group(num_b, is_quantized)


MAX_LIST_GROUPS = max_list_groups()


def operands_on_sides(config: KernelConfig, num_b: int) -> tuple[int, int]:
    """Operands on the MMA's M side and N side, of a problem that multiplies one ``a`` by ``num_b`` operands ``b``."""
    return (num_b, 1) if config.swap_ab else (1, num_b)


def clusters_in_gpcs(
    num_sms: int, cluster_size: int, gpc_sms: int, measured: dict[int, dict[int, int]]
) -> int:
    """Clusters that a GPU runs at once, of CTAs that fill an SM each; at least one.

    A cluster's CTAs are SMs of one processing cluster (GPC), and products lack some SMs: what a GPC has left holds none.

    Args:
        gpc_sms: SMs of a GPC that nobody measured.
        measured: by number of SMs and cluster size, clusters that others counted.
    """
    found = measured.get(num_sms, {}).get(cluster_size)
    if found is not None:
        return found
    in_gpcs = num_sms // gpc_sms * (gpc_sms // cluster_size)
    return in_gpcs if cluster_size > 2 and in_gpcs else max(num_sms // cluster_size, 1)


@dataclass(frozen=True)
class StagedOperands:
    """Bytes of one pipeline stage, by operand, and how many stages there are. Plain integers, printable.

    Attributes:
        a_stage_bytes, sfa_stage_bytes: of each operand on the MMA's M side, and of its scales.
        b_stage_bytes, sfb_stage_bytes: of each on its N side.
        num_ab_stage: stages.
        num_m, num_n: operands on the M side and on the N side.
        exchange_bytes: what the other CTAs that share K tiles send to one of them.
    """

    a_stage_bytes: int
    b_stage_bytes: int
    sfa_stage_bytes: int
    sfb_stage_bytes: int
    num_ab_stage: int
    num_m: int = 1
    num_n: int = 1
    exchange_bytes: int = 0

    @property
    def stage_bytes(self) -> int:
        """Bytes that the TMA of one stage writes: the transaction count of its barrier."""
        m_side, n_side = self.a_stage_bytes + self.sfa_stage_bytes, self.b_stage_bytes + self.sfb_stage_bytes
        return self.num_m * m_side + self.num_n * n_side


class SmemUse(Protocol):
    """Shared memory of a config."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all stages and of what is reserved beside them."""


class Family(Protocol):
    """A module of this package: architectures that one kernel source serves."""

    @property
    def ARCHS(self) -> tuple[str, ...]:
        """Their names, such as ``sm_100a``."""

    @property
    def DEFAULT_CONFIG(self) -> KernelConfig:
        """What is computed with where the caller chooses nothing."""

    @property
    def CANDIDATES(self) -> tuple[KernelConfig, ...]:
        """What is chosen from in the list form."""

    @property
    def DUAL_CANDIDATES(self) -> tuple[KernelConfig, ...]:
        """The same for dual GEMMs whose weights are two operands: ``num_b`` is 2."""

    @property
    def OUT_M_MAJOR(self) -> bool:
        """Whether the kernel writes outputs with contiguous columns, too."""

    def smem_plan(self, config: KernelConfig) -> SmemUse:
        """Shared memory of ``config``."""

    def resolve(self, config: KernelConfig, num_b: int = 1) -> KernelConfig:
        """``config`` with its stage count made explicit."""

    def unsupported_reason(self, config: KernelConfig, num_b: int = 1) -> str | None:
        """Why this family cannot build ``config``, with the nearest legal value; None where it can."""

    def interleave_reason(self, config: KernelConfig, weight_layout: str) -> str | None:
        """Why weights of ``INTERLEAVE`` cannot be computed with ``config``; None where they can."""

    def quantized_reason(self, config: KernelConfig) -> str | None:
        """Why NVFP4 results cannot be computed with ``config``; None where they can."""

    def resident_clusters(self, num_sms: int, cluster_size: int) -> int:
        """Clusters of CTAs that fill an SM each, and that a GPU runs at once."""


class ChoosingFamily(Family, Protocol):
    """A family whose candidates and choice depend on sizes alone; those of sm_100 also depend on the schedule."""

    def candidates(
        self, num_b: int = 1, weight_layout: str = "separate", is_quantized: bool = False
    ) -> tuple[KernelConfig, ...]:
        """What is chosen from."""

    def choose(
        self,
        sizes: Iterable[tuple[int, int, int]],
        num_sms: int,
        num_b: int = 1,
        weight_layout: str = "separate",
        is_quantized: bool = False,
        are_means: bool = False,
    ) -> KernelConfig:
        """The candidate for groups of these (m, n, k), or of sizes around them that only the device knows."""
