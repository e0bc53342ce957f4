"""Warp instructions as the kernels use them: matrix loads from and to shared memory, and the block-scaled MMA.

CuTe's atom for this MMA fixes the thread selectors of the scale operands at 0. Here they are arguments: the four lanes
of a quad supply scales of different rows, so that one 32-bit load brings the scales of 32 rows to a warp.
"""

from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cutlass_dsl import dsl_user_op

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.planning.arch.sm120 import MMA

from ..common.versions import ldmatrix

NVFP4_MMA = MMA[NVFP4, NVFP4]
MMA_M, MMA_N, MMA_K = 16, 8, NVFP4_MMA.k


def _shared_ptr(address: Int32, loc, ip) -> ir.Value:
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address.ir_value(loc=loc, ip=ip), loc=loc, ip=ip)


def _fields(struct: ir.Value, kind: type, count: int, loc, ip) -> list:
    return [kind(llvm.extractvalue(kind.mlir_type, struct, [i], loc=loc, ip=ip)) for i in range(count)]


@dsl_user_op
def load_matrices(address: Int32, count: int, *, loc=None, ip=None) -> list:
    """ldmatrix of ``count`` (2 or 4) matrices of 8 rows x 16 bytes; lane 8i + r gives the address of row r of matrix i.

    Returns:
        One Int32 a matrix: lane 4g + t holds bytes 4t..4t+3 of row g.
    """
    words = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    struct = ldmatrix(words, _shared_ptr(address, loc, ip), count, loc=loc, ip=ip)
    return _fields(struct, Int32, count, loc, ip)


@dsl_user_op
def load_word(address: Int32, *, loc=None, ip=None) -> Int32:
    """ld.shared.b32."""
    return Int32(llvm.load(Int32.mlir_type, _shared_ptr(address, loc, ip), alignment=4, loc=loc, ip=ip))


@dsl_user_op
def mma_nvfp4(
    acc: list, a: list, b: list, sfa: Int32, thread_a: int, sfb: Int32, thread_b: int, *, loc=None, ip=None
) -> list:
    """m16n8k64 of e2m1 with one ue4m3 scale in 16 (PTX ISA 9.7.14.5): acc + (A * SFA) @ (B * SFB).

    With lane = 4g + t:

    Args:
        acc: four Float32: row g, columns 2t and 2t + 1; row g + 8, the same columns.
        a: four Int32 of 8 values: rows g and g + 8 at k 8t; rows g and g + 8 at k 8t + 32.
        b: two Int32 of 8 values: column g at k 8t and at k 8t + 32.
        sfa: the four scales of row g in lanes t = 2 * thread_a, of row g + 8 in lanes t = 2 * thread_a + 1.
        sfb: the four scales of column g in lanes t = thread_b.

    Returns:
        The four sums.
    """

    def constant(value: int) -> ir.Value:
        return llvm.mlir_constant(ir.IntegerAttr.get(ir.IntegerType.get_signless(16), value), loc=loc, ip=ip)

    def values(registers: list) -> list:
        return [register.ir_value(loc=loc, ip=ip) for register in registers]

    element = ir.Attribute.parse(f"#nvvm.mma_type<{NVFP4.element.name}>")
    struct = nvvm.mma_block_scale(
        ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>"),
        ir.Attribute.parse(f"#nvvm.shape<m = {MMA_M}, n = {MMA_N}, k = {MMA_K}>"),
        ir.Attribute.parse(f"#nvvm.scale_vec_size<x{MMA_K // NVFP4.block_k}>"),
        ir.Attribute.parse(f"#nvvm.block_scale_format<{NVFP4.scale.name}>"),
        ir.Attribute.parse(f"#nvvm.block_scale_kind<{NVFP4_MMA.kind}>"),
        values(a),
        values(b),
        values(acc),
        sfa.ir_value(loc=loc, ip=ip),
        constant(0),
        constant(thread_a),
        sfb.ir_value(loc=loc, ip=ip),
        constant(0),
        constant(thread_b),
        multiplicand_a_ptx_type=element,
        multiplicand_b_ptx_type=element,
        loc=loc,
        ip=ip,
    )
    return _fields(struct, Float32, 4, loc, ip)
