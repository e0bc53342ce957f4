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
  nvfp4-cute tune competition --containing group_gemm      cases of the suites of bench

Results are stored with the compiled kernels (NVFP4_CUTE_CACHE_DIR), per GPU product. Every later call of the same problem
without a config uses them: gemm, grouped_gemm and their dual forms, layers, and graphs of torch.compile. If only the
device knows the sizes (ragged, masked), problems are the same if their mean numbers of rows lie within the same power of
two. Results are valid until kernels or CuTe DSL change. Modelled times do not replace measured ones.
For your own operands: nvfp4_cute.tune(grouped_gemm, a, b, offs).
"""


def add_parser(verbs: Verbs) -> None:
    """Adds `tune` and its options."""
    text = (
        "Measure every config of a grouped GEMM on the GPU of this machine, or model it for another GPU. Print all times, each "
        "marked measured or modelled, and let later calls use the fastest config."
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
    parser.add_argument("--dry-run", action="store_true", help="print the times, store nothing")
    parser.set_defaults(run=lazily("tune"))
