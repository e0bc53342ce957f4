"""Options of `nvfp4-cute tune`."""

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute tune --m 16 --n 4096 --k 7168 --groups 8      list form; measured on the GPU of this machine if it is known
  nvfp4-cute tune --m 8,0,200 --n 4096 --k 7168 --form ragged --target B200   sizes on the device; modelled elsewhere
  nvfp4-cute tune --m 64 --n 2048 --k 7168 --op dual --out nvfp4     or --out mxfp8_e4m3
  nvfp4-cute tune --m 64 --n 2048 --k 7168 --formats fp8_1x128,fp8_128x128   operands of other formats
  nvfp4-cute tune competition --containing group_gemm      the cases of the suites that bench times

What is found is kept with the compiled kernels (NVFP4_CUTE_CACHE_DIR), for one product of GPU, and taken by every later call
of the same problem that leaves the config open: gemm, grouped_gemm and their dual forms, layers, and graphs that
torch.compile makes. Where only the device knows the sizes (ragged, masked), a mean number of rows within the same power
of two is the same problem. It lasts until kernels or CuTe DSL change; measured times are not replaced by modelled ones.
For operands of your own: nvfp4_cute.tune(grouped_gemm, a, b, a_scale, b_scale, ...).
"""


def add_parser(verbs: Verbs) -> None:
    """Adds `tune` and its options."""
    text = (
        "Time every config that a grouped GEMM may be computed with, on the GPU of this machine, or as modelled for one that is "
        "not there; print all times, each marked measured or modelled, and have later calls take the fastest."
    )
    parser = add_verb(verbs, "tune", text, EXAMPLES)
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"{', '.join(choices.SUITES)}; or give a shape"
    )
    parser.add_argument(
        "--containing", default="", metavar="TEXT", help="only cases whose name contains TEXT"
    )
    types.add_shape(parser, types.sizes)
    types.add_formats(parser, "of the operands", "nvfp4")
    parser.add_argument(
        "--op",
        choices=[name for name in choices.OPERATIONS if name != "w4a16"],
        default="gemm",
        help="gemm, or dual: two B, SwiGLU (default %(default)s)",
    )
    parser.add_argument(
        "--form", choices=choices.FORMS, default="list", help="how groups are passed (default %(default)s)"
    )
    parser.add_argument(
        "--out",
        choices=choices.RESULTS,
        default="bf16",
        help="format of C (default %(default)s; fp16 counts as bf16)",
    )
    parser.add_argument(
        "--target",
        metavar="GPU",
        help="measured if it is the GPU of this machine, else modelled; default: that GPU if known, else B200",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the times, keep nothing")
    parser.set_defaults(run=lazily("tune"))
