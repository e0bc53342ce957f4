"""Options of `nvfp4-cute sol`."""

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute sol                                           the competition's benchmark cases, published and ours
  nvfp4-cute sol --target rtx5090 --json                   the same on another GPU, with the source of every figure
  nvfp4-cute sol --m 16 --n 4096 --k 7168 --groups 32      one shape: traffic by operand, and the limiting resource
  nvfp4-cute sol --m 16 --n 4096 --k 7168 --formats mxfp8_e4m3,mxfp4   operands of other formats
  nvfp4-cute sol --m 16 --n 4096 --k 7168 --out mxfp8_e4m3   results quantized for the next product
  nvfp4-cute sol --op w4a16 --m 1 --n 4096 --k 4096        fp16 activations, NVFP4 weights
  nvfp4-cute sol --memory --target h200                    memory of weights in fp16, fp8, and NVFP4

Computed from sizes and from published or measured figures of the GPU; nothing is run, and no GPU is needed.
"""


def add_parser(verbs: Verbs) -> None:
    """Adds `sol` and its options."""
    text = (
        "Print the speed of light (the least time for moving the bytes and doing the operations) of the competition's "
        "benchmark cases, or of one shape; or print how much memory weights occupy."
    )
    parser = add_verb(verbs, "sol", text, EXAMPLES)
    parser.add_argument(
        "--target", metavar="GPU", help="default: the GPU of this machine if known, else B200"
    )
    parser.add_argument("--problem", choices=choices.PROBLEMS, help="only this competition problem")
    types.add_shape(parser, types.positives)
    parser.add_argument(
        "--op",
        choices=choices.OPERATIONS,
        help="what is computed from --m, --n, --k: gemm, dual (two B, SwiGLU), w4a16 (default gemm)",
    )
    types.add_formats(parser, "of the operands of a gemm or dual, and of the weights of w4a16")
    parser.add_argument("--out", choices=choices.RESULTS, help="format of C (default fp16)")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="print the memory of weights: of common layers, or of --n, --k, --groups",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with the source of every figure")
    parser.add_argument(
        "--plot",
        type=types.output_file,
        metavar="FILE",
        help="also write a roofline picture (needs the extra `plot`)",
    )
    parser.set_defaults(run=lazily("sol"))
