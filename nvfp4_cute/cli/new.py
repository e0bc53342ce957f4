"""`nvfp4-cute new`: makes a problem of your own from a template."""

import argparse

from nvfp4_cute.competition.trace import new


def run(args: argparse.Namespace) -> int:
    """Writes the folder of the new problem; returns 0."""
    return new.run(args.kind, args.folder)
