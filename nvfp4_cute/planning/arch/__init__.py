"""Architecture families: what each can build, what it costs, and how it chooses.

One module per family implements ``base.Family``. Other code asks ``family_of(arch, formats)`` and never names a family.
An architecture has one family per kernel.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from nvfp4_cute.errors import UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.formats.block_format import BFLOAT16, NVFP4, NVFP4_PAIR, BlockFormat, Formats
from nvfp4_cute.planning.arch import (
    dequantized,
    sm80,
    sm90,
    sm90_fp8,
    sm90_weight_only,
    sm100,
    sm100_fp8,
    sm100_int8,
    sm103,
    sm120,
    warp_mma,
)
from nvfp4_cute.planning.arch.base import Family, Mma, WeightOnlyFamily, check_pair, in_order
from nvfp4_cute.planning.arch.simt import w4a16_us
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.planning.rows import rounded_rows
from nvfp4_cute.problem import Form, GroupedProblem

FAMILIES: tuple[Family, ...] = (
    sm90, sm90_fp8, sm90_weight_only, sm100, sm103, sm100_fp8, sm100_int8, sm120, warp_mma,
)  # fmt: skip
# Families with a kernel for 16-bit ``a``.
WEIGHT_ONLY_FAMILIES: tuple[WeightOnlyFamily, ...] = (sm90_weight_only, warp_mma)


def _multiplies(family: Family, has_scales: bool) -> bool:
    """Returns whether a family has a kernel for quantized ``a`` (``has_scales``), or for 16-bit ``a``."""
    return any(a.has_scales == has_scales for a, _ in family.MMA)


ARCHS = in_order(arch for family in FAMILIES if _multiplies(family, True) for arch in family.ARCHS)
WEIGHT_ONLY_ARCHS = in_order(arch for family in WEIGHT_ONLY_FAMILIES for arch in family.ARCHS)


@cache
def _families(arch: str, has_scales: bool) -> tuple[Family, ...]:
    """Returns the families of ``arch`` for quantized ``a``, or for 16-bit ``a``. Raises UnsupportedTarget if there is none."""
    if has_scales:
        sm80.check_arch(arch)
    found = tuple(family for family in FAMILIES if arch in family.ARCHS and _multiplies(family, has_scales))
    if found:
        return found
    if has_scales:
        raise UnsupportedTarget(f"no grouped GEMM kernel for {arch}; there is one for {', '.join(ARCHS)}")
    raise UnsupportedTarget(
        f"{arch}: no kernel for grouped products of 16-bit a (there is one for {', '.join(WEIGHT_ONLY_ARCHS)}); quantize a "
        'and pass a_scale, call gemm for each group, or pass backend="reference"'
    )


def family_of(arch: str, formats: Formats = NVFP4_PAIR, config: KernelConfig | None = None) -> Family:
    """Returns the family with a kernel for ``arch`` and a pair of formats, or the architecture's first family if none has one.

    config: chooses among several families with the pair. Configs with ``use_warp_mma`` belong to ``warp_mma``.

    Raises UnsupportedTarget if the architecture has no family for 16-bit ``a``, or for quantized ``a``.
    """
    fitting = families_of(arch, formats) or _families(arch, formats[0].has_scales)
    return fitting[-1 if config is not None and config.use_warp_mma else 0]


def families_of(arch: str, formats: Formats) -> tuple[Family, ...]:
    """Returns all families with a kernel for ``arch`` and a pair of formats. Raises the errors of :func:`family_of`."""
    return tuple(family for family in _families(arch, formats[0].has_scales) if formats in family.MMA)


def check_results(arch: str, formats: Formats, out_format: BlockFormat | None) -> None:
    """Raises UnsupportedProblem if products of these formats cannot write quantized results on ``arch``.

    Args:
        out_format: format of quantized results; None for other results, which every kernel writes.
    """
    if out_format is not None and not formats[0].has_scales:
        raise UnsupportedProblem(
            f"out_dtype={out_format.name!r} with 16-bit a: results have 16 or 32 bits; quantize them"
        )
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


def mmas_of(arch: str, a_format: BlockFormat = NVFP4) -> Mapping[Formats, Mma]:
    """Returns the MMA of ``arch`` for every pair of formats: with 16-bit ``a`` if ``a_format`` has 16 bits, else quantized ``a``.

    Raises the errors of :func:`family_of`.
    """
    has_scales = a_format.has_scales
    pairs = (item for family in _families(arch, has_scales) for item in family.MMA.items())
    return {pair: mma for pair, mma in pairs if pair[0].has_scales == has_scales}


def choose_weight_only(arch: str, problem: GroupedProblem, num_sms: int) -> KernelConfig:
    """Returns the config of the fastest family for a problem with 16-bit ``a``.

    Only ``warp_mma`` computes the form "routed". For batch-invariant problems, the family does not depend on M.

    Raises UnsupportedTarget if there is no family, UnsupportedProblem if K suits none of them.
    """
    sizes = problem.sizes
    if problem.form == "routed":
        return warp_mma.choose(problem, num_sms)
    fitting = _fitting(arch, problem)
    if not fitting:
        check_pair(arch, (problem.a_format, problem.b_format), mmas_of(arch, problem.a_format))
        ks = sorted({k for _, _, k in sizes})
        raise UnsupportedProblem(
            f"{arch}: K is {', '.join(map(str, ks))} with 16-bit a and {problem.b_format.title} weights; kernels there take "
            f"multiples of {warp_mma.K_MULTIPLE}: pad K with zeros"
        )
    chosen = [family.choose(problem, num_sms) for family in fitting]
    if len(chosen) == 1 or problem.batch_invariant or not any(min(size) > 0 for size in sizes):
        return chosen[0]
    return min(
        zip(_times_us(arch, problem, num_sms, fitting, chosen), chosen, strict=True), key=lambda one: one[0]
    )[1]


def _fitting(arch: str, problem: GroupedProblem) -> list[WeightOnlyFamily]:
    """Returns the families that multiply a problem's formats and all of its K."""
    families: Any = families_of(arch, (problem.a_format, problem.b_format))
    return [family for family in families if all(k % family.K_MULTIPLE == 0 for _, _, k in problem.sizes)]


