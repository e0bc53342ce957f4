"""Options of `nvfp4-cute doctor`."""

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily


def add_parser(verbs: Verbs) -> None:
    """Adds `doctor` and its options."""
    text = (
        "Say what you can do on this machine, and print versions, GPUs, the emulator's launch shim, what would run where and "
        "why. Exit code 1: no kernel can run."
    )
    parser = add_verb(verbs, "doctor", text)
    parser.add_argument(
        "subject",
        metavar="checkpoint | script.py",
        nargs="?",
        help="a folder: also say which kernels serve each kind of its layers, in vLLM and by rows. A CuTe DSL script: say "
        "which architecture, version of CuTe DSL and packages it wants",
    )
    parser.add_argument(
        "--target", help="GPU to say it for, by name or architecture (default: the one here, or B200)"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="also print the environment variables that are read"
    )
    types.add_formats(parser, "where GEMMs of such operands run", "nvfp4")
    parser.set_defaults(run=lazily("doctor"))
