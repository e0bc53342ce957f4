"""Tensor maps of A, B and their scales: one box a pipeline stage, the same coordinates in every form.

Operands are (K, rows, batch), scales (512-byte block, K blocks, row blocks, batch), innermost first. ``M side`` and
``N side`` are the MMA's; ``KernelConfig.swap_ab`` says which of a and b is which.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05

from nvfp4_cute.arch.sm100 import SF_ATOM_COLS, SF_ATOM_ROWS, sf_blocks_n
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.scale_layout import SF_VEC_SIZE

from ..common.tma_operand import global_ptr

AB_DTYPE = cutlass.Float4E2M1FN
# Scale blocks travel as 16-bit words: 256 of them are the longest box edge.
SF_WORD = cutlass.Int16
SF_BLOCK_BYTES = SF_ATOM_ROWS * SF_ATOM_COLS
SF_BLOCK_WORDS = SF_BLOCK_BYTES // 2


@dataclass(frozen=True)
class Boxes:
    """What one CTA's TMA brings in for one stage.

    Attributes:
        rows_m, rows_n: operand rows, all of a K tile.
        sf_m, sf_n: (K blocks, row blocks) of scales. A pair's CTAs bring half of the N side's each, for both.
    """

    rows_m: int
    rows_n: int
    sf_m: tuple[int, int]
    sf_n: tuple[int, int]

    @classmethod
    def of(cls, config: KernelConfig) -> "Boxes":
        """Boxes of a config."""
        m, n, k = config.cta_tile_shape_mnk
        num_cta, k_blocks, blocks_n = config.cluster_size, k // (SF_VEC_SIZE * SF_ATOM_COLS), sf_blocks_n(n)
        halved = (
            (k_blocks, blocks_n // num_cta) if blocks_n % num_cta == 0 else (k_blocks // num_cta, blocks_n)
        )
        return cls(m, n // num_cta, (k_blocks, m // SF_ATOM_ROWS), halved)


@dataclass(frozen=True)
class OperandView:
    """One operand of a group, or of all groups where they share memory.

    Attributes:
        data: address of element (0, 0).
        scale: address of the first scale block.
        rows, batch, k: extents in elements; batch 1 where groups have operands of their own or follow each other.
        pitch, batch_pitch: elements between rows and between batches.
        sf_row_blocks: 128-row blocks of scales in one batch.
    """

    data: Int64
    scale: Int64
    rows: Int32
    batch: Int32
    k: Int32
    pitch: Int64
    batch_pitch: Int64
    sf_row_blocks: Int32


def operand_atom(view: OperandView, box_rows: int, box_k: int):
    """TMA atom, with its tensor map, for boxes of ``box_rows`` x ``box_k`` elements in the 128-byte swizzle."""
    # A TMA pitch is a multiple of 16 bytes, that is 32 elements.
    strides = (1, cute.assume(view.pitch, 32), cute.assume(view.batch_pitch, 32))
    tensor = cute.make_tensor(
        global_ptr(AB_DTYPE, view.data), cute.make_layout((view.k, view.rows, view.batch), stride=strides)
    )
    swizzle = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, AB_DTYPE).inner
    box = cute.make_composed_layout(swizzle, 0, cute.make_layout((box_k, box_rows, 1)))
    return _atom(tensor, box, (box_k, box_rows, 1))


def scale_atom(view: OperandView, box: tuple[int, int]):
    """TMA atom for boxes of (K blocks, row blocks) scale blocks."""
    k_blocks, row_blocks = box
    sf_k_blocks = cute.ceil_div(view.k, SF_VEC_SIZE * SF_ATOM_COLS)
    row_stride = Int64(sf_k_blocks) * SF_BLOCK_WORDS
    batch_stride = row_stride * view.sf_row_blocks
    tensor = cute.make_tensor(
        global_ptr(SF_WORD, view.scale),
        cute.make_layout(
            (SF_BLOCK_WORDS, sf_k_blocks, view.sf_row_blocks, view.batch),
            stride=(
                1,
                SF_BLOCK_WORDS,
                cute.assume(row_stride, SF_BLOCK_WORDS),
                cute.assume(batch_stride, SF_BLOCK_WORDS),
            ),
        ),
    )
    shape = (SF_BLOCK_WORDS, k_blocks, row_blocks, 1)
    return _atom(tensor, cute.make_layout(shape), shape)


def _atom(tensor: cute.Tensor, smem_layout, tiler: tuple):
    """Only the tensor map is used: ``instructions.tma_load`` chooses the instruction."""
    op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    return cpasync.make_tiled_tma_atom(op, tensor, smem_layout, tiler)[0]
