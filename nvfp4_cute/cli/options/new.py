"""Options of `nvfp4-cute new`."""

from pathlib import Path

from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute new elementwise scale          spec.py, reference.py, kernel.py and test_kernel.py, small and correct
  nvfp4-cute eval scale                     evaluate it on the GPU here or on the emulator
  nvfp4-cute export scale -o handed-in      write it for SOL-ExecBench and FlashInfer-Bench
  nvfp4-cute new nvfp4_gemv my_gemv         start from a kernel of this project, in one file
"""


def add_parser(verbs: Verbs) -> None:
    """Adds `new` and its options."""
    text = "Write a new problem that runs: its definition, a reference, a kernel, and a test."
    parser = add_verb(verbs, "new", text, EXAMPLES)
    parser.add_argument("kind", metavar="KIND", help=f"what to start from: {', '.join(choices.KINDS)}")
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder to write")
    parser.set_defaults(run=lazily("new"))
