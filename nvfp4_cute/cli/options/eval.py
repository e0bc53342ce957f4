"""Options of `nvfp4-cute eval`."""

from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute eval submission.py                             the test shapes of the problem that its header names
  nvfp4-cute eval submission.py --strict                    also look for answers that are not computed
  nvfp4-cute eval submission.py --mode benchmark --json     times
  nvfp4-cute eval submission.py --mode profile --case 2     a profile of the modelled time, on the emulator
  nvfp4-cute eval submission.py --harness ~/reference-kernels    the original harness, from your checkout
  nvfp4-cute eval gemm --mode benchmark                     a folder of FlashInfer-Bench or SOL-ExecBench, with its score
  nvfp4-cute eval gemm --solution other.json --device cpu   another solution of the folder, on the CPU
  nvfp4-cute eval other.py --harness ~/reference-kernels --problem some_problem    any problem of the checkout

Runs on the GPU of this machine, or on the emulator, where a shape takes seconds to minutes. Times of the emulator are
modelled for the submission's own kernels on a B200, without the gaps between launches that a harness also times.
--strict passes inputs of several seeds in shuffled order, each at the addresses of the previous one and again as fresh
copies. C is filled with NaN. Another process checks every output twice, inputs are compared, clock and queues are watched,
and calls are timed one by one. Exit code 0: everything was accepted. If KernelGuard is installed (kernelguard in PATH),
its verdict is printed, and a file that it filters is refused, as the service refuses it.
A folder contains definition.json, workload.jsonl and solution.json, or spec.py, reference.py and kernel.py. Its score is
1 / (1 + (t - SOL) / (baseline - SOL)), with the reference as baseline.
"""


def add_parser(verbs: Verbs) -> None:
    """Adds `eval` and its options."""
    text = "Evaluate a submission as its server would: rules, import step, then tests or timings in a separate process."
    parser = add_verb(verbs, "eval", text, EXAMPLES)
    parser.add_argument("submission", type=Path, help="a Python file, or a folder")
    parser.add_argument("--problem", help="problem (default: the leaderboard in the file's header)")
    parser.add_argument("--mode", choices=choices.MODES, default="test", help="default %(default)s")
    parser.add_argument(
        "--device",
        choices=choices.TRACE_DEVICES,
        default="auto",
        help="default: the GPU here if there is one, else emulator; cpu is for folders",
    )
    parser.add_argument(
        "--strict", action="store_true", help="look for answers that the submission does not compute"
    )
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
        "--seed",
        type=types.whole,
        help="secret seed that is mixed into every case's seed, as the runner does",
    )
    parser.add_argument(
        "--inputs", type=types.positive, metavar="N", help="number of inputs per timing (emulator: 1)"
    )
    parser.add_argument(
        "--l2-gib",
        type=float,
        metavar="X",
        help="GiB of memory written before a timing; below the official value it is not the official timing",
    )
    parser.add_argument(
        "--low-memory",
        action="store_true",
        help="2 inputs per timing, and 0.5 GiB of memory written before it, for GPUs too small for the official 62.5 GiB; "
        "not the official timing",
    )
    parser.add_argument(
        "--timeout",
        type=types.positive,
        metavar="S",
        help="time limit in seconds (default: the mode's; emulator: none)",
    )
    parser.add_argument(
        "--solution", type=types.input_file, metavar="FILE", help="for a folder: the solution to evaluate"
    )
    parser.add_argument(
        "--rules",
        choices=choices.TRACE_RULES,
        help="for a folder: whose rules (default: those of its author)",
    )
    parser.add_argument(
        "--rounds", type=types.positive, metavar="N", help="for a folder: number of inputs per workload"
    )
    parser.add_argument(
        "--ignore-rules", action="store_true", help="also run a file that the server would refuse"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with times in microseconds")
    parser.set_defaults(run=lazily("eval"))
