"""One of two numbers, without a branch."""

import cutlass
from cutlass import Boolean
from cutlass.cutlass_dsl import Numeric


def select(condition: Boolean, chosen: Numeric, other: Numeric) -> Numeric:
    """``chosen if condition else other``, both of a type, as one operation: a conditional expression is two regions, which
    take the compiler twenty times as long to make and to merge."""
    return type(other)(cutlass.select_(condition, chosen, other))
