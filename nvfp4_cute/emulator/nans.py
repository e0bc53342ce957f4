"""NaN results of binary64 arithmetic, which keep an operand's bits; those of shorter formats are canonical.

What a processor makes of NaN differs: x86-64 sets the sign of a NaN that an operation makes, 64-bit Arm clears it. Results
here are the emulated GPU's, and depend on no host.
"""

from collections.abc import Sequence

import numpy as np

F64_QUIET = np.uint64(1 << 51)
F64_MADE = np.uint64(0xFFF8000000000000).view(np.float64)
"""What an operation makes of operands that are numbers (recorded on an H200)."""


def nan_f64(values: np.ndarray, args: Sequence[np.ndarray]) -> np.ndarray:
    """NaN results of binary64 arithmetic: the last NaN operand, made quiet; without one the NaN that operations make."""
    if values.dtype != np.float64 or not np.count_nonzero(values != values):
        return values
    values = np.where(values != values, F64_MADE, values)
    for x in args:
        quiet = (x.view(np.uint64) | F64_QUIET).view(np.float64)
        values = np.where((values != values) & (x != x), quiet, values)
    return values
