"""A choice at run time among parts of the code that differ by a number, as registers do."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def one_of(index: Int32, count: cutlass.Constexpr, body: cutlass.Constexpr):
    """Execute ``body(i)`` for the one i below ``count`` that ``index`` is, the last where it is more.

    Found by inequalities: of equalities the compiler would make an indirect branch.
    """
    if cutlass.const_expr(count == 1):
        body(0)
    else:
        if index >= count - 1:
            body(count - 1)
        else:
            one_of(index, count - 1, body)
