"""Options of `nvfp4-cute export`."""

from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute export nvfp4_group_gemm                        writes submission.py
  nvfp4-cute export nvfp4_group_gemm --map lines.tsv        also write the source of every line
  nvfp4-cute export nvfp4_gemm --torch -o torch.py          torch's own product, for comparison
  nvfp4-cute export nvfp4_group_gemm --gpu NVIDIA --config t128x128x256_s5a2
  nvfp4-cute export nvfp4_gemm --formats mxfp8_e4m3,mxfp4   the same kernel for operands of other formats, which you supply
  nvfp4-cute export nvfp4_gemm --format trace -o gemm       definition, workloads and solution for SOL-ExecBench
  nvfp4-cute export nvfp4_moe --format trace-set -o set     a data set for FlashInfer-Bench, with inputs in files
  nvfp4-cute export nvfp4_gemm --format trace --axes N=4096,K=7168,M=1:64    the same for another layer

The file consists of the needed definitions of kernels/ and of the problem's submission.py, with their comments. It
imports cutlass, torch and Python's library, and runs on nvidia-cutlass-dsl 4.3.5, 4.5.2 and 4.8.1. The formats trace and
trace-set also take a folder of your own: spec.py, reference.py and kernel.py.
"""


def add_parser(verbs: Verbs) -> None:
    """Adds `export` and its options."""
    text = "Write a competition problem's kernel as one readable file that its server accepts."
    parser = add_verb(verbs, "export", text, EXAMPLES)
    parser.add_argument("problem", help="a folder of problems/, for example nvfp4_group_gemm")
    parser.add_argument(
        "-o", "--output", type=Path, help="file (default submission.py); for a trace, folder (default trace)"
    )
    parser.add_argument("--gpu", help="GPU runner in the header (default: the problem's first)")
    parser.add_argument("--config", metavar="NAME", help="a kernel config for every shape, by name")
    parser.add_argument(
        "--format",
        choices=(*choices.EXPORTS, *choices.TRACE_EXPORTS),
        help=f"harness to write for (default {choices.EXPORTS[0]}; for a folder of sources {choices.TRACE_EXPORTS[0]})",
    )
    types.add_formats(parser, "of the operands", "nvfp4")
    parser.add_argument("--torch", action="store_true", help="torch's own product instead of our kernel")
    parser.add_argument(
        "--map", type=types.output_file, metavar="FILE", help="also write the source of every line"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")
    parser.add_argument(
        "--axes",
        type=types.sizes_by_axis,
        metavar="AXIS=SIZE,...",
        help="for a trace: sizes of axes; M=1:16 means two workloads, M=8+16 a pair",
    )
    parser.add_argument(
        "--returning",
        action="store_true",
        help="for a trace: the kernel returns its outputs instead of writing to passed tensors",
    )
    parser.set_defaults(run=lazily("export"), refuse=parser.error)
