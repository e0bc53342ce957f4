"""What every family of architectures states, and the limits that all of them share."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import (
    NVFP4,
    NVFP4_PAIR,
    PADDED_ALIGN_BYTES,
    TMA_ALIGN_BYTES,
    BlockFormat,
    Formats,
)
from nvfp4_cute.planning.config import SHARED_FIELDS, KernelConfig
from nvfp4_cute.problem import Form, GroupedProblem

KERNEL_PARAM_BYTES = 32764
# m, n, k, tile offset, reciprocal and group index (4 bytes each); output address and pitch (8 bytes each).
GROUP_BYTES = 6 * 4 + 2 * 8
# The address of a group's scales, of quantized outputs.
OUT_SCALE_BYTES = 8
TENSOR_MAP_BYTES = 128
# Rows that each product of a dual GEMM has in turn, where one operand interleaves both products' weights.
INTERLEAVE = {"interleaved_64_up_first": 64, "interleaved_32_gate_first": 32}
# What every launch passes besides: the MMA's flags, coordinate shapes, tile count, alpha, and alignment.
PARAM_BYTES_FIXED = 256


def param_bytes_per_group(num_b: int = 1, is_quantized: bool = False) -> int:
    """Kernel parameters of one group of the list form: two tensor maps an operand, ``a`` and ``num_b`` operands ``b``."""
    return 2 * (1 + num_b) * TENSOR_MAP_BYTES + GROUP_BYTES + OUT_SCALE_BYTES * is_quantized


def max_list_groups(num_b: int = 1, is_quantized: bool = False) -> int:
    """Groups of the list form that kernel parameters hold. ``is_quantized``: whether outputs have scales."""
    return (KERNEL_PARAM_BYTES - PARAM_BYTES_FIXED) // param_bytes_per_group(num_b, is_quantized)


MAX_LIST_GROUPS = max_list_groups()


def operands_on_sides(config: KernelConfig, num_b: int) -> tuple[int, int]:
    """Operands on the MMA's M side and N side, of a problem that multiplies one ``a`` by ``num_b`` operands ``b``."""
    return (num_b, 1) if config.swap_ab else (1, num_b)


def foreign_option_reason(config: KernelConfig, options: Sequence[str]) -> str | None:
    """Why options that a family lacks make it refuse ``config``; None where none of them is set.

    Args:
        options: of the family (``Family.OPTIONS``).
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
    """Architectures, each once, by number."""
    return tuple(sorted(set(archs), key=lambda arch: int(arch.removeprefix("sm_").rstrip("a"))))


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


def check_pair(
    what: str,
    formats: tuple[BlockFormat | None, BlockFormat],
    pairs: Iterable[tuple[BlockFormat | None, BlockFormat]],
) -> None:
    """Raises UnsupportedProblem where a kernel does not multiply ``a`` by ``b`` of these formats, with what it multiplies.

    Args:
        what: has no kernel for them: an architecture, or one and an operation.
        formats: of ``a``, None where it has 16-bit values, and of ``b``.
        pairs: that there is a kernel for.
    """
    served = tuple(pairs)
    if formats in served:
        return
    names = dict.fromkeys(f"{a or '16-bit a'} x {b.family}" for a, b in served)
    beside = [a.title for a, b in served if a is not None and b == formats[1]]
    fix = f"quantize a to {' or '.join(beside)}" if beside else "quantize both to a pair that has one"
    raise UnsupportedProblem(
        f"{what}: no kernel for {formats[0] or '16-bit a'} x {formats[1]} (there is one for {', '.join(names)}); "
        f'use backend="reference", or {fix}'
    )


@dataclass(frozen=True)
class Mma:
    """How tensor cores multiply operands of two formats.

    Attributes:
        kind: what PTX calls this kind of instruction.
        k: elements of K that one instruction multiplies.
        element_bits: of an element in shared memory, of whatever type.
    """

    kind: str
    k: int
    element_bits: int = 4

    @property
    def decodes(self) -> bool:
        """Whether operands become 16-bit floats, which are multiplied."""
        return self.kind in ("f16", "bf16")

    def pads(self, format: BlockFormat) -> bool:
        """Whether elements of ``format`` have fewer bits in device memory, and TMA makes room around them."""
        return format.element.bits < self.element_bits

    def align_bytes(self, format: BlockFormat) -> int:
        """Of addresses and pitches of an operand, for its tensor map."""
        return PADDED_ALIGN_BYTES if self.pads(format) else TMA_ALIGN_BYTES

    def gap_bytes(self, format: BlockFormat, k: int) -> int:
        """Bytes in shared memory of ``k`` elements of a row that TMA leaves unwritten."""
        return self.row_bytes(k) - format.row_bytes(k) if self.pads(format) else 0

    def row_bytes(self, k: int) -> int:
        """Bytes in shared memory of ``k`` elements of a row."""
        return k * self.element_bits // 8

    def elements(self, row_bytes: int) -> int:
        """Elements in so many bytes of a row in shared memory."""
        return row_bytes * 8 // self.element_bits

    def per_atom(self, format: BlockFormat) -> int:
        """MMAs whose scales lie in one scale atom of ``format``: 1, 2 or 4 for 4, 2 or 1 scales of a row an MMA."""
        return format.atom_k // self.k


def formats_on_sides(config: KernelConfig, formats: Formats) -> Formats:
    """Formats on the MMA's M side and N side, of those of ``a`` and of ``b``."""
    return formats[::-1] if config.swap_ab else formats


