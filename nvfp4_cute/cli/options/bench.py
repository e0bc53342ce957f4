"""Options of `nvfp4-cute bench`."""

import argparse
from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute bench                                         everything, on the GPU of this machine if it is known
  nvfp4-cute bench competition --target B200 --plot b.png  the competition's cases, and a picture
  nvfp4-cute bench linear experts --json                   layers of language models, for machines
  nvfp4-cute bench dense --formats mxfp8_e4m3,mxfp4        the same sizes, operands of other formats
  nvfp4-cute bench --m 16 --n 4096 --k 7168 --groups 8     a shape of one's own
  nvfp4-cute bench --m 64 --n 2048 --k 7168 --op dual --out mxfp8_e4m3   results quantized for the next product
  nvfp4-cute bench --containing "group_gemm case 0" --like-harness   timed as the competition does
  nvfp4-cute bench --compare before.json after.json        ratios with their spreads, of two results of --json
  nvfp4-cute bench --html times.html                       all committed results on one page for a browser
  nvfp4-cute bench competition --explain                   every candidate config's estimate, the chosen one first
  nvfp4-cute bench --target GB10 --jobs 8 --results g.json times that take long to model, several at once, and kept
  nvfp4-cute bench layers --target GB10 --jobs 8           whole layers as their users call them, modelled
  nvfp4-cute bench ep --tokens 1,64,512 --plot ep.png      a layer of experts over two GPUs, phase by phase
  nvfp4-cute bench --predict h100.json --target H100       calls that were not measured, modelled; and on that GPU:
  nvfp4-cute bench --against h100.json                     measured, and compared with what was predicted

suites: competition (GPU MODE's four NVFP4 problems), dense (squares of 128 to 16384), linear (layers at 1 to 128 rows),
experts (DeepSeek-V3, Qwen3-30B-A3B, Mixtral-8x7B; decode and prefill); and by itself layers (route + MoENVFP4, QuantizedLinear),
modelled as chains of launches, and ep (layers of experts over the GPUs of this machine, measured).
Measured layers of experts on one GPU: python -m nvfp4_cute.bench.moe.
Measured on the GPU of this machine beside torch in the same run: CUDA events, cold L2, rotating random inputs, medians.
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
        "-h", "--help", action=_Help, nargs=0, help="show this help message, of a suite its own, and exit"
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
        help="of a shape: gemm; dual: two B, SwiGLU; w4a16: bfloat16 a (default gemm)",
    )
    types.add_formats(parser, "of the operands")
    parser.add_argument("--out", choices=choices.RESULTS, help="format of C of a shape (default fp16)")
    parser.add_argument(
        "--target", metavar="GPU", help="default: the GPU of this machine if known, else B200"
    )
    parser.add_argument(
        "--explain", action="store_true", help="why each grouped case's config was chosen, and no times"
    )
    parser.add_argument("--like-harness", action="store_true", help="time as the competition's harness does")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument(
        "--plot", type=types.output_file, metavar="FILE", help="also write bars (needs the extra `plot`)"
    )
    parser.add_argument(
        "--save", action="store_true", help="also write the page of the target into bench/results"
    )
    parser.add_argument(
        "--jobs",
        type=types.positive,
        help="processes that model, or compile (default 1)",
    )
    parser.add_argument(
        "--predict",
        type=types.output_file,
        metavar="FILE",
        help="write modelled times of calls, with the commit",
    )
    parser.add_argument(
        "--recordings",
        type=types.output_folder,
        metavar="FOLDER",
        help="with --predict: keep what the emulator records of each call, and model it again from there",
    )
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="measure what was predicted on the GPU of this machine"
    )
    parser.add_argument(
        "--results",
        type=types.output_file,
        metavar="FILE",
        help="keep each modelled time, or that of ep, and go on from there; what --against measured",
    )
    parser.add_argument(
        "--tokens",
        type=types.positives,
        metavar="T,T",
        help="of ep: of each rank (default 1,8,64,512,2048,8192)",
    )
    parser.add_argument("--ranks", type=types.positive, help="of ep: GPUs (default 2)")
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("BEFORE", "AFTER"),
        help="two results of --json: ratios with spreads; exit code 1 where a case is slower",
    )
    parser.add_argument(
        "--html",
        type=types.output_file,
        metavar="FILE",
        help="write a page of all committed results, time nothing",
    )
    parser.set_defaults(run=lazily("bench"))
