"""Options of `nvfp4-cute emulate`."""

import argparse
from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute emulate gemm.py --mnk 256,256,128             arguments after the script go to the script
  nvfp4-cute emulate --arch sm_120a --stats gemm.py        a GeForce kernel, with a table of its launches
  nvfp4-cute emulate --arch sm_90a --sm-count 4 gemm.py    a Hopper kernel whose persistent grid has 4 CTAs
  nvfp4-cute emulate --timing b200 gemm.py                 the modelled time of every launch, and what it consists of
  nvfp4-cute emulate --trace t.json.gz gemm.py             a timeline of every warp for https://ui.perfetto.dev
  nvfp4-cute emulate --check gemm.py                       find races, unwritten bytes, leaks (slower)
  nvfp4-cute emulate --check=all --sarif found.sarif gemm.py   warnings also fail; findings go to a file for a code host
  nvfp4-cute emulate --mode lazy gemm.py                   every copy and MMA as late as the memory model allows

Choose small sizes: a launch is thousands of times slower than on a GPU. Times that the script measures are host times;
cutlass.testing.benchmark runs a kernel once. The exit code is the script's; 1 if a kernel failed or a hazard is an error;
3 if the script succeeded and --check=all found warnings (--check prints them); 130 if it was interrupted. For a test
suite: pytest --cute-emulate sm_100a
"""


def add_parser(verbs: Verbs) -> None:
    """Adds `emulate` and its options."""
    text = (
        "Run a CuTe DSL script that expects a GPU, unmodified: torch tensors on cuda, cute.compile, launches, its own "
        "checks. Every kernel it launches is executed on the emulator."
    )
    parser = add_verb(verbs, "emulate", text, EXAMPLES)
    parser.add_argument(
        "--arch",
        help="the GPU: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_103a, sm_110a, sm_120a, sm_121a, or a product (B300) "
        "(default: the architecture whose instructions the script names, else sm_100a)",
    )
    parser.add_argument(
        "--sm-count",
        type=types.positive,
        metavar="N",
        help="number of SMs (default: that of a GPU of this architecture)",
    )
    for spelling, what in (
        (
            "--check",
            "report hazards: races, missing fences, bytes that nobody wrote, leaks, stores out of bounds",
        ),
        ("--check=errors", "the same"),
        ("--check=all", "also show notes, and let warnings fail: they make the exit code 3"),
    ):
        level = spelling.partition("=")[2] or "errors"
        parser.add_argument(spelling, dest="check", action="store_const", const=level, help=what)
    parser.add_argument(
        "--json",
        type=types.output_file,
        metavar="FILE",
        help="write launches and findings as JSON; - is stdout",
    )
    parser.add_argument(
        "--sarif", type=types.output_file, metavar="FILE", help="write findings as SARIF, for code hosts"
    )
    parser.add_argument(
        "--mode",
        default="eager",
        help="when asynchronous copies and MMAs happen: eager (at issue), lazy (as late as allowed), or random:SEED; "
        "a correct kernel gives one result under all (default %(default)s)",
    )
    parser.add_argument(
        "--timing",
        metavar="GPU",
        help="model the time of every launch on this GPU (b200, rtx5090, h200, ...); its architecture replaces --arch. Results "
        "are still computed. With --check or --mode every launch runs twice",
    )
    parser.add_argument(
        "--trace",
        type=types.output_file,
        metavar="FILE",
        help="write the modelled timeline of all launches for Perfetto (.json or .json.gz), by default on a GPU of the "
        "architecture",
    )
    parser.add_argument(
        "--stats",
        action="store_true",
        help="print tables on stderr afterwards: all launches; registers, stack, shared memory and occupancy of their kernels; "
        "bank conflicts",
    )
    parser.add_argument(
        "--traceback", action="store_true", help="also print the script's traceback if a kernel fails"
    )
    parser.add_argument("script", type=Path, help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=lazily("emulate"))
