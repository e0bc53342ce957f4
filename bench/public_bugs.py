"""Reported synchronization faults of public kernels, reproduced from the projects' own sources under the checker.

The sources are wheels of the package index and a clone of CUTLASS, in a folder that you pass. Each kernel runs as it was
released, and with its fix: from a later release, or with the lines that the fix adds. No code of the projects is stored here.
"""

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4_cute.bench import public_bug_runs
from nvfp4_cute.bench.public_bug_runs import Edit

SECONDS = 1800

SGLANG, FLASHINFER = "sglang-0.5.23", "flashinfer_python-0.7.4"
CUDNN = "nvidia_cudnn_frontend-{}"
CUTLASS = "cutlass"

PARTS = {
    "sglang": ("sglang/kernels/",),
    "nvidia_cudnn_frontend": ("cudnn/",),
    "flashinfer_python": ("flashinfer/topk_varlen/",),
}
"""Folders that are unpacked from the wheel of each distribution."""

EPILOG = """fetch the sources (about 180 MB), then run:
  python -m pip download --no-deps --dest FOLDER sglang==0.5.23 flashinfer-python==0.7.4 \\
      nvidia-cudnn-frontend==1.26.0
  python -m pip download --no-deps --dest FOLDER nvidia-cudnn-frontend==1.27.0     (also 1.28.0)
  git clone https://github.com/NVIDIA/cutlass FOLDER/cutlass
  python -m nvfp4_cute.bench.public_bugs FOLDER --save bench/results/public_bugs.md

A bug whose sources are missing is skipped with the reason. The exit code is 0 if every bug that ran is named in the
released kernel and not in the fixed one, else 1.
"""


@dataclass(frozen=True)
class Bug:
    """A reported fault of a public kernel.

    Attributes:
        name: short name, of the function in `public_bug_runs` that runs the kernel.
        report: project and number of the issue or pull request.
        fault: what is wrong.
        named: regular expression of a finding that describes the fault.
        source: distribution and version of the wheel, or ``cutlass@COMMIT``.
        fixed: the same for a source with the fix; empty if `edits` make it.
        edits: lines that the fix adds or changes.
        arguments: additional arguments of the function.
        remains: what other findings of the fixed kernel mean.
    """

    name: str
    report: str
    fault: str
    named: str
    source: str
    fixed: str = ""
    edits: tuple[Edit, ...] = ()
    arguments: tuple[str, ...] = ()
    sm_count: int = 4
    remains: str = ""


def either(one: str, other: str) -> str:
    """Returns a regular expression of a race of two instructions: a run may show either one first."""
    return f"race: ({one} .* {other}|{other} .* {one})"


BARRIER = "cute.arch.barrier(barrier_id=1, number_of_threads={})"

BUGS = (
    Bug(
        "fused_a_gemm",
        "SGLang #37287",
        "split-K partial sums overwrite stage 0 of A while other warps read it",
        either(r"st\.shared", "ldmatrix"),
        SGLANG,
        edits=(Edit("cutedsl_dsv3_fused_a_gemm.py", 249, BARRIER.format("COMPUTE_THREADS")),),
    ),
    Bug(
        "gdn_kkt",
        "SGLang #37288",
        "GDN prefill: the next chunk overwrites beta and the gates",
        either(r"st\.shared", r"ld\.shared"),
        SGLANG,
        edits=(Edit("kernel_kkt_inv_uw.py", 652, BARRIER.format(128)),),
        remains="the MMA warp frees tensor memory after the epilogue of an earlier chunk, not the last one (line 298)",
    ),
    Bug(
        "gdn_output",
        "SGLang #37288",
        "GDN prefill: the next chunk overwrites the gates of the mask",
        either(r"st\.shared", r"ld\.shared"),
        SGLANG,
        edits=(Edit("kernel_o.py", 378, BARRIER.format(128)),),
        remains="the CTA may exit before its last TMA store has read shared memory",
    ),
    Bug(
        "kda_kkt",
        "SGLang #37289",
        "KDA prefill: the next chunk overwrites beta",
        either(r"st\.shared", r"ld\.shared"),
        SGLANG,
        edits=(Edit("kernel_kkt_inv_uw.py", 592, BARRIER.format(128)),),
        remains="the MMA warp frees tensor memory too early, as in the GDN kernel (line 319)",
    ),
    Bug(
        "indexer_backward",
        "cudnn-frontend #426",
        "32 lanes store weights, one elected lane arrives",
        r"race \(warning\): ld\.shared .* only another lane announced",
        CUDNN.format("1.26.0"),
        CUDNN.format("1.27.0"),
        remains="tensor memory is freed under loads of the reduction warps; the CTA may exit before its TMA store of dQ ends",
    ),
    Bug(
        "grouped_gemm",
        "cudnn-frontend #652",
        "grouped GEMM quant: an accumulator is released before it is read",
        either(r"tcgen05\.mma", r"tcgen05\.ld"),
        CUDNN.format("1.27.0"),
        CUDNN.format("1.28.0"),
        arguments=("quant",),
        sm_count=2,
    ),
    Bug(
        "grouped_gemm",
        "cudnn-frontend #652",
        "grouped GEMM sReLU: an accumulator is released before it is read",
        either(r"tcgen05\.mma", r"tcgen05\.ld"),
        CUDNN.format("1.27.0"),
        CUDNN.format("1.28.0"),
        arguments=("srelu",),
        sm_count=2,
    ),
    Bug(
        "top_k",
        "TensorRT-LLM #18338",
        "GVR top-k, in FlashInfer's port: the leader rewrites a bracket that other warps still read, so warps diverge",
        either(r"st\.shared", r"ld\.shared"),
        FLASHINFER,
        edits=(Edit("gvr_topk_decode.py", 3171, "cute.arch.barrier()"),),
    ),
    Bug(
        "blockscale_m128",
        "CUTLASS #3643",
        "2-CTA NVFP4 example: nobody waits for the peer's load of SFB",
        either(r"tcgen05\.cp", "TMA load"),
        f"{CUTLASS}@7107b0553",
        edits=public_bug_runs.WAITS_FOR_SFB,
        remains="the scope of arrivals is wrong (next row)",
    ),
    Bug(
        "blockscale_m128",
        "CUTLASS #3643",
        "2-CTA NVFP4 example: arrivals of CTA scope announce the peer's cp.async of SFA (with SFB awaited)",
        r"silicon: remote-arrival-scope: .* cp\.async",
        f"{CUTLASS}@7107b0553",
        edits=public_bug_runs.WIDER_SCOPE,
        arguments=("sfb_awaited",),
        remains="a warning that no proxy fence follows cp.async",
    ),
    Bug(
        "dense_blockscaled",
        "CUTLASS #2995",
        "dense block-scaled GEMM, 256 x 256 tiles: a stage of C is reused out of order",
        either(r"st\.shared", "TMA store"),
        f"{CUTLASS}@1cfbb53a2~1",
        f"{CUTLASS}@1cfbb53a2",
        sm_count=2,
    ),
)

