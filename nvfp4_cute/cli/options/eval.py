"""Options of `nvfp4-cute eval`."""

from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute eval submission.py                             the test shapes of the problem that its header names
  nvfp4-cute eval submission.py --strict                    and look for answers that are not computed
  nvfp4-cute eval submission.py --mode benchmark --json     times
  nvfp4-cute eval submission.py --mode profile --case 2     what took the modelled time, on the emulator
  nvfp4-cute eval submission.py --harness ~/reference-kernels    the genuine harness, from your checkout
  nvfp4-cute eval gemm --mode benchmark                     a folder of FlashInfer-Bench or SOL-ExecBench, with its score
  nvfp4-cute eval gemm --solution other.json --device cpu   another solution of it, on the CPU
  nvfp4-cute eval other.py --harness ~/reference-kernels --problem some_problem    any problem of the checkout

Runs on the GPU of this machine, or on the emulator, where a shape takes seconds to minutes. There the times are modelled:
those of the submission's own kernels on a B200, without the gaps between launches that a harness times, too.
--strict: inputs of several seeds in shuffled order, each at the addresses of the one before and once more on fresh
copies, C filled with NaN, every output checked in another process and looked at twice, inputs compared, clock and queues
watched, calls timed one by one. Exit code 0: everything was accepted. Where KernelGuard is installed (kernelguard in PATH)
its opinion is printed, too, and a file that it filters is refused as the service refuses it.
A folder holds definition.json, workload.jsonl and solution.json, or spec.py, reference.py and kernel.py. Its score is
1 / (1 + (t - SOL) / (baseline - SOL)), with the reference as baseline.
"""


def add_parser(verbs: Verbs) -> None:
    """Adds `eval` and its options."""
    text = "Try a submission as its server would: rules, import step, then tests or timings in a process of its own."
    parser = add_verb(verbs, "eval", text, EXAMPLES)
    parser.add_argument("submission", type=Path, help="a Python file, or a folder")
    parser.add_argument("--problem", help="default: the leaderboard that the file's header names")
    parser.add_argument("--mode", choices=choices.MODES, default="test", help="default %(default)s")
    parser.add_argument(
        "--device",
        choices=choices.TRACE_DEVICES,
        default="auto",
        help="default: the GPU here, else emulator; cpu is for folders",
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
        "--timeout", type=types.positive, metavar="S", help="limit of the mode (emulator: none)"
    )
    parser.add_argument(
        "--solution", type=types.input_file, metavar="FILE", help="of a folder: this solution"
    )
    parser.add_argument("--rules", choices=choices.TRACE_RULES, help="of a folder (default: of who wrote it)")
    parser.add_argument(
        "--rounds", type=types.positive, metavar="N", help="of a folder: inputs of each workload"
    )
    parser.add_argument("--ignore-rules", action="store_true", help="run a file that a server would refuse")
    parser.add_argument("--json", action="store_true", help="for machines, times in microseconds")
    parser.set_defaults(run=lazily("eval"))