@dataclass(frozen=True)
class StagedOperands:
    """Bytes of one pipeline stage, by operand, and how many stages there are. Plain integers, printable.

    Attributes:
        a_stage_bytes, sfa_stage_bytes: of each operand on the MMA's M side, and of its scales.
        b_stage_bytes, sfb_stage_bytes: of each on its N side.
        num_ab_stage: stages.
        num_m, num_n: operands on the M side and on the N side.
        exchange_bytes: what the other CTAs that share K tiles send to one of them.
        a_gap_bytes, b_gap_bytes: of a stage of an operand on either side, what TMA leaves unwritten: of 4-bit elements in bytes.
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
        """Bytes that the TMA of one stage writes: the transaction count of its barrier."""
        return self.stage_bytes - self.num_m * self.a_gap_bytes - self.num_n * self.b_gap_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage, all operands and their scales."""
        m_side, n_side = self.a_stage_bytes + self.sfa_stage_bytes, self.b_stage_bytes + self.sfb_stage_bytes
        return self.num_m * m_side + self.num_n * n_side


class SmemUse(Protocol):
    """Shared memory of a config."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all stages and of what is reserved beside them."""


class Estimated(Protocol):
    """A candidate with its estimated time; prints as a line that begins with the config's name."""

    @property
    def config(self) -> KernelConfig:
        """With a number of CTAs."""


