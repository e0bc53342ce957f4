"""Run-time choice among copies of code that differ by a compile-time number, such as a register index."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

MOST_IN_TURN = 5


@cute.jit
def one_of(index: Int32, count: cutlass.Constexpr, body: cutlass.Constexpr):
    """Executes ``body(min(index, count - 1))`` with a compile-time argument.

    Tries the last number first. Above ``MOST_IN_TURN`` numbers it bisects, which costs registers. Compares by inequality,
    because the compiler turns a chain of equalities into an indirect branch.
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
    """Executes ``body(index)`` for first <= index < end by bisection."""
    if cutlass.const_expr(end - first == 1):
        body(first)
    else:
        middle = (first + end) // 2
        if index >= middle:
            _by_halving(index, middle, end, body)
        else:
            _by_halving(index, first, middle, body)
