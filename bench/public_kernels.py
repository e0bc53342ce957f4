"""Other people's kernels on the virtual GPU: CUTLASS's CuTe DSL examples, from a user's checkout, unmodified.

`python -m nvfp4_cute.bench.public_kernels CHECKOUT` runs each with small sizes through `nvfp4-cute emulate` and prints
a table. Every script compares its own result with its own reference; it passes if it ends with exit code 0.
"""

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

EXAMPLES = Path("examples/python/CuTeDSL/cute")
"""Where a CUTLASS checkout keeps the scripts."""

SECONDS = 600
"""After this long a script is stopped and counts as failed."""

MESSAGE_CHARACTERS = 600


@dataclass(frozen=True)
class Kernel:
    """A script, the architecture it is for, and its arguments."""

    script: str
    arch: str
    arguments: str = ""

    def __str__(self) -> str:
        return f"{self.script} {self.arguments}".strip()


@dataclass(frozen=True)
class Result:
    """How a script ended; `instructions` counts warp instructions, None if it launched nothing."""

    kernel: Kernel
    passed: bool
    seconds: float
    instructions: int | None
    message: str


def _variants(arch: str, script: str, *arguments: str) -> list[Kernel]:
    return [Kernel(script, arch, text) for text in arguments]


TUTORIAL = "blackwell/tutorial/tutorial_gemm"
NVFP4 = "--a_dtype Float4E2M1FN --b_dtype Float4E2M1FN --sf_dtype Float8E4M3FN --sf_vec_size 16"
MXFP4 = "--a_dtype Float4E2M1FN --b_dtype Float4E2M1FN --sf_dtype Float8E8M0FNU --sf_vec_size 32"
MXFP8 = "--a_dtype Float8E4M3FN --b_dtype Float8E4M3FN --sf_dtype Float8E8M0FNU --sf_vec_size 32"
MIXED = "--a_dtype Float4E2M1FN --b_dtype Float8E4M3FN --sf_dtype Float8E8M0FNU --sf_vec_size 32"
GROUPS = "--num_groups 2 --problem_sizes_mnkl (256,256,128,1),(136,128,256,1)"
NVFP4_AB = "--ab_dtype Float4E2M1FN --sf_dtype Float8E4M3FN --sf_vec_size 16"
GROUP_TILES = (
    ("128,128", "1,1"), ("128,256", "1,1"), ("256,128", "2,1"), ("256,256", "2,1"),
    ("128,128", "1,2"), ("128,128", "2,1"), ("128,128", "2,2"), ("256,128", "4,1"),
)  # fmt: skip

