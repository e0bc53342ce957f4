"""Tensor maps of A, B and their scales: one box a pipeline stage, the same coordinates in every form.

Operands are (K, rows, batch), scales (512-byte block, K blocks, row blocks, batch), innermost first. ``M side`` and
``N side`` are the MMA's; ``KernelConfig.swap_ab`` says which of a and b is which.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from nvfp4_cute.formats.block_format import (
    ATOM_BYTES,
    NVFP4,
    PADDED_ALIGN_BYTES,
    TMA_ALIGN_BYTES,
    BlockFormat,
)

from .launch_args import OperandView
from .tma_descriptor import prefetch_descriptor, select_descriptor, select_descriptor_address

# A scale block covers 128 rows x 4 scales. Blocks travel as 16-bit words: 256 of them are the longest box edge.
SF_BLOCK_BYTES = ATOM_BYTES
SF_BLOCK_K = NVFP4.atom_k
SF_WORD = cutlass.Int16
SF_BLOCK_WORDS = SF_BLOCK_BYTES // 2
# Bytes of a row in shared memory -> bits of its 16-byte chunk's place that TMA swizzles (PTX ISA 5.5.7).
SWIZZLE_BITS = {64: 2, 128: 3}


@dataclass(frozen=True)
class MapElement:
    """What the tensor map of an operand counts.

    Attributes:
        dtype: packed 4-bit elements, or bytes.
        is_padded: whether 16 elements of 4 bits fill 16 bytes in shared memory, eight of which TMA does not write: as MMAs of
            kinds with 8-bit elements read them. Then addresses and pitches are multiples of 32 bytes, and K of 128.
    """

    dtype: type = cutlass.Float4E2M1FN
    is_padded: bool = False

    @classmethod
    def of(cls, format: BlockFormat, element_bits: int) -> "MapElement":
        """Of elements that have so many bits in shared memory."""
        if format.element.bits != 4:
            return cls(cutlass.Uint8)
        return cls(is_padded=element_bits > 4)

    @property
    def bits(self) -> int:
        """In shared memory."""
        return 8 if self.is_padded else self.dtype.width

    @property
    def align_bytes(self) -> int:
        """Of addresses and pitches."""
        return PADDED_ALIGN_BYTES if self.is_padded else TMA_ALIGN_BYTES


@dataclass(frozen=True)
class Boxes:
    """What one CTA's TMA brings in for one stage.

    Attributes:
        k: elements of K.
        rows_m, rows_n: operand rows, all of a K tile.
        sf_m, sf_n: (K blocks, row blocks) of scales, or None where TMA does not bring them.
        values_per_element: 2 where 4-bit elements have maps of bytes: those of sm_90a know no 4-bit type. Coordinates count
            elements of the map.
        sf_block_k: elements of K that a block of scales belongs to.
        elements: of the operands on the M side and on the N side.
        splits_sf_n: whether the CTAs of a pair bring parts of the N side's scales for each other.
    """

    k: int
    rows_m: int
    rows_n: int
    sf_m: tuple[int, int] | None
    sf_n: tuple[int, int] | None
    values_per_element: int = 1
    sf_block_k: int = SF_BLOCK_K
    elements: tuple[MapElement, MapElement] = (MapElement(), MapElement())
    splits_sf_n: bool = True


@dataclass(frozen=True)
class Descriptors:
    """Tensor maps in the kernel's parameters: an entry an operand, each a TMA atom a slot, or one for all groups.

    Attributes:
        m, n: of the operands on the MMA's M and N side. A dual GEMM has two on one of them.
        sf_m, sf_n: of their scales, unless those come in another way.
    """

    m: list
    n: list
    sf_m: list
    sf_n: list

    @classmethod
    def encode(cls, views_m: list, views_n: list, boxes: Boxes) -> "Descriptors":
        """Encode the maps on the host. views_m, views_n: ``launch_args.read_operands``."""
        return cls(
            m=[[_operand_atom(view, boxes, boxes.rows_m, 0) for view in views] for views in views_m],
            n=[[_operand_atom(view, boxes, boxes.rows_n, 1) for view in views] for views in views_n],
            sf_m=_scale_atoms(views_m, boxes.sf_m, boxes.sf_block_k),
            sf_n=_scale_atoms(views_n, boxes.sf_n, boxes.sf_block_k),
        )


@cute.jit
def prefetch_descriptors(descriptors: Descriptors):
    """Fetch the tensor maps of up to 32 slots, a lane each, while other warps set up barriers. A whole warp calls this."""
    lane = cute.arch.lane_idx()
    if lane < len(descriptors.m[0]):
        for atoms in (*descriptors.m, *descriptors.n, *descriptors.sf_m, *descriptors.sf_n):
            prefetch_descriptor(select_descriptor(atoms, lane))


def descriptor_addresses(operands: list, slot: Int32) -> list:
    """Of every operand's tensor map for the group at ``slot``."""
    return [select_descriptor_address(atoms, slot) for atoms in operands]


