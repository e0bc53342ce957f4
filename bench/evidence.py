"""Evidence by form: our kernels' forms of hardware use, and public kernels with equal forms that ran on hardware.

Public kernels and ours run on the emulator, which notes their forms (`emulator.record.forms`): instructions with all
modifiers, fields of descriptors, columns of tensor memory, tensor maps, launch attributes, and the instructions around
fences. A form is proven if a public kernel uses it on the same family of GPUs. Any other form needs a source that says
it works, or is listed as unproven, with the probe that decides it.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from tqdm import tqdm

from nvfp4_cute.bench.evidence_cases import CASES, PROJECTS, Case, Project
from nvfp4_cute.bench.evidence_ours import ARCHS, SIZES, case_names, forms_of_name
from nvfp4_cute.bench.evidence_page import RESULTS, Evidence, page
from nvfp4_cute.emulator.record.forms import Form

SM_COUNT = 16
"""A small number, so that persistent kernels loop over tiles of small problems."""

SECONDS = 900
LINES = 12
"""Lines of a failed run's output that are shown."""
CACHE = Path("~/.cache/nvfp4_cute_evidence").expanduser()
SETTINGS = {"TORCHDYNAMO_DISABLE": "1", "QUACK_CACHE_ENABLED": "0"}
"""Environment of a run: torch.compile needs a CUDA build of torch; what was compiled for a GPU cannot be emulated."""

EPILOG = """A project is run where its checkout is named. What its scripts import has to be installed: triton, einops, pytest,
apache-tvm-ffi, torch-c-dlpack-ext, nvidia-ml-py; for FlashAttention also QuACK. Runs are kept in the cache, and repeated when
the script, the version or the naming of forms changes. bench/results/evidence.json keeps every public form: --ours-only needs
no checkout. The exit code is 1 if a run fails. A form of ours without evidence is listed on the page;
tests/bench/test_evidence.py fails for one that is not listed.

examples:
  python -m nvfp4_cute.bench.evidence ~/cutlass ~/quack ~/flash-attention ~/flashinfer   all of it: hours of one core, once
  python -m nvfp4_cute.bench.evidence ~/cutlass --only 'sm_120a .*NVFP4' --list          what would run
  python -m nvfp4_cute.bench.evidence --ours-only                                       our kernels against the stored forms
"""

