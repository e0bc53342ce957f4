"""Options of `nvfp4-cute compile`."""

from pathlib import Path

from nvfp4_cute import env
from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

OPERATIONS = ("grouped_gemm", "grouped_dual_gemm", "gemv", "few_rows", "w4a16", "quantize")


# Compiled by default.
EVERYWHERE = ("grouped_gemm", "gemv", "quantize")
# Compiled by default if --dtype names a quantized format: the operations that write one.
OF_FORMATS = ("grouped_gemm",)
# Compiled by default for architectures whose products are weight-only.
WEIGHT_ONLY = ("w4a16", "quantize")

FLOATS = ("float16", "bfloat16", "float32")


EXAMPLES = """\
examples:
  nvfp4-cute compile --arch sm_100a --groups 2,8 --out kernels   all configs that grouped_gemm may choose, and the other defaults
  nvfp4-cute compile grouped_gemm --arch sm_90a --config t128x64x128_s0a1_swap --out kernels
  nvfp4-cute compile gemv quantize --arch sm_120a --dtype float16 --out kernels
  nvfp4-cute compile --model FOLDER-NVFP4 --arch sm_90a --out kernels    all kernels of a checkpoint's layers
  nvfp4-cute compile --model FOLDER-NVFP4 --arch sm_90a --batch-invariant --out kernels

No GPU is needed. A kernel that is already in the folder is not compiled again. To use the folder, set
NVFP4_CUTE_CACHE_DIR to it. It may be read-only, and may be copied to another machine with the same versions of this
package, of CuTe DSL and of Python (major and minor). Missing kernels are compiled on first use. Use only folders from
people you trust, because they contain native code.
"""


def add_parser(verbs: Verbs) -> None:
    """Adds `compile` and its options."""
    text = "Compile kernels ahead of time, in parallel processes, into a folder that programs load them from."
    parser = add_verb(verbs, "compile", text, EXAMPLES)
    parser.add_argument(
        "operations",
        nargs="*",
        metavar="OPERATION",
        help=f"{', '.join(OPERATIONS)} (default: {', '.join(EVERYWHERE)}; only "
        f"{', '.join(OF_FORMATS)} if --dtype names a quantized format; {' and '.join(WEIGHT_ONLY)} for sm_80 to sm_89)",
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="a checkpoint: compiles the kernels of its NVFP4 and MXFP4 layers for 1 to 8,192 rows, and ignores options of "
        "single kernels",
    )
    parser.add_argument(
        "--activations",
        choices=env.ACTIVATIONS.choices,
        default=env.activations() or "auto",
        help="activations of a checkpoint's W4A4 and MXFP4 layers, as in NVFP4_CUTE_ACTIVATIONS (default %(default)s); per_row "
        "compiles kernels with a global scale per row",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="kernels of a checkpoint in batch-invariant mode, with a global scale per row where it stores none of activations",
    )
    parser.add_argument(
        "--arch", action="append", required=True, help="such as sm_100a; repeat it for more than one"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the kernels, created if missing"
    )
    parser.add_argument(
        "--groups",
        type=types.positives,
        default=(1,),
        metavar="G[,G...]",
        help="group counts of GEMMs in list form; each needs its own kernel (default 1)",
    )
    parser.add_argument(
        "--config",
        action="append",
        metavar="NAME",
        help="a config of GEMMs by name; repeat it for more (default: all that may be chosen automatically)",
    )
    parser.add_argument(
        "--form",
        choices=choices.FORMS,
        default="list",
        help="form of grouped and dual GEMMs (default %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=(*FLOATS, *choices.QUANTIZED_RESULTS),
        default="bfloat16",
        help="dtype of results, and of inputs of quantize; quantized formats are for GEMMs only (default %(default)s)",
    )
    parser.add_argument(
        "--activation",
        type=types.activation,
        default="silu",
        help="activation of the dual GEMM, such as gelu or 'situ(beta=4,linear_beta=25)' (default %(default)s)",
    )
    parser.add_argument(
        "--weight-layout",
        choices=choices.WEIGHT_LAYOUTS,
        default="separate",
        help="weight layout of the dual GEMM; kernels of separate weights also take concatenated ones (default %(default)s)",
    )
    types.add_formats(parser, "of the operands of GEMMs", "nvfp4")
    parser.add_argument(
        "--limit", action="store_true", help="dual GEMMs that clamp their products to a limit"
    )
    parser.add_argument("--alpha", action="store_true", help="products with alpha")
    parser.add_argument(
        "--early-weights",
        action="store_true",
        help="GEMMs as layers call them on the sm_100 family: early_weights=True",
    )
    parser.add_argument(
        "--bias",
        choices=FLOATS,
        help="products with a bias of this dtype, except dual ones",
    )
    parser.add_argument(
        "--jobs",
        type=types.positive,
        metavar="N",
        help="number of processes (default: one per core, at most 8)",
    )
    parser.set_defaults(run=lazily("compile"))
