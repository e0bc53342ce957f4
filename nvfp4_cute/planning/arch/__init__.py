"""What architectures build, what it costs, how they choose: a module per family, each with all members of ``base.Family``.

Others ask a family, ``family_of(arch, formats)``, and never say which one it is. An architecture has another family for each
kernel that multiplies other formats in its own way.
"""

from collections.abc import Iterator, Mapping

from nvfp4_cute.errors import UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.formats.block_format import NVFP4_PAIR, BlockFormat, Formats
from nvfp4_cute.planning.arch import (
    sm80,
    sm90,
    sm90_fp8,
    sm90_weight_only,
    sm100,
    sm100_fp8,
    sm100_int8,
    sm103,
    sm120,
)
from nvfp4_cute.planning.arch.base import Family, Mma, WeightOnlyFamily, in_order
from nvfp4_cute.planning.config import KernelConfig

FAMILIES: tuple[Family, ...] = (sm90, sm90_fp8, sm100, sm103, sm100_fp8, sm100_int8, sm120)
WEIGHT_ONLY_FAMILIES: tuple[WeightOnlyFamily, ...] = (sm90_weight_only,)
ARCHS = in_order(arch for family in FAMILIES for arch in family.ARCHS)
WEIGHT_ONLY_ARCHS = tuple(arch for family in WEIGHT_ONLY_FAMILIES for arch in family.ARCHS)


def family_of(arch: str, formats: Formats = NVFP4_PAIR) -> Family:
    """The family that builds kernels for ``arch`` and a pair of formats, or for a pair that has none the architecture's first.

    Raises UnsupportedTarget where the architecture has none.
    """
    sm80.check_arch(arch)
    found = [family for family in FAMILIES if arch in family.ARCHS]
    if not found:
        raise UnsupportedTarget(f"no grouped GEMM kernel for {arch}; there is one for {', '.join(ARCHS)}")
    return next((family for family in found if formats in family.MMA), found[0])


def check_results(arch: str, formats: Formats, out_format: BlockFormat | None) -> None:
    """Raises UnsupportedProblem where products of such operands have no results of a format whose scales have rows on ``arch``.

    Args:
        out_format: of quantized results; None of others, which every kernel has.
    """
    if out_format is None or out_format.scale_layout == "blocked":
        return

    def archs() -> Iterator[str]:
        for family in FAMILIES:
            if formats in family.MMA and family.candidates(out_format=out_format, formats=formats):
                yield from family.ARCHS

    served = in_order(archs())
    if arch not in served:
        raise UnsupportedProblem(
            f"{arch}: no kernel writes {out_format.title} results (there is one for {', '.join(served)}); take "
            "out_dtype=torch.bfloat16, and call quantize on the result"
        )


def mmas_of(arch: str) -> Mapping[Formats, Mma]:
    """How kernels of ``arch`` multiply, by formats of ``a`` and ``b``. Raises as :func:`family_of`."""
    family_of(arch)
    families = (family for family in FAMILIES if arch in family.ARCHS)
    return {pair: mma for family in families for pair, mma in family.MMA.items()}


def weight_only_family_of(arch: str) -> WeightOnlyFamily:
    """The family whose kernel multiplies 16-bit ``a`` of groups on ``arch``. Raises UnsupportedTarget where there is none."""
    for family in WEIGHT_ONLY_FAMILIES:
        if arch in family.ARCHS:
            return family
    raise UnsupportedTarget(
        f"{arch}: no kernel for grouped products of 16-bit a (there is one for {', '.join(WEIGHT_ONLY_ARCHS)}); quantize a "
        'and pass a_scale, call gemm for each group, or pass backend="reference"'
    )


def oldest_dsl(arch: str) -> tuple[int, int]:
    """The oldest minor version of CuTe DSL that compiles the products of ``arch``; of others pyproject.toml tells it.

    Before 4.8 inline PTX takes no pointers, as the kernels of Hopper pass them.
    """
    return (4, 8) if arch in sm90.ARCHS else (0, 0)


def is_weight_only(arch: str) -> bool:
    """Whether all products of ``arch`` take 16-bit ``a``: there ``family_of`` raises, and says so."""
    return arch in sm80.ARCHS


def has_fp4_mma(arch: str) -> bool:
    """Whether tensor cores of ``arch`` multiply FP4 operands; elsewhere kernels decode them, or there are none."""
    families = (family for family in FAMILIES if arch in family.ARCHS)
    return any(
        NVFP4_PAIR in family.MMA and family.MMA[NVFP4_PAIR].kind.startswith("mxf4") for family in families
    )


def clusters_at_once(arch: str, config: KernelConfig, num_sms: int, formats: Formats = NVFP4_PAIR) -> int:
    """Clusters of a kernel that a GPU runs at once: all that its persistent CTAs may be."""
    family = family_of(arch, formats)
    return family.resident_clusters(num_sms, config.cluster_size) * family.ctas_per_sm(config)


def chain_archs() -> tuple[str, ...]:
    """Architectures with a kernel for chains of layers."""
    return in_order(arch for family in FAMILIES if family.HAS_CHAINS for arch in family.ARCHS)


def num_clusters(config: KernelConfig, at_once: int) -> int:
    """Clusters to launch at most: as ``config`` says, and no more than run at once."""
    return at_once if config.num_cta is None else min(config.num_cta // config.cluster_size, at_once)
