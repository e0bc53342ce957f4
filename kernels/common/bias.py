"""A bias: a number a column of the output, which callers add in fp32 behind all factors, before results are rounded.

They add it by ``ptx.add_f32``, which is never contracted with the multiplication before.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


def bias_pointer(address: Int64, dtype: type) -> cute.Pointer:
    """Where a bias of a type lies in global memory."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)


def load_bias(bias: cute.Pointer, columns: list, num_columns: Int32) -> list:
    """The bias of columns of the output, of the type that it has in memory. It is asked for here.

    Columns behind the last one have the bias of that: nobody uses their results.
    """
    last = num_columns - 1
    return [cute.make_tensor(bias + cutlass.min(column, last), cute.make_layout(1))[0] for column in columns]
