"""Public name of ``models.torch_api``: torch's scaled products, computed by this library.

Call :func:`scaled_mm` and :func:`scaled_grouped_mm` directly, or let :func:`enable` replace torch's own functions.
"""

from nvfp4_cute.models.torch_api import (
    _scaled_grouped_mm,
    _scaled_grouped_mm_v2,
    _scaled_mm,
    _scaled_mm_v2,
    enable,
    scaled_grouped_mm,
    scaled_mm,
)

__all__ = [
    "_scaled_grouped_mm",
    "_scaled_grouped_mm_v2",
    "_scaled_mm",
    "_scaled_mm_v2",
    "enable",
    "scaled_grouped_mm",
    "scaled_mm",
]
