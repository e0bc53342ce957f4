"""`nvfp4-cute trace`: models and explains the time of a competition case or a layer on a GPU; writes a timeline for Perfetto."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.gpus.timing_figures import MODEL_ERROR
from nvfp4_cute.problems import registry
from nvfp4_cute.roofline.modelled import modelled_times
from nvfp4_cute.terminal import Progress
from nvfp4_cute.timing import trace
from nvfp4_cute.timing.result import ChainTiming, Timing

ADVICE = "open it at https://ui.perfetto.dev or chrome://tracing"


def run(args: argparse.Namespace) -> int:
    """Models one case or layer, prints what took its time, writes its timeline; returns 0."""
    if args.name in registry.names():
        types.refuse_given(args, ("tokens",), lambda name: f"{args.name} has cases: leave out {name}")
        return model_case(args.name, args.case or 0, target_name=args.target, out=args.out)
    types.refuse_given(args, ("case",), lambda name: f"{args.name} has no cases: leave out {name}")
    return model_layer(args.name, args.tokens or 1, target_name=args.target, out=args.out)


def model_layer(layer: str, tokens: int, *, target_name: str, out: Path | None) -> int:
    """Models a layer, prints what took the time, and writes the timeline; returns 0.

    Args:
        layer: a name of `bench.layers`.
        tokens: number of rows.
        target_name, out: see `model_case`.

    Raises:
        ValueError: there is no such layer.
        UnsupportedTarget: the GPU is unknown, or has no kernel.
    """
    from nvfp4_cute.bench.layers import EXPERTS, LINEAR, Cell, modelled

    if layer not in EXPERTS and layer not in LINEAR:
        known = ", ".join((*registry.names(), *EXPERTS, *LINEAR))
        raise ValueError(f"{layer!r} is neither a problem nor a layer; use one of {known}")
    with _progress(f"{layer}, {tokens} tokens") as advance:
        cell = Cell(lookup(target_name).name, layer, tokens)
        timing = modelled(cell, timeline=out is not None, progress=advance)
    print(timing.report())
    _finish(timing, out)
    return 0


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar of the CTAs of each launch; yields the function that advances it."""
    with Progress(unit="CTA", desc=what) as bar:

        def advance(done: int, total: int) -> None:
            if done < bar.n:
                bar.reset(total)
            bar.total = total
            bar.update(done - bar.n)

        yield advance


def _finish(timing: Timing | ChainTiming, out: Path | None) -> None:
    """Prints how reliable the times are, and writes the timeline if requested."""
    print(MODEL_ERROR)
    if out is not None:
        trace.write(out, timing)
        print(f"timeline in {out}: {ADVICE}")


def model_case(problem: str, case: int, *, target_name: str, out: Path | None) -> int:
    """Models one benchmark case of a problem, prints what took the time, and writes the timeline; returns 0.

    Args:
        problem: name of a competition problem with a kernel in this package.
        case: number of its benchmark case, from 0.
        target_name: the GPU.
        out: file of the timeline, compressed if it ends in .gz; None writes none.

    Raises:
        ValueError: there is no such case, or no kernel for the problem.
        UnsupportedTarget: the GPU is unknown, or has no kernel.
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
    with _progress(f"{problem} {case}") as advance:
        timings = modelled_times(
            lambda backend: answer(data, backend=backend),
            target,
            progress=advance,
            timeline=out is not None,
            by_representatives=True,
        )
    for timing in timings:
        print(timing.report())
    _finish(timings[-1], out)
    return 0
