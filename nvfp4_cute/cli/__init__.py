"""The command line: `nvfp4-cute demo | check | bench | tune | sol | trace | emulate | export | ... `. Parses, then calls."""

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli import competition_verbs
from nvfp4_cute.errors import CacheError, EmulatorError, UnsupportedTarget

EXAMPLES = """\
examples:
  nvfp4-cute demo                                 the sm_100a kernel on the emulator, every output bit compared
  nvfp4-cute check --backend emulator --count 5   five random problems on the emulator
  nvfp4-cute check --backend cuda --max-m 4096    random problems on the GPU of this machine
  nvfp4-cute bench competition                    time, floor, and peers of the competition's cases
  nvfp4-cute tune --m 16 --n 4096 --k 7168        the fastest config of a problem, kept for later calls
  nvfp4-cute sol --target B200                    the least possible times of the competition's problems
  nvfp4-cute trace nvfp4_group_gemm --case 3      the modelled time of a kernel on a B200, and what takes it
  nvfp4-cute emulate gemm.py --mnk 256,256,128    a CuTe DSL script, unmodified, on a virtual B200
  nvfp4-cute export nvfp4_group_gemm              one readable submission.py for the competition's server
  nvfp4-cute eval submission.py --strict          try a submission as that server would, and more strictly
  nvfp4-cute compile --arch sm_90a --out kernels  ahead of time, for machines where nothing shall be compiled
  nvfp4-cute prove                                what the GPU of this machine does with all of it, as a report
  nvfp4-cute doctor                               what is installed, and what would run where
"""
TRACE_EXAMPLES = """\
examples:
  nvfp4-cute trace nvfp4_group_gemm                        benchmark case 0 on a B200: time, and what takes it
  nvfp4-cute trace nvfp4_group_gemm --case 3 -o t.json.gz  and a timeline for https://ui.perfetto.dev
  nvfp4-cute trace nvfp4_gemv --target h200                another problem and another GPU

Modelled, never measured: the launch is recorded on the emulator, where of clusters that do alike work one is executed, and
replayed on a model of the GPU, whose figures and their sources `nvfp4_cute.gpus.timing_figures` holds. The model's error,
measured on an H200: bench/results/timing_model.md.
"""
EMULATE_EXAMPLES = """\
examples:
  nvfp4-cute emulate gemm.py --mnk 256,256,128             what follows the script belongs to it
  nvfp4-cute emulate --arch sm_120a --stats gemm.py        a GeForce kernel, and a table of its launches
  nvfp4-cute emulate --arch sm_90a --sm-count 4 gemm.py    a Hopper kernel whose persistent grid has 4 CTAs
  nvfp4-cute emulate --timing b200 gemm.py                 the modelled time of every launch, and what takes it
  nvfp4-cute emulate --check gemm.py                       find races, unwritten bytes, leaks (slower)
  nvfp4-cute emulate --check=all --sarif found.sarif gemm.py   warnings fail, too; and a file for a code host
  nvfp4-cute emulate --mode lazy gemm.py                   every copy and MMA as late as the memory model allows

Choose small sizes: a launch is thousands of times slower than on a GPU. Times that the script measures are host times;
cutlass.testing.benchmark runs a kernel once. The exit code is the script's; 1 if a kernel failed or a hazard is an error;
3 if the script ended well and --check=all found warnings (--check shows them). Of a test suite: pytest --cute-emulate sm_100a
"""
SOL_EXAMPLES = """\
examples:
  nvfp4-cute sol                                           the competition's benchmark cases, published beside ours
  nvfp4-cute sol --target rtx5090 --json                   the same on another GPU, with the source of every figure
  nvfp4-cute sol --m 16 --n 4096 --k 7168 --groups 32      one shape: traffic by operand, and what binds
  nvfp4-cute sol --op w4a16 --m 1 --n 4096 --k 4096        fp16 activations, NVFP4 weights
  nvfp4-cute sol --memory --target h200                    what weights occupy in fp16, fp8, and NVFP4

Computed from sizes and from published or measured figures of the GPU; nothing is run, and no GPU is needed.
"""
BENCH_EXAMPLES = """\
examples:
  nvfp4-cute bench                                         everything, on the GPU of this machine if it is known
  nvfp4-cute bench competition --target B200 --plot b.png  the competition's cases, and a picture
  nvfp4-cute bench linear experts --json                   layers of language models, for machines
  nvfp4-cute bench --containing "group_gemm case 0" --like-harness   timed as the competition does
  nvfp4-cute bench competition --explain                   every candidate config's estimate, the chosen one first

suites: competition (GPU MODE's four NVFP4 problems), dense (squares of 128 to 16384), linear (layers at 1 to 128 rows),
experts (DeepSeek-V3, Qwen3-30B-A3B, Mixtral-8x7B; decode and prefill).
Measured on the GPU of this machine beside torch in the same run: CUDA events, cold L2, rotating random inputs, medians.
"""
TUNE_EXAMPLES = """\
examples:
  nvfp4-cute tune --m 16 --n 4096 --k 7168 --groups 8      list form; measured on the GPU of this machine if it is known
  nvfp4-cute tune --m 8,0,200 --n 4096 --k 7168 --form ragged --target B200   sizes on the device; modelled elsewhere
  nvfp4-cute tune --m 64 --n 2048 --k 7168 --op dual --out nvfp4
  nvfp4-cute tune competition --containing group_gemm      the cases of the suites that bench times

What is found is kept with the compiled kernels (NVFP4_CUTE_CACHE_DIR), for one product of GPU, and taken by every later call
of the same problem that leaves the config open: gemm, grouped_gemm and their dual forms, layers, and graphs that
torch.compile makes. Where only the device knows the sizes (ragged, masked), a mean number of rows within the same power
of two is the same problem. It lasts until kernels or CuTe DSL change; measured times are not replaced by modelled ones.
For operands of your own: nvfp4_cute.tune(grouped_gemm, a, b, a_scale, b_scale, ...).
"""
COMPILE_EXAMPLES = """\
examples:
  nvfp4-cute compile --arch sm_100a --groups 2,8 --out kernels   every config that grouped_gemm may choose, and the others
  nvfp4-cute compile grouped_gemm --arch sm_90a --config t128x64x128_s0a1_swap --out kernels
  nvfp4-cute compile gemv quantize --arch sm_120a --dtype float16 --out kernels

No GPU is needed. A kernel that is in the folder already is not compiled again. To use the folder, set
NVFP4_CUTE_CACHE_DIR to it; it may be read-only, and on another machine with the same versions of this package, of CuTe
DSL and of Python (major and minor). What is not in it is compiled. Use only folders whose makers you trust: they hold
native code.
"""
PROVE_EXAMPLES = """\
examples:
  nvfp4-cute prove                                         ten minutes on the GPU of this machine; the report lies here
  nvfp4-cute prove --quick                                 one or two minutes
  nvfp4-cute prove --steps probes constants --out reports  some steps; what was done before is kept
  nvfp4-cute prove --read prove-h200.json                  a report as a page, and as constants of the timing model
  nvfp4-cute prove --emulator sm_120a                      without a GPU: a few problems and configs, and every probe
  nvfp4-cute prove --predict H200                          without a GPU: times as modelled, to be compared later

steps: probes (rules of the silicon that documents leave open, each in a process of its own; what they show decides which
configs are chosen), configs, problems (bit for bit against the reference), constants (what the timing model takes), timed
(cases and a layer of experts beside torch and beside predictions that were made before), host (what calls cost, and a soak).
A run that is interrupted goes on where it was. The report (prove-<gpu>.json, .md, .svg) names no host, no user and no folder:
attach it to an issue.
"""
PROVE_STEPS = ("probes", "configs", "problems", "constants", "timed", "host")
CHECK_BACKENDS = ("cuda", "emulator")
# Named here, too, so that parsing does not load torch; tests compare them with nvfp4_cute.cli.sol and nvfp4_cute.bench.
BENCH_SUITES = ("competition", "dense", "linear", "experts")
OPERATIONS = ("grouped_gemm", "grouped_dual_gemm", "gemv", "few_rows", "w4a16", "quantize")
EVERYWHERE = ("grouped_gemm", "gemv", "quantize")  # what is compiled unless operations are named
ACTIVATIONS = ("silu", "gelu_tanh", "relu2")
WEIGHT_LAYOUTS = ("separate", "interleaved_64_up_first", "interleaved_32_gate_first")
FORMS = ("list", "ragged", "masked", "batched")
DTYPES = ("float16", "bfloat16", "float32")
SOL_PROBLEMS = ("nvfp4_gemv", "nvfp4_gemm", "nvfp4_dual_gemm", "nvfp4_group_gemm")
SOL_OPERATIONS = ("gemm", "dual", "w4a16")
TUNE_OPERATIONS = ("gemm", "dual")
SOL_OUT_FORMATS = ("fp16", "bf16", "fp32", "nvfp4")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: everything asked for holds. 1: a difference, a refusal, or something is missing. 2: no such verb or option.
    """
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except BrokenPipeError:  # whoever read the output, such as `head`, has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CacheError, EmulatorError, UnsupportedTarget, ValueError, OSError) as error:
        print(f"nvfp4-cute {args.verb}: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of every verb; its `run` default is a function of the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="nvfp4-cute",
        description="CuTe DSL kernels for NVFP4 grouped GEMM, on a Blackwell GPU or on the emulator.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=importlib.metadata.version("nvfp4-cute"))
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_demo(verbs)
    _add_check(verbs)
    _add_bench(verbs)
    _add_tune(verbs)
    _add_sol(verbs)
    _add_trace(verbs)
    _add_emulate(verbs)
    competition_verbs.add_export(verbs)
    competition_verbs.add_eval(verbs)
    competition_verbs.add_submit(verbs)
    _add_compile(verbs)
    _add_prove(verbs)
    _add_doctor(verbs)
    return parser


def _add_demo(verbs: argparse._SubParsersAction) -> None:
    text = (
        "Compile the sm_100a grouped GEMM kernel, execute its PTX on the emulator over the test shapes and one "
        "benchmark shape of the nvfp4_group_gemm problem, and compare every output bit with the reference."
    )
    demo = verbs.add_parser(
        "demo", help="run the kernel without a GPU and compare every bit", description=text
    )
    demo.add_argument(
        "--all", action="store_true", help="also the other three benchmark shapes (a few minutes)"
    )
    _add_arch(demo)
    demo.set_defaults(run=_run_demo)


def _add_arch(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--arch", help="the GPU to emulate: an architecture (sm_120a) or a product (RTX 5090); default B200"
    )


def _add_check(verbs: argparse._SubParsersAction) -> None:
    text = (
        "Compute random grouped problems on a backend and compare every output bit with the reference. Operands are "
        "drawn so that fp32 accumulation is exact in any order: a difference of one bit is a defect. A failure prints "
        "the command that repeats it."
    )
    check = verbs.add_parser("check", help="compare random problems with the reference", description=text)
    check.add_argument(
        "--backend", choices=CHECK_BACKENDS, help="default: cuda where the GPU has a kernel, else emulator"
    )
    _add_arch(check)
    check.add_argument(
        "--count", type=types.positive, default=10, help="problems to draw (default %(default)s)"
    )
    check.add_argument(
        "--seed", type=types.whole, default=0, help="seed of the first problem (default %(default)s)"
    )
    check.add_argument(
        "--groups", type=types.positive, default=4, help="groups at most (default %(default)s)"
    )
    check.add_argument(
        "--max-m", type=types.positive, default=300, help="rows at most of a group (default %(default)s)"
    )
    check.add_argument(
        "--max-n", type=types.positive, default=512, help="columns at most (default %(default)s)"
    )
    check.add_argument("--max-k", type=types.positive, default=1024, help="K at most (default %(default)s)")
    check.set_defaults(run=_run_check)


def _add_bench(verbs: argparse._SubParsersAction) -> None:
    text = (
        "Print for every case bytes, operations, speed of light, time, percent of speed of light, TB/s, TFLOP/s, and "
        "the fastest peer."
    )
    bench = verbs.add_parser(
        "bench",
        help="times beside their floors and what others take",
        description=text,
        epilog=BENCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(BENCH_SUITES)} (default: all)")
    bench.add_argument("--containing", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    bench.add_argument("--target", metavar="GPU", help="default: the GPU of this machine if known, else B200")
    bench.add_argument(
        "--explain", action="store_true", help="why each grouped case's config was chosen, and no times"
    )
    bench.add_argument("--like-harness", action="store_true", help="time as the competition's harness does")
    bench.add_argument("--json", action="store_true", help="for machines")
    bench.add_argument(
        "--plot", type=types.output_file, metavar="FILE", help="also write bars (needs the extra `plot`)"
    )
    bench.add_argument(
        "--save", action="store_true", help="also write the page of the target into bench/results"
    )
    bench.set_defaults(run=_run_bench)


def _add_tune(verbs: argparse._SubParsersAction) -> None:
    text = (
        "Time every config that a grouped GEMM may be computed with, on the GPU of this machine, or as modelled for one that is "
        "not there; print all times, each marked measured or modelled, and have later calls take the fastest."
    )
    tune = verbs.add_parser(
        "tune",
        help="the fastest config of a problem, measured or modelled, for later calls",
        description=text,
        epilog=TUNE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tune.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"{', '.join(BENCH_SUITES)}; or give a shape"
    )
    tune.add_argument("--containing", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    tune.add_argument(
        "--m", type=types.sizes, metavar="M[,M...]", help="rows of a group, or of each group; 0 is none"
    )
    tune.add_argument("--n", type=types.positive, help="columns of C")
    tune.add_argument("--k", type=types.positive, help="the dimension that is summed over")
    tune.add_argument("--groups", type=types.positive, help="groups (default: as many as --m lists)")
    tune.add_argument(
        "--op",
        choices=TUNE_OPERATIONS,
        default="gemm",
        help="gemm, or dual: two B, SwiGLU (default %(default)s)",
    )
    tune.add_argument(
        "--form", choices=FORMS, default="list", help="how groups are passed (default %(default)s)"
    )
    tune.add_argument(
        "--out",
        choices=SOL_OUT_FORMATS,
        default="bf16",
        help="format of C (default %(default)s; fp16 counts as bf16)",
    )
    tune.add_argument(
        "--target",
        metavar="GPU",
        help="measured if it is the GPU of this machine, else modelled; default: that GPU if known, else B200",
    )
    tune.add_argument("--dry-run", action="store_true", help="print the times, keep nothing")
    tune.set_defaults(run=_run_tune)


def _add_sol(verbs: argparse._SubParsersAction) -> None:
    text = (
        "Print the speed of light, the least time that moving the bytes and doing the operations takes: of the "
        "competition's benchmark cases, or of one shape. Or print what weights occupy in memory."
    )
    sol = verbs.add_parser(
        "sol",
        help="the least possible time on a GPU, computed",
        description=text,
        epilog=SOL_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sol.add_argument("--target", metavar="GPU", help="default: the GPU of this machine if known, else B200")
    sol.add_argument("--problem", choices=SOL_PROBLEMS, help="only this competition problem")
    sol.add_argument(
        "--m", type=types.positives, metavar="M[,M...]", help="rows of a group, or of each group"
    )
    sol.add_argument("--n", type=types.positive, help="columns of C")
    sol.add_argument("--k", type=types.positive, help="the dimension that is summed over")
    sol.add_argument("--groups", type=types.positive, help="groups (default: as many as --m lists)")
    sol.add_argument(
        "--op",
        choices=SOL_OPERATIONS,
        help="what is computed from --m, --n, --k: gemm, dual (two B, SwiGLU), w4a16 (default gemm)",
    )
    sol.add_argument("--out", choices=SOL_OUT_FORMATS, help="format of C (default fp16)")
    sol.add_argument(
        "--memory", action="store_true", help="what weights occupy: common layers, or --n, --k, --groups"
    )
    sol.add_argument("--json", action="store_true", help="for machines; the source of every figure included")
    sol.add_argument(
        "--plot",
        type=types.output_file,
        metavar="FILE",
        help="also write a roofline picture (needs the extra `plot`)",
    )
    sol.set_defaults(run=_run_sol)


def _add_trace(verbs: argparse._SubParsersAction) -> None:
    text = (
        "Model the time that this package's kernel takes for a benchmark case of a competition problem, print what took "
        "it (the critical path, and every warp role's stalls by cause), and write a timeline: a process for each SM, a row for "
        "each warp, TMA and tensor cores."
    )
    trace = verbs.add_parser(
        "trace",
        help="the modelled time of a kernel, explained, and its timeline",
        description=text,
        epilog=TRACE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    trace.add_argument("problem", choices=SOL_PROBLEMS, help="a competition problem")
    trace.add_argument(
        "--case", type=types.whole, default=0, help="number of the benchmark case (default %(default)s)"
    )
    trace.add_argument("--target", default="B200", metavar="GPU", help="default %(default)s")
    trace.add_argument(
        "-o", "--out", type=types.output_file, metavar="FILE", help="write the timeline (.json or .json.gz)"
    )
    trace.set_defaults(run=_run_trace)


def _add_emulate(verbs: argparse._SubParsersAction) -> None:
    text = (
        "Run a CuTe DSL script that expects a GPU, unmodified: torch tensors on cuda, cute.compile, launches, its own "
        "checks. Every kernel it launches is executed on the emulator."
    )
    emulate = verbs.add_parser(
        "emulate",
        help="run a CuTe DSL script on a virtual GPU",
        description=text,
        epilog=EMULATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    emulate.add_argument(
        "--arch",
        default="sm_100a",
        help="the GPU: sm_90a, sm_100a, sm_103a, sm_110a, sm_120a, sm_121a (default %(default)s)",
    )
    emulate.add_argument(
        "--sm-count", type=types.positive, metavar="N", help="SMs (default: those of a GPU of that arch)"
    )
    for spelling, what in (
        (
            "--check",
            "report hazards: races, missing fences, bytes that nobody wrote, leaks, stores out of bounds",
        ),
        ("--check=errors", "the same"),
        ("--check=all", "show notes, too, and let warnings fail: they make the exit code 3"),
    ):
        level = spelling.partition("=")[2] or "errors"
        emulate.add_argument(spelling, dest="check", action="store_const", const=level, help=what)
    emulate.add_argument(
        "--json",
        type=types.output_file,
        metavar="FILE",
        help="write launches and findings for machines; - is stdout",
    )
    emulate.add_argument(
        "--sarif", type=types.output_file, metavar="FILE", help="write findings as SARIF, for code hosts"
    )
    emulate.add_argument(
        "--mode",
        default="eager",
        help="when asynchronous copies and MMAs happen: eager (at issue), lazy (as late as allowed), or random:SEED; "
        "a correct kernel gives one result under all (default %(default)s)",
    )
    emulate.add_argument(
        "--timing",
        metavar="GPU",
        help="model the time of every launch on this GPU (b200, rtx5090, h200, ...), whose architecture takes the place of "
        "--arch; results are computed as without",
    )
    emulate.add_argument(
        "--stats",
        action="store_true",
        help="afterwards, tables of all launches and of bank conflicts on stderr",
    )
    emulate.add_argument(
        "--traceback", action="store_true", help="also show where in the script a kernel failure surfaced"
    )
    emulate.add_argument("script", type=Path, help="a Python file")
    emulate.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    emulate.set_defaults(run=_run_emulate)


def _add_compile(verbs: argparse._SubParsersAction) -> None:
    text = "Compile kernels ahead of time, in parallel processes, into a folder that programs load them from."
    verb = verbs.add_parser(
        "compile",
        help="kernels ahead of time, into a folder",
        description=text,
        epilog=COMPILE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument(
        "operations",
        nargs="*",
        metavar="OPERATION",
        help=f"{', '.join(OPERATIONS)} (default: {', '.join(EVERYWHERE)})",
    )
    verb.add_argument(
        "--arch", action="append", required=True, help="such as sm_100a; repeat it for more than one"
    )
    verb.add_argument("--out", type=Path, required=True, metavar="DIR", help="made where it is missing")
    verb.add_argument(
        "--groups",
        type=types.positives,
        default=(1,),
        metavar="G[,G...]",
        help="group counts of GEMMs in list form, each a kernel of its own (default 1)",
    )
    verb.add_argument(
        "--config",
        action="append",
        metavar="NAME",
        help="config of GEMMs by name; repeat it (default: all that they may choose by themselves)",
    )
    verb.add_argument(
        "--form", choices=FORMS, default="list", help="of grouped and dual GEMMs (default %(default)s)"
    )
    verb.add_argument(
        "--dtype",
        choices=(*DTYPES, "nvfp4"),
        default="bfloat16",
        help="of outputs, and of what is quantized; nvfp4: of GEMMs (default %(default)s)",
    )
    verb.add_argument(
        "--activation", choices=ACTIVATIONS, default="silu", help="of the dual GEMM (default %(default)s)"
    )
    verb.add_argument(
        "--weight-layout",
        choices=WEIGHT_LAYOUTS,
        default="separate",
        help="of the dual GEMM; concatenated weights are separate for a kernel (default %(default)s)",
    )
    verb.add_argument("--limit", action="store_true", help="dual GEMMs that cut their products to a limit")
    verb.add_argument("--alpha", action="store_true", help="products that read a factor")
    verb.add_argument(
        "--jobs", type=types.positive, metavar="N", help="processes (default: one a core, at most 8)"
    )
    verb.set_defaults(run=_run_compile)


def _add_prove(verbs: argparse._SubParsersAction) -> None:
    text = "Prove on the GPU of this machine what can be proven, and write a report that says what was found."
    prove = verbs.add_parser(
        "prove",
        help="a report of what a GPU does: correctness, probes, constants, times",
        description=text,
        epilog=PROVE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prove.add_argument("--quick", action="store_true", help="one or two minutes instead of ten")
    prove.add_argument(
        "--steps",
        nargs="+",
        choices=PROVE_STEPS,
        default=(),
        metavar="STEP",
        help="only these (default: all)",
    )
    prove.add_argument("--fresh", action="store_true", help="do again what an earlier run did")
    prove.add_argument("--out", type=Path, metavar="DIR", help="folder of the report (default: here)")
    prove.add_argument(
        "--emulator", metavar="GPU", help="emulate this GPU or architecture instead of using one"
    )
    prove.add_argument(
        "--workers", type=types.whole, metavar="N", help="processes at a time; 0: none beside this one"
    )
    prove.add_argument(
        "--predict", metavar="GPU", help="predict the times of a GPU, into bench/results, and end"
    )
    prove.add_argument(
        "--read", type=Path, metavar="FILE", help="print a report as a page and as constants, and end"
    )
    prove.set_defaults(run=_run_prove)


def _add_doctor(verbs: argparse._SubParsersAction) -> None:
    text = "Print versions, GPUs, the emulator's launch shim, what would run where and why. Exit code 1: no kernel can run."
    doctor = verbs.add_parser("doctor", help="what is installed, and what would run where", description=text)
    doctor.set_defaults(run=_run_doctor)


# Verbs are imported when they run: `--help` and `--version` answer without loading torch.


def _run_demo(args: argparse.Namespace) -> int:
    from nvfp4_cute.cli import demo
    from nvfp4_cute.gpus import targets

    target = targets.lookup(args.arch) if args.arch else targets.B200
    return demo.run(demo.cases(all_benchmarks=args.all), target)


def _run_check(args: argparse.Namespace) -> int:
    from nvfp4_cute.cli import check

    limits = check.Limits(groups=args.groups, max_m=args.max_m, max_n=args.max_n, max_k=args.max_k)
    backend = args.backend
    if args.arch:
        if backend == "cuda":
            raise ValueError("--arch chooses the GPU to emulate: leave it out with --backend cuda")
        backend = f"emulator:{args.arch}"
    return check.run(backend, limits, seed=args.seed, count=args.count)


def _run_bench(args: argparse.Namespace) -> int:
    from nvfp4_cute.bench import command

    if args.explain:
        for option in ("like_harness", "json", "plot", "save"):
            if getattr(args, option):
                raise ValueError(f"--explain prints no times: leave out --{option.replace('_', '-')}")
        return command.explain(tuple(args.suites), containing=args.containing, target_name=args.target)
    return command.run(
        tuple(args.suites),
        containing=args.containing,
        target_name=args.target,
        like_harness=args.like_harness,
        as_json=args.json,
        plot=args.plot,
        save=args.save,
    )


def _run_tune(args: argparse.Namespace) -> int:
    from nvfp4_cute.cli import tune_verb

    if args.m and args.n and args.k and not args.suites and not args.containing:
        wanted = [tune_verb.of_shape(args.m, args.n, args.k, args.groups, args.op, args.form, args.out)]
    elif args.m or args.n or args.k or args.groups or not (args.suites or args.containing):
        raise ValueError("name a suite (and --containing), or give a shape: --m, --n, and --k together")
    else:
        wanted = tune_verb.of_suites(tuple(args.suites), args.containing)
    return tune_verb.run(wanted, target_name=args.target, keep=not args.dry_run)


def _run_sol(args: argparse.Namespace) -> int:
    from nvfp4_cute.cli import sol

    if args.memory:
        return sol.run_memory(args.target, matrices=_sol_matrices(args), as_json=args.json)
    shape = None
    if args.m and args.n and args.k and not args.problem:
        groups = args.groups or len(args.m)
        shape = sol.Shape(args.m, args.n, args.k, groups, args.op or "gemm", args.out or "fp16")
    elif args.m or args.n or args.k or args.groups or args.op or args.out:
        raise ValueError("a shape takes --m, --n, and --k together, and no --problem")
    return sol.run(args.target, problem=args.problem, shape=shape, as_json=args.json, plot=args.plot)


def _sol_matrices(args: argparse.Namespace) -> tuple[int, int, int] | None:
    """(count, n, k) of --memory, or None for the catalogue. Raises ValueError for what is not about weights."""
    if args.problem or args.m or args.op or args.out or args.plot:
        raise ValueError("--memory is about weights: it takes --n, --k, --groups, --target, and --json")
    if args.n and args.k:
        return args.groups or 1, args.n, args.k
    if args.n or args.k or args.groups:
        raise ValueError("--memory takes --n and --k together, and --groups with them")
    return None


def _run_trace(args: argparse.Namespace) -> int:
    from nvfp4_cute.cli import trace

    return trace.run(args.problem, args.case, target_name=args.target, out=args.out)


def _run_emulate(args: argparse.Namespace) -> int:
    from nvfp4_cute.cli import emulate

    return emulate.run(
        args.script,
        args.arguments,
        arch=args.arch,
        sm_count=args.sm_count,
        mode=args.mode,
        check=args.check,
        timing=args.timing,
        stats=args.stats,
        traceback=args.traceback,
        json_file=args.json,
        sarif_file=args.sarif,
    )


def _run_compile(args: argparse.Namespace) -> int:
    import torch

    from nvfp4_cute.cli import precompile
    from nvfp4_cute.planning.config import KernelConfig

    configs = [KernelConfig.from_name(name) for name in args.config] if args.config else None
    wanted = [
        key
        for arch in args.arch
        for key in precompile.keys(
            args.operations or EVERYWHERE,
            arch,
            groups=args.groups,
            configs=configs,
            form=args.form,
            activation=args.activation,
            dtype=args.dtype if args.dtype == "nvfp4" else getattr(torch, args.dtype),
            has_alpha=args.alpha,
            weight_layout=args.weight_layout,
            has_limit=args.limit,
        )
    ]
    return precompile.run(wanted, args.out, args.jobs)


def _run_prove(args: argparse.Namespace) -> int:
    if args.read:
        from nvfp4_cute.prove import command

        return command.read(args.read, args.out)
    if args.predict:
        from nvfp4_cute.prove import predictions

        return predictions.run(args.predict)
    from nvfp4_cute.prove import command

    return command.run(
        steps=args.steps,
        quick=args.quick,
        fresh=args.fresh,
        emulator=args.emulator,
        out=args.out,
        workers=args.workers,
    )


def _run_doctor(args: argparse.Namespace) -> int:
    from nvfp4_cute.cli import doctor

    return doctor.run()
