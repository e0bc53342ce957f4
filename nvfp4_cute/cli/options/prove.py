"""Options of `nvfp4-cute prove`."""

from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute prove                                         ten minutes on the GPU of this machine; the report is written here
  nvfp4-cute prove --quick                                 one or two minutes
  nvfp4-cute prove --steps probes constants --out reports  only these steps; earlier results are kept
  nvfp4-cute prove --read prove-h200.json                  print a report as a page, and as constants of the timing model
  nvfp4-cute prove --emulator sm_120a                      without a GPU: a few problems and configs, and every probe
  nvfp4-cute prove --predict H200                          without a GPU: modelled times, to be compared later

steps: probes (rules of the silicon that documents leave open, each in a separate process; the answers decide which
configs are chosen), configs and problems (compared with the reference bit for bit), constants (of the timing model), timed
(cases and a layer of experts, compared with torch and with earlier predictions), host (costs of calls, and a long run).
An interrupted run continues where it stopped. The report (prove-<gpu>.json, .md, .svg) names no host, no user and no
folder; please attach it to an issue.
"""


def add_parser(verbs: Verbs) -> None:
    """Adds `prove` and its options."""
    text = "Prove on the GPU of this machine what can be proven, and write a report of what was found."
    parser = add_verb(verbs, "prove", text, EXAMPLES)
    parser.add_argument("--quick", action="store_true", help="one or two minutes instead of ten")
    parser.add_argument(
        "--steps",
        nargs="+",
        choices=choices.STEPS,
        default=(),
        metavar="STEP",
        help="run only these steps (default: all)",
    )
    parser.add_argument("--fresh", action="store_true", help="repeat what an earlier run finished")
    parser.add_argument(
        "--out", type=types.output_folder, metavar="DIR", help="folder of the report (default: here)"
    )
    parser.add_argument(
        "--emulator", metavar="GPU", help="emulate this GPU or architecture instead of using one"
    )
    parser.add_argument(
        "--workers", type=types.whole, metavar="N", help="number of processes; 0: only this one"
    )
    parser.add_argument(
        "--predict", metavar="GPU", help="predict the times of a GPU, into bench/results, and end"
    )
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="print a report as a page and as constants, and end"
    )
    parser.set_defaults(run=lazily("prove"))
