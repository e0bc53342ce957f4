"""What each architecture can build: one module a family, all with the names of ``base.Family``."""

from nvfp4_cute.arch import sm90, sm100, sm120
from nvfp4_cute.arch.base import DualFamily, Family
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.errors import UnsupportedProblem, UnsupportedTarget

FAMILIES: tuple[Family, ...] = (sm90, sm100, sm120)
DUAL_FAMILIES: tuple[DualFamily, ...] = (sm100, sm120)
ARCHS = tuple(arch for family in FAMILIES for arch in family.ARCHS)


def family_of(arch: str) -> Family:
    """The family that builds kernels for ``arch``. Raises UnsupportedTarget where there is none."""
    for family in FAMILIES:
        if arch in family.ARCHS:
            return family
    raise UnsupportedTarget(f"no grouped GEMM kernel for {arch}; there is one for {', '.join(ARCHS)}")


def dual_family_of(arch: str) -> DualFamily:
    """The same for dual GEMMs. Raises UnsupportedProblem for an ``arch`` whose kernel computes none."""
    for family in DUAL_FAMILIES:
        if arch in family.ARCHS:
            return family
    archs = ", ".join(arch for family in DUAL_FAMILIES for arch in family.ARCHS)
    raise UnsupportedProblem(
        f"{arch}: no kernel for dual GEMMs (there is one for {archs}); call grouped_gemm with each b and combine the "
        "results"
    )


def ctas_per_sm(arch: str, config: KernelConfig) -> int:
    """CTAs of a kernel that an SM runs at once."""
    return sm90.ctas_per_sm(config) if arch in sm90.ARCHS else 1
