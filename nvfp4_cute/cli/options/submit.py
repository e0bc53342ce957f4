"""Options of `nvfp4-cute submit`."""

from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
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


def add_parser(verbs: Verbs) -> None:
    """Adds `submit` and its options."""
    text = "Hand a submission to popcorn-cli and keep a history of what came back."
    parser = add_verb(verbs, "submit", text, EXAMPLES)
    parser.add_argument("submission", type=Path, help="a Python file")
    parser.add_argument("--leaderboard", help="default: what the file's header names")
    parser.add_argument("--gpu", help="default: what the file's header names")
    parser.add_argument("--mode", choices=choices.MODES, default="test", help="default %(default)s")
    parser.add_argument(
        "--repeat", type=types.positive, default=1, metavar="N", help="submit so often, with statistics"
    )
    parser.add_argument(
        "--ungated", action="store_true", help="no test and benchmark before a leaderboard run"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    parser.add_argument("--force", action="store_true", help="submit to a closed leaderboard all the same")
    parser.add_argument("--yes", action="store_true", help="do not ask before a ranked run")
    parser.add_argument("--history", type=Path, metavar="FILE", help="JSON lines")
    parser.set_defaults(run=lazily("submit"))
