"""`nvfp4-cute trace`: the modelled time of a competition case on a GPU, explained, and its timeline for Perfetto."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from nvfp4_cute.emulator import trace
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.gpus.timing_figures import MODEL_ERROR
from nvfp4_cute.model.modelled import modelled_times

ADVICE = "open it at https://ui.perfetto.dev or chrome://tracing"


def run(problem: str, case: int, *, target_name: str, out: Path | None) -> int:
    """Model one benchmark case of a problem, print what took the time, and write the timeline; return 0.

    Args:
        problem: name of a competition problem that this package answers.
        case: number of its benchmark case, from 0.
        target_name: the GPU.
        out: file of the timeline, compressed if it ends in .gz; None writes none.

    Raises:
        ValueError: there is no such case, or no kernel for the problem.
        UnsupportedTarget: an unknown GPU, or one without a kernel.
    """
    target = lookup(target_name)
    package = f"nvfp4_cute.problems.{problem}"
    if not find_spec(package) or not find_spec(f"{package}.adapter"):
        raise ValueError(f"this package does not answer {problem} yet: there is no kernel to model")
    cases = import_module(f"{package}.spec").BENCHMARKS
    if not 0 <= case < len(cases):
        raise ValueError(f"{problem} has no benchmark case {case}; it has 0 to {len(cases) - 1}")
    data = import_module(f"{package}.inputs").make_inputs(cases[case])
    answer = import_module(f"{package}.adapter").custom_kernel
    with tqdm(unit="CTA", desc=f"{problem} {case}", disable=None, leave=False) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        timings = modelled_times(
            lambda backend: answer(data, backend=backend),
            target,
            progress=advance,
            timeline=out is not None,
            by_representatives=True,
        )
    for timing in timings:
        print(timing.report())
    print(MODEL_ERROR)
    if out is not None:
        trace.write(timings[-1], out)
        print(f"timeline in {out}: {ADVICE}")
    return 0
