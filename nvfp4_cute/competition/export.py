"""`nvfp4-cute export`: a problem's kernel as one readable file that its server accepts."""

import importlib
import sys
from pathlib import Path

from nvfp4_cute.competition.bundle import Bundle, Line, Recipe, assemble
from nvfp4_cute.competition.rules import check_export_rules, check_server_rules, header_text
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.problems import registry

# What older versions of CuTe DSL have elsewhere, or not at all.
VERSIONS = "nvfp4_cute.kernels.common.versions"
MOVED = {"cutlass.memory": VERSIONS, "cutlass.cute.arch.inline_ptx": VERSIONS}
# Version 4.3.5 cannot launch a kernel that was renamed, and 4.5.2 has no say in how L1 and shared memory divide.
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
# without what this problem does not need. Runs on nvidia-cutlass-dsl 4.3.5, 4.5.2 and 4.8.1.
"""
TITLE = "NVFP4 block-scaled {what} for Blackwell in CuTe DSL, from nvfp4_cute."


def run(problem: str, output: Path, *, gpu: str | None, config: str | None, map_path: Path | None) -> int:
    """Write the submission, and say what it is; 0.

    Args:
        problem: name of a folder under problems/.  output: the file to write.
        gpu: runner that the header names; None takes the problem's first.
        config: name of a KernelConfig for every shape, instead of the chosen ones.
        map_path: also write where every line comes from.

    Raises:
        ValueError: no such problem, config, or runner, or the problem has no kernel.
    """
    bundle = make_submission(problem, gpu=gpu, config=config)
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
    print(f"try it: nvfp4-cute eval {output} --problem {problem}", file=sys.stderr)
    return 0


def make_submission(problem: str, *, gpu: str | None = None, config: str | None = None) -> Bundle:
    """The submission, line by line.

    Raises:
        ValueError: as :func:`run`; or the result breaks a rule of the server.
    """
    found = registry.load(problem)
    if found.submission is None:
        raise ValueError(f"there is no kernel for {problem} yet: nothing to export")
    runner = gpu or found.harness.gpus[0]
    frozen = importlib.import_module(found.submission).frozen_constants()
    if config:
        if "CONFIGS" not in frozen:
            raise ValueError(
                f"--config {config}: {problem} has no kernel configs to choose from; leave it out"
            )
        frozen = {"DEFAULT_CONFIG": repr(KernelConfig.from_name(config)), "CONFIGS": "{}"}
    body = assemble(Recipe(found.submission, ("custom_kernel",), NOT_EVERYWHERE, MOVED, frozen))
    title = TITLE.format(what=problem.removeprefix("nvfp4_").replace("_", " ").replace("gemm", "GEMM"))
    head = header_text(problem, runner) + LICENCE.format(title=title, problem=problem) + "\n"
    lines = [Line(text, reasons=("header",)) for text in head.splitlines()]
    bundle = Bundle((*lines, *body.lines))
    findings = check_server_rules(bundle.text.encode()) + check_export_rules(bundle.text)
    if findings:
        listed = "\n".join(f"  {finding}" for finding in findings)
        raise ValueError(f"the submission for {problem} breaks rules of its server:\n{listed}")
    return bundle
