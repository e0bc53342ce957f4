"""How well the timing model predicts: CUTLASS's Hopper kernels, modelled here and measured on an H200.

    python -m nvfp4_cute.bench.timing_model capture CHECKOUT CAPTURES      keeps every launch
    python -m nvfp4_cute.bench.timing_model trace CAPTURES                 records what happens in it
    python -m nvfp4_cute.bench.measure_launches CAPTURES measured.json     on an H200: measures the same launches
    python -m nvfp4_cute.bench.timing_model table CAPTURES measured.json > bench/results/timing_model.md

CHECKOUT is one of CUTLASS; its scripts run unmodified. None of the cases set a constant of the model.
"""

import argparse
import json
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from nvfp4_cute.bench.capture import CARRIED_BYTES, Capture
from nvfp4_cute.emulator.code import Code
from nvfp4_cute.emulator.driver import param_buffer
from nvfp4_cute.emulator.machine import Launch, Machine
from nvfp4_cute.emulator.memory import host_view
from nvfp4_cute.emulator.ptx import parse
from nvfp4_cute.emulator.script import run_script
from nvfp4_cute.emulator.timing import replay
from nvfp4_cute.emulator.timing_record import Recorder
from nvfp4_cute.emulator.virtual_gpu import VirtualGpu, aligned_bytes
from nvfp4_cute.targets import H200
from nvfp4_cute.timing_constants import constants_of

FOLDER = Path("examples/python/CuTeDSL/cute/hopper/kernel")
DENSE, PERSISTENT, GROUPED = (
    "dense_gemm/dense_gemm.py", "dense_gemm/dense_gemm_persistent.py", "grouped_gemm/grouped_gemm.py",
)  # fmt: skip

RANKED_GAP = 1.10
"""Two measured times that differ by more than this must be modelled in the same order."""


@dataclass(frozen=True)
class Case:
    """A script and its arguments."""

    script: str
    arguments: str

    def __str__(self) -> str:
        return f"{Path(self.script).stem} {self.arguments}"

    @property
    def file_name(self) -> str:
        """The case as a file name, without a suffix."""
        return re.sub(r"[^A-Za-z0-9]+", "_", str(self)).strip("_")


def _gemms(script: str, *rows: tuple[str, str, str]) -> list[Case]:
    return [
        Case(script, f"--mnkl {mnk},1 --tile_shape_mn {tile} --cluster_shape_mn {cluster}")
        for mnk, tile, cluster in rows
    ]


CASES: tuple[Case, ...] = (
    *_gemms(
        PERSISTENT,
        ("1024,1024,1024", "128,128", "1,1"),
        ("1024,1024,1024", "64,128", "1,1"),
        ("1024,1024,8192", "128,128", "1,1"),
        ("1024,1024,2048", "64,64", "1,1"),
        ("2048,2048,512", "128,128", "1,1"),
        ("2048,2048,512", "128,256", "1,1"),
        ("2048,2048,2048", "128,128", "1,1"),
        ("2048,2048,2048", "128,256", "2,1"),
        ("2048,2048,2048", "64,256", "1,1"),
        ("2048,2048,4096", "128,256", "1,1"),
        ("2048,2048,4096", "128,256", "1,2"),
        ("4096,4096,1024", "128,256", "2,1"),
        ("4096,4096,1024", "128,128", "1,1"),
        ("4096,2048,4096", "128,256", "2,1"),
        ("128,8192,4096", "128,128", "1,1"),
        ("128,8192,4096", "64,128", "1,1"),
        ("128,16384,8192", "128,128", "1,1"),
        ("64,16384,8192", "64,128", "1,1"),
        ("8192,2048,512", "128,256", "1,1"),
    ),
    *_gemms(
        DENSE,
        ("1024,1024,1024", "128,128", "1,1"),
        ("2048,2048,2048", "128,128", "1,1"),
        ("2048,2048,2048", "128,256", "2,1"),
        ("2048,2048,512", "64,64", "1,1"),
        ("4096,4096,512", "128,128", "1,1"),
        ("128,8192,4096", "128,64", "1,1"),
        ("4096,2048,2048", "128,128", "2,2"),
        ("1024,1024,4096", "64,128", "1,2"),
    ),
    *(
        Case(GROUPED, f"--num_groups {len(sizes)} --problem_sizes_mnkl {','.join(f'({s},1)' for s in sizes)} "
             f"--tile_shape_mn {tile} --cluster_shape_mn {cluster}")
        for sizes, tile, cluster in (
            (("1024,1024,1024", "512,2048,1024"), "128,128", "1,1"),
            (("128,4096,2048",) * 4, "128,128", "1,1"),
            (("256,2048,4096", "1024,512,2048", "128,4096,1024"), "128,256", "1,1"),
            (("2048,2048,1024",) * 2, "128,256", "2,1"),
        )
    ),
)  # fmt: skip


