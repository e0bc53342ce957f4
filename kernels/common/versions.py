"""What versions 4.3.5 and 4.5.2 of CuTe DSL lack of 4.8. A one-file submission takes these from here."""

import re

import cutlass.cute as cute
import cutlass.utils
from cutlass import Int16, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.base_dsl.typing import as_numeric

try:
    from cutlass.memory import SmemAllocator, TmemAllocator
except ImportError:
    from cutlass.utils import TmemAllocator

    class SmemAllocator(cutlass.utils.SmemAllocator):
        """The older allocator with aligned arrays."""

        def allocate_array(self, element_type, num_elems=1, *, byte_alignment=1):
            """Pointer to ``num_elems`` elements in shared memory."""
            num_bytes = num_elems * element_type.width // 8
            base = self.allocate(num_bytes, max(byte_alignment, element_type.width // 8))
            return cute.recast_ptr(base, dtype=element_type)


# Register class of an operand in inline assembly.
ASM_CONSTRAINTS = {Int16: "h", Int32: "r", Int64: "l"}


def inline_ptx(ptx_code: str, *, read_only_args: list) -> None:
    """``cute.arch.inline_ptx`` as far as the kernels use it: operands ``{$r0}``, ... that are read."""
    if hasattr(cute.arch, "inline_ptx"):
        cute.arch.inline_ptx(ptx_code, read_only_args=read_only_args)
        return
    values = [as_numeric(value) for value in read_only_args]
    llvm.inline_asm(
        None,
        [value.ir_value() for value in values],
        re.sub(r"\{\$r(\d+)\}", r"$\1", ptx_code),
        ",".join(ASM_CONSTRAINTS[type(value)] for value in values),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


__all__ = ["SmemAllocator", "TmemAllocator", "inline_ptx"]
