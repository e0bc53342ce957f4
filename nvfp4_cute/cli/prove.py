"""`nvfp4-cute prove`: reports what the GPU of this machine does."""

import argparse

from nvfp4_cute.prove import command, predictions


def run(args: argparse.Namespace) -> int:
    """Proves, predicts, or reads a report."""
    if args.read:
        return command.read(args.read, args.out)
    if args.predict:
        return predictions.run(args.predict)

    return command.run(
        steps=args.steps,
        quick=args.quick,
        fresh=args.fresh,
        emulator=args.emulator,
        out=args.out,
        workers=args.workers,
    )
