"""Benchmark cases: competition problems, square GEMMs, linear layers, and experts of mixture-of-experts models."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch

from nvfp4_cute.formats.block_format import NVFP4_PAIR, BlockFormat, Formats
from nvfp4_cute.operands.rules import check_quantized_columns
from nvfp4_cute.problem import RESULT_FORMATS, OutDtype, result_format
from nvfp4_cute.problems.nvfp4_dual_gemm import spec as dual_gemm_spec
from nvfp4_cute.problems.nvfp4_gemm import spec as gemm_spec
from nvfp4_cute.problems.nvfp4_gemv import spec as gemv_spec
from nvfp4_cute.problems.nvfp4_group_gemm import spec as group_gemm_spec
from nvfp4_cute.roofline import footprint
from nvfp4_cute.roofline import speed_of_light as light

ROWS = (1, 8, 32, 128)
"""Rows of the activations of a linear layer: decode of 1 to 128 sequences."""
DENSE_EXTENTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DECODE_TOKENS, PREFILL_TOKENS = 64, 4096
TOP_K = {"DeepSeek-V3": 8, "Qwen3-30B-A3B": 8, "Mixtral-8x7B": 2}
"""Experts a token, as the models' published configurations state them."""
EXPERT_PARALLEL = {"DeepSeek-V3": 8}
"""GPUs that share a layer's experts, each with its own tokens; 1 where a layer fits one GPU."""
ROUTING_SEED = 1


@dataclass(frozen=True)
class Published:
    """A time that others published for a case.

    Attributes:
        target: name of the GPU in ``targets``.
        us: microseconds, or the case's operations over the published TFLOP/s.
        who: the implementation, and the source of the figure.
    """

    target: str
    us: float
    who: str


@dataclass(frozen=True)
class Case:
    """One case to time.

    Attributes:
        suite: a key of ``SUITES``.
        problem: a competition problem, a kind of shape, or a model's layer.
        name: unique within the problem.
        operation: public function that computes it; "w4a16": a weight-only product.
        sizes: (m, n, k) of every group, or of every batch entry.
        published: times of others on GPUs other than a B200.
        form: form of the groups of a grouped GEMM: lists, or one ragged tensor and stacked weights.
        sol_us: the competition's published speed of light in us, or None.
        best_us: best published time of anyone on a B200 in us, under the competition's harness, or None.
        formats: formats of ``a`` and ``b``.
        out: type of the results, a key of ``RESULT_DTYPES``.
    """

    suite: str
    problem: str
    name: str
    operation: str
    sizes: tuple[tuple[int, int, int], ...]
    sol_us: float | None = None
    best_us: float | None = None
    published: tuple[Published, ...] = ()
    form: Literal["list", "ragged"] = "list"
    formats: Formats = NVFP4_PAIR
    out: str = "fp16"

    @property
    def out_format(self) -> BlockFormat | None:
        """Format of quantized results; None for other results."""
        return result_format(self.out)

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of results that are not quantized."""
        dtype = RESULT_DTYPES[self.out]
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def work(self) -> light.Work:
        """Bytes and operations."""
        a, b = (format.name for format in self.formats)
        a = "bf16" if self.operation == "w4a16" else a
        num_b = 2 if self.operation == "dual_gemm" else 1
        return light.grouped_gemm(self.sizes, a=a, b=b, out=self.out, num_b=num_b)

    @property
    def is_uniform(self) -> bool:
        """Whether all groups have one N and one K, as one stacked weight tensor has."""
        return len({(n, k) for _, n, k in self.sizes}) == 1

    def __str__(self) -> str:
        formats = "" if self.formats == NVFP4_PAIR else " {} x {}".format(*self.formats)
        out = "" if self.out == "fp16" else f" to {self.out}"
        return f"{self.problem} {self.name}{formats}{out}"

    def of_formats(self, formats: Formats) -> "Case":
        """Returns a case with these sizes in other formats, for which there are no published times.

        Raises:
            ValueError: blocks of a format do not divide K.
        """
        if formats == self.formats:
            return self
        for (_, _, k), format in product(self.sizes, formats):
            format.num_k_blocks(k)
        return replace(self, formats=formats, sol_us=None, best_us=None, published=())


# ---- competition -----------------------------------------------------------------------------------------------
# Best published times by benchmark case, in us: hand-written PTX (gemm and three cases of the group problem: gau-nernst,
# worklogs in gpu-mode-kernels; group case 1: variant v6c of the same), CuTe DSL (dual: guaguabear, kernelbot data of
# 2026-02-28), CUDA (gemv: gau-nernst v2h). All on B200, measured by the competition's harness.
BEST_GEMV = (18.4, 28.0, 12.6)
BEST_GEMM = (18.3, 8.29, 6.54)
BEST_DUAL_GEMM = (12.4, 15.3, 10.0, 14.4)
BEST_GROUP_GEMM = (27.9, 18.8, 8.48, 6.43)


def competition() -> list[Case]:
    """The benchmark cases of GPU MODE's four NVFP4 problems."""
    gemv = [
        Case("competition", "nvfp4_gemv", c.name, "gemv", ((c.m, 1, c.k),) * c.l, c.sol_us, best)
        for c, best in zip(gemv_spec.BENCHMARKS, BEST_GEMV, strict=True)
    ]
    gemm = [
        Case("competition", "nvfp4_gemm", c.name, "gemm", ((c.m, c.n, c.k),), c.sol_us, best)
        for c, best in zip(gemm_spec.BENCHMARKS, BEST_GEMM, strict=True)
    ]
    dual = [
        Case("competition", "nvfp4_dual_gemm", c.name, "dual_gemm", ((c.m, c.n, c.k),), c.sol_us, best)
        for c, best in zip(dual_gemm_spec.BENCHMARKS, BEST_DUAL_GEMM, strict=True)
    ]
    group = [
        Case("competition", "nvfp4_group_gemm", f"case {i}", "grouped_gemm", c.sizes, c.sol_us, best)
        for i, (c, best) in enumerate(zip(group_gemm_spec.BENCHMARKS, BEST_GROUP_GEMM, strict=True))
    ]
    return [*gemv, *gemm, *dual, *group]


