"""The command line: `nvfp4-cute demo | check | bench | tune | sol | trace | emulate | export | ... `. Parses, then calls."""

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from nvfp4_cute.cli.verbs import VERBS, add_verb
from nvfp4_cute.errors import CacheError, EmulatorError, UnsupportedTarget, printable

EXAMPLES = """\
examples:
  nvfp4-cute demo                                 the sm_100a kernel on the emulator, every output bit compared
  nvfp4-cute check --backend emulator --count 5   five random problems on the emulator
  nvfp4-cute check --backend cuda --max-m 4096    random problems on the GPU of this machine
  nvfp4-cute bench competition                    time, floor, and peers of the competition's cases
  nvfp4-cute tune --m 16 --n 4096 --k 7168        the fastest config of a problem, kept for later calls
  nvfp4-cute sol --target B200                    the least possible times of the competition's problems
  nvfp4-cute trace nvfp4_group_gemm --case 3      the modelled time of a kernel on a B200, and what takes it
  nvfp4-cute emulate gemm.py --mnk 256,256,128    a CuTe DSL script, unmodified, on a virtual B200
  nvfp4-cute new elementwise my_kernel            a problem of your own that runs: spec, reference, kernel, test
  nvfp4-cute export nvfp4_group_gemm              one readable submission.py for the competition's server
  nvfp4-cute eval submission.py --strict          try a submission as that server would, and more strictly
  nvfp4-cute compile --arch sm_90a --out kernels  ahead of time, for machines where nothing shall be compiled
  nvfp4-cute prove                                what the GPU of this machine does with all of it, as a report
  nvfp4-cute doctor                               what is installed, and what would run where
"""
KEPT = "\n\t"  # of the characters that control a terminal, those that messages have


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: everything asked for holds. 1: a difference, a refusal, or something is missing. 2: no such verb or option.
    130: interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    # No option before the verb takes a value, so the first word is the verb. Only its module is imported.
    verb = next((word for word in argv if not word.startswith("-")), None)
    args, unknown = build_parser([verb] if verb in VERBS else []).parse_known_args(argv)
    if unknown:  # a parser of all verbs would name none of the verb's own options
        see = f"see nvfp4-cute {args.verb} --help"
        print(f"nvfp4-cute {args.verb}: unrecognized arguments: {' '.join(unknown)}; {see}", file=sys.stderr)
        raise SystemExit(2)
    try:
        return args.run(args)
    except BrokenPipeError:  # whoever read the output, such as `head`, has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"\nnvfp4-cute {args.verb}: interrupted", file=sys.stderr)
        return 130
    except (CacheError, EmulatorError, UnsupportedTarget, ValueError, OSError) as error:
        print(f"nvfp4-cute {args.verb}: {printable(str(error), keep=KEPT)}", file=sys.stderr)
        return 1


def build_parser(complete: Iterable[str] = VERBS) -> argparse.ArgumentParser:
    """Build the parser of every verb; its `run` default is a function of the parsed arguments.

    Args:
        complete: the verbs that are to have their options, which their modules know; all by default. Of others the
            parser knows the name and the line of help.
    """
    parser = argparse.ArgumentParser(
        prog="nvfp4-cute",
        description="CuTe DSL kernels for NVFP4 grouped GEMM, on a Blackwell GPU or on the emulator.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=importlib.metadata.version("nvfp4-cute"))
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        if verb in complete:
            import_module(f"nvfp4_cute.cli.{verb}").add_parser(verbs)
        else:
            add_verb(verbs, verb, VERBS[verb])
    return parser
