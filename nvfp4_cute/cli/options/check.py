"""Options of `nvfp4-cute check`."""

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_arch, add_verb, lazily

BACKENDS = ("cuda", "emulator")


def add_parser(verbs: Verbs) -> None:
    """Adds `check` and its options."""
    text = (
        "Compute random grouped problems on a backend and compare every output bit with the reference. Operands are "
        "drawn so that fp32 accumulation is exact in any order: a difference of one bit is a defect. A failure prints "
        "the command that repeats it. On sm_80 to sm_89 rows of bfloat16 are multiplied, a group at a time."
    )
    parser = add_verb(verbs, "check", text)
    parser.add_argument(
        "--backend", choices=BACKENDS, help="default: cuda where the GPU has a kernel, else emulator"
    )
    add_arch(parser)
    parser.add_argument(
        "--count", type=types.positive, default=10, help="problems to draw (default %(default)s)"
    )
    parser.add_argument(
        "--seed", type=types.whole, default=0, help="seed of the first problem (default %(default)s)"
    )
    parser.add_argument(
        "--groups", type=types.positive, default=4, help="groups at most (default %(default)s)"
    )
    parser.add_argument(
        "--max-m", type=types.positive, default=300, help="rows at most of a group (default %(default)s)"
    )
    parser.add_argument(
        "--max-n", type=types.positive, default=512, help="columns at most (default %(default)s)"
    )
    parser.add_argument("--max-k", type=types.positive, default=1024, help="K at most (default %(default)s)")
    types.add_formats(parser, "of the operands", "nvfp4")
    parser.add_argument(
        "--out",
        choices=choices.QUANTIZED_RESULTS,
        help="format of results that are quantized (default: 16 or 32 bits, drawn)",
    )
    parser.set_defaults(run=lazily("check"))
