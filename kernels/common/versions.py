"""Names that CuTe DSL before 4.8 lacks or spells differently. Kernels and one-file submissions import them from here."""

import re

import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Float32, Int16, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.base_dsl.typing import as_numeric
from cutlass.cutlass_dsl import CuTeDSL

try:
    from cutlass.memory import SmemAllocator, TmemAllocator
except ImportError:
    from cutlass.utils import TmemAllocator

    class SmemAllocator(cutlass.utils.SmemAllocator):
        """Older allocator, with aligned arrays added."""

        def allocate_array(self, element_type, num_elems=1, *, byte_alignment=1):
            """Returns a pointer to ``num_elems`` elements in shared memory."""
            num_bytes = num_elems * element_type.width // 8
            base = self.allocate(num_bytes, max(byte_alignment, element_type.width // 8))
            return cute.recast_ptr(base, dtype=element_type)


# Old versions have no __version__.
VERSION = tuple(map(int, getattr(cutlass, "__version__", "4.3").split(".")[:2]))
# From here on launches may begin before the end of the one before them (PTX ISA 9.7.13.13, griddepcontrol).
PROGRAMMATIC_FROM = 90
# Inline-assembly constraint of an operand type.
ASM_CONSTRAINTS = {Int16: "h", Int32: "r", Uint32: "r", Int64: "l", Float32: "f"}


def inline_ptx(
    ptx_code: str, *, write_only_types: list | None = None, read_only_args: list | None = None, predicate=None
):
    """Implements the part of ``cute.arch.inline_ptx`` that kernels use, on every version.

    Operands ``{$r0}``, ... are read and ``{$w0}``, ... are written. A single instruction may have a predicate. Returns None,
    the one value written, or a tuple of values.
    """
    types, read_only_args = write_only_types or [], read_only_args or []
    # 4.6 and 4.7 have the function, but give constants the constraint "n", which libNVVM refuses.
    if VERSION >= (4, 8):
        return cute.arch.inline_ptx(
            ptx_code, write_only_types=types, read_only_args=read_only_args, predicate=predicate
        )
    values = [as_numeric(value) for value in read_only_args]
    if predicate is not None:
        flag = f"${len(types) + len(values)}"
        values.append(Int32(predicate))
        ptx_code = f"{{\n.reg .pred p;\nsetp.ne.b32 p, {flag}, 0;\n@p {ptx_code}\n}}"
    code = re.sub(r"\{\$w(\d+)\}", r"$\1", ptx_code)
    code = re.sub(r"\{\$r(\d+)\}", lambda match: f"${len(types) + int(match[1])}", code)
    results = [dtype.mlir_type for dtype in types]
    struct = llvm.StructType.get_literal(results) if len(results) > 1 else None
    written = llvm.inline_asm(
        struct or (results[0] if results else None),
        [value.ir_value() for value in values],
        code,
        ",".join(
            [f"={ASM_CONSTRAINTS[dtype]}" for dtype in types]
            + [ASM_CONSTRAINTS[type(value)] for value in values]
        ),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if struct is None:
        return types[0](written) if types else None
    return tuple(dtype(llvm.extractvalue(dtype.mlir_type, written, [i])) for i, dtype in enumerate(types))


def compiles_for(least: int) -> bool:
    """Whether what is traced is compiled for sm_<least> or later; versions that do not say compile for Hopper and later alone."""
    dsl = CuTeDSL._get_dsl()
    if not hasattr(dsl, "get_arch_enum"):
        return True
    major, minor = dsl.get_arch_enum().value[:2]
    return 10 * major + minor >= least


def ldmatrix(words, pointer, count: int, *, loc=None, ip=None):
    """Calls ``nvvm.ldmatrix`` for rows and returns a value of type ``words``, which earlier versions take as first argument."""
    if VERSION >= (4, 8):
        return nvvm.ldmatrix(pointer, count, nvvm.MMALayout.row, results=[words], loc=loc, ip=ip)
    return nvvm.ldmatrix(words, pointer, count, nvvm.MMALayout.row, loc=loc, ip=ip)


@cute.jit
def advanced(consumer, count: Int32):
    """Returns a pipeline's consumer advanced by ``count`` stages; earlier versions advance stage by stage."""
    if cutlass.const_expr(VERSION >= (4, 8)):
        consumer.advance(count)
    else:
        for _ in cutlass.range(count, unroll=1):
            consumer.advance()
    return consumer


__all__ = ["SmemAllocator", "TmemAllocator", "advanced", "compiles_for", "inline_ptx", "ldmatrix"]


def nanoseconds() -> Int64:
    """Returns the GPU's nanosecond clock."""
    if hasattr(cute.arch, "globaltimer"):
        return cute.arch.globaltimer()
    return inline_ptx("mov.u64 {$w0}, %globaltimer;", write_only_types=[Int64])
