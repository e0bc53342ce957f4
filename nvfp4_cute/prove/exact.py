"""Random grouped problems with exact results, and the first bits in which results differ from them.

Operands are drawn so that every sum is exact in fp32 in any order of accumulation. Values are multiples of 1/2 up to 6,
and scales are 0.5, 1, 1.5 or 2, so products are multiples of 1/16 up to 144, and K of them stay below 2**24 sixteenths.
alpha is a power of two. A backend that differs by one bit computes something else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import nvfp4_cute
from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.formats.block_format import (
    MIXED_PAIRS,
    NVFP4,
    NVFP4_PAIR,
    PADDED_K_MULTIPLE,
    BlockFormat,
    Formats,
)
from nvfp4_cute.formats.codecs import encode, encode_e4m3, encode_ue8m0
from nvfp4_cute.formats.scale_layout import from_blocked, to_blocked
from nvfp4_cute.formats.zero_points import FLOATS, scale_words
from nvfp4_cute.ops import parts
from nvfp4_cute.ops.parts import Parts
from nvfp4_cute.problem import OUT_DTYPES, RESULT_FORMATS, FP8Name, GroupedProblem, ResultName

SCALES = (0.5, 1.0, 1.5, 2.0)
ZERO_POINTS = (0, 7, 8, 16)
ALPHAS = (0.25, 0.5, 1.0, 2.0, -1.0)
K_STEP = 32  # row pitch in full 16-byte units, as tensor maps require
MAX_EXACT_K = 2**24 // (16 * 144) // K_STEP * K_STEP
# Shares of the groups with edge-case row counts, whatever the limits are.
EMPTY_SHARE, ONE_ROW_SHARE = 0.1, 0.1


@dataclass(frozen=True)
class Limits:
    """Upper bounds of the drawn problems: groups, and M, N, K of a group in elements; and formats.

    Attributes:
        out: format name of quantized results; None for other results.

    Raises:
        ValueError: a bound leaves nothing to draw, or K is so long that sums may not be exact.
    """

    groups: int
    max_m: int
    max_n: int
    max_k: int
    formats: Formats = NVFP4_PAIR
    out: ResultName | FP8Name | None = None

    @property
    def n_step(self) -> int:
        """Divisor of N: blocks of quantized results."""
        return 1 if self.out is None else RESULT_FORMATS[self.out].k_multiple

    @property
    def k_step(self) -> int:
        """Divisor of K: blocks, row pitches in full 16-byte units, and full boxes for formats that TMA pads."""
        padded = PADDED_K_MULTIPLE if self.formats in MIXED_PAIRS else K_STEP
        return max(padded, *(format.k_multiple for format in self.formats))

    def __post_init__(self) -> None:
        for name in ("groups", "max_m", "max_n"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not positive; use at least 1")
        if self.max_n < self.n_step:
            raise ValueError(f"max_n={self.max_n} has no block of {self.out}; use at least {self.n_step}")
        if not self.k_step <= self.max_k <= MAX_EXACT_K:
            raise ValueError(
                f"max_k={self.max_k} is outside {self.k_step}..{MAX_EXACT_K} (whole tensor-map rows, sums exact in fp32); "
                f"use {min(max(self.max_k, self.k_step), MAX_EXACT_K)}"
            )


@dataclass(frozen=True)
class Case:
    """One random problem with its operands, on the CPU; see `draw`."""

    seed: int
    problem: GroupedProblem
    a: list[torch.Tensor]
    b: list[torch.Tensor]
    a_scale: list[torch.Tensor]
    b_scale: list[torch.Tensor]
    alpha: torch.Tensor | None

    def run(self, backend: str, device: str, weight_only: bool = False) -> list[torch.Tensor]:
        """Computes the case on `backend` with tensors on `device`. Returns the outputs on the CPU, [M, N] per group.

        Quantized outputs are the data of all groups, then the scales of their real rows.

        weight_only: multiply the bfloat16 rows that `a` stands for, one group at a time, as sm_80 to sm_89 can.
        """
        dtype, format, sizes = self.problem.out_dtype, self.problem.out_format, self.problem.sizes
        out: list[Any] | None = None
        if isinstance(dtype, torch.dtype):
            out = [torch.full((m, n), float("nan"), dtype=dtype, device=device) for m, n, _ in sizes]
        a, b, a_scale, b_scale = (
            [t.to(device) for t in tensors] for tensors in (self.a, self.b, self.a_scale, self.b_scale)
        )
        alpha = None if self.alpha is None else self.alpha.to(device)
        if weight_only:
            return self._run_weight_only(b, b_scale, alpha, backend)
        outs: list[Any] = parts.grouped_gemm(
            Parts(a, a_scale, self.problem.a_format), Parts(b, b_scale, self.problem.b_format), alpha=alpha, out=out,
            out_dtype=dtype, backend=backend,
        )  # fmt: skip
        if format is None:
            return [t.cpu() for t in outs]
        scales = [real_scales(t, m, n) for t, (m, n, _) in zip(outs, sizes, strict=True)]
        return [*(t.data.cpu() for t in outs), *scales]

    def _run_weight_only(
        self, b: list[torch.Tensor], b_scale: list[torch.Tensor], alpha: torch.Tensor | None, backend: str
    ) -> list[torch.Tensor]:
        """Values of `a` have few bits, so bfloat16 represents them exactly."""
        problem, outs = self.problem, []
        for g, (data, scale) in enumerate(zip(self.a, self.a_scale, strict=True)):
            m, _, k = problem.sizes[g]
            layout = problem.a_format.scale_layout
            rows = nvfp4_cute.BlockScaledTensor(data, scale, None, (m, k), layout, format=problem.a_format)
            outs.append(
                parts.gemm(
                    rows.dequantize().bfloat16().to(b[g].device), Parts(b[g], b_scale[g], problem.b_format),
                    None if alpha is None else alpha[g], out_dtype=problem.out_dtype, backend=backend,
                ).cpu()
            )  # fmt: skip
        return outs

    @property
    def names(self) -> list[str]:
        """Names of the outputs of ``run``."""
        groups = [f"group {g}" for g in range(self.problem.num_groups)]
        return (
            groups if self.problem.out_format is None else groups + [f"scales of {name}" for name in groups]
        )


def real_scales(x: nvfp4_cute.BlockScaledTensor, m: int, n: int) -> torch.Tensor:
    """Returns scales of the rows [M, N] of a quantized result on the CPU, one row of scales per row.

    Padding rows stay unwritten.
    """
    if x.format.scale_layout == "rowmajor":
        return x.scale.cpu()
    return from_blocked(x.scale.cpu().view(torch.uint8), m, x.format.padded_scale_shape(m, n)[1])


class Dice:
    """All random choices of the problem of one seed. The order of the calls matters."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        """Returns a random integer, both bounds included."""
        return int(torch.randint(low, high + 1, (), generator=self._generator))

    def choose(self, values: Sequence[Any]) -> Any:
        """Returns a random element of `values`."""
        return values[self.integer(0, len(values) - 1)]

    def rows(self, most: int) -> int:
        """Returns the rows of a group; 0 and 1 are more frequent than by uniform chance."""
        edge = float(torch.rand((), generator=self._generator))
        if edge < EMPTY_SHARE:
            return 0
        return 1 if edge < EMPTY_SHARE + ONE_ROW_SHARE else self.integer(1, most)

    def values(self, rows: int, k: int, format: BlockFormat = NVFP4) -> torch.Tensor:
        """Returns every bit pattern of e2m1, uint8 [rows, k/2]; or 8-bit elements [rows, k], multiples of 1/2 up to 6."""
        if format.element.bits == 8:
            return encode(self.halves(rows, k), format.element)
        return torch.randint(
            0, 256, (rows, format.row_bytes(k)), dtype=torch.uint8, generator=self._generator
        )

    def scales(self, rows: int, k: int, format: BlockFormat = NVFP4) -> torch.Tensor:
        """Returns scales out of ``scale_choices``, in the format's own layout."""
        choices = scale_choices(format)
        is_rowmajor = format.scale_layout == "rowmajor"
        shape = format.scale_shape(rows, k) if is_rowmajor else (rows, format.num_k_blocks(k))
        chosen = choices[torch.randint(0, len(choices), shape, generator=self._generator)]
        return chosen if is_rowmajor else to_blocked(chosen)

    def factors(self, count: int) -> torch.Tensor:
        """Returns float32 [count] out of ``ALPHAS``."""
        return torch.tensor([self.choose(ALPHAS) for _ in range(count)])

    def halves(self, *shape: int) -> torch.Tensor:
        """Returns float32 multiples of 1/2 from -6 to 6: the values of e2m1 and more."""
        return torch.randint(-12, 13, shape, generator=self._generator) / 2


