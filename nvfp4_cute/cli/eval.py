"""`nvfp4-cute eval`: evaluates a submission like its server."""

import argparse

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.competition import evaluate
from nvfp4_cute.competition.protocol import TIMED_MODES
from nvfp4_cute.competition.trace import evaluate as trace


def run(args: argparse.Namespace) -> int:
    """Evaluates the file or the folder; returns 0 if everything was accepted, else 1."""
    if args.submission.is_dir():
        return _run_folder(args)
    options = ("solution", "rules", "rounds")
    types.refuse_given(args, options, lambda name: f"--{name} goes with a folder; {args.submission} is none")
    if args.device == "cpu":
        raise ValueError("--device cpu goes with a folder: a submission needs a GPU, or the emulator")
    request = evaluate.Request(
        submission=args.submission,
        problem=args.problem,
        mode=args.mode,
        device=args.device,
        seed=args.seed,
        strict=args.strict,
        harness=args.harness,
        task=args.task,
        case=args.case,
        inputs=args.inputs,
        l2_gib=args.l2_gib,
        low_memory=args.low_memory,
        timeout_s=args.timeout,
        ignore_rules=args.ignore_rules,
    )
    return evaluate.run(request, as_json=args.json)


def _run_folder(args: argparse.Namespace) -> int:
    refused = (
        "problem",
        "strict",
        "harness",
        "task",
        "seed",
        "inputs",
        "l2_gib",
        "low_memory",
        "ignore_rules",
    )
    types.refuse_given(
        args, refused, lambda name: f"--{name} goes with a submission; {args.submission} is a folder"
    )
    if args.mode not in ("test", *TIMED_MODES):
        raise ValueError(f"--mode {args.mode} goes with a submission; use test or benchmark")
    request = trace.Request(
        args.submission,
        args.solution,
        args.device,
        args.rules,
        args.rounds,
        args.mode in TIMED_MODES,
        args.case,
        args.timeout,
    )
    return trace.run(request, as_json=args.json)
