"""A choice at run time among parts of the code that differ by a number, as registers do."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

MOST_IN_TURN = 5


@cute.jit
def one_of(index: Int32, count: cutlass.Constexpr, body: cutlass.Constexpr):
    """Execute ``body(i)`` for the one i below ``count`` that ``index`` is, the last where it is more.

    The last one is tried first; of many the others are found by halving, which takes registers that few are not worth. By
    inequalities: of equalities the compiler would make an indirect branch.
    """
    if cutlass.const_expr(count == 1):
        body(0)
    else:
        if index >= count - 1:
            body(count - 1)
        elif cutlass.const_expr(count > MOST_IN_TURN):
            _by_halving(index, 0, count - 1, body)
        else:
            one_of(index, count - 1, body)


@cute.jit
def _by_halving(index: Int32, first: cutlass.Constexpr, end: cutlass.Constexpr, body: cutlass.Constexpr):
    """Execute ``body(i)`` for the one i from ``first`` to below ``end`` that ``index`` is."""
    if cutlass.const_expr(end - first == 1):
        body(first)
    else:
        middle = (first + end) // 2
        if index >= middle:
            _by_halving(index, middle, end, body)
        else:
            _by_halving(index, first, middle, body)
