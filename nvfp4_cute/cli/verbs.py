"""The verbs of the command line: a module each, named as the verb, with `add_parser` and `run`."""

import argparse

VERBS = {
    "demo": "run the kernel without a GPU and compare every bit",
    "check": "compare random problems with the reference",
    "bench": "times beside their floors and what others take",
    "tune": "the fastest config of a problem, measured or modelled, for later calls",
    "sol": "the least possible time on a GPU, computed",
    "trace": "the modelled time of a kernel, explained, and its timeline",
    "emulate": "run a CuTe DSL script on a virtual GPU",
    "new": "a problem of your own, from a template",
    "export": "a problem's kernel as a one-file submission",
    "eval": "try a submission as its server would",
    "submit": "hand a submission to popcorn-cli",
    "compile": "kernels ahead of time, into a folder",
    "prove": "a report of what a GPU does: correctness, probes, constants, times",
    "models": "what is in a checkpoint, and how fast whole models are",
    "quantize": "a 16-bit checkpoint to a quantized one",
    "doctor": "what is installed, and what would run where",
}
"""Verb -> its line in `nvfp4-cute --help`, which loads none of the modules."""

Verbs = argparse._SubParsersAction


def add_verb(
    verbs: Verbs, name: str, text: str, examples: str | None = None, *, add_help: bool = True
) -> argparse.ArgumentParser:
    """Add the parser of a verb of ``VERBS``; `text` and `examples` stand in its help, which is `--help` unless told not to be."""
    return verbs.add_parser(
        name,
        help=VERBS[name],
        description=text,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter if examples else argparse.HelpFormatter,
        add_help=add_help,
    )


def add_arch(verb: argparse.ArgumentParser) -> None:
    """Add --arch, the GPU to emulate."""
    verb.add_argument(
        "--arch", help="the GPU to emulate: an architecture (sm_120a) or a product (RTX 5090); default B200"
    )
