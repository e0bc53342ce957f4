"""`nvfp4-cute emulate`: runs an unmodified CuTe DSL script on a virtual GPU."""

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nvfp4_cute import env
from nvfp4_cute.cli import machine_checkers
from nvfp4_cute.emulator.check.findings import common, of_failure, reported, sarif
from nvfp4_cute.emulator.check.findings import record as finding_record
from nvfp4_cute.emulator.check.ledger import Hazard, HazardError, counted
from nvfp4_cute.emulator.fronts.launch_report import bank_table, launch_table, needs_table
from nvfp4_cute.emulator.fronts.launch_report import record as launch_record
from nvfp4_cute.emulator.fronts.script import Outcome, run_script
from nvfp4_cute.emulator.fronts.script_arch import other_arch, wanted_arch
from nvfp4_cute.emulator.fronts.virtual_gpu import LaunchRow, VirtualGpu
from nvfp4_cute.emulator.kernel_names import short_name
from nvfp4_cute.emulator.record.device_images import KernelStore
from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.gpus.timing_figures import MODEL_ERROR, constants_of
from nvfp4_cute.terminal import bar
from nvfp4_cute.timing import trace
from nvfp4_cute.timing.clock import Clock

DEFAULT_ARCH = "sm_100a"
INTERRUPTED = 130
"""Exit code of an interrupted run, equal for all verbs."""


def run(args: argparse.Namespace) -> int:
    """Runs the script; returns its exit code, or the one for its kernels' faults."""
    return emulate(
        args.script,
        args.arguments,
        arch=args.arch,
        sm_count=args.sm_count,
        mode=args.mode,
        check=args.check,
        timing=args.timing,
        stats=args.stats,
        traceback=args.traceback,
        files=Files(args.json, args.sarif, args.trace),
    )


@dataclass(frozen=True)
class Files:
    """Files for the findings of a run: for machines, for code hosts, and for Perfetto. None writes nothing."""

    json: Path | None = None
    sarif: Path | None = None
    trace: Path | None = None


def emulate(
    script: Path,
    arguments: Sequence[str],
    *,
    arch: str | None = None,
    sm_count: int | None = None,
    mode: str = "eager",
    check: str | None = None,
    timing: str | None = None,
    stats: bool = False,
    traceback: bool = False,
    files: Files = Files(),
) -> int:
    """Runs a script on a virtual GPU and returns its exit code.

    1 if a kernel failed, a hazard is an error, or the script raised; `ONLY_WARNINGS` if the script ended well and `check="all"`
    found warnings; `INTERRUPTED` after Ctrl-C.

    Args:
        script: path of a Python file.
        arguments: its `sys.argv[1:]`.
        arch: PTX target of the GPU, or its name; None selects the one for which the script is written.
        sm_count: number of SMs; None for that of the product.
        mode: when asynchronous operations happen: "eager", "lazy", or "random:SEED".
        check: look for hazards (races, bytes that nobody wrote, ...); "errors" or "all" fail the run.
        timing: GPU on which to model the time of every launch; its architecture and SMs replace `arch`.
        stats: print tables of all launches, of their kernels' resources, and of bank conflicts.
        traceback: show where in the script a kernel failure surfaced.
        files: files to write. A timeline without `timing` is that of a GPU of the architecture.

    Raises:
        EmulatorError: the script does not exist, or nothing can be launched here.
        ValueError: the mode is unknown.
        UnsupportedTarget: the GPU is unknown.
    """
    if not script.is_file():
        raise EmulatorError(f"there is no file `{script}`")
    found_arch = None if arch or timing else wanted_arch(script)
    arch = arch or (found_arch[0] if found_arch else DEFAULT_ARCH)
    if found_arch and arch != DEFAULT_ARCH:
        say(f"{script.name} names {found_arch[1]}: running with --arch {arch}")
    constants = None
    if timing is not None or files.trace is not None:
        constants = constants_of(lookup(timing or arch))
        arch, sm_count = constants.arch, constants.num_sms if timing else sm_count
    if not arch.startswith("sm_"):
        target = lookup(arch)
        arch, sm_count = target.arch, sm_count or target.num_sms
    gpu = VirtualGpu(
        arch,
        sm_count,
        Progress(),
        mode=mode,
        check=check is not None,
        count_banks=stats,
        timing=Clock(constants, timeline=files.trace is not None) if constants else None,
        store=kernel_store(),
    )
    outcome = run_script(script, arguments, gpu)
    sys.stdout.flush()
    if isinstance(outcome.error, KeyboardInterrupt):
        return INTERRUPTED
    for modelled in gpu.timings:
        print(modelled.report(), file=sys.stderr)
    if constants is not None:
        print(MODEL_ERROR, file=sys.stderr)
    if stats:
        for table in (launch_table, needs_table, bank_table):
            print(table(gpu.launches), file=sys.stderr)
    checked, check = check is not None, check or "errors"
    report(outcome, check, traceback, arch)
    if outcome.exit_code and gpu.launches and not checked:
        say("pass --check to look for races, and to see lines of Python in faults of kernels")
    failed = outcome.error.hazards if isinstance(outcome.error, HazardError) else []
    others = reported((hazard for hazard in gpu.hazards if hazard not in failed), check)
    for hazard in others:
        say(f"kernel `{short_name(hazard.kernel)}`: {hazard}")
    for line in common([*failed, *others]):
        say(line)
    if checked and not isinstance(outcome.error, EmulatorError):
        say(verdict(len(gpu.launches), others))
    for line in machine_checkers.lines(gpu) if checked else ():
        say(line)
    code = outcome.exit_code
    if code == 0 and check == "all" and any(hazard.severity == "warning" for hazard in others):
        code = ONLY_WARNINGS
    found = [*of_failure(outcome.error, check), *map(finding_record, others)]
    summary = {
        "version": 2,
        "script": str(script),
        "arguments": list(arguments),
        "arch": arch,
        "mode": mode,
        "checked": checked,
        "exit_code": code,
        "error": None if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}",
        "launches": [launch_record(row) for row in gpu.launches],
        "findings": found,
    }
    write(files, summary, gpu)
    return code


