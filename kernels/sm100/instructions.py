"""Tensor-memory instructions of this family, one function each. Exactly one thread of a warp calls them.

CuTe's own copies and MMAs fix the shape of an MMA when the kernel is compiled. Here N is a run-time value, so that a
tile at the end of a group costs what its rows cost, and descriptors are plain integers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from ..common.versions import inline_ptx

# Shared-memory matrix descriptors (PTX ISA 9.7.16.4.1) without their start address: low and high word.
# K-major rows of 128 bytes in the 128-byte swizzle: eight rows, 1024 bytes, to the next row group.
OPERAND_DESCRIPTOR = 0x00010000, 0x40004040
# Scale blocks, no swizzle: 32 rows of 16 bytes, eight rows, 128 bytes, to the next row group.
SCALE_DESCRIPTOR = 0x00000000, 0x00004008
# Descriptor for MMAs of 96 elements of K: the low word's leading offset is the address at which a row continues after 128 bytes.
K96_DESCRIPTOR = 0x00000000, OPERAND_DESCRIPTOR[1] | 1 << 52 - 32
DESCRIPTOR_LEADING_SHIFT = 16
DESCRIPTOR_UNIT_BYTES = 16
# Instruction descriptor (PTX ISA 9.7.16.4.2): bit positions of the extents and of the first scale of A and of B within a word.
MMA_DESCRIPTOR_N_SHIFT = 17 - 3
MMA_DESCRIPTOR_M_SHIFT = 27 - 7
MMA_DESCRIPTOR_SFA_ID_SHIFT = 29
MMA_DESCRIPTOR_SFB_ID_SHIFT = 4
# Both CTAs of a pair.
PAIR_MASK = 3


def smem_descriptor(template: tuple[int, int], address: Int32) -> Int32:
    """Returns the low word, the one that varies, of the descriptor of the matrix at ``address``, a multiple of 16 bytes."""
    return ((address & 0x3FFFF) >> 4) | template[0]


@cute.jit
def order_after_wait():
    """Orders this thread's later tcgen05 instructions after what it has waited for (PTX ISA 9.7.16.6.4.4)."""
    inline_ptx("tcgen05.fence::after_thread_sync;")


@cute.jit
def order_before_arrival():
    """Orders this thread's earlier tcgen05 instructions before the arrivals that follow (PTX ISA 9.7.16.6.4.4)."""
    inline_ptx("tcgen05.fence::before_thread_sync;")


@cute.jit
def copy_scale_block(column: Int32, source: Int32, num_cta: cutlass.Constexpr):
    """Copies 128 rows x 4 scales (512 bytes) to four columns of tensor memory, in every lane quadrant of each CTA.

    Args:
        column: tensor-memory address.
        source: low word of a shared-memory descriptor.
    """
    inline_ptx(
        f"{{\n.reg .b32 high;\n.reg .b64 source;\nmov.b32 high, {SCALE_DESCRIPTOR[1]:#x};\n"
        "mov.b64 source, {{$r1}, high};\n"
        f"tcgen05.cp.cta_group::{num_cta}.32x128b.warpx4 [{{$r0}}], source;\n}}",
        read_only_args=[column, source],
    )


@cute.jit
def mma_descriptor(n: Int32, types: cutlass.Constexpr, num_cta: cutlass.Constexpr) -> Int32:
    """Returns the instruction descriptor for 128 rows per CTA and ``n`` columns, a multiple of 16.

    types: type bits with scales (``limits.mma_types``) or without; both have the extents in the same bits.
    """
    m_bits = 128 * num_cta << MMA_DESCRIPTOR_M_SHIFT
    return (n << MMA_DESCRIPTOR_N_SHIFT) | Int32(types | m_bits)


def at_scale(descriptor: Int32, scale: int) -> Int32:
    """Returns the instruction descriptor of an MMA whose scales start at number ``scale`` of an atom's four."""
    if scale == 0:
        return descriptor
    return descriptor | (scale << MMA_DESCRIPTOR_SFA_ID_SHIFT | scale << MMA_DESCRIPTOR_SFB_ID_SHIFT)


@cute.jit
def block_scaled_mma(
    acc: Int32,
    a: Int32,
    b: Int32,
    instruction: Int32,
    sfa: Int32,
    sfb: Int32,
    accumulate: Int32,
    kind: cutlass.Constexpr,
    block_k: cutlass.Constexpr,
    num_cta: cutlass.Constexpr,
    high: cutlass.Constexpr = OPERAND_DESCRIPTOR[1],
):
    """Issues D = A B^T + (D if ``accumulate``) for the K of one MMA (PTX ISA 9.7.16.10.9).

    Args:
        acc: tensor-memory address of D.
        a, b: low words of shared-memory descriptors.
        sfa, sfb: tensor-memory addresses of the scales.
        kind: kind of ``arch.base.Mma``.
        block_k: elements along K that share a scale.
        high: high word of the shared-memory descriptors.
    """
    inline_ptx(
        f"{{\n.reg .pred accumulate;\n.reg .b32 high;\n.reg .b64 a, b;\nmov.b32 high, {high:#x};\n"
        "setp.ne.b32 accumulate, {$r6}, 0;\nmov.b64 a, {{$r1}, high};\nmov.b64 b, {{$r2}, high};\n"
        f"tcgen05.mma.cta_group::{num_cta}.kind::{kind}.block_scale.block{block_k} "
        "[{$r0}], a, b, {$r3}, [{$r4}], [{$r5}], accumulate;\n}",
        read_only_args=[acc, a, b, instruction, sfa, sfb, accumulate],
    )


def dense_mma(
    acc: Int32,
    a: Int32,
    b: Int32,
    instruction: Int32,
    accumulate: Int32 | bool,
    kind: cutlass.Constexpr,
    num_cta: cutlass.Constexpr,
):
    """Issues D = A B^T + (D if ``accumulate``) without scales (PTX ISA 9.7.16.10.9).

    See ``block_scaled_mma`` for the arguments.
    """
    is_known = isinstance(accumulate, bool)
    condition = str(int(accumulate)) if is_known else "{$r4}"
    inline_ptx(
        f"{{\n.reg .pred accumulate;\n.reg .b32 high;\n.reg .b64 a, b;\nmov.b32 high, {OPERAND_DESCRIPTOR[1]:#x};\n"
        f"setp.ne.b32 accumulate, {condition}, 0;\n"
        "mov.b64 a, {{$r1}, high};\nmov.b64 b, {{$r2}, high};\n"
        f"tcgen05.mma.cta_group::{num_cta}.kind::{kind} [{{$r0}}], a, b, {{$r3}}, accumulate;\n}}",
        read_only_args=[acc, a, b, instruction] if is_known else [acc, a, b, instruction, accumulate],
    )


@cute.jit
def commit_mma(barrier: cute.Pointer, num_cta: cutlass.Constexpr, mcast_mask: Int32 | int | None):
    """Arrives at ``barrier`` when all of this thread's earlier MMAs and copies have completed.

    Args:
        mcast_mask: CTAs of the cluster whose barrier at this offset gets the arrival; None for this CTA only.
    """
    group = tcgen05.CtaGroup.TWO if num_cta == 2 else tcgen05.CtaGroup.ONE
    tcgen05.commit(barrier, mcast_mask, group)
