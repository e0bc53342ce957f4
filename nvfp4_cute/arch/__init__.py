"""What each architecture can build: one module a family, all with the names of ``base.Family``."""

from nvfp4_cute.arch import sm90, sm100, sm120
from nvfp4_cute.arch.base import Family
from nvfp4_cute.errors import UnsupportedTarget

FAMILIES: tuple[Family, ...] = (sm90, sm100, sm120)
ARCHS = tuple(arch for family in FAMILIES for arch in family.ARCHS)


def family_of(arch: str) -> Family:
    """The family that builds kernels for ``arch``. Raises UnsupportedTarget where there is none."""
    for family in FAMILIES:
        if arch in family.ARCHS:
            return family
    raise UnsupportedTarget(f"no grouped GEMM kernel for {arch}; there is one for {', '.join(ARCHS)}")
