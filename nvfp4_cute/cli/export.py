"""`nvfp4-cute export`: writes a competition problem's kernel as one file."""

import argparse
from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.competition import export
from nvfp4_cute.competition.trace import export as trace_export
from nvfp4_cute.competition.trace.folder import is_source
from nvfp4_cute.formats.block_format import NVFP4_PAIR


def run(args: argparse.Namespace) -> int:
    """Writes the file or the folder; returns 0."""
    if args.format is None:
        args.format = trace_export.FOLDER if is_source(Path(args.problem)) else export.GPU_MODE
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
    if args.torch and args.config:
        raise ValueError("--torch goes without --config: it is a file to compare with")
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
        kind=export.TORCHS if args.torch else export.OURS,
        overwrite=args.force,
        formats=args.formats,
    )