NOT_NAMED = (
    (
        "CUTLASS #3165",
        "Four groups of 512, 32, 32 and 640 rows in clusters of 2 CTAs end without an error. PTX requires an acquiring "
        "`fence.proxy.tensormap`, in the same warp or one ordered before it, between the edit of a tensor map and its use, "
        "and no edit while a copy still reads the map. The checker models both rules, and the example keeps both. The "
        "report names no cause, and the example and its tensor maps did not change up to CUTLASS 4.7.",
    ),
    (
        "SGLang #32907",
        "PTX requires that a CTA of a cluster lives until its peers' accesses to its shared memory and barriers are complete. "
        "No access to a CTA is under way when it exits. The kernel stops at another error, before and after the fix: the "
        "wait for parity 1 of `bar_tmem_alloc` may pass before phase 0 is complete, so the second CTA frees tensor memory "
        "in use.",
    ),
)
"""Reports without a finding of their fault, and the reasons."""


class Missing(Exception):
    """Raised if a source is not in the folder."""


@dataclass(frozen=True)
class Finding:
    """A finding of the checker.

    Attributes:
        kind: kind, and severity unless it is an error.
        text: the finding's text.
        places: Python lines of both accesses.
    """

    kind: str
    text: str
    places: tuple[str, ...]

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "Finding":
        """Returns a finding of `emulate --json`."""
        kind, severity = entry["kind"], entry["severity"]
        sites = [entry[name] for name in ("site", "other") if entry.get(name) and entry[name].get("file")]
        places = tuple(f"{Path(site['file']).name}:{site['line']}" for site in sites)
        return cls(kind if severity == "error" else f"{kind} ({severity})", entry["text"], places)

    def matches(self, named: str) -> bool:
        """Whether a regular expression describes it."""
        return bool(re.search(named, f"{self.kind}: {self.text}"))

    def __str__(self) -> str:
        """Returns kind, instructions and lines, such as ``race: st.shared, ldmatrix.sync (gemm.py:253, 272)``."""
        what = re.findall(r"((?:TMA|bulk) \w+|[\w:.]+) \(cta", self.text)[:2]
        file = self.places[0].partition(":")[0] if self.places else ""
        lines = [place.removeprefix(f"{file}:") for place in self.places]
        return f"{self.kind}: {', '.join(what)}" + (f" ({file}:{', '.join(lines)})" if lines else "")


@dataclass(frozen=True)
class Outcome:
    """Errors and warnings of a run of a kernel; `stopped`: why it did not end, if it has none."""

    findings: tuple[Finding, ...] = ()
    stopped: str = ""


