"""`nvfp4-cute emulate`: somebody's CuTe DSL script, unmodified, on a virtual GPU."""

import argparse
import importlib.metadata
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nvfp4_cute import env
from nvfp4_cute.bench import page as pages
from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.verbs import Verbs, add_verb
from nvfp4_cute.emulator.banks import BankUse
from nvfp4_cute.emulator.check.findings import of_failure, record, reported, sarif
from nvfp4_cute.emulator.check.ledger import Hazard, HazardError
from nvfp4_cute.emulator.fronts.script import Outcome, run_script
from nvfp4_cute.emulator.fronts.virtual_gpu import LaunchRow, VirtualGpu
from nvfp4_cute.emulator.kernel_names import short_name
from nvfp4_cute.emulator.record.device_images import KernelStore
from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.gpus.timing_figures import MODEL_ERROR, constants_of
from nvfp4_cute.terminal import bar
from nvfp4_cute.timing.clock import Clock

TIMES_NOTE = (
    "host s: what the emulation took here. Neither it nor any time that the script prints (events, benchmark helpers) "
    "says anything about a GPU."
)
LAUNCH_HEADER = (
    "launch", "kernel", "grid", "cluster", "CTAs", "warp instr.", "MMAs", "TMA bytes", "host s"
)  # fmt: skip

