"""The weight rows of a unit: eight consecutive ones of a scale atom, from r on, and for each those 32, 64 and 96 below.

The scales of r, r + 32, r + 64 and r + 96 for 64 values of K are 16 consecutive bytes; those of a unit are 128.
"""

import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.formats.scale_layout import ATOM_ROWS
from nvfp4_cute.planning.arch.simt import UNIT_ROWS

# Bands of rows of an atom, and rows per band.
BANDS, BAND_ROWS = 4, 32
BAND_GROUP = UNIT_ROWS // BANDS


def num_units(n: Int32) -> Int32:
    """Returns the units of this number of weight rows, in full atoms."""
    return cute.ceil_div(n, ATOM_ROWS) * (ATOM_ROWS // UNIT_ROWS)


def row_of(unit: Int32, place: Int32, band) -> Int32:
    """Returns the weight row ``place`` of the eight in a band of a unit."""
    return unit // BANDS * ATOM_ROWS + unit % BANDS * BAND_GROUP + place + band * BAND_ROWS
