"""Scales of ue8m0 as bf16, and e2m1 values times them, without rounding.

The bits of an e2m1 value, put into a bf16 as sign, two low exponent bits and top mantissa bit, read as the value times 2^-126.
Times ``LIFT`` that is the value times 2^-2. A scale is 2^-127 to 2^127: both products are exact, for the second one lies
between 2^-130 and 1.5 * 2^127, is a multiple of 2^-130, and has two significant bits.
"""

from cutlass import Uint32

from . import ptx
from .versions import inline_ptx

# log2 of what products carry, which the epilogue takes out again.
OPERAND_EXPONENT = 2
# Pairs of bf16: 2^124, 2^-127.
LIFT = 0x7D807D80
LEAST_POWERS = 0x00400040


def powers(codes: Uint32) -> Uint32:
    """Two ue8m0 codes as two bf16. codes: each in the upper byte of a half, the lower byte 0."""
    # Infinity, which code 255 reads as, times 0 is NaN. (PTX takes no literals here.)
    return inline_ptx(
        f"{{\n.reg .b32 zero, least;\nmov.b32 zero, 0;\nmov.b32 least, {LEAST_POWERS:#010x};\n"
        "max.bf16x2 least, {$r0}, least;\nfma.rn.bf16x2 {$w0}, {$r0}, zero, least;\n}",
        write_only_types=[Uint32],
        read_only_args=[codes >> 1],
    )


def lifted(pair: Uint32) -> Uint32:
    """Two e2m1 values times 2^-126 as two of them times 2^-2."""
    return ptx.scale_x2(pair, LIFT, "bf16")
