"""`nvfp4-cute export`: writes a problem's kernel as one readable file that its server accepts."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nvfp4_cute.competition.bundle import Bundle, Line, Recipe, assemble
from nvfp4_cute.competition.rules import check_export_rules, check_server_rules, header_text
from nvfp4_cute.formats.block_format import NVFP4_PAIR, Formats
from nvfp4_cute.gpus.targets import B200
from nvfp4_cute.planning.arch import family_of
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problems import registry
from nvfp4_cute.problems.registry import Problem
from nvfp4_cute.terminal import Progress

GPU_MODE, ENTRY_POINT = "gpumode", "custom_kernel"
# Members that older versions of CuTe DSL have elsewhere, or not at all.
VERSIONS = "nvfp4_cute.kernels.common.versions"
MOVED = {"cutlass.memory": VERSIONS, "cutlass.cute.arch.inline_ptx": VERSIONS}
# Version 4.3.5 cannot launch a renamed kernel, and in 4.5.2 the division of L1 and shared memory cannot be set.
NOT_EVERYWHERE = ("set_name_prefix", "preferred_smem_carveout")
LICENCE = """\
#
# {title}
#
# Copyright the nvfp4_cute authors. Licensed under the Apache License, Version 2.0 (the "License"); you may not use this
# file except in compliance with the License. You may obtain a copy of the License at
#     http://www.apache.org/licenses/LICENSE-2.0
# Unless required by applicable law or agreed to in writing, software distributed under the License is distributed on an
# "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the License for the
# specific language governing permissions and limitations under the License.
#
# Assembled by `nvfp4-cute export {problem}`: every section is named after the source file that it was taken from,
# without what this problem does not need. {needs}
"""
TITLE = "{formats} block-scaled {what} for Blackwell {how}, from nvfp4_cute."


@dataclass(frozen=True)
class Kind:
    """Kind of answer to a problem: the module in its folder, and the file's description."""

    module: str
    how: str
    needs: str


OURS = Kind("submission", "in CuTe DSL", "Runs on nvidia-cutlass-dsl 4.3.5, 4.5.2 and 4.8.1.")
TORCHS = Kind("torch_submission", "by torch's own product", "Needs torch 2.9 or newer and a Blackwell GPU.")


def run(
    problem: str,
    output: Path,
    *,
    gpu: str | None,
    config: str | None,
    map_path: Path | None,
    kind: Kind = OURS,
    overwrite: bool = False,
    formats: Formats = NVFP4_PAIR,
) -> int:
    """Writes the submission and describes it. Returns 0.

    Args:
        problem: name of a folder under problems/.
        output: the file to write.
        gpu: runner that the header names; None means the problem's first.
        config: name of a KernelConfig for every shape, instead of the chosen ones.
        map_path: also write the origin of every line to this file.
        kind: kind of the answer.
        overwrite: whether existing files are replaced.
        formats: formats of the operands, see :func:`make_submission`.

    Raises:
        ValueError: no such problem, config, or runner; the problem has no kernel; or a file exists. Nothing is written.
    """
    existing = [str(p) for p in (output, map_path) if p and p.exists() and not overwrite]
    if existing:
        raise ValueError(f"{', '.join(existing)} would be overwritten; name another file, or pass --force")
    with Progress(desc="export", unit="source file") as bar:
        bundle = make_submission(
            problem, gpu=gpu, config=config, kind=kind, formats=formats, reads=bar.update
        )
    output.write_text(bundle.text, encoding="utf-8")
    if map_path:
        map_path.write_text(bundle.map_text(), encoding="utf-8")
    size = len(bundle.text.encode())
    print(f"{output}: {len(bundle.lines):,} lines, {size:,} bytes", file=sys.stderr)
    for number, line in enumerate(bundle.lines, start=1):
        if "refused word in a comment" in line.reasons:
            place = f"{line.source}:{line.number}"
            print(
                f"  line {number}: reworded a comment that a server would refuse ({place})", file=sys.stderr
            )
    if formats == NVFP4_PAIR:
        print(f"try it: nvfp4-cute eval {output}", file=sys.stderr)
    else:
        print("custom_kernel takes operands of these formats; the harness makes NVFP4 ones", file=sys.stderr)
    return 0


def make_submission(
    problem: str,
    *,
    gpu: str | None = None,
    config: str | None = None,
    kind: Kind = OURS,
    formats: Formats = NVFP4_PAIR,
    reads: Callable[[], object] = lambda: None,
) -> Bundle:
    """Returns the submission, line by line.

    Args:
        formats: formats of the operands. The problem's own inputs are NVFP4; the caller makes inputs of other formats.
        reads: called after each read of a source file.

    Raises:
        ValueError: see :func:`run`; or the result breaks a rule of the harness.
    """
    found = registry.load(problem)
    root = f"{registry.PACKAGE}.{problem}.{kind.module}"
    if importlib.util.find_spec(root) is None:
        raise ValueError(f"problems/{problem} has no {kind.module}.py: nothing to export")
    runners = found.harness.gpus
    if gpu is not None and gpu not in runners:
        raise ValueError(f"--gpu {gpu}: the leaderboard's runners are {', '.join(runners)}")
    frozen = _frozen(found, config, kind, formats)
    body = assemble(Recipe(root, (ENTRY_POINT,), NOT_EVERYWHERE, MOVED, frozen), reads)
    name = problem.removeprefix("nvfp4_").replace("_", " ").replace("gemm", "GEMM")
    names = " x ".join(dict.fromkeys(format.title for format in formats))
    title = TITLE.format(formats=names, what=name, how=kind.how)
    licence = LICENCE.format(title=title, problem=problem, needs=kind.needs)
    head = header_text(problem, gpu or runners[0]) + licence + "\n"
    lines = [Line(text, reasons=("header",)) for text in head.splitlines()]
    bundle = Bundle((*lines, *body.lines))
    findings = check_server_rules(bundle.text.encode()) + check_export_rules(bundle.text)
    if findings:
        listed = "\n".join(f"  {finding}" for finding in findings)
        raise ValueError(f"the submission for {problem} breaks rules of {GPU_MODE}:\n{listed}")
    return bundle


def _frozen(problem: Problem, config: str | None, kind: Kind, formats: Formats) -> dict[str, str]:
    """Returns constants with replaced values: name to Python expression."""
    names = ",".join(format.name for format in formats)
    if kind is not OURS:
        if formats != NVFP4_PAIR:
            raise ValueError(f"--formats {names}: {kind.how} is of NVFP4; leave --formats or --torch out")
        return {}
    frozen_constants = importlib.import_module(str(problem.submission)).frozen_constants
    options = inspect.signature(frozen_constants).parameters
    if config is not None and "config" not in options:
        raise ValueError(
            f"--config {config}: {problem.name} has no kernel configs to choose from; leave it out"
        )
    chosen = {} if config is None else {"config": KernelConfig.from_name(config)}
    if formats == NVFP4_PAIR:
        return frozen_constants(**chosen)
    if "formats" not in options:
        raise ValueError(
            f"--formats {names}: the kernel of {problem.name} multiplies NVFP4 alone; leave it out"
        )
    pairs = family_of(B200.arch).MMA
    if formats not in pairs:
        legal = "; ".join(f"{a},{b}" for a, b in pairs)
        raise ValueError(
            f"--formats {names}: the kernel of {problem.name} does not multiply them; use one of {legal}"
        )
    return frozen_constants(**chosen, formats=formats)