# ---- launches ------------------------------------------------------------------------------------------------------
class CapturingGpu(VirtualGpu):
    """A virtual H200 that keeps its first launch, and runs none."""

    def __init__(self) -> None:
        """Nothing launched."""
        super().__init__(H200.arch, H200.num_sms)
        self.capture: Capture | None = None
        self._texts: dict[str, tuple[str, bytes]] = {}

    def register(self, ptx: str, cubin: bytes | None = None) -> tuple[str, ...]:
        """Make kernels known, and keep their code."""
        names = super().register(ptx, cubin)
        self._texts.update(dict.fromkeys(names, (ptx, cubin or b"")))
        return names

    def run(self, launch: Launch) -> None:
        """Keep a launch."""
        if self.capture is not None:
            return
        name = launch.code.entry.name
        ranges = tuple((address, nbytes) for _, address, nbytes in self.live_memory())
        contents = {
            i: host_view(address, nbytes).copy()
            for i, (address, nbytes) in enumerate(ranges)
            if nbytes <= CARRIED_BYTES
        }
        self.capture = Capture(
            name, *self._texts[name], launch.params.copy(), launch.smem_bytes, launch.grid, launch.block, launch.cluster,
            ranges, contents,
        )  # fmt: skip


def capture_one(checkout: Path, folder: Path, case: Case) -> None:
    """Run one case's script and keep its launch."""
    gpu = CapturingGpu()
    arguments = ["--skip_ref_check", "--iterations", "1", "--warmup_iterations", "0", *case.arguments.split()]
    outcome = run_script(checkout / FOLDER / case.script, arguments, gpu)
    if gpu.capture is None:
        raise outcome.error or RuntimeError(f"{case} launched nothing")
    gpu.capture.save(folder / f"{case.file_name}.npz")


