"""`nvfp4-cute export`: a competition problem's kernel as one file."""

import argparse
from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.verbs import Verbs, add_verb
from nvfp4_cute.competition import export, formats

EXAMPLES = """\
examples:
  nvfp4-cute export nvfp4_group_gemm                        writes submission.py
  nvfp4-cute export nvfp4_group_gemm --map lines.tsv        also where every line comes from
  nvfp4-cute export nvfp4_gemm --torch -o torch.py          torch's own product, to compare with
  nvfp4-cute export nvfp4_gemm --format pygpubench          for another harness, with what it needs beside it
  nvfp4-cute export nvfp4_group_gemm --gpu NVIDIA --config t128x128x256_s5a2

The file is assembled from kernels/ and from the problem's submission.py: definitions that are needed, comments kept. It
imports cutlass, torch and Python's library, and runs on nvidia-cutlass-dsl 4.3.5, 4.5.2 and 4.8.1.
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its options."""
    text = "Write a competition problem's kernel as one readable file that its server accepts."
    parser = add_verb(verbs, "export", text, EXAMPLES)
    parser.add_argument("problem", help="a folder of problems/, for example nvfp4_group_gemm")
    parser.add_argument(
        "-o", "--output", type=types.output_file, default=Path("submission.py"), help="default %(default)s"
    )
    parser.add_argument("--gpu", help="runner that the header names (default: the problem's first)")
    parser.add_argument("--config", metavar="NAME", help="a kernel config for every shape, by name")
    parser.add_argument(
        "--format",
        choices=tuple(formats.FORMATS),
        default=formats.GPU_MODE.name,
        help="the harness that the file is for (default %(default)s)",
    )
    parser.add_argument("--torch", action="store_true", help="torch's own product instead of our kernel")
    parser.add_argument(
        "--map", type=types.output_file, metavar="FILE", help="also write the source of every line"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the file; return 0."""
    if args.torch and (args.config or args.format != formats.GPU_MODE.name):
        raise ValueError("--torch goes without --config and --format: it is a file to compare with")
    return export.run(
        args.problem,
        args.output,
        gpu=args.gpu,
        config=args.config,
        map_path=args.map,
        form=formats.FORMATS[args.format],
        kind=export.TORCHS if args.torch else export.OURS,
        overwrite=args.force,
    )