EXAMPLES = """\
examples:
  nvfp4-cute emulate gemm.py --mnk 256,256,128             what follows the script belongs to it
  nvfp4-cute emulate --arch sm_120a --stats gemm.py        a GeForce kernel, and a table of its launches
  nvfp4-cute emulate --arch sm_90a --sm-count 4 gemm.py    a Hopper kernel whose persistent grid has 4 CTAs
  nvfp4-cute emulate --timing b200 gemm.py                 the modelled time of every launch, and what takes it
  nvfp4-cute emulate --check gemm.py                       find races, unwritten bytes, leaks (slower)
  nvfp4-cute emulate --check=all --sarif found.sarif gemm.py   warnings fail, too; and a file for a code host
  nvfp4-cute emulate --check --html found.html gemm.py     findings and launches as a page for a browser
  nvfp4-cute emulate --mode lazy gemm.py                   every copy and MMA as late as the memory model allows

Choose small sizes: a launch is thousands of times slower than on a GPU. Times that the script measures are host times;
cutlass.testing.benchmark runs a kernel once. The exit code is the script's; 1 if a kernel failed or a hazard is an error;
3 if the script ended well and --check=all found warnings (--check shows them). Of a test suite: pytest --cute-emulate sm_100a
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its options."""
    text = (
        "Run a CuTe DSL script that expects a GPU, unmodified: torch tensors on cuda, cute.compile, launches, its own "
        "checks. Every kernel it launches is executed on the emulator."
    )
    parser = add_verb(verbs, "emulate", text, EXAMPLES)
    parser.add_argument(
        "--arch",
        default="sm_100a",
        help="the GPU: sm_90a, sm_100a, sm_103a, sm_110a, sm_120a, sm_121a, or a product (B300) (default %(default)s)",
    )
    parser.add_argument(
        "--sm-count", type=types.positive, metavar="N", help="SMs (default: those of a GPU of that arch)"
    )
    for spelling, what in (
        (
            "--check",
            "report hazards: races, missing fences, bytes that nobody wrote, leaks, stores out of bounds",
        ),
        ("--check=errors", "the same"),
        ("--check=all", "show notes, too, and let warnings fail: they make the exit code 3"),
    ):
        level = spelling.partition("=")[2] or "errors"
        parser.add_argument(spelling, dest="check", action="store_const", const=level, help=what)
    parser.add_argument(
        "--json",
        type=types.output_file,
        metavar="FILE",
        help="write launches and findings for machines; - is stdout",
    )
    parser.add_argument(
        "--sarif", type=types.output_file, metavar="FILE", help="write findings as SARIF, for code hosts"
    )
    parser.add_argument(
        "--html",
        type=types.output_file,
        metavar="FILE",
        help="write launches and findings as a page for a browser",
    )
    parser.add_argument(
        "--mode",
        default="eager",
        help="when asynchronous copies and MMAs happen: eager (at issue), lazy (as late as allowed), or random:SEED; "
        "a correct kernel gives one result under all (default %(default)s)",
    )
    parser.add_argument(
        "--timing",
        metavar="GPU",
        help="model the time of every launch on this GPU (b200, rtx5090, h200, ...), whose architecture takes the place of "
        "--arch; results are computed as without",
    )
    parser.add_argument(
        "--stats",
        action="store_true",
        help="afterwards, tables of all launches and of bank conflicts on stderr",
    )
    parser.add_argument(
        "--traceback", action="store_true", help="also show where in the script a kernel failure surfaced"
    )
    parser.add_argument("script", type=Path, help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the script; return its exit code, or what its kernels make of it."""
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
        json_file=args.json,
        sarif_file=args.sarif,
        html_file=args.html,
    )


def emulate(
    script: Path,
    arguments: Sequence[str],
    *,
    arch: str,
    sm_count: int | None = None,
    mode: str = "eager",
    check: str | None = None,
    timing: str | None = None,
    stats: bool = False,
    traceback: bool = False,
    json_file: Path | None = None,
    sarif_file: Path | None = None,
    html_file: Path | None = None,
) -> int:
    """Run a script on a virtual GPU and return its exit code.

    1 if a kernel failed, a hazard is an error, or the script raised; `ONLY_WARNINGS` if the script ended well and
    `check="all"` found warnings.

    Args:
        script: path of a Python file.  arguments: its `sys.argv[1:]`.
        arch: PTX target of the GPU, or its name.  sm_count: its SMs; None takes those of the product.
        mode: when asynchronous operations happen: "eager", "lazy", or "random:SEED".
        check: look for hazards (races, bytes that nobody wrote, ...); "errors" or "all" fail the run.
        timing: GPU on which to model the time of every launch; its architecture and SMs take the place of `arch`.
        stats: print a table of all launches, and one of bank conflicts.
        traceback: show where in the script a kernel failure surfaced.
        json_file, sarif_file: where to write what was found, for machines.  html_file: for people with a browser.

    Raises:
        EmulatorError: there is no such script, or no way to launch anything here.  ValueError: unknown mode.
        UnsupportedTarget: an unknown GPU.
    """
    if not script.is_file():
        raise EmulatorError(f"there is no file `{script}`")
    progress = Progress()
    constants = None
    if timing is not None:
        constants = constants_of(lookup(timing))
        arch, sm_count = constants.arch, constants.num_sms
    elif not arch.startswith("sm_"):
        target = lookup(arch)
        arch, sm_count = target.arch, sm_count or target.num_sms
    gpu = VirtualGpu(
        arch,
        sm_count,
        progress,
        mode=mode,
        check=check is not None,
        count_banks=stats,
        timing=Clock(constants) if constants else None,
        store=kernel_store(),
    )
    outcome = run_script(script, arguments, gpu)
    sys.stdout.flush()
    for modelled in gpu.timings:
        print(modelled.report(), file=sys.stderr)
    if timing is not None:
        print(MODEL_ERROR, file=sys.stderr)
    if stats:
        print(launch_table(gpu.launches), file=sys.stderr)
        print(bank_table(gpu.launches), file=sys.stderr)
    checked, check = check is not None, check or "errors"
    report(outcome, check, traceback)
    failed = outcome.error.hazards if isinstance(outcome.error, HazardError) else []
    others = reported((hazard for hazard in gpu.hazards if hazard not in failed), check)
    for hazard in others:
        print(f"nvfp4-cute emulate: kernel {short_name(hazard.kernel)}: {hazard}", file=sys.stderr)
    if checked and not isinstance(outcome.error, EmulatorError) and (gpu.launches or outcome.error is None):
        print(f"nvfp4-cute emulate: {verdict(len(gpu.launches), others)}", file=sys.stderr)
    code = outcome.exit_code
    if code == 0 and check == "all" and any(hazard.severity == "warning" for hazard in others):
        code = ONLY_WARNINGS
    found = [*of_failure(outcome.error, check), *map(record, others)]
    if json_file is not None or html_file is not None:
        summary = {
            "version": 1,
            "script": str(script),
            "arguments": list(arguments),
            "arch": arch,
            "mode": mode,
            "exit_code": code,
            "error": None if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}",
            "launches": [_launch_record(row) for row in gpu.launches],
            "findings": found,
        }
        if json_file is not None:
            write_json(summary, json_file)
        if html_file is not None:
            html_file.write_text(browser_page(summary, gpu.launches), encoding="utf-8")
    if sarif_file is not None:
        version = importlib.metadata.version("nvfp4-cute")
        write_json(sarif(found, version, script, Path.cwd()), sarif_file)
    return code


def verdict(launches: int, shown: Sequence[Hazard]) -> str:
    """What a check that stopped nothing says at the end: a silent one would look like none."""
    counts = Counter(hazard.severity for hazard in shown)
    found = [f"{count} {severity}{'s' * (count > 1)}" for severity, count in counts.items()] or ["no hazards"]
    return f"{launches} launch{'es' * (launches != 1)} checked: {', '.join(found)}"


def browser_page(summary: dict[str, Any], launches: Sequence[LaunchRow]) -> str:
    """What ``--json`` writes, and the table of launches, as one page that needs no network."""
    found, code = summary["findings"], summary["exit_code"]
    counts = Counter(finding["severity"] for finding in found)
    said = [f"{count} {severity}{'s' * (count > 1)}" for severity, count in counts.items()] or ["no finding"]
    title = f"{Path(summary['script']).name} on {summary['arch']}"
    how = f"nvfp4-cute emulate, asynchronous operations {summary['mode']}. Arguments: {' '.join(summary['arguments']) or 'none'}."
    facts = {"findings": said, "exit code": [str(code)], "launches": [str(len(launches))]}
    rows = [
        (f["severity"], f["kind"], short_name(f.get("kernel", "")), f["text"],
         _place_of(f.get("site")), _place_of(f.get("other")))
        for f in found
    ]  # fmt: skip
    wrong = [number for number, finding in enumerate(found) if finding["severity"] == "error"]
    header = ("severity", "kind", "kernel", "what", "where", "the other access")
    body = [
        pages.heading(title, how, TIMES_NOTE),
        pages.cards(facts),
        pages.section(
            "What stopped it", pages.table(("error",), [(summary["error"],)], [0]) if summary["error"] else ""
        ),
        pages.section("Findings", pages.table(header, rows, wrong)),
        pages.section(
            "Launches", pages.table(LAUNCH_HEADER, [_cells(str(i), row) for i, row in enumerate(launches)])
        ),
    ]
    return pages.page(title, "".join(body))


def _place_of(site: dict[str, Any] | None) -> str:
    """A place of a finding: source and PTX."""
    if site is None:
        return ""
    source = f"{site['file']}:{site['line']}\n" if "file" in site else ""
    return (
        f"{source}PTX line {site['ptx_line']}: {site['ptx']}\nCTA {tuple(site['cta'])}, warp {site['warp']}"
    )


ONLY_WARNINGS = 3
"""Exit code of a run that ended well but for warnings, where they count."""


def write_json(value: Any, path: Path) -> None:
    """Write a value; `-` is stdout."""
    text = json.dumps(value, indent=1) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        path.write_text(text)


def _launch_record(row: LaunchRow) -> dict[str, Any]:
    return {
        "kernel": row.kernel,
        "grid": list(row.grid),
        "cluster": list(row.cluster),
        "finished": row.finished,
        "warp_instructions": row.work.instructions,
        "seconds": round(row.work.seconds, 3),
    }


def kernel_store() -> KernelStore | None:
    """Where PTX of exported objects is kept: beside the compiled kernels; None where nothing is kept on disk."""
    folder = env.cache_dir()
    return KernelStore(folder / "ptx") if folder else None


def report(outcome: Outcome, check: str, traceback: bool) -> None:
    """Say on stderr what stopped the script: a kernel failure in its own words, any other exception as Python does."""
    error = outcome.error
    if error is None:
        return
    if isinstance(error, EmulatorError):
        if traceback and outcome.trace:
            print(outcome.trace, file=sys.stderr)
        if isinstance(error, HazardError):
            error = HazardError(reported(error.hazards, check))
        print(f"nvfp4-cute emulate: {error}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print("nvfp4-cute emulate: interrupted", file=sys.stderr)
    else:
        print(outcome.trace or f"{type(error).__name__}: {error}", end="", file=sys.stderr)


class Progress:
    """A bar on stderr for each launch; nothing where nobody watches."""

    def __init__(self) -> None:
        """No launch yet."""
        self._bar: tqdm | None = None
        self._started = 0.0

    def begin(self, row: LaunchRow) -> None:
        """Show a launch."""
        self._started = time.perf_counter()
        self._bar = bar(total=row.ctas, unit="CTA", desc=short_name(row.kernel))

    def progress(self, row: LaunchRow, done: int, total: int) -> None:
        """Advance the bar."""
        if self._bar is not None and not self._bar.disable:
            rate = row.work.instructions / max(time.perf_counter() - self._started, 1e-9)
            self._bar.set_postfix_str(f"{rate:,.0f} instr/s", refresh=False)
            self._bar.update(done - self._bar.n)

    def end(self, row: LaunchRow) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def launch_table(rows: Sequence[LaunchRow]) -> str:
    """What every launch executed, and the sum."""
    lines = [LAUNCH_HEADER, *(_cells(str(i), row) for i, row in enumerate(rows))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    seconds = sum(row.work.seconds for row in rows)
    instructions = sum(row.work.instructions for row in rows)
    launches = "1 launch" if len(rows) == 1 else f"{len(rows)} launches"
    total = f"{launches}, {instructions:,} warp instructions, {seconds:.1f} s"
    return f"{table}\n{total}\n{TIMES_NOTE}"


def bank_table(rows: Sequence[LaunchRow]) -> str:
    """What the instructions of each kernel asked of the banks of shared memory, over all its launches."""
    tables = []
    for kernel in dict.fromkeys(row.kernel for row in rows):
        use = sum((row.work.banks for row in rows if row.kernel == kernel), BankUse())
        if use:
            tables.append(f"shared memory of {short_name(kernel)}\n{use.table()}")
    return "\n".join(tables) or "no access to shared memory by ld, st, ldmatrix or stmatrix"


def _cells(index: str, row: LaunchRow) -> tuple[str, ...]:
    work = row.work
    return (
        index,
        short_name(row.kernel),
        "x".join(map(str, row.grid)),
        "x".join(map(str, row.cluster)),
        str(row.ctas) if row.finished else f"failed after {work.ctas} of {row.ctas}",
        f"{work.instructions:,}",
        f"{work.mmas:,}",
        f"{work.tma_load_bytes + work.tma_store_bytes:,}",
        f"{work.seconds:.2f}",
    )