KERNELS: tuple[Kernel, ...] = (
    *(
        Kernel(f"{TUTORIAL}/fp16_gemm_{name}.py", "sm_100a", "--mnk 512,256,128")
        for name in ("0", "1", "2", "3", "3_1", "4", "5", "6")
    ),
    *(Kernel(f"{TUTORIAL}/nvfp4_gemm_{i}.py", "sm_100a", "--mnkl 256,256,512,1") for i in (0, 1)),
    *_variants(
        "sm_100a",
        "blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py",
        f"--mnkl 256,256,256,2 {NVFP4}",
        f"--mnkl 256,256,256,1 {MXFP4} --c_dtype Float32",
        f"--mnkl 256,256,256,1 {MXFP8} --c_dtype BFloat16",
        f"--mnkl 256,256,256,1 {MXFP8} --a_major m --b_major n --c_major m",
        f"--mnkl 512,256,256,1 {NVFP4} --mma_tiler_mn 256,128 --cluster_shape_mn 2,1",
        f"--mnkl 512,256,256,1 {MXFP8} --mma_tiler_mn 256,256 --cluster_shape_mn 2,1",
        f"--mnkl 256,512,256,1 {NVFP4} --mma_tiler_mn 128,64 --cluster_shape_mn 1,2",
        f"--mnkl 512,384,256,1 {NVFP4} --mma_tiler_mn 128,192 --cluster_shape_mn 2,2",
        f"--mnkl 1024,512,256,1 {NVFP4} --mma_tiler_mn 256,128 --cluster_shape_mn 4,4",
        f"--mnkl 512,512,256,1 {MXFP4} --mma_tiler_mn 128,128 --cluster_shape_mn 4,4",
    ),
    *_variants(
        "sm_100a",
        "blackwell/kernel/blockscaled_grouped_gemm/grouped_blockscaled_gemm.py",
        *(
            f"{GROUPS} {NVFP4_AB} --mma_tiler_mn {tile} --cluster_shape_mn {cluster}"
            for tile, cluster in GROUP_TILES
        ),
        f"{GROUPS} --ab_dtype Float8E4M3FN --sf_dtype Float8E8M0FNU --sf_vec_size 32 --host_problem_shape_available",
    ),
    *_variants(
        "sm_100a",
        "blackwell/kernel/dense_gemm/dense_gemm_persistent.py",
        "--mnkl 256,256,128,1",
        "--mnkl 256,256,128,2 --ab_dtype Float16 --c_dtype Float16 --use_tma_store",
        "--mnkl 512,256,128,1 --ab_dtype Float8E4M3FN --c_dtype Float16 --use_2cta_instrs --mma_tiler_mn 256,128 "
        "--cluster_shape_mn 2,1 --use_tma_store",
        "--mnkl 256,256,128,1 --ab_dtype BFloat16 --a_major m --b_major n --c_major m --cluster_shape_mn 2,2",
    ),
    *_variants(
        "sm_100a",
        "blackwell/kernel/grouped_gemm/grouped_gemm.py",
        "",
        "--tensormap_update_mode GMEM --host_problem_shape_available",
        "--use_2cta_instrs --mma_tiler_mn 256,128 --cluster_shape_mn 2,1",
    ),
    *_variants(
        "sm_120a",
        "blackwell_geforce/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_cooperative.py",
        f"--mnkl 256,256,256,1 {NVFP4}",
        f"--mnkl 256,256,256,1 {MXFP4}",
        f"--mnkl 256,256,256,1 {MXFP8}",
        f"--mnkl 256,256,256,1 {MIXED}",
    ),
    *_variants(
        "sm_120a",
        "blackwell_geforce/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_pingpong.py",
        f"--mnkl 256,256,256,1 {NVFP4}",
        f"--mnkl 256,256,256,1 {MXFP8}",
    ),
    *_variants(
        "sm_90a",
        "hopper/kernel/dense_gemm/dense_gemm_persistent.py",
        "--mnkl 256,256,128,1",
        "--mnkl 256,256,128,2 --tile_shape_mn 128,256 --cluster_shape_mn 2,1",
        "--mnkl 256,256,128,1 --a_dtype Float8E4M3FN --b_dtype Float8E4M3FN --c_dtype Float16",
        "--mnkl 256,256,128,1 --a_major m --b_major n --c_major m --cluster_shape_mn 1,2",
    ),
    *_variants(
        "sm_90a",
        "hopper/kernel/grouped_gemm/grouped_gemm.py",
        "--num_groups 2 --problem_sizes_mnkl (128,128,128,1),(256,128,64,1)",
        "--num_groups 2 --problem_sizes_mnkl (128,128,128,1),(256,128,64,1) --tensormap_update_mode GMEM "
        "--cluster_shape_mn 2,1",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the kernels; return 0 if all of them pass, else 1."""
    parser = argparse.ArgumentParser(prog="python -m nvfp4_cute.bench.public_kernels", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a CUTLASS checkout")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="regular expression on script and arguments"
    )
    parser.add_argument("--jobs", type=int, default=2, help="scripts at a time (default %(default)s)")
    args = parser.parse_args(argv)
    folder = args.checkout / EXAMPLES
    if not folder.is_dir():
        parser.error(f"{args.checkout} is no CUTLASS checkout: there is no {EXAMPLES} in it")
    selected = [kernel for kernel in KERNELS if re.search(args.only, f"{kernel.arch} {kernel}")]
    if not selected:
        parser.error(f"no kernel matches {args.only!r}")
    results = run_all(selected, folder, args.jobs)
    print(table(results))
    passed = sum(result.passed for result in results)
    print(f"{passed} of {len(results)} pass their own checks")
    return 0 if passed == len(results) else 1


def run_all(kernels: Sequence[Kernel], folder: Path, jobs: int) -> list[Result]:
    """Run kernels, `jobs` at a time, with a bar; failures are shown when they happen. Results in the given order."""
    size = shutil.get_terminal_size()
    results: dict[Kernel, Result] = {}
    with (
        ThreadPoolExecutor(jobs) as pool,
        tqdm(total=len(kernels), unit="kernel", disable=None, ncols=size.columns, nrows=size.lines) as bar,
    ):
        for future in as_completed([pool.submit(run_one, kernel, folder) for kernel in kernels]):
            result = future.result()
            results[result.kernel] = result
            if bar.disable or not result.passed:
                verdict = "pass" if result.passed else f"FAIL: {result.message}"
                tqdm.write(f"{result.kernel.arch} {result.kernel}: {result.seconds:.1f} s, {verdict}")
            bar.update()
    return [results[kernel] for kernel in kernels]


def run_one(kernel: Kernel, folder: Path) -> Result:
    """Run one kernel in a process of its own."""
    command = [sys.executable, "-m", "nvfp4_cute.cli", "emulate", "--arch", kernel.arch, "--stats"]
    command += [str(folder / kernel.script), *kernel.arguments.split()]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Result(kernel, False, SECONDS, None, f"stopped after {SECONDS} s")
    seconds = time.perf_counter() - started
    counted = re.search(r"launches, ([\d,]+) warp instructions", done.stderr)
    instructions = int(counted.group(1).replace(",", "")) if counted else None
    return Result(kernel, done.returncode == 0, seconds, instructions, _last_words(done.stderr))


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    emulator = [line for line in lines if line.startswith("nvfp4-cute emulate:")]
    return (emulator or lines or ["no message"])[-1][-MESSAGE_CHARACTERS:]


def table(results: Sequence[Result]) -> str:
    """One line a kernel."""
    header = ("script", "arch", "arguments", "result", "s", "warp instr.")
    lines = [header, *map(_cells, results)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cells(result: Result) -> tuple[str, ...]:
    instructions = "-" if result.instructions is None else f"{result.instructions:,}"
    verdict = "pass" if result.passed else "FAIL"
    kernel = result.kernel
    return (
        Path(kernel.script).name,
        kernel.arch,
        kernel.arguments,
        verdict,
        f"{result.seconds:.1f}",
        instructions,
    )


if __name__ == "__main__":
    raise SystemExit(main())
