"""`nvfp4-cute tune`: finds the fastest config of benchmark cases or of a shape, measured or modelled, for later calls."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

import nvfp4_cute
from nvfp4_cute import backends, env
from nvfp4_cute.bench.cases import RESULT_DTYPES, Case, select, shape_case
from nvfp4_cute.bench.modelled import stated_error
from nvfp4_cute.bench.operands import empty_operands, make_operands
from nvfp4_cute.formats.block_format import NVFP4_PAIR, Formats
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.launch.tuned import request_of
from nvfp4_cute.operands.whole import in_form
from nvfp4_cute.ops import parts
from nvfp4_cute.planning.arch import mmas_of
from nvfp4_cute.planning.arch.base import check_pair
from nvfp4_cute.problem import Form
from nvfp4_cute.tuning import autotune

# Extents of operands that replace those of a shape in checks; every format has blocks of such rows.
ROWS, WIDTH = 128, 512


MOST_FLOPS = 1.2e12
"""Largest case for which all candidates are modelled, each in minutes."""


def run(args: argparse.Namespace) -> int:
    """Tunes the requested cases; returns 0. Raises ValueError for options that do not go together."""
    if args.m and args.n and args.k and not args.suites and not args.containing:
        wanted = [of_shape(args.m, args.n, args.k, args.groups, args.op, args.form, args.out, args.formats)]
    elif args.m or args.n or args.k or args.groups or not (args.suites or args.containing):
        raise ValueError("name a suite (and --containing), or give a shape: --m, --n, and --k together")
    else:
        wanted = of_suites(tuple(args.suites), args.containing, args.formats)
    return tune_all(wanted, target_name=args.target, keep=not args.dry_run)


@dataclass(frozen=True)
class Work:
    """A case to tune: its sizes, form and output."""

    case: Case
    form: Form
    out: str = "bf16"


def of_suites(suites: tuple[str, ...], containing: str, formats: Formats = NVFP4_PAIR) -> list[Work]:
    """Returns the GEMMs among benchmark cases. Raises ValueError for an unknown suite, or if none is left."""
    cases = select(suites, containing, formats)
    found = [Work(case, case.form) for case in cases if case.operation != "gemv"]
    if not found:
        raise ValueError("no chosen case is a GEMM: gemv has nothing to configure; name other cases")
    return found


def of_shape(
    m: tuple[int, ...],
    n: int,
    k: int,
    groups: int | None,
    operation: str,
    form: Form,
    out: str,
    formats: Formats = NVFP4_PAIR,
) -> Work:
    """Returns one shape; ``m`` is for all groups, or for each. Raises ValueError if sizes contradict each other or the form."""
    case = shape_case(m, n, k, groups, operation, formats)
    rows = tuple(m for m, _, _ in case.sizes)
    if form == "batched" and len(set(rows)) > 1:
        raise ValueError(f"--form batched with rows {rows}: batches have one size; use --form list")
    return Work(case, form, out)


def check_call(target: Target, operation: str, out: str, formats: Formats) -> None:
    """Raises what a GEMM or dual GEMM raises on the target. Makes the call with small sizes, up to its planning.

    Args:
        target: the GPU.
        operation: a key of ``bench.cases.OPERATIONS``.
        out: a key of ``bench.cases.RESULT_DTYPES``.
        formats: formats of ``a`` and ``b``.
    """
    work = of_shape((ROWS,), WIDTH, WIDTH, 1, operation, "list", out, formats)
    call, operands, options = arguments(work, torch.device("cpu"))
    backend = f"{backends.EMULATOR_OF}{target.name}"
    autotune.candidates(request_of(lambda: call(*operands, backend=backend, **options)))


def tune_all(wanted: Iterable[Work], *, target_name: str | None, keep: bool) -> int:
    """Tunes one case after the other and prints their tables; returns 0.

    Args:
        wanted: cases to tune.
        target_name: the GPU, which is measured if it is this machine's, else modelled. Default: that of this machine if it is
            known, else B200.
        keep: whether later calls use the result.

    Raises:
        UnsupportedTarget: the GPU is unknown, or has no kernel.
        UnsupportedProblem: there is no kernel for formats, form or output.
    """
    here = targets.detect()
    target = targets.lookup(target_name) if target_name else here or targets.B200
    is_measured = target is here
    how = (
        "measured: CUDA events, graph replay, cold L2; median"
        if is_measured
        else f"modelled; {stated_error()}"
    )
    print(f"{target.name} ({target.arch}): times are {how}.\n")
    backend = "cuda" if is_measured else f"emulator:{target.name}"
    for work in wanted:
        print(f"{work.case}, {work.form}", flush=True)
        check_pair(target.arch, work.case.formats, mmas_of(target.arch))
        if not is_measured and work.case.work.flops > MOST_FLOPS:
            print(f"left out: more than {MOST_FLOPS / 1e9:.0f} GFLOP take too long to model\n")
            continue
        operation, args, options = arguments(work, torch.device("cuda" if is_measured else "cpu"))
        print(f"{nvfp4_cute.tune(operation, *args, backend=backend, keep=keep, **options)}\n", flush=True)
    if keep:
        print(f"Kept in {env.cache_dir()}: calls without a config take the fastest.")
    return 0


def arguments(work: Work, device: torch.device) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """Returns operation, operands and options. Operands are random on a GPU, and without data on the CPU, for the model."""
    case, form = work.case, work.form
    rows = [m for m, _, _ in case.sizes]
    if form == "masked":
        case = replace(case, sizes=tuple((max(rows), n, k) for _, n, k in case.sizes))
    operands = make_operands(case, device, 0) if device.type == "cuda" else empty_operands(case)
    options: dict[str, Any] = {"out_dtype": RESULT_DTYPES[work.out]}
    if form == "ragged":
        options["offs"] = torch.tensor(list(accumulate(rows)), dtype=torch.int32, device=device)
    elif form == "masked":
        options["masked_m"] = torch.tensor(rows, dtype=torch.int32, device=device)
    name = "dual_gemm" if case.operation == "dual_gemm" else "gemm"
    operation = getattr(parts, name if form == "batched" else f"grouped_{name}")
    a, *weights = in_form(form, *operands.sides)
    return operation, [a, parts.gate_up(*weights) if len(weights) > 1 else weights[0]], options