# ---- figures that others published for RTX GPUs ---------------------------------------------------------------------
# NVFP4 results for "nvfp4-out", else 16 bits. Their clocks and operands differ from ours and from each other's.
DENSE_TFLOPS = {
    2048: (("RTX 5090", 956, "cuBLAS (quack#153)"),),
    4096: (("RTX 5090", 1310, "cuBLAS (quack#153)"),),
    8192: (
        ("RTX 5090", 1343, "cuBLAS (quack#153)"),
        ("RTX 5090", 1495, "QuACK nvfp4-out (its blockscaled_api.md)"),
        ("RTX PRO 6000", 1629, "CUTLASS CuTe DSL (cutlass#3272)"),
    ),
}
PUBLISHED_LINEAR = (
    (
        (1, 1024, 7168),
        (
            Published("RTX 5090", 24.1, "FlashInfer (flashinfer#3026)"),
            Published("GB10", 56.5, "FlashInfer (flashinfer#3026)"),
        ),
    ),
    ((32, 5120, 25600), (Published("RTX PRO 6000", 69, "FlashInfer stream-K (flashinfer#2460)"),)),
)
PUBLISHED_EXPERTS = Published("RTX 5090", 120.8, "CUTLASS (imp#1842)")


# ---- shapes ----------------------------------------------------------------------------------------------------
def dense() -> list[Case]:
    """Square GEMMs from 128 to 16384."""
    return [
        Case(
            "dense",
            "gemm",
            f"{x}^3",
            "gemm",
            ((x, x, x),),
            published=tuple(
                Published(target, 2 * x**3 / tflops / 1e6, who)
                for target, tflops, who in DENSE_TFLOPS.get(x, ())
            ),
        )
        for x in DENSE_EXTENTS
    ]


def linear() -> list[Case]:
    """Returns linear layers of dense models and their transposes, at decode row counts, and shapes that others published."""
    shapes = dict.fromkeys(pair for n, k in footprint.LINEAR_SHAPES for pair in ((n, k), (k, n)))
    return (
        [
            Case("linear", f"linear {n} x {k}", f"{m} rows", "gemm", ((m, n, k),))
            for n, k in shapes
            for m in ROWS
        ]
        + [Case("linear", f"linear {n} x {k}", "1 row, gemv", "gemv", ((n, 1, k),)) for n, k in shapes]
        + [
            Case("linear", f"linear {n} x {k}", f"{m} rows", "gemm", ((m, n, k),), published=published)
            for (m, n, k), published in PUBLISHED_LINEAR
        ]
    )


