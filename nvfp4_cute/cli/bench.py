"""`nvfp4-cute bench`: times of cases, with their floors and the times of others."""

import argparse
import tempfile
from pathlib import Path

from nvfp4_cute.bench import command, compare, gallery
from nvfp4_cute.bench.cases import Case, select, shape_case
from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli import tune
from nvfp4_cute.formats.block_format import NVFP4_PAIR
from nvfp4_cute.gpus import targets

# Options of modelling and measuring, refused where committed or given results are shown.
TIMING_OPTIONS = (
    "suites", "containing", "target", "explain", "like_harness", "json", "save", "jobs", "results", "tokens", "ranks", "predict",
    "against", "recordings", "formats", "m", "n", "k", "groups", "op", "out",
)  # fmt: skip
SHAPE_OPTIONS = ("m", "n", "k", "groups", "op", "out")


def run(args: argparse.Namespace) -> int:
    """Prints the chosen cases' times, or the reasons for their configs; returns 0."""
    options: tuple[str, ...]
    if args.compare:
        options = (*TIMING_OPTIONS, "html")
        types.refuse_given(args, options, lambda name: f"--compare reads two results: leave out {name}")
        return compare.run(args.compare, args.plot)
    if args.html:
        options = (*TIMING_OPTIONS, "plot")
        types.refuse_given(args, options, lambda name: f"--html shows committed results: leave out {name}")
        return gallery.run(args.html)
    if args.predict or args.against:
        return _blind(args)
    types.refuse_given(
        args, ("recordings",), lambda name: f"--{name} keeps what --predict records: also pass --predict FILE"
    )
    if "ep" in args.suites:
        return _over_ranks(args)
    types.refuse_given(
        args, ("tokens", "ranks"), lambda name: f"--{name} is of ep: name that suite, or leave it out"
    )
    if "layers" in args.suites:
        return _layers(args)
    if args.explain:
        options = ("like_harness", "json", "plot", "save", "jobs", "results")
        types.refuse_given(args, options, lambda name: f"--explain prints no times: leave out --{name}")
        return command.explain(_chosen(args), target_name=args.target)
    if args.save:
        of = ("formats", *SHAPE_OPTIONS)
        types.refuse_given(
            args, of, lambda name: f"--save writes the page of suites in NVFP4: leave out --{name}"
        )
    return command.run(
        _chosen(args),
        command=[*args.suites, *(["--containing", args.containing] if args.containing else [])],
        target_name=args.target,
        like_harness=args.like_harness,
        as_json=args.json,
        plot=args.plot,
        save=args.save,
        jobs=args.jobs,
        results=args.results,
    )


def _chosen(args: argparse.Namespace) -> list[Case]:
    """Returns cases of suites, or a shape. Raises ValueError for options that do not go together."""
    formats = args.formats or NVFP4_PAIR
    if not any(getattr(args, name) for name in SHAPE_OPTIONS):
        return select(tuple(args.suites), args.containing, formats)
    if args.suites or args.containing or not (args.m and args.n and args.k):
        raise ValueError("a shape takes --m, --n, and --k together, and no suite and no --containing")
    operation, out = args.op or "gemm", args.out or "fp16"
    case = shape_case(args.m, args.n, args.k, args.groups, operation, formats, out)
    if operation == "w4a16":
        if case.out_format is not None or args.like_harness or args.explain:
            raise ValueError(
                "--op w4a16 has results of 16 or 32 bits, and neither --like-harness nor --explain"
            )
        return [case]
    tune.check_call(
        targets.lookup(args.target) if args.target else targets.detect() or targets.B200,
        operation,
        out,
        formats,
    )
    return [case]


def _layers(args: argparse.Namespace) -> int:
    if args.suites != ["layers"]:
        raise ValueError("layers are modelled by themselves: name no other suite")
    options = ("explain", "like_harness", "plot", "formats", *SHAPE_OPTIONS)
    types.refuse_given(args, options, lambda name: f"layers are modelled: leave out {name}")
    from nvfp4_cute.bench import layers, layers_page

    names = [args.target] if args.target else layers.TARGETS
    return layers_page.run(
        [targets.lookup(name) for name in names],
        containing=args.containing,
        jobs=args.jobs or 1,
        results=args.results,
        as_json=args.json,
        save=args.save,
    )


def _over_ranks(args: argparse.Namespace) -> int:
    if args.suites != ["ep"]:
        raise ValueError("ep is measured by itself: name no other suite")
    options = ("target", "explain", "like_harness", "jobs", "formats", *SHAPE_OPTIONS)
    types.refuse_given(args, options, lambda name: f"ep is measured on this machine: leave out --{name}")
    from nvfp4_cute.bench import ep

    models = tuple(name for name in ep.CHOSEN if args.containing in name)
    if not models:
        raise ValueError(f"no model of ep contains {args.containing!r}: there are {', '.join(ep.CHOSEN)}")
    tokens = args.tokens or ep.TOKENS
    with tempfile.TemporaryDirectory() as folder:
        results = args.results or Path(folder) / "ep.json"
        plan = ep.Plan(models, tokens, args.ranks or 2, ep.ROUNDS, results)
        return ep.run(plan, as_json=args.json, plot=args.plot, save=args.save)


def _blind(args: argparse.Namespace) -> int:
    options = (
        "suites", "containing", "explain", "like_harness", "json", "plot", "save", "tokens", "ranks", "formats", *SHAPE_OPTIONS,
    )  # fmt: skip
    why = "predictions are of calls of their own: leave out {}"
    types.refuse_given(args, options, why.format)
    from nvfp4_cute.bench.validation import predictions

    if args.against:
        wrong = ("predict", "target", "recordings")
        types.refuse_given(
            args, wrong, lambda name: f"--against measures on the GPU of this machine: leave out {name}"
        )
        return predictions.against(args.against, results=args.results, jobs=args.jobs or 1)
    types.refuse_given(args, ("results",), lambda name: f"--predict names the file: leave out {name}")
    target = targets.lookup(args.target or "B200")
    return predictions.predict(args.predict, target, jobs=args.jobs or 1, recordings=args.recordings)
