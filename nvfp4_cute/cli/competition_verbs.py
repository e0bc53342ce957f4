"""Arguments of `nvfp4-cute export | eval | submit`. Verbs are imported when they run."""

import argparse
from pathlib import Path

from nvfp4_cute.cli import argument_types as types

MODES = ("test", "benchmark", "leaderboard", "profile")
FORMATS = ("gpumode", "pygpubench", "kernelbench")
DEVICES = ("auto", "cuda", "emulator")
EXPORT_EXAMPLES = """\
examples:
  nvfp4-cute export nvfp4_group_gemm                        writes submission.py
  nvfp4-cute export nvfp4_group_gemm --map lines.tsv        also where every line comes from
  nvfp4-cute export nvfp4_gemm --torch -o torch.py          torch's own product, to compare with
  nvfp4-cute export nvfp4_gemm --format pygpubench          for another harness, with what it needs beside it
  nvfp4-cute export nvfp4_group_gemm --gpu NVIDIA --config t128x128x256_s5a2

The file is assembled from kernels/ and from the problem's submission.py: definitions that are needed, comments kept. It
imports cutlass, torch and Python's library, and runs on nvidia-cutlass-dsl 4.3.5, 4.5.2 and 4.8.1.
"""
EVAL_EXAMPLES = """\
examples:
  nvfp4-cute eval submission.py                             the test shapes of the problem that its header names
  nvfp4-cute eval submission.py --strict                    and look for answers that are not computed
  nvfp4-cute eval submission.py --mode benchmark --json     times
  nvfp4-cute eval submission.py --mode benchmark --baseline before.json    exit code 1 where a case became slower
  nvfp4-cute eval submission.py --mode profile --case 2     ncu on a GPU; on the emulator what took the modelled time
  nvfp4-cute eval submission.py --harness ~/reference-kernels    the genuine harness, from your checkout
  nvfp4-cute eval other.py --harness ~/reference-kernels --problem some_problem    any problem of the checkout

Runs on the GPU of this machine, or on the emulator, where a shape takes seconds to minutes. There the times are modelled:
those of the submission's own kernels on a B200, without the gaps between launches that a harness times, too.
--strict: inputs of several seeds in shuffled order, each at the addresses of the one before and once more on fresh
copies, C filled with NaN, every output checked in another process and looked at twice, inputs compared, clock and queues
watched, calls timed one by one. Exit code 0: everything was accepted. Where KernelGuard is installed (kernelguard in PATH)
its opinion is printed, too, and a file that it filters is refused as the service refuses it.
"""
SUBMIT_EXAMPLES = """\
examples:
  nvfp4-cute submit submission.py --dry-run                 print popcorn-cli's command
  nvfp4-cute submit submission.py --mode test
  nvfp4-cute submit submission.py --mode benchmark --repeat 5    and what five runs say together
  nvfp4-cute submit submission.py --mode leaderboard        asks first; a test and a benchmark must pass before it

Needs popcorn-cli and its registration, which nothing here reads. Before anything is handed over: the server's rules, its
list of open leaderboards and their GPUs, KernelGuard where it is installed. Where the server limits how often one
submits, it waits and tries again. A history with the file's hash and times is appended
to ~/.local/share/nvfp4_cute/submissions.jsonl.
"""


def add_export(verbs: argparse._SubParsersAction) -> None:
    """`export PROBLEM`."""
    text = "Write a competition problem's kernel as one readable file that its server accepts."
    export = _verb(verbs, "export", "a problem's kernel as a one-file submission", text, EXPORT_EXAMPLES)
    export.add_argument("problem", help="a folder of problems/, for example nvfp4_group_gemm")
    export.add_argument(
        "-o", "--output", type=types.output_file, default=Path("submission.py"), help="default %(default)s"
    )
    export.add_argument("--gpu", help="runner that the header names (default: the problem's first)")
    export.add_argument("--config", metavar="NAME", help="a kernel config for every shape, by name")
    export.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="the harness that the file is for (default %(default)s)",
    )
    export.add_argument("--torch", action="store_true", help="torch's own product instead of our kernel")
    export.add_argument(
        "--map", type=types.output_file, metavar="FILE", help="also write the source of every line"
    )
    export.set_defaults(run=_run_export)


