"""Chooses a config for a problem and a GPU by asking the GPU's architecture family."""

from dataclasses import replace
from typing import Any

from nvfp4_cute.errors import ConfigError, UnsupportedProblem
from nvfp4_cute.formats.block_format import NVFP4_PAIR, BlockFormat, Formats
from nvfp4_cute.launch_table import INTERLEAVE
from nvfp4_cute.planning.arch import check_results, choose_weight_only, families_of, family_of, mmas_of
from nvfp4_cute.planning.arch.base import Family, check_pair
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.planning.rows import rounded_rows
from nvfp4_cute.problem import Form, Gate, GroupedProblem, WeightLayout, num_weights


def choose_config(problem: GroupedProblem, arch: str, num_sms: int) -> KernelConfig:
    """Returns the config for a problem. If all groups have one size, their rows are rounded up by ``rows.rounded_rows``.

    Rows of 16-bit ``a`` are not rounded here: the caller rounds their total before it divides them among groups.

    Pass the result of :func:`problem_of_mean` if only the device knows the sizes.

    Raises:
        UnsupportedTarget: ``arch`` has no kernel.
        UnsupportedProblem: its kernel does not multiply or write these formats, or does not compute this dual GEMM.
    """
    formats = problem.a_format, problem.b_format
    if not formats[0].has_scales:
        return choose_weight_only(arch, problem, num_sms)
    check_pair(arch, formats, mmas_of(arch))
    check_results(arch, formats, problem.out_format)
    family, problem = family_of(arch, formats), of_rounded_rows(problem)
    if not _candidates(family, problem):
        what = "GEMM" if problem.activation is None else "dual GEMM"
        raise UnsupportedProblem(
            f"{arch} has no {what} of {formats[0]} x {formats[1]} with results of {problem.out_dtype}; take "
            "out_dtype=torch.bfloat16, or other formats"
        )
    return family.choose(problem, num_sms)


def check_order(config: KernelConfig, problem: GroupedProblem) -> None:
    """Raises ConfigError if a batch-invariant problem is to be computed with a config whose sums depend on the number of rows."""
    if problem.batch_invariant and config.stream_k:
        raise ConfigError(
            f"config {config.to_name()} divides K by the number of tiles, so a row's bits depend on other rows; with "
            "batch_invariant=True pass stream_k=False, or no config"
        )


def of_rounded_rows(problem: GroupedProblem) -> GroupedProblem:
    """Returns the problem with rows rounded up, if all groups have one size and rows are quantized."""
    first = problem.sizes[0] if problem.sizes and problem.a_format.has_scales else None
    if first is None or any(size != first for size in problem.sizes):
        return problem
    m, n, k = first
    return replace(problem, sizes=((rounded_rows(m), n, k),) * len(problem.sizes))


def problem_of_mean(
    num_groups: int,
    mean: tuple[int, int, int],
    gate: Gate | None = None,
    out_format: BlockFormat | None = None,
    is_ragged: bool = True,
    formats: Formats = NVFP4_PAIR,
    num_rows: int | None = None,
) -> GroupedProblem:
    """Returns the problem for which a config is chosen if only the device knows the sizes: groups of mean size.

    Args:
        mean: (m, n, k) of a group of mean size, where n counts result columns.
        gate: activation and layout of a dual GEMM.
        out_format: format of quantized results; None for other results.
        is_ragged: whether groups share rows, so that some exceed the mean. Groups of the masked form never do.
        formats: formats of ``a`` and ``b``.
        num_rows: number of rows of all groups. If it is below the number of groups, some groups have no rows.
    """
    m, n, k = mean
    form: Form = "ragged" if is_ragged else "masked"
    dtype: Any = GroupedProblem.out_dtype if out_format is None else out_format.name
    a_format, b_format = formats
    live = num_groups if num_rows is None else min(num_rows, num_groups)
    layout = None if gate is None else _kernels_layout(gate)
    n = n if layout in (None, "separate") else 2 * n
    sizes = ((m, n, k),) * live + ((0, n, k),) * (num_groups - live)
    if gate is None or layout is None:
        return GroupedProblem(sizes, form, dtype, a_format=a_format, b_format=b_format)
    return GroupedProblem(
        sizes,
        form,
        dtype,
        activation=gate.activation,
        weight_layout=layout,
        a_format=a_format,
        b_format=b_format,
    )


def candidates(
    arch: str,
    form: Form,
    out_format: BlockFormat | None = None,
    gate: Gate | None = None,
    formats: Formats = NVFP4_PAIR,
) -> tuple[KernelConfig, ...]:
    """Returns every config that may be chosen if the caller passes none.

    Args:
        out_format: format of quantized results; None for other results.
        gate: activation and layout of a dual GEMM.
        formats: formats of ``a`` and ``b``.

    Raises:
        UnsupportedTarget: ``arch`` has no kernel.
        UnsupportedProblem: its kernel does not multiply these formats.
    """
    check_pair(arch, formats, mmas_of(arch, formats[0]))
    layout = "separate" if gate is None else _kernels_layout(gate)
    how = num_weights(gate is not None, layout), layout, out_format, form, formats
    return tuple(config for family in families_of(arch, formats) for config in family.candidates(*how))


def ranked(problem: GroupedProblem, arch: str, num_sms: int) -> list[KernelConfig]:
    """Returns the candidates, the chosen one first; it may occur twice. Raises the errors of ``choose_config``."""
    chosen = choose_config(problem, arch, num_sms)
    family = family_of(arch, (problem.a_format, problem.b_format))
    estimates = family.estimates(problem, num_sms)
    if estimates:
        return [estimate.config for estimate in estimates]
    return [chosen, *_candidates(family, problem)]


def explain(problem: GroupedProblem, arch: str, num_sms: int) -> str:
    """Explains the choice for groups of known sizes: one line per candidate with an estimate, the chosen one first."""
    config = choose_config(problem, arch, num_sms)
    estimates = family_of(arch, (problem.a_format, problem.b_format)).estimates(problem, num_sms)
    if estimates:
        return "\n".join(map(str, estimates))
    return f"{config.to_name()}: a rule of {arch} on the sizes; this family prints no estimates of its candidates"


def _candidates(family: Family, problem: GroupedProblem) -> tuple[KernelConfig, ...]:
    formats = problem.a_format, problem.b_format
    return family.candidates(problem.num_b, problem.weight_layout, problem.out_format, problem.form, formats)


def _kernels_layout(gate: Gate) -> WeightLayout:
    """Returns the layout of the weights for a kernel, which takes the halves of one operand as two operands."""
    return gate.weight_layout if gate.weight_layout in INTERLEAVE else "separate"
