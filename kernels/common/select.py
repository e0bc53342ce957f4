"""Select without a branch."""

import cutlass
from cutlass import Boolean
from cutlass.cutlass_dsl import Numeric


def select(condition: Boolean, chosen: Numeric, other: Numeric) -> Numeric:
    """Returns ``chosen if condition else other`` for two numbers of one type, as a single select.

    A conditional expression would make the compiler build and merge two regions.
    """
    return type(other)(cutlass.select_(condition, chosen, other))