def say(text: str) -> None:
    """Prints a line of this command among the script's output."""
    print(f"nvfp4-cute emulate: {text}", file=sys.stderr)


def write(files: Files, summary: dict[str, Any], gpu: VirtualGpu) -> None:
    """Writes the requested files."""
    if files.json is not None:
        write_json(summary, files.json)
    if files.sarif is not None:
        version = importlib.metadata.version("nvfp4-cute")
        write_json(sarif(summary["findings"], version, Path(summary["script"]), Path.cwd()), files.sarif)
    if files.trace is not None:
        if gpu.timings:
            trace.write(files.trace, *gpu.timings)
            say(f"timeline in {files.trace}: open it at https://ui.perfetto.dev or chrome://tracing")
        else:
            say(f"no launch ended, so there is no timeline to write to {files.trace}")


def verdict(launches: int, shown: Sequence[Hazard]) -> str:
    """Returns the closing line of a check that stopped nothing; silence would look like no check."""
    if not launches:
        return "nothing was checked: the script launched no kernel"
    found = counted(hazard.severity for hazard in shown) or "no hazards"
    return f"{launches} launch{'es' * (launches != 1)} checked: {found}"


ONLY_WARNINGS = 3
"""Exit code of a run with warnings but no errors, if warnings count."""


def write_json(value: Any, path: Path) -> None:
    """Writes a value; `-` is stdout."""
    text = json.dumps(value, indent=1) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        path.write_text(text)


def kernel_store() -> KernelStore | None:
    """Returns the store for PTX of exported objects, next to the compiled kernels; None if nothing is stored on disk."""
    folder = env.cache_dir()
    return KernelStore(folder / "ptx") if folder else None


def report(outcome: Outcome, check: str, traceback: bool, arch: str) -> None:
    """Reports on stderr what stopped the script: kernel failures with their own message, other exceptions like Python."""
    error = outcome.error
    if error is None:
        return
    if isinstance(error, EmulatorError):
        if traceback and outcome.trace:
            print(outcome.trace, file=sys.stderr)
        if isinstance(error, HazardError):
            error = HazardError(reported(error.hazards, check))
        say(str(error))
    else:
        print(outcome.trace or f"{type(error).__name__}: {error}", end="", file=sys.stderr)
        other = other_arch(str(error))
        if other is not None and other != arch:
            say(f"the script compiles for {other} and this virtual GPU is {arch}: pass --arch {other}")


class Progress:
    """A bar on stderr for each launch; nothing without a terminal."""

    def __init__(self) -> None:
        """Starts without a launch."""
        self._bar: tqdm | None = None
        self._started = 0.0

    def begin(self, row: LaunchRow) -> None:
        """Shows a launch."""
        self._started = time.perf_counter()
        self._bar = bar(total=row.ctas, unit="CTA", desc=short_name(row.kernel))

    def progress(self, row: LaunchRow, done: int, total: int) -> None:
        """Advances the bar."""
        if self._bar is not None and not self._bar.disable:
            rate = row.work.instructions / max(time.perf_counter() - self._started, 1e-9)
            self._bar.set_postfix_str(f"{rate:,.0f} instr/s", refresh=False)
            self._bar.update(done - self._bar.n)

    def end(self, row: LaunchRow) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