def _times_us(
    arch: str,
    problem: GroupedProblem,
    num_sms: int,
    families: Sequence[WeightOnlyFamily],
    configs: Sequence[KernelConfig],
) -> list[float]:
    """Returns the modelled time of every family's config in us."""
    how = num_sms, problem.num_b, problem.form == "ragged", problem.b_format, arch
    return [
        family.estimate_us(problem.sizes, config, *how)
        for family, config in zip(families, configs, strict=True)
    ]


def grouped_weight_only_us(
    arch: str,
    sizes: tuple[tuple[int, int, int], ...],
    num_sms: int,
    num_b: int = 1,
    is_ragged: bool = False,
    b_format: BlockFormat = NVFP4,
) -> float:
    """Returns the modelled time of the fastest grouped kernel in us; infinity if there is none for K.

    At least one group must have work. See ``WeightOnlyFamily.estimate_us``. Raises UnsupportedTarget if ``arch`` has no family.
    """
    form: Form = "ragged" if is_ragged else "list"
    activation = "silu" if num_b > 1 else None
    problem = GroupedProblem(
        sizes, form, activation=activation, a_format=BFLOAT16, b_format=b_format, batch_invariant=False
    )
    fitting = _fitting(arch, problem)
    chosen = [family.choose(problem, num_sms) for family in fitting]
    return min(_times_us(arch, problem, num_sms, fitting, chosen), default=math.inf)


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
        num_b, is_ragged, b_format: see ``WeightOnlyFamily.estimate_us``.

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
    return dequantized.is_faster(
        dequantized.estimate_us(sizes, arch, num_sms, num_b, is_ragged, b_format), us
    )


def of_groups(rows: int, n: int, k: int, groups: int) -> tuple[tuple[int, int, int], ...]:
    """Returns (m, n, k) of ragged groups that share rows evenly."""
    mean, over = divmod(rows, groups)
    return ((mean + 1, n, k),) * over + ((mean, n, k),) * (groups - over)


def has_counters(formats: Formats) -> bool:
    """Returns whether kernels that multiply these formats have counters in memory (``launch.workspace``)."""
    return formats in sm90_weight_only.MMA or formats in warp_mma.MMA


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
    family = family_of(arch, formats, config)
    return family.resident_clusters(num_sms, config.cluster_size) * family.ctas_per_sm(config)


def chain_archs() -> tuple[str, ...]:
    """Returns the architectures with a kernel for chains of layers."""
    return in_order(arch for family in FAMILIES if family.HAS_CHAINS for arch in family.ARCHS)


def num_clusters(config: KernelConfig, at_once: int) -> int:
    """Returns the number of clusters to launch: as ``config`` says, but at most those resident at once."""
    return at_once if config.num_cta is None else min(config.num_cta // config.cluster_size, at_once)