def add_eval(verbs: argparse._SubParsersAction) -> None:
    """`eval FILE`."""
    text = "Try a submission as its server would: rules, import step, then tests or timings in a process of its own."
    parser = _verb(verbs, "eval", "try a submission as its server would", text, EVAL_EXAMPLES)
    parser.add_argument("submission", type=Path, help="a Python file")
    parser.add_argument("--problem", help="default: the leaderboard that the file's header names")
    parser.add_argument("--mode", choices=MODES, default="test", help="default %(default)s")
    parser.add_argument(
        "--device", choices=DEVICES, default="auto", help="default: the GPU here, else emulator"
    )
    parser.add_argument("--strict", action="store_true", help="look for answers that are not computed")
    parser.add_argument(
        "--harness", type=Path, metavar="DIR", help="checkout of gpu-mode/reference-kernels to run"
    )
    parser.add_argument(
        "--task", type=types.input_file, metavar="FILE", help="take the cases from this task.yml"
    )
    parser.add_argument(
        "--case", type=types.whole, metavar="I", help="only this case, counted from 0 (profile: default 0)"
    )
    parser.add_argument(
        "--seed", type=types.whole, help="secret seed, mixed into every case's as the runner does"
    )
    parser.add_argument("--inputs", type=types.positive, metavar="N", help="inputs of a timing (emulator: 1)")
    parser.add_argument(
        "--l2-gib",
        type=float,
        metavar="X",
        help="memory written before a timing; less than the official is not the official timing",
    )
    parser.add_argument(
        "--low-memory",
        action="store_true",
        help="2 inputs a timing and 0.5 GiB written before it, for GPUs too small for the official 62.5 GiB; "
        "not the official timing",
    )
    parser.add_argument(
        "--baseline",
        type=types.input_file,
        metavar="FILE",
        help="compare with what an earlier --json printed",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=5.0,
        metavar="PCT",
        help="how much slower than the baseline fails (default %(default)s)",
    )
    parser.add_argument(
        "--timeout", type=types.positive, metavar="S", help="limit of the mode (emulator: none)"
    )
    parser.add_argument("--ignore-rules", action="store_true", help="run a file that a server would refuse")
    parser.add_argument("--json", action="store_true", help="for machines, times in microseconds")
    parser.set_defaults(run=_run_eval)


def add_submit(verbs: argparse._SubParsersAction) -> None:
    """`submit FILE`."""
    text = "Hand a submission to popcorn-cli and keep a history of what came back."
    submit = _verb(verbs, "submit", "hand a submission to popcorn-cli", text, SUBMIT_EXAMPLES)
    submit.add_argument("submission", type=Path, help="a Python file")
    submit.add_argument("--leaderboard", help="default: what the file's header names")
    submit.add_argument("--gpu", help="default: what the file's header names")
    submit.add_argument("--mode", choices=MODES, default="test", help="default %(default)s")
    submit.add_argument(
        "--repeat", type=types.positive, default=1, metavar="N", help="submit so often, with statistics"
    )
    submit.add_argument(
        "--ungated", action="store_true", help="no test and benchmark before a leaderboard run"
    )
    submit.add_argument("--dry-run", action="store_true", help="only print the commands")
    submit.add_argument("--force", action="store_true", help="submit to a closed leaderboard all the same")
    submit.add_argument("--yes", action="store_true", help="do not ask before a ranked run")
    submit.add_argument("--history", type=Path, metavar="FILE", help="JSON lines")
    submit.set_defaults(run=_run_submit)


def _verb(
    verbs: argparse._SubParsersAction, name: str, summary: str, text: str, examples: str
) -> argparse.ArgumentParser:
    return verbs.add_parser(
        name,
        help=summary,
        description=text,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _run_export(args: argparse.Namespace) -> int:
    from nvfp4_cute.competition import export, formats

    if args.torch and (args.config or args.format != FORMATS[0]):
        raise ValueError("--torch goes without --config and --format: it is a file to compare with")
    return export.run(
        args.problem,
        args.output,
        gpu=args.gpu,
        config=args.config,
        map_path=args.map,
        form=formats.FORMATS[args.format],
        kind=export.TORCHS if args.torch else export.OURS,
    )


def _run_eval(args: argparse.Namespace) -> int:
    from nvfp4_cute.competition import evaluate

    request = evaluate.Request(
        submission=args.submission,
        problem=args.problem,
        mode=args.mode,
        device=args.device,
        seed=args.seed,
        strict=args.strict,
        harness=args.harness,
        task=args.task,
        case=args.case,
        inputs=args.inputs,
        l2_gib=args.l2_gib,
        low_memory=args.low_memory,
        timeout_s=args.timeout,
        ignore_rules=args.ignore_rules,
        baseline=args.baseline,
        tolerance_percent=args.tolerance,
    )
    return evaluate.run(request, as_json=args.json)


def _run_submit(args: argparse.Namespace) -> int:
    from nvfp4_cute.competition import submit

    order = submit.Order(
        path=args.submission,
        leaderboard=args.leaderboard,
        gpu=args.gpu,
        mode=args.mode,
        repeat=args.repeat,
        ungated=args.ungated,
        dry_run=args.dry_run,
        yes=args.yes,
        force=args.force,
        history=args.history,
    )
    return submit.run(order)
