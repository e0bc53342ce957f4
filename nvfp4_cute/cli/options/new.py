"""Options of `nvfp4-cute new`."""

from pathlib import Path

from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute new elementwise scale          spec.py, reference.py, kernel.py and test_kernel.py, small and right
  nvfp4-cute eval scale                     on the GPU here or on the emulator
  nvfp4-cute export scale -o handed-in      for SOL-ExecBench and FlashInfer-Bench
  nvfp4-cute new nvfp4_gemv my_gemv         begin with a kernel of this project, in one file
"""


def add_parser(verbs: Verbs) -> None:
    """Adds `new` and its options."""
    text = "Write a problem that runs: what is computed, the right answer, a kernel, and a test."
    parser = add_verb(verbs, "new", text, EXAMPLES)
    parser.add_argument("kind", metavar="KIND", help=f"what to begin with: {', '.join(choices.KINDS)}")
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder to write")
    parser.set_defaults(run=lazily("new"))