def scale_choices(format: BlockFormat, values: Sequence[float] = SCALES) -> torch.Tensor:
    """Returns ``values`` as scales of a format: only powers of two if it has no others; with zero points next to some."""
    scale = format.scale_float.name
    choices = torch.tensor([x for x in values if scale != "ue8m0" or x != 1.5])
    if format.has_zero_points:
        words = choices.to(FLOATS[format.scale.name]).repeat_interleave(len(ZERO_POINTS))
        return scale_words(words, torch.tensor(ZERO_POINTS * len(choices)))
    if format.scale.bits == 8:
        return encode_ue8m0(choices) if scale == "ue8m0" else encode_e4m3(choices)
    return choices.to(format.scale_dtypes[0])


def draw(seed: int, limits: Limits) -> Case:
    """Draws the problem of `seed`: sizes within `limits`, all sixteen values, blocked scales, perhaps alpha."""
    dice = Dice(seed)
    num_groups = dice.integer(1, limits.groups)
    sizes = tuple(
        (
            dice.rows(limits.max_m),
            limits.n_step * dice.integer(1, limits.max_n // limits.n_step),
            limits.k_step * dice.integer(1, limits.max_k // limits.k_step),
        )
        for _ in range(num_groups)
    )
    alpha = dice.factors(num_groups) if dice.choose((False, True)) else None
    a_format, b_format = limits.formats
    dtype = limits.out or dice.choose(OUT_DTYPES)
    problem = GroupedProblem(sizes, "list", dtype, alpha is not None, a_format=a_format, b_format=b_format)
    return Case(
        seed,
        problem,
        a=[dice.values(m, k, a_format) for m, _, k in sizes],
        b=[dice.values(n, k, b_format) for _, n, k in sizes],
        a_scale=[dice.scales(m, k, a_format) for m, _, k in sizes],
        b_scale=[dice.scales(n, k, b_format) for _, n, k in sizes],
        alpha=alpha,
    )


def difference(
    outputs: list[torch.Tensor], expected: list[torch.Tensor], names: Sequence[str] | None = None
) -> str | None:
    """Returns where outputs, [M, N] per group, first differ by a bit from the expected ones, and how often; None if nowhere.

    names: names of the outputs; None means one output per group.
    """
    for group, (out, want) in enumerate(zip(outputs, expected, strict=True)):
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.dtype.itemsize]
        differs = out.contiguous().view(bits) != want.contiguous().view(bits)
        if differs.any():
            row, column = (int(i) for i in differs.nonzero()[0])
            name = f"group {group}" if names is None else names[group]
            return (
                f"{name} element ({row}, {column}) is {out[row, column].item()!r}, the reference says "
                f"{want[row, column].item()!r}; {int(differs.sum())} of {differs.numel()} elements of the group differ"
            )
    return None


def failure_of(case: Case, backend: str, weight_only: bool = False) -> str | None:
    """Runs a case on `backend` and on the reference. Returns how they differ, or the emulated kernel's fault."""
    try:
        outputs = case.run(backend, "cuda" if backend == "cuda" else "cpu", weight_only)
    except EmulatorError as error:
        return str(error)
    return difference(outputs, case.run("reference", "cpu", weight_only), case.names)
