"""Options of `nvfp4-cute check`."""

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_arch, add_verb, lazily

BACKENDS = ("cuda", "emulator")


def add_parser(verbs: Verbs) -> None:
    """Adds `check` and its options."""
    text = (
        "Compute random grouped problems on a backend and compare every output bit with the reference. Operands are "
        "chosen so that fp32 accumulation is exact in any order: a difference of one bit is a defect. A failure prints "
        "the command that repeats it. On sm_80 to sm_89 rows of bfloat16 are multiplied, a group at a time."
    )
    parser = add_verb(verbs, "check", text)
    parser.add_argument(
        "--backend", choices=BACKENDS, help="default: cuda if the GPU has a kernel, else emulator"
    )
    add_arch(parser)
    parser.add_argument(
        "--count", type=types.positive, default=10, help="number of random problems (default %(default)s)"
    )
    parser.add_argument(
        "--seed", type=types.whole, default=0, help="seed of the first problem (default %(default)s)"
    )
    parser.add_argument(
        "--groups", type=types.positive, default=4, help="maximum number of groups (default %(default)s)"
    )
    parser.add_argument(
        "--max-m",
        type=types.positive,
        default=300,
        help="maximum number of rows per group (default %(default)s)",
    )
    parser.add_argument(
        "--max-n", type=types.positive, default=512, help="maximum number of columns (default %(default)s)"
    )
    parser.add_argument("--max-k", type=types.positive, default=1024, help="maximum K (default %(default)s)")
    types.add_formats(parser, "of the operands", "nvfp4")
    parser.add_argument(
        "--out",
        choices=choices.QUANTIZED_RESULTS,
        help="format of quantized results (default: not quantized, 16 or 32 bits at random)",
    )
    parser.set_defaults(run=lazily("check"))
