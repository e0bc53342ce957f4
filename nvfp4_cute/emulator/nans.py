"""NaN results of binary64 arithmetic, which keep an operand's bits. NaN results of shorter formats are canonical.

Processors differ in the NaN that an operation makes: x86-64 sets its sign, 64-bit Arm clears it. Results here are those
of the emulated GPU and do not depend on the host.
"""

from collections.abc import Sequence

import numpy as np

F64_QUIET = np.uint64(1 << 51)
F64_MADE = np.uint64(0xFFF8000000000000).view(np.float64)
"""NaN that an operation makes of operands that are numbers (recorded on an H200)."""


def nan_f64(values: np.ndarray, args: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the NaN results of binary64 arithmetic: the last NaN operand, made quiet, or else the default NaN."""
    if values.dtype != np.float64 or not np.count_nonzero(values != values):
        return values
    values = np.where(values != values, F64_MADE, values)
    for x in args:
        quiet = (x.view(np.uint64) | F64_QUIET).view(np.float64)
        values = np.where((values != values) & (x != x), quiet, values)
    return values
