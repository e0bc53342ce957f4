"""Architecture families: what each can build, what it costs, and how it chooses.

One module per family implements ``base.Family``. Other code asks ``family_of(arch, formats)`` and never names a family.
An architecture has one family per kernel.
"""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

from nvfp4_cute.errors import UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.formats.block_format import NVFP4, NVFP4_PAIR, BlockFormat, Formats
from nvfp4_cute.planning.arch import (
    dequantized,
    sm80,
    sm90,
    sm90_fp8,
    sm90_fp8_tokens,
    sm90_weight_only,
    sm100,
    sm100_fp8,
    sm100_int8,
    sm103,
    sm120,
    warp_mma,
)
from nvfp4_cute.planning.arch.base import Family, Mma, WeightOnlyFamily, in_order
from nvfp4_cute.planning.arch.simt import w4a16_us
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.planning.rows import rounded_rows
from nvfp4_cute.problem import GroupedProblem

FAMILIES: tuple[Family, ...] = (sm90, sm90_fp8, sm90_fp8_tokens, sm100, sm103, sm100_fp8, sm100_int8, sm120)
WEIGHT_ONLY_FAMILIES: tuple[WeightOnlyFamily, ...] = (sm90_weight_only, warp_mma)
ARCHS = in_order(arch for family in FAMILIES for arch in family.ARCHS)
WEIGHT_ONLY_ARCHS = in_order(arch for family in WEIGHT_ONLY_FAMILIES for arch in family.ARCHS)


def family_of(arch: str, formats: Formats = NVFP4_PAIR) -> Family:
    """Returns the family with a kernel for ``arch`` and a pair of formats, or the architecture's first family if none has one.

    Raises UnsupportedTarget if the architecture has no family.
    """
    sm80.check_arch(arch)
    found = [family for family in FAMILIES if arch in family.ARCHS]
    if not found:
        raise UnsupportedTarget(f"no grouped GEMM kernel for {arch}; there is one for {', '.join(ARCHS)}")
    return next((family for family in found if formats in family.MMA), found[0])


