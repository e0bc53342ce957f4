"""What harnesses want a submission to look like: one interface, a value a harness.

`nvfp4-cute export --format NAME` writes the same kernel for each of them. A format says what stands at the top of the file
and at its end, which rules the file must keep, and which files a run needs beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nvfp4_cute.competition.rules import Finding, check_export_rules, check_server_rules, header_text
from nvfp4_cute.problems.registry import Problem


@dataclass(frozen=True)
class Format:
    """How one harness takes a submission.

    Attributes:
        name: on the command line.
        entry_points: functions of the problem's ``submission.py`` that the file offers.
        header: (problem, GPU) -> lines at the top.
        footer: code at the end: how the harness hands over inputs and takes outputs.
        check: the file's bytes -> rules of the harness that it breaks.
        companions: problem -> name and text of the files that a run needs beside it.
        how_to_run: a line for people.
    """

    name: str
    entry_points: tuple[str, ...]
    header: Callable[[str, str], str]
    footer: str
    check: Callable[[bytes], list[Finding]]
    companions: Callable[[Problem], dict[str, str]]
    how_to_run: str


# ---- GPU MODE: options in the first comment block, custom_kernel(data) -------------------------------------------------


GPU_MODE = Format(
    name="gpumode",
    entry_points=("custom_kernel",),
    header=header_text,
    footer="",
    check=lambda data: check_server_rules(data) + check_export_rules(data.decode()),
    companions=lambda problem: {},
    how_to_run="nvfp4-cute eval {output}",
)

# ---- pygpubench: a function that gets tensors, one after another, and writes into those that are outputs ----------------

PYGPUBENCH_FOOTER = '''\
def kernel(*tensors):
    """What pygpubench calls: the tensors of ``custom_kernel``'s argument, one after another. C is written in place."""
    custom_kernel(from_flat(tensors))
'''
PYGPUBENCH_RUN = '''\
"""Times submission.py with pygpubench: python bench.py. Inputs and right answers are those of nvfp4_cute."""

import pygpubench

from nvfp4_cute.emulator.fronts.torch_memory import tensors_in
from nvfp4_cute.problems import registry

PROBLEM = registry.load({problem!r})
REPEATS, SEED = 100, 1111


def generate_test_case(*, case, seed):
    """Arguments of the kernel for benchmark number ``case``, outputs with what is right and the tolerances."""
    data = PROBLEM.make_inputs(PROBLEM.benchmarks[case], "cuda", seed)
    answer = list(tensors_in(PROBLEM.reference(data)))
    right = {{id(c): want for c, want in zip(PROBLEM.output(data), answer, strict=True)}}
    return tuple(
        pygpubench.out(tensor, expected=(right[id(tensor)], {rtol}, {atol})) if id(tensor) in right else tensor
        for tensor in tensors_in(data)
    )


if __name__ == "__main__":
    for number, case in enumerate(PROBLEM.benchmarks):
        result = pygpubench.do_bench_isolated(
            "submission.kernel", generate_test_case, {{"case": number}}, REPEATS, SEED
        )
        print(case.name, "WRONG" if result.errors else "right", pygpubench.basic_stats(result.time_us))
'''
PYGPUBENCH = Format(
    name="pygpubench",
    entry_points=("custom_kernel", "from_flat"),
    header=lambda problem, gpu: "",
    footer=PYGPUBENCH_FOOTER,
    check=lambda data: check_export_rules(data.decode()),
    companions=lambda problem: {
        "bench.py": PYGPUBENCH_RUN.format(problem=problem.name, rtol=problem.rtol, atol=problem.atol)
    },
    how_to_run="python bench.py (needs pygpubench and nvfp4_cute)",
)

# ---- KernelBench: a module whose forward takes the tensors and returns one -----------------------------------------------

KERNELBENCH_FOOTER = '''\
class ModelNew(torch.nn.Module):
    """What KernelBench compares with ``Model`` of problem.py."""

    def forward(self, *tensors):
        """C from the tensors of ``custom_kernel``'s argument, one after another; of several groups, all in a row."""
        answer = custom_kernel(from_flat(tensors))
        return torch.cat([c.flatten() for c in answer]) if isinstance(answer, list) else answer
'''
KERNELBENCH_PROBLEM = '''\
"""The problem as KernelBench reads it: Model is right, ModelNew of submission.py is judged. Needs nvfp4_cute."""

import torch

from nvfp4_cute.emulator.fronts.torch_memory import tensors_in
from nvfp4_cute.problems import registry
from nvfp4_cute.problems.{problem}.submission import from_flat

PROBLEM = registry.load({problem!r})
CASE = PROBLEM.benchmarks[0]


class Model(torch.nn.Module):
    """The reference, computed in float64."""

    def forward(self, *tensors):
        answer = PROBLEM.reference(from_flat(tensors))
        return torch.cat([c.flatten() for c in answer]) if isinstance(answer, list) else answer


def get_inputs():
    return list(tensors_in(PROBLEM.make_inputs(CASE)))


def get_init_inputs():
    return []
'''
KERNELBENCH = Format(
    name="kernelbench",
    entry_points=("custom_kernel", "from_flat"),
    header=lambda problem, gpu: "",
    footer=KERNELBENCH_FOOTER,
    check=lambda data: check_export_rules(data.decode()),
    companions=lambda problem: {"problem.py": KERNELBENCH_PROBLEM.format(problem=problem.name)},
    how_to_run="KernelBench's run_and_check.py with problem.py as the reference and {output} as the kernel",
)

FORMATS = {form.name: form for form in (GPU_MODE, PYGPUBENCH, KERNELBENCH)}
