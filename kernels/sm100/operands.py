"""Boxes of A, B and their scales that a CTA's TMA brings in."""

from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.planning.arch.sm100.limits import SF_ATOM_ROWS, sf_blocks_n
from nvfp4_cute.planning.config import KernelConfig

from ..common.operand_maps import Boxes


def make_boxes(config: KernelConfig, format: BlockFormat) -> Boxes:
    """Boxes of a config. A pair's CTAs bring half of the N side's scales each, for both.

    Args:
        format: of either side: what is multiplied has blocks of one length.
    """
    m, n, k = config.cta_tile_shape_mnk
    num_cta, k_blocks, blocks_n = config.num_mma_cta, k // format.atom_k, sf_blocks_n(n)
    halved = (k_blocks, blocks_n // num_cta) if blocks_n % num_cta == 0 else (k_blocks // num_cta, blocks_n)
    return Boxes(k, m, n // num_cta, (k_blocks, m // SF_ATOM_ROWS), halved, sf_block_k=format.atom_k)
