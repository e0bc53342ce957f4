"""`nvfp4-cute export`: a competition problem's kernel as one file."""

import argparse
from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.verbs import Verbs, add_verb
from nvfp4_cute.competition import export, formats
from nvfp4_cute.competition.trace import export as trace_export
from nvfp4_cute.competition.trace.folder import is_source
from nvfp4_cute.formats.block_format import NVFP4_PAIR

EXAMPLES = """\
examples:
  nvfp4-cute export nvfp4_group_gemm                        writes submission.py
  nvfp4-cute export nvfp4_group_gemm --map lines.tsv        also where every line comes from
  nvfp4-cute export nvfp4_gemm --torch -o torch.py          torch's own product, to compare with
  nvfp4-cute export nvfp4_gemm --format pygpubench          for another harness, with what it needs beside it
  nvfp4-cute export nvfp4_group_gemm --gpu NVIDIA --config t128x128x256_s5a2
  nvfp4-cute export nvfp4_gemm --formats mxfp8_e4m3,mxfp4   the same kernel for operands of other formats, which you make
  nvfp4-cute export nvfp4_gemm --format trace -o gemm       definition, workloads and solution for SOL-ExecBench
  nvfp4-cute export nvfp4_moe --format trace-set -o set     a data set for FlashInfer-Bench, inputs in files
  nvfp4-cute export nvfp4_gemm --format trace --axes N=4096,K=7168,M=1:64    the same of another layer

The file is assembled from kernels/ and from the problem's submission.py: definitions that are needed, comments kept. It
imports cutlass, torch and Python's library, and runs on nvidia-cutlass-dsl 4.3.5, 4.5.2 and 4.8.1. The formats trace and
trace-set also take a folder of your own: spec.py, reference.py and kernel.py.
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its options."""
    text = "Write a competition problem's kernel as one readable file that its server accepts."
    parser = add_verb(verbs, "export", text, EXAMPLES)
    parser.add_argument("problem", help="a folder of problems/, for example nvfp4_group_gemm")
    parser.add_argument(
        "-o", "--output", type=Path, help="file, default submission.py; of a trace the folder, default trace"
    )
    parser.add_argument("--gpu", help="runner that the header names (default: the problem's first)")
    parser.add_argument("--config", metavar="NAME", help="a kernel config for every shape, by name")
    parser.add_argument(
        "--format",
        choices=(*formats.FORMATS, *trace_export.FORMATS),
        help=f"the harness that it is for (default {formats.GPU_MODE.name}; of a folder of sources {trace_export.FOLDER})",
    )
    types.add_formats(parser, "of the operands", NVFP4_PAIR)
    parser.add_argument("--torch", action="store_true", help="torch's own product instead of our kernel")
    parser.add_argument(
        "--map", type=types.output_file, metavar="FILE", help="also write the source of every line"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")
    parser.add_argument(
        "--axes",
        type=types.sizes_by_axis,
        metavar="AXIS=SIZE,...",
        help="of a trace: sizes of axes, M=1:16 for two workloads, M=8+16 for a pair",
    )
    parser.add_argument(
        "--returning", action="store_true", help="of a trace: outputs are returned, not passed to be written"
    )
    parser.set_defaults(run=run, refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    """Write the file or the folder; return 0."""
    if args.format is None:
        args.format = trace_export.FOLDER if is_source(Path(args.problem)) else formats.GPU_MODE.name
    if args.format in trace_export.FORMATS:
        if args.torch or args.config or args.gpu or args.map or args.formats != NVFP4_PAIR:
            raise ValueError(
                f"--format {args.format} goes without --torch, --config, --gpu, --map and --formats"
            )
        output = args.output or Path("trace")
        return trace_export.run(
            args.problem,
            output,
            args.format,
            axes=args.axes,
            returns=args.returning,
            overwrite=args.force,
        )
    if args.axes or args.returning:
        raise ValueError(f"--axes and --returning go with --format {' or '.join(trace_export.FORMATS)}")
    if args.torch and (args.config or args.format != formats.GPU_MODE.name):
        raise ValueError("--torch goes without --config and --format: it is a file to compare with")
    try:
        output = types.output_file(str(args.output or "submission.py"))
    except argparse.ArgumentTypeError as error:
        args.refuse(f"argument -o/--output: {error}")
    return export.run(
        args.problem,
        output,
        gpu=args.gpu,
        config=args.config,
        map_path=args.map,
        form=formats.FORMATS[args.format],
        kind=export.TORCHS if args.torch else export.OURS,
        overwrite=args.force,
        formats=args.formats,
    )
