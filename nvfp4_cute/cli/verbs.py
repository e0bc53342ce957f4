"""The verbs of the command line.

`nvfp4_cute.cli.options` has one module per verb with its options, `nvfp4_cute.cli` one with its code.
"""

import argparse
from collections.abc import Callable
from importlib import import_module

GROUPS = {
    "first steps": {
        "doctor": "what is installed, and what you can do here",
        "demo": "run a Blackwell kernel without a GPU and compare every bit",
    },
    "models": {
        "models": "what is in a checkpoint, how fast and how exact whole models are",
        "quantize": "a 16-bit checkpoint to NVFP4, MXFP4, MXFP8, FP8 or int4",
        "compile": "kernels of a checkpoint or of one operation ahead of time, for any GPU",
    },
    "kernels of your own": {
        "emulate": "run a CuTe DSL script on a virtual GPU, Blackwell or Hopper; --check finds its races",
        "new": "a problem of your own, from a template",
        "eval": "try a submission as its server would",
        "export": "a competition problem's kernel as a one-file submission",
        "submit": "hand a submission to popcorn-cli",
    },
    "times": {
        "bench": "times next to the speed of light and to other libraries",
        "sol": "the speed of light of a product on a GPU: the least possible time",
        "trace": "the modelled time of a kernel, explained, and its timeline",
        "tune": "the fastest config of a problem, measured or modelled, for later calls",
    },
    "this machine's GPU": {
        "check": "compare random problems with the reference",
        "prove": "a report of what a GPU does: correctness, probes, constants, times",
    },
}
"""Verb -> its line in `nvfp4-cute --help`, by purpose."""

VERBS = {verb: line for verbs in GROUPS.values() for verb, line in verbs.items()}


def listing() -> str:
    """Returns every verb with its line, for `nvfp4-cute --help`."""
    groups = (
        f"{title}:\n" + "".join(f"    {verb:9} {line}\n" for verb, line in verbs.items())
        for title, verbs in GROUPS.items()
    )
    return "\n".join(groups)


Verbs = argparse._SubParsersAction


def add_verb(
    verbs: Verbs, name: str, text: str, examples: str | None = None, *, add_help: bool = True
) -> argparse.ArgumentParser:
    """Adds the parser of a verb of ``VERBS`` with `text` and `examples` in its help. `add_help`: whether it has `--help`."""
    return verbs.add_parser(
        name,
        description=text,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter if examples else argparse.HelpFormatter,
        add_help=add_help,
    )


def lazily(module: str, function: str = "run") -> Callable[[argparse.Namespace], int]:
    """Returns a function that imports a verb's module when it is called; help and wrong options need none of it."""

    def run(args: argparse.Namespace) -> int:
        return getattr(import_module(f"nvfp4_cute.cli.{module}"), function)(args)

    return run


def add_arch(verb: argparse.ArgumentParser) -> None:
    """Adds --arch, the GPU to emulate."""
    verb.add_argument(
        "--arch", help="the GPU to emulate: an architecture (sm_120a) or a product (RTX 5090); default B200"
    )
