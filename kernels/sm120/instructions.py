"""Warp instructions of these kernels: matrix loads from shared memory and the block-scaled MMA.

CuTe's atom for this MMA fixes the thread selectors of the scale operands at 0. Here they are arguments: the four lanes
of a quad supply scales of different rows, so that one load brings the scales of 32 rows to a warp.
"""

from cutlass import Float32, Int8, Int16, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cutlass_dsl import dsl_user_op

from nvfp4_cute.formats.block_format import Formats
from nvfp4_cute.planning.arch.sm120 import MMA

from ..common.versions import inline_ptx, ldmatrix

MMA_M, MMA_N = 16, 8
# Bit position of an e2m1 within a byte.
E2M1_SHIFT = 2
# Bytes of an MMA's scales per row -> type that loads them.
SCALE_WORDS = {1: Int8, 2: Int16, 4: Int32}


def _shared_ptr(address: Int32, loc, ip) -> ir.Value:
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address.ir_value(loc=loc, ip=ip), loc=loc, ip=ip)


def _fields(struct: ir.Value, kind: type, count: int, loc, ip) -> list:
    return [kind(llvm.extractvalue(kind.mlir_type, struct, [i], loc=loc, ip=ip)) for i in range(count)]


@dsl_user_op
def load_matrices(address: Int32, count: int, *, loc=None, ip=None) -> list:
    """Loads ``count`` (2 or 4) matrices of 8 rows x 16 bytes with ldmatrix. Lane 8i + r passes the address of row r of matrix i.

    Returns:
        One Int32 per matrix: lane 4g + t holds bytes 4t..4t+3 of row g.
    """
    words = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    struct = ldmatrix(words, _shared_ptr(address, loc, ip), count, loc=loc, ip=ip)
    return _fields(struct, Int32, count, loc, ip)


def load_padded_matrices(address: Int32, count: int) -> list:
    """Loads matrices of 8 rows x 16 e2m1, each row 8 bytes followed by a gap of 8, into one byte per element.

    Elements are in bits 2 to 5 of their byte, as MMA kinds with 8-bit elements expect e2m1 (PTX ISA 9.7.14.5.15; CUTLASS also
    shifts this way on SM120).
    """
    places = ", ".join(f"{{$w{i}}}" for i in range(count))
    words = inline_ptx(
        f"ldmatrix.sync.aligned.m8n16.x{count}.shared.b8x16.b4x16_p64 {{{places}}}, [{{$r0}}];",
        write_only_types=[Int32] * count,
        read_only_args=[address],
    )
    return [word << E2M1_SHIFT for word in words]


@dsl_user_op
def load_scale_word(address: Int32, count: int, *, loc=None, ip=None) -> Int32:
    """Loads ``count`` scales (1, 2 or 4 bytes) from shared memory into the low bytes of a word."""
    word = SCALE_WORDS[count]
    loaded = llvm.load(word.mlir_type, _shared_ptr(address, loc, ip), alignment=count, loc=loc, ip=ip)
    return Int32(loaded if word is Int32 else llvm.zext(Int32.mlir_type, loaded, loc=loc, ip=ip))


def integer_mma(acc: list, a: list, b: list) -> list:
    """Returns acc + A @ B of m16n8k32 int8 (PTX ISA 9.7.14.5.10), four Int32. See :func:`block_scaled_mma` for the registers."""
    names = [f"{{$r{i}}}" for i in range(10)]
    operands = (f"{{{', '.join(names[first:last])}}}" for first, last in ((0, 4), (4, 6), (6, 10)))
    return list(
        inline_ptx(
            f"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, {', '.join(operands)};",
            write_only_types=[Int32] * 4,
            read_only_args=[*a, *b, *acc],
        )
    )


@dsl_user_op
def block_scaled_mma(
    acc: list,
    a: list,
    b: list,
    sfa: Int32,
    thread_a: int,
    sfb: Int32,
    thread_b: int,
    formats: Formats,
    *,
    loc=None,
    ip=None,
) -> list:
    """Returns acc + (A * SFA) @ (B * SFB) of m16n8 and 32 bytes of K, with one scale per block of ``formats`` (PTX ISA 9.7.14.5).

    With lane = 4g + t:

    Args:
        acc: four Float32: columns 2t and 2t + 1 of row g, then of row g + 8.
        a: four Int32 of four bytes of K: rows g and g + 8 at byte 4t; rows g and g + 8 at byte 4t + 16.
        b: two Int32 of four bytes of K: column g at byte 4t and at byte 4t + 16.
        sfa: the scales of row g in lanes t = 2 * thread_a, of row g + 8 in lanes t = 2 * thread_a + 1, in the low bytes.
        sfb: the scales of column g in lanes t = thread_b.
        formats: formats on the M side and on the N side, with equal block length.

    Returns:
        Four sums.
    """

    def constant(value: int) -> ir.Value:
        return llvm.mlir_constant(ir.IntegerAttr.get(ir.IntegerType.get_signless(16), value), loc=loc, ip=ip)

    def values(registers: list) -> list:
        return [register.ir_value(loc=loc, ip=ip) for register in registers]

    mma, (a_format, b_format) = MMA[formats], formats
    of_a, of_b = (ir.Attribute.parse(f"#nvvm.mma_type<{format.element.name}>") for format in formats)
    struct = nvvm.mma_block_scale(
        ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>"),
        ir.Attribute.parse(f"#nvvm.shape<m = {MMA_M}, n = {MMA_N}, k = {mma.k}>"),
        ir.Attribute.parse(f"#nvvm.scale_vec_size<x{mma.k // a_format.block_k}>"),
        ir.Attribute.parse(f"#nvvm.block_scale_format<{a_format.scale.name}>"),
        ir.Attribute.parse(f"#nvvm.block_scale_kind<{mma.kind}>"),
        values(a),
        values(b),
        values(acc),
        sfa.ir_value(loc=loc, ip=ip),
        constant(0),
        constant(thread_a),
        sfb.ir_value(loc=loc, ip=ip),
        constant(0),
        constant(thread_b),
        multiplicand_a_ptx_type=of_a,
        multiplicand_b_ptx_type=of_b,
        loc=loc,
        ip=ip,
    )
    return _fields(struct, Float32, 4, loc, ip)
