"""Where the groups' results go, as kernel parameters."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .group_table import select_slot


@dataclass(frozen=True)
class OutputTable:
    """Where each group's result goes.

    Attributes:
        addresses: global address of element (0, 0), one Int64 a slot.
        pitches: elements between rows, one Int64 a slot.
        group_indices: the caller's index of the group, one Int32 a slot: where its alpha lies.
        alpha: fp32 factors [G] in global memory, or None.
    """

    addresses: list
    pitches: list
    group_indices: list
    alpha: object


@cute.jit
def load_alpha(outputs: OutputTable, slot: Int32) -> Float32:
    """The factor of the group at ``slot``, 1 where there are none."""
    alpha = Float32(1.0)
    if cutlass.const_expr(outputs.alpha is not None):
        factors = cute.make_tensor(outputs.alpha, cute.make_layout(len(outputs.addresses)))
        alpha = factors[select_slot(outputs.group_indices, slot)]
    return alpha
