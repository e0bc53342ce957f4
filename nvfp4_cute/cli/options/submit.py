"""Options of `nvfp4-cute submit`."""

from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute submit submission.py --dry-run                 print popcorn-cli's command
  nvfp4-cute submit submission.py --mode test
  nvfp4-cute submit submission.py --mode benchmark --repeat 5    with statistics of five runs
  nvfp4-cute submit submission.py --mode leaderboard        asks first; a test and a benchmark must pass before it

Needs popcorn-cli and its registration, which this command does not read. Before it submits, it checks the server's rules,
the list of open leaderboards and their GPUs, and KernelGuard if that is installed. If the server limits the rate of
submissions, it waits and tries again. It appends the file's hash and times to
~/.local/share/nvfp4_cute/submissions.jsonl.
"""


def add_parser(verbs: Verbs) -> None:
    """Adds `submit` and its options."""
    text = "Submit a file with popcorn-cli, and keep a history of the results."
    parser = add_verb(verbs, "submit", text, EXAMPLES)
    parser.add_argument("submission", type=Path, help="a Python file")
    parser.add_argument("--leaderboard", help="default: that of the file's header")
    parser.add_argument("--gpu", help="default: that of the file's header")
    parser.add_argument("--mode", choices=choices.MODES, default="test", help="default %(default)s")
    parser.add_argument(
        "--repeat", type=types.positive, default=1, metavar="N", help="submit N times, and print statistics"
    )
    parser.add_argument(
        "--ungated", action="store_true", help="skip the test and the benchmark before a leaderboard run"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    parser.add_argument("--force", action="store_true", help="submit even to a closed leaderboard")
    parser.add_argument("--yes", action="store_true", help="do not ask before a ranked run")
    parser.add_argument("--history", type=Path, metavar="FILE", help="file of the history, JSON lines")
    parser.set_defaults(run=lazily("submit"))