def capture(checkout: Path, folder: Path, jobs: int) -> None:
    """Keep the launches that the folder lacks, each from a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [i for i, case in enumerate(CASES) if not (folder / f"{case.file_name}.npz").exists()]

    def run(index: int) -> str:
        command = [
            sys.executable,
            "-m",
            "nvfp4_cute.bench.timing_model",
            "capture",
            str(checkout),
            str(folder),
        ]
        done = subprocess.run([*command, "--only", str(index)], capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else f"{CASES[index]}: {done.stderr[-600:]}"

    with ThreadPoolExecutor(jobs) as pool:
        for fault in tqdm(pool.map(run, missing), total=len(missing), unit="case"):
            if fault:
                tqdm.write(fault)


# ---- traces --------------------------------------------------------------------------------------------------------
def trace_one(path: Path) -> str:
    """Execute a captured launch without its data and keep its trace beside it; its name and the seconds it took."""
    launched, began = Capture.load(path), time.perf_counter()
    tensors = [aligned_bytes(nbytes) for _, nbytes in launched.ranges]
    bases = [int(tensor.ctypes.data) for tensor in tensors]
    for number, data in launched.contents.items():
        tensors[number][:] = launched.moved(data, bases)
    machine = Machine(H200.num_sms, jobs=1)
    recorder = machine.recorder = Recorder()
    for i, tensor in enumerate(tensors):
        machine.memory.add_range(f"tensor {i}", bases[i], tensor.size)
    program = parse(launched.ptx)
    code = Code(program, program.entries[launched.kernel], timed=True)
    params = param_buffer(len(launched.params))
    params[: len(launched.params)] = launched.moved(launched.params, bases)
    launch = Launch(code, launched.grid, launched.block, launched.cluster, launched.smem_bytes, params)  # type: ignore[arg-type]
    machine.run(launch)
    path.with_suffix(".pickle").write_bytes(pickle.dumps(recorder.take(launch)))
    return f"{path.stem}: {time.perf_counter() - began:.1f} s"


def trace(folder: Path, jobs: int) -> None:
    """Trace the launches whose trace the folder lacks."""
    missing = [path for path in sorted(folder.glob("*.npz")) if not path.with_suffix(".pickle").exists()]
    missing.sort(key=lambda path: path.stat().st_size)
    with ProcessPoolExecutor(jobs) as pool:
        for line in tqdm(pool.map(trace_one, missing), total=len(missing), unit="launch"):
            tqdm.write(line)


# ---- the table -----------------------------------------------------------------------------------------------------
def table(folder: Path, measured: dict[str, float]) -> str:
    """Markdown: every case measured and modelled, the errors, and pairs in the wrong order."""
    rows, constants = [], constants_of(H200)
    for case in CASES:
        path = folder / f"{case.file_name}.pickle"
        if path.stem in measured and path.exists():
            timing = replay(constants, pickle.loads(path.read_bytes()))
            bound = max(timing.critical, key=lambda cause: timing.critical[cause])
            rows.append((str(case), measured[path.stem], timing.us, bound, timing.mma_percent))
    errors = [abs(us / real - 1) for _, real, us, _, _ in rows]
    pairs = [(a, b) for a, b in combinations(rows, 2) if max(a[1] / b[1], b[1] / a[1]) > RANKED_GAP]
    versions = [(a, b) for a, b in pairs if _problem(a[0]) == _problem(b[0])]
    lines = [
        "| kernel and case | measured us | modelled us | error | critical path | matrix pipes busy |",
        "|---|---:|---:|---:|---|---:|",
        *(
            f"| {name} | {real:.2f} | {us:.2f} | {100 * (us / real - 1):+.0f} % | {bound} | {mma:.0f} % |"
            for name, real, us, bound, mma in rows
        ),
        "",
        f"{len(rows)} cases. Median error {100 * median(errors):.1f} %, worst {100 * max(errors):.1f} %.",
        _ranking("Versions of a kernel for one problem", versions),
        _ranking("All pairs", pairs),
    ]
    return "\n".join(lines)


def _problem(name: str) -> str:
    words = name.split()
    return (
        words[words.index("--mnkl") + 1]
        if "--mnkl" in words
        else words[words.index("--problem_sizes_mnkl") + 1]
    )


def _ranking(title: str, pairs: list[tuple[Any, Any]]) -> str:
    wrong = [(a, b) for a, b in pairs if (a[1] < b[1]) != (a[2] < b[2])]
    text = f"{title}: {len(pairs)} whose measured times differ by over {100 * (RANKED_GAP - 1):.0f} %, "
    text += f"{len(wrong)} modelled in the wrong order."
    return "\n".join([text, *(f"  - {a[0]} / {b[0]}" for a, b in wrong)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the verbs in the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    keep = verbs.add_parser("capture", help="keep the launch of every case")
    keep.add_argument("checkout", type=Path, help="a checkout of CUTLASS")
    follow = verbs.add_parser("trace", help="record what every launch does")
    show = verbs.add_parser("table", help="model every launch and compare with measured times")
    for verb in (keep, follow, show):
        verb.add_argument("captures", type=Path, help="folder of launches and traces")
    for verb in (keep, follow):
        verb.add_argument("--jobs", type=int, default=1, help="cases at a time (default %(default)s)")
    keep.add_argument("--only", type=int, help="number of one case, run in this process")
    show.add_argument("measured", type=Path, help="what measure_launches wrote")
    args = parser.parse_args(argv)
    if args.verb == "table":
        print(table(args.captures, json.loads(args.measured.read_text())["us"]))
    elif args.verb == "trace":
        trace(args.captures, args.jobs)
    elif args.only is not None:
        capture_one(args.checkout, args.captures, CASES[args.only])
    else:
        capture(args.checkout, args.captures, args.jobs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