def _operand_atom(view: OperandView, boxes: Boxes, box_rows: int, side: int):
    """TMA atom, with its tensor map, for boxes of ``box_rows`` rows of a K tile, their bytes swizzled. side: 0 is M, 1 N."""
    element, per_element = boxes.elements[side], 1
    if boxes.values_per_element > 1 and element.bits == 4:
        element, per_element = MapElement(cutlass.Uint8), boxes.values_per_element
    pitch_step = element.align_bytes * 8 * per_element // element.dtype.width
    return rows_atom(view, element, per_element, boxes.k // per_element, box_rows, pitch_step)


def global_ptr(dtype: type, address: Int64, align_bytes: int = TMA_ALIGN_BYTES) -> cute.Pointer:
    """Pointer to what a tensor map describes."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align_bytes)


def rows_atom(
    view: OperandView,
    element: type | MapElement,
    per_element: int,
    box_k: int,
    box_rows: int,
    pitch_step: int = 32,
):
    """TMA atom for boxes of ``box_k`` elements of each of ``box_rows`` rows, which are 64 or 128 bytes, swizzled.

    Args:
        view: its pitches are multiples of ``pitch_step`` values: of 16 bytes, which are 32 of NVFP4.
        element, per_element: an element, which holds so many values.
    """
    element = element if isinstance(element, MapElement) else MapElement(element)
    strides = (
        1,
        *(
            cute.assume(pitch // per_element, pitch_step // per_element)
            for pitch in (view.pitch, view.batch_pitch)
        ),
    )
    shape = (view.k // per_element, view.rows, view.batch)
    start = global_ptr(element.dtype, view.data, element.align_bytes)
    tensor = cute.make_tensor(start, cute.make_layout(shape, stride=strides))
    swizzle = cute.make_swizzle(SWIZZLE_BITS[box_k * element.bits // 8], 4, 3)
    box = cute.make_composed_layout(swizzle, 0, cute.make_layout((box_k, box_rows, 1)))
    return _atom(tensor, box, (box_k, box_rows, 1), cutlass.Uint8 if element.is_padded else None)


def _scale_atoms(operands: list, box: tuple[int, int] | None, block_k: int) -> list:
    """Of every operand's scales; none without a box."""
    return [] if box is None else [[_scale_atom(view, box, block_k) for view in views] for views in operands]


def _scale_atom(view: OperandView, box: tuple[int, int], block_k: int):
    """TMA atom for boxes of (K blocks, row blocks) scale blocks of ``block_k`` elements along K each."""
    k_blocks, row_blocks = box
    sf_k_blocks = cute.ceil_div(view.k, block_k)
    row_stride = Int64(sf_k_blocks) * SF_BLOCK_WORDS
    batch_stride = row_stride * view.sf_batch_blocks
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


def scale_coordinates(box: tuple[int, int], k_block: Int32, row_block: Int32, batch: Int32) -> tuple:
    """Of a copy of scales, whose box has so many blocks along K and along rows: CuTe moves extents of 1 behind others."""
    blocks = (row_block, k_block) if box[0] == 1 < box[1] else (k_block, row_block)
    return 0, *blocks, batch


def _atom(tensor: cute.Tensor, smem_layout, tiler: tuple, internal_type: type | None = None):
    """Only the tensor map is used: ``tma_load`` chooses the instruction. internal_type: of elements that TMA pads."""
    op = cpasync.CopyBulkTensorTileG2SOp()
    options = {} if internal_type is None else {"internal_type": internal_type}
    return cpasync.make_tiled_tma_atom(op, tensor, smem_layout, tiler, **options)[0]
