"""The command line:

`nvfp4-cute demo | check | bench | tune | sol | trace | emulate | export | ... `. Parses and calls a verb.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

import nvfp4_cute
from nvfp4_cute.cli.verbs import VERBS, add_verb, listing
from nvfp4_cute.errors import CacheError, CheckpointError, EmulatorError, UnsupportedTarget, printable

EXAMPLES = """\
examples:
  nvfp4-cute demo                                 a Blackwell kernel on the CPU, every output bit compared
  nvfp4-cute models inspect DIR                   what is in a checkpoint, and which GPU computes it how
  nvfp4-cute quantize MODEL --out DIR             a 16-bit checkpoint in NVFP4
  nvfp4-cute emulate --check gemm.py              any CuTe DSL script on a virtual B200, and its races
  nvfp4-cute emulate --arch sm_90a gemm.py        the same on a virtual H100
  nvfp4-cute eval submission.py --strict          a submission as its server would judge it, and more strictly
  nvfp4-cute sol --m 16 --n 4096 --k 7168         the least possible time of a product, and what bounds it
  nvfp4-cute bench competition                    time, floor, and peers of the competition's cases
  nvfp4-cute prove                                a report of what the GPU of this machine does with all of it
"""
DESCRIPTION = """\
Matrix products and layers of experts in NVFP4, MXFP4, MXFP8, FP8 and int4 on Blackwell and Hopper GPUs; loading, quantizing
and judging models; a virtual GPU that runs and checks any CuTe DSL kernel. `nvfp4-cute VERB --help` shows a verb's options.

"""
KEPT = "\n\t"  # control characters that messages may contain


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    0: success. 1: a difference was found, or something is missing or damaged. 2: the request is refused: an unknown verb or
    option, a bad value, options that do not go together, a problem that no kernel computes. 130: interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    # No option before the verb takes a value, so the first word is the verb. Only its module is imported.
    verb = next((word for word in argv if not word.startswith("-")), None)
    try:  # includes the parser, because types of options may import torch, which takes seconds
        args, unknown = build_parser([verb] if verb in VERBS else []).parse_known_args(argv)
        if unknown:  # a parser of all verbs would not list the verb's own options
            see = f"see nvfp4-cute {verb} --help"
            print(f"nvfp4-cute {verb}: unrecognized arguments: {' '.join(unknown)}; {see}", file=sys.stderr)
            raise SystemExit(2)
        return args.run(args)
    except BrokenPipeError:  # the reader of the output, such as `head`, has stopped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"\nnvfp4-cute {verb}: interrupted", file=sys.stderr)
        return 130
    except (CacheError, CheckpointError, EmulatorError, UnsupportedTarget, OSError) as error:
        print(f"nvfp4-cute {verb}: {printable(str(error), keep=KEPT)}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"nvfp4-cute {verb}: {printable(str(error), keep=KEPT)}", file=sys.stderr)
        return 2


def cute_emulate() -> int:
    """Runs the command `cute-emulate`: the verb `emulate`, or `doctor` if that is the first argument."""
    given = sys.argv[1:]
    return main(given if given[:1] == ["doctor"] else ["emulate", *given])


def build_parser(complete: Iterable[str] = VERBS) -> argparse.ArgumentParser:
    """Builds the parser of every verb. Its `run` default is a function of the parsed arguments.

    Args:
        complete: the verbs that get their options, which are in separate modules; all by default.
    """
    parser = argparse.ArgumentParser(
        prog="nvfp4-cute",
        usage="%(prog)s [-h] [--version] VERB ...",
        description=DESCRIPTION + listing(),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="VERB", prog="nvfp4-cute", help=argparse.SUPPRESS
    )
    for verb in VERBS:
        if verb in complete:
            import_module(f"nvfp4_cute.cli.options.{verb}").add_parser(verbs)
        else:
            add_verb(verbs, verb, VERBS[verb])
    return parser


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        print(nvfp4_cute.__version__)
        parser.exit()
