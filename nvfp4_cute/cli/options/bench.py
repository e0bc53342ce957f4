"""Options of `nvfp4-cute bench`."""

import argparse
from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute bench                                         everything, on the GPU of this machine if it is known
  nvfp4-cute bench competition --target B200 --plot b.png  the competition's cases, with a bar chart
  nvfp4-cute bench linear experts --json                   layers of language models, as JSON
  nvfp4-cute bench dense --formats mxfp8_e4m3,mxfp4        square matrices with operands of other formats
  nvfp4-cute bench --m 16 --n 4096 --k 7168 --groups 8     your own shape
  nvfp4-cute bench --m 64 --n 2048 --k 7168 --op dual --out mxfp8_e4m3   results quantized for the next product
  nvfp4-cute bench --containing "group_gemm case 0" --like-harness   timed as the competition does
  nvfp4-cute bench --compare before.json after.json        ratios of two results of --json, with spreads
  nvfp4-cute bench --html times.html                       all committed results on one page for a browser
  nvfp4-cute bench competition --explain                   every candidate config's estimate, the chosen one first
  nvfp4-cute bench --target GB10 --jobs 8 --results g.json times that take long to model: 8 processes, stored
  nvfp4-cute bench layers --target GB10 --jobs 8           whole layers as their users call them, modelled
  nvfp4-cute bench ep --tokens 1,64,512 --plot ep.png      a layer of experts over two GPUs, phase by phase
  nvfp4-cute bench --predict h100.json --target H100       model calls that were not measured; then, on that GPU:
  nvfp4-cute bench --against h100.json                     measure them, and compare with the prediction

suites: competition (GPU MODE's four NVFP4 problems), dense (squares of 128 to 16384), linear (layers at 1 to 128 rows),
experts (DeepSeek-V3, Qwen3-30B-A3B, Mixtral-8x7B; decode and prefill); and, only when named, layers (route + MoE,
QuantizedLinear), modelled as chains of launches, and ep (layers of experts over the GPUs of this machine, measured).
Layers of experts measured on one GPU: python -m nvfp4_cute.bench.moe.
Measured times are medians of CUDA events with cold L2 and rotating random inputs; torch is measured in the same run.
"""


OPTIONS = {
    "layers": ("target", "containing", "jobs", "results", "json", "save"),
    "ep": ("containing", "tokens", "ranks", "results", "json", "plot", "save"),
}


OTHER_OPTIONS = ("containing", "formats", "target", "explain", "like_harness", "json", "plot", "save")


class _Help(argparse.Action):
    """Prints one suite's options and examples for `bench SUITE --help`, and everything for `bench --help`."""

    def __call__(self, parser, namespace, values, option_string=None):
        suite = next(iter(namespace.suites or ()), None)
        if suite is not None:
            shown = ("help", "suites", *OPTIONS.get(suite, OTHER_OPTIONS))
            for action in parser._actions:
                if action.dest not in shown:
                    action.help = argparse.SUPPRESS
            lines = EXAMPLES.splitlines()
            own = [line for line in lines if f" bench {suite} " in line or f"bench.{suite}" in line]
            parser.epilog = "\n".join(["examples:", *own]) if own else None
        parser.print_help()
        parser.exit()


def add_parser(verbs: Verbs) -> None:
    """Adds `bench` and its options."""
    text = (
        "Print for every case bytes, operations, speed of light, time, percent of speed of light, TB/s, TFLOP/s, and "
        "the fastest peer."
    )
    parser = add_verb(verbs, "bench", text, EXAMPLES, add_help=False)
    parser.add_argument(
        "-h",
        "--help",
        action=_Help,
        nargs=0,
        help="show this help message, or that of a named suite, and exit",
    )
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        help=f"{', '.join(choices.SUITES)} (default: all); or layers, or ep",
    )
    parser.add_argument(
        "--containing", default="", metavar="TEXT", help="only cases whose name contains TEXT"
    )
    types.add_shape(parser, types.sizes)
    parser.add_argument(
        "--op",
        choices=choices.OPERATIONS,
        help="what to compute from a shape: gemm; dual: two B, SwiGLU; w4a16: bfloat16 a (default gemm)",
    )
    types.add_formats(parser, "of the operands")
    parser.add_argument("--out", choices=choices.RESULTS, help="format of C for a shape (default fp16)")
    parser.add_argument(
        "--target", metavar="GPU", help="default: the GPU of this machine if known, else B200"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print why each grouped case's config was chosen, and measure nothing",
    )
    parser.add_argument("--like-harness", action="store_true", help="time as the competition's harness does")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot",
        type=types.output_file,
        metavar="FILE",
        help="also write a bar chart (needs the extra `plot`)",
    )
    parser.add_argument(
        "--save", action="store_true", help="also write the page of the target into bench/results"
    )
    parser.add_argument(
        "--jobs",
        type=types.positive,
        help="number of processes that model or compile (default 1)",
    )
    parser.add_argument(
        "--predict",
        type=types.output_file,
        metavar="FILE",
        help="write modelled times of calls and the commit",
    )
    parser.add_argument(
        "--recordings",
        type=types.output_folder,
        metavar="FOLDER",
        help="with --predict: store the emulator's records of each call, and model from stored records",
    )
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="measure the predicted calls on the GPU of this machine"
    )
    parser.add_argument(
        "--results",
        type=types.output_file,
        metavar="FILE",
        help="store every time as soon as it is known, and continue from stored times",
    )
    parser.add_argument(
        "--tokens",
        type=types.positives,
        metavar="T,T",
        help="for ep: tokens of each rank (default 1,8,64,512,2048,8192)",
    )
    parser.add_argument("--ranks", type=types.positive, help="for ep: number of GPUs (default 2)")
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("BEFORE", "AFTER"),
        help="two results of --json: print ratios with spreads; the exit code is 1 if a case is slower",
    )
    parser.add_argument(
        "--html",
        type=types.output_file,
        metavar="FILE",
        help="write a page of all committed results, and measure nothing",
    )
    parser.set_defaults(run=lazily("bench"))
