"""Options of `nvfp4-cute demo`."""

from nvfp4_cute.cli.verbs import Verbs, add_arch, add_verb, lazily


def add_parser(verbs: Verbs) -> None:
    """Adds `demo` and its options."""
    text = (
        "Compile the sm_100a grouped GEMM kernel, execute its PTX on the emulator over the test shapes and one "
        "benchmark shape of the nvfp4_group_gemm problem, and compare every output bit with the reference."
    )
    parser = add_verb(verbs, "demo", text)
    parser.add_argument(
        "--all", action="store_true", help="also the other three benchmark shapes (a few minutes)"
    )
    add_arch(parser)
    parser.set_defaults(run=lazily("demo"))
