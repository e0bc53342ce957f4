"""Problem and GPU -> config: asks the family of the GPU's architecture, which alone knows how it chooses."""

from dataclasses import replace
from typing import Any

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import NVFP4_PAIR, BlockFormat, Formats
from nvfp4_cute.planning.arch import check_results, family_of, mmas_of
from nvfp4_cute.planning.arch.base import INTERLEAVE, Family, check_pair
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.planning.rows import rounded_rows
from nvfp4_cute.problem import Form, Gate, GroupedProblem, WeightLayout, num_weights


def choose_config(problem: GroupedProblem, arch: str, num_sms: int) -> KernelConfig:
    """The config to compute a problem with. Groups of one size are taken to have ``rows.rounded_rows`` of their rows.

    Where only the device knows the sizes, ``problem`` is that of :func:`problem_of_mean`.

    Raises UnsupportedTarget for an ``arch`` without a kernel, UnsupportedProblem for formats that it does not multiply or write,
    and for dual GEMMs that it does not compute.
    """
    formats = problem.a_format, problem.b_format
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


def of_rounded_rows(problem: GroupedProblem) -> GroupedProblem:
    """The problem with rows rounded up, where all groups have one size."""
    first = problem.sizes[0] if problem.sizes else None
    if first is None or any(size != first for size in problem.sizes):
        return problem
    m, n, k = first
    return replace(problem, sizes=((rounded_rows(m), n, k),) * len(problem.sizes))


def config_for_mean(
    arch: str,
    num_sms: int,
    num_groups: int,
    mean: tuple[int, int, int],
    gate: Gate | None = None,
    out_format: BlockFormat | None = None,
    is_ragged: bool = True,
    formats: Formats = NVFP4_PAIR,
) -> KernelConfig:
    """The config of a problem whose group sizes only the device knows.

    Args:
        mean, gate, out_format, is_ragged, formats: as of :func:`problem_of_mean`.

    Raises as ``choose_config``.
    """
    problem = problem_of_mean(num_groups, mean, gate, out_format, is_ragged, formats)
    return choose_config(problem, arch, num_sms)


def problem_of_mean(
    num_groups: int,
    mean: tuple[int, int, int],
    gate: Gate | None = None,
    out_format: BlockFormat | None = None,
    is_ragged: bool = True,
    formats: Formats = NVFP4_PAIR,
) -> GroupedProblem:
    """What a config is chosen for where only the device knows the sizes: groups of a mean size.

    Args:
        mean: (m, n, k) of a group of mean size, n of its results.
        gate: of a dual GEMM.
        out_format: of quantized results; None of others.
        is_ragged: whether groups share rows, so that some have more than the mean; no group of the masked form has.
        formats: of ``a`` and of ``b``.
    """
    m, n, k = mean
    form: Form = "ragged" if is_ragged else "masked"
    dtype: Any = GroupedProblem.out_dtype if out_format is None else out_format.name
    a_format, b_format = formats
    if gate is None:
        return GroupedProblem((mean,) * num_groups, form, dtype, a_format=a_format, b_format=b_format)
    layout = _kernels_layout(gate)
    sizes = ((m, n if layout == "separate" else 2 * n, k),) * num_groups
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
    """Every config that is computed with where the caller chooses none. Raises UnsupportedTarget as ``choose_config``.

    Args:
        out_format: of quantized results; None of others.
        gate: of a dual GEMM.
        formats: of ``a`` and of ``b``. Raises UnsupportedProblem for formats that the kernel does not multiply.
    """
    check_pair(arch, formats, mmas_of(arch))
    layout = "separate" if gate is None else _kernels_layout(gate)
    num_b = num_weights(gate is not None, layout)
    return family_of(arch, formats).candidates(num_b, layout, out_format, form, formats)


def ranked(problem: GroupedProblem, arch: str, num_sms: int) -> list[KernelConfig]:
    """What is chosen from, the chosen one first; one may be there twice. Raises as ``choose_config``."""
    chosen = choose_config(problem, arch, num_sms)
    family = family_of(arch, (problem.a_format, problem.b_format))
    estimates = family.estimates(problem, num_sms)
    if estimates:
        return [estimate.config for estimate in estimates]
    return [chosen, *_candidates(family, problem)]


def explain(problem: GroupedProblem, arch: str, num_sms: int) -> str:
    """Why a config was chosen for groups of known sizes: a line for each candidate that has an estimate, the chosen one first."""
    config = choose_config(problem, arch, num_sms)
    estimates = family_of(arch, (problem.a_format, problem.b_format)).estimates(problem, num_sms)
    if estimates:
        return "\n".join(map(str, estimates))
    return f"{config.to_name()}: a rule of {arch} on the sizes; this family prints no estimates of its candidates"


def _candidates(family: Family, problem: GroupedProblem) -> tuple[KernelConfig, ...]:
    formats = problem.a_format, problem.b_format
    return family.candidates(problem.num_b, problem.weight_layout, problem.out_format, problem.form, formats)


def _kernels_layout(gate: Gate) -> WeightLayout:
    """How a kernel finds the weights: halves of one operand are two for it."""
    return gate.weight_layout if gate.weight_layout in INTERLEAVE else "separate"
