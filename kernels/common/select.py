"""One of two numbers, without a branch."""

import cutlass
from cutlass import Boolean
from cutlass.cutlass_dsl import Numeric


def select(condition: Boolean, chosen: Numeric, other: Numeric) -> Numeric:
    """``chosen if condition else other``, both of a type, as one operation of the compiler: a conditional expression is two
    regions, which it makes and then merges."""
    return type(other)(cutlass.select_(condition, chosen, other))
