"""`nvfp4-cute export --format trace`: exports a problem for SOL-ExecBench and FlashInfer-Bench."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nvfp4_cute.competition.trace import folder
from nvfp4_cute.problems import trace_schema as schema
from nvfp4_cute.terminal import Progress

FOLDER, SET = "trace", "trace-set"
FORMATS = (FOLDER, SET)


def run(
    problem: str,
    output: Path,
    form: str,
    *,
    axes: Mapping[str, Any] | None = None,
    returns: bool = False,
    overwrite: bool = False,
) -> int:
    """Writes a folder, and prints how to evaluate it. Returns 0.

    Args:
        problem, axes, returns: see ``folder.load``.
        output: the folder.
        form: "trace", three files whose inputs the reference makes, or "trace-set", FlashInfer-Bench's folders with
            inputs in safetensors files.
        overwrite: whether an existing definition is replaced.

    Raises:
        ValueError: see ``folder.load``; or the definition exists.
    """
    with Progress(desc="export", unit="source file") as bar:
        definition, workloads, solution = folder.load(problem, axes, returns=returns, reads=bar.update)
    place = output / schema.DEFINITION_FILE if form == FOLDER else folder.definition_path(output, definition)
    if place.exists() and not overwrite:
        raise ValueError(f"{place} would be overwritten; name another folder, or pass --force")
    if form == FOLDER:
        schema.write_folder(output, definition, workloads, solution)
        how = (
            f"nvfp4-cute eval {output}, or sol-execbench {output} --solution {output / schema.SOLUTION_FILE}"
        )
    else:
        folder.write_trace_set(output, definition, workloads, solution)
        how = f"flashinfer-bench run --local {output}"
    lines = sum(text.count("\n") for text in solution.sources.values())
    print(
        f"{output}: {definition.name}, {len(workloads)} workloads, {lines:,} lines of solution",
        file=sys.stderr,
    )
    print(f"try it: {how}", file=sys.stderr)
    if axes is None and not torch.cuda.is_available():
        sizes = ", ".join(definition.axes)
        print(
            f"without a GPU, sizes such as these take long: export again with --axes NAME=SIZE,... --force ({sizes})",
            file=sys.stderr,
        )
    return 0
