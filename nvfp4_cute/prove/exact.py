"""Random grouped problems with exact results (``operands.draws``), and the first bits in which results differ from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import nvfp4_cute
from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.formats.block_format import NVFP4_PAIR, Formats
from nvfp4_cute.formats.scale_layout import from_blocked
from nvfp4_cute.operands.draws import MAX_EXACT_K, Dice, depth_step
from nvfp4_cute.ops import parts
from nvfp4_cute.ops.parts import Parts
from nvfp4_cute.problem import OUT_DTYPES, RESULT_FORMATS, FP8Name, GroupedProblem, ResultName


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
        """Divisor of K."""
        return depth_step(self.formats)

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
    a: Parts
    b: Parts
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
        a, b = (
            x._replace(data=[t.to(device) for t in x.data], scale=[t.to(device) for t in x.scale])
            for x in (self.a, self.b)
        )
        alpha = None if self.alpha is None else self.alpha.to(device)
        if weight_only:
            return self._run_weight_only(b, alpha, backend)
        outs: list[Any] = parts.grouped_gemm(a, b, alpha=alpha, out=out, out_dtype=dtype, backend=backend)
        if format is None:
            return [t.cpu() for t in outs]
        scales = [real_scales(t, m, n) for t, (m, n, _) in zip(outs, sizes, strict=True)]
        return [*(t.data.cpu() for t in outs), *scales]

    def _run_weight_only(self, b: Parts, alpha: torch.Tensor | None, backend: str) -> list[torch.Tensor]:
        """Values of `a` have few bits, so bfloat16 represents them exactly."""
        problem, outs = self.problem, []
        for g, (data, scale) in enumerate(zip(self.a.data, self.a.scale, strict=True)):
            m, _, k = problem.sizes[g]
            layout = problem.a_format.scale_layout
            rows = nvfp4_cute.BlockScaledTensor(data, scale, None, (m, k), layout, format=problem.a_format)
            outs.append(
                parts.gemm(
                    rows.dequantize().bfloat16().to(b.data[g].device), b._replace(data=b.data[g], scale=b.scale[g]),
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
        dice.operand([(m, k) for m, _, k in sizes], a_format),
        dice.operand([(n, k) for _, n, k in sizes], b_format),
        alpha,
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
