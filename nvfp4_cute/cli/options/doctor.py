"""Options of `nvfp4-cute doctor`."""

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily


def add_parser(verbs: Verbs) -> None:
    """Adds `doctor` and its options."""
    text = (
        "Print what you can do on this machine, versions, GPUs, the state of the emulator, and what would run where and "
        "why. The exit code is 1 if no kernel can run."
    )
    parser = add_verb(verbs, "doctor", text)
    parser.add_argument(
        "subject",
        metavar="checkpoint | script.py",
        nargs="?",
        help="a checkpoint folder: also print the kernels of each kind of layer, in vLLM and by number of rows; or a CuTe DSL "
        "script: print the architecture, CuTe DSL version and packages that it needs",
    )
    parser.add_argument(
        "--target", help="GPU of that report, by name or architecture (default: the one here, or B200)"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="also print the environment variables that are read"
    )
    types.add_formats(parser, "of operands: also say where GEMMs of them run", "nvfp4")
    parser.set_defaults(run=lazily("doctor"))
