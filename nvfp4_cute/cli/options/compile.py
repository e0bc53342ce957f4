"""Options of `nvfp4-cute compile`."""

from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

OPERATIONS = ("grouped_gemm", "grouped_dual_gemm", "gemv", "few_rows", "w4a16", "quantize")


# Compiled unless operations are named. OF_FORMATS: operations that write the format named by --dtype.
EVERYWHERE = ("grouped_gemm", "gemv", "quantize")


OF_FORMATS = ("grouped_gemm",)
# For architectures whose products are weight-only.
WEIGHT_ONLY = ("w4a16", "quantize")


FLOATS = ("float16", "bfloat16", "float32")


EXAMPLES = """\
examples:
  nvfp4-cute compile --arch sm_100a --groups 2,8 --out kernels   every config that grouped_gemm may choose, and the others
  nvfp4-cute compile grouped_gemm --arch sm_90a --config t128x64x128_s0a1_swap --out kernels
  nvfp4-cute compile gemv quantize --arch sm_120a --dtype float16 --out kernels
  nvfp4-cute compile --model FOLDER-NVFP4 --arch sm_90a --out kernels    all that layers of a checkpoint take, of any row count

No GPU is needed. A kernel that is in the folder already is not compiled again. To use the folder, set
NVFP4_CUTE_CACHE_DIR to it; it may be read-only, and on another machine with the same versions of this package, of CuTe
DSL and of Python (major and minor). What is not in it is compiled. Use only folders whose makers you trust: they hold
native code.
"""


def add_parser(verbs: Verbs) -> None:
    """Adds `compile` and its options."""
    text = "Compile kernels ahead of time, in parallel processes, into a folder that programs load them from."
    parser = add_verb(verbs, "compile", text, EXAMPLES)
    parser.add_argument(
        "operations",
        nargs="*",
        metavar="OPERATION",
        help=f"{', '.join(OPERATIONS)} (default: {', '.join(EVERYWHERE)}, and of them "
        f"{', '.join(OF_FORMATS)} where --dtype names a format; {' and '.join(WEIGHT_ONLY)} for sm_80 to sm_89)",
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="a checkpoint: what its NVFP4 layers take, of 1 to 8,192 rows; other options do not count",
    )
    parser.add_argument(
        "--arch", action="append", required=True, help="such as sm_100a; repeat it for more than one"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="made where it is missing")
    parser.add_argument(
        "--groups",
        type=types.positives,
        default=(1,),
        metavar="G[,G...]",
        help="group counts of GEMMs in list form, each a kernel of its own (default 1)",
    )
    parser.add_argument(
        "--config",
        action="append",
        metavar="NAME",
        help="config of GEMMs by name; repeat it (default: all that they may choose by themselves)",
    )
    parser.add_argument(
        "--form",
        choices=choices.FORMS,
        default="list",
        help="of grouped and dual GEMMs (default %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=(*FLOATS, *choices.QUANTIZED_RESULTS),
        default="bfloat16",
        help="of outputs, and of what is quantized; names of formats: of GEMMs (default %(default)s)",
    )
    parser.add_argument(
        "--activation",
        choices=choices.ACTIVATIONS,
        default="silu",
        help="of the dual GEMM (default %(default)s)",
    )
    parser.add_argument(
        "--weight-layout",
        choices=choices.WEIGHT_LAYOUTS,
        default="separate",
        help="of the dual GEMM; concatenated weights are separate for a kernel (default %(default)s)",
    )
    types.add_formats(parser, "of the operands of GEMMs", "nvfp4")
    parser.add_argument("--limit", action="store_true", help="dual GEMMs that cut their products to a limit")
    parser.add_argument("--alpha", action="store_true", help="products that read a factor")
    parser.add_argument(
        "--early-weights",
        action="store_true",
        help="GEMMs as layers call them on the sm_100 family: early_weights=True",
    )
    parser.add_argument(
        "--bias",
        choices=FLOATS,
        help="products, not dual ones, that add a number a column of this dtype",
    )
    parser.add_argument(
        "--jobs", type=types.positive, metavar="N", help="processes (default: one a core, at most 8)"
    )
    parser.set_defaults(run=lazily("compile"))
