"""The timing model against competition kernels in CuTe DSL whose times on a B200 were published.

    python -m nvfp4_cute.bench.validation.published FOLDER > bench/results/b200_published.json

FOLDER holds checkouts of the repositories that KERNELS names. The kernels need CuTe DSL 4.3, so use
`.venv/dsl-4.3.5/bin/python`, which `make test-dsl` makes. Files run unmodified, on the competition's benchmark shapes.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

RESULTS = Path(__file__).parents[1] / "results" / "b200_published.json"


@dataclass(frozen=True)
class PublishedKernel:
    """A submission and its times on a B200 in the competition's harness.

    Attributes:
        name: name for people.
        problem: name in ``nvfp4_cute.problems``.
        path: path of the file, from the repository's owner on.
        case_us: microseconds of each benchmark case, if published.
        geomean_us: their geometric mean.
        source: source of the times.
    """

    name: str
    problem: str
    path: str
    case_us: tuple[float, ...] | None
    geomean_us: float
    source: str


KERNELS = (
    PublishedKernel(
        "winning entry of nvfp4_dual_gemm",
        "nvfp4_dual_gemm",
        "teelaitila/nvfp4_gpumode/dual_gemm/others/guag.py",
        (12.4, 15.3, 10.0, 14.4),
        12.86,
        "the file's header",
    ),
    PublishedKernel(
        "template of nvfp4_gemm",
        "nvfp4_gemm",
        "gpu-mode/reference-kernels/problems/nvidia/nvfp4_gemm/submission.py",
        None,
        56.87,
        "gau-nernst/gpu-mode-kernels, nvidia/nvfp4_gemm/README.md",
    ),
)


def model(kernel: PublishedKernel, folder: Path) -> dict:
    """Checks the kernel's results and models its times. Returns the row for the JSON file."""
    command = [sys.executable, "-m", "nvfp4_cute.cli", "eval", str(folder / kernel.path)]
    command += ["--problem", kernel.problem, "--mode", "benchmark", "--device", "emulator"]
    done = subprocess.run([*command, "--ignore-rules", "--json"], stdout=subprocess.PIPE, check=False)
    report = json.loads(done.stdout)
    if not report["passed"]:
        raise SystemExit(f"{kernel.path}: {report['error'] or [case['message'] for case in report['cases']]}")
    return {
        "path": kernel.path,
        "cutlass_dsl": metadata.version("nvidia-cutlass-dsl"),
        "geomean_us": report["geomean_us"],
        "case_us": {case["name"]: case["mean"] for case in report["cases"]},
    }


def table(results: Path = RESULTS) -> str:
    """Returns Markdown: published and modelled microseconds."""
    modelled = {row["path"]: row for row in json.loads(results.read_text())}
    lines = ["| kernel and case | published us | modelled us | error |", "|---|---:|---:|---:|"]
    for kernel in KERNELS:
        row = modelled[kernel.path]
        pairs = list(zip(row["case_us"].items(), kernel.case_us or (), strict=False))
        rows = [(name, published, ours) for (name, ours), published in pairs]
        rows.append(("geometric mean", kernel.geomean_us, row["geomean_us"]))
        for name, published, ours in rows:
            error = 100 * (ours / published - 1)
            lines.append(f"| {kernel.name}, {name} | {published:.2f} | {ours:.2f} | {error:+.0f} % |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Models all kernels and prints the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="holds OWNER/NAME for every repository")
    folder = parser.parse_args(argv).folder
    print(json.dumps([model(kernel, folder) for kernel in tqdm(KERNELS, unit="kernel")], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