class Sources:
    """The user's folder of wheels and of a CUTLASS repository."""

    def __init__(self, folder: Path, scratch: Path):
        """`scratch`: folder for unpacked sources."""
        self.folder, self.scratch = folder, scratch

    def unpacked(self, source: str) -> Path:
        """Returns the folder of a source. Raises `Missing` if it is not there."""
        target = self.scratch / source
        if target.is_dir():
            return target
        if source.startswith(f"{CUTLASS}@"):
            return self._of_commit(source.partition("@")[2], target)
        wheels = sorted(self.folder.glob(f"{source}-*.whl"))
        if not wheels:
            raise Missing(f"{source}-*.whl is not in {self.folder}")
        parts = PARTS[source.rpartition("-")[0]]
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [
                name for name in wheel.namelist() if name.startswith(parts) and name.endswith((".py", ".so"))
            ]
            wheel.extractall(target, names)
        return target

    def _of_commit(self, commit: str, target: Path) -> Path:
        """Extracts the two examples of a commit that are needed."""
        repository = self.folder / CUTLASS
        git = ["git", "-C", str(repository)]
        listed = subprocess.run(
            [*git, "ls-tree", "-r", "--name-only", commit], capture_output=True, text=True
        )
        wanted = (public_bug_runs.M128, "dense_blockscaled_gemm_persistent.py")
        paths = [p for p in listed.stdout.splitlines() if "CuTeDSL" in p and p.endswith(wanted)]
        if not paths:
            raise Missing(
                f"{repository} has no commit {commit}: {listed.stderr.strip() or 'no such example'}"
            )
        target.mkdir(parents=True)
        for path in paths:
            text = subprocess.run([*git, "show", f"{commit}:{path}"], capture_output=True, check=True).stdout
            (target / path.rpartition("/")[2]).write_bytes(text)
        return target


def run(bug: Bug, folder: Path, edits: Sequence[Edit], mode: str) -> Outcome:
    """Runs a kernel under the checker in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [
            sys.executable,
            "-m",
            "nvfp4_cute.cli",
            "emulate",
            "--arch",
            "sm_100a",
            "--sm-count",
            str(bug.sm_count),
        ]
        command += ["--check", "--mode", mode, "--json", str(report)]
        command += public_bug_runs.command(bug.name, folder, edits, bug.arguments)
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return Outcome(stopped=f"killed after {SECONDS} s")
        entries = json.loads(report.read_text())["findings"] if report.is_file() else []
        findings = tuple(Finding.of(entry) for entry in entries if entry["severity"] != "note")
    if findings or not ended.returncode:
        return Outcome(findings)
    return Outcome(stopped=(ended.stderr.strip().splitlines() or ["no message"])[-1])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the bugs and prints the table. Returns 0 if all that ran are named before the fix and not after it."""
    parser = argparse.ArgumentParser(
        prog="python -m nvfp4_cute.bench.public_bugs",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="folder of the wheels and of the CUTLASS repository")
    parser.add_argument("--only", default="", metavar="REGEX", help="on report and name")
    parser.add_argument("--mode", default="eager", help="mode of the emulator (default %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the page")
    args = parser.parse_args(argv)
    rows, passed = [], True
    with tempfile.TemporaryDirectory() as scratch:
        sources = Sources(args.folder.resolve(), Path(scratch))
        for bug in BUGS:
            if not re.search(args.only, f"{bug.report} {bug.name}"):
                continue
            row, ok = _row(bug, sources, args.mode)
            print(" | ".join(row), flush=True)
            rows.append(row)
            passed = passed and ok
    if args.save:
        args.save.write_text(page(rows, args.mode))
    return 0 if passed else 1


def _row(bug: Bug, sources: Sources, mode: str) -> tuple[tuple[str, ...], bool]:
    """Runs a bug before and after its fix. Returns the row of the table, and whether it came out right."""
    fixed = bug.fixed or f"{len(bug.edits)} edit{'s' * (len(bug.edits) > 1)}"
    try:
        before = run(bug, sources.unpacked(bug.source), (), mode)
        after = run(bug, sources.unpacked(bug.fixed or bug.source), bug.edits, mode)
    except Missing as missing:
        return (bug.report, bug.fault, bug.source, f"skipped: {missing}", "", ""), True
    named = next((finding for finding in before.findings if finding.matches(bug.named)), None)
    again = any(finding.matches(bug.named) for finding in after.findings)
    others = "; ".join(dict.fromkeys(map(str, after.findings)))
    end = (
        "STILL NAMED" if again else after.stopped or (f"gone; {bug.remains or others}" if others else "clean")
    )
    row = (bug.report, bug.fault, bug.source, str(named or f"MISSED {before.stopped}"), fixed, end)
    return row, named is not None and not again and not after.stopped


def page(rows: Sequence[Sequence[str]], mode: str) -> str:
    """Returns the Markdown page of the table."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("nvidia-cutlass-dsl", "torch")
    )
    table = [("report", "fault", "released in", "finding", "fixed by", "with the fix"), ("---",) * 6, *rows]
    return "\n".join(
        (
            "# Reported faults of public kernels under the checker\n",
            f"Each kernel runs from its project's source, as released and with the fix, in {mode} mode ({versions}).",
            'A finding has its kind, both accesses and their Python lines. "clean": no finding with the fix. "gone": the',
            "finding is gone, and the text says what else the checker reports. Made by",
            "`python -m nvfp4_cute.bench.public_bugs FOLDER --save bench/results/public_bugs.md`; `--help` names the sources.\n",
            *(f"| {' | '.join(row)} |" for row in table),
            "\n## Faults that the checker does not find\n",
            *(f"- {report}: {why}" for report, why in NOT_NAMED),
            "",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