class Family(Protocol):
    """A module of this package: architectures that one kernel source serves, and all that others ask about them."""

    @property
    def ARCHS(self) -> tuple[str, ...]:
        """Their names, such as ``sm_100a``."""

    @property
    def KERNEL(self) -> str:
        """Module and class of the kernel, below ``nvfp4_cute.kernels``."""

    @property
    def OPTIONS(self) -> tuple[str, ...]:
        """Fields of KernelConfig that this family has beside ``config.SHARED_FIELDS``."""

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
    def MMA(self) -> Mapping[tuple[BlockFormat, BlockFormat], Mma]:
        """How the kernel multiplies ``a`` by ``b``, by their formats; pairs that are not here it does not multiply."""

    @property
    def OUT_M_MAJOR(self) -> bool:
        """Whether the kernel writes outputs with contiguous columns, too."""

    @property
    def HAS_CHAINS(self) -> bool:
        """Whether the kernel computes several layers in one launch."""

    @property
    def HAS_EARLY_WEIGHTS(self) -> bool:
        """Whether the kernel can load weights before the end of the launch before it."""

    @property
    def TO_AND_FRO(self) -> bool:
        """Whether every other wave of tiles is dealt from the last CTA to the first (``TileSchedule.tiles_of_cta``)."""

    def smem_plan(self, config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> SmemUse:
        """Shared memory of ``config``. ``formats``: of ``a`` and of ``b``, here and below a pair of ``MMA``."""

    def resolve(self, config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> KernelConfig:
        """``config`` with its stage count made explicit."""

    def unsupported_reason(
        self, config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR
    ) -> str | None:
        """Why this family cannot build ``config``, with the nearest legal value; None where it can."""

    def interleave_reason(self, config: KernelConfig, weight_layout: str) -> str | None:
        """Why weights of ``INTERLEAVE`` cannot be computed with ``config``; None where they can."""

    def quantized_reason(self, config: KernelConfig, format: BlockFormat) -> str | None:
        """Why results of a format cannot be computed with ``config``; None where they can."""

    def work_reason(
        self, what: str, sizes: Iterable[tuple[int, int, int]], config: KernelConfig
    ) -> str | None:
        """Why ``config`` cannot compute so much work in one launch; None where it can.

        Args:
            what: has the work; the message begins with it.
            sizes: (m, n, k) of every group, or of fewer with as many tiles.
        """

    def workspace_bytes(self, config: KernelConfig, rows: np.ndarray, k: np.ndarray, num_cta: int) -> int:
        """Device memory that a launch of ``config`` needs beside its operands.

        Args:
            rows, k: of every group's ``a``, in elements; of a batch, rows of all of it.
            num_cta: persistent CTAs of the launch.
        """

    def resident_clusters(self, num_sms: int, cluster_size: int) -> int:
        """Clusters of CTAs that fill an SM each, and that a GPU runs at once."""

    def ctas_per_sm(self, config: KernelConfig) -> int:
        """CTAs of a kernel that share an SM."""

    def prefetches_in_turns(
        self, config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR
    ) -> bool:
        """Whether clusters take turns in fetching what several of them load, so that none does what another does."""

    def candidates(
        self,
        num_b: int = 1,
        weight_layout: str = "separate",
        out_format: BlockFormat | None = None,
        form: Form = "list",
        formats: Formats = NVFP4_PAIR,
    ) -> tuple[KernelConfig, ...]:
        """What is chosen from.

        Args:
            num_b: operands that have weights: 2 for a dual GEMM whose weights are not interleaved.
            weight_layout: "separate", or one of ``INTERLEAVE``.
            out_format: of quantized results; None of others.
        """

    def choose(self, problem: GroupedProblem, num_sms: int) -> KernelConfig:
        """The config for a problem: of groups of these sizes, or where only the device knows the sizes, of a mean size.

        Ragged groups share rows, so that some have more than the mean; no masked group has more than its size here.
        """

    def estimates(self, problem: GroupedProblem, num_sms: int) -> Sequence[Estimated]:
        """Every candidate, the best first, if the family estimates a time for each of them and knows the sizes; else none."""


class WeightOnlyFamily(Protocol):
    """A module of this package: architectures with a kernel for grouped products of 16-bit ``a`` and quantized ``b``.

    ``b_format``, wherever it is an argument, is the format of ``b``.
    """

    @property
    def ARCHS(self) -> tuple[str, ...]:
        """Their names, such as ``sm_90a``."""

    @property
    def KERNEL(self) -> str:
        """Module and class of the kernel, below ``nvfp4_cute.kernels``."""

    @property
    def PAIRS(self) -> Sequence[tuple[None, BlockFormat]]:
        """None, for 16-bit ``a``, and the formats of ``b`` that the kernel decodes."""

    def resolve(self, config: KernelConfig, num_b: int = 1, b_format: BlockFormat = NVFP4) -> KernelConfig:
        """``config`` with its stage count made explicit."""

    def unsupported_reason(
        self, config: KernelConfig, num_b: int = 1, b_format: BlockFormat = NVFP4
    ) -> str | None:
        """Why this family cannot build ``config``, with the nearest legal value; None where it can."""

    def clusters_at_once(self, config: KernelConfig, num_sms: int) -> int:
        """Clusters that a GPU runs at once."""

    def most_tiles(self, sizes: Sequence[tuple[int, int, int]], config: KernelConfig, is_ragged: bool) -> int:
        """Tiles that a launch has at most; ragged: of all rows of ``sizes``, however they are dealt to groups."""

    def choose(
        self,
        sizes: tuple[tuple[int, int, int], ...],
        num_sms: int,
        num_b: int = 1,
        is_ragged: bool = False,
        b_format: BlockFormat = NVFP4,
    ) -> KernelConfig:
        """The config for groups of these (m, n, k), or, ragged, of about their mean, as only the device knows the sizes."""

    def is_faster_than_few_rows(
        self, m: int, n: int, k: int, batches: int, num_sms: int, b_format: BlockFormat = NVFP4
    ) -> bool:
        """Whether [m, k] x [n, k] of every batch takes this kernel less time than ``kernels/simt/w4a16.py``."""


# ---- members of families without a peculiarity --------------------------------------------------------------------
def no_work_reason(what: str, sizes: Iterable[tuple[int, int, int]], config: KernelConfig) -> str | None:
    """``Family.work_reason`` of kernels that compute any work."""
    return None


def no_workspace_bytes(config: KernelConfig, rows: np.ndarray, k: np.ndarray, num_cta: int) -> int:
    """``Family.workspace_bytes`` of kernels that are one launch."""
    return 0


def one_cta_per_sm(config: KernelConfig) -> int:
    """``Family.ctas_per_sm`` of kernels whose CTAs fill an SM."""
    return 1


def never_in_turns(config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> bool:
    """``Family.prefetches_in_turns`` of kernels whose CTAs load what they multiply."""
    return False


def no_estimates(problem: GroupedProblem, num_sms: int) -> Sequence[Estimated]:
    """``Family.estimates`` of families that compare candidates by another rule."""
    return ()