Result = tuple[list[Form], str]
"""Forms of a run, and what went wrong ("" if nothing)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the requested parts, and writes the page and the data. Returns 0, or 1 if a run failed."""
    parser = _parser()
    args = parser.parse_args(argv)
    checkouts = _recognized(args.checkouts, parser)
    cases = [case for case in CASES if case.project in checkouts and re.search(args.only, str(case))]
    if args.list:
        print("\n".join(map(str, cases if checkouts else CASES)))
        return 0
    if not cases and not args.ours_only:
        parser.error("no run matches: name checkouts (--list shows the runs), or take --ours-only")
    args.cache.mkdir(parents=True, exist_ok=True)
    evidence = Evidence.load()
    failed = 0
    if cases:
        runs = {str(case): partial(run_case, case, checkouts[case.project], args.cache) for case in cases}
        found = run_all(runs, args.jobs, "public")
        failed += sum(bool(error) for _, error in found.values())
        versions = {project.name: version(folder) for project, folder in checkouts.items()}
        evidence = evidence.with_runs(
            {name: forms for name, (forms, error) in found.items() if not error}, versions
        )
    every = [name for arch in ARCHS for name in case_names(arch)]
    names = [name for name in every if re.search(args.ours, name)]
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as workers:
        found = run_all(
            {name: partial(run_ours, name, args.cache, workers) for name in names}, args.jobs, "ours"
        )
    failed += sum(bool(error) for _, error in found.values())
    evidence = evidence.with_ours({name: forms for name, (forms, error) in found.items() if not error})
    evidence = evidence.kept(map(str, CASES), every)
    evidence.save()
    (RESULTS / "evidence.md").write_text(page(evidence))
    print(evidence.summary())
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nvfp4_cute.bench.evidence",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkouts", type=Path, nargs="*", metavar="CHECKOUT", help="folders of public projects"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="REGEX",
        help="of public runs: project, architecture, script, arguments",
    )
    parser.add_argument(
        "--ours", default="", metavar="REGEX", help="of our kernels: architecture, form, config, dtype"
    )
    parser.add_argument(
        "--ours-only", action="store_true", help="run our kernels alone, against the stored public forms"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), metavar="N", help="runs at a time (default: cores)"
    )
    parser.add_argument(
        "--cache", type=Path, default=CACHE, metavar="DIR", help="where runs are kept (default: %(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="print the public runs, and stop")
    return parser


def _recognized(folders: Sequence[Path], parser: argparse.ArgumentParser) -> dict[Project, Path]:
    """Returns the project of each checkout folder."""
    found = {}
    for folder in folders:
        project = next((p for p in PROJECTS if (folder / p.marker).is_file()), None)
        if project is None:
            known = ", ".join(f"{p.name} ({p.marker})" for p in PROJECTS)
            parser.error(f"{folder} is no checkout of a known project: {known}")
        found[project] = folder.resolve()
    return found


def run_all(runs: Mapping[str, Callable[[], Result]], jobs: int, what: str) -> dict[str, Result]:
    """Runs everything, `jobs` at a time, with a progress bar; shows failures when they happen."""
    size = shutil.get_terminal_size()
    results = {}
    with (
        ThreadPoolExecutor(jobs) as pool,
        tqdm(
            total=len(runs), unit="run", desc=what, disable=None, ncols=size.columns, nrows=size.lines
        ) as bar,
    ):
        futures = {pool.submit(run): name for name, run in runs.items()}
        for future in as_completed(futures):
            name = futures[future]
            forms, error = results[name] = future.result()
            if bar.disable or error:
                tqdm.write(f"failed: {name}\n{error}" if error else f"{len(forms):4} forms: {name}")
            bar.update()
    return {name: results[name] for name in runs}


# ---- one run ---------------------------------------------------------------------------------------------------------
def run_case(case: Case, checkout: Path, cache: Path) -> Result:
    """Returns the forms of a public case, from the cache if it ran before."""
    script = case.path(checkout)
    kept = cache / f"{_digest([str(case), version(checkout), *_text_of(script)])}.json"
    if kept.is_file():
        return _forms_in(kept), ""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "forms.json"
        # Projects cache compiled code in the user's home folder; a separate home compiles everything again.
        settings = {**SETTINGS, "HOME": scratch}
        if case.project.python_path is not None:
            settings["PYTHONPATH"] = str((checkout / case.project.python_path).resolve())
        command = ["env", *(f"{name}={value}" for name, value in settings.items())]
        command += [sys.executable, "-m", "nvfp4_cute.bench.evidence_run", str(out), case.arch, str(SM_COUNT)]
        command += [str(script), *shlex.split(case.arguments)]
        try:
            ended = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return [], f"killed after {SECONDS} s"
        if not out.is_file():
            return [], "\n".join((ended.stderr or ended.stdout).strip().splitlines()[-LINES:])
        shutil.copy(out, kept)
    return _forms_in(kept), ""


def _text_of(script: Path) -> list[str]:
    return [script.read_text()] if script.is_file() else []


def run_ours(name: str, cache: Path, workers: Executor) -> Result:
    """Returns the forms of one of our kernels, by the name of its case."""
    folder, arch = Path(__file__).parents[1], name.split(" ")[0]
    sources = [
        path
        for part in ("common", "simt", arch[:-1].replace("_", ""))
        for path in (folder / "kernels" / part).glob("*.py")
    ]
    sources += (folder / "nvfp4_cute" / "planning" / "arch").rglob("*.py")
    key = [name, SIZES, *(path.read_text() for path in sorted(sources))]
    kept = cache / f"{_digest(key)}.json"
    if kept.is_file():
        return _forms_in(kept), ""
    forms, error = workers.submit(forms_of_name, name).result()
    if not error:
        kept.write_text(json.dumps({"forms": forms}))
    return forms, error


def _forms_in(file: Path) -> list[Form]:
    return [Form(*form) for form in json.loads(file.read_text())["forms"]]


def _digest(key: Iterable[str]) -> str:
    """Returns a digest of a run's dependencies, and of the naming of forms."""
    naming = Path(__file__).parents[1] / "nvfp4_cute" / "emulator" / "record"
    parts = [*key, *(file.read_text() for file in sorted(naming.glob("form*.py")))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def version(checkout: Path) -> str:
    """Returns the commit of a checkout, from git or its file COMMIT; "unknown" without either."""
    marker = checkout / "COMMIT"
    if marker.is_file():
        return marker.read_text().strip()
    git = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
