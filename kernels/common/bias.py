"""Bias: one number per row of weights, added in float32 after all factors, before the activation and before rounding.

Callers add it with ``ptx.add_f32``, which is never contracted with the preceding multiplication.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


def bias_pointer(address: Int64, dtype: type) -> cute.Pointer:
    """Returns the pointer to a bias of a dtype in global memory."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)


def load_bias(bias: cute.Pointer, columns: list, num_columns: Int32) -> list:
    """Issues the loads of the bias of output columns, in the dtype of memory.

    Columns after the last one read the last one's bias; nobody uses their results.
    """
    last = num_columns - 1
    return [cute.make_tensor(bias + cutlass.min(column, last), cute.make_layout(1))[0] for column in columns]
