"""Our kernels for `bench.evidence`: every config that defaults may choose, in every form.

Each runs on a small problem whose groups end in all parts of a tile. Its results are not checked here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Any, cast

import torch

import nvfp4_cute
from nvfp4_cute.emulator.record.forms import Form, recorded
from nvfp4_cute.formats.block_format import (
    INT8_PAIR,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4_PAIR,
    Formats,
    FP8_1x128,
    FP8_128x128,
)
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.launch_table import INTERLEAVE
from nvfp4_cute.operands.draws import Dice
from nvfp4_cute.operands.whole import in_form
from nvfp4_cute.ops import parts as on_parts
from nvfp4_cute.ops.parts import Options, Parts
from nvfp4_cute.planning.arch import family_of, mmas_of, simt
from nvfp4_cute.planning.choose import candidates
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import NVFP4, Gate, OutDtype, WeightLayout
from nvfp4_cute.problem import Form as ProblemForm

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
"""One architecture per family; the others of a family are compiled from the same source. For sm_103a, only what sm_100a lacks."""

ROWS = (40, 104, 200)
"""Tokens of the groups."""
K = 512
COLUMNS = {"sm_120a": 128}
"""Results per token; elsewhere 256, two tiles of 128 weights. Products of mma.sync take longest to emulate."""
SIZES = f"{ROWS} {K} {COLUMNS}"
"""Parameters that forms depend on besides the kernels."""

SEED = 1
STEP = 3
STEPS: dict[ProblemForm, int] = {"list": 1, "ragged": STEP, "masked": STEP}
HARDWARE_STEP = 8
"""Every how many kernels of sm_90a one is run. They ran on an H100 or H200, and show proven forms."""
PAIRS = ((MXFP4, MXFP4), (MXFP8_E4M3, MXFP8_E5M2), (MXFP8_E4M3, MXFP4), (FP8_1x128, FP8_128x128), INT8_PAIR)
K96_STEP = 3
"""Every how many kernels with MMAs of 96 elements of K one is run, because a few show all forms."""
FORMAT_STEP = 4
"""Every how many candidates of a pair one is run."""
DTYPES: tuple[OutDtype, ...] = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Gemm:
    """A grouped GEMM with one config.

    Attributes:
        arch, config, form: of the kernel.
        out_dtype: dtype of the results, or "nvfp4".
        has_alpha: whether every group has a factor.
        weight_layout: layout of a dual GEMM's weights; None for one product.
        has_limit, out_m_major: variants of a dual and of a plain GEMM.
        formats: formats of ``a`` and ``b``.
    """

    arch: str
    config: KernelConfig
    form: ProblemForm
    out_dtype: OutDtype = torch.bfloat16
    has_alpha: bool = False
    weight_layout: WeightLayout | None = None
    has_limit: bool = False
    out_m_major: bool = False
    formats: Formats = NVFP4_PAIR

    def __str__(self) -> str:
        dtype = str(self.out_dtype).removeprefix("torch.")
        words = [self.arch, self.form, self.config.to_name(), dtype]
        words += [f"{self.formats[0]} x {self.formats[1]}"] * (self.formats != NVFP4_PAIR)
        words += ["alpha"] * self.has_alpha + ["limit"] * self.has_limit + ["columns"] * self.out_m_major
        return " ".join([*words, *([f"dual {self.weight_layout}"] if self.weight_layout else [])])

    def run(self) -> None:
        """Computes with the config on the emulator."""
        dice, num_b = Dice(SEED), 2 if self.weight_layout == "separate" else 1
        rows, (a_format, b_format) = ROWS, self.formats
        n = columns_of(self.arch) * (2 if self.weight_layout in INTERLEAVE else 1)
        weights = [dice.operand([(n, K)] * len(rows), b_format) for _ in range(num_b)]
        options: dict[str, Any] = {"options": Options(self.config), "backend": f"emulator:{self.arch}"}
        options["out_dtype"] = self.out_dtype
        if self.form == "masked":
            options["masked_m"] = torch.tensor(rows, dtype=torch.int32)
        elif self.form == "ragged":
            options["offs"] = torch.tensor(rows).cumsum(0).to(torch.int32)
        if self.out_dtype == NVFP4:
            options["out_global_scale"] = torch.ones(len(rows))
        of_memory = [max(rows)] * len(rows) if self.form == "masked" else rows
        a, first, *second = in_form(self.form, dice.operand([(m, K) for m in of_memory], a_format), *weights)
        alpha = torch.ones(len(rows)) if self.has_alpha else None
        if self.weight_layout is None:
            if self.out_m_major:
                options["out"] = _columns(rows, n, self)
            on_parts.grouped_gemm(a, first, alpha=alpha, **options)
            return
        up = second[0] if second else None
        w = on_parts.gate_up(first, up, self.weight_layout, alpha, alpha if second else None)
        on_parts.grouped_dual_gemm(a, w, limit=7.0 if self.has_limit else None, **options)


@dataclass(frozen=True)
class Simt:
    """An operation that every GPU computes without special tensor cores."""

    arch: str
    operation: str
    dtype: torch.dtype
    tokens: int = 1

    def __str__(self) -> str:
        return f"{self.arch} {self.operation} {str(self.dtype).removeprefix('torch.')} of {self.tokens} rows"

    def run(self) -> None:
        """Computes the operation on the emulator."""
        generator = torch.Generator().manual_seed(SEED)
        backend = f"emulator:{self.arch}"
        x = torch.randn(self.tokens, K, generator=generator).to(self.dtype)
        dice = Dice(SEED)
        operand = lambda rows: Parts(dice.values(rows, K), dice.scales(rows, K))
        w = operand(columns_of(self.arch))
        if self.operation == "quantize":
            nvfp4_cute.quantize(x, global_scale=0.5, backend=backend)
            nvfp4_cute.quantize(x, up=x, scale_layout="rowmajor", backend=backend)
            offs = torch.tensor([self.tokens // 2, self.tokens], dtype=torch.int32)
            nvfp4_cute.grouped_quantize(x, offs, global_scale=torch.ones(2), backend=backend)
        elif self.operation == "w4a16":
            on_parts.gemm(x, w, 2.0, out_dtype=self.dtype, backend=backend)
        elif self.operation == "int4":
            name = "bfloat16" if self.dtype == torch.bfloat16 else "float16"
            weights = torch.randn(columns_of(self.arch), K, generator=generator)
            format = nvfp4_cute.int4_format(128, name, zero_points=True)
            nvfp4_cute.gemm(x, nvfp4_cute.quantize(weights, format=format), backend=backend)
        elif self.operation == "few_rows":
            on_parts.gemm(operand(self.tokens), w, 2.0, out_dtype=self.dtype, backend=backend)
        else:
            vector = operand(1)
            on_parts.gemv(w, vector._replace(data=vector.data[0]), 2.0, out_dtype=self.dtype, backend=backend)


Ours = Gemm | Simt


def columns_of(arch: str) -> int:
    """Returns the results per token on an architecture."""
    return COLUMNS.get(arch, 256)


def _columns(rows: tuple[int, ...], n: int, case: Gemm) -> Any:
    """Returns outputs with contiguous columns."""
    dtype = cast(torch.dtype, case.out_dtype)
    if case.form == "list":
        return [torch.empty(n, m, dtype=dtype).T for m in rows]
    shape = (n, sum(rows)) if case.form == "ragged" else (len(rows), n, max(rows))
    return torch.empty(*shape, dtype=dtype).transpose(-1, -2)


def ours(arch: str) -> Iterator[Ours]:
    """Yields the kernels of an architecture that defaults may choose.

    Every config runs as lists, with every weight layout in which it differs, and as NVFP4; every ``STEP``-th one in the
    other forms, whose kernels differ only in how they find their tiles. Output dtypes and factors alternate.
    """
    cases: list[Gemm | Simt] = [*_plain(arch), *_dual(arch), *_simt(arch)]
    if arch == "sm_103a":
        cases += [case for case in _other_formats(arch, 1) if case.formats[0] == MXFP4]
        k96 = (case for case in cases if isinstance(case, Gemm) and case.config.use_k96_instrs)
        return islice(k96, 0, None, K96_STEP)
    return chain(
        cases[:: HARDWARE_STEP if arch == "sm_90a" else 1], _other_formats(arch), _other_results(arch)
    )


def _without_proof(arch: str, configs: tuple[KernelConfig, ...]) -> list[KernelConfig]:
    """Drops configs that are chosen only on a machine where ``nvfp4-cute prove`` has shown that they run."""
    return [config for config in configs if arch != "sm_120a" or config.split_k == 1]


def _plain(arch: str) -> Iterator[Gemm]:
    family = family_of(arch)
    for form, step in STEPS.items():
        for index, config in enumerate(_without_proof(arch, candidates(arch, form))):
            if index % step == 0:
                yield Gemm(arch, config, form, DTYPES[index // step % 3], has_alpha=index % 2 == 1)
                if family.OUT_M_MAJOR and index % STEP == 0:
                    yield Gemm(arch, config, form, out_m_major=True)
        for index, config in enumerate(_without_proof(arch, candidates(arch, form, NVFP4_FORMAT))):
            if index % step == 0:
                yield Gemm(arch, config, form, NVFP4, has_alpha=True)


def _dual(arch: str) -> Iterator[Gemm]:
    family = family_of(arch)
    for form, step in STEPS.items():
        for layout in cast(tuple[WeightLayout, ...], ("separate", *INTERLEAVE)):
            tried = _without_proof(arch, candidates(arch, form, gate=Gate("silu", None, layout)))
            for index, config in enumerate(tried):
                if index % step == 0 and family.interleave_reason(config, layout) is None:
                    dtype = DTYPES[index // step % 3]
                    yield Gemm(arch, config, form, dtype, index % 2 == 0, layout, has_limit=index % 3 == 1)


def _other_formats(arch: str, format_step: int = FORMAT_STEP) -> Iterator[Gemm]:
    """Yields a few configs per pair of other element or scale formats; a few show all changes.

    On sm_90a the kernel of NVFP4 also dequantizes other formats before tensor cores see them, so there is nothing new.
    """
    for pair in PAIRS:
        if pair not in mmas_of(arch) or (arch == "sm_90a" and pair in family_of(arch).MMA):
            continue
        for form, step in STEPS.items():
            tried = _without_proof(arch, candidates(arch, form, formats=pair))
            for config in tried[:: format_step * step]:
                yield Gemm(arch, config, form, formats=pair)


def _other_results(arch: str) -> Iterator[Gemm]:
    """Yields a few configs with MXFP8 results. MXFP4 results use nothing else, and on sm_90a nothing beyond NVFP4's."""
    if arch != "sm_90a":
        for config in _without_proof(arch, candidates(arch, "list", MXFP8_E4M3))[::FORMAT_STEP]:
            yield Gemm(arch, config, "list", "mxfp8_e4m3")


def _simt(arch: str) -> Iterator[Simt]:
    for dtype in (torch.float16, torch.bfloat16):
        yield Simt(arch, "quantize", dtype, 8)
        yield Simt(arch, "gemv", dtype)
        yield Simt(arch, "few_rows", dtype, 4)
        for tokens in simt.W4A16_TOKENS:
            yield Simt(arch, "w4a16", dtype, tokens)
        yield Simt(arch, "int4", dtype, 8)


def forms_of(case: Ours) -> set[Form]:
    """Returns the forms that the kernel of a case uses."""
    with recorded() as log:
        case.run()
    return log.forms


def case_names(arch: str) -> list[str]:
    """Returns the names of all kernels of an architecture."""
    return list(_by_name(arch))


@lru_cache
def _by_name(arch: str) -> dict[str, Ours]:
    return {str(case): case for case in ours(arch)}


def forms_of_name(name: str) -> tuple[list[Form], str]:
    """Returns the forms of a kernel by name, and the error ("" for none); for worker processes."""
    try:
        return sorted(forms_of(_by_name(name.split(" ")[0])[name])), ""
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"