def check_results(arch: str, formats: Formats, out_format: BlockFormat | None) -> None:
    """Raises UnsupportedProblem if products of these formats cannot write results with scales in rows on ``arch``.

    Args:
        out_format: format of quantized results; None for other results, which every kernel writes.
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
    """Returns the MMA of ``arch`` for every pair of formats of ``a`` and ``b``. Raises the errors of :func:`family_of`."""
    family_of(arch)
    families = (family for family in FAMILIES if arch in family.ARCHS)
    return {pair: mma for family in families for pair, mma in family.MMA.items()}


def weight_only_families(arch: str) -> tuple[WeightOnlyFamily, ...]:
    """Returns the families whose kernels multiply 16-bit ``a`` of groups on ``arch``.

    Raises UnsupportedTarget if there is none.
    """
    found = tuple(family for family in WEIGHT_ONLY_FAMILIES if arch in family.ARCHS)
    if not found:
        raise UnsupportedTarget(
            f"{arch}: no kernel for grouped products of 16-bit a (there is one for {', '.join(WEIGHT_ONLY_ARCHS)}); quantize a "
            'and pass a_scale, call gemm for each group, or pass backend="reference"'
        )
    return found


def weight_only_family_of(arch: str, config: KernelConfig) -> WeightOnlyFamily:
    """Returns the family of ``arch`` for ``config``: ``warp_mma``, or the other one if there is one. Raises UnsupportedTarget."""
    families = weight_only_families(arch)
    return families[-1] if config.use_warp_mma else families[0]


def parts_of_k(problem: GroupedProblem, arch: str, num_sms: int) -> int:
    """Returns the parts of K that sums of a batch-invariant weight-only problem are made of; 0 for other problems."""
    return sm90.parts_of_k(problem, num_sms) if arch in sm90.ARCHS else int(problem.batch_invariant)


@lru_cache(maxsize=4096)
def choose_weight_only(
    arch: str,
    sizes: tuple[tuple[int, int, int], ...],
    num_sms: int,
    num_b: int = 1,
    is_ragged: bool = False,
    b_format: BlockFormat = NVFP4,
    parts: int = 0,
) -> KernelConfig:
    """Returns the config of the fastest family of ``arch``, cached. Takes the arguments of ``WeightOnlyFamily.choose``.

    parts: parts that K must have, and then the family is the same for all sizes; 0 leaves both open.

    Raises UnsupportedTarget if there is no family, UnsupportedProblem if K suits none of them.
    """
    fitting = [
        family
        for family in weight_only_families(arch)
        if (None, b_format) in family.PAIRS and all(k % family.K_MULTIPLE == 0 for _, _, k in sizes)
    ]
    if not fitting:
        ks = sorted({k for _, _, k in sizes})
        raise UnsupportedProblem(
            f"{arch}: K is {', '.join(map(str, ks))} with 16-bit a and {b_format.title} weights; kernels there take "
            f"multiples of {warp_mma.K_MULTIPLE}: pad K with zeros"
        )

    if parts:
        return fitting[0].choose(sizes, num_sms, num_b, is_ragged, b_format, parts)
    how = num_b, is_ragged, b_format
    chosen = [family.choose(sizes, num_sms, *how) for family in fitting]
    if len(chosen) == 1 or not any(min(size) > 0 for size in sizes):
        return chosen[0]
    return min(
        chosen,
        key=lambda config: weight_only_family_of(arch, config).estimate_us(
            sizes, config, num_sms, *how, arch
        ),
    )


def grouped_weight_only_us(
    arch: str,
    sizes: tuple[tuple[int, int, int], ...],
    num_sms: int,
    num_b: int = 1,
    is_ragged: bool = False,
    b_format: BlockFormat = NVFP4,
) -> float:
    """Returns the modelled time of the fastest grouped kernel in us; infinity if there is none for K.

    At least one group must have work. See ``WeightOnlyFamily.choose``. Raises UnsupportedTarget if ``arch`` has no family.
    """
    how = num_b, is_ragged, b_format
    try:
        config = choose_weight_only(arch, sizes, num_sms, *how)
    except UnsupportedProblem:
        return math.inf
    return weight_only_family_of(arch, config).estimate_us(sizes, config, num_sms, *how, arch)


def is_faster_than_few_rows(
    arch: str, num_sms: int, m: int, n: int, k: int, batches: int, b_format: BlockFormat = NVFP4
) -> bool:
    """Returns whether a grouped kernel multiplies [m, k] x [n, k] per batch faster than ``kernels/simt/w4a16.py``.

    It does not where there is none for K. Raises UnsupportedTarget if ``arch`` has none at all.
    """
    us = grouped_weight_only_us(arch, ((m, n, k),) * batches, num_sms, b_format=b_format)
    return us < w4a16_us(arch, num_sms, m, n, k, batches, b_format)


def weight_only_us(
    arch: str, num_sms: int, m: int, n: int, k: int, batches: int = 1, b_format: BlockFormat = NVFP4
) -> float:
    """Returns the modelled time in us of [m, k] x [n, k] per batch with 16-bit rows, in the fastest way there is.

    Raises UnsupportedTarget if ``arch`` has no kernel.
    """
    sizes = ((m, n, k),) * batches
    kernels = grouped_weight_only_us(arch, sizes, num_sms, b_format=b_format)
    kernels = min(kernels, w4a16_us(arch, num_sms, m, n, k, batches, b_format))
    if not dequantized.suits(sizes):
        return kernels
    return min(kernels, dequantized.estimate_us(sizes, arch, num_sms, b_format=b_format))


def dequantizes_first(
    arch: str,
    num_sms: int,
    m: int,
    n: int,
    k: int,
    groups: int = 1,
    num_b: int = 1,
    is_ragged: bool = False,
    b_format: BlockFormat = NVFP4,
) -> bool:
    """Returns whether dequantizing the weights, then torch's product, is faster than every weight-only kernel.

    Args:
        arch, num_sms: the GPU.
        m: rows of each group; of all groups together if they are ragged.
        n, k: extents of the weights.
        groups: number of groups or batches.
        num_b, is_ragged, b_format: see ``WeightOnlyFamily.choose``.

    Raises UnsupportedTarget if ``arch`` has no kernel.
    """
    # Sizes are rounded before the cache, because a server calls with any number of rows.
    return _dequantizes_first(arch, num_sms, rounded_rows(m), n, k, groups, num_b, is_ragged, b_format)


@lru_cache(maxsize=4096)
def _dequantizes_first(
    arch: str, num_sms: int, m: int, n: int, k: int, groups: int, num_b: int, is_ragged: bool, b_format: BlockFormat
) -> bool:  # fmt: skip
    sizes = of_groups(m, n, k, groups) if is_ragged else ((m, n, k),) * groups
    if not dequantized.suits(sizes, num_b):
        return False
    us = grouped_weight_only_us(arch, sizes, num_sms, num_b, is_ragged, b_format)
    return dequantized.estimate_us(sizes, arch, num_sms, num_b, is_ragged, b_format) < us


def of_groups(rows: int, n: int, k: int, groups: int) -> tuple[tuple[int, int, int], ...]:
    """Returns (m, n, k) of ragged groups that share rows evenly."""
    mean, over = divmod(rows, groups)
    return ((mean + 1, n, k),) * over + ((mean, n, k),) * (groups - over)


def has_counters(formats: Formats) -> bool:
    """Returns whether kernels that multiply these formats have counters in memory (``launch.workspace``)."""
    return formats == sm90_fp8_tokens.PAIR


def oldest_dsl(arch: str) -> tuple[int, int]:
    """Returns the oldest minor version of CuTe DSL that compiles the GEMMs of ``arch``.

    Hopper's kernels pass pointers to inline PTX, which needs 4.8. pyproject.toml has the oldest version for other architectures.
    """
    return (4, 8) if arch in sm90.ARCHS else (0, 0)


def is_weight_only(arch: str) -> bool:
    """Returns whether all GEMMs of ``arch`` are weight-only; ``family_of`` then raises and says so."""
    return arch in sm80.ARCHS


def has_fp4_mma(arch: str) -> bool:
    """Returns whether tensor cores of ``arch`` multiply FP4. Elsewhere kernels dequantize FP4, or there is no kernel."""
    families = (family for family in FAMILIES if arch in family.ARCHS)
    return any(
        NVFP4_PAIR in family.MMA and family.MMA[NVFP4_PAIR].kind.startswith("mxf4") for family in families
    )


def clusters_at_once(arch: str, config: KernelConfig, num_sms: int, formats: Formats = NVFP4_PAIR) -> int:
    """Returns the number of clusters of a kernel that are resident at once, which bounds its persistent CTAs."""
    family = family_of(arch, formats)
    return family.resident_clusters(num_sms, config.cluster_size) * family.ctas_per_sm(config)


def chain_archs() -> tuple[str, ...]:
    """Returns the architectures with a kernel for chains of layers."""
    return in_order(arch for family in FAMILIES if family.HAS_CHAINS for arch in family.ARCHS)


def num_clusters(config: KernelConfig, at_once: int) -> int:
    """Returns the number of clusters to launch: as ``config`` says, but at most those resident at once."""
    return at_once if config.num_cta is None else min(config.num_cta // config.cluster_size, at_once)
