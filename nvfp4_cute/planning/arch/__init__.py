"""What each architecture can build: one module a family, all with the names of ``base.Family``."""

from nvfp4_cute.errors import UnsupportedTarget
from nvfp4_cute.planning.arch import sm90, sm100, sm120
from nvfp4_cute.planning.arch.base import ChoosingFamily, Family
from nvfp4_cute.planning.config import KernelConfig

FAMILIES: tuple[Family, ...] = (sm90, sm100, sm120)
ARCHS = tuple(arch for family in FAMILIES for arch in family.ARCHS)


def family_of(arch: str) -> Family:
    """The family that builds kernels for ``arch``. Raises UnsupportedTarget where there is none."""
    for family in FAMILIES:
        if arch in family.ARCHS:
            return family
    raise UnsupportedTarget(f"no grouped GEMM kernel for {arch}; there is one for {', '.join(ARCHS)}")


def choosing_family_of(arch: str) -> ChoosingFamily | None:
    """The same where the family chooses configs by itself; None on sm_100, where ``select`` does."""
    found = family_of(arch)
    return next((family for family in (sm90, sm120) if family is found), None)


def ctas_per_sm(arch: str, config: KernelConfig) -> int:
    """CTAs of a kernel that an SM runs at once."""
    return sm90.ctas_per_sm(config) if arch in sm90.ARCHS else 1


def clusters_at_once(arch: str, config: KernelConfig, num_sms: int) -> int:
    """Clusters of a kernel that a GPU runs at once: all that its persistent CTAs may be."""
    return family_of(arch).resident_clusters(num_sms, config.cluster_size) * ctas_per_sm(arch, config)


def num_clusters(config: KernelConfig, at_once: int) -> int:
    """Clusters to launch at most: as ``config`` says, and no more than run at once."""
    return at_once if config.num_cta is None else min(config.num_cta // config.cluster_size, at_once)
