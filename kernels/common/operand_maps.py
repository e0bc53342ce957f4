"""Tensor maps of A, B and their scales: one box per pipeline stage, with equal coordinates in every form.

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

# A scale block covers 128 rows x 4 scales. Maps count it in 16-bit words, because 256 of them are the longest box edge.
SF_BLOCK_BYTES = ATOM_BYTES
SF_BLOCK_K = NVFP4.atom_k
SF_WORD = cutlass.Int16
SF_BLOCK_WORDS = SF_BLOCK_BYTES // 2
# Bytes of a row in shared memory -> number of chunk-index bits that TMA swizzles (PTX ISA 5.5.7).
SWIZZLE_BITS = {64: 2, 128: 3}


@dataclass(frozen=True)
class MapElement:
    """Element of an operand's tensor map.

    Attributes:
        dtype: packed 4-bit elements, or bytes. is_padded: whether 16 elements of 4 bits occupy 16 bytes in shared memory, of
            which TMA writes eight, as MMA kinds with 8-bit
            elements expect. Addresses and pitches are then multiples of 32 bytes, and K is a multiple of 128.
    """

    dtype: type = cutlass.Float4E2M1FN
    is_padded: bool = False

    @classmethod
    def of(cls, format: BlockFormat, element_bits: int) -> "MapElement":
        """Returns the element of a format that occupies ``element_bits`` bits in shared memory."""
        if format.element.bits != 4:
            return cls(cutlass.Uint8)
        return cls(is_padded=element_bits > 4)

    @property
    def bits(self) -> int:
        """Bits per element in shared memory."""
        return 8 if self.is_padded else self.dtype.width

    @property
    def align_bytes(self) -> int:
        """Alignment of addresses and pitches in bytes."""
        return PADDED_ALIGN_BYTES if self.is_padded else TMA_ALIGN_BYTES


@dataclass(frozen=True)
class Boxes:
    """TMA boxes of one CTA and one stage.

    Attributes:
        k: elements of K. rows_m, rows_n: rows of the operands on each side, all of one K tile. sf_m, sf_n: (K blocks, row
            blocks) of scales, or None if TMA does not load them. values_per_element: 2 if maps of bytes hold 4-bit elements,
            because sm_90a has no 4-bit map type. Coordinates count elements of
            the map.
        sf_block_k: elements of K per block of scales.
        elements: map elements of the operands on the M side and on the N side.
        splits_sf_n: whether the CTAs of a pair load parts of the N side's scales for each other.
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
    """Tensor maps in the kernel's parameters: per operand, one TMA atom per slot or one for all groups.

    Attributes:
        m, n: maps of the operands on the MMA's M and N side. A dual GEMM has two operands on one side.
        sf_m, sf_n: maps of their scales, if TMA loads them.
    """

    m: list
    n: list
    sf_m: list
    sf_n: list

    @classmethod
    def encode(cls, views_m: list, views_n: list, boxes: Boxes) -> "Descriptors":
        """Encodes the maps on the host. views_m, views_n: result of ``launch_args.read_operands``."""
        return cls(
            m=[[_operand_atom(view, boxes, boxes.rows_m, 0) for view in views] for views in views_m],
            n=[[_operand_atom(view, boxes, boxes.rows_n, 1) for view in views] for views in views_n],
            sf_m=_scale_atoms(views_m, boxes.sf_m, boxes.sf_block_k),
            sf_n=_scale_atoms(views_n, boxes.sf_n, boxes.sf_block_k),
        )


@cute.jit
def prefetch_descriptors(descriptors: Descriptors):
    """Prefetches the tensor maps of up to 32 slots, one per lane, while other warps initialize barriers.

    All lanes must call it.
    """
    lane = cute.arch.lane_idx()
    if lane < len(descriptors.m[0]):
        for atoms in (*descriptors.m, *descriptors.n, *descriptors.sf_m, *descriptors.sf_n):
            prefetch_descriptor(select_descriptor(atoms, lane))


def descriptor_addresses(operands: list, slot: Int32) -> list:
    """Returns the address of every operand's tensor map for the group at ``slot``."""
    return [select_descriptor_address(atoms, slot) for atoms in operands]


def _operand_atom(view: OperandView, boxes: Boxes, box_rows: int, side: int):
    """Returns the TMA atom for swizzled boxes of ``box_rows`` rows of a K tile. side: 0 for M, 1 for N."""
    element, per_element = boxes.elements[side], 1
    if boxes.values_per_element > 1 and element.bits == 4:
        element, per_element = MapElement(cutlass.Uint8), boxes.values_per_element
    pitch_step = element.align_bytes * 8 * per_element // element.dtype.width
    return rows_atom(view, element, per_element, boxes.k // per_element, box_rows, pitch_step)


def global_ptr(dtype: type, address: Int64, align_bytes: int = TMA_ALIGN_BYTES) -> cute.Pointer:
    """Returns the global pointer of a tensor map's data."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align_bytes)


def rows_atom(
    view: OperandView,
    element: type | MapElement,
    per_element: int,
    box_k: int,
    box_rows: int,
    pitch_step: int = 32,
):
    """Returns the TMA atom for swizzled boxes of ``box_rows`` rows of ``box_k`` elements, 64 or 128 bytes.

    Args:
        view: the operand. Its pitches are multiples of ``pitch_step`` values (16 bytes; 32 values of NVFP4).
        element, per_element: element of the map, and values per element.
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
    """Returns the TMA atoms of every operand's scales; none without a box."""
    return [] if box is None else [[_scale_atom(view, box, block_k) for view in views] for views in operands]


def _scale_atom(view: OperandView, box: tuple[int, int], block_k: int):
    """Returns the TMA atom for boxes of (K blocks, row blocks) scale blocks, each of ``block_k`` elements along K."""
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
    """Returns the coordinates of a copy of scales with this box. CuTe orders extents of 1 after the others."""
    blocks = (row_block, k_block) if box[0] == 1 < box[1] else (k_block, row_block)
    return 0, *blocks, batch


def _atom(tensor: cute.Tensor, smem_layout, tiler: tuple, internal_type: type | None = None):
    """Makes a TMA atom, of which only the tensor map is used; ``tma_load`` chooses the instruction.

    internal_type: element type for padded elements.
    """
    op = cpasync.CopyBulkTensorTileG2SOp()
    options = {} if internal_type is None else {"internal_type": internal_type}
    return cpasync.make_tiled_tma_atom(op, tensor, smem_layout, tiler, **options)[0]
