"""`nvfp4-cute bench`: times of cases beside their floors and what others take."""

import argparse
import tempfile
from pathlib import Path

from nvfp4_cute.bench import command, compare, gallery
from nvfp4_cute.bench.cases import OPERATIONS, RESULT_DTYPES, SUITES, Case, select, shape_case
from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli import tune
from nvfp4_cute.cli.verbs import Verbs, add_verb
from nvfp4_cute.formats.block_format import NVFP4_PAIR
from nvfp4_cute.gpus import targets

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
experts (DeepSeek-V3, Qwen3-30B-A3B, Mixtral-8x7B; decode and prefill); and by itself layers (route + MoENVFP4, LinearNVFP4),
modelled as chains of launches, and ep (layers of experts over the GPUs of this machine, measured).
Measured layers of experts on one GPU: python -m nvfp4_cute.bench.moe.
Measured on the GPU of this machine beside torch in the same run: CUDA events, cold L2, rotating random inputs, medians.
"""

# Of suites that are measured or modelled by themselves, and of all others: options that say something there.
OPTIONS = {
    "layers": ("target", "containing", "jobs", "results", "json", "save"),
    "ep": ("containing", "tokens", "ranks", "results", "json", "plot", "save"),
}
# What models or measures, and says nothing where committed or given results are shown.
TIMING_OPTIONS = (
    "suites", "containing", "target", "explain", "like_harness", "json", "save", "jobs", "results", "tokens", "ranks", "predict",
    "against", "recordings", "formats", "m", "n", "k", "groups", "op", "out",
)  # fmt: skip
OTHER_OPTIONS = ("containing", "formats", "target", "explain", "like_harness", "json", "plot", "save")
SHAPE_OPTIONS = ("m", "n", "k", "groups", "op", "out")


class _Help(argparse.Action):
    """`bench SUITE --help`: that suite's options and examples; `bench --help`: all."""

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
    """Add the verb and its options."""
    text = (
        "Print for every case bytes, operations, speed of light, time, percent of speed of light, TB/s, TFLOP/s, and "
        "the fastest peer."
    )
    parser = add_verb(verbs, "bench", text, EXAMPLES, add_help=False)
    parser.add_argument(
        "-h", "--help", action=_Help, nargs=0, help="show this help message, of a suite its own, and exit"
    )
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)} (default: all); or layers, or ep"
    )
    parser.add_argument(
        "--containing", default="", metavar="TEXT", help="only cases whose name contains TEXT"
    )
    types.add_shape(parser, types.sizes)
    parser.add_argument(
        "--op",
        choices=tuple(OPERATIONS),
        help="of a shape: gemm; dual: two B, SwiGLU; w4a16: bfloat16 a (default gemm)",
    )
    types.add_formats(parser, "of the operands")
    parser.add_argument("--out", choices=tuple(RESULT_DTYPES), help="format of C of a shape (default fp16)")
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the chosen cases' times, or why their configs were chosen; return 0."""
    options: tuple[str, ...]
    if args.compare:
        options = (*TIMING_OPTIONS, "html")
        types.refuse_given(args, options, lambda name: f"--compare reads two results: leave out {name}")
        return compare.run(args.compare, args.plot)
    if args.html:
        options = (*TIMING_OPTIONS, "plot")
        types.refuse_given(args, options, lambda name: f"--html shows committed results: leave out {name}")
        return gallery.run(args.html)
    if args.predict or args.against:
        return _blind(args)
    types.refuse_given(
        args, ("recordings",), lambda name: f"--{name} keeps what --predict records: pass --predict FILE, too"
    )
    if "ep" in args.suites:
        return _over_ranks(args)
    types.refuse_given(
        args, ("tokens", "ranks"), lambda name: f"--{name} is of ep: name that suite, or leave it out"
    )
    if "layers" in args.suites:
        return _layers(args)
    if args.explain:
        options = ("like_harness", "json", "plot", "save", "jobs", "results")
        types.refuse_given(args, options, lambda name: f"--explain prints no times: leave out --{name}")
        return command.explain(_chosen(args), target_name=args.target)
    if args.save:
        of = ("formats", *SHAPE_OPTIONS)
        types.refuse_given(
            args, of, lambda name: f"--save writes the page of suites in NVFP4: leave out --{name}"
        )
    return command.run(
        _chosen(args),
        command=[*args.suites, *(["--containing", args.containing] if args.containing else [])],
        target_name=args.target,
        like_harness=args.like_harness,
        as_json=args.json,
        plot=args.plot,
        save=args.save,
        jobs=args.jobs,
        results=args.results,
    )


