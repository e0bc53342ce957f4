"""Shared-memory layout of A, B and their scales, and the TMA boxes of a stage."""

from dataclasses import dataclass

from cutlass import Int32

from nvfp4_cute.formats.block_format import Formats
from nvfp4_cute.planning.arch.sm120 import (
    MMA,
    SF_ATOM_ROWS,
    SmemPlan,
    formats_on_sides,
    promotes,
)
from nvfp4_cute.planning.config import KernelConfig

from ..common.operand_maps import Boxes, MapElement


@dataclass(frozen=True)
class StageBuffers:
    """Shared addresses in stage 0 of the first operand on each side and of its scales.

    A second operand is at a constant distance.
    """

    m: Int32
    n: Int32
    sf_m: Int32
    sf_n: Int32

    def at_stage(self, plan: SmemPlan, stage_idx: Int32) -> "StageBuffers":
        """Returns the addresses in another stage."""
        return StageBuffers(
            self.m + stage_idx * plan.a_stage_bytes,
            self.n + stage_idx * plan.b_stage_bytes,
            self.sf_m + stage_idx * plan.sfa_stage_bytes,
            self.sf_n + stage_idx * plan.sfb_stage_bytes,
        )

    def plus(self, other: "StageBuffers") -> "StageBuffers":
        """Returns sums of addresses and offsets."""
        return StageBuffers(
            self.m + other.m, self.n + other.n, self.sf_m + other.sf_m, self.sf_n + other.sf_n
        )


def make_boxes(config: KernelConfig, formats: Formats) -> Boxes:
    """Returns the TMA boxes of a config.

    Scales come in whole blocks even if the tile uses part of their rows; float32 scales have none.

    Args:
        formats: formats of ``a`` and ``b``, with equal block length.
    """
    m, n, k = config.cta_tile_shape_mnk
    m_format, n_format = formats_on_sides(config, formats)
    bits = MMA[formats].element_bits
    elements = MapElement.of(m_format, bits), MapElement.of(n_format, bits)
    if promotes(formats) or formats[0].is_1xk:
        return Boxes(k, m, n, None, None, elements=elements)
    k_blocks = k // m_format.atom_k
    of_scales = (k_blocks, m // SF_ATOM_ROWS), (k_blocks, 1)
    return Boxes(k, m, n, *of_scales, sf_block_k=m_format.atom_k, elements=elements)
