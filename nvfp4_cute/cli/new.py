"""`nvfp4-cute new`: a problem of your own, from a template."""

import argparse

from nvfp4_cute.competition.trace import new


def run(args: argparse.Namespace) -> int:
    """Write the folder; return 0."""
    return new.run(args.kind, args.folder)