def _chosen(args: argparse.Namespace) -> list[Case]:
    """Cases of suites, or a shape. Raises ValueError for options that do not go together."""
    formats = args.formats or NVFP4_PAIR
    if not any(getattr(args, name) for name in SHAPE_OPTIONS):
        return select(tuple(args.suites), args.containing, formats)
    if args.suites or args.containing or not (args.m and args.n and args.k):
        raise ValueError("a shape takes --m, --n, and --k together, and no suite and no --containing")
    operation, out = args.op or "gemm", args.out or "fp16"
    case = shape_case(args.m, args.n, args.k, args.groups, operation, formats, out)
    if operation == "w4a16":
        if case.out_format is not None or args.like_harness or args.explain:
            raise ValueError(
                "--op w4a16 has results of 16 or 32 bits, and neither --like-harness nor --explain"
            )
        return [case]
    tune.check_call(
        targets.lookup(args.target) if args.target else targets.detect() or targets.B200,
        operation,
        out,
        formats,
    )
    return [case]


def _layers(args: argparse.Namespace) -> int:
    if args.suites != ["layers"]:
        raise ValueError("layers are modelled by themselves: name no other suite beside them")
    options = ("explain", "like_harness", "plot", "formats", *SHAPE_OPTIONS)
    types.refuse_given(args, options, lambda name: f"layers are modelled: leave out {name}")
    from nvfp4_cute.bench import layers, layers_page

    names = [args.target] if args.target else layers.TARGETS
    return layers_page.run(
        [targets.lookup(name) for name in names],
        containing=args.containing,
        jobs=args.jobs or 1,
        results=args.results,
        as_json=args.json,
        save=args.save,
    )


def _over_ranks(args: argparse.Namespace) -> int:
    if args.suites != ["ep"]:
        raise ValueError("ep is measured by itself: name no other suite beside it")
    options = ("target", "explain", "like_harness", "jobs", "formats", *SHAPE_OPTIONS)
    types.refuse_given(args, options, lambda name: f"ep is measured on this machine: leave out --{name}")
    from nvfp4_cute.bench import ep

    models = tuple(name for name in ep.CHOSEN if args.containing in name)
    if not models:
        raise ValueError(f"no model of ep contains {args.containing!r}: there are {', '.join(ep.CHOSEN)}")
    tokens = args.tokens or ep.TOKENS
    with tempfile.TemporaryDirectory() as folder:
        results = args.results or Path(folder) / "ep.json"
        plan = ep.Plan(models, tokens, args.ranks or 2, ep.ROUNDS, results)
        return ep.run(plan, as_json=args.json, plot=args.plot, save=args.save)


def _blind(args: argparse.Namespace) -> int:
    options = (
        "suites", "containing", "explain", "like_harness", "json", "plot", "save", "tokens", "ranks", "formats", *SHAPE_OPTIONS,
    )  # fmt: skip
    why = "predictions are of calls of their own: leave out {}"
    types.refuse_given(args, options, why.format)
    from nvfp4_cute.bench import blind

    if args.against:
        wrong = ("predict", "target", "recordings")
        types.refuse_given(
            args, wrong, lambda name: f"--against measures on the GPU of this machine: leave out {name}"
        )
        return blind.against(args.against, results=args.results, jobs=args.jobs or 1)
    types.refuse_given(args, ("results",), lambda name: f"--predict names the file: leave out {name}")
    target = targets.lookup(args.target or "B200")
    return blind.predict(args.predict, target, jobs=args.jobs or 1, recordings=args.recordings)