def experts() -> list[Case]:
    """Expert layers of mixture-of-experts models: gate and up, and down; decode and prefill.

    Every token goes to its top-k experts, drawn uniformly without repetition from a fixed seed. With expert parallelism
    the groups are the experts of one GPU and the tokens come from all GPUs. The first case is one that others published.
    """
    even = ((16, 512, 2048),) * 256
    cases = [
        Case(
            "experts",
            "256 experts",
            "16 rows each",
            "grouped_gemm",
            even,
            published=(PUBLISHED_EXPERTS,),
            form="ragged",
        )
    ]
    for model in footprint.MOE_MODELS:
        name = model.name.removesuffix(" experts")
        gpus, top_k = EXPERT_PARALLEL.get(name, 1), TOP_K[name]
        routed = model.num_experts - model.num_experts % gpus  # a shared expert takes no routed tokens
        for phase, tokens in (("decode", DECODE_TOKENS), ("prefill", PREFILL_TOKENS)):
            rows = routed_rows(tokens * gpus, routed, top_k)[: routed // gpus]
            for layer, n, k in (
                ("gate_up", 2 * model.intermediate, model.hidden),
                ("down", model.hidden, model.intermediate),
            ):
                sizes = tuple((m, n, k) for m in rows)
                cases.append(Case("experts", name, f"{layer} {phase}", "grouped_gemm", sizes, form="ragged"))
    return cases


def routed_rows(tokens: int, num_experts: int, top_k: int) -> tuple[int, ...]:
    """Rows that each expert receives."""
    chosen = Counter(expert for ids in routed_ids(tokens, num_experts, top_k) for expert in ids)
    return tuple(chosen[expert] for expert in range(num_experts))


def routed_ids(tokens: int, num_experts: int, top_k: int) -> list[list[int]]:
    """Experts of every token, drawn without repetition."""
    draw = random.Random(ROUTING_SEED)
    return [draw.sample(range(num_experts), top_k) for _ in range(tokens)]


OTHER_SUITES = ("layers", "ep")
"""Further names that `bench` accepts: complete layers, and layers over several GPUs."""

SUITES: dict[str, Callable[[], list[Case]]] = {
    "competition": competition,
    "dense": dense,
    "linear": linear,
    "experts": experts,
}


RESULT_DTYPES: dict[str, OutDtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    **{name: name for name in RESULT_FORMATS},
}
"""Types of results, by the names that commands accept."""

OPERATIONS = {"gemm": "grouped_gemm", "dual": "dual_gemm", "w4a16": "w4a16"}
"""Operation that is computed from a shape."""


def shape_case(
    m: tuple[int, ...],
    n: int,
    k: int,
    groups: int | None = None,
    operation: str = "gemm",
    formats: Formats = NVFP4_PAIR,
    out: str = "fp16",
) -> Case:
    """Returns a case of user-defined sizes.

    Args:
        m: rows of all groups, or of each group.
        n, k: sizes of every group.
        groups: number of groups: equal to the entries of ``m``, or any number of equal groups.
        operation: a key of ``OPERATIONS``.
        formats: formats of ``a`` and ``b``.
        out: see ``Case``.

    Raises:
        ValueError: sizes contradict each other, or blocks of a format do not divide K, or N of quantized results.
    """
    groups = groups or len(m)
    if len(m) not in (1, groups):
        raise ValueError(
            f"--m has {len(m)} entries for {groups} groups; give one for all groups, or one per group"
        )
    rows = m * groups if len(m) == 1 else m
    name = f"g{groups}_m{'-'.join(map(str, m))}_n{n}_k{k}"
    sizes = tuple((m, n, k) for m in rows)
    case = Case("shape", operation, name, OPERATIONS[operation], sizes, out=out)
    if case.out_format is not None:
        check_quantized_columns("N", n, case.out_format)
    return case.of_formats(formats)


def select(suites: tuple[str, ...] = (), containing: str = "", formats: Formats = NVFP4_PAIR) -> list[Case]:
    """Returns cases of some suites, or of all, whose name contains a text, with operands of a pair of formats.

    Raises:
        ValueError: an unknown suite, no case is left, or blocks of a format do not divide K.
    """
    unknown = [name for name in suites if name not in SUITES]
    if unknown:
        raise ValueError(f"suite {unknown[0]!r} is unknown; use {', '.join((*SUITES, *OTHER_SUITES))}")
    cases = [case for name in suites or SUITES for case in SUITES[name]() if containing in str(case)]
    if not cases:
        raise ValueError(f"no case of {', '.join(suites or SUITES)} contains {containing!r}")
    return [case.of_formats(formats) for case in cases]
