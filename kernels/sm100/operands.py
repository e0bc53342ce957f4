"""TMA boxes of A, B and their scales for one CTA."""

from nvfp4_cute.formats.block_format import Formats
from nvfp4_cute.planning.arch.sm100.limits import MMA, SF_ATOM_ROWS, formats_on_sides, sf_blocks_n
from nvfp4_cute.planning.config import KernelConfig

from ..common.operand_maps import Boxes, MapElement


def make_boxes(config: KernelConfig, formats: Formats) -> Boxes:
    """Returns the boxes of a config.

    Each CTA of a pair loads half of the N side's scales for both; if that is a single block, each loads all of it.

    Args:
        formats: formats of ``a`` and ``b``, with equal block length.
    """
    m, n, k = config.cta_tile_shape_mnk
    m_format, n_format = formats_on_sides(config, formats)
    bits = MMA[formats].element_bits
    num_cta, k_blocks, blocks_n = config.num_mma_cta, k // m_format.atom_k, sf_blocks_n(n)
    splits = (k_blocks * blocks_n) % num_cta == 0
    sf_n = (k_blocks, blocks_n)
    if splits:
        sf_n = (k_blocks, blocks_n // num_cta) if blocks_n % num_cta == 0 else (k_blocks // num_cta, blocks_n)
    return Boxes(
        k,
        m,
        n // num_cta,
        (k_blocks, m // SF_ATOM_ROWS),
        sf_n,
        sf_block_k=m_format.atom_k,
        elements=(MapElement.of(m_format, bits), MapElement.of(n_format, bits)),
        splits_sf_n=splits,
    )
