"""`nvfp4-cute submit`: submits a file with popcorn-cli."""

import argparse

from nvfp4_cute.competition import submit


def run(args: argparse.Namespace) -> int:
    """Submits the file; returns 0 if the server accepted it."""
    order = submit.Order(
        path=args.submission,
        leaderboard=args.leaderboard,
        gpu=args.gpu,
        mode=args.mode,
        repeat=args.repeat,
        ungated=args.ungated,
        dry_run=args.dry_run,
        yes=args.yes,
        force=args.force,
        history=args.history,
    )
    return submit.run(order)
